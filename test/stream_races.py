"""Finds operations on one tensor, one of them writing, that CUDA's streams leave in no order.

Every torch operation is run at once and noted for the current one of the fake streams. What comes before it, in every
order that the events allow, its stream knows; so one run speaks for all orders.
"""

from __future__ import annotations

import numpy as np
import torch
from fake_streams import Stream, Streams
from torch.utils._python_dispatch import TorchDispatchMode

MOST_STREAMS = 16


class Race(AssertionError):
    """Two operations on one tensor have no order."""


class Touched:
    """Of each element of a storage, the last work of each stream that read it, wrote it or added to it. whole: of all
    elements together.
    """

    def __init__(self, tensor: torch.Tensor, name: str, whole: bool):
        self.storage = tensor.untyped_storage()  # kept: its address is nobody else's
        self.name, self.whole = name, whole
        elements = 1 if whole else self.storage.nbytes() // tensor.element_size()
        self.last = {kind: np.zeros((MOST_STREAMS, elements), np.int32) for kind in CONFLICTS}


class Races(TorchDispatchMode):
    """Within, raises Race. Tensors that were named are watched element by element, and those made within as a whole.

    pieces: names of tensors of which indexed accesses touch the named elements alone; else an access is one to all of
    a view. sums: names of tensors that kernels add to atomically.
    """

    def __init__(self, streams: Streams, pieces: tuple[str, ...] = (), sums: tuple[str, ...] = ()):
        super().__init__()
        self.streams, self.pieces, self.sums = streams, pieces, sums
        self.touched: dict[int, Touched] = {}
        self.at = ""  # the operation that runs, for messages

    def watch(self, name: str, tensor: torch.Tensor, whole: bool = False) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.touched.setdefault(storage.data_ptr(), Touched(tensor, name, whole))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = {id(arg) for schema, arg in zip(func._schema.arguments, args) if _writes(schema)}
        inputs = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg])]
        inputs += [t for name, t in (kwargs or {}).items() if name != "out"]
        result = func(*args, **(kwargs or {}))
        if func.is_view or func in SILENT:
            return result
        stream = self.streams.current
        stream.before[stream] = now = stream.before.get(stream, 0) + 1
        made = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(t, torch.Tensor)]
        for tensor in made:
            if tensor.untyped_storage().data_ptr() not in self.touched:
                self.watch(f"a result of {self.at}'s {func}", tensor, whole=True)
                written.add(id(tensor))
                inputs.append(tensor)
        for tensor in inputs:
            if not isinstance(tensor, torch.Tensor):
                continue
            touched = self.touched.get(tensor.untyped_storage().data_ptr())
            if touched is None:
                continue
            kind = "write" if id(tensor) in written else "read"
            if kind == "write" and touched.name in self.sums and func in ADDS:
                kind = "add"
            indexed = func in INDEXED and tensor is args[0] and touched.name in self.pieces
            place = WHOLE if touched.whole else _places(tensor, args[1] if indexed else None)
            self._note(touched, kind, place, stream, now)
        return result

    def _note(self, touched: Touched, kind: str, place: np.ndarray, stream: Stream, now: int) -> None:
        number = self.streams.all.index(stream)
        before = [stream.before.get(other, 0) for other in self.streams.all]
        for other in CONFLICTS[kind]:
            for i, known in enumerate(before):
                if i != number and bool((touched.last[other][i, place] > known).any()):
                    raise Race(f"{self.at}: {kind} of {touched.name} on stream {number}, {other} on stream {i}")
        touched.last[kind][number, place] = now

    def joined(self) -> bool:
        """Whether all that was done on any stream comes before what the current one does next, as the end of a graph
        capture asks for.
        """
        known = self.streams.current.before
        return all(known.get(stream, 0) >= stream.before.get(stream, 0) for stream in self.streams.all)


WHOLE = np.zeros(1, np.int64)
CONFLICTS = {"read": ("write", "add"), "write": ("read", "write", "add"), "add": ("read", "write")}
aten = torch.ops.aten
ADDS = {aten.add_.Tensor, aten.index_add_.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
SILENT = {aten.lift_fresh.default, aten.detach.default}


def _writes(schema) -> bool:
    return schema.alias_info is not None and schema.alias_info.is_write


def _places(tensor: torch.Tensor, indices) -> np.ndarray:
    """Elements of its storage that an operation touches. indices: of those alone, None in it for all of an axis."""
    shape, strides = tensor.shape, tensor.stride()
    place = np.full(shape, tensor.storage_offset(), np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        place += (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    if indices is not None:
        place = place[tuple(slice(None) if i is None else i.numpy() for i in indices)]
    return place.reshape(-1)
