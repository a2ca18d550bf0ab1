"""What is fetched ahead, as the kernels plan it: one prefetch, and two in one launch."""

from __future__ import annotations

import pytest
import torch
from layers import copied, copy_of, make_layer, random_selection, same_fetch, same_tables, tokens_of
from sglang.srt.sparse_kv.ops import cuda, reference
from sglang.srt.sparse_kv.ops.reference import NONE, RESERVED, Prefetch
from sglang.srt.sparse_kv.ops.workspace import workspace
from test_tables import CASES, LARGE, STEP, cap_on, step_on, unit_shape


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("cap", [-1, 0, 3, 1000])
def test_plan_prefetch(engine, case, cap):
    n, heads, width, slots, pages, resident, inactive = case
    if engine.small and case in LARGE:
        pytest.skip("too large to emulate")
    for seed in range(2 if engine.small or case in LARGE else 4):
        engine.seed(seed)
        view = make_layer(seed, engine.device, heads, slots, pages, *unit_shape(case), resident=resident)
        if seed % 2:  # little room: the best ranks must win it
            view.stamp[:, slots // 3 :] = torch.where(view.page_of[:, slots // 3 :] >= 0, STEP, RESERVED)
        expected, before = copy_of(view), copy_of(view)
        chosen = random_selection(seed, n, heads, width, pages, inactive)
        fetch_ref = reference.plan_prefetch(Prefetch(expected, chosen, step_on("cpu"), cap_on("cpu", cap)))
        step, limit = step_on(engine.device), cap_on(engine.device, cap)
        fetch = cuda.plan_prefetch(Prefetch(view, chosen.to(engine.device), step, limit))
        same_tables(view, expected, before)
        same_fetch(view, fetch, fetch_ref)
        cuda.gather(view, fetch)
        copied(view, fetch)


def test_prefetch_of_logical_pages(engine):
    n, heads, width, pages, logical = 3, 2, 6, 64, 20
    view = make_layer(1, engine.device, heads, 24, pages)
    expected, before = copy_of(view), copy_of(view)
    table = torch.stack([torch.randperm(pages - 1)[:logical] + 1 for _ in range(n)]).to(torch.int32)
    store = random_selection(5, 7, heads, width, logical)
    index = torch.tensor([4, 0, 2])
    closed = torch.tensor([logical, 9, 0])
    chosen = store[index]
    chosen = torch.where(chosen < closed[:, None, None], chosen, NONE)
    physical = reference.lookup(table, chosen)
    fetch_ref = reference.plan_prefetch(Prefetch(expected, physical, step_on("cpu"), cap_on("cpu", 4)))
    wide = torch.full((7, 3, heads, width), NONE, dtype=torch.int32)
    wide[:, 1] = store
    plan = Prefetch(
        view,
        wide.to(engine.device)[:, 1],
        step_on(engine.device),
        cap_on(engine.device, 4),
        table=table.to(engine.device),
        closed=closed.to(engine.device),
        index=index.to(engine.device),
    )
    fetch = cuda.plan_prefetch(plan)
    same_tables(view, expected, before)
    same_fetch(view, fetch, fetch_ref)


@pytest.mark.parametrize("plans", [1, 2])
def test_prefetches_beside_an_append(engine, plans):
    """One launch edits other layers' tables as a call for each would."""
    heads, n = 3, 4
    to = lambda t: t.to(engine.device)  # noqa: E731
    for seed in range(3):
        engine.seed(seed)
        view = make_layer(seed, engine.device, heads, 16, 40, resident=0.9)
        others = [make_layer(10 + seed + i, engine.device, heads, 20, 40, resident=0.8) for i in range(plans)]
        page, offset = torch.tensor([3, 9, 12, 20]), torch.tensor([0, 15, 1, 7])
        active = torch.tensor([True, True, False, True])
        k, v, k_dev, v_dev = tokens_of(seed, n, heads, 64, torch.bfloat16, engine.device)
        step, cap = torch.tensor([STEP], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
        table = torch.stack([torch.randperm(39)[:20] + 1 for _ in range(n)]).to(torch.int32)
        store, index, closed = (
            random_selection(seed, 6, heads, 7, 20),
            torch.tensor([4, 1, 0, 5]),
            torch.tensor([20, 9, 0, 15]),
        )
        before, expected = [copy_of(x) for x in (view, *others)], [copy_of(x) for x in (view, *others)]
        on_cpu = [Prefetch(x, store, step - i, cap, table, closed, index) for i, x in enumerate(expected[1:])]
        reference.append(expected[0], k, v, page, offset, active, step, reference.gather)
        reference.plan_prefetches(on_cpu)
        there = [to(t) for t in (cap, table, closed, index)]
        ours = [Prefetch(x, to(store), to(step - i), *there) for i, x in enumerate(others)]
        cuda.append(view, k_dev, v_dev, to(page), to(offset), to(active), to(step))
        cuda.plan_prefetches(ours)
        workspace(engine.device).check()
        for got, wanted, was in zip((view, *others), expected, before, strict=True):
            same_tables(got, wanted, was)
        for mine, theirs in zip(ours, on_cpu, strict=True):
            same_fetch(mine.view, mine.fetch, theirs.fetch)
            assert int(theirs.fetch.count) > 0
            cuda.gather(mine.view, mine.fetch)
            copied(mine.view, mine.fetch)
        assert workspace(engine.device).cursor.tolist() == [0] * 6


@pytest.mark.parametrize("width", [7, 1050])
def test_prefetches_leave_the_scratch_of_other_operations(engine, width):
    """What a look-up or a score beside them is using, or a mover. width: the wide one's winners do not fit shared
    memory.
    """
    n, pages = 2, 2 * width + 40
    table = (torch.randperm(pages - 1)[: n * width] + 1).view(n, width).to(torch.int32)
    store = torch.arange(width, dtype=torch.int32).expand(n, 2, width).contiguous()
    index, closed = torch.arange(n), torch.full((n,), width)
    step, cap = torch.tensor([STEP], dtype=torch.int32), torch.tensor([width], dtype=torch.int32)
    layers = [make_layer(i, engine.device, 2, pages, pages, 8, 64, resident=0.0) for i in range(2)]
    before, expected = [copy_of(x) for x in layers], [copy_of(x) for x in layers]
    on_cpu = [Prefetch(x, store, step, cap, table, closed, index) for x in expected]
    reference.plan_prefetches(on_cpu)
    there = [t.to(engine.device) for t in (store, step, cap, table, closed, index)]
    ours = [Prefetch(x, *there) for x in layers]
    space = workspace(engine.device)
    work = space.work(2, n * width)
    first_job = space.buffer("list", 1, torch.int32)[: 2 * work.list_width]
    used = (first_job, space.buffer("rows", 1, torch.int32), space.cursor[:2], space.tasks, space.urgent, space.tickets)
    for number, scratch in enumerate(used, 1):
        scratch.fill_(number)
    try:
        cuda.plan_prefetches(ours)
        for number, scratch in enumerate((*used, space.error)):
            assert bool((scratch == (number + 1) % (len(used) + 1)).all()), f"scratch {number} was written"
    finally:
        for scratch in used:
            scratch.zero_()
    assert space.cursor.tolist() == [0] * 6
    for mine, theirs, got, wanted, was in zip(ours, on_cpu, layers, expected, before, strict=True):
        assert int(mine.fetch.count) == 2 * n * width
        same_tables(got, wanted, was)
        same_fetch(got, mine.fetch, theirs.fetch)


def test_no_more_prefetches_than_a_launch_holds(engine):
    view = make_layer(0, engine.device)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=engine.device)  # noqa: E731
    none = lambda heads: torch.full((1, heads, 3), -1, dtype=torch.int32, device=engine.device)  # noqa: E731
    plan = Prefetch(view, none(2), ints(STEP), ints(1))
    other = Prefetch(make_layer(1, engine.device, 3), none(3), ints(STEP), ints(1))
    for plans, heads in (([], r"\[\]"), ([plan] * 3, r"\[2, 2, 2\]"), ([plan, other], r"\[2, 3\]")):
        with pytest.raises(ValueError, match=f"one or two of layers with as many heads, got layers with {heads} heads"):
            cuda.plan_prefetches(plans)


def test_a_plan_refuses_pages_that_it_would_have_to_copy(engine):
    view = make_layer(0, engine.device)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=engine.device)  # noqa: E731
    pages = torch.full((1, 2, 6), -1, dtype=torch.int32, device=engine.device)
    with pytest.raises(ValueError, match=r"got strides \(12, 6, 2\) and None"):
        cuda.plan_prefetches([Prefetch(view, pages[..., ::2], ints(STEP), ints(1))])
    with pytest.raises(ValueError, match=r"got strides \(12, 6, 1\) and \(6, 3, 1\)"):
        some = pages[..., :3]
        cuda.plan_prefetch(Prefetch(view, some, ints(STEP), ints(1), tokens=some.contiguous()))
