"""A prefill by the CUDA engine's operations: the same cache and counters as by the reference's, after every chunk."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sparse_kv.ops import cuda_prefill, reference_attention
from sparse_rig import Rig

PAGE = 8


@pytest.mark.parametrize("residency", ["all", [1], "none"])
@pytest.mark.parametrize("slots", [0, 1])  # as many as there are, or one selection's
@pytest.mark.parametrize("staging", [2, 7, 40])  # pages of a staging slot
def test_prefills_agree(engine, residency, slots, staging):
    if engine.device.type == "cuda":
        pytest.skip("the rig lives on the CPU")
    rigs = [Rig(seed=1, layers=2, pages=90, context=300, requests=3, residency=residency) for _ in range(2)]
    ours = {name: getattr(cuda_prefill, name) for name in ("plan_stage", "stage", "store_chunk", "refresh")}
    attention = {name: getattr(reference_attention, name) for name in ("attend_block", "merge")}
    rigs[1].runtime.ops = SimpleNamespace(**ours, **attention)
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


def same_caches(reference, ours):
    assert torch.equal(ours.cache.counters, reference.cache.counters)
    for mine, theirs in zip(ours.cache.views, reference.cache.views, strict=True):
        assert torch.equal(mine.slot_of >= 0, theirs.slot_of >= 0)
        head, page = (theirs.slot_of >= 0).nonzero(as_tuple=True)
        units = [view.kv[head, view.slot_of[head, page].long()] for view in (mine, theirs)]
        torch.testing.assert_close(*units, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.host.nan_to_num(), theirs.host.nan_to_num())
        assert all(map(torch.equal, mine.landmarks, theirs.landmarks))
