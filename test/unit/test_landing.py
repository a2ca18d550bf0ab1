"""Prefixes that come in two legs, whole pages first: exact whatever was known of the cache, and used where it pays."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from sglang.srt.sparse_kv import landing
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.landing import Absent, Landing, runs_of
from sglang.srt.sparse_kv.ops import pinned, reference
from sglang.srt.sparse_kv.runtime import LONG_UNUSED
from sglang.srt.sparse_kv.transfer import CPU_TRANSFERS
from sparse_rig import Rig, counters, resident, small_blocks

PAGE = 8
GEOMETRY = Geometry(5, 8, 4, 16, PAGE, 100, 60, 4, torch.float32)


def with_landing(rig: Rig, pages: int = 2) -> Rig:
    """Pieces of so few pages that a block needs several turns of both places."""
    rig.prefill.landing = made = Landing(rig.runtime)
    made.places = made.places[:, :pages].clone().fill_(float("nan"))
    return rig


def counting(rig: Rig) -> list[int]:
    """Pages of each call of `land`."""
    landed: list[int] = []
    land = rig.runtime.ops.land
    rig.runtime.ops.land = lambda view, runs, place: (landed.append(int(runs[:, 2].sum())), land(view, runs, place))
    return landed


@pytest.fixture(autouse=True)
def every_page_is_worth_it(monkeypatch):
    monkeypatch.setattr(landing, "FEW", 1)
    monkeypatch.setattr(landing, "ASKED", 1)


@pytest.mark.parametrize("seed", range(30))
def test_runs_name_each_page_that_lands_once(seed):
    random = np.random.default_rng(seed)
    pages = random.permutation(40)[: random.integers(1, 30)] if seed % 2 else np.arange(30) + seed
    pages = np.sort(pages) if seed % 3 else pages
    due = random.random(len(pages)) < random.random()
    runs = runs_of(pages, due)
    named = [(page + i, place + i) for page, place, count in runs.tolist() for i in range(count)]
    assert named == [(pages[i], i) for i in np.flatnonzero(due)]
    joined = [(a, b) for a, b in itertools.pairwise(named) if b == (a[0] + 1, a[1] + 1)]
    assert len(runs) == len(named) - len(joined), "neighbours go in one run"
    assert runs.dtype == np.int64 and runs.flags.c_contiguous


def story(rig: Rig) -> None:
    """Prefixes of which all, some or nothing is resident, whole and in part, of two requests that share pages."""
    for req in (1, 2, 3):
        rig.start(req)
    rig.extend({1: 20 * PAGE - 3, 3: 5})
    rig.runtime.flush()
    rig.extend({1: PAGE, 3: 1})
    rig.fork(2, 1, 12 * PAGE)
    rig.decode([1, 3])
    for _ in range(LONG_UNUSED + 8):
        rig.runtime.tick()
    rig.extend({2: 9 * PAGE + 1, 1: 2, 3: 40})
    rig.runtime.flush()
    rig.extend({2: 1, 1: PAGE + 1})
    rig.decode([1, 2])
    rig.extend({3: PAGE})
    rig.runtime.cache.check()


@pytest.mark.parametrize("transfer", sorted(set(CPU_TRANSFERS) - {"oracle", "broken"}))
@pytest.mark.parametrize("residency", ["all", "none"])
def test_what_lands_is_exact(transfer, residency):
    for seed in range(3):
        rig = with_landing(small_blocks(Rig(seed=seed, pages=90, context=400, requests=3, residency=residency), 7))
        rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width * 3})
        rig.runtime.transfer = CPU_TRANSFERS[transfer](seed)
        landed = counting(rig)
        story(rig)
        assert sum(landed) > 20 and max(landed) == 2


@pytest.mark.parametrize("seed", range(6))
def test_what_was_known_of_the_cache_may_be_wrong(seed, monkeypatch):
    """Pages land that are resident, pages are missing that were not: tables are asked again."""
    rig = with_landing(small_blocks(Rig(seed=seed, pages=90, context=400, requests=3), 7))
    rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width * 3})
    random = torch.Generator().manual_seed(seed)

    def guessed(views, pages):
        shape = (len(views), len(pages))
        return torch.where(torch.rand(shape, generator=random) < 0.6, rig.geometry.kv_heads, 0).to(torch.uint8)

    rig.runtime.ops.absent = guessed
    landed = counting(rig)
    story(rig)
    assert landed


@pytest.mark.parametrize("lost", [None, 1])
def test_a_layer_that_lacks_nothing_is_not_planned(lost):
    """It is told apart by the question that landing asks; a layer beside it that lacks a page gives slots."""
    rig = with_landing(Rig(seed=5, layers=3, pages=90, context=400, requests=1))
    rig.start(1)
    rig.extend({1: 20 * PAGE})
    assert all(resident(rig, layer, page) == [True, True] for layer in range(3) for page in rig.owned[1])
    if lost is not None:
        reference.invalidate(rig.runtime.cache.views[lost], torch.tensor(rig.owned[1][3:4]))
    planned, plan_stage = [], rig.runtime.ops.plan_stage

    def planning(view, pages, tokens, step, *more):
        assert step is not None
        planned.append(next(i for i, known in enumerate(rig.runtime.cache.views) if known is view))
        return plan_stage(view, pages, tokens, step, *more)

    rig.runtime.ops.plan_stage = planning
    before = counters(rig)
    rig.extend({1: 3})
    assert planned == ([] if lost is None else [lost])
    moved = {name: value - before[name] for name, value in counters(rig).items()}
    assert (moved["prefix_cache"], moved["prefix_host"]) == ((120, 0) if lost is None else (118, 2))
    assert all(resident(rig, layer, page) == [True, True] for layer in range(3) for page in rig.owned[1])


def test_counters_and_cache_are_those_of_moving_kernels():
    rigs = [small_blocks(Rig(seed=4, pages=90, context=400, requests=3), 7) for _ in range(2)]
    with_landing(rigs[1])
    for rig in rigs:
        rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width * 3})
        story(rig)
    assert counters(rigs[0]) == counters(rigs[1])
    for mine, theirs in zip(rigs[0].runtime.cache.views, rigs[1].runtime.cache.views, strict=True):
        assert torch.equal(mine.slot_of, theirs.slot_of) and torch.equal(mine.stamp, theirs.stamp)
        held = mine.page_of >= 0
        assert torch.equal(mine.kv[held], theirs.kv[held])


@pytest.mark.parametrize("leg", ["land", "stage_landed", "stage_cached"])
def test_without_one_of_its_legs_a_page_is_wrong_text(leg):
    """Of those that land, or, in layers that lack nothing, of those that do not."""
    rig = with_landing(Rig(seed=1, layers=2, pages=60, context=300, requests=1))
    rig.start(1)
    rig.extend({1: 10 * PAGE})
    if leg != "stage_cached":
        rig.runtime.flush()
    setattr(rig.runtime.ops, leg, lambda *args, **more: None)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        rig.extend({1: 1})


def test_no_page_lands_where_landing_is_switched_off():
    rig = with_landing(Rig(seed=2, layers=2, pages=60, context=300, requests=1))
    rig.start(1)
    rig.extend({1: 10 * PAGE})
    landed = counting(rig)
    for on in (0, 1):
        rig.runtime.apply_policy({"landing": on})  # empties the cache
        rig.extend({1: 1})
        assert sum(landed) == on * 2 * 11


def test_landing_cannot_be_switched_on_without_places():
    rig = Rig(seed=2, layers=2, pages=60, context=300, requests=1, landing=False)
    assert rig.prefill.landing is None
    with pytest.raises(ValueError, match="landing is 1, and this server was started without places to land"):
        rig.runtime.apply_policy({"landing": 1})


def test_resident_pages_do_not_land():
    rig = with_landing(Rig(seed=2, layers=2, pages=60, context=300, requests=1))
    rig.start(1)
    rig.extend({1: 10 * PAGE})
    landed = counting(rig)
    assert all(resident(rig, 1, rig.owned[1][3]))
    rig.extend({1: 1})
    assert landed == []
    rig.runtime.flush()
    rig.extend({1: 1})
    assert sum(landed) == 2 * 11


def test_pages_land_where_nearly_all_of_their_heads_are_missing():
    """Others would cross the link in vain."""
    known = np.array([[8] * 20 + [0] * 20, [8] * 20 + [6] * 20, [8] * 20 + [7] * 10 + [0] * 10], np.uint8)
    absent = Absent(GEOMETRY, torch.from_numpy(known), known, np.arange(40))
    rows = [absent.due(layer, slice(0, 40)) for layer in range(3)]
    assert [row is not None for row in rows] == [True, False, True]
    assert rows[0].row.tolist() == known[0].tolist() == rows[0].on_device.tolist()
    assert absent.due(0, slice(10, 40)).pages.tolist() == list(range(10, 40))
    assert absent.due(1, slice(0, 20)) is not None and absent.due(0, slice(20, 40)) is None


def test_what_requests_share_crosses_the_link_once():
    """The second finds it in the slots that the first has filled."""
    rig = with_landing(Rig(seed=2, layers=2, pages=60, context=300, requests=2))
    rig.start(1)
    rig.extend({1: 12 * PAGE})
    rig.fork(2, 1, 12 * PAGE)
    rig.runtime.flush()
    landed = counting(rig)
    rig.extend({1: 1, 2: 1})
    assert sum(landed) == 2 * 12
    known = np.full((1, 24), 8, np.uint8)
    absent = Absent(GEOMETRY, torch.from_numpy(known), known, np.r_[np.arange(12), np.arange(4, 16)])
    assert absent.due(0, slice(0, 12)) is not None and absent.due(0, slice(12, 24)) is None


def test_no_copy_crosses_a_border_between_registrations(monkeypatch):
    """CUDA refuses those. Layers of 100 pages, registered 230 at a time: borders in layer 2 and layer 4."""
    page_bytes = GEOMETRY.page_bytes // GEOMETRY.num_layers
    monkeypatch.setattr(pinned, "PIECE", 230 * page_bytes)
    pages = np.arange(20, 50)
    known = np.full((5, 30), 8, np.uint8)
    absent = Absent(GEOMETRY, torch.from_numpy(known), known, pages)
    assert [absent.due(layer, slice(0, 30)) is not None for layer in range(5)] == [True, True, False, True, True]
    assert absent.due(2, slice(0, 10)) is not None and absent.due(2, slice(10, 30)) is not None, (
        "pages 20 to 29, and 30 on"
    )
    known[2, 5:15] = 0
    assert absent.due(2, slice(0, 30)) is None, "copies on both sides are not one call's"
    rig = with_landing(small_blocks(Rig(seed=3, pages=90, context=400, requests=3), 7))
    monkeypatch.setattr(pinned, "PIECE", 130 * rig.geometry.page_bytes // rig.geometry.num_layers)
    landed = counting(rig)
    story(rig)
    assert landed


@pytest.mark.parametrize("fault", ["refused", "wrong"])
def test_a_driver_that_takes_no_lists_is_noticed_at_start(fault, monkeypatch, caplog):
    rig = with_landing(Rig(seed=1, layers=2, pages=60, context=300, requests=1))
    rig.runtime.host.zero_()
    for name in ("synchronize", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    made = rig.prefill.landing
    assert made._try() and not caplog.records

    def refusing(*args):
        raise RuntimeError("kernel land failed to launch: invalid argument")

    rig.runtime.ops.land = refusing if fault == "refused" else lambda *args: None
    made.works = made._try()
    assert "nine tenths" in caplog.text and ("invalid argument" in caplog.text) == (fault == "refused")
    landed = counting(rig)
    rig.start(1)
    rig.extend({1: 10 * PAGE})
    rig.runtime.flush()
    rig.extend({1: 1})
    assert landed == []
