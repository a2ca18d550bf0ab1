"""Whole pages of a prefix by the device's copy engine.

Kernels that read host memory bring nine tenths of what a PCIe link can carry; the copy engine brings all of it, but
takes its orders from the host, which does not know what the cache holds. So the host asks once a prefill, and where
pages lack nearly all of their heads in a layer, whole pages land beside the cache, piece by piece, and a kernel takes
them from there to their places. The answer may be old by then: tables are asked again, and what they say counts. A page
that left the cache meanwhile is brought like any other missing unit, and one that came is read from its slots.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.ops import pinned
from sglang.srt.sparse_kv.ops.reference import LayerView
from sglang.srt.sparse_kv.transfer import Copy

if TYPE_CHECKING:
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime

logger = logging.getLogger(__name__)

# Share of the units of the pages that land which must be missing: what kernels bring of what the copy engine does
# (48.5 and 55.1 GB/s, one H200), since a page lands whole.
SHARE = 0.88
# Pages of a prefill for which the host asks, and waits for what the device has to do before; pages of a block for which
# it gives orders. At 8B the copy engine gains 0.16 us a page and layer, and orders for a piece take 30 to 100.
ASKED = 512
FEW = 256


Key = tuple[int, bytes]  # a block's first page's place in the prefill, and what lands of it


class Landing:
    """Two places where pieces of a prefix land in turn."""

    def __init__(self, runtime: SparseKVRuntime):
        self.runtime = runtime
        geometry = runtime.geometry
        shape = (2, runtime.plan.landing_pages, geometry.kv_heads, 2, geometry.page_size, geometry.head_dim)
        self.places = torch.zeros(shape, dtype=geometry.dtype, device=runtime.device)
        self._turn = 0
        self.works = runtime.device.type == "cpu" or self._try()
        self._runs: dict[tuple[Key, int], np.ndarray] = {}  # of this prefill, by what lands of a block, and piece

    def _try(self) -> bool:
        """Whether this driver takes such copies of this pool: once at start, rather than in the first prefill."""
        ops, views, place = self.runtime.ops, self.runtime.cache.views, self.places[0]
        count = min(place.shape[0], self.runtime.geometry.num_pages)
        place.fill_(1)
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                ops.land(views[0], np.array([[0, 0, count]]), place)
            torch.cuda.synchronize()
            works = torch.equal(place[:count].cpu(), views[0].host[:count])
        except RuntimeError as error:
            logger.warning("The copy engine takes no lists of pages (%s)", error)
            works = False
        if not works:
            logger.warning("Kernels bring prefixes from host memory, at nine tenths of the link's rate")
        return works

    def begin(self, pages: torch.Tensor) -> Absent | None:
        """What is missing of a prefill's pages, int32 [M] in the order in which they are staged; None where these are
        too few to ask. Waits for what runs on the device.
        """
        self._runs.clear()
        if len(pages) < ASKED or not self.works:
            return None
        absent = self.runtime.ops.absent(self.runtime.cache.views, pages)
        known, numbers = _to_host(absent, pages)
        return Absent(self.runtime.geometry, absent, known, numbers.astype(np.int64))

    def legs(self, view: LayerView, plan: Any, target: torch.Tensor, due: Due) -> Iterator[tuple[Copy, Copy]]:
        """Both legs of each piece of a block in which pages land; plan and target as in `stage`."""
        ops, most = self.runtime.ops, self.places.shape[1]
        for first in range(0, len(due.pages), most):
            runs = self._runs.get((due.key, first))
            if runs is None:
                part = slice(first, first + most)
                runs = self._runs[due.key, first] = runs_of(due.pages[part], due.row[part])
            if len(runs):
                place = self.places[self._turn]
                self._turn = 1 - self._turn
                count = min(most, len(due.pages) - first)
                second = partial(ops.stage_landed, view, plan, target, place, first, count)
                yield partial(ops.land, view, runs, place), second


class Absent:
    """Heads of each page that a layer's cache lacked when the prefill began: uint8 [L, M] on the device and here.
    pages int64 [M].
    """

    def __init__(self, geometry: Geometry, on_device: torch.Tensor, known: np.ndarray, pages: np.ndarray):
        self._geometry, self._on_device, self._known, self._pages = geometry, on_device, known, pages
        self._lacks = np.any(known, axis=1).tolist()  # of each layer
        self._landing: dict[Key, tuple[int, int] | None] = {}  # of `_worth_it`
        self._first = np.zeros(len(pages), bool)  # of each page's places; what is asked for again has come by then
        if any(self._lacks):
            self._first[np.unique(pages, return_index=True)[1]] = True

    def none(self, layer: int, part: slice) -> bool:
        """Whether a layer lacked nothing of a block's pages."""
        return not self._lacks[layer] or not np.any(self._known[layer, part])

    def nothing(self, layer: int) -> bool:
        """Whether a layer lacked nothing of any block's pages."""
        return not self._lacks[layer]

    def due(self, layer: int, part: slice) -> Due | None:
        """What lands of a layer and a block's pages, if any."""
        if not self._lacks[layer]:
            return None
        row = self._known[layer, part]
        key = part.start, row.tobytes()
        if key not in self._landing:  # layers mostly lack the same
            self._landing[key] = self._worth_it(row, part)
        bounds = self._landing[key]
        if bounds is None or self._crosses(layer, *bounds):
            return None
        return Due(key, self._pages[part], row, self._on_device[layer, part])

    def _worth_it(self, row: np.ndarray, part: slice) -> tuple[int, int] | None:
        """The least and the greatest of the pages that would land; None where they are too few, or lack too little."""
        landing, missing = np.count_nonzero(row), int(row[self._first[part]].sum(dtype=np.int64))
        if landing < FEW or missing < SHARE * landing * self._geometry.kv_heads:
            return None
        pages = self._pages[part][row > 0]
        return int(pages.min()), int(pages.max())

    def _crosses(self, layer: int, least: int, greatest: int) -> bool:
        """Whether pages lie on both sides of a border between registrations, which CUDA lets no copy cross."""
        page_bytes = self._geometry.page_bytes // self._geometry.num_layers
        first = layer * self._geometry.num_pages
        start, end = (first + least) * page_bytes, (first + greatest + 1) * page_bytes
        return start // pinned.PIECE != (end - 1) // pinned.PIECE


@dataclass
class Due:
    """Pages of a block that land: those whose row is not zero."""

    key: Key
    pages: np.ndarray  # int64 [M]
    row: np.ndarray  # uint8 [M]
    on_device: torch.Tensor  # the same


def runs_of(pages: np.ndarray, due: np.ndarray) -> np.ndarray:
    """Pages that land, as runs of neighbours: int64 [n, 3], each the first page, its place and how many. pages int64
    [M], due [M].
    """
    places = np.flatnonzero(due)
    if not len(places):
        return np.empty((0, 3), np.int64)
    numbers = pages[places]
    starts = np.flatnonzero(np.r_[True, (np.diff(numbers) != 1) | (np.diff(places) != 1)])
    lengths = np.diff(np.r_[starts, len(places)])
    return np.ascontiguousarray(np.stack([numbers[starts], places[starts], lengths], axis=1))


def _to_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copies, which the host waits for."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    arrived.synchronize()
    return [copy.numpy() for copy in copies]
