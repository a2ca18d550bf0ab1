"""Attention over selected pages against the number of requests: as FlashInfer divides sequences, and in one piece each.

    python -m benchmark.attention_pieces [--requests 16 22 ...] [--json FILE]

Microseconds of FlashInfer's kernels over 104 pages of 16 tokens for each of 8 kv heads, 8 query heads (two rows of
four), float16, units anywhere in a cache: the median over replays of a graph. "chosen" is what the engine takes. The
floor is the bytes of the pages over the memory's rate. Needs a GPU and FlashInfer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sglang.srt.sparse_kv.ops import attend
from sglang.srt.sparse_kv.ops.workspace import workspace

from benchmark import kernels
from benchmark.serving.record import facts

WIDTH, LAYERS, SLOTS = 104, 8, 4000
REQUESTS = (8, 12, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28, 30, 32, 40, 48)


def measure(requests: int, whole: bool) -> tuple[float, torch.Tensor]:
    """Microseconds, and what attention says of the first layer."""
    heads, group, dim, page = kernels.HEADS, 2 * kernels.GROUP, kernels.DIM, kernels.PAGE
    random = torch.Generator(kernels.DEVICE).manual_seed(requests)

    def rand(*shape):
        return torch.randn(shape, generator=random, device=kernels.DEVICE, dtype=torch.float16)

    units = [rand(heads * SLOTS, 2, page, dim) for _ in range(LAYERS)]
    view = kernels.layer(SLOTS, 10, torch.empty((10, heads, 2, page, dim), dtype=torch.float16, device=kernels.DEVICE))
    view.kv = units[0].view(heads, SLOTS, 2, page, dim)
    plan = attend.AttendPlan(workspace(kernels.DEVICE), requests, group, WIDTH, view, dim**-0.5, whole)
    plan.indices.copy_(torch.randint(heads * SLOTS, plan.indices.shape, generator=random, device=kernels.DEVICE))
    q = rand(requests * heads, group, dim)
    time = kernels.timed(lambda: [plan.run(q, layer) for layer in units], per=LAYERS)
    return time, plan.run(q, units[0])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    chosen = parser.parse_args()
    multiprocessors = torch.cuda.get_device_properties(kernels.DEVICE).multi_processor_count
    kernels.DTYPE = torch.float16
    print("requests", "divided", "whole", "chosen", "floor")
    rows = []
    for requests in chosen.requests:
        choice = "whole" if attend.in_one_piece(requests * kernels.HEADS, multiprocessors) else "divided"
        (divided, expected), (whole, found) = measure(requests, False), measure(requests, True)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)
        floor = requests * kernels.HEADS * WIDTH * kernels.UNIT / kernels.HBM * 1e6
        rows.append({"requests": requests, "divided": divided, "whole": whole, "chosen": choice, "floor": floor})
        print(requests, round(divided, 1), round(whole, 1), choice, round(floor, 1), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({**facts("benchmark.attention_pieces"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
