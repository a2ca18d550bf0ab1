"""A prefill by the CUDA engine's operations: the same cache and counters as by the reference's, after every chunk."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sparse_kv import landing
from sglang.srt.sparse_kv.landing import Landing
from sglang.srt.sparse_kv.ops import cuda_prefill, reference_attention
from sglang.srt.sparse_kv.transfer import CPU_TRANSFERS
from sparse_rig import Rig, small_blocks

PAGE = 8
OURS = {
    name: getattr(cuda_prefill, name)
    for name in ("plan_stage", "stage", "stage_cached", "land", "stage_landed", "store_chunk", "refresh")
}
ATTENTION = {name: getattr(reference_attention, name) for name in ("attend_block", "merge")}


@pytest.mark.parametrize("residency", ["all", [1], "none"])
@pytest.mark.parametrize("slots", [0, 1])  # as many as there are, or one selection's
@pytest.mark.parametrize("staging", [2, 7, 40])  # pages of a staging slot
def test_prefills_agree(engine, residency, slots, staging):
    if engine.device.type == "cuda":
        pytest.skip("the rig lives on the CPU")
    rigs = [Rig(seed=1, layers=2, pages=90, context=300, requests=3, residency=residency) for _ in range(2)]
    rigs[1].runtime.ops = SimpleNamespace(**OURS, **ATTENTION)
    for rig in rigs:
        rig.runtime.apply_policy({"cache_slots": slots * rig.runtime.shape.width})
        rig.prefill.staging = rig.prefill.staging[:, :, :, : staging * PAGE].clone().fill_(float("nan"))
        rig.start(1)
        rig.start(2)
    for number, batch in enumerate([{1: 100}, {1: 3, 2: 21}, {2: 1}, {3: 5, 1: 40}, {1: 1, 3: 64, 2: 19}]):
        outs = []
        for rig in rigs:
            if number == 3:
                rig.fork(3, 1, 8 * PAGE)
            outs.append(rig.extend(batch))
            rig.runtime.cache.check()
            rig.runtime.tick()
        for mine, theirs in zip(*outs, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
        same_caches(*(rig.runtime for rig in rigs))


@pytest.mark.parametrize("transfer", sorted(set(CPU_TRANSFERS) - {"oracle", "broken"}))
@pytest.mark.parametrize("lands", [False, True])
def test_plans_serve_from_layer_to_layer(engine, transfer, lands, monkeypatch):
    """In layers that lack all, some or none of a block's pages, whatever the host knew of that, one or several blocks
    and pieces, copies late, out of order, failing and short.
    """
    if engine.device.type == "cuda":
        pytest.skip("the rig lives on the CPU")
    monkeypatch.setattr(landing, "FEW", 1)
    monkeypatch.setattr(landing, "ASKED", 1)
    for seed, staging in enumerate((3, 40)):
        rigs = [small_blocks(Rig(seed=seed, layers=5, pages=90, context=300, requests=3), staging) for _ in range(2)]
        rigs[1].runtime.ops = SimpleNamespace(**OURS, **ATTENTION)
        for rig in rigs:
            rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width})
            rig.runtime.ops.absent = partial(guessed, torch.Generator().manual_seed(seed), rig.geometry.kv_heads)
            rig.prefill.landing = Landing(rig.runtime) if lands else None
            if lands:
                rig.prefill.landing.places = rig.prefill.landing.places[:, :2].clone().fill_(float("nan"))
            rig.start(1)
            rig.start(2)
        rigs[1].runtime.transfer = CPU_TRANSFERS[transfer](seed)
        for number, batch in enumerate([{1: 11 * PAGE + 3}, {1: 3, 2: 21}, {1: 1}, {2: 1, 1: 2 * PAGE, 3: 4}]):
            for rig in rigs:
                if number == 3:
                    rig.fork(3, 1, 6 * PAGE)
                rig.extend(batch)  # asserts that it is exact
                rig.runtime.cache.check()
                rig.runtime.tick()
            same_caches(*(rig.runtime for rig in rigs))


def test_plans_of_many_blocks_share_the_memory_of_two(engine):
    if engine.device.type == "cuda":
        pytest.skip("the rig lives on the CPU")
    rig = small_blocks(Rig(seed=3, layers=4, pages=90, context=300, requests=1), 3)
    rig.runtime.ops = SimpleNamespace(**OURS, **ATTENTION)
    rig.prefill.landing = None
    rig.start(1)
    rig.extend({1: 23 * PAGE})
    rig.extend({1: 5})
    held = {plan.memory.data_ptr() for place in rig.prefill.step.places.values() for plan in place.plans.values()}
    assert len(rig.prefill.step.blocks) == 8 and len(held) == 2


def guessed(random: torch.Generator, heads: int, views, pages) -> torch.Tensor:
    """A layer lacks nothing, some pages or all, as `absent` says it, but may say it wrongly."""
    share = torch.tensor([0.0, 0.5, 1.0])[torch.randint(3, (len(views), 1), generator=random)]
    lacks = torch.rand((len(views), len(pages)), generator=random) < share
    return torch.where(lacks, heads, 0).to(torch.uint8)


def same_caches(reference, ours):
    assert torch.equal(ours.cache.counters, reference.cache.counters)
    for mine, theirs in zip(ours.cache.views, reference.cache.views, strict=True):
        assert torch.equal(mine.slot_of >= 0, theirs.slot_of >= 0)
        head, page = (theirs.slot_of >= 0).nonzero(as_tuple=True)
        units = [view.kv[head, view.slot_of[head, page].long()] for view in (mine, theirs)]
        torch.testing.assert_close(*units, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.host.nan_to_num(), theirs.host.nan_to_num())
        assert all(map(torch.equal, mine.landmarks, theirs.landmarks))
