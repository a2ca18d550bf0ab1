"""Steps that select every page look its pages up beside the layer before: same tokens, bytes, tables and counters as by
scores.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from sglang.srt.sparse_kv import decode
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.schedule import Schedule
from sglang.srt.sparse_kv.transfer import DelayedTransfer
from sglang.srt.sparse_kv.variants import Variant
from sparse_rig import Rig

PAGE = 8
ALL, ONE = Variant.ALL_PAGES, Variant.ONE_ROW
WITHIN = 7 * PAGE - 1  # the longest context that is selected whole: a sink, four pages of budget, a window of two


def rig_of(lengths: dict[int, int], variant: Variant = ALL, **policy) -> Rig:
    rig = Rig(seed=11, layers=4, pages=120, context=200, requests=4, rows="auto")
    rig.runtime.apply_policy({"check": 1, **policy})
    rig.runtime.variant = variant
    for req, length in lengths.items():
        rig.start(req)
        rig.extend({req: length})
    return rig


def pad(rig: Rig) -> None:
    """Lets request 0, SGLang's padding, take part."""
    rig.history[0] = [(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)) for _ in range(4)]
    rig.owned[0] = [0]


def step(rig: Rig, reqs: list[int]) -> list[torch.Tensor]:
    """One step of requests and padding; outputs of the requests."""
    outs = rig.decode(reqs, verify=0 not in reqs)
    if 0 in reqs:
        pad(rig)
        rig.chosen.clear()  # within the budget nothing is remembered
    return [out[[i for i, req in enumerate(reqs) if req]].clone() for out in outs]


def evict(rig: Rig, pages: list[int]) -> None:
    for view in rig.runtime.cache.views:
        reference.invalidate(view, torch.tensor(pages))


def state(rig: Rig) -> list[torch.Tensor]:
    """Host, landmarks of closed pages, which units are resident, their stamps and bytes, counters, accounts."""
    runtime, found = rig.runtime, []
    written = torch.zeros(rig.geometry.num_pages, dtype=torch.bool)
    for req, owned in rig.owned.items():
        if req:
            written[owned[: rig.length(req) // PAGE]] = True
    for layer, view in enumerate(runtime.cache.views):
        resident, slot = view.slot_of >= 0, view.slot_of.clamp(min=0).long()
        found += [resident, torch.where(resident, view.stamp.gather(1, slot), -1), view.counters.clone()]
        head = torch.arange(slot.shape[0])[:, None]
        whole = resident & written
        found.append(view.kv[head, slot][whole].clone())
        found += [t[layer][written].clone() for t in runtime.landmarks]
    return [*found, runtime.host.nan_to_num(7.0).clone(), runtime.fetched.clone()]


def both(script) -> Rig:
    """Runs a script, rig -> outputs, with every page selected by no scores and by them; asserts that all is equal."""
    ours, expected = script(ALL), script(ONE)
    for a, b in zip(ours[1], expected[1], strict=True):
        assert torch.equal(a, b), "an output differs"
    for number, (a, b) in enumerate(zip(state(ours[0]), state(expected[0]), strict=True)):
        assert torch.equal(a, b), f"state {number} differs"
    return ours[0]


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 3 * PAGE, 4 * PAGE + 1, WITHIN - PAGE])
def test_a_request_of_any_length(length):
    """From below a page's border to beyond the next: a page closes, one begins."""

    def script(variant):
        rig = rig_of({1: length}, variant)
        return rig, [out for _ in range(PAGE + 1) for out in step(rig, [1])]

    rig = both(script)
    total = rig.runtime.cache.counters.sum(0)
    assert int(total[reference.SELECTED]) == int(total[reference.HIT]) and not int(total[reference.MISSED])


