"""Contexts below `whole` tokens select every page: in steps of every kind, beside longer ones, and past the border."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sparse_kv import planner
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.variants import Chooser, Variant
from sparse_rig import Rig

PAGE, WHOLE = 8, 203
ALL, ONE, TWO = Variant.ALL_PAGES, Variant.ONE_ROW, Variant.TWO_ROWS


def rig_of(lengths: dict[int, int], **config) -> Rig:
    config = {"rows": "auto", "whole": WHOLE, **config}
    rig = Rig(seed=4, layers=3, pages=300, context=600, requests=3, **config)
    for req, length in lengths.items():
        rig.start(req)
        rig.extend({req: length})
    return rig


def selections(rig: Rig, monkeypatch) -> list[torch.Tensor]:
    """What row 0 selects from now on, int32 [N, H, C] for each layer and step, however it is found."""
    found, resolve = [], rig.runtime.ops.resolve

    def noted(view, pages, *args, **more):
        found.append(pages.clone())
        return resolve(view, pages, *args, **more)

    monkeypatch.setattr(rig.runtime.ops, "resolve", noted)
    return found


def run(variants, monkeypatch, length: int, **config):
    """Outputs of row 0, selections and memory of one request by steps of these variants, on the same inputs."""
    rig, outs = rig_of({1: length}, **config), []
    found = selections(rig, monkeypatch)
    for variant in variants:
        rig.runtime.variant = variant
        data = [(rig.rand(1, 2, 4, 8), rig.rand(1, 2, 2, 8), rig.rand(1, 2, 2, 8)) for _ in range(3)]
        data = [tuple(t[:, : variant.rows].reshape(-1, *t.shape[2:]) for t in layer) for layer in data]
        outs += [out[:: variant.rows].clone() for out in rig.decode([1], data)]
    return outs, found, rig.runtime.selected.clone()


def test_steps_of_every_kind_are_one(monkeypatch):
    """From below `whole` to beyond: what came before leaves no trace in the first step whose scores decide."""
    below, beyond = 12, 10
    start = WHOLE - below
    outs, pages, memory = run([ONE] * (below + beyond), monkeypatch, start)
    assert [int((p >= 0).sum(-1).amin()) for p in pages[: 3 * below : 3]] == [
        length // PAGE + 1 for length in range(start, WHOLE)
    ]
    scored = rig_of({}).runtime.shape.scored_width
    assert all(int((p >= 0).sum(-1).max()) <= scored for p in pages[3 * below :])
    assert memory[1].any()
    for before in ([ALL] * below, [ALL, ONE, ONE] * (below // 3)):
        others = run([*before, *[ONE] * beyond], monkeypatch, start)
        assert all(torch.equal(a, b) for a, b in zip(outs, others[0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(pages, others[1], strict=True))
        assert torch.equal(memory, others[2])
    two = run([ONE, TWO] * (below // 2) + [ONE] * beyond, monkeypatch, start)
    for a, b in zip(outs, two[0], strict=True):
        torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5)


def test_beyond_whole_nothing_is_different(monkeypatch):
    outs, pages, memory = run([ONE, TWO] * 8, monkeypatch, WHOLE)
    others = run([ONE, TWO] * 8, monkeypatch, WHOLE, whole=0)
    assert all(torch.equal(a, b) for a, b in zip(outs, others[0], strict=True)) and torch.equal(memory, others[2])
    for a, b in zip(pages, others[1], strict=True):
        width = min(a.shape[2], b.shape[2])
        assert torch.equal(a[..., :width], b[..., :width]) and bool((a[..., width:] == -1).all())


@pytest.mark.parametrize("neighbour", [150, 450])
def test_a_neighbour_changes_no_selection(neighbour, monkeypatch):
    """Whether the batch's steps need scores or not, and while one request outgrows `whole` and another does not."""
    steps = 12
    alone, beside = rig_of({1: WHOLE - 5}), rig_of({1: WHOLE - 5, 2: neighbour})
    found = selections(alone, monkeypatch), selections(beside, monkeypatch)
    kinds = set()
    for rig, reqs in ((alone, [1]), (beside, [1, 2])):
        made = Chooser(4)
        made.start(torch.tensor(reqs), torch.tensor([rig.length(r) for r in reqs]))
        rig.generator.manual_seed(9)
        rand = torch.Generator().manual_seed(9)
        others = torch.Generator().manual_seed(10)
        for _ in range(steps):
            rig.runtime.variant = variant = made.choose(torch.tensor(reqs), rig.runtime)
            assert variant.rows == 1
            kinds.add((len(reqs), rig.length(1) < WHOLE, variant))
            data = []
            for _ in range(3):
                sizes = (4, 8), (2, 8), (2, 8)
                mine = [torch.randn(1, *size, generator=rand) for size in sizes]
                theirs = [torch.randn(len(reqs) - 1, *size, generator=others) for size in sizes]
                data.append(tuple(torch.cat(both) for both in zip(mine, theirs, strict=True)))
            rig.decode(reqs, data)  # against the oracle
    own = [1, 2] if neighbour < WHOLE else [1]
    assert (1, True, ALL) in kinds and (1, False, ONE) in kinds
    assert {kind for n, short, kind in kinds if n == 2 and short} == ({ALL} if len(own) == 2 else {ONE})
    order = {page: i for rig in (alone, beside) for i, page in enumerate(rig.owned[1])}
    for a, b in zip(*found, strict=True):
        if a.shape[2] == 1:
            continue  # an open page by itself
        mine, beside_others = ([order.get(page, -1) for page in t[0].flatten().tolist()] for t in (a, b))
        assert mine == beside_others


