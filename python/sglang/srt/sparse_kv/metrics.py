"""Counters as people and machines read them: the decode log line and `/server_info`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang.srt.sparse_kv.ops.reference import COUNTERS

if TYPE_CHECKING:
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime


def summary(runtime: SparseKVRuntime) -> dict[str, Any]:
    """Counters since start (or their last reset), as builtins.

    selected: units that true selections named, per request; hit: of these, resident when resolved; missed: units
    fetched on the critical path; prefetched / useful / wasted: units fetched ahead, of these selected before they
    left, and not; evicted: entries that made room; bytes_in: bytes brought from the host for decode.
    """
    table = runtime.cache.counters.tolist()
    per_token = runtime.geometry.unit_bytes // runtime.geometry.page_size
    layers = []
    for row in table:
        layer = dict(zip(COUNTERS, row, strict=True))
        layer["bytes_in"] = layer.pop("tokens_in") * per_token
        layers.append(layer)
    total = {name: sum(layer[name] for layer in layers) for name in layers[0]}
    right, guesses = runtime.guide_hits.tolist()
    return {
        "engine": runtime.ops.name,
        "rows": runtime.rows,
        "steps": runtime.steps,
        "guide_hits": right,
        "guides": guesses,
        "total": total,
        "layers": layers,
        "cache_occupancy": runtime.cache.occupancy(),
        "policy": dataclasses.asdict(runtime.policy),
        "plan": runtime.plan.as_dict(),
    }


def log_suffix(runtime: SparseKVRuntime) -> str:
    """Rates since start for SGLang's decode log line."""
    names = {name: i for i, name in enumerate(COUNTERS)}
    total = runtime.cache.counters.sum(0).tolist()
    right, guesses = runtime.guide_hits.tolist()
    selected, hit = total[names["selected"]], total[names["hit"]]
    ahead, useful = total[names["prefetched"]], total[names["useful"]]
    parts = [f"sparse hit: {hit / max(selected, 1):.3f}", f"missed: {total[names['missed']]}"]
    parts.append(f"prefetch useful: {useful / max(ahead, 1):.2f}")
    if runtime.rows == 2:
        parts.append(f"guide: {right / max(guesses, 1):.2f}")
    return ", ".join(parts)
