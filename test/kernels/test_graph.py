"""On a GPU: one layer's step in a CUDA graph, the order of streams, and tables under disturbance."""

from __future__ import annotations

import ctypes
import os
import statistics

import pytest
import torch
from layers import copied, copy_of, make_layer, random_selection, same_tables
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import build, cuda, launching, reference
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.reference import Prefetch
from sglang.srt.sparse_kv.ops.workspace import workspace
from sglang.srt.sparse_kv.transfer import StreamTransfer

HEADS, GROUP, DIM, PAGE, ROWS = 2, 4, 128, 16, 2
SCALE = DIM**-0.5
SHAPE = SelectionShape.from_tokens(PAGE, 256, 16, 64)


class LayerStep:
    """Another layer's prefetch on a branch beside score and select, resolve with its copies, and the write of the
    token, or an append in its place and first; from static inputs.
    """

    def __init__(self, gpu, n: int, max_pages: int, seed: int = 0, appends: bool = False):
        self.n, self.gpu, self.appends = n, gpu, appends
        pages = n * max_pages + 1
        self.view = make_layer(seed, gpu, HEADS, n * (SHAPE.width + 2) + 40, pages, PAGE, DIM, torch.float16)
        random = torch.Generator().manual_seed(seed)
        table = (torch.randperm(pages - 1, generator=random) + 1).view(n, max_pages)
        self.table = table.to(torch.int32).to(gpu)
        self.q = torch.zeros((n, ROWS, HEADS, GROUP, DIM), dtype=torch.float16, device=gpu)
        self.k, self.v = (torch.zeros((n, ROWS, HEADS, DIM), dtype=torch.float16, device=gpu) for _ in range(2))
        self.length = torch.ones(n, dtype=torch.int64, device=gpu)
        self.active = torch.ones(n, dtype=torch.bool, device=gpu)
        self.clock = torch.full((1,), 50, dtype=torch.int32, device=gpu)
        self.cap = torch.full((1,), 6, dtype=torch.int32, device=gpu)
        # Another layer, whose prefetch is planned beside this one's selection.
        self.other = make_layer(seed + 1, gpu, HEADS, n * (SHAPE.width + 2) + 40, pages, PAGE, DIM, torch.float16)
        self.predicted = torch.full((n + 1, HEADS, SHAPE.budget_pages), -1, dtype=torch.int32, device=gpu)
        self.rows = torch.arange(1, n + 1, device=gpu)
        words = -(-self.table.shape[1] // 32)
        bits = torch.zeros((n + 1, 2, HEADS, words), dtype=torch.int32, device=gpu)
        self.last = Last(bits, self.rows, torch.ones(1, device=gpu))
        self.transfer = StreamTransfer(gpu)

    def run(self):
        self.clock += 1
        lo, hi = SHAPE.candidate_bounds(self.length[:, None] + torch.arange(ROWS, device=self.gpu))
        logical = self.length // PAGE
        page = self.table.gather(1, logical[:, None])[:, 0]
        closed = torch.where(self.active, logical, 0)
        plan = Prefetch(self.other, self.predicted, self.clock, self.cap, self.table, closed, self.rows)
        kept = torch.empty_like(self.predicted)
        offset = self.length % PAGE
        token = self.view, self.k[:, 0], self.v[:, 0], page
        if self.appends:
            cuda.append(*token, offset, self.active, self.clock)
        with self.transfer.along():
            cuda.plan_prefetches([plan])
            self.transfer.submit(0, lambda: cuda.gather(self.other, plan.fetch))
        scores = cuda.score(self.q, self.view.landmarks, self.table, lo, hi, SCALE)
        chosen = cuda.select(scores, self.table, self.length, self.active, SHAPE, SHAPE.budget_pages, last=self.last)
        with self.transfer.branch(first=False):
            kept_by = (kept, self.rows)
            cuda.predict(scores, self.length, self.active, SHAPE, SHAPE.budget_pages, kept_by, self.last)
        found_by = {"num_pages": chosen.num_pages, "open_tokens": offset}
        slots, _ = cuda.resolve(self.view, chosen.pages, None, self.clock, move=True, **found_by)
        if not self.appends:
            cuda.write_token(*token, None, offset, self.active)
            with self.transfer.branch(first=False):
                cuda.close_pages(self.view, page, offset, self.active)
        self.transfer.join_branch()
        self.transfer.join_all()
        self.predicted[1:] = kept[1:]
        chosen.predicted = self.predicted
        return chosen, slots, plan.fetch

    def set_inputs(self, seed: int):
        # Lengths jump from call to call, where real ones grow: of an open page left behind, the cache holds only the
        # tokens up to the one written.
        left = self.table.gather(1, (self.length // PAGE)[:, None])[:, 0]
        cuda.invalidate(self.view, left)
        random = torch.Generator().manual_seed(seed)
        limit = self.table.shape[1] * PAGE - 2
        length = torch.randint(1, limit, (self.n,), generator=random)
        length[0] = limit
        active = torch.rand(self.n, generator=random) < 0.8
        active[0] = True
        for target, source in ((self.length, length), (self.active, active)):
            target.copy_(source)
        for target in (self.q, self.k, self.v):
            target.copy_(torch.randn(target.shape, generator=random))

    def check(self, out):
        """The selection is the reference's for these scores, and every selected unit holds its page."""
        chosen, slots, ahead = out
        workspace(self.gpu).check()
        assert int(cuda.check(self.view)) == 0
        assert int(cuda.check(self.other)) == 0
        copied(self.other, ahead)
        state = copy_of(self.view)
        pages = chosen.pages.cpu()
        used = pages >= 0
        head = torch.arange(HEADS)[None, :, None].expand_as(pages)
        slot = slots.cpu()
        assert torch.equal(state.page_of[head[used], slot[used].long()], pages[used])
        length, table = self.length.cpu(), self.table.cpu()
        open_page = table.gather(1, (length // PAGE)[:, None])[:, 0]
        filled = torch.where(pages == open_page[:, None, None], (length % PAGE + 1)[:, None, None], PAGE)[used]
        inside = torch.arange(PAGE)[None, :] < filled[:, None]
        same = (state.kv[head[used], slot[used].long()] == state.host[pages[used].long(), head[used]]).all(-1).all(1)
        assert bool((same | ~inside).all()), "a selected unit differs from the host"


@pytest.fixture
def only_gpu(gpu):
    build.use(None)
    return gpu


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("n", [1, 5, 17])
def test_a_captured_step_equals_an_eager_one(only_gpu, n, overlap, appends, monkeypatch):
    monkeypatch.setattr(launching, "OVERLAP_LAUNCHES", overlap)
    eager, captured = (LayerStep(only_gpu, n, 90, appends=appends) for _ in range(2))
    for step in (eager, captured):
        step.set_inputs(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            captured.run()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(2):
        eager.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.run()
    for seed in range(1, 12):
        for step in (eager, captured):
            step.set_inputs(seed)
        expected = eager.run()
        graph.replay()
        eager.check(expected)
        captured.check(out)
        for name in ("pages", "num_pages", "predicted"):
            assert torch.equal(getattr(out[0], name), getattr(expected[0], name)), name
        for name in ("stamp", "ahead", "counters"):
            assert torch.equal(getattr(captured.view, name), getattr(eager.view, name)), name
            assert torch.equal(getattr(captured.other, name), getattr(eager.other, name)), f"{name} of the other layer"
        assert all(map(torch.equal, captured.view.landmarks, eager.view.landmarks))


def test_nothing_waits_for_the_device(only_gpu):
    step = LayerStep(only_gpu, 3, 50)
    step.set_inputs(0)
    step.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_padded_rows_are_inert(only_gpu):
    step = LayerStep(only_gpu, 4, 30)
    step.set_inputs(0)
    step.active.zero_()
    before = copy_of(step.view)
    step.run()
    torch.cuda.synchronize()
    after = copy_of(step.view)
    for name in ("kv", "slot_of", "page_of", "stamp", "ahead", "host", "counters"):
        assert torch.equal(getattr(before, name), getattr(after, name)), f"padded rows changed {name}"
    assert all(map(torch.equal, before.landmarks, after.landmarks)), "padded rows changed landmarks"


def test_tables_under_random_sleeps(only_gpu):
    """Copies on a side stream, sleeping kernels on both: every step leaves sound tables and right bytes."""
    steps = int(os.environ.get("SPARSE_KV_RACE_STEPS", "2000"))
    heads, slots, pages, width, n = 4, 120, 400, 9, 5
    view = make_layer(0, only_gpu, heads, slots, pages, PAGE, 64, resident=0.0)
    random = torch.Generator().manual_seed(1)
    side = torch.cuda.Stream()
    clock = torch.full((1,), 40, dtype=torch.int32, device=only_gpu)
    cap = torch.full((1,), 3, dtype=torch.int32, device=only_gpu)
    selections = random_selection(3, 64, heads, width, pages).to(only_gpu)
    violations = torch.zeros(1, dtype=torch.int32, device=only_gpu)
    wrong = torch.zeros(1, dtype=torch.int32, device=only_gpu)
    head = torch.arange(heads, device=only_gpu)[None, :, None].expand(n, heads, width)
    host = view.host.to(only_gpu)

    def sleep(stream):
        if int(torch.randint(0, 3, (1,), generator=random)) == 0:
            cycles = int(torch.randint(0, 20000, (1,), generator=random))
            with torch.cuda.stream(stream):
                launching.launch("sleep", only_gpu, ctypes.c_int64(cycles))

    main = torch.cuda.current_stream()
    for _ in range(steps):
        clock += 1
        rows = torch.randint(0, 64, (n,), generator=random).to(only_gpu)
        wanted, later = selections[rows], selections[(rows + 1) % 64]
        ahead = cuda.plan_prefetch(Prefetch(view, later, clock - 1, cap))
        side.wait_stream(main)
        sleep(side)
        with torch.cuda.stream(side):
            cuda.gather(view, ahead)
        sleep(main)
        got, _ = cuda.resolve(view, wanted, None, clock, move=True)
        sleep(main)
        main.wait_stream(side)
        used = wanted >= 0
        cached = view.kv[head, got.clamp(min=0).long()]
        truth = host[wanted.clamp(min=0).long(), head]
        wrong += ((cached != truth).flatten(3).any(-1) & used).sum()
        violations += cuda.check(view)
    assert int(wrong) == 0, "a selected unit held other bytes"
    assert int(violations) == 0
    workspace(only_gpu).check()


def test_misses_pass_prefetches(only_gpu):
    """A long prefetch must not starve a miss, and both must arrive whole."""
    heads, pages = 8, 4000
    view = make_layer(0, only_gpu, heads, 3000, pages, PAGE, 128, resident=0.0)
    clock = torch.full((1,), 50, dtype=torch.int32, device=only_gpu)
    cap = torch.full((1,), 4000, dtype=torch.int32, device=only_gpu)
    many = torch.arange(1, 2001, dtype=torch.int32, device=only_gpu).expand(1, heads, -1).contiguous()
    few = torch.arange(3000, 3008, dtype=torch.int32, device=only_gpu).expand(1, heads, -1).contiguous()
    ahead = cuda.plan_prefetch(Prefetch(view, many, clock, cap))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cuda.gather(view, ahead)
    _, missed = cuda.resolve(view, few, None, clock, move=True)
    torch.cuda.synchronize()
    copied(view, missed)
    copied(view, ahead)
    assert not bool(workspace(only_gpu).urgent.any())


@pytest.mark.parametrize("units", [64, 512, 4096])
def test_a_stall_is_what_the_launch_takes(only_gpu, units):
    """Replays that bring so many units, by the counter and by events: hits are looked up outside the stall."""
    heads, width, turns = 8, units // 8, 20
    view = make_layer(0, only_gpu, heads, 2 * width, 4 * width + 1, PAGE, 128, resident=0.0)
    clock = torch.full((1,), 50, dtype=torch.int32, device=only_gpu)
    pages = torch.arange(1, 4 * width + 1, dtype=torch.int32, device=only_gpu).view(4, 1, 1, width)
    wanted = pages[0].expand(1, heads, -1).contiguous()
    cuda.resolve(view, wanted, None, clock, move=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.resolve(view, wanted, None, clock, move=True)
    times = []
    for turn in range(turns):
        wanted.copy_(pages[(turn + 1) % 4].expand(1, heads, -1))  # what was there two turns ago has left
        clock += 1
        torch.cuda.synchronize()
        view.stalled.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000)  # so that the launch itself is over when the first event is
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append((int(view.stalled) / 1e3, begin.elapsed_time(end) * 1e3))
    assert int(view.counters[2]) == (turns + 1) * units
    stalled, whole = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{units} units: stalled {stalled:.1f} of {whole:.1f} µs")
    # Beside the stall lie the graph's launch and the look-up, a few microseconds each; the clock may tick by one.
    assert min(0.7 * whole, whole - 20) <= stalled <= whole + 2


def test_reference_agrees_after_a_captured_history(only_gpu):
    """Many replays in a row, then the tables against the reference fed with the same selections."""
    n, heads, slots, pages, width = 3, 3, 60, 200, 8
    view = make_layer(0, only_gpu, heads, slots, pages, PAGE, 64, resident=0.0)
    expected = copy_of(view)
    wanted = torch.zeros((n, heads, width), dtype=torch.int32, device=only_gpu)
    clock = torch.full((1,), 40, dtype=torch.int32, device=only_gpu)
    cuda.resolve(view, torch.full_like(wanted, -1), None, clock, move=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.resolve(view, wanted, None, clock, move=True)
    for turn in range(60):
        before = copy_of(view)
        for name in ("kv", "slot_of", "page_of", "stamp", "ahead", "counters"):
            getattr(expected, name).copy_(getattr(before, name))
        chosen = random_selection(turn, n, heads, width, pages)
        wanted.copy_(chosen)
        clock.fill_(41 + turn)
        graph.replay()
        reference.resolve(expected, chosen, None, torch.tensor([41 + turn], dtype=torch.int32))
        same_tables(view, expected, before)
