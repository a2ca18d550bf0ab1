"""From tensors to kernel arguments: checks, pointers, the stream."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

import torch
from sglang.srt.sparse_kv.config import PAGE_SIZES
from sglang.srt.sparse_kv.ops import abi, build
from sglang.srt.sparse_kv.ops.reference import LayerView

# Lets a kernel's launch overlap the end of the one before it (programmatic dependent launch, sm_90 and later). Every
# kernel waits for the end of the one before it ahead of its first access to memory, and only then lets the next one
# start: the order of effects is that of the stream, and what overlaps is the launch itself.
OVERLAP_LAUNCHES = int(os.environ.get("SPARSE_KV_OVERLAP_LAUNCHES", "1"))


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def contiguous(tensor: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor itself. Raises ValueError unless it is contiguous, and of `dtype` if given."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()} of {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")
    return tensor


def inner_contiguous(tensor: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor whose first dimension may have any stride that keeps 16-byte alignment; copied if the others do not lie
    together. Raises ValueError on another dtype.
    """
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tensor.shape[0] == 0:
        return tensor.contiguous()
    size = tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * size % 16 == 0
    return tensor if tensor[0].is_contiguous() and aligned else tensor.clone(memory_format=torch.contiguous_format)


def ints(tensor: torch.Tensor | None, name: str) -> abi.Ints:
    """An integer tensor of either width, read as it lies in memory. Raises ValueError on other types."""
    if tensor is None:
        return abi.Ints(None, 0)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64, got {tensor.dtype}")
    return abi.Ints(tensor.data_ptr(), int(tensor.dtype == torch.int64))


def view_of(view: LayerView) -> abi.View:
    """One layer as kernels see it, made at the first call. Raises ValueError when its tensors do not fit together."""
    known = getattr(view, "_seen", None)
    if known is not None and known[0] is view.kv and known[1] is view.host and known[2] is view.landmarks:
        return known[3]
    made = _view_of(view)
    view._seen = (view.kv, view.host, view.landmarks, made)  # type: ignore[attr-defined]
    return made


def _view_of(view: LayerView) -> abi.View:
    heads, slots, two, page_size, head_dim = view.kv.shape
    pages = view.slot_of.shape[1]
    if two != 2 or tuple(view.host.shape) != (pages, heads, 2, page_size, head_dim):
        raise ValueError(f"host: expected [{pages}, {heads}, 2, {page_size}, {head_dim}], got {list(view.host.shape)}")
    if view.host.dtype != view.kv.dtype:
        raise ValueError(f"host: expected {view.kv.dtype}, got {view.host.dtype}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size: expected one of {PAGE_SIZES}, got {page_size}")
    if head_dim * view.kv.element_size() % 16 or head_dim > 256:
        raise ValueError(f"head_dim: expected rows of 16-byte pieces and at most 256 elements, got {head_dim}")
    return abi.View(
        *(
            contiguous(getattr(view, name), name).data_ptr()
            for name in ("kv", "slot_of", "page_of", "stamp", "ahead", "host")
        ),
        *(contiguous(t, "landmarks").data_ptr() for t in view.landmarks),
        *(contiguous(getattr(view, name), name).data_ptr() for name in ("counters", "stalled")),
        heads,
        slots,
        pages,
        page_size,
        head_dim,
        abi.DTYPES[view.kv.dtype],
    )


def capturing_safe(*tensors: torch.Tensor) -> None:
    """Keeps tensors that another stream allocated from being reused before this stream's reads are over."""
    if tensors[0].is_cuda:
        stream = torch.cuda.current_stream(tensors[0].device)
        for tensor in tensors:
            tensor.record_stream(stream)


@lru_cache
def _can_overlap(index: int) -> int:
    return int(torch.cuda.get_device_capability(index)[0] >= 9)


def launch(name: str, device: torch.device, *arguments) -> None:
    """Calls a function of the library on the current stream. Raises RuntimeError with CUDA's reason."""
    library = build.library()
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        overlap = OVERLAP_LAUNCHES and _can_overlap(index)
        where = abi.Launch(torch._C._cuda_getCurrentRawStream(index), index, overlap)
    else:
        where = abi.Launch(None, 0, 0)
    passed = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in (*arguments, where)]
    status = getattr(library, f"skv_{name}")(*passed)
    if status:
        raise RuntimeError(f"kernel {name} failed to launch: {library.skv_error(status).decode()}")
