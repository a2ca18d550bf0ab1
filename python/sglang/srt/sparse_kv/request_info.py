"""What one request cost, in its own `meta_info`: for requests that ask for it, token by token.

A request asks with ``"custom_params": {"sparse_kv_info": true}`` among its sampling parameters. The figures are counted
on the device anyway. SGLang's results have a place for what a model's indexer selected: it is copied to the host beside
the tokens and told when the copy is there. No model that is served here has an indexer, so the place is free, and
nothing waits that did not wait before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.utils import GenerationBatchResult

ASK = "sparse_kv_info"
MISSED, AHEAD, GUIDE_HIT = KEYS = ("sparse_kv_missed", "sparse_kv_fetched_ahead", "sparse_kv_guide_hit")


def asks(req: Any) -> bool:
    """Whether a request of SGLang's wants the figures."""
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and bool(params.get(ASK))


class StepInfo:
    """One step's figures on their way to the requests that asked.

    before: by request slot, the figures of `fetched` that are already in some request's lists.
    """

    def __init__(
        self,
        reqs: list[Any],
        result: GenerationBatchResult,
        fetched: torch.Tensor,
        guess: torch.Tensor | None,
        before: dict[int, tuple[int, int]],
    ) -> None:
        """fetched: int32 [slots, 2], misses and units fetched ahead; guess: int64 [N], negative for none."""
        self.rows = [(i, req, req.req_pool_idx) for i, req in enumerate(reqs) if asks(req)]
        self._result, self._fetched, self._guess, self._before = result, fetched, guess, before

    def map_device_tensors(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """SGLang copies its results to the host."""
        # The next step adds to the same tensor, and on the CPU a copy is the tensor itself.
        self._fetched = copy(self._fetched) if self._fetched.is_cuda else self._fetched.clone()
        self._guess = None if self._guess is None else copy(self._guess)

    def finalize(self) -> None:
        """The copies are there, and SGLang is about to hand out the tokens."""
        counts, tokens = self._fetched.tolist(), self._result.next_token_ids.tolist()
        guesses = [-1] * len(tokens) if self._guess is None else self._guess.tolist()
        for i, req, slot in self.rows:
            if req.finished() or req.is_retracted:
                continue  # a step too many, whose token is dropped, too
            missed, ahead = counts[slot]
            before = self._before.get(slot, (0, 0))
            self._before[slot] = (missed, ahead)
            figures = (missed - before[0], ahead - before[1], int(guesses[i] == tokens[i]))
            if req.customized_info is None:
                req.customized_info = {}
            for key, figure in zip(KEYS, figures, strict=True):
                values = req.customized_info.setdefault(key, [])
                # One for each token; those of a prefill cost nothing here.
                values.extend([0] * (len(req.output_ids) - len(values)))
                values.append(figure)
