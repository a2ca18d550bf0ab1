"""The page cache's tables: resolve, prefetch, install, invalidate, clear against the reference."""

from __future__ import annotations

import time

import pytest
import torch
from layers import copied, copy_of, make_layer, random_selection, same_fetch, same_tables
from sglang.srt.sparse_kv.ops import cuda, reference, reference_prefill
from sglang.srt.sparse_kv.ops.reference import COUNTERS, NONE, RESERVED, CapacityError, Prefetch
from sglang.srt.sparse_kv.ops.workspace import workspace

STEP = 40


def step_on(device, value=STEP):
    return torch.tensor([value], dtype=torch.int32, device=device)


cap_on = step_on


CASES = [
    # n, heads, width, slots, pages, resident, inactive
    (1, 1, 1, 8, 16, 0.0, 0),
    (1, 2, 5, 24, 64, 0.7, 0),
    (3, 2, 6, 40, 64, 1.0, 0),
    (3, 3, 6, 40, 64, 0.5, 2),
    (2, 1, 30, 100, 300, 1.0, 0),
    (17, 2, 9, 200, 97, 0.8, 0),
    (2, 1, 150, 400, 500, 0.3, 0),
]
LARGE = [(4, 8, 134, 2500, 9000, 1.0, 0), (64, 2, 200, 16000, 17000, 1.0, 0), (32, 8, 134, 5000, 6000, 0.9, 3)]


def unit_shape(case) -> tuple[int, int]:
    """Page size and head_dim: small units where there are many."""
    return (8, 16) if case in LARGE else (16, 64)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("move", [False, True])
def test_resolve(engine, case, move):
    n, heads, width, slots, pages, resident, inactive = case
    if engine.small and case in LARGE:
        pytest.skip("too large to emulate")
    for seed in range(2 if case in LARGE else 3 if engine.small else 6):
        engine.seed(seed)
        view = make_layer(seed, engine.device, heads, slots, pages, *unit_shape(case), resident=resident)
        expected = copy_of(view)
        before = copy_of(view)
        chosen = random_selection(seed, n, heads, width, pages, inactive)
        tokens = torch.where(chosen % 5 == 0, chosen % 16, 16).to(torch.int32) if seed % 2 else None
        slots_ref, fetch_ref = reference.resolve(expected, chosen, tokens, step_on("cpu"), count=seed != 1)
        on_device = None if tokens is None else tokens.to(engine.device)
        got, fetch = cuda.resolve(
            view, chosen.to(engine.device), on_device, step_on(engine.device), count=seed != 1, move=move
        )
        workspace(engine.device).check()
        same_tables(view, expected, before)
        same_fetch(view, fetch, fetch_ref)
        used = chosen >= 0
        head = torch.arange(heads)[None, :, None].expand_as(chosen)
        assert torch.equal(got.cpu()[used], view.slot_of.cpu()[head[used], chosen[used].long()])
        assert bool((got.cpu()[~used] == NONE).all())
        cuda.gather(view, fetch)
        copied(view, fetch)
        assert int(cuda.check(view)) == 0
        assert not bool(workspace(engine.device).urgent.any())
        assert not bool(workspace(engine.device).tasks.view(-1, 8)[:, :4].any()), "helpers left their counters behind"


@pytest.mark.parametrize("step", [300, 511, 513, 700, 5000, 10**6, 2**31 - 100])
def test_victims_of_any_age(engine, step):
    """The oldest slots leave, however far apart their ages lie."""
    for seed, resident in enumerate((0.97, 1.0, 1.0)):
        engine.seed(seed)
        view = make_layer(seed, engine.device, 2, 300, 600, 8, 16, resident=resident, step=step)
        if seed == 2:  # ages in clusters: many equal ones, a few far away
            view.stamp[:] = torch.where(view.stamp % 3 == 0, view.stamp, view.stamp % 7)
        expected, before = copy_of(view), copy_of(view)
        chosen = random_selection(seed, 4, 2, 60, 600)
        reference.resolve(expected, chosen, None, step_on("cpu", step))
        cuda.resolve(view, chosen.to(engine.device), None, step_on(engine.device, step), move=bool(seed % 2))
        workspace(engine.device).check()
        same_tables(view, expected, before)


