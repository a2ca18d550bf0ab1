"""The decode path against an oracle that knows only the history of keys and values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sglang.srt.sparse_kv.ops.reference import COUNTERS
from sparse_rig import Rig

ODD_LENGTHS = (1, 7, 8, 9, 17, 97, 200)


def totals(rig: Rig) -> dict[str, int]:
    return dict(zip(COUNTERS, rig.runtime.cache.counters.sum(0).tolist()))


@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize(("guide", "attends"), [("chain", "selected"), ("chain", "own"), ("none", "selected")])
@pytest.mark.parametrize("window", [None, 0, 1])
def test_every_length_matches_the_oracle(page, guide, attends, window):
    more = {} if window is None else {"window": window}
    rig = Rig(seed=page, page=page, pages=150, context=400, requests=7, guide=guide, guide_attends=attends, **more)
    for req, length in enumerate(ODD_LENGTHS, 1):
        rig.start(req)
        rig.extend({req: length})
    for _ in range(2 * page + 2):
        rig.decode(list(range(1, 8)))
    assert totals(rig)["hit"] > 0


def test_row_1_s_own_pages_change_nothing_of_row_0():
    """In a cache that holds few of them, too: what row 1 lacks it goes without, and row 0 gives the same bits."""
    outs = []
    for attends in ("selected", "own"):
        rig = Rig(seed=4, pages=320, context=600, requests=3, guide_attends=attends)
        rig.runtime.apply_policy({"cache_slots": 3 * rig.runtime.shape.width + 4})
        for req, length in ((1, 500), (2, 333), (3, 5)):
            rig.start(req)
            rig.extend({req: length})
        outs.append(torch.stack([torch.stack(rig.decode([1, 2, 3], verify=False)) for _ in range(12)]))
    selected, own = outs
    assert torch.equal(selected[:, :, ::2], own[:, :, ::2])
    assert own.isfinite().all() and not torch.allclose(selected[:, :, 1::2], own[:, :, 1::2])


def late_predictions(runtime) -> None:
    """Predictions as late as their branch lets them be: when it is joined."""
    waiting, score, predict = [], runtime.ops.score, runtime.ops.predict

    def join_branch():
        while waiting:
            waiting.pop()()

    def overwrite(*args):
        assert not waiting, "a prediction still reads the scores of the layer before"
        return score(*args)

    runtime.ops.score, runtime.transfer.join_branch = overwrite, join_branch
    runtime.ops.predict = lambda *args: waiting.append(partial(predict, *args))


@pytest.mark.parametrize("residency", [1.0, 0.5])
@pytest.mark.parametrize("reader", ["schedule", "own", "recorder"])
def test_predictions_may_be_late(reader, residency, tmp_path):
    """Whoever reads them, or overwrites what they are made of, waits for their branch."""
    kept, recorded = [], []
    for late in (False, True):
        path = tmp_path / f"{late}"
        more = {"own": {"guide_attends": "own"}, "recorder": {"record": str(path)}}.get(reader, {})
        rig = Rig(seed=5, layers=5, pages=320, context=600, residency=residency, **more)
        rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width + 4})
        if late:
            late_predictions(rig.runtime)
        for req, length in ((1, 500), (2, 333)):
            rig.start(req)
            rig.extend({req: length})
        outs = [torch.stack(rig.decode([1, 2], verify=False, record={})) for _ in range(8)]
        kept.append((torch.stack(outs), rig.runtime.cache.counters, rig.runtime.predicted))
        recorded.append(path.read_bytes() if reader == "recorder" else b"")
    assert all(map(torch.equal, *kept)) and recorded[0] == recorded[1]
    assert totals(rig)["useful"] > 0


@pytest.mark.parametrize("transfer", ["plain", "delayed", "reordered", "failing"])
@pytest.mark.parametrize("residency", [1.0, 0.5, 0.0])
def test_tight_cache_under_every_transfer(transfer, residency):
    rig = Rig(seed=3, layers=5, pages=320, context=600, requests=3)
    rig.runtime.apply_policy({"residency": residency, "transfer": transfer, "check": 1})
    rig.runtime.apply_policy({"cache_slots": 3 * rig.runtime.shape.width})
    for req, length in ((1, 500), (2, 333), (3, 97)):
        rig.start(req)
        for piece in (length // 2, length - length // 2):
            rig.extend({req: piece})
    for _ in range(20):
        rig.decode([1, 2, 3])
    counted = totals(rig)
    assert counted["missed"] > 0 and counted["prefetched"] > 0
    if residency == 1.0:
        assert counted["evicted"] > 0


@pytest.mark.parametrize("seed", range(6))
def test_requests_come_and_go_and_pages_are_reused(seed):
    """Pages of finished requests are poisoned, handed out again, and never show through."""
    rig = Rig(seed=seed, layers=2, pages=90, context=300, requests=3)
    rig.runtime.apply_policy({"check": 1, "seed": seed, "transfer": ["plain", "delayed", "reordered"][seed % 3]})
    live: list[int] = []
    for turn in range(40):
        rig.runtime.poison_freed(torch.tensor(rig.free))
        if len(live) < 3 and (turn % 3 == 0 or not live):
            req = next(r for r in (1, 2, 3) if r not in live)
            rig.start(req)
            live.append(req)
            rig.extend({req: int(torch.randint(1, 200, (1,), generator=rig.generator))})
        elif turn % 7 == 6:
            rig.finish(live.pop(0))
        else:
            rig.decode(live)


def test_neighbours_and_policy_change_no_bit():
    """Same inputs: bit-identical row-0 outputs whatever is prefetched, resident, delayed or beside it."""

    def run(policy, guide_noise: int) -> list[torch.Tensor]:
        rig = Rig(seed=11, layers=4, pages=300, context=600, requests=2)
        rig.runtime.apply_policy({"check": 1, **policy})
        for req, length in ((1, 300), (2, 450)):
            rig.start(req)
            rig.extend({req: length})
        noise = torch.Generator().manual_seed(guide_noise)
        kept = []
        for _ in range(12):
            data = []
            for _ in range(rig.geometry.num_layers):
                q, k, v = rig.rand(4, 4, 8), rig.rand(4, 2, 8), rig.rand(4, 2, 8)
                for t in (q, k, v):
                    t[1::2] = torch.randn(t[1::2].shape, generator=noise)
                data.append((q, k, v))
            kept += [out[0::2].clone() for out in rig.decode([1, 2], data)]
        return kept

    expect = run({}, 0)
    width = Rig(seed=11, pages=300, context=600, requests=2).runtime.shape.width
    for policy, noise in (
        ({}, 1),
        ({"prefetch": 0}, 0),
        ({"residency": 0.0}, 2),
        ({"residency": 0.5, "transfer": "reordered", "seed": 5}, 3),
        ({"transfer": "delayed", "cache_slots": 2 * width}, 0),
        ({"shuffle_predictions": 1, "cache_slots": 2 * width}, 0),
    ):
        for a, b in zip(expect, run(policy, noise), strict=True):
            assert torch.equal(a, b), f"policy {policy} changed an output"


def test_budget_covers_context_is_dense():
    rig = Rig(seed=2, budget=512, pages=80, context=300, requests=1)
    rig.start(1)
    rig.extend({1: 250})
    for _ in range(10):
        rig.decode([1])
    assert totals(rig)["selected"] == sum(2 * 3 * ((250 + t) // 8 + 1) for t in range(10))


def test_skipped_write_through_is_noticed():
    rig = Rig(seed=4, pages=80, context=400, requests=1)
    rig.start(1)
    rig.extend({1: 100})
    rig.runtime.apply_policy({"check": 1, "skip_write_through": 1})
    for _ in range(40):
        rig.decode([1])
    rig.runtime.flush()
    rig.runtime.policy.check = False
    with pytest.raises(AssertionError):
        rig.decode([1])


def test_skipped_invalidation_is_noticed():
    rig = Rig(seed=4, layers=1, pages=40, context=300, requests=2)
    rig.start(1)
    rig.extend({1: 200})
    rig.decode([1])
    rig.runtime.apply_policy({"check": 0, "skip_invalidation": 1})
    for _ in range(3):
        rig.decode([1])
    rig.finish(1)
    rig.start(2)
    with pytest.raises(AssertionError):
        rig.extend({2: 250})
        for _ in range(5):
            rig.decode([2])


def test_shuffled_predictions_lose_their_use():
    def useful(shuffle: int) -> int:
        rig = Rig(seed=9, layers=4, pages=400, context=800, requests=2)
        rig.runtime.apply_policy({"check": 1})
        for req in (1, 2):
            rig.start(req)
            rig.extend({req: 700})
        rig.runtime.apply_policy({"cache_slots": 3 * rig.runtime.shape.width, "shuffle_predictions": shuffle})
        for _ in range(15):
            n, rows = 2, 2
            data = []
            for _ in range(4):
                q, k, v = rig.rand(n * rows, 4, 8), rig.rand(n * rows, 2, 8), rig.rand(n * rows, 2, 8)
                data.append((q, k, v))
            if hasattr(useful, "next"):
                for (q, _, _), (guess, _, _) in zip(data, useful.next):
                    q[0::2] = guess[1::2]  # the guide was right: its query is the next row 0's
            useful.next = data
            rig.decode([1, 2], data)
        del useful.next
        return totals(rig)["useful"]

    assert useful(1) < 0.5 * useful(0)


def test_requests_are_charged_for_what_was_fetched_for_them():
    rig = Rig(seed=5, layers=3, pages=120, context=300, requests=2, guide="chain")
    for req, length in ((1, 200), (2, 150)):
        rig.start(req)
        rig.extend({req: length})
    rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width})
    rig.runtime.reset_counters()
    for _ in range(6):
        rig.decode([1, 2])
    own, total = rig.runtime.fetched, rig.runtime.summary()["total"]
    assert bool((own[1:] > 0).all()) and bool((own[0] == 0).all())
    # Beside the selections, open pages are fetched; predicted units find no slot where all are in use.
    assert int(own[:, 0].sum()) <= total["missed"] and int(own[:, 1].sum()) >= total["prefetched"]
    assert int(own[:, 0].sum()) == total["selected"] - total["hit"]
    rig.extend({1: 3})
    assert own[1].tolist() == [0, 0] and bool((own[2] > 0).all())
