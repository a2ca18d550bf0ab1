"""Times of the CUDA kernels, each beside its floor, on random data in the shape of Llama-3.1-8B (8 kv heads, group 4,
head_dim 128, page 16, bfloat16).

    python benchmark/kernels.py [--only PREFIX ...] [--json FILE]

Every time is the median over replays of a CUDA graph that holds the operation for many layers with data of their own,
so that neither launch gaps of the host nor a warm second-level cache flatter it. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from sglang.srt.sparse_kv import transfer as transfer_module
from sglang.srt.sparse_kv.geometry import LANDMARK_PARTS, SelectionShape
from sglang.srt.sparse_kv.ops import cuda, cuda_prefill, landmarks, launching
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.reference import COUNTERS, NEVER, NONE, RESERVED, Fetch, LayerView, Prefetch
from sglang.srt.sparse_kv.ops.workspace import workspace

HEADS, GROUP, DIM, PAGE, ROWS = 8, 4, 128, 16, 2
DTYPE = torch.bfloat16
UNIT = 2 * PAGE * DIM * 2
SHAPE = SelectionShape.from_tokens(PAGE, 2048, 16, 64)
HBM = 4.3e12  # bytes a second, a copy's reads and writes, measured on an H200
PCIE = 50e9
DEVICE = torch.device("cuda", 0)

RESULTS: list[dict] = []


def record(name: str, microseconds: float, floor: float | None = None, note: str = "") -> None:
    RESULTS.append({"name": name, "us": round(microseconds, 2), "floor_us": floor and round(floor, 2), "note": note})
    print(line(RESULTS[-1]), flush=True)


def line(row: dict) -> str:
    floor = "" if row["floor_us"] is None else f"{row['floor_us']:9.2f}"
    return f"{row['name']:<44}{row['us']:10.2f}{floor:>10}  {row['note']}"


def timed(body: Callable[[], None], repeats: int = 30, per: int = 1) -> float:
    """Median microseconds of one of the `per` operations that `body` issues, replayed as a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / per)
    return statistics.median(times)


def random_landmarks(pages: int) -> landmarks.Landmarks:
    return landmarks.make(torch.randn((pages, HEADS, LANDMARK_PARTS, DIM), device=DEVICE))


def layer(slots: int, pages: int, host: torch.Tensor, landmark_pages: int = 1) -> LayerView:
    """An empty layer over shared host memory."""
    return LayerView(
        kv=torch.zeros((HEADS, slots, 2, PAGE, DIM), dtype=DTYPE, device=DEVICE),
        slot_of=torch.full((HEADS, pages), NONE, dtype=torch.int32, device=DEVICE),
        page_of=torch.full((HEADS, slots), NONE, dtype=torch.int32, device=DEVICE),
        stamp=torch.full((HEADS, slots), NEVER, dtype=torch.int32, device=DEVICE),
        ahead=torch.zeros((HEADS, slots), dtype=torch.bool, device=DEVICE),
        host=host[:pages],
        landmarks=random_landmarks(landmark_pages),
        counters=torch.zeros(len(COUNTERS), dtype=torch.int64, device=DEVICE),
        stalled=torch.zeros((), dtype=torch.int64, device=DEVICE),
    )


