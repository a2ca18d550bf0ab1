"""The torch reference of what prefill does with data: stage a prefix, store a chunk, put it into the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.sparse_kv.ops.landmarks import store
from sglang.srt.sparse_kv.ops.reference import (
    MISSED,
    PREFIX_CACHE,
    PREFIX_HOST,
    TOKENS_IN,
    Fetch,
    LayerView,
    enter,
    gather,
    invalidate,
)


@dataclass
class StagePlan:
    pages: torch.Tensor  # int [M]
    slots: torch.Tensor  # int [M, H] that units are read from, NONE from the host
    fetch: Fetch | None  # what takes slots beside


def plan_stage(view: LayerView, pages: torch.Tensor, tokens=None, step=None) -> StagePlan:
    """Looks up where the units of a prefix's pages, int [M], are. With a step, those that are not resident take slots
    with stamp < step, as far as slots reach, where decode will find them; tokens int [M] of each page, None when all
    are full. Edits tables only: `stage` moves.
    """
    slots = view.slot_of[:, pages.long()].T.long()
    resident = int((slots >= 0).sum())
    view.counters[PREFIX_CACHE] += resident
    view.counters[PREFIX_HOST] += slots.numel() - resident
    return StagePlan(pages, slots, None if step is None else install(view, pages, tokens, step))


def stage(view: LayerView, plan: StagePlan, target: torch.Tensor) -> None:
    """Copies the pages of a plan into target [2, H, M*P, D] (keys, values) on the device: units that were resident from
    their slots, the rest from the host, and those of them that took slots into these too.

    Plans of one layer are staged in the order in which they were made: a later one may have given away a slot that an
    earlier one reads, or name one that an earlier one fills.
    """
    units = view.host[plan.pages.long()].to(view.kv.device)  # [M, H, 2, P, D]
    place, head = (plan.slots >= 0).nonzero(as_tuple=True)
    units[place, head] = view.kv[head, plan.slots[place, head]]
    target.copy_(units.permute(2, 1, 0, 3, 4).reshape(target.shape))
    if plan.fetch is not None:
        gather(view, plan.fetch)


def store_chunk(view: LayerView, k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor, through: bool = True) -> None:
    """Writes a prefill chunk's K/V to the host and makes the landmarks of the pages that it closes.

    k, v [T, H, D]; loc int [T] host slots, consecutive within a page.
    """
    page_size = view.host.shape[3]
    page, offset = loc.long() // page_size, loc.long() % page_size
    if through:
        view.host[page, :, 0, offset] = k.to(view.host.device)
        view.host[page, :, 1, offset] = v.to(view.host.device)
    closed = page[offset == page_size - 1]
    if closed.numel():
        store(view.landmarks, closed, view.host[closed, :, 0])


def install(view: LayerView, pages: torch.Tensor, tokens: torch.Tensor, step: torch.Tensor) -> Fetch:
    """Enters pages of a prefill, int [M], into slots with stamp < step, the last pages first, as far as slots reach;
    units that are resident are left alone. tokens int [M] of each. Returns the units entered.
    """
    pages, tokens = pages.long().flip(0), tokens.flip(0)
    head, index = (view.slot_of[:, pages] < 0).nonzero(as_tuple=True)
    before = view.counters.clone()
    fetch = enter(view, head, pages[index], tokens[index], step, ahead=False, must=False)
    copied = [MISSED, TOKENS_IN]  # nobody missed it, and what a prefill brings has counters of its own
    view.counters[copied] = before[copied]
    return fetch


def fill(view: LayerView, k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor) -> None:
    """Writes a prefill chunk's K/V into the slots of those of its pages that have one.

    k, v [T, H, D]; loc int [T] host slots. The pages' other tokens must be in their slots already.
    """
    page_size = view.kv.shape[3]
    slots = view.slot_of[:, loc.long() // page_size].T.long()  # [T, H]
    token, head = (slots >= 0).nonzero(as_tuple=True)
    slot, offset = slots[token, head], (loc.long() % page_size)[token]
    view.kv[head, slot, 0, offset] = k[token, head]
    view.kv[head, slot, 1, offset] = v[token, head]


def refresh(view: LayerView, k, v, loc, pages: torch.Tensor, tokens: torch.Tensor, step=None) -> None:
    """Makes the cache true to a prefill chunk. Pages that it begins, int [B], lose their entries; with a step they take
    slots with stamp < step, the last pages first, as far as slots reach; the chunk is written into the slots that its
    pages have.

    k, v [T, H, D]; loc int [T] host slots; tokens int [B] of each page.
    """
    invalidate(view, pages)
    if step is not None:
        install(view, pages, tokens, step)
    fill(view, k, v, loc)
