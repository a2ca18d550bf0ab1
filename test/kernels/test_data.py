"""What moves bytes: append, write-through, landmarks, gather, prefill chunks."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from layers import copied, copy_of, make_layer, same_tables, tokens_of
from sglang.srt.sparse_kv.landing import runs_of
from sglang.srt.sparse_kv.ops import cuda, cuda_prefill, reference, reference_prefill
from sglang.srt.sparse_kv.ops.attend import Inputs
from sglang.srt.sparse_kv.ops.launching import inner_contiguous
from sglang.srt.sparse_kv.ops.reference import PREFIX_HOST, Fetch
from sglang.srt.sparse_kv.ops.workspace import workspace
from sglang.srt.sparse_kv.transfer import PlainTransfer, StreamTransfer

STEP = 40
GRID = list(itertools.product([8, 16, 32], [64, 128], [torch.bfloat16, torch.float16]))


def same_landmarks(ours, expected):
    """Every bit: both engines add in one order and round once."""
    assert torch.equal(ours.codes.cpu(), expected.codes)
    assert torch.equal(ours.scales.cpu(), expected.scales)


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
def test_append(engine, page_size, dim, dtype):
    heads, n = 3, 6
    for seed, through in ((0, True), (1, False), (2, True)):
        engine.seed(seed)
        view = make_layer(seed, engine.device, heads, 16, 40, page_size, dim, dtype, 0.9)
        page = torch.tensor([3, 9, 12, 20, 33, 7])
        offset = torch.tensor([0, page_size - 1, 1, page_size // 2, page_size - 1, 0])
        active = torch.tensor([True, True, True, True, True, False])
        k, v, k_dev, v_dev = tokens_of(seed, n, heads, dim, dtype, engine.device)
        step = torch.tensor([STEP], dtype=torch.int32)
        expected, before = copy_of(view), copy_of(view)
        slots_ref = reference.append(expected, k, v, page, offset, active, step, reference.gather, through)
        to = lambda t: t.to(engine.device)  # noqa: E731
        slots = cuda.append(view, k_dev, v_dev, to(page.int()), to(offset), to(active), to(step), None, through)
        workspace(engine.device).check()
        same_tables(view, expected, before)
        same_landmarks(view.landmarks, expected.landmarks)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(view.host, expected.host)
        ours = view.kv.cpu()
        for i in active.nonzero()[:, 0].tolist():
            for head in range(heads):
                filled = int(offset[i]) + 1
                got = ours[head, int(slots[i, head]), :, :filled]
                assert torch.equal(got, expected.kv[head, int(slots_ref[i, head]), :, :filled])
        assert bool((slots.cpu()[~active] == -1).all())


def test_append_reads_rows_of_a_wider_tensor(engine):
    view = make_layer(0, engine.device, 2, 16, 40, dim=64)
    wide = torch.randn((6, 2, 64), dtype=torch.bfloat16).to(engine.device)
    k = wide.view(3, 2, 2, 64)[:, 0]
    page, offset = torch.tensor([3, 9, 12]), torch.tensor([1, 2, 3])
    to = lambda t: t.to(engine.device)  # noqa: E731
    step = to(torch.tensor([STEP], dtype=torch.int32))
    slots = cuda.append(view, k, k, to(page), to(offset), to(torch.ones(3, dtype=torch.bool)), step)
    for i, head in itertools.product(range(3), range(2)):
        assert torch.equal(view.kv[head, int(slots[i, head]), 1, int(offset[i])], wide[2 * i, head])


def test_write_token(engine):
    view = make_layer(5, engine.device, 2, 16, 40, dim=128)
    expected = copy_of(view)
    page, offset = torch.tensor([3, 9, 12]), torch.tensor([0, 15, 7])
    active = torch.tensor([True, True, False])
    slots = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    k, v, k_dev, v_dev = tokens_of(1, 3, 2, 128, torch.bfloat16, engine.device)
    reference.write_token(expected, k, v, page, slots, offset, active)
    to = lambda t: t.to(engine.device)  # noqa: E731
    cuda.write_token(view, k_dev, v_dev, to(page), to(slots), to(offset), to(active))
    assert torch.equal(view.kv.cpu(), expected.kv)
    assert torch.equal(view.host, expected.host)
    same_landmarks(view.landmarks, expected.landmarks)


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
def test_write_token_where_the_tables_have_its_page(engine, page_size, dim, dtype):
    """The landmark comes with a call of its own, and queries of a wider projection are put in order on the way."""
    heads, group, n = 3, 4, 5
    view = make_layer(page_size, engine.device, heads, 60, 40, page_size, dim, dtype, resident=1.0)
    expected = copy_of(view)
    page, active = torch.tensor([3, 9, 12, 20, 33]), torch.tensor([True, True, False, True, True])
    offset = torch.tensor([0, page_size - 1, page_size - 1, 5, page_size - 1])
    assert bool((view.slot_of[:, page] >= 0).all())
    k, v, k_dev, v_dev = tokens_of(1, n, heads, dim, dtype, engine.device)
    to = lambda t: t.to(engine.device)  # noqa: E731
    whole = to(torch.randn((n, (heads + 2) * group * dim), generator=torch.Generator().manual_seed(2)).to(dtype))
    q = whole[:, : heads * group * dim].view(n, heads, group, dim)
    inputs = Inputs(None, q, torch.empty((n * heads, group, dim), dtype=dtype, device=engine.device), to(offset + 1))
    reference.write_token(expected, k, v, page, None, offset, active)
    cuda.write_token(view, k_dev, v_dev, to(page), None, to(offset), to(active), inputs=inputs)
    assert torch.equal(view.kv.cpu(), expected.kv)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(view.host, expected.host)
    assert torch.equal(inputs.ordered, q.reshape(n * heads, group, dim))
    same_landmarks(view.landmarks, expected.landmarks)
    before = [t.clone() for t in expected.landmarks]
    reference.close_pages(expected, page, offset, active)
    cuda.close_pages(view, to(page), to(offset), to(active))
    same_landmarks(view.landmarks, expected.landmarks)
    changed = (before[0] != expected.landmarks.codes).flatten(1).any(1).nonzero()[:, 0]
    assert changed.tolist() == [9, 33]
    assert torch.equal(view.kv.cpu(), expected.kv)


def test_write_token_refuses_two_rows(engine):
    view = make_layer(0, engine.device, 2, 16, 40, dim=64)
    q = torch.zeros((6, 2, 4, 64), dtype=torch.bfloat16, device=engine.device)
    k, page = q[:3, :, 0], torch.zeros(3, dtype=torch.int64, device=engine.device)
    inputs = Inputs(None, q, torch.empty((6, 8, 64), dtype=q.dtype, device=engine.device), page)
    with pytest.raises(ValueError, match="one row of queries for each of 3 requests, got 6"):
        cuda.write_token(view, k, k, page, None, page, page.bool(), inputs=inputs)


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
@pytest.mark.parametrize("blocks", [1, 3])
def test_gather(engine, page_size, dim, dtype, blocks):
    """Exact bytes, partial pages included; slots that are not named stay as they were."""
    heads, slots, pages = 2, 90, 100
    view = make_layer(0, engine.device, heads, slots, pages, page_size, dim, dtype)
    random = torch.Generator().manual_seed(page_size)
    for count in (0, 1, 31, 32, 33, 85):
        place = torch.randperm(slots, generator=random)[:count]
        units = torch.stack(
            [
                torch.randint(0, pages, (count,), generator=random),
                torch.randint(0, heads, (count,), generator=random),
                place,
                torch.randint(0, page_size + 1, (count,), generator=random),
            ],
            1,
        ).to(torch.int32)
        units[::2, 3] = page_size
        before = view.kv.cpu().clone()
        junk = torch.full((4, 4), -7, dtype=torch.int32)
        fetch = Fetch(torch.cat([units, junk]), torch.tensor([count], dtype=torch.int32))
        expected = copy_of(view)
        reference.gather(expected, fetch)
        on_device = Fetch(fetch.units.to(engine.device), fetch.count.to(engine.device))
        cuda.gather(view, on_device, blocks=blocks)
        assert torch.equal(view.kv.cpu(), expected.kv)
        copied(view, fetch)
        named = torch.zeros((heads, slots), dtype=torch.bool)
        named[units[:, 1].long(), units[:, 2].long()] = True
        assert torch.equal(view.kv.cpu()[~named], before[~named])


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
def test_store_chunk(engine, page_size, dim, dtype):
    heads, pages = 2, 40
    for seed, through in ((0, True), (1, False)):
        view = make_layer(seed, engine.device, heads, 8, pages, page_size, dim, dtype)
        # Three requests: one goes on inside a page, one begins one, one ends exactly at a page's end.
        loc = torch.cat(
            [
                torch.arange(3 * page_size + page_size // 2, 6 * page_size + 3),
                torch.arange(9 * page_size, 9 * page_size + 5),
                torch.arange(20 * page_size + 1, 22 * page_size),
            ]
        )
        k, v, k_dev, v_dev = tokens_of(seed, loc.numel(), heads, dim, dtype, engine.device)
        expected = copy_of(view)
        reference_prefill.store_chunk(expected, k, v, loc, through=True)
        if not through:
            expected.host = view.host.clone()
            expected.host[loc // page_size, :, 0, loc % page_size] = k  # landmarks still come from the chunk
            expected.landmarks = copy_of(view).landmarks
            reference_prefill.store_chunk(expected, k, v, loc, through=False)
            expected.host = view.host.clone()
        cuda_prefill.store_chunk(view, k_dev, v_dev, loc.to(engine.device), through)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(view.host, expected.host)
        same_landmarks(view.landmarks, expected.landmarks)


@pytest.mark.parametrize("case", ["elsewhere in a row", "rows together", "not aligned", "dimensions apart"])
def test_what_is_kept_of_a_chunk_holds_for_the_next_layer(engine, case):
    """Keys of the next layer that lie otherwise are found where they lie."""
    tokens, heads, dim, dtype = 20, 2, 64, torch.float16
    random = torch.Generator().manual_seed(0)
    loc = torch.arange(tokens, device=engine.device) + 3 * 16 + 5
    begun, filled = torch.tensor([4], device=engine.device), torch.tensor([9], device=engine.device)
    memo: dict = {}
    for layer in range(3):
        view = make_layer(layer, engine.device, heads, 8, 40, 16, dim, dtype)
        expected = copy_of(view)
        rows = torch.randn((tokens, 3 * heads, dim), generator=random).to(engine.device, dtype)
        k, v = rows[:, :heads], rows[:, heads : 2 * heads]
        if layer == 1 and case == "elsewhere in a row":
            k, v = v, rows[:, 2 * heads :]
        if case == "not aligned" or (layer == 1 and case == "rows together"):
            k = k.contiguous()
        if layer == 1 and case == "not aligned":
            k = torch.cat([rows.flatten()[:1], k.flatten()])[1:].view(k.shape)
            assert inner_contiguous(k, "k").data_ptr() % 16 == 0 < k.data_ptr() % 16
        if layer == 1 and case == "dimensions apart":
            k = k.transpose(1, 2).contiguous().transpose(1, 2)
        reference_prefill.store_chunk(expected, k.cpu(), v.cpu(), loc.cpu(), layer != 1)
        reference_prefill.refresh(expected, k.cpu(), v.cpu(), loc.cpu(), begun.cpu(), filled.cpu())
        cuda_prefill.store_chunk(view, k, v, loc, layer != 1, memo=memo)
        cuda_prefill.refresh(view, k, v, loc, begun, filled, memo=memo)
        assert memo["chunk"].k % 16 == 0, "kernels read 16 bytes at a time"
        ours = copy_of(view)
        assert torch.equal(ours.host, expected.host)
        assert torch.equal(ours.kv, expected.kv) and torch.equal(ours.slot_of, expected.slot_of)


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
@pytest.mark.parametrize("install", [False, True])
def test_stage(engine, page_size, dim, dtype, install):
    """Some units from slots, some from the host, into a wider staging slot whose rest stays as it was; the latter also
    into slots that are free or long unused, if there are any.
    """
    heads, pages, slots = 3, 80, 30
    for seed, count in enumerate((0, 1, 17, 50)):
        view = make_layer(seed, engine.device, heads, slots, pages, page_size, dim, dtype, resident=0.7)
        if not install:
            view.kv.add_(1)  # not what the host holds: which of the two was read shows
        random = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(pages - 1, generator=random)[:count] + 1
        tokens = torch.full((count,), page_size)
        tokens[-1:] = page_size // 2
        whole = torch.full((2, heads, (count + 2) * page_size, dim), 9.0, dtype=dtype, device=engine.device)
        expected, expected_view, before = whole.cpu().clone(), copy_of(view), copy_of(view)
        step = torch.tensor([STEP - 4], dtype=torch.int32)
        to = lambda t: t.to(engine.device)  # noqa: E731
        more = (tokens, step) if install else ()
        plan = reference_prefill.plan_stage(expected_view, chosen, *more)
        reference_prefill.stage(expected_view, plan, expected[:, :, : count * page_size])
        plan = cuda_prefill.plan_stage(view, to(chosen), *map(to, more))
        cuda_prefill.stage(view, plan, whole[:, :, : count * page_size])
        ours = whole.cpu()
        if count and install:  # what lies behind the last page's tokens is of no account
            for staged in (ours, expected):
                staged[:, :, count * page_size - page_size // 2 : count * page_size] = 0
        assert torch.equal(ours, expected)
        assert torch.equal(view.counters.cpu(), expected_view.counters)
        same_tables(view, expected_view, before)
        assert count < 17 or (view.counters[-2:] > 0).all()


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
@pytest.mark.parametrize("resident", [0.7, 1.0])
def test_stage_cached(engine, page_size, dim, dtype, resident):
    """As in two calls, what is not resident included, of which no table takes note. A memo serves one target."""
    heads, pages, slots = 3, 50, 50
    memo: dict = {}
    whole = torch.full((2, heads, 20 * page_size, dim), 9.0, dtype=dtype, device=engine.device)
    target = whole[:, :, : 17 * page_size]
    chosen = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1))[:17] + 1  # page 0 is nobody's
    on_device = chosen.to(engine.device)
    for seed in range(2):  # two layers
        view = make_layer(seed, engine.device, heads, slots, pages, page_size, dim, dtype, resident=resident)
        view.kv.add_(1)  # not what the host holds: which of the two was read shows
        expected_view, before, expected = copy_of(view), copy_of(view), whole.cpu().clone()
        reference_prefill.stage_cached(expected_view, chosen, expected[:, :, : 17 * page_size])
        cuda_prefill.stage_cached(view, on_device, target, memo)
        assert torch.equal(whole.cpu(), expected)
        assert torch.equal(view.counters.cpu(), expected_view.counters)
        assert bool(view.counters[PREFIX_HOST] > 0) == (resident < 1)
        same_tables(view, expected_view, before)


@contextlib.contextmanager
def elsewhere(device):
    """A stream of its own on a GPU: many copies at once are not for the default one."""
    if device.type != "cuda":
        yield
        return
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
@pytest.mark.parametrize("install", [False, True])
def test_stage_with_pages_that_land(engine, page_size, dim, dtype, install):
    """Any pages land, resident ones too, in pieces; the rest comes as before."""
    heads, pages, slots = 3, 80, 30
    for seed, count in enumerate((1, 17, 50)):
        view = make_layer(seed, engine.device, heads, slots, pages, page_size, dim, dtype, resident=0.7)
        random = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(pages - 1, generator=random)[:count] + 1
        chosen[count // 2 :] = chosen[count // 2 :].sort().values
        due = (torch.rand(count, generator=random) < 0.7).to(torch.uint8) * heads
        tokens = torch.full((count,), page_size)
        tokens[-1:] = page_size // 2
        whole = torch.full((2, heads, (count + 2) * page_size, dim), 9.0, dtype=dtype, device=engine.device)
        expected, expected_view, before = whole.cpu().clone(), copy_of(view), copy_of(view)
        step = torch.tensor([STEP - 4], dtype=torch.int32)
        place = torch.full((7, heads, 2, page_size, dim), 7.0, dtype=dtype)
        for ops, seen, into, device in (
            (reference_prefill, expected_view, expected, torch.device("cpu")),
            (cuda_prefill, view, whole, engine.device),
        ):
            more = [t.to(device) for t in (tokens, step)] if install else [None, None]
            plan = ops.plan_stage(seen, chosen.to(device), *more, due.to(device))
            target, landing = into[:, :, : count * page_size], place.to(device)
            ops.stage(seen, plan, target, parts="resident")
            for first in range(0, count, 7):
                part = slice(first, first + 7)
                runs = runs_of(chosen[part].numpy(), due[part].numpy())
                with elsewhere(device):
                    ops.land(seen, runs, landing)
                ops.stage_landed(seen, plan, target, landing, first, len(chosen[part]))
            ops.stage(seen, plan, target, parts="missing")
        ours = whole.cpu()
        for staged in (ours, expected):  # what lies behind the last page's tokens is of no account
            staged[:, :, count * page_size - page_size // 2 : count * page_size] = 0
        assert torch.equal(ours, expected)
        assert torch.equal(view.counters.cpu(), expected_view.counters)
        same_tables(view, expected_view, before)


def test_absent(engine):
    views = [
        make_layer(seed, engine.device, 5, 30, 60, 16, 64, torch.float16, resident=share)
        for seed, share in enumerate((0.0, 0.4, 1.0))
    ]
    for count in (1, 40):
        pages = torch.randperm(60, generator=torch.Generator().manual_seed(count))[:count].to(torch.int32)
        found = cuda_prefill.absent(views, pages.to(engine.device)).cpu()
        expected = reference_prefill.absent([copy_of(view) for view in views], pages)
        assert torch.equal(found, expected) and found.dtype == torch.uint8
    assert 0 < int(found.sum()) < 15 * 40


def test_land_refuses_what_it_cannot_fill(engine):
    view = make_layer(0, engine.device, 2, 8, 40, dim=64)
    place = torch.zeros((3, 2, 2, 16, 64), dtype=view.kv.dtype, device=engine.device)
    with pytest.raises(ValueError, match="int64"):
        cuda_prefill.land(view, np.zeros((1, 3), np.int32), place)
    with pytest.raises(ValueError, match="as the host's"):
        cuda_prefill.land(view, np.zeros((1, 3), np.int64), place[:, :1])


def staged_after_all_plans(engine, view, blocks, order=None) -> list[torch.Tensor]:
    """[2, H, M*P, D] of each block, int [M] pages: all are planned first, then moved, on a GPU on other streams."""
    heads, page_size, dim = view.kv.shape[0], view.kv.shape[3], view.kv.shape[4]
    step = torch.tensor([STEP - 4], dtype=torch.int32, device=engine.device)
    shapes = [(2, heads, len(pages) * page_size, dim) for pages in blocks]
    targets = [torch.full(shape, 9.0, dtype=view.kv.dtype, device=engine.device) for shape in shapes]
    transfer = StreamTransfer(engine.device) if engine.device.type == "cuda" else PlainTransfer()
    if engine.device.type == "cuda":
        transfer.submit("before", lambda: torch.cuda._sleep(20_000_000), way="prefix")  # as a block under way
    plans = []
    for pages in blocks:
        full = torch.full_like(pages, page_size)
        plans.append(transfer.edit(lambda pages=pages, full=full: cuda_prefill.plan_stage(view, pages, full, step)))
    for block in order or range(len(blocks)):
        move = partial(cuda_prefill.stage, view, plans[block], targets[block])
        transfer.submit(("staging", block), move, way="prefix")
    transfer.join_all()
    return [target.cpu() for target in targets]


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_planned_while_one_is_under_way(engine, seed):
    """Later blocks take slots that earlier ones read, and ask for units that earlier ones bring: each gets what the
    host has, and the tables tell the truth. Staged in another order they would not.
    """
    engine.seed(seed)
    random = torch.Generator().manual_seed(seed)
    blocks = [torch.randperm(59, generator=random)[:count] + 1 for count in (20, 20, 7)]
    for order in (None, (2, 1, 0)):
        view = make_layer(seed, engine.device, 3, 30, 60, 16, 64, torch.float16, resident=0.7)
        found = staged_after_all_plans(engine, view, [pages.to(engine.device) for pages in blocks], order)
        expected = [view.host[pages].permute(2, 1, 0, 3, 4).reshape(found[i].shape) for i, pages in enumerate(blocks)]
        right = all(map(torch.equal, found, expected))
        assert right == (order is None)
    view = make_layer(seed, engine.device, 3, 30, 60, 16, 64, torch.float16, resident=0.7)
    staged_after_all_plans(engine, view, [pages.to(engine.device) for pages in blocks])
    head, page = (view.slot_of >= 0).nonzero(as_tuple=True)
    held = view.kv[head, view.slot_of[head, page].long()].cpu()
    assert torch.equal(held, view.host[page.cpu(), head.cpu()])
    assert int(cuda.check(view)) == 0


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
@pytest.mark.parametrize("install", [False, True])
def test_refresh(engine, page_size, dim, dtype, install):
    """Entries of an earlier owner go, the pages get slots anew, and the chunk is in all that its pages have."""
    heads, pages, slots = 2, 40, 30
    for seed, counted in enumerate((0, 1, 9)):
        view = make_layer(seed, engine.device, heads, slots, pages, page_size, dim, dtype, resident=0.7)
        loc = torch.cat([torch.arange(3, page_size), torch.arange(20 * page_size, (20 + counted) * page_size)])
        begun, tokens = torch.arange(20, 20 + counted), torch.full((counted,), page_size)
        k, v, k_dev, v_dev = tokens_of(seed, loc.numel(), heads, dim, dtype, engine.device)
        step = torch.tensor([STEP - 4], dtype=torch.int32) if install else None
        to = lambda t: None if t is None else t.to(engine.device)  # noqa: E731
        expected, before = copy_of(view), copy_of(view)
        reference_prefill.refresh(expected, k, v, loc, begun, tokens, step)
        cuda_prefill.refresh(view, k_dev, v_dev, *map(to, (loc, begun, tokens, step)))
        same_tables(view, expected, before)
        assert torch.equal(view.counters.cpu(), expected.counters)
        held = (expected.slot_of >= 0).nonzero()
        for head, page in held.tolist():
            mine = view.kv[head, int(view.slot_of[head, page])].cpu()
            assert torch.equal(mine, expected.kv[head, int(expected.slot_of[head, page])])


def test_stage_refuses_what_it_cannot_fill(engine):
    view = make_layer(0, engine.device, 2, 8, 40, dim=64)
    plan = cuda_prefill.plan_stage(view, torch.arange(3, device=engine.device))
    for shape in ((3, 2, 2, 16, 64), (2, 2, 32, 64)):
        with pytest.raises(ValueError, match="target must be"):
            cuda_prefill.stage(view, plan, torch.zeros(shape, dtype=view.kv.dtype, device=engine.device))


@pytest.mark.parametrize(("page_size", "dim", "dtype"), GRID)
def test_fill(engine, page_size, dim, dtype):
    heads, pages, slots = 2, 40, 30
    view = make_layer(3, engine.device, heads, slots, pages, page_size, dim, dtype, resident=0.7)
    loc = torch.cat([torch.arange(3, 9 * page_size + 1), torch.arange(20 * page_size, 30 * page_size)])
    k, v, k_dev, v_dev = tokens_of(3, loc.numel(), heads, dim, dtype, engine.device)
    expected = copy_of(view)
    reference_prefill.fill(expected, k, v, loc)
    assert not torch.equal(expected.kv, view.kv.cpu())
    cuda_prefill.fill(view, k_dev, v_dev, loc.to(engine.device))
    assert torch.equal(view.kv.cpu(), expected.kv)
