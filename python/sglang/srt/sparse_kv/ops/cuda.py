"""The CUDA engine: the operations of reference.py by the kernels of csrc/sparse_kv, same names and meaning.

Nothing here waits for the device, and everything may be captured into a CUDA graph after one run outside it. Integer
tensors may be int32 or int64. Operations that edit tables share scratch and must be called in one stream's order, but
`plan_prefetches`, which has its own: calls of it keep one order among themselves. `gather` and `stage` only move bytes
and may run on another stream, and so may `predict`, behind its `select` and up to the next `score`.

Beyond the reference:
* `score` returns a handle that `select` reads: scores are normalised there, which saves a pass. `dense()` makes the
  reference's tensor of it.
* `resolve(..., move=True)` also brings the missing units, in the same launch.
* A selection that does not fit sets a flag instead of raising: `workspace(device).check()` raises later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.sparse_kv.ops import abi, build
from sglang.srt.sparse_kv.ops.attend import Inputs, attend, attend_block, attend_inputs, merge
from sglang.srt.sparse_kv.ops.cuda_batch import count_guides, decode_step
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.launching import (
    capturing_safe,
    contiguous,
    inner_contiguous,
    ints,
    launch,
    pointer,
    view_of,
)
from sglang.srt.sparse_kv.ops.reference import Fetch, LayerView, Prefetch, Selection
from sglang.srt.sparse_kv.ops.workspace import chunks, set_miss_rate, skip_copies, workspace

__all__ = [
    "append",
    "attend",
    "attend_block",
    "attend_inputs",
    "check",
    "clear",
    "close_pages",
    "count_guides",
    "decode_step",
    "gather",
    "install",
    "invalidate",
    "merge",
    "plan_prefetch",
    "plan_prefetches",
    "predict",
    "resolve",
    "score",
    "select",
    "set_miss_rate",
    "skip_copies",
    "write_token",
]

# Blocks of a mover. One with the bulk copy engine moves 18 GB/s in units of 8 KB and three fill PCIe 5; with four, the
# GEMMs beside them lose the least. Loads and stores need more.
MOVER_BLOCKS = int(os.environ.get("SPARSE_KV_MOVER_BLOCKS", "4"))
MOVER_BLOCKS_SMALL_UNITS = 6  # below 8 KB
MOVER_BLOCKS_PLAIN = 16
MAX_BUDGET_PAGES = 1024
FEW_CHUNKS = 8  # a multiprocessor: up to so many, score gives each a block of its own
RESOLVE, PREFETCH, INSTALL = range(3)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def mover_blocks(device: torch.device, unit_bytes: int) -> int:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        return MOVER_BLOCKS_PLAIN
    return MOVER_BLOCKS if unit_bytes >= 8192 else max(MOVER_BLOCKS, MOVER_BLOCKS_SMALL_UNITS)


@dataclass
class DeviceFetch(Fetch):
    """A Fetch whose count only the device knows. ahead: a prefetch, which lets misses go first; moved: done already."""

    ahead: bool = False
    moved: bool = False


# ---------------------------------------------------------------- scores and selection


@dataclass
class Scores:
    """Scores not yet normalised, in the workspace: valid until the next score."""

    logits: torch.Tensor
    partials: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    shape: tuple[int, int, int, int, int]  # N, R, H, G, MP

    def _arguments(self) -> Any:
        n, rows, heads, group, width = self.shape
        return abi.Select(
            logits=pointer(self.logits),
            partials=pointer(self.partials),
            lo=ints(self.lo, "lo"),
            hi=ints(self.hi, "hi"),
            table_width=width,
            n=n,
            rows=rows,
            heads=heads,
            group=group,
        )

    def dense(self) -> torch.Tensor:
        """float32 [N, R, H, MP], what reference.score returns."""
        n, rows, heads, _, width = self.shape
        out = torch.empty((n, rows, heads, width), dtype=torch.float32, device=self.logits.device)
        args = self._arguments()
        args.dense = pointer(out)
        launch("dense_scores", out.device, args)
        return out


def score(q, landmarks, table, lo, hi, scale: float, inputs: Inputs | None = None) -> Scores:
    """As reference.score, normalised later: see Scores. Also puts the queries into the order of `inputs`."""
    n, rows, heads, group, dim = q.shape
    width = table.shape[1]
    if group > 32:
        raise ValueError(f"score: at most 32 query heads per kv head, got {group}")
    if dim % 8:
        raise ValueError(f"score: head_dim must be a multiple of 8, got {dim}")
    space = workspace(q.device)
    logits, partials = space.scores(n, rows, heads, group, width)
    rows_q = inner_contiguous(q.reshape(n * rows, heads, group, dim) if n else q[:, 0], "q")
    table = contiguous(table, "table", torch.int32)
    # A block for each chunk while that does not fill the device: its warps share the chunk. Then a warp for each, in no
    # more blocks than run at once.
    blocks, multiprocessors = n * heads * chunks(width), _multiprocessors(q.device)
    if blocks > FEW_CHUNKS * multiprocessors:
        resident = 4 if rows * group <= 8 else 3
        blocks = min(resident * multiprocessors, blocks // 4 + 1)
    view = abi.View(
        landmarks=pointer(contiguous(landmarks.codes, "landmarks.codes")),
        scales=pointer(contiguous(landmarks.scales, "landmarks.scales")),
        heads=heads,
        pages=landmarks.codes.shape[0],
        head_dim=dim,
    )
    args = abi.Score(
        q=pointer(rows_q),
        stride_q=rows_q.stride(0),
        q_dtype=abi.DTYPES[rows_q.dtype],
        table=pointer(table),
        table_width=width,
        lo=ints(lo, "lo"),
        hi=ints(hi, "hi"),
        logits=pointer(logits),
        partials=pointer(partials),
        q_out=pointer(inputs.ordered) if inputs is not None and inputs.needs_order else None,
        tickets=pointer(space.tickets),
        scale=scale,
        n=n,
        rows=rows,
        group=group,
        blocks=blocks,
    )
    launch("score", q.device, view, args)
    return Scores(logits, partials, lo, hi, (n, rows, heads, group, width))


def select(scores, table, length, active, shape, budget_pages: int, keep=None, last: Last | None = None) -> Selection:
    """As reference.select. scores: a handle from `score`, or float32 [N, R, H, MP]. keep: its rows may be strided.

    With a handle, the other tensors must be older than that score: they are read while it runs. last: with a
    handle only.
    """
    args = _selecting(scores, length, active, shape, budget_pages, last)
    n, rows, heads, width = args.n, args.rows, args.heads, args.table_width
    if rows == 2 and keep is not None:
        raise ValueError("select: row 1's predictions are kept by predict")
    device = table.device
    table = contiguous(table, "table", torch.int32)
    if table.shape != (n, width):
        raise ValueError(f"select: table must be [{n}, {width}], got {list(table.shape)}")
    pages = torch.empty((n, heads, shape.width), dtype=torch.int32, device=device)
    num_pages = torch.empty(n, dtype=torch.int32, device=device)
    predicted = _keeping(args, keep, budget_pages, device) if rows == 1 else None
    args.table, args.pages, args.num_pages = pointer(table), pointer(pages), pointer(num_pages)
    launch("select", device, args)
    return Selection(pages, num_pages, predicted)


def predict(scores, length, active, shape, pages: int, keep=None, last: Last | None = None) -> torch.Tensor | None:
    """As reference.predict; arguments as those of `select`."""
    device = active.device
    args = _selecting(scores, length, active, shape, pages, last)
    if args.rows != 2:
        raise ValueError(f"predict: scores of two rows a request, got {args.rows}")
    args.row = 1
    predicted = _keeping(args, keep, pages, device)
    launch("select", device, args)
    return predicted


def _selecting(scores, length, active, shape, budget_pages: int, last: Last | None) -> Any:
    """The arguments that selections and predictions have in common."""
    if budget_pages > MAX_BUDGET_PAGES:
        raise ValueError(f"select: at most {MAX_BUDGET_PAGES} pages of budget, got {budget_pages}")
    if isinstance(scores, Scores):
        args = scores._arguments()
    else:
        dense = contiguous(scores, "scores", torch.float32)
        n, rows, heads, width = dense.shape
        args = abi.Select(scores=pointer(dense), table_width=width, n=n, rows=rows, heads=heads, group=1)
    if last is not None:
        if args.logits is None:
            raise ValueError("select: the last selection counts for the scores of a handle alone, got a tensor")
        bits = last.bits
        if bits.dtype != torch.int32 or not bits[0].is_contiguous():
            raise ValueError("select: the last selections must be rows of contiguous int32 [2, H, W]")
        args.last, args.owner, args.bonus = pointer(bits), ints(last.owner, "owner"), pointer(last.bonus)
        args.last_stride, args.last_words = bits.stride(0), bits.shape[3]
    if scores_in_global_memory(active.device, args.table_width):
        size = args.n * args.rows * args.heads * args.table_width
        args.rest = pointer(workspace(active.device).buffer("scores", size, torch.float32))
    args.length, args.active = ints(length, "length"), pointer(active)
    args.page_size, args.sinks, args.window = shape.page_size, shape.sink_pages, shape.window
    args.budget, args.whole, args.width = budget_pages, shape.whole, shape.width
    return args


def _keeping(args: Any, keep, pages: int, device: torch.device) -> torch.Tensor | None:
    """Says where predictions go. Returns their tensor, None when it is a caller's."""
    new = torch.empty((args.n, args.heads, pages), dtype=torch.int32, device=device) if keep is None else None
    predicted = keep[0] if new is None else new
    if predicted.dtype != torch.int32 or predicted.stride(2) != 1 or predicted.shape[2] < pages:
        raise ValueError(f"select: keep must be rows of at least {pages} int32, got {list(predicted.shape)}")
    args.keep = ints(None if keep is None else keep[1], "keep")
    args.keep_stride, args.keep_stride_head = predicted.stride(0), predicted.stride(1)
    args.predicted = pointer(predicted)
    return new


