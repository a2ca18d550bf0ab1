"""The schedule under every mix of residency, ring, look-ahead and transfer: exact outputs, counters that add up."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from sglang.srt.sparse_kv.gate import EARLY, LATE
from sglang.srt.sparse_kv.ops.reference import COUNTERS
from sglang.srt.sparse_kv.runtime import LONG_UNUSED
from sglang.srt.sparse_kv.transfer import DelayedTransfer
from sglang.srt.sparse_kv.variants import Variant
from sparse_rig import Rig


def counters(rig: Rig) -> list[dict[str, int]]:
    return [dict(zip(COUNTERS, row)) for row in rig.runtime.cache.counters.tolist()]


def check_counters(rig: Rig) -> None:
    """In every layer: what was fetched ahead was used, wasted, or still waits in the layer's own buffer."""
    cache = rig.runtime.cache
    for layer, count in enumerate(counters(rig)):
        waiting = 0 if layer in cache.scoped else int(cache.views[layer].ahead.sum())
        assert count["prefetched"] == count["useful"] + count["wasted"] + waiting, f"layer {layer}: {count}"
        assert count["selected"] >= count["hit"] and min(count.values()) >= 0


@pytest.mark.parametrize("seed", range(10))
def test_any_configuration_is_exact(seed):
    """Requests start, fork, decode in any company and finish; every output equals the oracle's."""
    draw = random.Random(seed)
    layers = draw.randint(1, 6)
    resident = [layer for layer in range(layers) if draw.random() < 0.5]
    page = draw.choice([8, 16])
    config = {
        "layers": layers,
        "page": page,
        "residency": draw.choice(["all", "none", resident, 0.5]),
        "ring": draw.randint(2, 4),
        "lookahead": draw.randint(1, layers + 2),
        "prefetch_cap": draw.choice([0.0, 0.3, 1.0]),
        "window": draw.choice([0, 1, page - 1, page, page + 1, 3 * page]),
        "sinks": draw.choice([0, 1, page, 3 * page]),
        "budget": draw.choice([page, 3 * page, 7 * page]),
        "guide": draw.choice(["chain", "chain", "none"]),
        "debug": draw.random() < 0.5,
    }
    rig = Rig(seed=seed, pages=160, context=300, requests=4, **config)
    if rig.config.debug:
        transfer = draw.choice(["plain", "delayed", "reordered", "failing"])
        width = min(rig.runtime.shape.width, rig.geometry.max_pages)
        slots = draw.choice([0, min(4 * width, rig.plan.slots)])
        rig.runtime.apply_policy({"check": 1, "transfer": transfer, "seed": seed, "cache_slots": slots})
    if draw.random() < 0.5:  # so that prefill takes slots of requests that are idle in this short run
        rig.runtime.clock_long_ago += LONG_UNUSED - 3
    live: list[int] = []
    for _ in range(35):
        move = draw.random()
        if rig.config.debug:
            rig.runtime.poison_freed(torch.tensor(rig.free))
        if not live or (move < 0.2 and len(live) < 4):
            req = draw.choice([r for r in (1, 2, 3, 4) if r not in live])
            parents = [r for r in live if rig.length(r) >= page]
            if parents and draw.random() < 0.5:
                parent = draw.choice(parents)
                rig.fork(req, parent, draw.randint(1, rig.length(parent) // page) * page)
            else:
                rig.start(req)
            live.append(req)
            rig.extend({req: draw.randint(1, 90)})
        elif move < 0.3:
            rig.finish(live.pop(draw.randrange(len(live))))
        else:
            batch = draw.sample(live, draw.randint(1, len(live)))
            rig.decode([r for r in batch if rig.length(r) < 290] or live[:1])
        rig.runtime.cache.check()
        check_counters(rig)
    rig.runtime.flush()
    check_counters(rig)


@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("residency", ["none", [1], [0, 2, 5]])
def test_ring_buffers_serve_one_layer_at_a_time(ring, residency):
    """Transfers that land as late as they may, and a ring that is emptied behind each layer."""
    rig = Rig(seed=ring, layers=7, pages=150, context=500, requests=2, ring=ring, residency=residency)
    rig.runtime.apply_policy({"transfer": "delayed", "check": 1})
    for req, length in ((1, 300), (2, 95)):
        rig.start(req)
        rig.extend({req: length})
    for _ in range(10):
        rig.decode([1, 2])
        assert all(not bool((buffer.page_of >= 0).any()) for buffer in rig.runtime.cache._ring)
        check_counters(rig)
    count = counters(rig)
    for layer in rig.runtime.cache.scoped:
        assert count[layer]["prefetched"] > 0 and count[layer]["useful"] > 0 and count[layer]["wasted"] > 0
        # Only in the first step is nothing predicted yet; the forced pages, the open one among them, always come ahead.
        assert count[layer]["useful"] >= 9 * 2 * 2


def test_ring_buffers_in_a_step_of_one_row_that_a_policy_chose():
    rig = Rig(seed=1, layers=5, rows="auto", residency="none")
    rig.start(1)
    rig.extend({1: 200})
    rig.runtime.apply_policy({"rows": 1, "skip_scores": 0})
    rig.runtime.variant = Variant.ONE_ROW
    for _ in range(3):
        rig.decode([1])
    assert all(count["prefetched"] == 0 < count["missed"] for count in counters(rig))


def planned(rig: Rig, batch: list[int]) -> list[list[tuple[int, int]]]:
    """What one step plans: (layer, whether early or late) at its begin, and then in each layer."""
    schedule, found = rig.runtime.schedule, [[]]
    plan, ahead = schedule._plan, schedule.fetch_ahead

    def watch_plan(layer, step, stamp, when):
        found[-1].append((layer, when))
        return plan(layer, step, stamp, when)

    def watch_ahead(layer, step):
        found.append([])
        ahead(layer, step)

    schedule._plan, schedule.fetch_ahead = watch_plan, watch_ahead
    rig.decode(batch)
    schedule._plan, schedule.fetch_ahead = plan, ahead
    return found


@pytest.mark.parametrize("late", range(1, 9))
def test_each_layer_is_fetched_once_a_step(late):
    """Early ones right after they have predicted, late ones as long before they are needed as there are early ones."""
    layers = 7
    rig = Rig(layers=layers, pages=100, context=300, requests=1, lookahead=late)
    rig.start(1)
    rig.extend({1: 200})
    for _ in range(3):
        begin, *later = planned(rig, [1])
        everything = [layer for plans in (begin, *later) for layer, _ in plans]
        assert sorted(everything) == list(range(layers))
        early = max(0, layers - late)
        for layer, plans in enumerate(later):
            assert plans == [
                *([(layer + early, LATE)] if early and layer < late else []),
                *([(layer - 1, EARLY)] if 0 < layer <= early else []),
            ]
        assert begin == ([] if early else [(layer, LATE) for layer in range(layers)])


def test_the_number_of_requests_decides_how_many_layers_are_late():
    rig = Rig(layers=6, pages=150, context=300, requests=3)
    rig.runtime.plan = dataclasses.replace(rig.plan, lookahead=(5, 3))
    for req in (1, 2, 3):
        rig.start(req)
        rig.extend({req: 100})
    for batch, late in (([1], 5), ([1, 2], 3), ([1, 2, 3], 3), ([2], 5)):
        found = [layer for plans in planned(rig, batch) for layer, when in plans if when == LATE]
        assert found == list(range(6 - late, 6))


def test_no_lookahead_changes_a_bit():
    """Whatever the number of late layers, of few slots, and where it changes from step to step."""

    def run(lookahead: tuple[int, ...]) -> tuple[list[torch.Tensor], list[dict[str, int]]]:
        rig = Rig(seed=3, layers=6, pages=150, context=500, requests=2, budget=32, hysteresis=0)
        rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width + 4, "check": 1, "transfer": "delayed"})
        rig.runtime.plan = dataclasses.replace(rig.plan, lookahead=lookahead)
        for req, length in ((1, 400), (2, 150)):
            rig.start(req)
            rig.extend({req: length})
        outs = []
        for number in range(12):
            outs += [out[::2].clone() for out in rig.decode([1] if number % 3 == 2 else [1, 2])]
            check_counters(rig)
        return outs, counters(rig)

    first, before = run((1,))
    for lookahead in [*((late,) for late in range(2, 7)), (1, 6), (6, 1), (5, 3)]:
        outs, after = run(lookahead)
        assert all(torch.equal(a, b) for a, b in zip(first, outs, strict=True)), lookahead
        assert after != before, "nothing was fetched at another time"
        assert all(layer["prefetched"] > 0 for layer in after)


