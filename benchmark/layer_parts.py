"""What each operation of a decode step's layer adds to it: score, select, resolve, the write of the token, attention
with row 1's own token; what row 1 predicts and the landmarks of pages that close, and the plan of a prefetch, each on a
branch, in the shape of benchmark/kernels.py but float16.

    python -m benchmark.layer_parts [--append] [--json FILE] [LIBRARY ...]

A layer is a product that streams 117 MB of weights through the second-level cache and the operations up to one of them;
a part is the difference between two such graphs, so launches that overlap count once. After a first step all pages are
resident. With --append the same once more, but with the token written on a branch beside the scores, as all steps once
did. LIBRARY: kernel libraries to compare, as `ops.build --out` makes them; by default this checkout's. Needs a GPU and
FlashInfer.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sparse_kv.ops import build, cuda
from sglang.srt.sparse_kv.ops.reference import NONE, Prefetch
from sglang.srt.sparse_kv.ops.workspace import workspace
from sglang.srt.sparse_kv.transfer import StreamTransfer

from benchmark import kernels
from benchmark.serving.record import facts

LENGTH = 32768
CASES = [
    (1, 0),
    (4, 0),
    (8, 0),
    (1, 8192),
    (4, 8192),
    (8, 8192),
]  # requests, pages of a table; 0: what the length needs
ORDERS = {
    "write": ("score", "select", "resolve", "write", "attend", "predict", "plan"),
    "append": ("score", "select", "resolve", "attend", "predict", "append", "plan"),
}
LAYERS = 8


class Layers:
    """Some layers of `n` requests, each with data of its own, but for the host's pages, which nobody brings."""

    def __init__(self, n: int, table: int, host: torch.Tensor, transfer: StreamTransfer):
        device, shape, heads = kernels.DEVICE, kernels.SHAPE, kernels.HEADS
        self.batch, self.transfer = kernels.Batch(n, LENGTH), transfer
        batch = self.batch
        if table:
            batch.table = torch.nn.functional.pad(batch.table, (0, table - batch.max_pages)).contiguous()
        self.views = [kernels.layer(3 * n * shape.width, batch.pages, host, batch.pages) for _ in range(LAYERS)]
        predicted = (n + 1, LAYERS, heads, shape.budget_pages)
        self.predicted = torch.full(predicted, NONE, dtype=torch.int32, device=device)
        self.rows, self.closed = torch.arange(1, n + 1, device=device), batch.lengths // kernels.PAGE
        self.cap = torch.full((1,), 128, dtype=torch.int32, device=device)
        self.weights = [torch.randn((4096, 14336), device=device, dtype=kernels.DTYPE) for _ in range(3)]
        self.x = torch.randn((2 * n, 4096), device=device, dtype=kernels.DTYPE)

    def run(self, parts: tuple[str, ...]) -> None:
        """Products, alone without parts."""
        self.batch.clock.add_(1)
        for i in range(LAYERS):
            self.x @ self.weights[i % 3]
            if parts:
                self._layer(i, parts)

    def _layer(self, i: int, parts: tuple[str, ...]) -> None:
        b, view, shape, scale = self.batch, self.views[i], kernels.SHAPE, kernels.SCALE
        inputs = cuda.attend_inputs(b.q, view, b.last, shape.width, scale)
        token = b.k[:, 0], b.v[:, 0], b.page
        if "append" in parts:
            with self.transfer.branch():
                cuda.append(view, *token, b.offset, b.active, b.clock, through=False)
        if "plan" in parts and i:
            with self.transfer.along():
                before = self.views[i - 1], self.predicted[:, i - 1], b.clock, self.cap, b.table, self.closed, self.rows
                cuda.plan_prefetches([plan := Prefetch(*before)])
                self.transfer.submit(i, partial(cuda.gather, plan.view, plan.fetch))
        scores = cuda.score(b.q, view.landmarks, b.table, b.lo, b.hi, scale, inputs)
        if "select" not in parts:
            return
        chosen = cuda.select(scores, b.table, b.lengths, b.active, shape, shape.budget_pages, last=b.selected)
        if "resolve" not in parts:
            return
        self.transfer.join_branch()  # an append's
        if "predict" in parts:
            with self.transfer.branch(first=False):
                keep = self.predicted[:, i], self.rows
                cuda.predict(scores, b.lengths, b.active, shape, shape.budget_pages, keep, b.selected)
        found_by = {"inputs": inputs, "num_pages": chosen.num_pages, "open_tokens": b.offset}
        slots, _ = cuda.resolve(view, chosen.pages, None, b.clock, move=True, **found_by)
        if "write" in parts:
            cuda.write_token(view, *token, None, b.offset, b.active, through=False)
        if "write" in parts and "predict" in parts:
            with self.transfer.branch(first=False):
                cuda.close_pages(view, b.page, b.offset, b.active)
        if "attend" in parts:
            cuda.attend(b.q, b.k[:, 1], b.v[:, 1], view, slots, chosen.num_pages, b.last, scale, inputs)
        self.transfer.join_branch()
        if i == LAYERS - 1:
            self.transfer.join_all()


def measure(
    n: int, table: int, orders: list[str], libraries: list[Path | None], host: torch.Tensor, transfer: StreamTransfer
):
    """Rows of the parts' microseconds, one for each library and order."""
    layers = Layers(n, table, host, transfer)
    for library, order in itertools.product(libraries, orders):
        parts = ORDERS[order]
        build.use(None if library is None else build.load(library))
        layers.run(parts)
        first = [parts[:k] for k in range(len(parts) + 1)]
        times = [kernels.timed(partial(layers.run, some), per=LAYERS) for some in first]
        row: dict[str, Any] = {
            "library": str(library or "checkout"),
            "order": order,
            "requests": n,
            "table": layers.batch.table.shape[1],
        }
        row |= {part: round(times[k + 1] - times[k], 2) for k, part in enumerate(parts)}
        row["all"] = round(times[-1] - times[0], 2)
        print(*(f"{name} {value}" for name, value in row.items()), flush=True)
        workspace(kernels.DEVICE).check()
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", type=Path, metavar="LIBRARY")
    parser.add_argument("--append", action="store_true", help="also measure the order with an append")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    kernels.DTYPE = torch.float16
    transfer = StreamTransfer(kernels.DEVICE)
    pages = max(n for n, _ in CASES) * (LENGTH // kernels.PAGE + 2) + 1
    unit = kernels.HEADS, 2, kernels.PAGE, kernels.DIM
    host = torch.empty((pages, *unit), dtype=kernels.DTYPE, device=kernels.DEVICE)
    cuda.skip_copies(kernels.DEVICE, True)
    orders, libraries = list(ORDERS) if args.append else ["write"], args.libraries or [None]
    rows = [row for case in CASES for row in measure(*case, orders, libraries, host, transfer)]
    if args.json:
        args.json.write_text(json.dumps({**facts("benchmark.layer_parts"), "rows": rows}))


if __name__ == "__main__":
    main()
