"""One decode step of one layer: the order of events that every engine and every policy keeps."""

from __future__ import annotations

import contextlib

import torch
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.reference import own_slots
from sglang.srt.sparse_kv.runtime import SparseKVRuntime
from sglang.srt.sparse_kv.step import DecodeStep


def decode_layer(runtime: SparseKVRuntime, step: DecodeStep, layer: int, q, k, v, scale: float) -> torch.Tensor:
    """All rows of every request through one layer's sparse attention.

    q [N*R, Hq, D] or [N*R, Hq*D], k, v [N*R, H, D], rows of a request adjacent. Returns [N*R, H*G, D]. Row 0's K/V is
    stored; row 1's is used here and stored nowhere.
    """
    geometry, shape, ops, schedule = runtime.geometry, runtime.shape, runtime.ops, runtime.schedule
    rows, policy = runtime.rows, runtime.policy
    view = runtime.cache.views[layer]
    n = k.shape[0] // rows
    q = q.view(n, rows, geometry.kv_heads, geometry.group, geometry.head_dim)
    k = k.view(n, rows, geometry.kv_heads, geometry.head_dim)
    v = v.view(n, rows, geometry.kv_heads, geometry.head_dim)

    inputs = ops.attend_inputs(q, view, step.last_tokens, shape.width, scale, scored=step.selection is None)
    # A page that closes now is nobody's candidate yet, so scores need not wait for its landmark; unless a window of one
    # token lets row 1, one position ahead, look at it.
    beside = step.selection is None and shape.window > 1
    with runtime.transfer.branch() if beside else contextlib.nullcontext():
        schedule.before_layer(layer)  # a fetch of the open page must land before row 0 is written behind it
        due = schedule.due(layer, step)
        ops.append(
            view,
            k[:, 0],
            v[:, 0],
            step.open_page,
            step.offset,
            step.active,
            runtime.clock,
            lambda target, fetch: schedule.fetch_now(layer, target, fetch),
            through=not policy.skip_write_through,
            beside=[plan for _, plan in due],
        )
        schedule.start(due)
    selection = step.selection
    if selection is None:
        scores = ops.score(q, view.landmarks, step.table, step.lo, step.hi, scale, inputs)
        keep = (runtime.predicted[:, layer], step.req)
        last = Last(runtime.selected[:, layer], step.req, runtime.hysteresis)
        selection = ops.select(scores, step.table, step.length, step.active, shape, shape.budget_pages, keep, last)
    runtime.transfer.join_branch()
    slots, fetch = ops.resolve(
        view,
        selection.pages,
        None,
        runtime.clock,
        inputs=inputs,
        num_pages=selection.num_pages,
        fetched=runtime.fetched,
        owner=step.req,
    )
    schedule.fetch_now(layer, view, fetch)
    if runtime.recorder is not None:
        runtime.recorder.layer(step, shape, selection.pages, runtime.predicted[step.req, layer])
    row1 = (k[:, 1], v[:, 1]) if rows == 2 else (None, None)
    own = {}
    if rows == 2 and policy.guide_attends == "own":
        own["own"] = own_slots(view, runtime.predicted[step.req, layer], step.table, step.length, shape)
    out = ops.attend(q, *row1, view, slots, selection.num_pages, step.last_tokens, scale, inputs, **own)
    if policy.check:
        runtime.check_selected(layer, view, step, selection.pages, slots)
    schedule.after_attention(layer, step)
    if layer == geometry.num_layers - 1:
        schedule.end_step()
    return out.view(n * rows, geometry.kv_heads * geometry.group, geometry.head_dim)
