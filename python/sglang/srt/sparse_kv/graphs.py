"""CUDA graphs of the other kinds of step, beside those that SGLang captures for the one the server starts with.

SGLang's runner captures one number of tokens per request. So each variant has a runner of its own, of SGLang's class:
they share its pool of graph memory and its logits buffer, since one forward runs at a time.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.sparse_kv.planner import graph_sizes
from sglang.srt.sparse_kv.runtime import SparseKVRuntime
from sglang.srt.sparse_kv.variants import Variant

logger = logging.getLogger(__name__)


class StepGraphs:
    """Which runner replays which variant; `select` puts it in place for the forward to come.

    model_runner: SGLang's, whose decode runner has captured the variant that the runtime stands at. nbytes: device
    bytes that the others took.
    """

    def __init__(self, model_runner: Any, runtime: SparseKVRuntime) -> None:
        self._model_runner, self._runtime = model_runner, runtime
        self._runners: dict[Variant, Any] = {}
        self._now: Any = None
        self.nbytes = 0
        self._capture()

    def select(self, variant: Variant) -> None:
        """The next forwards are of this variant."""
        if self._model_runner.decode_cuda_graph_runner is not self._now:
            self._capture()  # SGLang has captured anew, after new weights
        # Where there is none, SGLang's own: it refuses a forward of another width, which then runs without a graph.
        self._now = self._runners.get(variant, self._runners[self._runtime.started])
        self._model_runner.decode_cuda_graph_runner = self._now

    def _capture(self) -> None:
        runtime, first = self._runtime, self._model_runner.decode_cuda_graph_runner
        self._now, self._runners, self.nbytes = first, {runtime.started: first}, 0
        if runtime.config.rows != "auto" or not isinstance(first, DecodeCudaGraphRunner):
            return
        captured, most = graph_sizes(first.capture_bs), runtime.cache.slots
        alone = [size for size in captured if size <= runtime.shape.most_alone(most)]
        for variant, sizes in ((Variant.ONE_ROW, alone), (Variant.ALL_PAGES, captured)):
            if sizes and variant not in self._runners:
                self._runners[variant] = self._capture_one(variant, sizes)
        runtime.variant = runtime.started
        if runtime.started is Variant.TWO_ROWS:
            runtime.most_alone = max(alone, default=0)

    def _capture_one(self, variant: Variant, sizes: list[int]) -> DecodeCudaGraphRunner:
        start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self._runtime.variant = variant
        with _sizes(self._model_runner.server_args.cuda_graph_config.decode, sizes):
            runner = DecodeCudaGraphRunner(self._model_runner, speculative_num_draft_tokens=variant.rows)
        taken = free - torch.cuda.mem_get_info()[0]
        self.nbytes += taken
        logger.info(
            "Captured CUDA graphs of %s steps for %s requests: %.1f s, %.2f GB",
            variant.value,
            sizes,
            time.perf_counter() - start,
            taken / 1e9,
        )
        return runner


@contextlib.contextmanager
def _sizes(phase: Any, sizes: list[int]) -> Iterator[None]:
    """Within, SGLang captures these batch sizes."""
    before = phase.bs
    phase.bs = sizes
    try:
        yield
    finally:
        phase.bs = before
