"""The page cache in small states drawn by hand; test_page_cache_fuzz.py has the random ones."""

from __future__ import annotations

import random

import pytest
import torch
from cache_rig import DIM, FULL, PAGES, clock, make_cache, rows
from sglang.srt.sparse_kv.geometry import resident_layers
from sglang.srt.sparse_kv.ops import landmarks, reference, reference_prefill
from sglang.srt.sparse_kv.ops.reference import COUNTERS, NEVER, NONE, RESERVED, CapacityError, Prefetch
from sglang.srt.sparse_kv.page_cache import PageCache


def units(*requests) -> torch.Tensor:
    """int32 [N, 1, C] of one head from a list of pages per request, padded with NONE."""
    width = max((len(r) for r in requests), default=0)
    return torch.tensor([[[*r, *[NONE] * (width - len(r))]] for r in requests], dtype=torch.int32)


def put(cache: PageCache, pages: list[int], stamps: list[int], ahead: list[int] = ()) -> reference.LayerView:
    """A one-head view whose slots hold `pages` (NONE: free) with these stamps; `ahead`: slots prefetched, not used."""
    view = cache.views[0]
    for slot, (page, stamp) in enumerate(zip(pages, stamps)):
        view.page_of[0, slot], view.stamp[0, slot] = page, stamp
        view.ahead[0, slot] = slot in ahead
        if page != NONE:
            view.slot_of[0, page] = slot
    cache.check()
    return view


def counter(view, name: str) -> int:
    return int(view.counters[COUNTERS.index(name)])


# ---------------------------------------------------------------- four slots, drawn


def test_free_slots_go_first_then_the_oldest_then_the_lower():
    #        slot   0   1   2   3
    #        page   5   7   -   2
    #        stamp  8   9   -   8
    view = put(cache := make_cache(4), [5, 7, NONE, 2], [8, 9, NEVER, 8])
    slots, fetch = reference.resolve(view, units([7, 3, 4]), None, clock(10))
    #        page   4   7   3   2      7 is a hit; 3 takes the free slot, 4 the lower of the two oldest
    assert view.page_of.tolist() == [[4, 7, 3, 2]]
    assert view.stamp.tolist() == [[10, 10, 10, 8]]
    assert slots.tolist() == [[[1, 2, 0]]] and rows(fetch) == [(3, 0, 2, FULL), (4, 0, 0, FULL)]
    assert int(view.slot_of[0, 5]) == NONE and counter(view, "evicted") == 1
    cache.check()


def test_hits_are_stamped_before_victims_are_taken():
    #        page   5   7   8   2      5 is the oldest, and selected: a walk in one phase would evict it for 1
    #        stamp  3   9   9   9
    view = put(make_cache(4), [5, 7, 8, 2], [3, 9, 9, 9])
    slots, _ = reference.resolve(view, units([1], [5]), None, clock(10))
    assert view.page_of.tolist() == [[5, 1, 8, 2]] and slots.tolist() == [[[1]], [[0]]]


def test_capacity_is_exact():
    """Two requests of two pages fit four slots whatever lies there; a fifth page is one sentence."""
    view = put(make_cache(4), [5, 7, 8, 2], [9, 9, 9, 9])
    reference.resolve(view, units([10, 11], [12, 13]), None, clock(10))
    assert sorted(view.page_of[0].tolist()) == [10, 11, 12, 13]
    with pytest.raises(CapacityError, match=r"needs 1 slots and 0 of 4 may be evicted; lower .*, or raise \w+$"):
        reference.resolve(view, units([1]), None, clock(10))  # still the same step


