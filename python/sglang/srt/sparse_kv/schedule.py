"""What is fetched when.

Resident layers: the guide row of step t predicts, layer by layer, the selection of step t+1. The first layers, which
have none before them to hide in, fetch it early, under the rest of step t; the last ones late, under the first layers
of step t+1. How many are late the plan says, by the number of requests (`lookahead.py`). Tables are edited beside
another layer, which does not wait for that. Scoped layers: layer j+2's buffer is filled when layer j's attention ends.
What the true selection still misses is fetched at once and waited for.

A step of one row that was chosen because all pages fit the cache fetches nothing ahead (`variants.py`).

For requests whose guesses are likely wrong, resident layers fetch nothing ahead (`gate.py`).

Entries planned before a layer's true selection carry the previous step's stamp: that selection may evict them if it
must. Those planned after it carry the current one and are safe until the next step.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.sparse_kv.gate import EARLY, LATE
from sglang.srt.sparse_kv.lookahead import SCOPED_AHEAD
from sglang.srt.sparse_kv.ops.reference import Fetch, LayerView, Prefetch
from sglang.srt.sparse_kv.variants import Variant

if TYPE_CHECKING:
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime
    from sglang.srt.sparse_kv.step import DecodeStep


class Schedule:
    def __init__(self, runtime: SparseKVRuntime):
        self.runtime = runtime
        self._closed: torch.Tensor | None = None  # int64 [2, N], as step.closed_pages; 0 where the gate is shut
        self._first_late = 0  # the first layer whose prefetch waits for the next step; 0: all wait

    def begin_step(self, step: DecodeStep) -> None:
        runtime = self.runtime
        runtime.tick()
        if runtime.variant is Variant.ALL_PAGES:
            with runtime.transfer.branch():  # until the first layer needs it
                step.selection = step.every_page(runtime.shape, runtime.geometry.kv_heads)
        if not runtime.fetches_ahead:
            return
        self._closed = torch.where(runtime.gate.open[:, step.req], step.closed_pages, 0)
        layers, late = runtime.geometry.num_layers, runtime.plan.lookahead
        self._first_late = layers - late[min(len(step.req), len(late)) - 1]  # graphs fix the number of requests
        if self._first_late == 0:
            for layer in range(layers):
                if layer not in runtime.cache.scoped:
                    self._prefetch(layer, step)  # each beside its own layer would be too late
        for layer in runtime.cache.scoped[:SCOPED_AHEAD]:
            self._begin_scoped(layer, step)

    def before_layer(self, layer: int) -> None:
        self.runtime.transfer.join(self.runtime.cache.lanes[layer])

    def fetch_ahead(self, layer: int, step: DecodeStep) -> None:
        """Plans and starts what is due beside `layer`: a late prefetch for this step, then that of the layer before it
        for the next.
        """
        runtime = self.runtime
        if not runtime.fetches_ahead:
            return
        due = []
        late = self._first_late + layer
        if layer < late < runtime.geometry.num_layers and late not in runtime.cache.scoped:
            due.append((late, runtime.clock_before, LATE))
        if 0 < layer <= self._first_late and layer - 1 not in runtime.cache.scoped:
            due.append((layer - 1, runtime.clock, EARLY))
        if not due:
            return
        # Other layers' tables: nothing waits for them but their fetches, which are over before those layers look their
        # pages up. But a selection of one row is a prediction, too, and takes the place of one that a plan reads before
        # that look-up: such plans are over with this layer.
        with runtime.transfer.branch(first=False) if runtime.rows == 1 else runtime.transfer.along():
            plans = [self._plan(other, step, stamp, when) for other, stamp, when in due]
            runtime.ops.plan_prefetches(plans)
            for (other, *_), plan in zip(due, plans, strict=True):
                assert plan.fetch is not None
                self._submit(other, plan.view, plan.fetch)

    def after_attention(self, layer: int, step: DecodeStep) -> None:
        scoped = self.runtime.cache.scoped
        if layer in scoped:
            # Here rather than when the next layer begins: what was fetched in vain is counted to the layer it was for.
            self.runtime.ops.clear(self.runtime.cache.views[layer])
            following = scoped.index(layer) + SCOPED_AHEAD
            if following < len(scoped) and self.runtime.fetches_ahead:
                self._begin_scoped(scoped[following], step)

    def end_step(self) -> None:
        self.runtime.transfer.join_all()

    def fetch_now(self, layer: int, view: LayerView, fetch: Fetch) -> None:
        """Fetches misses on the critical path. Kernels that do so note how long it takes; here a clock does."""
        runtime = self.runtime
        lane, begin = runtime.cache.lanes[layer], time.perf_counter_ns()
        runtime.transfer.submit(lane, partial(runtime.ops.gather, view, fetch), urgent=True)
        runtime.transfer.join(lane)
        if runtime.transfer.blocks and bool(fetch.units[: int(fetch.count), 3].any()):  # a page begun has no tokens yet
            view.stalled += time.perf_counter_ns() - begin

    def _plan(self, layer: int, step: DecodeStep, stamp: torch.Tensor, when: int) -> Prefetch:
        runtime = self.runtime
        assert self._closed is not None, "begin_step comes first"
        # A buffer that was emptied has use for any prediction.
        closed = step.closed_pages if layer in runtime.cache.scoped else self._closed[when]
        index = step.req.roll(1, 0) if runtime.policy.shuffle_predictions else step.req
        view, predicted = runtime.cache.views[layer], runtime.predicted[:, layer]
        return Prefetch(view, predicted, stamp, runtime.prefetch_cap, step.table, closed, index, runtime.fetched)

    def _prefetch(self, layer: int, step: DecodeStep) -> None:
        """Fetches what the step before predicted for this one."""
        plan = self._plan(layer, step, self.runtime.clock_before, LATE)
        self._submit(layer, plan.view, self.runtime.ops.plan_prefetch(plan))

    def _submit(self, layer: int, view: LayerView, fetch: Fetch) -> None:
        runtime = self.runtime
        runtime.transfer.submit(runtime.cache.lanes[layer], partial(runtime.ops.gather, view, fetch))

    def _begin_scoped(self, layer: int, step: DecodeStep) -> None:
        """Starts filling the layer's ring buffer, left empty by the layer before: forced pages, then predicted."""
        runtime = self.runtime
        view = runtime.cache.views[layer]
        pages, tokens = step.forced(runtime.shape)  # [N, F]
        heads = runtime.geometry.kv_heads
        pages, tokens = (t[:, None, :].expand(-1, heads, -1).contiguous() for t in (pages, tokens))
        forced = Prefetch(view, pages, runtime.clock_before, runtime.forced_cap, tokens=tokens)
        self._submit(layer, view, runtime.ops.plan_prefetch(forced))
        # These are in flight while the predicted are planned; they share one stamp, so none takes another's slot.
        self._prefetch(layer, step)
