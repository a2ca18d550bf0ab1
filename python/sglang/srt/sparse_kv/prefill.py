"""Prefill with the prefix in host memory: a chunk attends to its prefix, block by block, and to itself.

Two staging slots take turns: while one block is attended, the next is on its way, across the borders of requests and
layers too. A block's units come from their cache slots where they are resident and from the host otherwise; those from
the host stay in slots that are free or long unused, where decode will find them. The chunk's own K/V goes behind the
last block, if the slot has room, so that one call attends to both; partial results join by log-sum-exp. So the result
is exact and device memory does not grow with the prefix.

The compute stream only attends. A block's units are looked up, and given slots, while the block before is still on its
way, so that the link does not wait for tables. Where a layer lacks nearly all of a block, whole pages come by the
copy engine (`landing.py`). All edits of the cache's tables in a prefill are made one after the
other, and all moves of the prefix too, in the same order: so a block has read a slot before a later one fills it, and
finds in it what an earlier one brought. The chunk may take slots that its layer's blocks were given: its refresh comes
after the layer's attention, which has joined their moves. All of it is over before the forward ends.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from sglang.srt.sparse_kv.landing import Absent, Landing
from sglang.srt.sparse_kv.ops.reference_batch import physical_pages
from sglang.srt.sparse_kv.runtime import SparseKVRuntime

logger = logging.getLogger(__name__)


@dataclass
class Block:
    """Prefix pages that one staging slot holds at a time."""

    pages: torch.Tensor  # int32 [M] physical
    page_tokens: torch.Tensor  # int32 [M] tokens of the prefix in each
    tokens: int  # in all of them
    own: int = 0  # tokens of the chunk that go behind them: all, where it is the chunk's last block and they fit
    first: int = 0  # of its pages, among all that the prefill stages

    @property
    def part(self) -> slice:
        return slice(self.first, self.first + len(self.pages))


@dataclass
class Chunk:
    """One request's part of a prefill batch."""

    start: int  # row of its first token in the batch
    tokens: int
    blocks: list[Block]  # of its prefix


@dataclass
class Place:
    """A staging slot as one block has it, the same in every layer."""

    target: torch.Tensor  # [2, H, M*P, D] whole pages
    keys: torch.Tensor  # [H, tokens, D] those of the block, and the chunk's own behind them
    values: torch.Tensor
    own: tuple[torch.Tensor, torch.Tensor]  # [H, T, D] where the chunk's own go
    plans: dict[bool, Any] = field(
        default_factory=dict
    )  # of the last layer, with slots for what is missing and without
    memo: dict[str, Any] = field(default_factory=dict)  # of `stage_cached`


@dataclass
class PrefillStep:
    chunks: list[Chunk]
    blocks: list[Block]  # of all chunks, in the order in which every layer attends to them
    begun: torch.Tensor  # int32 [B] physical pages whose first token the batch writes, in the order of their tokens
    begun_tokens: torch.Tensor  # int32 [B] tokens in each
    loc: torch.Tensor  # int [T] host slots of the batch's tokens
    absent: Absent | None = None  # what the cache lacks of the blocks, where the host asked
    places: dict[tuple[int, int], Place] = field(default_factory=dict)  # by block and staging slot
    plans: dict[int, Any] = field(default_factory=dict)  # the last in each staging slot
    memo: dict[str, Any] = field(default_factory=dict)  # of the operations on the chunk