@pytest.mark.parametrize("transfer", ["plain", "delayed", "reordered", "failing", "faulty"])
def test_company(transfer):
    """Requests on one prefix, padding among them, one that rests, pages that leave in between, the open ones too."""

    def script(variant):
        rig = rig_of({1: 20, 2: PAGE}, variant, transfer=transfer, seed=5)
        rig.fork(3, 1, 2 * PAGE)
        rig.extend({3: 7})
        pad(rig)
        outs = []
        for turn in range(20):
            reqs = [[1, 2, 3], [3, 1], [0, 1, 2, 0], [2, 0, 3]][turn % 4]
            if turn % 3 == 1:
                owned = [page for req in (1, 2, 3) for page in rig.owned[req]]
                evict(rig, [page for i, page in enumerate(owned) if (i + turn) % 3 == 0])
            if turn % 5 == 2:
                evict(rig, [rig.owned[req][rig.length(req) // PAGE] for req in (1, 2, 3) if rig.length(req) % PAGE])
            outs += step(rig, reqs)
        return rig, outs

    rig = both(script)
    total = rig.runtime.cache.counters.sum(0)
    assert 0 < int(total[reference.MISSED]) < int(total[reference.SELECTED])
    assert int(rig.runtime.fetched.sum()) > 0


def test_what_an_earlier_owner_left_of_a_page_is_dead():
    """A page whose entry is still in the cache begins anew in decode: nothing is fetched, nothing shows through."""

    def script(variant):
        rig = rig_of({1: 5 * PAGE, 2: PAGE - 2}, variant)
        outs = step(rig, [1, 2])
        left = rig.owned[1][:3]
        rig.finish(1)
        rig.free = [page for page in rig.free if page not in left] + left  # the next that are handed out
        rig.runtime.poison_freed(torch.tensor(left))
        stale = [bool((view.slot_of[:, page] >= 0).all()) for view in rig.runtime.cache.views for page in left]
        assert all(stale)
        for _ in range(2 * PAGE + 2):
            outs += step(rig, [2])
        assert set(rig.owned[2][1:]) <= set(left)
        return rig, outs

    rig = both(script)
    assert not int(rig.runtime.cache.counters[:, reference.MISSED].sum())


@pytest.mark.parametrize("variant", [ALL, ONE])
def test_a_page_that_begins_is_no_miss_and_no_stall(variant):
    rig = rig_of({1: PAGE - 1, 2: 2 * PAGE - 2}, variant)
    before = rig.runtime.cache.counters.clone()
    step(rig, [1, 2])
    evict(rig, [rig.owned[1][1]])  # which has no token yet
    rig.runtime.cache.stalled.zero_()
    step(rig, [1, 2])
    counted = (rig.runtime.cache.counters - before).sum(0)
    assert not int(counted[reference.MISSED]) and not int(counted[reference.TOKENS_IN])
    assert not bool(rig.runtime.cache.stalled.any()) and not bool(rig.runtime.fetched.any())
    evict(rig, [rig.owned[1][1]])  # which has one now
    step(rig, [1, 2])
    counted = (rig.runtime.cache.counters - before).sum(0)
    units = 4 * 2
    assert int(counted[reference.MISSED]) == int(counted[reference.TOKENS_IN]) == units
    assert bool((rig.runtime.cache.stalled > 0).all())


def test_a_crowded_cache():
    """With just the slots that the rule asks for, and requests that take turns."""
    rig = rig_of({1: 40, 2: 33, 3: PAGE, 4: 15}, transfer="reordered", seed=2)
    rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width + 1, "transfer": "reordered", "seed": 2})
    for turn in range(12):
        step(rig, [1 + turn % 4])
        rig.runtime.cache.check()
    total = rig.runtime.cache.counters.sum(0)
    assert int(total[reference.EVICTED]) > 0 and int(total[reference.MISSED]) > 0


def test_the_next_layer_is_looked_up_before_its_keys_are_known(monkeypatch):
    """The order of events: what remains between a layer's keys and its attention is the write."""
    rig, events = rig_of({1: 20}), []
    for name in ("resolve", "write_token", "attend", "close_pages", "append", "score"):
        operation = getattr(rig.runtime.ops, name)

        def noted(*args, name=name, operation=operation, **more):
            events.append(name)
            return operation(*args, **more)

        monkeypatch.setattr(rig.runtime.ops, name, noted)
    step(rig, [1])
    layer = ["write_token", "attend", "close_pages"]
    assert events == ["resolve", *itertools.chain.from_iterable([*layer, "resolve"] for _ in range(3)), *layer]


# ---------------------------------------------------------------- sabotage


@pytest.mark.parametrize("variant", [ALL, ONE])
def test_an_open_page_that_is_not_looked_up_is_noticed(variant, monkeypatch):
    resolve = decode._resolve

    def without_open(runtime, step, layer, whole, *more, **waited):
        last = (torch.arange(whole.pages.shape[2]) == whole.num_pages[:, None] - 1)[:, None]
        selection = reference.Selection(torch.where(last, -1, whole.pages), whole.num_pages, None)
        return resolve(runtime, step, layer, selection, *more, **waited)

    monkeypatch.setattr(decode, "_resolve", without_open)
    rig = rig_of({1: PAGE}, variant)
    with pytest.raises(AssertionError, match="an open page has no slot"):
        step(rig, [1])


@pytest.mark.parametrize("variant", [ALL, ONE])
def test_a_fetch_that_nobody_waits_for_is_noticed(variant, monkeypatch):
    def submit(schedule, layer, view, fetch):
        runtime = schedule.runtime
        runtime.transfer.submit(runtime.cache.lanes[layer], partial(runtime.ops.gather, view, fetch))

    rig = rig_of({1: 20}, variant)
    rig.runtime.policy.check = False
    rig.runtime.transfer = DelayedTransfer()
    step(rig, [1])
    evict(rig, rig.owned[1])
    monkeypatch.setattr(Schedule, "fetch_now", submit)
    with pytest.raises(AssertionError):
        step(rig, [1])


@pytest.mark.parametrize("variant", [ALL, ONE])
def test_a_fetch_of_more_than_the_committed_tokens_is_noticed(variant, monkeypatch):
    """One that carried the open page whole, and landed late, would undo the write."""
    fetches = []
    rig = rig_of({1: 20, 2: PAGE}, variant)
    operation = rig.runtime.ops.resolve

    def noted(*args, **more):
        slots, fetch = operation(*args, **more)
        fetches.append(fetch.units[: int(fetch.count)])
        return slots, fetch

    monkeypatch.setattr(rig.runtime.ops, "resolve", noted)

    def most() -> int:
        evict(rig, [rig.owned[req][rig.length(req) // PAGE] for req in (1, 2) if rig.length(req) % PAGE])
        committed = {
            rig.owned[req][rig.length(req) // PAGE]: rig.length(req) % PAGE for req in (1, 2) if rig.length(req) % PAGE
        }
        fetches.clear()
        step(rig, [1, 2])
        return max(tokens - committed[page] for page, _, _, tokens in torch.cat(fetches).tolist() if page in committed)

    assert most() == 0
    operation = lambda *args, open_tokens=None, **more: reference.resolve(*args, **more)  # noqa: E731
    assert most() > 0


def test_another_layer_s_pages_are_refused(monkeypatch):
    find = decode._find
    monkeypatch.setattr(decode, "_find", lambda runtime, step, layer, *more: find(runtime, step, min(layer, 2), *more))
    rig = rig_of({1: 20})
    with pytest.raises(AssertionError, match="another layer's pages"):
        step(rig, [1])