def test_a_prefetch_leaves_this_step_alone_and_yields_to_it():
    #        page   5   7   8   2      planned ahead of step 10, when 2 and 8 were selected in step 9
    #        stamp  7   8   9   9
    view = put(cache := make_cache(4), [5, 7, 8, 2], [7, 8, 9, 9])
    fetch = reference.plan_prefetch(Prefetch(view, units([1, 3, 4]), clock(9), cap=3))
    assert rows(fetch) == [(1, 0, 0, FULL), (3, 0, 1, FULL)], "4 ranks last and finds no slot older than step 9"
    #        page   1   3   8   2      all of them yield to the true selection of step 10
    reference.resolve(view, units([10, 11, 12, 13]), None, clock(10))
    assert sorted(view.page_of[0].tolist()) == [10, 11, 12, 13] and counter(view, "wasted") == 2
    cache.check()
    fetch = reference.plan_prefetch(Prefetch(view, units([1]), clock(10), cap=1))
    assert rows(fetch) == [], "after the selection nothing is older than step 10"


def test_a_unit_in_flight_is_a_hit_and_useful_once():
    view = make_cache(4).views[0]
    plan = Prefetch(view, units([6, 7], [6]), clock(9), cap=2)  # shared by two requests: one fetch
    reference.plan_prefetch(plan)
    assert counter(view, "prefetched") == 2 and counter(view, "tokens_in") == 2 * FULL
    _, fetch = reference.resolve(view, units([6], [6]), None, clock(10))
    assert rows(fetch) == [] and counter(view, "hit") == 2 and counter(view, "useful") == 1
    reference.resolve(view, units([6]), None, clock(11))
    assert counter(view, "useful") == 1 and view.ahead.sum() == 1
    reference.clear(view)
    assert counter(view, "wasted") == 1


def test_predicted_pages_stay_but_never_grow_younger_than_they_are():
    #        page   5   7
    #        stamp  3  12     predicted for step 9 both: 5 is kept, 7 was selected later than that
    view = put(make_cache(2), [5, 7], [3, 12])
    reference.plan_prefetch(Prefetch(view, units([5, 7]), clock(9), cap=2))
    assert view.stamp.tolist() == [[9, 12]] and not view.ahead.any()


def test_the_cap_counts_missing_units_per_request_and_head():
    view = put(make_cache(6), [5], [3])
    fetch = reference.plan_prefetch(Prefetch(view, units([5, 6, 7, 8], [9, 10, 11]), clock(9), cap=2))
    assert [r[0] for r in rows(fetch)] == [9, 6, 10, 7]  # by rank, then request; 8 and 11 are beyond the cap


def test_padding_reaches_nothing():
    """-1 is the last page and the last slot to an indexing bug."""
    view = put(make_cache(2), [PAGES - 1, 4], [5, 5])
    before = [t.clone() for t in (view.slot_of, view.page_of, view.stamp, view.ahead)]
    nothing = units([NONE, NONE], [NONE, NONE])
    _, fetch = reference.resolve(view, nothing, None, clock(9))
    assert rows(fetch) == [] == rows(reference.plan_prefetch(Prefetch(view, nothing, clock(9), 4)))
    reference.invalidate(view, torch.tensor([NONE, NONE]))
    after = (view.slot_of, view.page_of, view.stamp, view.ahead)
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and not view.counters.any()
    empty = torch.zeros((0, 1, 3), dtype=torch.int32)
    slots, fetch = reference.resolve(view, empty, None, clock(9))
    assert slots.shape == (0, 1, 3) and rows(fetch) == []


def test_invalidated_pages_are_gone_from_every_head():
    cache = make_cache(3, heads=2)
    view = cache.views[0]
    pages = torch.tensor([[[4, 5], [5, 6]]], dtype=torch.int32)
    reference.resolve(view, pages, None, clock(9))
    reference.invalidate(view, torch.tensor([5, 5, 9, NONE]))
    assert view.page_of.tolist() == [[4, NONE, NONE], [NONE, 6, NONE]]
    assert view.stamp.tolist() == [[9, NEVER, NEVER], [NEVER, 9, NEVER]]
    cache.check()


