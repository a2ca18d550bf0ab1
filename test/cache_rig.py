"""A page cache alone, of fourteen pages and a few slots, full of junk."""

from __future__ import annotations

import torch
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.ops import landmarks
from sglang.srt.sparse_kv.ops.reference import Fetch
from sglang.srt.sparse_kv.page_cache import PageCache

PAGE, DIM, PAGES = 4, 2, 14
FULL = PAGE


def make_cache(slots: int, heads: int = 1, layers: int = 1, residency="all", ring: int = 2, **kwargs) -> PageCache:
    geometry = Geometry(layers, heads, 1, DIM, PAGE, PAGES, PAGES, 4, torch.float32)
    shape = (layers, PAGES, heads, 2, PAGE, DIM)
    host = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)  # every number is its own place
    summaries = landmarks.empty(layers, PAGES, heads, dim=DIM, device=host.device)
    cache = PageCache(geometry, host, summaries, slots, residency, ring, kwargs.get("both_modes", False))
    for buffer in cache.buffers():
        buffer.kv.fill_(float("nan"))
    return cache


def clock(step: int) -> torch.Tensor:
    return torch.tensor([step], dtype=torch.int32)


def rows(fetch: Fetch) -> list[tuple[int, int, int, int]]:
    """(page, head, slot, tokens) of a fetch."""
    return [tuple(row) for row in fetch.units[: int(fetch.count)].tolist()]
