"""The torch reference of what prefill does with data: stage a prefix, store a chunk, put it into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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


def lands() -> bool:
    """Whether pages may come in two legs, `land` and `stage_landed`. Only where the first has an engine of its own."""
    return False


def absent(views: Sequence[LayerView], pages: torch.Tensor) -> torch.Tensor:
    """How many heads of each page, int [M], are not resident in each layer: uint8 [L, M]."""
    return torch.stack([(view.slot_of[:, pages.long()] < 0).sum(0) for view in views]).to(torch.uint8)


@dataclass
class StagePlan:
    pages: torch.Tensor  # int [M]
    slots: torch.Tensor  # int [M, H] that units are read from, NONE from the host
    due: torch.Tensor  # bool [M] pages that land
    fetch: Fetch | None  # what takes slots beside


def plan_stage(view: LayerView, pages: torch.Tensor, tokens=None, step=None, due=None, again=None) -> StagePlan:
    """Looks up where the units of a prefix's pages, int [M], are. With a step, those that are not resident take slots
    with stamp < step, as far as slots reach, where decode will find them; tokens int [M] of each page, None when all
    are full. due: uint8 [M], nonzero for pages that land; None: none does. again: a plan whose copies are over:
    its memory may serve, and all of it where pages, tokens and step are the same. Edits tables only: `stage` moves.
    """
    slots = view.slot_of[:, pages.long()].T.long()
    resident = int((slots >= 0).sum())
    view.counters[PREFIX_CACHE] += resident
    view.counters[PREFIX_HOST] += slots.numel() - resident
    due = torch.zeros(len(pages), dtype=torch.bool) if due is None else due.bool()
    return StagePlan(pages, slots, due, None if step is None else install(view, pages, tokens, step))


def stage(view: LayerView, plan: StagePlan, target: torch.Tensor, parts: str = "all") -> None:
    """Copies the pages of a plan into target [2, H, M*P, D] (keys, values) on the device: units that were resident from
    their slots, the rest from the host, and those of them that took slots into these too. parts: "all" where no page
    lands; else "resident" before, and after it "missing", which leaves out the pages that land.

    Plans of one layer are staged in the order in which they were made: a later one may have given away a slot that an
    earlier one reads, or name one that an earlier one fills.
    """
    place, head = (plan.slots >= 0).nonzero(as_tuple=True)
    if parts == "all":
        units = view.host[plan.pages.long()].to(view.kv.device)  # [M, H, 2, P, D]
        units[place, head] = view.kv[head, plan.slots[place, head]]
        target.copy_(units.permute(2, 1, 0, 3, 4).reshape(target.shape))
    elif parts == "resident":
        _units(target, len(plan.pages))[place, head] = view.kv[head, plan.slots[place, head]]
    else:
        place, head = ((plan.slots < 0) & ~plan.due[:, None]).nonzero(as_tuple=True)
        _units(target, len(plan.pages))[place, head] = view.host[plan.pages[place].long(), head].to(view.kv.device)
    if parts != "resident" and plan.fetch is not None:
        gather(view, _only(plan.fetch, plan.pages[~plan.due]))


def stage_cached(view: LayerView, pages: torch.Tensor, target: torch.Tensor, memo=None) -> None:
    """As a plan without slots and `stage` of it, in one: for pages that are resident, so that hardly a unit comes from
    the host. pages int [M], target as there; memo: a dictionary of these two, as in `store_chunk`.
    """
    stage(view, plan_stage(view, pages), target)


def land(view: LayerView, runs: np.ndarray, landing: torch.Tensor) -> None:
    """Copies whole pages from the host into a landing [places, H, 2, P, D] on the device.

    runs: int64 [n, 3], consecutive pages each: the first, its place in the landing, how many.
    """
    for page, place, count in runs.tolist():
        landing[place : place + count] = view.host[page : page + count]


def stage_landed(
    view: LayerView, plan: StagePlan, target: torch.Tensor, landing: torch.Tensor, first: int, places: int
) -> None:
    """Copies units of pages that have landed, those that were not resident, into target and into the slots that they
    took. landing [places, H, 2, P, D]: pages of the plan from place `first` on.
    """
    part = slice(first, first + places)
    place, head = ((plan.slots[part] < 0) & plan.due[part, None]).nonzero(as_tuple=True)
    _units(target, len(plan.pages))[place + first, head] = landing[place, head]
    if plan.fetch is None:
        return
    fetch = _only(plan.fetch, plan.pages[part][plan.due[part]])
    for page, head_, slot, tokens in fetch.units[: int(fetch.count)].tolist():
        at = int((plan.pages[part] == page).nonzero()[0])
        view.kv[head_, slot, :, :tokens] = landing[at, head_, :, :tokens]


def _units(target: torch.Tensor, pages: int) -> torch.Tensor:
    """A staging slot [2, H, M*P, D] by units: [M, H, 2, P, D]."""
    return target.unflatten(2, (pages, -1)).permute(2, 1, 0, 3, 4)


def _only(fetch: Fetch, pages: torch.Tensor) -> Fetch:
    """The units of some pages."""
    units = fetch.units[: int(fetch.count)]
    units = units[torch.isin(units[:, 0], pages.to(units.dtype))]
    return Fetch(units, torch.tensor(len(units)))


def store_chunk(view: LayerView, k, v, loc: torch.Tensor, through: bool = True, memo=None) -> None:
    """Writes a prefill chunk's K/V to the host and makes the landmarks of the pages that it closes.

    k, v [T, H, D]; loc int [T] host slots, consecutive within a page. memo: a dictionary of the chunk's, in which an
    engine may keep from layer to layer what does not change.
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


def refresh(view: LayerView, k, v, loc, pages: torch.Tensor, tokens: torch.Tensor, step=None, memo=None) -> None:
    """Makes the cache true to a prefill chunk. Pages that it begins, int [B], lose their entries; with a step they take
    slots with stamp < step, the last pages first, as far as slots reach; the chunk is written into the slots that its
    pages have.

    k, v [T, H, D]; loc int [T] host slots; tokens int [B] of each page; memo as in `store_chunk`.
    """
    invalidate(view, pages)
    if step is not None:
        install(view, pages, tokens, step)
    fill(view, k, v, loc)