def test_more_candidates_than_shared_memory_holds(engine):
    for seed, room in ((0, 3000), (1, 500)):
        engine.seed(seed)
        view = make_layer(seed, engine.device, 1, 3000, 4000, 8, 16, resident=0.1)
        if room < 3000:
            view.stamp[:, room:] = torch.where(view.page_of[:, room:] >= 0, STEP, RESERVED)
        chosen = (torch.randperm(3000, generator=torch.Generator().manual_seed(seed)) + 1).to(torch.int32)
        chosen = torch.cat([chosen, chosen[:200]]).view(4, 1, 800)
        expected, before = copy_of(view), copy_of(view)
        if room == 3000:
            reference.resolve(expected, chosen[:3], None, step_on("cpu"))
            got, _ = cuda.resolve(view, chosen[:3].to(engine.device), None, step_on(engine.device))
            assert torch.equal(got.cpu()[:, 0], view.slot_of.cpu()[0][chosen[:3, 0].long()])
        else:
            reference.plan_prefetch(Prefetch(expected, chosen, step_on("cpu"), cap_on("cpu", 700)))
            limit = cap_on(engine.device, 700)
            cuda.plan_prefetch(Prefetch(view, chosen.to(engine.device), step_on(engine.device), limit))
        same_tables(view, expected, before)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_imposed_misses(engine, rate):
    """A share of the hits is brought again into the slots they have: same tables, other counters, other bytes moved."""
    n, heads, width = 4, 2, 40
    view = make_layer(0, engine.device, heads, 300, 200, 8, 16, resident=0.6)
    view.kv += 1  # what is brought again agrees with the host, what is not does not
    expected, before = copy_of(view), copy_of(view)
    chosen = random_selection(1, n, heads, width, 200, inactive=1)
    try:
        cuda.set_miss_rate(engine.device, rate)
        reference.resolve(expected, chosen, None, step_on("cpu"))
        slots, _ = cuda.resolve(view, chosen.to(engine.device), None, step_on(engine.device), move=True)
    finally:
        cuda.set_miss_rate(engine.device, 0)
    ours, missed = copy_of(view), COUNTERS.index("missed")
    hits = int(expected.counters[COUNTERS.index("hit")])
    again = int(ours.counters[missed] - expected.counters[missed])
    assert again == rate * hits if rate in (0, 1) else 0.15 * hits < again < 0.45 * hits
    assert int(ours.counters[COUNTERS.index("hit")]) == hits - again
    view.counters.copy_(expected.counters)
    same_tables(view, expected, before)
    used = chosen >= 0
    head = torch.arange(heads)[None, :, None].expand_as(chosen)[used]
    units = ours.kv[head, slots.cpu()[used].long()]
    same = (units == ours.host[chosen[used].long(), head]).flatten(1).all(1)
    always = int(used.sum()) - hits  # missing anyway
    assert int(same.sum()) == always + rate * hits if rate in (0, 1) else always < int(same.sum()) < same.numel()
    assert not bool(workspace(engine.device).urgent.any())


@pytest.mark.parametrize("way", ["resolve", "gather", "nothing misses", "imposed", "oracle", "ahead"])
def test_a_stall_is_noted_while_misses_move(engine, way):
    """By the launch that brings what a selection misses, and by no other; by one clock for all of its blocks."""
    everything = way in ("nothing misses", "imposed")
    view = make_layer(0, engine.device, 2, 300, 200, 8, 16, resident=1.0 if everything else 0.3)
    if everything:
        assert bool((view.slot_of[:, 1:] >= 0).all())
    chosen = random_selection(1, 4, 2, 40, 200).to(engine.device)
    try:
        cuda.set_miss_rate(engine.device, 0.5 * (way == "imposed"))
        cuda.skip_copies(engine.device, way == "oracle")
        begin = time.perf_counter_ns()
        if way == "ahead":
            plan = Prefetch(view, chosen, step_on(engine.device), cap_on(engine.device, 9))
            cuda.gather(view, cuda.plan_prefetch(plan))
        else:
            cuda.gather(view, cuda.resolve(view, chosen, None, step_on(engine.device), move=way != "gather")[1])
        stalled = int(view.stalled)
        assert 0 <= stalled <= time.perf_counter_ns() - begin
        assert (stalled > 0) == (way in ("resolve", "gather", "imposed"))
    finally:
        cuda.set_miss_rate(engine.device, 0)
        cuda.skip_copies(engine.device, False)
    assert not bool(workspace(engine.device).urgent.any())