@pytest.mark.parametrize("config", [{}, {"residency": "none"}, {"guide": "none"}], ids=str)
def test_two_rows_keep_to_the_oracle(config):
    """Misses of what the budget's predictions do not hold are brought like any."""
    rig = rig_of({1: WHOLE - 8, 2: 350, 3: 60}, rows=2, **config)
    rig.runtime.apply_policy({"cache_slots": 3 * rig.runtime.shape.width})
    for _ in range(16):
        rig.decode([1, 2, 3])
    assert int(rig.runtime.cache.counters[:, reference.MISSED].sum()) > 0


def test_row_1_may_attend_to_all_pages_of_its_own():
    rig = rig_of({1: WHOLE - 8, 2: 350}, rows=2, guide_attends="own")
    for _ in range(16):
        rig.decode([1, 2])


def test_the_smallest_cache_holds_the_largest_selections():
    shape = SelectionShape.from_tokens(PAGE, 4 * PAGE, PAGE, 2 * PAGE, whole=WHOLE)
    assert (shape.width, shape.scored_width) == (26, 8) and shape.prefetch_pages(1.0) == 4
    assert SelectionShape.from_tokens(PAGE, 40 * PAGE, PAGE, 2 * PAGE, whole=WHOLE).width == 44
    assert SelectionShape.from_tokens(PAGE, 4 * PAGE, PAGE, 2 * PAGE, 10, WHOLE).width == 10, "what no request can own"
    needed = planner.needed_slots(3, shape, 76, 4)
    assert needed == 3 * 27 + 4 and planner.largest_batch(needed - 1, shape, 76, 4) == 2
    rig = rig_of({1: WHOLE - 4, 2: WHOLE - 9, 3: WHOLE - 1})
    rig.runtime.apply_policy({"cache_slots": needed})
    for variant in (TWO, ALL, ONE):
        rig.runtime.variant = variant
        rig.decode([1, 2])
        rig.runtime.variant = TWO
        rig.decode([1, 2, 3])


def test_a_cache_too_small_for_it_names_the_setting():
    for config, name in (
        ({"whole": WHOLE}, rf"whole in --sparse-kv-config \({WHOLE}\)"),
        ({"whole": 60}, r"--sparse-kv-budget \(32\)"),
        ({"budget": 1664, "context": 4000}, r"--sparse-kv-budget \(1664\)"),
    ):
        with pytest.raises(ValueError, match=f"lower {name}$"):
            Rig(cache_memory=2000, **config)


def test_a_policy_switches_it():
    rig = rig_of({1: 150})
    whole, budget = rig.runtime.shape, rig.runtime.policy.budget
    rig.runtime.apply_policy({"whole": 0})
    assert rig.runtime.shape.whole == 0 and rig.runtime.shape.width == whole.scored_width
    rig.decode([1])
    rig.runtime.apply_policy({"budget": budget})
    assert rig.runtime.shape == whole


# ---------------------------------------------------------------- sabotage


@pytest.mark.parametrize("variant", [ONE, TWO])
def test_a_selection_that_ignores_it_is_noticed(variant, monkeypatch):
    rig = rig_of({1: WHOLE - 4})
    rig.runtime.variant = variant
    rig.decode([1])
    monkeypatch.setattr(reference, "take_whole", lambda chosen, whole, candidates: chosen)
    with pytest.raises(AssertionError):
        rig.decode([1])


def test_one_that_takes_all_a_token_too_long_is_noticed():
    rig = rig_of({1: WHOLE - 1})
    rig.runtime.variant = ALL
    rig.decode([1])
    with pytest.raises(AssertionError):
        rig.decode([1])