def test_no_slot_changes_owner_while_a_copy_into_it_is_in_flight():
    rig = Rig(seed=1, layers=6, pages=150, context=400, requests=2, residency=0.5, lookahead=2)
    rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width})
    rig.start(1)
    rig.extend({1: 300})
    runtime = rig.runtime
    runtime.transfer = transfer = DelayedTransfer()
    flying: dict[int, list] = {}  # (view, fetch) of each buffer
    operations: list[str] = []

    def landed(view) -> bool:
        return not transfer.in_flight(
            runtime.cache.lanes[next(i for i, v in enumerate(runtime.cache.views) if v is view)]
        )

    def watch(name):
        operation = getattr(runtime.ops, name)

        def watched(first, *args, **kwargs):
            found = operation(first, *args, **kwargs)
            operations.append(name)
            view = first.view if name == "plan_prefetch" else first
            mine = flying.setdefault(view.kv.data_ptr(), [])
            if landed(view):
                mine.clear()
            if name == "plan_prefetch":
                mine.append(found)
            for fetch in mine:
                page, head, slot, _ = fetch.units[: int(fetch.count)].long().unbind(1)
                assert torch.equal(view.page_of[head, slot].long(), page), f"{name} took a slot with a copy in flight"
            return found

        setattr(runtime.ops, name, watched)

    def plan_prefetches(plans):
        for plan in plans:
            plan.fetch = runtime.ops.plan_prefetch(plan)
        planned.append(len(plans))

    planned: list[int] = []
    runtime.ops.plan_prefetches = plan_prefetches
    names = {"resolve", "plan_prefetch", "clear", "refresh"}
    for name in names:
        watch(name)
    for _ in range(5):
        rig.decode([1])
        assert not transfer.pending, "a copy outlives its forward"
    rig.extend({1: 20})
    assert not transfer.pending and set(operations) == names and planned


