"""Counters as people and machines read them: the decode log line, `/server_info` and `/metrics`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sparse_kv import devices
from sglang.srt.sparse_kv.ops.reference import COUNTERS, HIT, MISSED, PREFETCHED, SELECTED, USEFUL
from sglang.srt.sparse_kv.variants import Variant

if TYPE_CHECKING:
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime


class Reader:
    """Reads counters while a forward may run, and waits for nothing that it does.

    On CUDA the copies have a stream of their own: whoever asks waits for them alone. A reading may fall inside a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        """Each tensor as nested lists."""
        if self._stream is None:
            return [tensor.tolist() for tensor in tensors]
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return [copy.tolist() for copy in copies]

    def aside(self) -> contextlib.AbstractContextManager:
        """Within, work for a reading is queued beside the forward's."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def layers(runtime: SparseKVRuntime, table: list[list[int]], stalled: list[int]) -> list[dict[str, Any]]:
    """Rows of counters by name, one a layer, with tokens turned into bytes and nanoseconds into seconds."""
    per_token = runtime.geometry.unit_bytes // runtime.geometry.page_size
    named = []
    for row, nanoseconds in zip(table, stalled, strict=True):
        layer: dict[str, Any] = dict(zip(COUNTERS, row, strict=True))
        layer["bytes_in"] = layer.pop("tokens_in") * per_token
        layer["stall_seconds"] = nanoseconds / 1e9
        named.append(layer)
    return named


def summary(runtime: SparseKVRuntime) -> dict[str, Any]:
    """Counters since start (or their last reset), as builtins.

    selected: units that true selections named, per request; hit: of these, resident when resolved; missed: units
    fetched on the critical path; prefetched / useful / wasted: units fetched ahead, of these selected before they
    left, and not; evicted: entries that made room; bytes_in: bytes brought from the host for decode; stall_seconds: how
    long steps waited for missing units. Of all layers together: bytes_stored, written to the host; bytes_staged,
    brought from there for prefill; link_busy_seconds, what both fetches take at the plan's rate of the link.
    """
    table, stalled, (right, guesses) = runtime.read(runtime.cache.counters, runtime.cache.stalled, runtime.guide_hits)
    rows = layers(runtime, table, stalled)
    total = {name: sum(layer[name] for layer in rows) for name in rows[0]}
    return {
        "engine": runtime.ops.name,
        "rows": runtime.plan.rows,
        "steps": sum(runtime.steps.values()),
        "one_row": runtime.steps[Variant.ONE_ROW],
        "all_pages": runtime.steps[Variant.ALL_PAGES],
        "guide_hits": right,
        "guides": guesses,
        "total": total,
        "layers": rows,
        "bytes_stored": runtime.tokens_stored * token_bytes(runtime),
        "bytes_staged": runtime.tokens_staged * token_bytes(runtime),
        "link_busy_seconds": link_seconds(runtime, total["bytes_in"]),
        "cache_occupancy": occupancy(runtime),
        "policy": dataclasses.asdict(runtime.policy),
        "plan": runtime.plan.as_dict(),
    }


def of_rank(summary: dict[str, Any]) -> dict[str, Any]:
    """What tells one rank from another, of its summary. `steps` to `bytes_staged` and the selected units are equal on
    all ranks, since their KV heads see the same requests; which pages were hit is each rank's own.
    """
    names = ("steps", "guide_hits", "guides", "bytes_stored", "bytes_staged", "total", "cache_occupancy", "policy")
    plan = summary["plan"]
    return {name: summary[name] for name in names} | {name: plan[name] for name in ("slots", "host_tokens")}


def link_seconds(runtime: SparseKVRuntime, bytes_in: int) -> float:
    """Seconds in which the link brings `bytes_in` for decode, and what prefill had staged; 0 without a GPU."""
    device = devices.find(runtime.plan.device)
    return (bytes_in + runtime.tokens_staged * token_bytes(runtime)) / device.link if device else 0.0


def token_bytes(runtime: SparseKVRuntime) -> int:
    """Bytes of one token's keys and values in all layers and heads of this rank."""
    return runtime.geometry.page_bytes // runtime.geometry.page_size


def occupancy(runtime: SparseKVRuntime) -> float:
    """Share of the resident layers' usable slots that hold a page, 0..1."""
    slots = runtime.cache.usable_slots()
    if not slots:
        return 0.0
    with runtime.read.aside():
        used = runtime.cache.used_slots()
    return runtime.read(used)[0] / slots


def log_suffix(runtime: SparseKVRuntime) -> str:
    """Rates since start for SGLang's decode log line."""
    table, (right, guesses) = runtime.read(runtime.cache.counters, runtime.guide_hits)
    total = [sum(column) for column in zip(*table, strict=True)]
    parts = [f"sparse hit: {total[HIT] / max(total[SELECTED], 1):.3f}", f"missed: {total[MISSED]}"]
    parts.append(f"prefetch useful: {total[USEFUL] / max(total[PREFETCHED], 1):.2f}")
    if runtime.config.most_rows == 2:
        parts.append(f"guide: {right / max(guesses, 1):.2f}")
    if runtime.config.rows == "auto":
        steps = runtime.steps
        share = (steps[Variant.ONE_ROW] + steps[Variant.ALL_PAGES]) / max(sum(steps.values()), 1)
        parts.append(f"one row: {share:.2f}, all pages: {steps[Variant.ALL_PAGES] / max(sum(steps.values()), 1):.2f}")
    return ", ".join(parts)
