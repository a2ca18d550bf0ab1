"""Prefill with the prefix in host memory: a chunk attends to itself and, block by block, to its prefix.

Two staging slots take turns: while one block is attended, the next is on its way, across the borders of requests and
layers too. A block's units come from their cache slots where they are resident and from the host otherwise; those from
the host stay in slots that are free or long unused, where decode will find them. Partial results join by log-sum-exp,
so the result is exact and device memory does not grow with the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.sparse_kv.ops.reference import physical_pages
from sglang.srt.sparse_kv.runtime import SparseKVRuntime


@dataclass
class Block:
    """Prefix pages that one staging slot holds at a time."""

    pages: torch.Tensor  # int32 [M] physical
    page_tokens: torch.Tensor  # int32 [M] tokens of the prefix in each
    tokens: int  # in all of them


@dataclass
class Chunk:
    """One request's part of a prefill batch."""

    start: int  # row of its first token in the batch
    tokens: int
    blocks: list[Block]  # of its prefix


@dataclass
class PrefillStep:
    chunks: list[Chunk]
    blocks: list[Block]  # of all chunks, in the order in which every layer attends to them
    begun: torch.Tensor  # int32 [B] physical pages whose first token the batch writes, in the order of their tokens
    begun_tokens: torch.Tensor  # int32 [B] tokens in each
    loc: torch.Tensor  # int [T] host slots of the batch's tokens


class Prefill:
    def __init__(self, runtime: SparseKVRuntime):
        self.runtime = runtime
        geometry = runtime.geometry
        self.block_pages = runtime.plan.staging_tokens // geometry.page_size
        self.staging = torch.zeros(
            (2, 2, geometry.kv_heads, self.block_pages * geometry.page_size, geometry.head_dim),
            dtype=geometry.dtype,
            device=runtime.landmarks.device,
        )  # [slot, K|V, H, tokens, D]
        self.step: PrefillStep | None = None
        self._staged = 0  # blocks sent on their way in this forward, over all layers
        self._leaving: tuple[torch.Tensor, ...] = ()  # kept alive while it is on its way to the host

    def begin(self, req_to_token, req, prefix_lens: list[int], extend_lens: list[int], loc: torch.Tensor) -> None:
        """req_to_token int32 [slots, context]; req int [N]; loc int [T] host slots of the batch's tokens."""
        runtime = self.runtime
        runtime.reset_requests(req)
        runtime.note_prefill(prefix_lens, extend_lens)
        page_size = runtime.geometry.page_size
        tables = physical_pages(req_to_token, req, page_size, runtime.geometry.max_pages)
        chunks: list[Chunk] = []
        begun, begun_tokens, start = [], [], 0
        for table, prefix, tokens in zip(tables, prefix_lens, extend_lens, strict=True):
            chunks.append(Chunk(start, tokens, self._blocks(table, prefix)))
            start += tokens
            end = prefix + tokens
            pages = range(-(-prefix // page_size), -(-end // page_size))
            begun.append(table[pages.start : pages.stop])
            begun_tokens += [min(page_size, end - page * page_size) for page in pages]
        counts = torch.tensor(begun_tokens, dtype=torch.int32).to(tables.device, non_blocking=True)
        blocks = [block for chunk in chunks for block in chunk.blocks]
        self.step = PrefillStep(chunks, blocks, torch.cat(begun), counts, loc)
        self._staged = 0

    def _blocks(self, table: torch.Tensor, prefix: int) -> list[Block]:
        """table int32 [MP]."""
        page_size = self.runtime.geometry.page_size
        most = self.block_pages * page_size
        blocks = []
        for start in range(0, prefix, most):
            tokens = min(prefix - start, most)
            pages = table[start // page_size : -(-(start + tokens) // page_size)]
            filled = torch.full_like(pages, page_size)
            filled[-1] = tokens - (len(pages) - 1) * page_size
            blocks.append(Block(pages, filled, tokens))
        return blocks

    def forward(self, layer: int, q, k, v, scale: float) -> torch.Tensor:
        """q [T, H*G, D]; k, v [T, H, D]; returns [T, H*G, D]."""
        runtime, step = self.runtime, self.step
        assert step is not None, "begin comes before the layers"
        if layer == 0:
            self._stage_next(step)
        self._store(layer, step, k, v)
        out = torch.empty_like(q)
        for chunk in step.chunks:
            rows = slice(chunk.start, chunk.start + chunk.tokens)
            out[rows] = self._attend(step, chunk, q[rows], k[rows], v[rows], scale)
        self._refresh_cache(layer, step, k, v)
        if layer == runtime.geometry.num_layers - 1:
            runtime.transfer.join_all()
            self._leaving = ()
        return out

    def _store(self, layer: int, step: PrefillStep, k, v) -> None:
        """The chunk's K/V leaves for the host under this layer's compute; the layer before has arrived."""
        runtime, loc = self.runtime, step.loc
        view, through = runtime.cache.views[layer], not runtime.policy.skip_write_through
        runtime.transfer.join("store")
        self._leaving = (k, v)
        runtime.transfer.submit("store", lambda: runtime.ops.store_chunk(view, k, v, loc, through), to_host=True)

    def _refresh_cache(self, layer: int, step: PrefillStep, k, v) -> None:
        """Keeps the entries of the pages that the batch writes true to the host. A page that it begins may have an
        entry of an earlier owner's, which goes; it gets an unused slot. The chunk is written from the device into every
        slot that its pages have, those that it continues included.

        The prefix is read from its slots until this layer's attention ends, so not before that.
        """
        runtime = self.runtime
        if runtime.policy.skip_invalidation:
            return
        view = runtime.cache.views[layer]
        runtime.ops.invalidate(view, step.begun)
        if layer not in runtime.cache.scoped:
            runtime.ops.install(view, step.begun, step.begun_tokens, runtime.clock_long_ago)
        runtime.ops.fill(view, k, v, step.loc)

    def _attend(self, step: PrefillStep, chunk: Chunk, q, k, v, scale: float) -> torch.Tensor:
        ops = self.runtime.ops
        out, lse = ops.attend_block(q, k.transpose(0, 1), v.transpose(0, 1), scale, causal=True)
        for block in chunk.blocks:
            slot = (self._staged - 1) % 2
            self._stage_next(step)  # into the other slot, which the attention before this one has left
            self.runtime.transfer.join(("staging", slot))
            keys, values = self.staging[slot, :, :, : block.tokens]
            part, part_lse = ops.attend_block(q, keys, values, scale, causal=False)
            out, lse = ops.merge(out, lse, part, part_lse)
        return out

    def _stage_next(self, step: PrefillStep) -> None:
        """Sends the next block of the forward on its way, whichever layer it belongs to."""
        runtime, blocks = self.runtime, step.blocks
        if self._staged < len(blocks) * runtime.geometry.num_layers:
            layer, number = divmod(self._staged, len(blocks))
            self._stage(layer, blocks[number], self._staged % 2)
        self._staged += 1

    def _stage(self, layer: int, block: Block, slot: int) -> None:
        runtime = self.runtime
        ops, view = runtime.ops, runtime.cache.views[layer]
        target = self.staging[slot, :, :, : len(block.pages) * runtime.geometry.page_size]
        kept = None
        if layer not in runtime.cache.scoped:
            kept = ops.install(view, block.pages, block.page_tokens, runtime.clock_prefix)

        def copy() -> None:
            if kept is not None:
                ops.gather(view, kept)
            ops.stage(view, block.pages, target, kept)

        runtime.transfer.submit(("staging", slot), copy)