@pytest.mark.parametrize("residency", ["all", "none", [1]])
def test_a_step_repeated_with_another_guide_changes_no_bit(residency):
    """A look-ahead runs a step, throws its row 1 away and runs it again: same place, same bytes, whatever closes."""
    rig = Rig(seed=6, layers=3, pages=120, context=400, requests=2, residency=residency, window=1)
    rig.runtime.apply_policy({"transfer": "delayed", "check": 1})
    for req, length in ((1, 150), (2, 7)):
        rig.start(req)
        rig.extend({req: length})
    for _ in range(2 * rig.geometry.page_size + 1):
        first = [[rig.rand(4, heads, 8) for heads in (4, 2, 2)] for _ in range(3)]
        again = [[t.clone() for t in layer] for layer in first]
        for layer in again:
            for t in layer:
                t[1::2] = rig.rand(2, *t.shape[1:]) * 100
        history = {req: list(layers) for req, layers in rig.history.items()}
        outs = rig.decode([1, 2], first)
        rig.history = history
        repeated = rig.decode([1, 2], again)
        assert all(torch.equal(a[::2], b[::2]) for a, b in zip(outs, repeated))
        check_counters(rig)


def test_a_step_of_nobody_and_a_step_of_padding():
    rig = Rig(seed=0, pages=60, context=200, requests=2, residency=0.5)
    rig.start(1)
    rig.extend({1: 150})
    rig.decode([1])
    before = [
        t.clone() for t in (rig.runtime.cache.counters, rig.runtime.host.nan_to_num(0), rig.runtime.predicted[1:])
    ]
    rig.decode([])
    rig.history[0] = [(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)) for _ in range(3)]  # SGLang pads with length 1
    rig.owned[0] = [0]
    outs = rig.decode([0, 0], verify=False)
    assert all(bool((out == 0).all()) for out in outs)
    assert torch.equal(before[0][:, :4], rig.runtime.cache.counters[:, :4]), "padding was counted"
    assert torch.equal(before[1], rig.runtime.host.nan_to_num(0)), "padding was written"
    assert torch.equal(before[2], rig.runtime.predicted[1:])
    rig.decode([1])


def test_padding_beside_a_request_changes_no_bit():
    def run(batch):
        rig = Rig(seed=5, layers=2, pages=60, context=200, requests=2)
        rig.start(1)
        rig.extend({1: 150})
        rig.history[0] = [(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)) for _ in range(2)]
        rig.owned[0] = [0]
        rand = torch.Generator().manual_seed(1)
        found = []
        for _ in range(6):
            data = []
            for _ in range(2):
                shapes = (2, 4, 8), (2, 2, 8), (2, 2, 8)
                data.append([torch.randn(*shape, generator=rand).repeat(len(batch), 1, 1) for shape in shapes])
            place = 2 * batch.index(1)
            found += [out[place].clone() for out in rig.decode(batch, data, verify=False)]
        return found, rig.runtime.cache.counters

    alone, padded = run([1]), run([1, 0, 0])
    assert all(torch.equal(a, b) for a, b in zip(alone[0], padded[0])) and torch.equal(alone[1], padded[1])


def test_a_shut_gate_holds_back_its_request_in_resident_layers():
    """Early and late layers each by their own flag; a ring buffer, empty otherwise, takes any prediction."""
    for flag, quiet in ((EARLY, [0, 1]), (LATE, [4, 5])):
        rig = Rig(layers=6, lookahead=2, residency=[0, 1, 4, 5], budget=32, pages=300, context=700, hysteresis=0)
        # Few slots, so that predictions are not in the cache anyway.
        rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width + 4})
        for req in (1, 2):
            rig.start(req)
            rig.extend({req: 500})
        rig.runtime.gate.open[flag, 1] = False
        for _ in range(8):
            rig.decode([1])
        layers = counters(rig)
        busy = [layer for layer in (0, 1, 4, 5) if layers[layer]["prefetched"] > 0]
        assert busy == [layer for layer in (0, 1, 4, 5) if layer not in quiet]
        assert all(layers[layer]["prefetched"] > 0 for layer in (2, 3))
        before = [layer["prefetched"] for layer in layers]
        rig.decode([2])
        rig.decode([2])
        assert all(layer["prefetched"] > count for layer, count in zip(counters(rig), before)), "another's gate is open"
