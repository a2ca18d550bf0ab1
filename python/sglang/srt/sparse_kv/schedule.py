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
from sglang.srt.sparse_kv.ops.reference import NONE, Fetch, LayerView

if TYPE_CHECKING:
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime
    from sglang.srt.sparse_kv.step import DecodeStep

SCOPED_AHEAD = 2  # scoped layers whose buffers are filling while one computes


class Schedule:
    def __init__(self, runtime: SparseKVRuntime):
        self.runtime = runtime

    def begin_step(self, step: DecodeStep) -> None:
        runtime = self.runtime
        runtime.clock += 1
        runtime.clock_before += 1
        layers = runtime.geometry.num_layers
        scoped = set(runtime.cache.scoped)
        for layer in range(max(0, layers - runtime.config.lookahead), layers):
            if layer not in scoped and runtime.policy.prefetch:
                self._prefetch(layer, step, runtime.predicted[step.req, layer], runtime.clock_before)
        for layer in runtime.cache.scoped[:SCOPED_AHEAD]:
            self._begin_scoped(layer, step)

    def before_layer(self, layer: int) -> None:
        self.runtime.transfer.join(self.runtime.cache.lanes[layer])

    def after_selection(self, layer: int, step: DecodeStep, predicted: torch.Tensor) -> None:
        """predicted: int32 [N, H, K] logical pages, best rank first."""
        runtime = self.runtime
        runtime.predicted[step.req, layer, :, : predicted.shape[2]] = predicted
        early = layer < runtime.geometry.num_layers - runtime.config.lookahead
        if early and layer not in runtime.cache.scoped and runtime.policy.prefetch:
            self._prefetch(layer, step, predicted, runtime.clock)

    def after_attention(self, layer: int, step: DecodeStep) -> None:
        scoped = self.runtime.cache.scoped
        if layer in scoped:
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

    def _prefetch(self, layer: int, step: DecodeStep, logical: torch.Tensor, stamp: torch.Tensor) -> None:
        runtime = self.runtime
        view, lane = runtime.cache.views[layer], runtime.cache.lanes[layer]
        pages = self._physical(step, logical)
        fetch = runtime.ops.plan_prefetch(view, pages, None, stamp, runtime.prefetch_cap_pages)
        runtime.transfer.submit(lane, lambda: runtime.ops.gather(view, fetch))

    def _begin_scoped(self, layer: int, step: DecodeStep) -> None:
        """Empties the layer's ring buffer and starts filling it with forced and predicted pages."""
        runtime = self.runtime
        view, lane = runtime.cache.views[layer], runtime.cache.lanes[layer]
        runtime.ops.clear(view)
        if not runtime.policy.prefetch:
            return
        heads = runtime.geometry.kv_heads
        forced, tokens = step.forced(runtime.shape)  # [N, F]
        forced = forced[:, None, :].expand(-1, heads, -1)
        tokens = tokens[:, None, :].expand(-1, heads, -1)
        predicted = self._physical(step, runtime.predicted[step.req, layer])
        full = torch.full_like(predicted, runtime.geometry.page_size)
        pages, tokens = torch.cat([forced, predicted], 2), torch.cat([tokens, full], 2)
        fetch = runtime.ops.plan_prefetch(view, pages, tokens, runtime.clock_before, pages.shape[2])
        runtime.transfer.submit(lane, lambda: runtime.ops.gather(view, fetch))

    def _physical(self, step: DecodeStep, logical: torch.Tensor) -> torch.Tensor:
        if self.runtime.policy.shuffle_predictions:
            logical = logical.roll(1, 0)
        owned = (logical < step.closed_pages[:, None, None]) & step.active[:, None, None]
        return self.runtime.ops.lookup(step.table, torch.where(owned, logical, NONE))
