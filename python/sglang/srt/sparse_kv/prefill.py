"""Prefill with the prefix in host memory: a chunk attends to itself and, block by block, to what the host holds.

Two staging slots take turns: block b+1 is on its way while block b is attended. Partial results join by log-sum-exp, so
the result is exact and device memory does not grow with the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.sparse_kv.ops.reference import physical_pages
from sglang.srt.sparse_kv.runtime import SparseKVRuntime


@dataclass
class Chunk:
    """One request's part of a prefill batch."""

    start: int  # row of its first token in the batch
    tokens: int
    prefix: int  # committed tokens before the chunk
    pages: torch.Tensor  # int32 [MP] physical page table


@dataclass
class PrefillStep:
    chunks: list[Chunk]
    written: torch.Tensor  # int64 [M] physical pages that the batch writes, in the order of their tokens
    written_tokens: torch.Tensor  # int64 [M] committed tokens of each, this batch's included


class Prefill:
    def __init__(self, runtime: SparseKVRuntime):
        self.runtime = runtime
        geometry = runtime.geometry
        self.block_pages = runtime.plan.staging_tokens // geometry.page_size
        self.staging = torch.zeros(
            (2, self.block_pages, geometry.kv_heads, 2, geometry.page_size, geometry.head_dim),
            dtype=geometry.dtype,
            device=runtime.landmarks.device,
        )
        self.step: PrefillStep | None = None

    def begin(self, req_to_token, req, prefix_lens: list[int], extend_lens: list[int], loc: torch.Tensor) -> None:
        """req_to_token int32 [slots, context]; req int [N]; loc int [T] host slots of the batch's tokens."""
        runtime = self.runtime
        runtime.reset_requests(req)
        runtime.note_prefill(prefix_lens, extend_lens)
        page_size = runtime.geometry.page_size
        tables = physical_pages(req_to_token, req, page_size, runtime.geometry.max_pages)
        chunks, start = [], 0
        for i, (prefix, tokens) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
            chunks.append(Chunk(start, tokens, prefix, tables[i]))
            start += tokens
        page, offset = loc.long() // page_size, loc.long() % page_size
        written, inverse = torch.unique(page, return_inverse=True)
        filled = torch.zeros_like(written).scatter_reduce(0, inverse, offset + 1, "amax")
        last = torch.zeros_like(written).scatter_reduce(0, inverse, torch.arange(len(loc), device=loc.device), "amax")
        order = last.argsort()
        self.step = PrefillStep(chunks, written[order], filled[order])

    def forward(self, layer: int, q, k, v, loc: torch.Tensor, scale: float) -> torch.Tensor:
        """q [T, H*G, D]; k, v [T, H, D]; returns [T, H*G, D]."""
        runtime, step = self.runtime, self.step
        assert step is not None, "begin comes before the layers"
        view = runtime.cache.views[layer]
        runtime.ops.store_chunk(view, k, v, loc, through=not runtime.policy.skip_write_through)
        self._refresh_cache(layer, view, step)
        out = torch.empty_like(q)
        for chunk in step.chunks:
            rows = slice(chunk.start, chunk.start + chunk.tokens)
            out[rows] = self._attend(layer, view, chunk, q[rows], k[rows], v[rows], scale)
        if layer == runtime.geometry.num_layers - 1:
            runtime.transfer.join_all()
        return out

    def _refresh_cache(self, layer: int, view, step: PrefillStep) -> None:
        """The pages' entries hold an earlier owner's contents: they go, and the new contents take unused slots."""
        runtime = self.runtime
        if not runtime.policy.skip_invalidation:
            runtime.ops.invalidate(view, step.written)
        if layer in runtime.cache.scoped:
            return
        fetch = runtime.ops.install(view, step.written, step.written_tokens, runtime.clock_long_ago)
        runtime.transfer.submit(runtime.cache.lanes[layer], lambda: runtime.ops.gather(view, fetch))

    def _attend(self, layer: int, view, chunk: Chunk, q, k, v, scale: float) -> torch.Tensor:
        runtime = self.runtime
        page_size = runtime.geometry.page_size
        blocks = -(-chunk.prefix // (self.block_pages * page_size))
        self._stage(view, chunk, 0, blocks)
        out, lse = runtime.ops.attend_block(q, k.transpose(0, 1), v.transpose(0, 1), scale, causal=True)
        for block in range(blocks):
            self._stage(view, chunk, block + 1, blocks)
            runtime.transfer.join(("staging", block % 2))
            tokens = min(chunk.prefix - block * self.block_pages * page_size, self.block_pages * page_size)
            pages = -(-tokens // page_size)
            self._keep(layer, view, chunk, block, tokens // page_size)
            staged = self.staging[block % 2, :pages].permute(2, 1, 0, 3, 4)  # [2, H, pages, P, D]
            keys, values = staged.reshape(2, staged.shape[1], pages * page_size, -1)[:, :, :tokens]
            part, part_lse = runtime.ops.attend_block(q, keys, values, scale, causal=False)
            out, lse = runtime.ops.merge(out, lse, part, part_lse)
        return out

    def _keep(self, layer: int, view, chunk: Chunk, block: int, pages: int) -> None:
        """Lets a staged block's first `pages`, which are full, stay in slots that are free or long unused: after a
        radix hit, decode then finds the context resident as far as there is room.
        """
        runtime = self.runtime
        if pages and layer not in runtime.cache.scoped:
            first = block * self.block_pages
            staged = self.staging[block % 2, :pages]
            runtime.ops.adopt(view, chunk.pages[first : first + pages], staged, runtime.clock_long_ago)

    def _stage(self, view, chunk: Chunk, block: int, blocks: int) -> None:
        if block >= blocks:
            return
        first = block * self.block_pages
        last = min(first + self.block_pages, -(-chunk.prefix // self.runtime.geometry.page_size))
        pages = chunk.pages[first:last]
        target = self.staging[block % 2, : last - first]
        self.runtime.transfer.submit(("staging", block % 2), lambda: self.runtime.ops.stage(view, pages, target))