class Prefill:
    def __init__(self, runtime: SparseKVRuntime):
        self.runtime = runtime
        geometry, device = runtime.geometry, runtime.device
        tokens = runtime.plan.staging_tokens // geometry.page_size * geometry.page_size
        shape = (2, 2, geometry.kv_heads, tokens, geometry.head_dim)
        self.staging = torch.zeros(shape, dtype=geometry.dtype, device=device)  # [slot, K|V, H, tokens, D]
        # Tokens in each page of a block, all of them full.
        self._full = torch.full((tokens // geometry.page_size,), geometry.page_size, dtype=torch.int32, device=device)
        wanted = runtime.config.landing
        self.landing = Landing(runtime) if wanted and runtime.ops.lands() else None
        if device.type == "cuda" and wanted and self.landing is None:
            logger.info("Kernels bring prefixes from host memory: lists of copies need CUDA 12.8 and a driver for it")
        self.step: PrefillStep | None = None
        self._staged = 0  # blocks sent on their way in this forward, over all layers
        self._leaving: tuple[torch.Tensor, ...] = ()  # kept alive while it is on its way to host and cache
        if device.type == "cuda":
            from sglang.srt.sparse_kv.ops.attend import prepare_prefill

            heads = geometry.kv_heads
            prepare_prefill(heads * geometry.group, heads, geometry.head_dim, geometry.dtype, device)

    def begin(self, req_to_token, req, prefix_lens: list[int], extend_lens: list[int], loc: torch.Tensor) -> None:
        """req_to_token int32 [slots, context]; req int [N]; loc int [T] host slots of the batch's tokens."""
        runtime = self.runtime
        runtime.transfer.join_all()  # what a forward that broke off has left: its plans' memory is free from here on
        runtime.reset_requests(req)
        runtime.note_prefill(prefix_lens, extend_lens)
        page_size = runtime.geometry.page_size
        tables = physical_pages(req_to_token, req, page_size, runtime.geometry.max_pages)
        chunks: list[Chunk] = []
        begun, begun_tokens, start = [], [], 0
        for table, prefix, tokens in zip(tables, prefix_lens, extend_lens, strict=True):
            blocks = self._blocks(table, prefix)
            if blocks and blocks[-1].tokens + tokens <= self.staging.shape[3]:
                blocks[-1].own = tokens
            chunks.append(Chunk(start, tokens, blocks))
            start += tokens
            end = prefix + tokens
            pages = range(-(-prefix // page_size), -(-end // page_size))
            begun.append(table[pages.start : pages.stop])
            begun_tokens += [min(page_size, end - page * page_size) for page in pages]
        counts = torch.tensor(begun_tokens, dtype=torch.int32).to(tables.device, non_blocking=True)
        blocks = [block for chunk in chunks for block in chunk.blocks]
        self.step = PrefillStep(chunks, blocks, torch.cat(begun), counts, loc)
        if self.landing is not None and blocks and runtime.policy.landing:
            for before, block in itertools.pairwise(blocks):
                block.first = before.part.stop
            self.step.absent = self.landing.begin(torch.cat([block.pages for block in blocks]))
        self._staged = 0
        self._stage_next(self.step)  # under what comes before the first layer's attention

    def _blocks(self, table: torch.Tensor, prefix: int) -> list[Block]:
        """table int32 [MP]."""
        page_size = self.runtime.geometry.page_size
        most = self.staging.shape[3]
        blocks = []
        for start in range(0, prefix, most):
            tokens = min(prefix - start, most)
            pages = table[start // page_size : -(-(start + tokens) // page_size)]
            filled = self._full[: len(pages)]  # mostly: the radix cache holds whole pages
            if tokens % page_size:
                filled = filled.clone()
                filled[-1] = tokens % page_size
            blocks.append(Block(pages, filled, tokens))
        return blocks

    def forward(self, layer: int, q, k, v, scale: float, borrowed: bool = False) -> torch.Tensor:
        """q [T, H*G, D]; k, v [T, H, D]; returns [T, H*G, D]. borrowed: the memory of k and v is written anew as
        soon as this has returned, as by the next segment of a CUDA graph.
        """
        transfer, step = self.runtime.transfer, self.step
        assert step is not None, "begin comes before the layers"
        self._store(layer, step, k, v)
        if len(step.chunks) == 1:
            out = self._attend(step, step.chunks[0], q, k, v, scale)
        else:
            out = torch.empty_like(q)
            for chunk in step.chunks:
                rows = slice(chunk.start, chunk.start + chunk.tokens)
                out[rows] = self._attend(step, chunk, q[rows], k[rows], v[rows], scale)
        self._refresh_cache(layer, step, k, v)
        due = layer if borrowed else layer - 1  # the layer before has had this one's time
        for work in ("store", "refresh"):
            transfer.join((work, due % 2))
        self._leaving = (k, v)
        if layer == self.runtime.geometry.num_layers - 1:
            transfer.join_all()
            self._leaving = ()
        return out

    def _store(self, layer: int, step: PrefillStep, k, v) -> None:
        """The chunk's K/V leaves for the host under this layer's compute."""
        runtime, loc = self.runtime, step.loc
        view, through = runtime.cache.views[layer], not runtime.policy.skip_write_through
        copy = partial(runtime.ops.store_chunk, view, k, v, loc, through, memo=step.memo)
        runtime.transfer.submit(("store", layer % 2), copy, way="out")

    def _refresh_cache(self, layer: int, step: PrefillStep, k, v) -> None:
        """Keeps the entries of the pages that the batch writes true to the host. A page that it begins may have an
        entry of an earlier owner's, which goes; it gets an unused slot. The chunk is written from the device into every
        slot that its pages have, those that it continues included.

        The layer's prefix is read from its slots, and brought there, before: its blocks are all under way.
        """
        runtime = self.runtime
        if runtime.policy.skip_invalidation:
            return
        since = None if layer in runtime.cache.scoped else runtime.clock_long_ago
        view = runtime.cache.views[layer]
        copy = partial(runtime.ops.refresh, view, k, v, step.loc, step.begun, step.begun_tokens, since, memo=step.memo)
        runtime.transfer.submit(("refresh", layer % 2), copy, way="within")

    def _attend(self, step: PrefillStep, chunk: Chunk, q, k, v, scale: float) -> torch.Tensor:
        ops, blocks = self.runtime.ops, chunk.blocks
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # [H, T, D]
        follows = bool(blocks) and blocks[-1].own > 0
        alone = len(blocks) + (not follows) == 1  # nothing to merge
        result = None if follows else ops.attend_block(q, k, v, scale, causal=True, alone=alone)
        for block in blocks:
            number, slot = (self._staged - 1) % len(step.blocks), (self._staged - 1) % 2
            self._stage_next(step)  # into the other slot, which the attention before this one has left
            self.runtime.transfer.join(("staging", slot))
            place = step.places[number, slot]
            if block.own:
                place.own[0].copy_(k)
                place.own[1].copy_(v)
            part = ops.attend_block(q, place.keys, place.values, scale, causal=block.own > 0, alone=alone)
            result = part if result is None else ops.merge(*result, *part)
        assert result is not None, "a chunk has tokens"
        return result[0]

    def _stage_next(self, step: PrefillStep) -> None:
        """Sends the next block of the forward on its way, whichever layer it belongs to."""
        runtime, blocks = self.runtime, step.blocks
        if self._staged < len(blocks) * runtime.geometry.num_layers:
            layer, number = divmod(self._staged, len(blocks))
            self._stage(layer, number, self._staged % 2, step)
        self._staged += 1

    def _stage(self, layer: int, number: int, slot: int, step: PrefillStep) -> None:
        runtime, ops, block = self.runtime, self.runtime.ops, step.blocks[number]
        place = step.places.get((number, slot))
        if place is None:
            place = step.places[number, slot] = self._place(block, slot)
        target, absent = place.target, step.absent
        view = runtime.cache.views[layer]
        if absent is not None and absent.nothing(layer):  # its tables stay as they are until its chunk is refreshed
            stage = partial(ops.stage_cached, view, block.pages, target, memo=place.memo)
            runtime.transfer.submit(("staging", slot), stage, way="prefix")
            return
        # What left the cache since the host asked is brought all the same, but need not have a slot.
        keeps = layer not in runtime.cache.scoped and not (absent is not None and absent.none(layer, block.part))
        due = absent.due(layer, block.part) if absent is not None else None
        again = place.plans.get(keeps, step.plans.get(slot))  # attention to what it staged comes before
        plan = place.plans[keeps] = step.plans[slot] = runtime.transfer.edit(
            partial(
                ops.plan_stage,
                view,
                block.pages,
                block.page_tokens,
                runtime.clock_prefix if keeps else None,
                None if due is None else due.on_device,
                again,
            )
        )
        stage = partial(ops.stage, view, plan, target)
        if due is None or self.landing is None:
            runtime.transfer.submit(("staging", slot), stage, way="prefix")
        else:
            begin, end = partial(stage, parts="resident"), partial(stage, parts="missing")
            runtime.transfer.relay(("staging", slot), begin, self.landing.legs(view, plan, target, due), end)

    def _place(self, block: Block, slot: int) -> Place:
        staging, tokens = self.staging[slot], block.tokens
        target = staging[:, :, : len(block.pages) * self.runtime.geometry.page_size]
        keys, values = staging[:, :, : tokens + block.own]
        return Place(target, keys, values, (keys[:, tokens:], values[:, tokens:]))