class Batch:
    """Decode inputs of `n` requests of `length` tokens."""

    def __init__(self, n: int, length: int):
        self.n, self.length = n, length
        self.max_pages = length // PAGE + 2
        self.pages = n * self.max_pages + 1
        self.table = (torch.randperm(self.pages - 1, device=DEVICE) + 1).view(n, self.max_pages).to(torch.int32)
        self.lengths = torch.full((n,), length, dtype=torch.int64, device=DEVICE)
        self.lo, self.hi = SHAPE.candidate_bounds(self.lengths[:, None] + torch.arange(ROWS, device=DEVICE))
        self.active = torch.ones(n, dtype=torch.bool, device=DEVICE)
        self.q = torch.randn((n, ROWS, HEADS, GROUP, DIM), device=DEVICE).to(DTYPE)
        self.k, self.v = (torch.randn((n, ROWS, HEADS, DIM), device=DEVICE).to(DTYPE) for _ in range(2))
        self.page = self.table.gather(1, self.lengths[:, None] // PAGE)[:, 0]
        self.offset = self.lengths % PAGE
        self.last = self.offset + 1
        self.clock = torch.full((1,), 2000, dtype=torch.int32, device=DEVICE)
        bits = torch.zeros((n, 2, HEADS, -(-self.max_pages // 32)), dtype=torch.int32, device=DEVICE)
        self.selected = Last(bits, torch.arange(n, device=DEVICE), torch.ones(1, device=DEVICE))


SIZES = [(1, 32768), (1, 131072), (8, 32768), (32, 32768), (8, 131072)]
SCALE = DIM**-0.5


def label(n: int, length: int) -> str:
    return f"{n} x {length // 1024}K"


def bench_score() -> None:
    for n, length in SIZES:
        batch = Batch(n, length)
        size = batch.pages * HEADS * LANDMARK_PARTS * (DIM // 2 + 2)
        summaries = [random_landmarks(batch.pages) for _ in range(max(4, min(32, 400_000_000 // size)))]
        floor = size / HBM * 1e6

        def scores(summaries=summaries, batch=batch):
            for marks in summaries:
                cuda.score(batch.q, marks, batch.table, batch.lo, batch.hi, SCALE)

        def both(summaries=summaries, batch=batch):
            for marks in summaries:
                found = cuda.score(batch.q, marks, batch.table, batch.lo, batch.hi, SCALE)
                cuda.select(
                    found, batch.table, batch.lengths, batch.active, SHAPE, SHAPE.budget_pages, last=batch.selected
                )

        alone = timed(scores, per=len(summaries))
        record(f"score {label(n, length)}", alone, floor, f"{size / alone / 1e6:.2f} TB/s")
        together = timed(both, per=len(summaries))
        record(f"score + select {label(n, length)}", together, floor, f"select {together - alone:.1f}")


def bench_resolve() -> None:
    """Half of the slots are barred, so that exactly one selection fits and each call misses what the last evicted."""
    for n, missing in ((1, 0), (1, 1), (1, 8), (1, 64), (8, 0), (8, 8), (32, 0), (32, 9), (64, 0)):
        width, pages = SHAPE.width, 60000
        used = n * width
        views = [layer(2 * used, pages, HOST.get(pages)) for _ in range(4)]
        numbers = torch.randperm(pages - 1, device=DEVICE)[: used + n * missing].to(torch.int32) + 1
        variants = [numbers[:used].view(n, 1, width).expand(n, HEADS, width).contiguous() for _ in range(2)]
        if missing:
            other = numbers[used:].view(n, 1, missing).expand(n, HEADS, missing)
            variants[1][:, :, width - missing :] = other
        for view in views:
            view.stamp[:, used:] = RESERVED
        clock = torch.full((1,), 2000, dtype=torch.int32, device=DEVICE)
        for move in (False, True):

            def body(views=views, variants=variants, clock=clock, move=move):
                for variant in variants:
                    clock.add_(1)
                    for view in views:
                        cuda.resolve(view, variant, None, clock, move=move)

            floor = n * missing * HEADS * UNIT / PCIE * 1e6 if move else None
            before = views[0].counters.tolist()
            name = f"resolve{' + move' if move else ''}, {n} requests, {missing} misses"
            record(name, timed(body, per=2 * len(views)), floor)
            after = views[0].counters.tolist()
            calls = (after[0] - before[0]) // (used * HEADS)
            RESULTS[-1]["note"] = f"{(after[2] - before[2]) / calls:.0f} units a call"
            print(f"  {RESULTS[-1]['note']}")


def bench_append() -> None:
    for n in (1, 8, 32, 64):
        batch = Batch(n, 4096)
        views = [layer(n * 4 + 8, batch.pages, HOST.get(batch.pages), batch.pages) for _ in range(8)]
        for through in (True, False):

            def body(views=views, batch=batch, through=through):
                for view in views:
                    cuda.append(
                        view,
                        batch.k[:, 0],
                        batch.v[:, 0],
                        batch.page,
                        batch.offset,
                        batch.active,
                        batch.clock,
                        None,
                        through,
                    )

            name = f"append, {n} requests{'' if through else ', not through'}"
            record(name, timed(body, per=len(views)), n * HEADS * DIM * 4 / PCIE * 1e6 if through else None)


def bench_chain() -> None:
    """A layer's operations around attention as a decode step issues them, all pages resident, between products that
    stream weights through the second-level cache; without the time of the products alone.
    """
    launching.OVERLAP_LAUNCHES = 1
    weights = [torch.randn((4096, 14336), device=DEVICE, dtype=DTYPE) for _ in range(3)]
    transfers = {}
    for transfer_module.BRANCH in ("none", "equal", "first"):
        transfers[transfer_module.BRANCH] = transfer_module.StreamTransfer(DEVICE)
    for n, length in ((1, 8192), (1, 32768), (4, 32768), (16, 32768), (22, 32768)):
        batch = Batch(n, length)
        layers = 16 if n == 1 else 6
        slots = min(batch.pages + 8, 3 * n * SHAPE.width)
        views = [layer(slots, batch.pages, HOST.get(batch.pages), batch.pages) for _ in range(layers)]
        predicted = torch.full((n + 1, layers, HEADS, SHAPE.budget_pages), NONE, dtype=torch.int32, device=DEVICE)
        rows, cap = torch.arange(1, n + 1, device=DEVICE), torch.full((1,), 128, dtype=torch.int32, device=DEVICE)
        x = torch.randn((2 * n, 4096), device=DEVICE, dtype=DTYPE)

        def products(x=x, layers=layers):
            for i in range(layers):
                x @ weights[i % 3]

        closed, kinds = batch.lengths // PAGE, [""]

        def body(views=views, batch=batch, x=x, rows=rows, cap=cap, predicted=predicted, closed=closed, kinds=kinds):
            transfer = transfers[kinds[0]]
            batch.clock.add_(1)
            for i, view in enumerate(views):
                x @ weights[i % 3]
                if i:
                    plan = Prefetch(views[i - 1], predicted[:, i - 1], batch.clock, cap, batch.table, closed, rows)
                    with transfer.along():
                        cuda.plan_prefetches([plan])
                        transfer.submit(i, partial(cuda.gather, plan.view, plan.fetch))
                found = cuda.score(batch.q, view.landmarks, batch.table, batch.lo, batch.hi, SCALE)
                chosen = cuda.select(
                    found, batch.table, batch.lengths, batch.active, SHAPE, SHAPE.budget_pages, last=batch.selected
                )
                with transfer.branch(first=False):
                    keep = (predicted[:, i], rows)
                    cuda.predict(found, batch.lengths, batch.active, SHAPE, SHAPE.budget_pages, keep, batch.selected)
                found_by = {"num_pages": chosen.num_pages, "open_tokens": batch.offset}
                cuda.resolve(view, chosen.pages, None, batch.clock, move=True, **found_by)
                written = batch.page, None, batch.offset, batch.active
                cuda.write_token(view, batch.k[:, 0], batch.v[:, 0], *written)
                with transfer.branch(first=False):
                    cuda.close_pages(view, batch.page, batch.offset, batch.active)
                transfer.join_branch()
            transfer.join_all()

        alone = timed(products, per=layers)
        for kind in transfers:
            transfer_module.BRANCH = kinds[0] = kind
            record(f"chain {label(n, length)}, branch {kind}", timed(body, per=layers) - alone, None, "no misses")


def units_of(view: LayerView, count: int) -> Fetch:
    slots, pages = view.stamp.shape[1], view.slot_of.shape[1]
    head = torch.arange(count) % HEADS
    slot = torch.arange(count) // HEADS % slots
    page = torch.randint(1, pages, (count,))
    units = torch.stack([page, head, slot, torch.full((count,), view.kv.shape[3])], 1).to(torch.int32).to(DEVICE)
    return Fetch(units, torch.tensor([count], dtype=torch.int32, device=DEVICE))


def bench_gather() -> None:
    count = 8192  # 64 MB of 8 KB units
    view = layer(2048, 16000, HOST.get(16000))
    fetch = units_of(view, count)
    for blocks in (1, 2, 3, 4, 8, 16):
        time_us = timed(lambda blocks=blocks: cuda.gather(view, fetch, blocks=blocks), repeats=10)
        rate = count * UNIT / time_us / 1e3
        record(f"gather 64 MB, 8 KB units, {blocks} blocks", time_us, count * UNIT / PCIE * 1e6, f"{rate:.1f} GB/s")
    for few in (1, 8, 64):
        some = Fetch(fetch.units, torch.tensor([few], dtype=torch.int32, device=DEVICE))
        for blocks in (2, 8):
            record(
                f"gather {few} units, {blocks} blocks", timed(lambda f=some, b=blocks: cuda.gather(view, f, blocks=b))
            )
    pinned = HOST.get(16000)[:8192, 0, 0].contiguous().pin_memory()
    target = torch.empty_like(pinned, device=DEVICE)
    time_us = timed(lambda: target.copy_(pinned, non_blocking=True), repeats=10)
    record("copy of 32 MB by the copy engine", time_us, None, f"{pinned.numel() * 2 / time_us / 1e3:.1f} GB/s")


def bench_priority() -> None:
    """64 missing units on an idle link, and beside a prefetch that fills it."""
    view = layer(3000, 16000, HOST.get(16000))
    few = units_of(view, 64)
    many = units_of(view, 4096)
    side = torch.cuda.Stream()
    for blocks in (2, 4):
        idle = timed(lambda b=blocks: cuda.gather(view, few, blocks=b))
        record(f"miss of 64 units, idle link, {blocks} blocks", idle)
        for ahead in (True, False):
            times = []
            many_ahead = cuda.DeviceFetch(many.units, many.count, ahead=ahead)
            for _ in range(12):
                torch.cuda.synchronize()
                with torch.cuda.stream(side):
                    cuda.gather(view, many_ahead, blocks=4)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                launching.launch("sleep", DEVICE, ctypes.c_int64(200_000))  # until the host has launched the rest
                begin.record()
                cuda.gather(view, few, blocks=blocks)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3)
            name = "prefetch stands back" if ahead else "prefetch does not"
            record(
                f"miss of 64 units, full link, {name}, {blocks}", statistics.median(times), idle * 1.3, "limit 1.3 x"
            )


def bench_gemm() -> None:
    """Decode GEMMs beside a gather of 64 MB."""
    x = torch.randn((128, 4096), device=DEVICE).to(DTYPE)
    weights = [torch.randn((4096, 14336), device=DEVICE).to(DTYPE) for _ in range(8)]
    view = layer(2048, 16000, HOST.get(16000))
    fetch = units_of(view, 8192)
    side = torch.cuda.Stream()

    def gemms():
        for i in range(40):
            torch.matmul(x, weights[i % len(weights)])

    alone = timed(gemms, repeats=10)
    record("40 GEMMs 128 x 4096 x 14336", alone)
    for blocks in (2, 4):

        def both(blocks=blocks):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                cuda.gather(view, fetch, blocks=blocks)
            gemms()
            torch.cuda.current_stream().wait_stream(side)

        record(
            f"the same beside 64 MB on {blocks} blocks", timed(both, repeats=10), max(alone, 8192 * UNIT / PCIE * 1e6)
        )


def bench_prefill() -> None:
    tokens = 4096
    view = layer(64, 16000, HOST.get(16000), 16000)
    k, v = (torch.randn((tokens, HEADS, DIM), device=DEVICE).to(DTYPE) for _ in range(2))
    loc = torch.arange(PAGE, PAGE + tokens, device=DEVICE)
    size = tokens * HEADS * DIM * 4
    time_us = timed(lambda: cuda_prefill.store_chunk(view, k, v, loc), repeats=10)
    record("store_chunk, 4096 tokens", time_us, size / PCIE * 1e6, f"{size / time_us / 1e3:.1f} GB/s")
    pages = torch.randperm(15000, device=DEVICE)[:256] + 1
    target = torch.empty((2, HEADS, 256 * PAGE, DIM), dtype=DTYPE, device=DEVICE)
    plan = cuda_prefill.plan_stage(view, pages)
    for blocks in (2, 4):
        time_us = timed(lambda b=blocks: cuda_prefill.stage(view, plan, target, blocks=b), repeats=10)
        record(f"stage 4096 tokens, {blocks} blocks", time_us, size / PCIE * 1e6, f"{size / time_us / 1e3:.1f} GB/s")


def bench_attend() -> None:
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        print("attend: FlashInfer is not installed, skipped")
        return
    for n in (1, 4, 8, 16, 32, 64):
        width = SHAPE.width
        views = [layer(n * width, 8, HOST.get(8)) for _ in range(4)]
        slots = torch.stack([torch.randperm(n * width, device=DEVICE).view(n, width) for _ in range(HEADS)], 1)
        slots = slots.to(torch.int32).contiguous()
        batch = Batch(n, 4096)
        num_pages = torch.full((n,), width, dtype=torch.int32, device=DEVICE)
        last = torch.full((n,), PAGE, dtype=torch.int32, device=DEVICE)
        k_row1, v_row1 = batch.k[:, 1], batch.v[:, 1]

        def body(views=views, slots=slots, batch=batch, num_pages=num_pages, last=last, k=k_row1, v=v_row1):
            for view in views:
                cuda.attend(batch.q, k, v, view, slots, num_pages, last, SCALE)

        size = n * HEADS * width * UNIT
        time_us = timed(body, per=len(views))
        record(f"attend, {n} requests", time_us, size / HBM * 1e6, f"{size / time_us / 1e6:.2f} TB/s")


def bench_pinned() -> None:
    from sglang.srt.sparse_kv.ops.pinned import pinned_empty

    start = time.monotonic()
    memory = pinned_empty((8 << 30,), torch.uint8)
    took = time.monotonic() - start
    record("pinned_empty of 8 GiB", took * 1e6, None, f"{8.6 / took:.1f} GB/s")
    del memory


class HostMemory:
    """One pinned buffer for every benchmark."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None

    def get(self, pages: int) -> torch.Tensor:
        if self.memory is None:
            from sglang.srt.sparse_kv.ops.pinned import pinned_empty

            self.memory = pinned_empty((70000, HEADS, 2, PAGE, DIM), DTYPE)
        return self.memory


HOST = HostMemory()
BENCHES = {name[6:]: body for name, body in list(globals().items()) if name.startswith("bench_")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), help="run these alone")
    parser.add_argument("--json", help="also write the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    failed = []
    for name in args.only or BENCHES:
        try:
            BENCHES[name]()
            workspace(DEVICE).check()
        except Exception as error:  # noqa: PERF203 - one broken benchmark must not hide the others
            failed.append(name)
            print(f"{name} FAILED: {type(error).__name__}: {error}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit or 'unknown'}"
    print(f"\n{head}\n{'':<44}{'us':>10}{'floor':>10}")
    print("\n".join(line(row) for row in RESULTS))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": head, "command": " ".join(sys.argv), "date": time.strftime("%F"), "rows": RESULTS}, file
            )
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
