"""One decode step of one layer: the order of events that every engine and every policy keeps."""

from __future__ import annotations

import contextlib

import torch
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.reference import Selection, own_slots
from sglang.srt.sparse_kv.runtime import SparseKVRuntime
from sglang.srt.sparse_kv.step import DecodeStep, Found


def decode_layer(runtime: SparseKVRuntime, step: DecodeStep, layer: int, q, k, v, scale: float) -> torch.Tensor:
    """All rows of every request through one layer's sparse attention.

    q [N*R, Hq, D] or [N*R, Hq*D], k, v [N*R, H, D], rows of a request adjacent. Returns [N*R, H*G, D]. Row 0's K/V is
    stored; row 1's is used here and stored nowhere. Layers come in order.
    """
    geometry, shape, ops, schedule = runtime.geometry, runtime.shape, runtime.ops, runtime.schedule
    rows, policy = runtime.rows, runtime.policy
    view = runtime.cache.views[layer]
    n = k.shape[0] // rows
    q = q.view(n, rows, geometry.kv_heads, geometry.group, geometry.head_dim)
    k = k.view(n, rows, geometry.kv_heads, geometry.head_dim)
    v = v.view(n, rows, geometry.kv_heads, geometry.head_dim)

    inputs = ops.attend_inputs(q, view, step.last_tokens, shape.width, scale)
    token = k[:, 0], v[:, 0]
    if step.selection is None:
        selection, slots = _select(runtime, step, layer, q, token, scale, inputs)
    else:
        selection, slots = step.selection, _write_to_found(runtime, step, layer, token, scale, inputs)
    own = {}
    own_pages = rows == 2 and policy.guide_attends == "own"
    if runtime.recorder is not None or own_pages:
        runtime.transfer.join_branch()  # predictions may be on their way
    if runtime.recorder is not None:
        runtime.recorder.layer(step, shape, selection.pages, runtime.predicted[step.req, layer])
    row1 = (k[:, 1], v[:, 1]) if rows == 2 else (None, None)
    if own_pages:
        own["own"] = own_slots(view, runtime.predicted[step.req, layer], step.table, step.length, shape)
    if step.selection is None and shape.window > 1:
        with runtime.transfer.branch(first=False):  # only a later step scores it
            ops.close_pages(view, step.open_page, step.offset, step.active)
    out = ops.attend(q, *row1, view, slots, selection.num_pages, step.last_tokens, scale, inputs, **own)
    runtime.transfer.join_branch()
    if policy.check:
        runtime.check_selected(layer, view, step, selection.pages, slots)
    schedule.after_attention(layer, step)
    last = layer == geometry.num_layers - 1
    if step.selection is not None:
        # Nothing waits for it until the next layer's keys are there. On the same page table: this layer's attention,
        # which reads it, comes before.
        with contextlib.nullcontext() if last else runtime.transfer.branch(first=False):
            ops.close_pages(view, step.open_page, step.offset, step.active)
            if not last:
                _find(runtime, step, layer + 1, scale, inputs)
    if last:
        schedule.end_step()
    return out.view(n * rows, geometry.kv_heads * geometry.group, geometry.head_dim)


def _select(runtime: SparseKVRuntime, step: DecodeStep, layer: int, q, token, scale: float, inputs):
    """Selects pages by their scores, finds them, and writes row 0's token, (k, v) of [N, H, D], to the open one among
    them. Returns (Selection, its slots).
    """
    shape, ops, schedule = runtime.shape, runtime.ops, runtime.schedule
    view = runtime.cache.views[layer]
    if shape.window == 1:  # row 1, one position ahead, may score a page that closes now: the token comes first
        schedule.before_layer(layer)
        ops.append(
            view,
            *token,
            step.open_page,
            step.offset,
            step.active,
            runtime.clock,
            lambda target, fetch: schedule.fetch_now(layer, target, fetch),
            through=not runtime.policy.skip_write_through,
        )
    schedule.fetch_ahead(layer, step)
    scores = ops.score(q, view.landmarks, step.table, step.lo, step.hi, scale, inputs)
    keep = (runtime.predicted[:, layer], step.req)
    last = Last(runtime.selected[:, layer], step.req, runtime.hysteresis)
    alone = keep if runtime.rows == 1 else None
    selection = ops.select(scores, step.table, step.length, step.active, shape, shape.budget_pages, alone, last)
    # A fetch must land before its pages are looked up, and has been planned by the prediction that is replaced now.
    schedule.before_layer(layer)
    if runtime.rows == 2:
        # Nothing waits for it until the layer is over: the next one may fetch what it finds, and overwrites the scores.
        with runtime.transfer.branch(first=False):
            ops.predict(scores, step.length, step.active, shape, shape.budget_pages, keep, last)
    slots = _resolve(runtime, step, layer, selection, inputs)
    if shape.window > 1:
        _write(runtime, step, layer, token)
    return selection, slots


def _resolve(runtime: SparseKVRuntime, step: DecodeStep, layer: int, selection: Selection, inputs, waited=True):
    """Slots of a selection, int32 [N, H, C], whose missing units have been brought, the open pages with their committed
    tokens. waited: by the step, not only by the next layer.
    """
    view = runtime.cache.views[layer]
    slots, fetch = runtime.ops.resolve(
        view,
        selection.pages,
        None,
        runtime.clock,
        inputs=inputs,
        num_pages=selection.num_pages,
        fetched=runtime.fetched,
        owner=step.req,
        open_tokens=step.offset,
        waited=waited,
    )
    runtime.schedule.fetch_now(layer, view, fetch)
    return slots


def _write(runtime: SparseKVRuntime, step: DecodeStep, layer: int, token, inputs=None) -> None:
    """Writes row 0's token behind the committed ones of an open page that has been found."""
    through = not runtime.policy.skip_write_through
    view = runtime.cache.views[layer]
    runtime.ops.write_token(view, *token, step.open_page, None, step.offset, step.active, through, inputs)


def _find(runtime: SparseKVRuntime, step: DecodeStep, layer: int, scale: float, inputs) -> None:
    """Finds and brings the pages of a selection that needs no scores before the layer's keys are known."""
    assert step.selection is not None
    runtime.schedule.before_layer(layer)
    slots = _resolve(runtime, step, layer, step.selection, inputs, waited=False)
    step.found = Found(layer, scale, slots)


def _write_to_found(runtime: SparseKVRuntime, step: DecodeStep, layer: int, token, scale: float, inputs):
    """Writes row 0's token where the pages of the selection were found under the layer before. Returns their slots."""
    runtime.transfer.join_branch()
    if layer == 0:  # the selection itself was made on the branch
        _find(runtime, step, layer, scale, inputs)
    found = step.found
    assert found is not None and (found.layer, found.scale) == (layer, scale), "another layer's pages were found"
    _write(runtime, step, layer, token, inputs)
    return found.slots
