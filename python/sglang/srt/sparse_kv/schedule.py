"""What is fetched when.

Resident layers: the guide row of step t predicts, layer by layer, the selection of step t+1. All but the last
`lookahead` layers fetch it at once, under the rest of step t; the last ones wait for the start of step t+1, where
every layer before them is time to hide in. Scoped layers: layer j+2's buffer is filled when layer j's attention ends.
What the true selection still misses is fetched at once and waited for.

Entries planned before a layer's true selection carry the previous step's stamp: that selection may evict them if it
must. Those planned after it carry the current one and are safe until the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.sparse_kv.ops.reference import Fetch, LayerView

if TYPE_CHECKING:
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime
    from sglang.srt.sparse_kv.step import DecodeStep

SCOPED_AHEAD = 2  # scoped layers whose buffers are filling while one computes


class Schedule:
    def __init__(self, runtime: SparseKVRuntime):
        self.runtime = runtime

    def begin_step(self, step: DecodeStep) -> None:
        runtime = self.runtime
        runtime.tick()
        layers = runtime.geometry.num_layers
        scoped = set(runtime.cache.scoped)
        for layer in range(max(0, layers - runtime.config.lookahead), layers):
            if layer not in scoped:
                self._prefetch(layer, step, runtime.predicted[:, layer], step.req, runtime.clock_before)
        for layer in runtime.cache.scoped[:SCOPED_AHEAD]:
            self._begin_scoped(layer, step)

    def before_layer(self, layer: int) -> None:
        self.runtime.transfer.join(self.runtime.cache.lanes[layer])

    def after_selection(self, layer: int, step: DecodeStep, predicted: torch.Tensor) -> None:
        """predicted: int32 [N, H, K] logical pages, best rank first."""
        runtime = self.runtime
        if layer < runtime.geometry.num_layers - runtime.config.lookahead and layer not in runtime.cache.scoped:
            self._prefetch(layer, step, predicted, None, runtime.clock)
        else:
            runtime.predicted[step.req, layer, :, : predicted.shape[2]] = predicted

    def after_attention(self, layer: int, step: DecodeStep) -> None:
        scoped = self.runtime.cache.scoped
        if layer in scoped:
            # Here rather than when the next layer begins: what was fetched in vain is counted to the layer it was for.
            self.runtime.ops.clear(self.runtime.cache.views[layer])
            following = scoped.index(layer) + SCOPED_AHEAD
            if following < len(scoped):
                self._begin_scoped(scoped[following], step)

    def end_step(self) -> None:
        self.runtime.transfer.join_all()

    def fetch_now(self, layer: int, view: LayerView, fetch: Fetch) -> None:
        """Fetches misses on the critical path."""
        runtime = self.runtime
        lane = runtime.cache.lanes[layer]
        runtime.transfer.submit(lane, lambda: runtime.ops.gather(view, fetch), urgent=True)
        runtime.transfer.join(lane)

    def _prefetch(self, layer: int, step: DecodeStep, logical: torch.Tensor, index, stamp: torch.Tensor) -> None:
        """logical: int32 [N, H, K], or [slots, H, K] with index int [N]."""
        runtime = self.runtime
        if runtime.policy.shuffle_predictions:
            logical, index = (logical.roll(1, 0), None) if index is None else (logical, index.roll(1, 0))
        view = runtime.cache.views[layer]
        fetch = runtime.ops.plan_prefetch(
            view, logical, None, stamp, runtime.prefetch_cap, step.table, step.closed_pages, index
        )
        runtime.transfer.submit(runtime.cache.lanes[layer], lambda: runtime.ops.gather(view, fetch))

    def _begin_scoped(self, layer: int, step: DecodeStep) -> None:
        """Starts filling the layer's ring buffer, left empty by the layer before: forced pages, then predicted."""
        runtime = self.runtime
        view = runtime.cache.views[layer]
        pages, tokens = step.forced(runtime.shape)  # [N, F]
        heads = runtime.geometry.kv_heads
        pages, tokens = (t[:, None, :].expand(-1, heads, -1).contiguous() for t in (pages, tokens))
        forced = runtime.ops.plan_prefetch(view, pages, tokens, runtime.clock_before, runtime.forced_cap)
        runtime.transfer.submit(runtime.cache.lanes[layer], lambda: runtime.ops.gather(view, forced))
        # These are in flight while the predicted are planned; they share one stamp, so none takes another's slot.
        self._prefetch(layer, step, runtime.predicted[:, layer], step.req, runtime.clock_before)
