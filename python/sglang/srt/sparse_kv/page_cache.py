"""The GPU cache of host pages: storage, residency by layer, the ring of layer-scoped buffers, and its own checks.

A resident layer owns a buffer of slots for the whole life of the server. Layers that are not resident share a ring of
buffers in turn (the paper's memory manager): scoped layer number j uses buffer j mod ring, which is emptied and
refilled in every step, so its bytes do not grow with the number of layers.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sparse_kv.geometry import Geometry, resident_layers
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.ops.landmarks import Landmarks
from sglang.srt.sparse_kv.ops.reference import COUNTERS, NEVER, NONE, RESERVED, LayerView


class Buffer:
    """Slots and tables of one layer's worth of cache."""

    def __init__(self, geometry: Geometry, slots: int, device: torch.device):
        shape = (geometry.kv_heads, slots)
        self.kv = torch.zeros((*shape, 2, geometry.page_size, geometry.head_dim), dtype=geometry.dtype, device=device)
        self.slot_of = torch.full((geometry.kv_heads, geometry.num_pages), NONE, dtype=torch.int32, device=device)
        self.page_of = torch.full(shape, NONE, dtype=torch.int32, device=device)
        self.stamp = torch.full(shape, NEVER, dtype=torch.int32, device=device)
        self.ahead = torch.zeros(shape, dtype=torch.bool, device=device)


class PageCache:
    """All layers' views of the cache. `views[i]` is what the operations of layer i work on.

    host: [L, NP, H, 2, P, D]; landmarks: of [L, NP, H] units; slots: per layer and kv head; both_modes allocates every
    layer's buffer and the ring, so that residency can be changed while running.
    """

    def __init__(
        self,
        geometry: Geometry,
        host: torch.Tensor,
        landmarks: Landmarks,
        slots: int,
        residency: Any,
        ring: int,
        both_modes: bool = False,
    ):
        self.geometry, self.slots, self.ring_size = geometry, slots, ring
        self.usable = slots  # of each layer and head
        self.host, self.landmarks = host, landmarks
        device = landmarks.codes.device
        self.counters = torch.zeros((geometry.num_layers, len(COUNTERS)), dtype=torch.int64, device=device)
        self.stalled = torch.zeros(geometry.num_layers, dtype=torch.int64, device=device)
        resident = resident_layers(residency, geometry.num_layers)
        owned = range(geometry.num_layers) if both_modes else resident
        self._owned = {layer: Buffer(geometry, slots, device) for layer in owned}
        with_ring = both_modes or len(resident) < geometry.num_layers
        self._ring = [Buffer(geometry, slots, device) for _ in range(ring)] if with_ring else []
        self.views: list[LayerView] = []
        self.lanes: list[int] = []  # which buffer a layer's fetches land in
        self.scoped: list[int] = []  # scoped layers in order
        self.set_residency(residency)

    def set_residency(self, residency: Any) -> None:
        """Assigns layers to their own buffers or to the ring. Raises ValueError when a buffer was never allocated."""
        resident = resident_layers(residency, self.geometry.num_layers)
        scoped = [i for i in range(self.geometry.num_layers) if i not in resident]
        if not resident <= self._owned.keys() or (scoped and not self._ring):
            raise ValueError(f"residency {residency!r} needs buffers that were not allocated at start")
        self.flush()
        self.scoped, self.views, self.lanes = scoped, [], []
        for layer in range(self.geometry.num_layers):
            if layer in resident:
                buffer, lane = self._owned[layer], len(self._ring) + layer
            else:
                lane = scoped.index(layer) % self.ring_size
                buffer = self._ring[lane]
            self.lanes.append(lane)
            self.views.append(self._view(buffer, layer))

    def _view(self, buffer: Buffer, layer: int) -> LayerView:
        return LayerView(
            buffer.kv,
            buffer.slot_of,
            buffer.page_of,
            buffer.stamp,
            buffer.ahead,
            self.host[layer],
            Landmarks(self.landmarks.codes[layer], self.landmarks.scales[layer]),
            self.counters[layer],
            self.stalled[layer],
        )

    def buffers(self) -> list[Buffer]:
        return [*self._ring, *self._owned.values()]

    def limit_slots(self, usable: int) -> None:
        """Lets only the first `usable` slots per layer and head be used; 0 for all. Empties the cache."""
        self.flush()
        self.usable = usable or self.slots
        for buffer in self.buffers():
            buffer.stamp.fill_(NEVER)
            if usable:
                buffer.stamp[:, usable:] = RESERVED

    def flush(self) -> None:
        """Empties every buffer, those too that no layer uses for now: the pages they hold may be rewritten."""
        for layer, buffer in self._owned.items():
            reference.clear(self._view(buffer, layer))
        for buffer in self._ring:  # already empty between steps, so the layer is of no account
            reference.clear(self._view(buffer, 0))

    def usable_slots(self) -> int:
        """Slots of the resident layers, all heads together, that may hold a page."""
        resident = len(self.views) - len(self.scoped)
        return resident * self.geometry.kv_heads * self.usable

    def used_slots(self) -> torch.Tensor:
        """How many of them hold one, int64 [] on the device."""
        resident = [view.page_of for layer, view in enumerate(self.views) if layer not in self.scoped]
        return (torch.stack(resident) >= 0).sum() if resident else self.counters.new_zeros(())

    def check(self) -> None:
        """Raises AssertionError unless, in every buffer and head, table and slots are a bijection."""
        for number, buffer in enumerate(self.buffers()):
            head, slot = (buffer.page_of >= 0).nonzero(as_tuple=True)
            page = buffer.page_of[head, slot].long()
            back = buffer.slot_of[head, page]
            assert torch.equal(back.long(), slot), f"buffer {number}: a slot's page is entered elsewhere"
            entries = int((buffer.slot_of >= 0).sum())
            assert entries == slot.numel(), f"buffer {number}: {entries} entries for {slot.numel()} used slots"
            stamps = buffer.stamp[head, slot]
            assert bool(((stamps >= 0) & (stamps != RESERVED)).all()), f"buffer {number}: a used slot has no stamp"
            assert not bool((buffer.ahead & (buffer.page_of < 0)).any()), f"buffer {number}: a free slot is 'ahead'"