@pytest.mark.parametrize(("count", "room"), [(1, 24), (7, 24), (30, 10), (0, 5)])
def test_install(engine, count, room):
    view = make_layer(3, engine.device, 2, 24, 64, resident=0.5)
    view.stamp[:, room:] = torch.where(view.page_of[:, room:] >= 0, STEP, RESERVED)
    absent = (view.slot_of < 0).all(0).cpu().nonzero()[:, 0][1 : count + 1]
    tokens = torch.full_like(absent, 16)
    tokens[-1:] = 5
    expected, before = copy_of(view), copy_of(view)
    fetch_ref = reference_prefill.install(expected, absent, tokens, step_on("cpu", 20))
    fetch = cuda.install(view, absent.to(engine.device), tokens.to(engine.device), step_on(engine.device, 20))
    same_tables(view, expected, before)
    same_fetch(view, fetch, fetch_ref)


def test_invalidate_and_clear(engine):
    for pages in ([], [5], [5, 5, NONE, 7, 9, 5], list(range(64))):
        view = make_layer(len(pages), engine.device, 3, 24, 64)
        expected, before = copy_of(view), copy_of(view)
        reference.invalidate(expected, torch.tensor(pages, dtype=torch.int64))
        cuda.invalidate(view, torch.tensor(pages, dtype=torch.int64, device=engine.device))
        same_tables(view, expected, before)
    view.stamp[:, 20:] = torch.where(view.page_of[:, 20:] < 0, RESERVED, view.stamp[:, 20:])
    expected, before = copy_of(view), copy_of(view)
    reference.clear(expected)
    cuda.clear(view)
    same_tables(view, expected, before)
    assert int(cuda.check(view)) == 0


def test_too_small_a_cache_is_reported(engine):
    view = make_layer(1, engine.device, 2, 4, 64, resident=1.0)
    chosen = torch.arange(1, 13, dtype=torch.int32).view(2, 1, 6).expand(2, 2, 6).contiguous()
    slots, fetch = cuda.resolve(view, chosen.to(engine.device), None, step_on(engine.device))
    assert int(cuda.check(view)) == 0, "the tables must stay sound"
    resident = view.slot_of.cpu()[:, 1:13].view(2, 2, 6).transpose(0, 1)
    assert torch.equal(slots.cpu(), resident)
    with pytest.raises(CapacityError, match="may be evicted"):
        workspace(engine.device).check()
    workspace(engine.device).check()


def test_a_broken_table_is_noticed(engine):
    view = make_layer(1, engine.device)
    assert int(cuda.check(view)) == 0
    head, slot = (view.page_of >= 0).nonzero()[0].tolist()
    view.slot_of[head, view.page_of[head, slot].long()] = NONE
    assert int(cuda.check(view)) > 0


