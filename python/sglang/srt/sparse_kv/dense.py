"""Plain SGLang on the same GPU: the memory that it keeps for itself by default, and its batch and speed.

Its rules are those of release 0.5.17 (``ServerArgs._handle_gpu_memory_settings``), written down because asking it
takes a GPU.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.sparse_kv import cost
from sglang.srt.sparse_kv.devices import Device
from sglang.srt.sparse_kv.geometry import Geometry

GIB = 1 << 30
LARGEST_CHUNK = 16384
PREFILL_GRAPHS = 38  # sizes of prefills that are captured with sparse KV, up to 1024 tokens
GRAPHS_MIB = 8 * PREFILL_GRAPHS  # that SGLang keeps for them
CAPTURED_FROM = 4 * GIB  # free memory below which SGLang captures none of them
CONTEXT_BYTES = 700 * 10**6  # what a process holds of an H200 before it allocates anything

# Memory below which a row is in force (GiB), chunked_prefill_size, largest captured batch below and from 4 ranks on.
_DEFAULTS = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (90, 8192, 256, 512),
    (160, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)


def default_chunk(memory: int) -> int:
    """chunked_prefill_size where nobody chose."""
    return _row(memory)[1]


def chunk(load: cost.Load, device: Device, memory: int) -> int:
    """chunked_prefill_size for sparse KV where nobody chose: SGLang's, or more where that hides no prefix.

    A chunk attends to its prefix while the prefix arrives from the host, and a short one waits for it.
    """
    least = 1 << (cost.smallest_chunk(load, device) - 1).bit_length()
    return max(default_chunk(memory), min(least, LARGEST_CHUNK))


def static_share(memory: int, tp: int, chunk: int) -> float:
    """mem_fraction_static of a server with sparse KV where nobody chose."""
    mib = memory / (1 << 20)
    reserved = _reserved(memory, tp, chunk) + (GRAPHS_MIB if captures_prefills(memory, tp, chunk) else 0)
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((mib - reserved) / mib, 3)


def captures_prefills(memory: int, tp: int, chunk: int) -> bool:
    """Whether SGLang keeps so much for itself that it captures prefills. It keeps room for their graphs even where it
    then does not, and small GPUs have better use for that.
    """
    return _reserved(memory, tp, chunk) + GRAPHS_MIB >= CAPTURED_FROM / (1 << 20)


def _reserved(memory: int, tp: int, chunk: int) -> float:
    """MiB that SGLang keeps for itself, without graphs of prefills."""
    _, _, few, many = _row(memory)
    return 512 + 1.5 * max(chunk, 2048) + 1024 * tp / 8 + 2 * (few if tp < 4 else many)


def estimate(load: cost.Load, device: Device, free: int, context: int) -> dict[str, Any]:
    """Most requests of `context` tokens that `free` bytes hold, and their tokens a second, as builtins."""
    requests = free // _request_bytes(load.geometry, context)
    speed = requests / cost.dense_seconds(load, device, requests, context) if requests else 0.0
    return {"context": context, "requests": requests, "tokens_per_second": round(speed, 1)}


def _request_bytes(geometry: Geometry, context: int) -> int:
    return -(-context // geometry.page_size) * geometry.page_bytes


def _row(memory: int) -> tuple[float, int, int, int]:
    return next(row for row in _DEFAULTS if memory / GIB < row[0])