def test_an_install_takes_long_unused_slots_only_the_last_page_first():
    #        page   5   7   8   -
    #        stamp  2   9   9   -
    view = put(cache := make_cache(4), [5, 7, 8, NONE], [2, 9, 9, NEVER])
    fetch = reference_prefill.install(view, torch.tensor([10, 11, 12]), torch.tensor([FULL, FULL, 3]), clock(5))
    assert rows(fetch) == [(12, 0, 3, 3), (11, 0, 0, FULL)]
    assert counter(view, "missed") == counter(view, "tokens_in") == 0 and counter(view, "evicted") == 1
    cache.check()


# ---------------------------------------------------------------- writing a token


def append(view, page: list[int], offset: list[int], active: list[int], step: int, through: bool = True):
    n, heads = len(page), view.kv.shape[0]
    k = 1000.0 + torch.arange(n * heads * DIM).view(n, heads, DIM)
    fetches = []

    def now(target, fetch):
        fetches.extend(rows(fetch))
        reference.gather(target, fetch)

    slots = reference.append(
        view,
        k,
        -k,
        torch.tensor(page, dtype=torch.int32),
        torch.tensor(offset),
        torch.tensor(active, dtype=torch.bool),
        clock(step),
        now,
        through,
    )
    return k, slots, fetches


@pytest.mark.parametrize("offset", range(FULL))
def test_an_absent_open_page_is_fetched_up_to_the_committed_length(offset):
    cache = make_cache(2, heads=2)
    view = cache.views[0]
    truth = view.host.clone()
    view.host[3, :, :, offset:] = float("inf")  # what the host holds beyond the committed tokens is anybody's
    k, slots, fetches = append(view, [3, 9], [offset, 0], [1, 0], 10)
    assert fetches == [(3, h, 0, offset) for h in range(2)]
    assert slots.tolist() == [[0, 0], [NONE, NONE]]
    unit = view.kv[:, 0]
    assert torch.equal(unit[:, :, :offset], truth[3, :, :, :offset])
    assert torch.equal(unit[:, 0, offset], k[0]) and torch.equal(unit[:, 1, offset], -k[0])
    assert unit[:, :, offset + 1 :].isnan().all(), "the fetch carried tokens beyond the committed length"
    assert torch.equal(view.host[3, :, 0, offset], k[0]) and torch.equal(view.host[9], truth[9])
    closed = offset == FULL - 1
    made = landmarks.make(unit[:, 0]) if closed else landmarks.empty(2, dim=DIM, device=unit.device)
    assert torch.equal(view.landmarks.codes[3], made.codes) and torch.equal(view.landmarks.scales[3], made.scales)
    assert counter(view, "missed") == 2 * (offset > 0) and counter(view, "selected") == 0
    cache.check()


def test_the_entry_of_an_earlier_owner_is_taken_over():
    view = put(cache := make_cache(2), [3, 5], [9, 9])
    view.kv[0] = 7.0
    k, slots, fetches = append(view, [3], [0], [1], 10)
    assert fetches == [] and slots.tolist() == [[0]]
    assert torch.equal(view.kv[0, 0, 0, 0], k[0, 0]) and bool((view.kv[0, 0, :, 1:] == 7.0).all())
    cache.check()


def test_without_write_through_the_host_is_as_before():
    view = make_cache(2).views[0]
    before = view.host.clone()
    append(view, [3], [1], [1], 10, through=False)
    assert torch.equal(view.host, before)


def test_open_pages_of_a_batch_do_not_evict_one_another():
    view = put(make_cache(4), [3, 5, 6, 7], [9, 9, 9, 9])
    _, slots, _ = append(view, [8, 3, 9, 10], [0, 2, 0, 1], [1, 1, 1, 1], 10)
    assert sorted(slots[:, 0].tolist()) == [0, 1, 2, 3] and int(slots[1, 0]) == 0