def test_many_steps(engine):
    """Random operations in random order, compared after each."""
    heads, slots, pages, width, n = 2, 30, 50, 5, 3
    view = make_layer(0, engine.device, heads, slots, pages, resident=0.0)
    expected = copy_of(view)
    random = torch.Generator().manual_seed(7)
    for turn in range(40 if engine.small else 400):
        engine.seed(turn)
        before = copy_of(expected)
        # Which slot a unit took is free, so each step starts from the state that the kernels left.
        for name in ("kv", "slot_of", "page_of"):
            getattr(expected, name).copy_(getattr(view, name).cpu())
            getattr(before, name).copy_(getattr(view, name).cpu())
        step = 40 + turn
        chosen = random_selection(turn, n, heads, width, pages)
        kind = int(torch.randint(0, 4, (1,), generator=random))
        if kind <= 1:
            reference.resolve(expected, chosen, None, step_on("cpu", step))
            _, fetch = cuda.resolve(view, chosen.to(engine.device), None, step_on(engine.device, step), move=kind == 1)
            cuda.gather(view, fetch)
        elif kind == 2:
            clock, cap = step_on("cpu", step - 1), cap_on("cpu", 2)
            reference.plan_prefetch(Prefetch(expected, chosen, clock, cap))
            clock, cap = clock.to(engine.device), cap.to(engine.device)
            fetch = cuda.plan_prefetch(Prefetch(view, chosen.to(engine.device), clock, cap))
            cuda.gather(view, fetch)
        else:
            gone = chosen[0, 0]
            reference.invalidate(expected, gone)
            cuda.invalidate(view, gone.to(engine.device))
        same_tables(view, expected, before)
    head, slot = (view.page_of >= 0).nonzero(as_tuple=True)
    page = view.page_of[head, slot].long()
    assert torch.equal(view.kv[head, slot].cpu(), view.host[page.cpu(), head.cpu()]), (
        "a unit's contents are not its page's"
    )


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize(("n", "width", "resident"), [(1, 1, 0.0), (5, 6, 0.5), (9, 40, 0.9), (40, 60, 0.0)])
def test_resolve_with_open_pages(engine, n, width, resident, move):
    """The last page of each row is one that a token is about to be written to, with no committed token or some: a hit
    on nobody's account, and a miss only where there is something to bring. (40, 60): more than shared memory holds.
    """
    if engine.small and n == 40 and move:
        pytest.skip("too large to emulate twice")
    waited = n != 5
    heads, pages, slots, page_size = 2, 2500, 2600, 8
    for seed in range(2 if engine.small else 4):
        engine.seed(seed)
        random = torch.Generator().manual_seed(seed)
        view = make_layer(seed, engine.device, heads, slots, pages, page_size, 16, resident=resident)
        expected, before = copy_of(view), copy_of(view)
        chosen = torch.full((n, heads, width), NONE, dtype=torch.int32)
        order = (torch.randperm(pages - 1, generator=random) + 1).to(torch.int32)
        num_pages = torch.randint(1, width + 1, (n,), generator=random)
        num_pages[n // 2] = 0 if n > 1 else 1
        for i, number in enumerate(num_pages.tolist()):
            if number:
                others = order[torch.randperm(pages - 1 - n, generator=random)[: number - 1]]
                chosen[i, :, :number] = torch.cat([others, order[-1 - i : pages - 1 - i]])  # an open page of its own
        tokens = torch.randint(0, page_size, (n,), generator=random)
        tokens[::2] = 0
        owner = torch.randperm(n, generator=random)
        accounts = [torch.zeros(n, 2, dtype=torch.int32), torch.zeros(n, 2, dtype=torch.int32, device=engine.device)]
        wide = {"num_pages": num_pages, "open_tokens": tokens, "owner": owner}
        _, fetch_ref = reference.resolve(expected, chosen, None, step_on("cpu"), fetched=accounts[0], **wide)
        on_device = {name: tensor.to(engine.device) for name, tensor in wide.items()}
        got, fetch = cuda.resolve(
            view,
            chosen.to(engine.device),
            None,
            step_on(engine.device),
            fetched=accounts[1],
            waited=waited,
            move=move,
            **on_device,
        )
        workspace(engine.device).check()
        same_tables(view, expected, before)
        same_fetch(view, fetch, fetch_ref)
        assert torch.equal(accounts[1].cpu(), accounts[0])
        used = chosen >= 0
        head = torch.arange(heads)[None, :, None].expand_as(chosen)
        assert torch.equal(got.cpu()[used], view.slot_of.cpu()[head[used], chosen[used].long()])
        cuda.gather(view, fetch)
        copied(view, fetch)
        assert int(cuda.check(view)) == 0
        assert not bool(workspace(engine.device).urgent.any())
        assert not bool(workspace(engine.device).tasks.view(-1, 8)[:, :4].any()), "helpers left their counters behind"
        brought = int(expected.counters[COUNTERS.index("missed")])
        assert not move or (int(view.stalled) > 0) == (brought > 0)


@pytest.mark.parametrize("waited", [False, True])
def test_more_blocks_move_misses_where_the_step_waits(engine, waited):
    """They are told what to move where there are any."""
    view = make_layer(0, engine.device, 2, 24, 64, resident=0.0)
    pages = torch.arange(1, 9, dtype=torch.int32, device=engine.device).expand(1, 2, 8).contiguous()
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=engine.device)  # noqa: E731
    told = workspace(engine.device).tasks.view(-1, 8)[:, 4:]
    told.zero_()
    found_by = {"num_pages": ints(8), "open_tokens": ints(3), "move": True}
    _, fetch = cuda.resolve(view, pages, None, step_on(engine.device), waited=waited, **found_by)
    copied(view, fetch)
    assert bool(told.any()) == waited


