"""GPU memory by purpose against context and batch: ours by the planner, and by formula what peers keep on the GPU.

    python -m benchmark.memory docs/models/llama-3.1-8b.json --batch 1 12 --context 65536 524288 --json FILE

Ours holds every request whole in host memory and has the smallest page cache that the capacity rule allows: what is
needed, not what a server takes, which gives its cache all memory that is left. "buffers" is `residency` "none", where
layers take turns in three buffers. Nothing here needs a GPU. Weights and activations are the same for all and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import sglang_dualdecoder

sglang_dualdecoder.find_overlay()

from sglang.srt.sparse_kv import model_shape, planner  # noqa: E402
from sglang.srt.sparse_kv.config import SparseKVConfig  # noqa: E402
from sglang.srt.sparse_kv.model_shape import ModelShape  # noqa: E402

from benchmark import chart  # noqa: E402
from benchmark.serving.record import facts  # noqa: E402

PAGE = 16
GB = 10**9


def ours(shape: ModelShape, batch: int, context: int, budget: int, residency: str = "all") -> dict[str, int]:
    """Device bytes by purpose of `batch` requests of `context` tokens each."""
    config = SparseKVConfig(budget=budget, residency=residency)
    geometry = shape.geometry(config, PAGE, 1, context)
    selection = planner.selection_shape(geometry, config)
    headroom = selection.prefetch_pages(config.prefetch_cap)
    slots = planner.needed_slots(batch, selection, geometry.max_pages, headroom)
    host = (batch * (geometry.max_pages + 1) + 1) * geometry.page_bytes
    cache = slots * planner.slot_bytes(geometry, config)
    made = planner.plan(config, geometry, cache, host, batch, cuda=True)
    assert made.max_running_requests == batch
    return made.device_bytes


def full(shape: ModelShape, batch: int, context: int) -> dict[str, int]:
    """All keys and values on the GPU."""
    return {"keys and values": batch * context * _token(shape)}


def shadowkv(shape: ModelShape, batch: int, context: int, budget: int) -> dict[str, int]:
    """ShadowKV (arXiv 2410.21465): chunks of 8 with their mean key, rank 160, 384 outlier and 32 local tokens.

    One factorisation serves all KV heads of a layer. Keys and values of a selection stay in place for each layer.
    """
    width = shape.kv_heads * shape.head_dim * shape.dtype.itemsize  # of one token's keys in a layer
    low_rank = (context + shape.kv_heads * shape.head_dim) * 160 * shape.dtype.itemsize
    return {
        "low-rank keys": batch * shape.layers * low_rank,
        "landmarks": batch * shape.layers * (context // 8) * width,
        "selection": batch * (min(budget, context) + 384 + 32) * _token(shape),
    }


def specache(shape: ModelShape, batch: int, context: int, budget: int) -> dict[str, int]:
    """SpeCache (arXiv 2503.16163): keys and values of everything in 2 bits, scales not counted, and a selection."""
    bits = 8 * shape.dtype.itemsize
    return {
        "2-bit keys and values": batch * context * _token(shape) * 2 // bits,
        "selection": batch * min(budget, context) * _token(shape),
    }


def _token(shape: ModelShape) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize


def rows(shape: ModelShape, batches: list[int], contexts: list[int], budget: int) -> list[dict]:
    return [
        {"batch": batch, "context": context, "system": name, "bytes": found, "total": sum(found.values())}
        for batch in batches
        for context in contexts
        for name, found in {
            "ours": ours(shape, batch, context, budget),
            "ours, buffers": ours(shape, batch, context, budget, "none"),
            "ShadowKV, computed": shadowkv(shape, batch, context, budget),
            "SpeCache, computed": specache(shape, batch, context, budget),
            "all on the GPU": full(shape, batch, context),
        }.items()
    ]


def table(found: list[dict]) -> str:
    """A line a batch and context, GB of each system; then what is added from the shortest to the longest context."""
    systems = list(dict.fromkeys(row["system"] for row in found))
    contexts = sorted({row["context"] for row in found})
    total = {(row["batch"], row["context"], row["system"]): row["total"] for row in found}
    lines = [f"{'requests':>8} {'context':>8} " + "".join(f"{name:>20}" for name in systems)]
    for batch in sorted({row["batch"] for row in found}):
        sizes = {context: [total[batch, context, name] / GB for name in systems] for context in contexts}
        lines += [f"{batch:8} {at:8} " + "".join(f"{size:17.2f} GB" for size in sizes[at]) for at in contexts]
        added = [last - first for first, last in zip(sizes[contexts[0]], sizes[contexts[-1]])]
        lines.append(f"{'added by the longer':>17} " + "".join(f"{size:17.2f} GB" for size in added))
    return "\n".join(lines)


def picture(found: list[dict], model: str) -> str:
    """Totals of the largest batch over the context, as SVG."""
    most = max(row["batch"] for row in found)
    series: dict[str, chart.Points] = {}
    for row in found:
        if row["batch"] == most:
            series.setdefault(row["system"], []).append((row["context"] / 1024, row["total"] / GB))
    return chart.lines(f"KV and its state on the GPU, {model}, {most} requests", "context, K", "GB", series, log_x=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="GPU memory by purpose against context and batch, no GPU needed.")
    parser.add_argument("model", help="a model's folder or config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 12], help="requests")
    parser.add_argument("--context", type=int, nargs="+", default=[65536, 131072, 262144, 524288], help="tokens")
    parser.add_argument("--budget", type=int, default=2048, help="tokens")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--svg", type=Path, help="picture of the largest batch")
    options = parser.parse_args(argv)
    try:
        shape = model_shape.read(options.model, SparseKVConfig())
        found = rows(shape, options.batch, options.context, options.budget)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if options.json:
        about = facts("benchmark.memory", argv) | {"backend": "arithmetic: the planner, and formulas", "seed": None}
        options.json.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")
    if options.svg:
        options.svg.write_text(picture(found, Path(options.model).stem))
    return 0


if __name__ == "__main__":
    sys.exit(main())