def test_a_landmark_is_the_same_whoever_closes_the_page():
    """Prefill reads the host, decode the cache: bit for bit one summary, or selections depend on how text arrived."""
    for seed in range(5):
        rand = torch.Generator().manual_seed(seed)
        cache = make_cache(3, heads=2, layers=2)
        k = torch.randn(3 * FULL, 2, DIM, generator=rand)
        reference_prefill.store_chunk(cache.views[0], k, k, torch.arange(3 * FULL) + FULL)
        for t in range(3 * FULL):
            for h in range(2):
                cache.views[1].host[1 + t // FULL, h, :, t % FULL] = k[t, h]
        for page in (1, 2, 3):
            last = k[page * FULL - 1][None]
            args = torch.tensor([page], dtype=torch.int32), torch.tensor([FULL - 1]), torch.tensor([True])
            reference.append(cache.views[1], last, last, *args, clock(page), reference.gather)
        for mine, theirs in zip(*(view.landmarks for view in cache.views), strict=True):
            assert torch.equal(mine[1:4], theirs[1:4]) and bool((mine[1:4] != 0).any())


# ---------------------------------------------------------------- layers, residency, limits


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("all", range(4)),
        ("none", []),
        (0.5, [0, 1]),
        (0, []),
        (1, range(4)),
        (1.0, range(4)),
        ([3], [3]),
        ((2, 1), [1, 2]),
    ],
)
def test_residency(given, expected):
    assert resident_layers(given, 4) == set(expected)


@pytest.mark.parametrize("given", ["half", 1.5, -0.1, float("nan"), [4], [-1], [0.5], [True], None, True])
def test_bad_residency_is_one_sentence(given):
    with pytest.raises(ValueError, match=r"^residency must be .* below 4, got "):
        resident_layers(given, 4)


@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("residency", ["none", [1], [0, 2], [0, 1, 3, 4], "all"])
def test_layers_share_ring_buffers_in_turn(ring, residency):
    cache = make_cache(2, layers=6, residency=residency, ring=ring)
    resident = resident_layers(residency, 6)
    assert cache.scoped == [i for i in range(6) if i not in resident]
    assert len(cache.buffers()) == len(resident) + (ring if cache.scoped else 0)
    owners: dict[int, list[int]] = {}
    for layer, view in enumerate(cache.views):
        owners.setdefault(view.kv.data_ptr(), []).append(layer)
        assert view.host.data_ptr() == cache.host[layer].data_ptr()
        assert view.counters.data_ptr() == cache.counters[layer].data_ptr()
    shared = [layers for layers in owners.values() if layers[0] not in resident]
    assert shared == [cache.scoped[turn::ring] for turn in range(ring) if cache.scoped[turn::ring]]
    lanes: dict[int, set[int]] = {}
    for lane, view in zip(cache.lanes, cache.views):
        lanes.setdefault(lane, set()).add(view.kv.data_ptr())
    assert all(len(buffers) == 1 for buffers in lanes.values()) and len(lanes) == len(owners)


def test_residency_and_limits_change_with_entries_in_the_cache():
    """Buffers that no layer uses for now are emptied as well: what they held may be rewritten meanwhile."""
    cache = make_cache(4, layers=3, both_modes=True)
    rand = random.Random(0)
    for residency in ("all", "none", [1], "all", 0.5, "all"):
        for usable in (2, 4, 0):
            for layer, view in enumerate(cache.views):  # layers of one ring buffer in turn
                reference.resolve(view, units(rand.sample(range(1, PAGES), 2)), None, clock(9 + layer))
            cache.check()
            cache.set_residency(residency)
            cache.limit_slots(usable)
            cache.check()
            assert all(int((b.page_of >= 0).sum()) == int((b.slot_of >= 0).sum()) == 0 for b in cache.buffers())
            free = [int((b.stamp == NEVER).sum()) for b in cache.buffers()]
            assert free == [usable or 4] * len(free)
    assert cache.used_slots() == 0


def test_a_residency_without_buffers_changes_nothing():
    cache = make_cache(2, layers=3, residency=[0])
    with pytest.raises(ValueError, match="not allocated at start"):
        cache.set_residency("all")
    assert cache.scoped == [1, 2] and len(cache.views) == 3


