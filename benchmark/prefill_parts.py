"""A prefill behind a prefix, without a server: what the host takes to give its orders, and the device to obey them.

    python -m benchmark.prefill_parts [--tokens 200] [--prefix 32768] [--scattered] [--json FILE]

The 8B shape in float16 without a model: each layer is the products of one with 4096 dimensions, and attention between
them. `dense` attends to keys that lie in one place; `resident` is our prefill with all pages in the cache; `host` has
to bring all of them; `alone` has no prefix. "orders" is the time until the host has given all orders, "all" until the
device has obeyed, medians in milliseconds. Where the first is the longer one, a first token waits for the host: what
torch takes for one small launch, in microseconds, tells how fast it is just now. Needs a GPU with 20 GB, FlashInfer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sglang.srt.sparse_kv import planner
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.doctor_gpu import launch_seconds
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.ops import attend
from sglang.srt.sparse_kv.prefill import Prefill
from sglang.srt.sparse_kv.runtime import SparseKVRuntime

from benchmark.serving.record import facts

LAYERS, HEADS, GROUP, DIM, PAGE, HIDDEN, INNER = 32, 8, 4, 128, 16, 4096, 14336
DEVICE, DTYPE, CHUNK, REPEATS = torch.device("cuda", 0), torch.float16, 8192, 9


class Model:
    """One layer's products, again and again. scattered: the request's pages lie in no order, each a copy of its own."""

    def __init__(self, prefix: int, tokens: int, scattered: bool):
        self.prefix, self.tokens = prefix, tokens
        pages = -(-(prefix + tokens) // PAGE) + 2
        geometry = Geometry(LAYERS, HEADS, GROUP, DIM, PAGE, 0, pages, 0, DTYPE, prefix + CHUNK)
        config, pool = SparseKVConfig.from_dict({}), (pages + 1) * geometry.page_bytes
        plan = planner.plan(config, geometry, 2 * pool, pool, 2, cuda=True)
        geometry = dataclasses.replace(geometry, num_pages=pages + 1, max_requests=plan.max_running_requests)
        host = torch.zeros((LAYERS, pages + 1, HEADS, 2, PAGE, DIM), dtype=DTYPE, pin_memory=True)
        self.runtime = SparseKVRuntime(config, geometry, plan, host, DEVICE)
        self.prefill = Prefill(self.runtime)
        order = torch.arange(pages) + 1
        if scattered:
            order = order[torch.randperm(pages, generator=torch.Generator().manual_seed(0))]
        table = (order[:, None] * PAGE + torch.arange(PAGE)).reshape(-1).to(torch.int32)
        self.req_to_token = torch.stack([torch.zeros_like(table), table]).to(DEVICE)
        self.req = torch.ones(1, dtype=torch.int64, device=DEVICE)
        shapes = (HIDDEN, (GROUP + 2) * HEADS * DIM), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)
        self.weights = [torch.randn(shape, dtype=DTYPE, device=DEVICE) * 0.01 for shape in shapes]
        self.keys = torch.zeros((HEADS, prefix + tokens, DIM), dtype=DTYPE, device=DEVICE)

    def forward(self, tokens: int, attention: Callable[..., torch.Tensor]) -> None:
        qkv, out, up, down = self.weights
        x = torch.zeros((tokens, HIDDEN), dtype=DTYPE, device=DEVICE)
        for layer in range(LAYERS):
            q, k, v = (x @ qkv).split((GROUP * HEADS * DIM, HEADS * DIM, HEADS * DIM), 1)
            q, k, v = (part.view(tokens, -1, DIM) for part in (q, k, v))
            x = (((attention(layer, q, k, v).reshape(tokens, HIDDEN) @ out) @ up)[:, :INNER]) @ down

    def ours(self, prefix: int, tokens: int) -> None:
        loc = self.req_to_token[1, prefix : prefix + tokens].long()
        self.prefill.begin(self.req_to_token, self.req, [prefix], [tokens], loc)
        self.forward(tokens, lambda layer, q, k, v: self.prefill.forward(layer, q, k, v, DIM**-0.5))

    def dense(self) -> None:
        def attention(layer, q, k, v):
            return attend.attend_block(q, self.keys, self.keys, DIM**-0.5, causal=True, alone=True)[0]

        self.forward(self.tokens, attention)

    def fill(self) -> None:
        """The prefix and its entries in the cache."""
        for start in range(0, self.prefix, CHUNK):
            self.ours(start, min(CHUNK, self.prefix - start))


def timed(body: Callable[[], None], before: Callable[[], None] = lambda: None) -> dict[str, float]:
    orders, everything = [], []
    for _ in range(REPEATS):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        body()
        orders.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        everything.append(time.perf_counter() - begin)
    return {"orders": statistics.median(orders[1:]) * 1e3, "all": statistics.median(everything[1:]) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prefix", type=int, default=32768)
    parser.add_argument("--scattered", action="store_true", help="pages that do not follow one another")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    chosen = parser.parse_args()
    model = Model(chosen.prefix, chosen.tokens, chosen.scattered)
    prefix, tokens = chosen.prefix, chosen.tokens
    model.fill()
    found = {
        "dense": timed(model.dense),
        "resident": timed(lambda: model.ours(prefix, tokens)),
        "host": timed(lambda: model.ours(prefix, tokens), model.runtime.cache.flush),
        "alone": timed(lambda: model.ours(0, tokens)),
    }
    for name, row in found.items():
        print(f"{name:<10} orders {row['orders']:7.2f}  all {row['all']:7.2f} ms", flush=True)
    launch = launch_seconds() * 1e6
    print(f"a small launch {launch:.1f} us")
    if chosen.json:
        about = {**facts("benchmark.prefill_parts"), "launch_us": launch}
        chosen.json.write_text(json.dumps({**about, "ms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
