"""The paper's choices, each against what it replaces, on random float16 data in the shape of `benchmark.kernels`.

    python -m benchmark.ablations [--only rows priority gather] [--json FILE]

rows: the guide's row beside the real one, against a pass of its own, for a layer's attention and for its products.
priority: missing units while a prefetch fills the link, with the prefetch standing back and without. gather: scattered
units from host memory by the GPU, against a copy that the processor puts together first. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmark.serving.record import facts

UNITS = 8192  # of 8 KB: 64 MB


def gather_on_host(host: torch.Tensor, page: torch.Tensor, head: torch.Tensor, staging: torch.Tensor) -> None:
    """Units (page, head) of host [pages, H, 2, P, D] into staging [N, 2, P, D], by the processor."""
    units = host.flatten(0, 1)
    torch.index_select(units, 0, page * host.shape[1] + head, out=staging)


def rows() -> None:
    from sglang.srt.sparse_kv.ops import cuda

    from benchmark import kernels

    device, shape, kind = kernels.DEVICE, kernels.SHAPE, kernels.DTYPE
    sizes = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # qkv, output, gate and up, down
    weights = [[torch.randn(size, device=device, dtype=kind) for size in sizes] for _ in range(2)]
    for n in (1, 8, 32):
        width = shape.width
        views = [kernels.layer(n * width, 8, kernels.HOST.get(8)) for _ in range(4)]
        order = [torch.randperm(n * width, device=device).view(n, width) for _ in range(kernels.HEADS)]
        slots = torch.stack(order, 1).to(torch.int32).contiguous()
        batch = kernels.Batch(n, 4096)
        pages = torch.full((n,), width, dtype=torch.int32, device=device)
        last = torch.full((n,), kernels.PAGE, dtype=torch.int32, device=device)
        single = batch.q[:, :1].contiguous()
        guide = batch.k[:, 1], batch.v[:, 1]

        def both(views=views, batch=batch, guide=guide, slots=slots, pages=pages, last=last):
            for view in views:
                cuda.attend(batch.q, *guide, view, slots, pages, last, kernels.SCALE)

        def apart(views=views, single=single, slots=slots, pages=pages, last=last):
            for view in views:
                cuda.attend(single, None, None, view, slots, pages, last, kernels.SCALE)

        kernels.record(f"attention of a layer, {n} requests, two rows", kernels.timed(both, per=4))
        kernels.record(f"attention of a layer, {n} requests, a pass each", 2 * kernels.timed(apart, per=4))
        for lines, name in ((2 * n, "two rows"), (n, "a pass each")):
            inputs = [torch.randn((lines, size[0]), device=device, dtype=kind) for size in sizes]

            def products(inputs=inputs):
                for layer in weights:
                    for x, weight in zip(inputs, layer):
                        x @ weight

            times = 1 if lines == 2 * n else 2
            label = f"products of a layer, {n} requests, {name}"
            kernels.record(label, times * kernels.timed(products, per=len(weights)))


def priority() -> None:
    from benchmark import kernels

    kernels.bench_priority()


def gather() -> None:
    from sglang.srt.sparse_kv.ops import cuda
    from sglang.srt.sparse_kv.ops.reference import Fetch

    from benchmark import kernels

    host = kernels.HOST.get(16000)[:16000]
    view = kernels.layer(2048, 16000, host)
    fetch = kernels.units_of(view, UNITS)
    assert isinstance(fetch, Fetch)
    taken = kernels.timed(lambda: cuda.gather(view, fetch, blocks=4), repeats=10)
    kernels.record("64 MB in 8 KB units, gathered by the GPU", taken)
    units = fetch.units.cpu().long()
    staging = torch.empty((UNITS, *host.shape[2:]), dtype=host.dtype).pin_memory()
    target = torch.empty_like(staging, device=kernels.DEVICE)
    together, alone = [], []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        gather_on_host(host, units[:, 0], units[:, 1], staging)
        alone.append(1e6 * (time.perf_counter() - start))
        target.copy_(staging, non_blocking=True)
        torch.cuda.synchronize()
        together.append(1e6 * (time.perf_counter() - start))
    threads = f"{torch.get_num_threads()} threads"
    kernels.record("the same by the processor, then one copy", statistics.median(together[1:]), note=threads)
    kernels.record("of it the processor's part", statistics.median(alone[1:]), note=threads)


PARTS = {"rows": rows, "priority": priority, "gather": gather}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the rows there, after every part")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: there is no GPU here; the ablations time its kernels.", file=sys.stderr)
        return 1
    from benchmark import kernels

    kernels.DTYPE = torch.float16  # what servers are measured in, so that FlashInfer has compiled it
    torch.manual_seed(0)
    about = facts("benchmark.ablations", argv) | {"seed": 0, "backend": "CUDA engine"}
    failed = 0
    for name in options.only:
        try:
            PARTS[name]()
        except Exception as error:  # one broken part must not hide the others
            failed = 1
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(about | {"rows": kernels.RESULTS}, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
