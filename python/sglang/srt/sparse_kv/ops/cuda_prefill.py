"""The CUDA engine's operations of prefill: what a chunk brings of its prefix, and where it goes itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from sglang.srt.sparse_kv.ops import abi, build
from sglang.srt.sparse_kv.ops.cuda import entering, mover_blocks
from sglang.srt.sparse_kv.ops.launching import inner_contiguous, ints, launch, pointer, view_of
from sglang.srt.sparse_kv.ops.reference import LayerView
from sglang.srt.sparse_kv.ops.workspace import workspace


def lands() -> bool:
    """Whether `land` can be used: from CUDA 12.8 on, many copies are handed over at once."""
    return bool(build.library().skv_lands())


def absent(views: Sequence[LayerView], pages: torch.Tensor) -> torch.Tensor:
    """As reference_prefill.absent, in one call."""
    device = views[0].kv.device
    heads, num_pages = views[0].slot_of.shape
    tables = _addresses(device, *(view.slot_of.data_ptr() for view in views))
    found = torch.empty((len(views), pages.shape[0]), dtype=torch.uint8, device=device)
    args = abi.Absent(
        tables=pointer(tables),
        pages=ints(pages, "pages"),
        absent=pointer(found),
        layers=len(views),
        heads=heads,
        num_pages=num_pages,
        count=pages.shape[0],
    )
    launch("absent", device, args)
    return found


@lru_cache(maxsize=8)
def _addresses(device: torch.device, *addresses: int) -> torch.Tensor:
    """int64, on the device."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)


def land(view: LayerView, runs: np.ndarray, landing: torch.Tensor) -> None:
    """As reference_prefill.land, by the copy engine: an H200 brings single pages of 64 KB in any order at 55 GB/s, the
    rate of one large copy, and a page, or run, costs the caller 0.9 us. Not on the default stream, which CUDA refuses.
    """
    if runs.dtype != np.int64 or not runs.flags.c_contiguous:
        raise ValueError(f"land: runs must be contiguous int64 [n, 3], got {runs.dtype}")
    if landing.shape[1:] != view.host.shape[1:] or landing.dtype != view.host.dtype or not landing.is_contiguous():
        raise ValueError(f"land: the landing's pages must be as the host's, {list(view.host.shape[1:])}")
    args = abi.Land(runs=runs.ctypes.data, landing=pointer(landing), count=len(runs))
    launch("land", landing.device, view_of(view), args)


@dataclass
class StagePlan:
    """Where the units of a prefix come from and go: what `stage` needs, valid while this object lives."""

    args: Any
    install: Any  # what takes slots, or None
    work: Any
    of: tuple[torch.Tensor | None, ...]  # pages, tokens, step
    memory: torch.Tensor  # int32, of all that args and install write
    due: torch.Tensor | None = None
    target: torch.Tensor | None = None  # that args name


def plan_stage(view: LayerView, pages, tokens=None, step=None, due=None, again: StagePlan | None = None) -> StagePlan:
    """As reference_prefill.plan_stage, in one call."""
    device, of = view.kv.device, (pages, tokens, step)
    if again is not None and all(mine is theirs for mine, theirs in zip(again.of, of, strict=True)):
        plan = again
    else:
        plan = _new_plan(view, of, None if again is None else again.memory)
    plan.due, plan.args.due = due, pointer(due)
    launch("plan_stage", device, view_of(view), plan.work, plan.install, plan.args)
    return plan


def _new_plan(view: LayerView, of, memory: torch.Tensor | None) -> StagePlan:
    pages, tokens, step = of
    heads, count, device = view.kv.shape[0], pages.shape[0], view.kv.device
    units = heads * count
    if memory is None or memory.numel() < 4 + 6 * units:
        memory = torch.empty(4 + 6 * units, dtype=torch.int32, device=device)
    # Two counts; what takes slots, 16 bytes a unit; slots; the list of what is missing.
    start = memory.data_ptr()
    install = None
    if step is not None:
        install, _ = entering(view, pages, tokens, step)
        install.count, install.units = start + 4, start + 16
    args = abi.Stage(
        pages=ints(pages, "pages"),
        tokens=ints(tokens, "tokens"),
        missing=start,
        slots=start + 16 + 16 * units,
        list=start + 16 + 20 * units,
        count=count,
    )
    return StagePlan(args, install, workspace(device).work(heads, max(count, 1)), of, memory)


