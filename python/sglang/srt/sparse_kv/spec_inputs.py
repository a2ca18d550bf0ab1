"""What SGLang's scheduler and runner carry for a step, in the form that they know from speculative decoding."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.sparse_kv import sampling
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


class DualDraftInput(SpecInput):
    """What one step leaves for the next. The relay between steps carries it under overlap, the batch otherwise.

    bonus_tokens: int [N], the tokens drawn last. Guesses are not here: they stay with the worker, by request slot.
    """

    topk_p = None
    topk_index = None
    hidden_states = None

    def __init__(self, bonus_tokens: torch.Tensor) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)  # upstream's enum is closed; the predicates below decide
        self.bonus_tokens = bonus_tokens
        self.future_indices: torch.Tensor | None = None

    def is_draft_input(self) -> bool:
        return False

    def is_verify_input(self) -> bool:
        return False

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: DualDraftInput) -> None:
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


class DualVerifyInput(SpecInput):
    """Describes a forward of `rows` rows per request. positions: int64 [N * rows], request after request."""

    capture_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, positions: torch.Tensor, rows: int) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.draft_token_num = rows
        self.num_tokens_per_req = rows
        self.num_tokens_for_logprob_per_req = rows

    def is_draft_input(self) -> bool:
        return False

    def is_verify_input(self) -> bool:
        return True


def narrow(batch: ForwardBatch, places: Sequence[int], index: torch.Tensor, rows: int) -> ForwardBatch:
    """The same forward, of `rows` rows a request, for some requests. index: their places, int64 on the device."""
    part = copy.copy(batch)
    part.batch_size = len(places)
    for name in ("input_ids", "positions", "out_cache_loc"):
        setattr(part, name, getattr(batch, name).view(-1, rows)[index].reshape(-1))
    for name in ("req_pool_indices", "seq_lens", "orig_seq_lens"):
        value = getattr(batch, name)
        setattr(part, name, None if value is None else value[index])
    if batch.seq_lens_cpu is not None:
        part.seq_lens_cpu = batch.seq_lens_cpu[list(places)]
        part.seq_lens_sum = int(part.seq_lens_cpu.sum())
    for name in ("lora_ids", "rids"):
        value = getattr(batch, name)
        setattr(part, name, None if value is None else [value[place] for place in places])
    part.num_token_non_padded_cpu = len(places) * rows
    part.spec_info = DualVerifyInput(part.positions, rows)
    part.sampling_info = sampling.select(batch.sampling_info, places, index)
    part.return_logprob, part.top_logprobs_nums, part.token_ids_logprobs = False, None, None
    return part
