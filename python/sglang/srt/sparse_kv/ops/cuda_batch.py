"""The CUDA engine's operations on a batch's lengths and page tables."""

from __future__ import annotations

import ctypes

import torch
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import abi
from sglang.srt.sparse_kv.ops.launching import contiguous, ints, launch, pointer
from sglang.srt.sparse_kv.ops.reference_batch import Batch


def decode_step(shape: SelectionShape, max_pages: int, rows: int, req_to_token, req, length) -> Batch:
    """As reference_batch.decode_step, in one launch."""
    source = contiguous(req_to_token, "req_to_token", torch.int32)
    device, n, width = source.device, req.shape[0], min(max_pages, -(-source.shape[1] // shape.page_size))

    def made(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    batch = Batch(
        active=made(n, dtype=torch.bool),
        length=made(n),
        table=made(n, width, dtype=torch.int32),
        open_page=made(n, dtype=torch.int32),
        offset=made(n),
        closed_pages=made(n),
        last_tokens=made(n),
        lo=made(n, rows),
        hi=made(n, rows),
    )
    args = abi.Step(
        req_to_token=pointer(source),
        row_length=source.shape[1],
        req=ints(req, "req"),
        length=ints(length, "length"),
        table=pointer(batch.table),
        active=pointer(batch.active),
        lengths=pointer(batch.length),
        open_page=pointer(batch.open_page),
        offset=pointer(batch.offset),
        closed=pointer(batch.closed_pages),
        last_tokens=pointer(batch.last_tokens),
        lo=pointer(batch.lo),
        hi=pointer(batch.hi),
        n=n,
        rows=rows,
        width=width,
        page_size=shape.page_size,
        sinks=shape.sink_pages,
        window=shape.window,
    )
    launch("step", device, args)
    return batch


def count_guides(counts: torch.Tensor, guess, tokens) -> None:
    """As reference_batch.count_guides, in one launch."""
    guess, tokens = (contiguous(t, name) for t, name in ((guess, "guess"), (tokens, "tokens")))
    launch(
        "count_guides",
        counts.device,
        ints(guess, "guess"),
        ints(tokens, "tokens"),
        ctypes.c_int64(guess.numel()),
        pointer(contiguous(counts, "counts", torch.int64)),
    )