@lru_cache
def scores_in_global_memory(device: torch.device, width: int) -> bool:
    """Whether a row of scores is too wide for shared memory."""
    library = build.library()
    return library.skv_select_shared(width) > library.skv_shared_limit(device.index or 0)


# ---------------------------------------------------------------- the page cache's tables


def _request(view: LayerView, pages, tokens, step, mode: int, shape: tuple[int, int], strides, **fields):
    """A launch's arguments and the fetch that it will fill.

    shape: requests and pages per request and head; strides: of `pages` over requests and heads.
    """
    heads, slots = view.stamp.shape
    n, width = shape
    device = view.stamp.device
    units = torch.empty((max(heads * min(n * width, slots), 1), 4), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    args = abi.Resolve(
        pages=ints(pages, "pages"),
        tokens=ints(tokens, "tokens"),
        stride_n=strides[0],
        stride_head=strides[1],
        units=pointer(units),
        count=pointer(count),
        step=pointer(contiguous(step, "step", torch.int32)),
        n=n,
        width=width,
        mode=mode,
        **fields,
    )
    return args, DeviceFetch(units, count, ahead=mode == PREFETCH, moved=bool(args.move))


def _edit(view: LayerView, request: tuple[Any, DeviceFetch]) -> DeviceFetch:
    args, fetch = request
    device = view.stamp.device
    work = workspace(device).work(view.stamp.shape[0], max(args.n * args.width, 1))
    launch("resolve", device, view_of(view), work, args)
    return fetch


def resolve(
    view: LayerView,
    pages,
    tokens,
    step,
    count: bool = True,
    inputs: Inputs | None = None,
    num_pages=None,
    fetched=None,
    owner=None,
    open_tokens=None,
    waited: bool = True,
    move: bool = False,
):
    """As reference.resolve. Also writes the page table of `inputs`. move: bring the missing units too, so that `gather`
    of the result has nothing to do; by fewer blocks if nobody waits.
    """
    n, heads, width = pages.shape
    if open_tokens is not None and num_pages is None:
        raise ValueError("resolve: open_tokens are those of the last of num_pages, which are missing")
    slots = torch.empty((n, heads, width), dtype=torch.int32, device=pages.device)
    fields: dict[str, Any] = {"slots": pointer(slots), "tally": int(count), "move": int(move), "waited": int(waited)}
    fields |= {"num_pages": ints(num_pages, "num_pages"), "open_tokens": ints(open_tokens, "open_tokens")}
    fields |= _account(fetched, owner)
    if inputs is not None:
        plan = inputs.plan
        fields |= {
            "indptr": pointer(plan.indptr),
            "indices": pointer(plan.indices),
            "last_page": pointer(plan.last_page),
            "last_tokens": ints(inputs.last_tokens, "last_tokens"),
        }
    request = _request(view, pages, tokens, step, RESOLVE, (n, width), (heads * width, width), **fields)
    return slots, _edit(view, request)


def _account(fetched: torch.Tensor | None, owner) -> dict[str, Any]:
    if fetched is None:
        return {}
    return {"fetched": pointer(contiguous(fetched, "fetched", torch.int32)), "owner": ints(owner, "owner")}


def plan_prefetch(plan: Prefetch) -> DeviceFetch:
    """As reference.plan_prefetch; the rows of `pages` may be strided."""
    return _edit(plan.view, _planning(plan))


def plan_prefetches(plans: Sequence[Prefetch]) -> None:
    """As reference.plan_prefetches, in one launch. May run beside other operations on other tables, but those of its
    kind. Raises ValueError unless there are one or two, of layers with as many heads.
    """
    kv_heads = [plan.view.kv.shape[0] for plan in plans]
    if not 0 < len(plans) < abi.JOBS or len(set(kv_heads)) > 1:
        raise ValueError(f"plan_prefetches: one or two of layers with as many heads, got layers with {kv_heads} heads")
    arguments: list[Any] = []
    entries = 1
    for plan in plans:
        request, plan.fetch = _planning(plan)
        arguments += [view_of(plan.view), request]
        entries = max(entries, request.n * request.width)
    arguments += [None] * (2 * (abi.JOBS - 1) - len(arguments))
    device = plans[0].view.kv.device
    launch("plan_prefetches", device, workspace(device).work(kv_heads[0], entries), *arguments)


def _planning(plan: Prefetch):
    """The arguments of a prefetch, and the fetch that it will fill."""
    pages, tokens, index = plan.pages, plan.tokens, plan.index
    n = pages.shape[0] if index is None else index.shape[0]
    # A copy would be gone before its launch.
    if pages.stride(2) != 1 or (tokens is not None and tokens.stride() != pages.stride()):
        raise ValueError(
            f"plan_prefetch: pages of a row must lie together and tokens as they do, got strides {pages.stride()} and "
            f"{None if tokens is None else tokens.stride()}"
        )
    fields: dict[str, Any] = {"cap": pointer(contiguous(plan.cap, "cap", torch.int32))} | _account(plan.fetched, index)
    if plan.table is not None:
        table = contiguous(plan.table, "table", torch.int32)
        fields |= {"table": pointer(table), "table_width": table.shape[1], "closed": ints(plan.closed, "closed")}
    if index is not None:
        fields["index"] = ints(index, "index")
    strides = (pages.stride(0), pages.stride(1))
    return _request(plan.view, pages, tokens, plan.step, PREFETCH, (n, pages.shape[2]), strides, **fields)


def install(view: LayerView, pages, tokens, step) -> DeviceFetch:
    """As reference_prefill.install; pages that are resident after all are left alone."""
    return _edit(view, entering(view, pages, tokens, step))


def entering(view: LayerView, pages, tokens, step):
    """The arguments of an install, and the fetch that it will fill."""
    return _request(view, pages, tokens, step, INSTALL, (1, pages.shape[0]), (0, 0))


def invalidate(view: LayerView, pages) -> None:
    """As reference.invalidate."""
    launch("invalidate", view.stamp.device, view_of(view), ints(pages, "pages"), pages.numel())


def clear(view: LayerView) -> None:
    """As reference.clear."""
    launch("clear", view.stamp.device, view_of(view))


def check(view: LayerView) -> torch.Tensor:
    """Counts violations of the tables' invariants into an int32 [1] on the device."""
    violations = torch.zeros(1, dtype=torch.int32, device=view.stamp.device)
    launch("check", violations.device, view_of(view), pointer(violations))
    return violations


# ---------------------------------------------------------------- data


def gather(view: LayerView, fetch: Fetch, blocks: int | None = None) -> None:
    """As reference.gather, on the current stream. blocks: of the launch; by default what fills the link."""
    if getattr(fetch, "moved", False):
        return
    device = view.kv.device
    capturing_safe(fetch.units, fetch.count)
    unit_bytes = view.kv.stride(1) * view.kv.element_size()
    args = abi.Gather(
        units=pointer(contiguous(fetch.units, "units", torch.int32)),
        count=pointer(contiguous(fetch.count, "count", torch.int32)),
        blocks=blocks or mover_blocks(device, unit_bytes),
        ahead=int(getattr(fetch, "ahead", False)),
    )
    launch("gather", device, view_of(view), workspace(device).work(view.stamp.shape[0], 1), args)


def _token(view: LayerView, k, v, page, slots, offset, active, through: bool) -> Any:
    k, v = inner_contiguous(k, "k", view.kv.dtype), inner_contiguous(v, "v", view.kv.dtype)
    return abi.Append(
        k=pointer(k),
        v=pointer(v),
        stride_k=k.stride(0),
        stride_v=v.stride(0),
        page=ints(page, "page"),
        offset=ints(offset, "offset"),
        active=pointer(active),
        slots=pointer(slots),
        n=k.shape[0],
        through=int(through),
    )


def write_token(
    view: LayerView, k, v, page, slots, offset, active, through: bool = True, inputs: Inputs | None = None
) -> None:
    """As reference.write_token. Also puts the queries of one row a request into the order of `inputs`."""
    if slots is not None:
        slots = contiguous(slots, "slots", torch.int32)
    args = _token(view, k, v, page, slots, offset, active, through)
    if inputs is not None and inputs.needs_order:
        flat = inputs.flat
        if flat.shape[0] != args.n:
            raise ValueError(f"write_token: one row of queries for each of {args.n} requests, got {flat.shape[0]}")
        args.q, args.stride_q, args.group = pointer(flat), flat.stride(0), flat.shape[2]
        args.q_out = pointer(inputs.ordered)
    launch("write_token", k.device, view_of(view), args)


def close_pages(view: LayerView, page, offset, active) -> None:
    """As reference.close_pages."""
    args = abi.Append(page=ints(page, "page"), offset=ints(offset, "offset"), active=pointer(active), n=page.shape[0])
    launch("close_pages", page.device, view_of(view), args)


def append(
    view: LayerView,
    k,
    v,
    page,
    offset,
    active,
    step,
    fetch_now=None,
    through: bool = True,
) -> torch.Tensor:
    """As reference.append, in one launch; the open pages are brought by it, so fetch_now is not called."""
    n, heads = k.shape[:2]
    slots = torch.empty((n, heads), dtype=torch.int32, device=k.device)
    args = _token(view, k, v, page, slots, offset, active, through)
    args.step = pointer(contiguous(step, "step", torch.int32))
    launch("append", k.device, view_of(view), workspace(k.device).work(heads, max(n, 1)), args)
    return slots