def stage(
    view: LayerView, plan: StagePlan, target: torch.Tensor, parts: str = "all", blocks: int | None = None
) -> None:
    """As reference_prefill.stage, in one call. target [2, H, M*P, D], keys and values of a head together; blocks: that
    move the units which are not resident. Twice as many as elsewhere by default, since each unit leaves for two places:
    an H200 brings 43 GB/s with four of them, 48 to 49 with five to twenty-four.

    May run on another stream than the plan was made on. Plans of one layer are staged in the order in which they were
    made: a later one may have given away a slot that an earlier one reads, or name one that an earlier one fills.
    """
    args = _into(view, plan, target)
    args.parts = {"all": abi.RESIDENT | abi.MISSING, "resident": abi.RESIDENT, "missing": abi.MISSING}[parts]
    args.blocks = blocks or 2 * mover_blocks(target.device, view.kv.stride(1) * view.kv.element_size())
    launch("stage", target.device, view_of(view), args)


def stage_cached(view: LayerView, pages, target: torch.Tensor, memo: dict[str, Any] | None = None) -> None:
    """As reference_prefill.stage_cached, in one kernel."""
    args = None if memo is None else memo.get("cached")
    if args is None:
        args = abi.Stage(pages=ints(pages, "pages"), count=pages.shape[0])
        _fill_in(args, view, target)
        if memo is not None:
            memo["cached"] = args
    launch("stage_cached", target.device, view_of(view), args)


def stage_landed(
    view: LayerView, plan: StagePlan, target: torch.Tensor, landing: torch.Tensor, first: int, places: int
) -> None:
    """As reference_prefill.stage_landed."""
    args = _into(view, plan, target)
    args.landing, args.first, args.places = pointer(landing), first, places
    launch("stage_landed", target.device, view_of(view), args)


def _into(view: LayerView, plan: StagePlan, target: torch.Tensor) -> Any:
    if plan.target is not target:
        _fill_in(plan.args, view, target)
        plan.target = target
    return plan.args


def _fill_in(args: Any, view: LayerView, target: torch.Tensor) -> None:
    heads, dim = view.kv.shape[0], view.kv.shape[4]
    expected = (2, heads, args.count * view.kv.shape[3], dim)
    if target.shape != expected or target.dtype != view.kv.dtype or target.stride()[2:] != (dim, 1):
        raise ValueError(
            f"stage: target must be {view.kv.dtype} {list(expected)}, each head's tokens together, got {target.dtype} "
            f"{list(target.shape)} with strides {target.stride()}"
        )
    args.target, args.stride_values, args.stride_head = pointer(target), target.stride(0), target.stride(1)


def _chunk(view: LayerView, k, v, loc, through: bool, memo: dict[str, Any] | None = None) -> Any:
    """A chunk's arguments. memo: holds those of the layer before, of which only the addresses differ."""
    strides = k.stride(), v.stride()
    if memo is not None and memo.get("strides") == strides and not (k.data_ptr() | v.data_ptr()) % 16:
        args = memo["chunk"]
        args.k, args.v, args.through = k.data_ptr(), v.data_ptr(), int(through)
        return args
    keys, values = inner_contiguous(k, "k", view.kv.dtype), inner_contiguous(v, "v", view.kv.dtype)
    lying = pointer(keys), pointer(values), keys.stride(0), values.stride(0)
    args = abi.Chunk(*lying, ints(loc, "loc"), k.shape[0], int(through))
    if keys is not k or values is not v:
        args.held = keys, values  # copies
    elif memo is not None:
        memo["strides"], memo["chunk"] = strides, args
    return args


def store_chunk(view: LayerView, k, v, loc, through: bool = True, memo: dict[str, Any] | None = None) -> None:
    """As reference_prefill.store_chunk."""
    launch("store_chunk", k.device, view_of(view), _chunk(view, k, v, loc, through, memo))


def fill(view: LayerView, k, v, loc) -> None:
    """As reference_prefill.fill."""
    launch("fill", k.device, view_of(view), _chunk(view, k, v, loc, through=False))


def refresh(view: LayerView, k, v, loc, pages, tokens, step=None, memo: dict[str, Any] | None = None) -> None:
    """As reference_prefill.refresh, in one call."""
    known = None if memo is None else memo.get(f"begun {step is None}")
    if known is None:
        known = _begun(view, pages, tokens, step)
        if memo is not None:
            memo[f"begun {step is None}"] = known
    begun, work, _held = known
    launch("refresh", k.device, view_of(view), work, begun, _chunk(view, k, v, loc, False, memo), int(step is not None))


def _begun(view: LayerView, pages, tokens, step) -> tuple[Any, Any, Any]:
    """What `refresh` says of the pages that a chunk begins, and what must live as long."""
    fetch = None
    if step is None:
        begun = abi.Resolve(pages=ints(pages, "pages"), width=pages.shape[0])
    else:
        begun, fetch = entering(view, pages, tokens, step)
    work = workspace(view.kv.device).work(view.kv.shape[0], max(pages.shape[0], 1))
    return begun, work, (pages, tokens, fetch)