def test_pages_that_begin_stall_nobody(engine):
    """All that is missing are open pages without a token: each gets a slot, nothing moves, nobody waits."""
    view = make_layer(0, engine.device, 2, 24, 64, resident=0.0)
    to = lambda t: t.to(engine.device)  # noqa: E731
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=engine.device)  # noqa: E731
    pages = to(torch.tensor([[3], [9], [NONE]], dtype=torch.int32)[:, None].expand(3, 2, 1).contiguous())
    wide = {"num_pages": ints(1, 1, 0), "open_tokens": ints(0, 0, 0), "move": True}
    slots, fetch = cuda.resolve(view, pages, None, step_on(engine.device), **wide)
    assert bool((slots[:2] >= 0).all()) and int(fetch.count) == 4 and not bool(fetch.units[:4, 3].any())
    counted = dict(zip(COUNTERS, view.counters.tolist(), strict=True))
    assert (counted["selected"], counted["hit"], counted["missed"], counted["tokens_in"]) == (4, 4, 0, 0)
    assert int(view.stalled) == 0
    assert not bool(workspace(engine.device).urgent.any())
    cuda.resolve(view, pages, None, step_on(engine.device, STEP + 1), **wide)
    assert dict(zip(COUNTERS, view.counters.tolist(), strict=True))["hit"] == 8
    with pytest.raises(ValueError, match="num_pages, which are missing"):
        cuda.resolve(view, pages, None, step_on(engine.device), open_tokens=ints(0, 0, 0))


def test_each_request_is_charged_for_its_own(engine):
    """Units missing from a selection and from a prediction, by request slot; what two ask for is charged to both."""
    n, heads, width, slots, pages = 4, 2, 9, 120, 200
    for seed in range(3):
        engine.seed(seed)
        view = make_layer(seed, engine.device, heads, slots, pages, 16, 64, resident=0.5)
        expected, before = copy_of(view), copy_of(view)
        chosen = random_selection(seed, n, heads, width, pages, inactive=1)
        owner = torch.tensor([5, 1, 3, 2])
        account, known = (
            torch.zeros(7, 2, dtype=torch.int32, device=engine.device),
            torch.zeros(7, 2, dtype=torch.int32),
        )
        reference.resolve(expected, chosen, None, step_on("cpu"), fetched=known, owner=owner)
        device = engine.device
        cuda.resolve(view, chosen.to(device), None, step_on(device), fetched=account, owner=owner.to(device))
        assert torch.equal(account.cpu(), known) and bool(known[:, 0].sum() > 0)

        predicted = torch.full((7, heads, width), NONE, dtype=torch.int32)
        predicted[owner] = torch.randint(0, 12, (n, heads, width), dtype=torch.int32)
        table = torch.randint(1, pages, (n, 16), dtype=torch.int32)
        closed = torch.full((n,), 14)
        for step, cap in ((STEP, 4), (STEP + 1, -1)):
            common = (predicted, step_on("cpu", step), cap_on("cpu", cap), table, closed, owner)
            reference.plan_prefetch(Prefetch(expected, *common, fetched=known))
            cuda.plan_prefetch(Prefetch(view, *(tensor.to(device) for tensor in common), fetched=account))
            assert torch.equal(account.cpu(), known) and bool(known[:, 1].sum() > 0)
        same_tables(view, expected, before)