def test_reserved_slots_are_never_used():
    cache = make_cache(4)
    cache.limit_slots(2)
    view = cache.views[0]
    with pytest.raises(CapacityError, match="needs 3 slots and 2 of 4"):
        reference.resolve(view, units([1, 2, 3]), None, clock(9))
    reference.resolve(view, units([1, 2]), None, clock(9))
    reference.plan_prefetch(Prefetch(view, units([5, 6]), clock(9), cap=9))
    reference_prefill.install(view, torch.tensor([7]), torch.tensor([FULL]), clock(9))
    reference.clear(view)
    assert view.stamp.tolist() == [[NEVER, NEVER, RESERVED, RESERVED]]
    assert view.page_of[0, 2:].tolist() == [NONE, NONE]
    cache.check()


@pytest.mark.parametrize("fault", ["two slots", "lost entry", "no stamp", "ahead"])
def test_check_notices(fault):
    view = put(cache := make_cache(3), [5, 7, NONE], [8, 9, NEVER])
    if fault == "two slots":
        view.page_of[0, 2], view.stamp[0, 2] = 5, 9
    elif fault == "lost entry":
        view.slot_of[0, 3] = 1
    elif fault == "no stamp":
        view.stamp[0, 0] = NEVER
    else:
        view.ahead[0, 2] = True
    with pytest.raises(AssertionError):
        cache.check()


@pytest.mark.parametrize("seed", range(20))
def test_a_token_is_written_alike_ahead_of_the_look_up_and_behind_it(seed):
    """Bytes, stamps, landmarks, counters and accounts, whatever misses; with free slots, since victims may differ."""
    rand = torch.Generator().manual_seed(seed)
    draw = lambda high, *size: torch.randint(0, high, size, generator=rand)  # noqa: E731
    n, heads, width = 4, 2, 5
    ahead, behind = (make_cache(PAGES, heads=heads).views[0] for _ in range(2))
    order = (torch.randperm(PAGES - 1, generator=rand) + 1).int()
    opened, closed = order[:n], order[n:]
    number = draw(width, n) + 1
    active = draw(4, n) > 0
    number[~active] = 0
    pages = torch.full((n, heads, width), NONE, dtype=torch.int32)
    for i, count in enumerate(number.tolist()):
        for head in range(heads if count else 0):
            chosen = closed[torch.randperm(len(closed), generator=rand)[: count - 1]]
            pages[i, head, :count] = torch.cat([chosen, opened[i : i + 1]])
    offset, owner = torch.where(draw(3, n) == 0, 0, draw(FULL, n)), torch.randperm(n, generator=rand)
    k, v = (torch.randn(n, heads, DIM, generator=rand) for _ in range(2))
    resident = order[draw(2, len(order)) > 0]
    found = []
    for view in (ahead, behind):
        # What lies in the cache of an open page that begins is an earlier owner's.
        fetch = reference.plan_prefetch(Prefetch(view, resident.expand(1, heads, -1), clock(9), cap=PAGES))
        reference.gather(view, fetch)
        account = torch.zeros((n, 2), dtype=torch.int32)
        wide = {"num_pages": number, "fetched": account, "owner": owner}
        if view is ahead:
            reference.append(view, k, v, opened, offset, active, clock(10), reference.gather)
            slots, fetch = reference.resolve(view, pages, None, clock(10), **wide)
            reference.gather(view, fetch)
        else:
            slots, fetch = reference.resolve(view, pages, None, clock(10), open_tokens=offset, **wide)
            reference.gather(view, fetch)
            reference.write_token(view, k, v, opened, None, offset, active)
            reference.close_pages(view, opened, offset, active)
        used = pages >= 0
        kv = view.kv[torch.arange(heads)[None, :, None].expand_as(pages)[used], slots[used].long()].nan_to_num(7.0)
        stamps = torch.where(view.slot_of >= 0, view.stamp.gather(1, view.slot_of.clamp(min=0).long()), NEVER)
        found.append((kv, stamps, view.counters, account, view.host, *view.landmarks))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert bool(active.any()) and counter(behind, "evicted") == 0
