"""Counters as they are shown: plain builtins that add up."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from sglang.srt.sparse_kv.ops.reference import COUNTERS
from sglang.srt.sparse_kv.transfer import DelayedTransfer, PlainTransfer
from sparse_rig import Rig


def running(**config) -> Rig:
    rig = Rig(seed=3, layers=3, pages=120, context=300, requests=2, **config)
    for req, length in ((1, 150), (2, 70)):
        rig.start(req)
        rig.extend({req: length})
    return rig


def builtins_only(value) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and builtins_only(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(builtins_only(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize("residency", ["all", "none", [0, 2], 0.5])
@pytest.mark.parametrize("guide", ["chain", "none"])
def test_the_summary_is_json_and_msgpack_clean(residency, guide):
    import msgspec

    rig = running(residency=residency, guide=guide)
    rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width})
    for _ in range(3):
        rig.decode([1, 2])
    summary = rig.runtime.summary()
    assert builtins_only(summary)
    assert json.loads(json.dumps(summary, allow_nan=False)) == json.loads(msgspec.json.encode(summary))
    msgspec.msgpack.encode(summary)
    assert summary["rows"] == (1 if guide == "none" else 2) and summary["steps"] == 3


def test_totals_are_sums_and_bytes_are_tokens():
    rig = running()
    rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width})
    for _ in range(6):
        rig.decode([1, 2])
    summary = rig.runtime.summary()
    layers, total = summary["layers"], summary["total"]
    assert len(layers) == 3 and set(total) == set(COUNTERS) - {"tokens_in"} | {"bytes_in", "stall_seconds"}
    assert all(total[name] == sum(layer[name] for layer in layers) for name in total)
    token = 2 * rig.geometry.head_dim * 4  # K and V of one head
    assert total["bytes_in"] == token * int(rig.runtime.cache.counters[:, COUNTERS.index("tokens_in")].sum())
    fetched = total["missed"] + total["prefetched"]
    assert total["bytes_in"] <= fetched * rig.geometry.unit_bytes and total["bytes_in"] > 0
    forced = rig.runtime.shape.forced_pages
    everything = token * 2 * 3  # heads, layers
    assert summary["bytes_stored"] == (150 + 70 + 6 * 2) * everything and summary["bytes_staged"] == 0
    rig.extend({1: 5})
    page = rig.geometry.page_size
    assert rig.runtime.summary()["bytes_staged"] == -(-156 // page) * page * everything
    assert 6 * 3 * 2 * 2 * forced < total["selected"] <= 6 * 3 * 2 * 2 * rig.runtime.shape.width


def test_a_reset_starts_anew():
    rig = running()
    rig.decode([1, 2])
    rig.runtime.note_guides(torch.tensor([5, 7, -1]), torch.tensor([5, 6, 8]))
    summary = rig.runtime.summary()
    assert (summary["guide_hits"], summary["guides"], summary["steps"]) == (1, 2, 1)
    rig.runtime.reset_counters()
    summary = rig.runtime.summary()
    assert not any(summary["total"].values()) and summary["steps"] == summary["guides"] == summary["guide_hits"] == 0
    rig.decode([1, 2])
    assert rig.runtime.summary()["total"]["selected"] > 0


def test_the_log_line_before_and_after_the_first_step():
    for guide in ("chain", "none"):
        rig = running(guide=guide)
        for _ in range(2):
            line = rig.runtime.log_suffix()
            assert re.fullmatch(
                r"sparse hit: [\d.]+, missed: \d+, prefetch useful: [\d.]+"
                + (", guide: [\\d.]+" if guide == "chain" else ""),
                line,
            ), line
            rig.decode([1, 2])


class Slow:
    """Units that steps wait for take 2 ms, those fetched ahead 20 ms, by its own clock in `took`."""

    def __init__(self):
        super().__init__()
        self.took = {True: 0.0, False: 0.0}  # by urgency

    def submit(self, lane, copy, urgent=False, way="ahead"):
        super().submit(lane, lambda: self.slowly(copy, urgent), urgent)

    def slowly(self, copy, urgent):
        begin = time.perf_counter()
        time.sleep(0.002 if urgent else 0.02)
        copy()
        self.took[urgent] += time.perf_counter() - begin


class SlowAtOnce(Slow, PlainTransfer):
    pass


class SlowWhenJoined(Slow, DelayedTransfer):
    pass


@pytest.mark.parametrize("transfer", [SlowAtOnce, SlowWhenJoined])
def test_a_stall_is_the_time_that_misses_take(transfer):
    rig = running(prefetch_floor=0)
    runtime = rig.runtime
    runtime.apply_policy({"cache_slots": 2 * runtime.shape.width})
    runtime.transfer = slow = transfer()
    before = 0.0
    for _ in range(3):
        rig.decode([1, 2])
        rows = runtime.summary()["layers"]
        assert all(row["stall_seconds"] >= 0.002 for row in rows if row["missed"]), "a miss costs what its copy does"
        assert all(row["stall_seconds"] == 0 for row in rows if not row["missed"])
        total = runtime.summary()["total"]["stall_seconds"]
        assert total >= before
        before = total
    assert 0 < before < slow.took[True] + slow.took[False], "what is fetched ahead is no stall"


def test_no_miss_is_no_stall():
    rig = running()
    for _ in range(2):
        rig.decode([1, 2])
    rig.runtime.reset_counters()
    rig.runtime.transfer = SlowAtOnce()
    rig.decode([1, 2])
    total = rig.runtime.summary()["total"]
    assert total["missed"] == 0 < total["selected"] and total["stall_seconds"] == 0


def test_the_oracle_does_not_wait():
    rig = running()
    rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width, "transfer": "oracle"})
    for _ in range(2):
        rig.decode([1, 2], verify=False)
    total = rig.runtime.summary()["total"]
    assert total["missed"] > 0 and total["stall_seconds"] == 0


def test_occupancy_is_of_the_slots_in_use():
    rig = running()
    width = rig.runtime.shape.width
    for residency, expected in (("all", 1.0), ("none", 0.0), ([1], 1.0)):
        rig.runtime.apply_policy({"residency": residency, "cache_slots": width})
        assert rig.runtime.summary()["cache_occupancy"] == 0.0, "a switch empties the cache"
        rig.decode([1])
        assert rig.runtime.summary()["cache_occupancy"] == expected, "one selection fills the slots that may be used"
    rig.runtime.apply_policy({"residency": "all", "cache_slots": 2 * width})
    rig.decode([1])
    assert rig.runtime.summary()["cache_occupancy"] >= 0.5


def test_summaries_do_not_disturb():
    rig = running()
    before = rig.runtime.cache.counters.clone()
    assert rig.runtime.summary() == rig.runtime.summary()
    assert torch.equal(before, rig.runtime.cache.counters)
