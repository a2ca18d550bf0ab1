"""The CUDA engine's operations of prefill: what a chunk brings of its prefix, and where it goes itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    tables = torch.tensor([view.slot_of.data_ptr() for view in views], dtype=torch.int64)
    if device.type == "cuda":
        tables = tables.pin_memory().to(device, non_blocking=True)
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
    pages: int
    held: tuple[torch.Tensor | None, ...]


def plan_stage(view: LayerView, pages, tokens=None, step=None, due=None) -> StagePlan:
    """As reference_prefill.plan_stage, in one call."""
    heads, count, device = view.kv.shape[0], pages.shape[0], view.kv.device
    install, _fetch = (None, None) if step is None else entering(view, pages, tokens, step)
    scratch = torch.empty(1 + 2 * count * heads, dtype=torch.int32, device=device)
    missing = scratch.data_ptr()
    args = abi.Stage(
        pages=ints(pages, "pages"),
        tokens=ints(tokens, "tokens"),
        missing=missing,
        slots=missing + 4,
        list=missing + 4 + 4 * count * heads,
        due=pointer(due),
        count=count,
    )
    launch("plan_stage", device, view_of(view), workspace(device).work(heads, max(count, 1)), install, args)
    return StagePlan(args, count, (pages, tokens, scratch, due))


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


def stage_landed(
    view: LayerView, plan: StagePlan, target: torch.Tensor, landing: torch.Tensor, first: int, places: int
) -> None:
    """As reference_prefill.stage_landed."""
    args = _into(view, plan, target)
    args.landing, args.first, args.places = pointer(landing), first, places
    launch("stage_landed", target.device, view_of(view), args)


def _into(view: LayerView, plan: StagePlan, target: torch.Tensor) -> Any:
    heads, dim = view.kv.shape[0], view.kv.shape[4]
    expected = (2, heads, plan.pages * view.kv.shape[3], dim)
    if target.shape != expected or target.dtype != view.kv.dtype or target.stride()[2:] != (dim, 1):
        raise ValueError(
            f"stage: target must be {view.kv.dtype} {list(expected)}, each head's tokens together, got {target.dtype} "
            f"{list(target.shape)} with strides {target.stride()}"
        )
    args = plan.args
    args.target, args.stride_values, args.stride_head = pointer(target), target.stride(0), target.stride(1)
    return args


def _chunk(view: LayerView, k, v, loc, through: bool) -> Any:
    k, v = inner_contiguous(k, "k", view.kv.dtype), inner_contiguous(v, "v", view.kv.dtype)
    return abi.Chunk(pointer(k), pointer(v), k.stride(0), v.stride(0), ints(loc, "loc"), k.shape[0], int(through))


def store_chunk(view: LayerView, k, v, loc, through: bool = True) -> None:
    """As reference_prefill.store_chunk."""
    launch("store_chunk", k.device, view_of(view), _chunk(view, k, v, loc, through))


def fill(view: LayerView, k, v, loc) -> None:
    """As reference_prefill.fill."""
    launch("fill", k.device, view_of(view), _chunk(view, k, v, loc, through=False))


def refresh(view: LayerView, k, v, loc, pages, tokens, step=None) -> None:
    """As reference_prefill.refresh, in one call."""
    heads, device = view.kv.shape[0], k.device
    if step is None:
        begun = abi.Resolve(pages=ints(pages, "pages"), width=pages.shape[0])
    else:
        begun, _ = entering(view, pages, tokens, step)
    work = workspace(device).work(heads, max(pages.shape[0], 1))
    launch("refresh", device, view_of(view), work, begun, _chunk(view, k, v, loc, through=False), int(step is not None))
