"""The worker that SGLang's scheduler drives: one decode step is one forward of one or two rows per request.

Row 0 holds the token drawn last and gives the next one, by SGLang's own sampler. Row 1 holds a guess at that next
token; what it draws becomes the guess of the following step. Every step commits one token, so lengths are known before
the forward and are published at its start.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sparse_kv import guide, sampling, sizing
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.guide import GuideState, LookAhead, build_guides
from sglang.srt.sparse_kv.request_info import StepInfo, asks
from sglang.srt.sparse_kv.spec_inputs import DualDraftInput, DualVerifyInput, narrow
from sglang.srt.sparse_kv.variants import Chooser, Variant
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils.common import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.sparse_kv.graphs import StepGraphs

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]

# A look-ahead costs one forward per request. Requests that may not generate this many tokens go without, which bounds
# the cost by 3 % of their steps.
LOOK_AHEAD_MIN_TOKENS = 32


class DualDecodeWorker(BaseSpecWorker):
    """Drives the target model alone: there is no draft model.

    State is kept per request slot, in tensors of the size of the slot table. Nothing on the decode path waits for the
    device or loops over requests, except in the step after a prefill (which requests have started) and in batches
    with a grammar, which upstream runs without overlap anyway.
    """

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, ps: Any, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None
        self.server_args = server_args
        self.config = SparseKVConfig.from_dict(server_args._sparse_kv)
        self.device = target_worker.model_runner.device
        self._noise_seeds = sampling.NoiseKeys(self.config.seed, server_args.random_seed)
        self._started: set[int] = set()  # slots prefilled since the last decode step
        self._graphs: StepGraphs | None = None
        self._informed: dict[int, tuple[int, int]] = {}  # slots of requests that want to know what they cost

    # ------------------------------------------------------------------ life

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self.req_to_token = req_to_token_pool.req_to_token
        slots = self.req_to_token.shape[0]
        vocab_size = self._runner.model_config.vocab_size
        self.guide_state = GuideState(slots, vocab_size, self.device, self.runtime.history)
        self.guides = build_guides(self.guide_state)
        self._noise_keys = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._penalty_rates = torch.zeros(slots, 3, dtype=torch.float32, device=self.device)
        self._chooser = Chooser(slots)
        self._offsets = torch.arange(2, dtype=torch.int64, device=self.device)
        self._ones = torch.ones(slots, dtype=torch.int32, device=self.device)
        self._begin_guess, self._end_guess = guide.begin_step, guide.end_step
        self._couple_sampler()

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        if self._ones.is_cuda:
            from sglang.srt.sparse_kv.graphs import StepGraphs

            self._graphs = StepGraphs(self._runner, self.runtime)
            self._additional_graph_memory_usage = {
                "target_verify": self._graphs.nbytes / (1 << 30)
            }  # SGLang counts GiB
            logger.info("Compiling what draws tokens and guesses, for up to half a minute")
        if self._coupled and self._ones.is_cuda:
            sampling.warm_up(self.guide_state.vocab_size, self._ones.device)
        if self.config.most_rows == 2 and self._ones.is_cuda:
            self._begin_guess, self._end_guess = guide.compiled_steps()
            policy = self.runtime.policy
            guide.warm_up(self.guides[policy.guide], self.runtime.gate, policy.prefetch_floor)
        self._runner.attn_backend.serves = True
        sizing.note_start(self.runtime, self._target_worker.graph_memory_usage, self.graph_memory_usage)

    def clear_cache_pool(self) -> None:
        """The scheduler flushed its caches: no request is alive and no page keeps its contents."""
        self._started.clear()
        self._informed.clear()
        self._chooser.reset()
        self.guide_state.reset()
        self.runtime.gate.reset()
        self.runtime.flush()

    def update_weights_from_disk(self, recv_req) -> tuple[bool, str]:
        return True, "There is no draft model to update."

    def update_weights_from_ipc(self, recv_req) -> tuple[bool, str]:
        return True, "There is no draft model to update."

    def __getattr__(self, name: str) -> Any:
        # Upstream asks the worker for what only the target has; the guard ends the recursion before __init__ has run.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    @property
    def _runner(self):
        return self._target_worker.model_runner

    @property
    def runtime(self):
        """Policy, counters and caches, which belong to the KV pool."""
        return self._runner.token_to_kv_pool.runtime

    @property
    def _coupled(self) -> bool:
        return isinstance(self._runner.sampler, sampling.CoupledSampler)

    def _couple_sampler(self) -> None:
        if not self.config.coupled_sampling or self._coupled:
            return
        if type(self._runner.sampler) is Sampler:
            self._runner.sampler = sampling.CoupledSampler()
        else:
            logger.warning(
                "Sampler %s is not SGLang's own and stays: guides of requests with a temperature will often be wrong.",
                type(self._runner.sampler).__name__,
            )

    # ------------------------------------------------------------------ steps

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Publish | None = None
    ) -> GenerationBatchResult:
        """Run one scheduled batch: a prefill as upstream does, or a decode step.

        batch: upstream restores all its fields afterwards, so they are set freely. on_publish: takes the lengths, int64
        [N], that the next step starts from; called once per forward.
        """
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish)

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        slots = batch.req_pool_indices
        self._runner.attn_backend.begin_prefill(slots, batch.prefix_lens, batch.extend_lens, batch.out_cache_loc)
        if self._coupled:
            self._key_noise(batch, slots)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result = self._target_worker.forward_batch_generation(batch)
        # Under the forward: the rest is for decode alone.
        self._admit(batch.reqs, slots)
        self._chooser.start(batch.req_pool_indices_cpu, batch.seq_lens_cpu)
        self._forget_guesses(slots)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = DualDraftInput(result.next_token_ids)
        return result

    def _decode(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        new_seq_lens = batch.seq_lens + 1
        if on_publish is not None:
            # One token is committed whatever is drawn, so the scheduler need not wait for the forward.
            on_publish(new_seq_lens)
        slots, tokens, info = batch.req_pool_indices, batch.spec_info.bonus_tokens, batch.sampling_info
        if self._coupled and not info.is_all_greedy:
            sampling.couple(info, self._noise_keys[slots])

        if self.runtime.history is not None:
            self.runtime.history.append(slots, batch.seq_lens, tokens)
        self._enter(batch)
        guess = guess_mask = None
        if self.rows == 2:
            strategy, floor = self.guides[self.runtime.policy.guide], self.runtime.policy.prefetch_floor
            self._look_ahead(batch, tokens, everywhere=strategy.look_ahead is LookAhead.ALL)
            guess, in_sync = self._begin_guess(strategy, self.runtime.gate, slots, batch.seq_lens, floor)
            guessed = guess >= 0
            # Without a guess, the row's own token: it is in the vocabulary, and the step costs the same.
            forward_batch = self._forward_batch(
                batch, slots, torch.stack([tokens, torch.where(guessed, guess, tokens)], dim=1)
            )
            guess_mask = self._prepare_guess_mask(batch, forward_batch.input_ids)
        else:
            forward_batch = self._forward_batch(batch, slots, tokens[:, None])
        result = self._forward(forward_batch)
        logits = result.logits_output.next_token_logits
        next_tokens = self._sample(result, forward_batch, batch.seq_lens)

        if guess is not None:
            info.grammar_mask = guess_mask() if guess_mask is not None else None
            # The penalties of this step lag the row's own token by one under overlap; so will those of the next.
            uncounted = tokens if batch.enable_overlap else next_tokens
            if sampling.has_penalties(info):
                sampling.advance_penalties(info, uncounted, self._penalty_rates[slots])
            sampler = None if strategy.draws_greedily else self._runner.sampler
            drawn = sampling.draw_guess(logits[1 :: self.rows], info, new_seq_lens, sampler)
            info.grammar_mask = None
            self.runtime.note_guides(guess, next_tokens)
            self._end_guess(strategy, self.runtime.gate, slots, in_sync, guess, next_tokens, drawn)
        recording = self.runtime.recorder is not None
        record = self._record(batch, tokens, forward_batch.input_ids, next_tokens) if recording else None
        self.runtime.end_step(len(batch.reqs), record)
        self.runtime.variant = self.runtime.started

        result.next_token_ids = next_tokens
        if self._informed:
            told = StepInfo(batch.reqs, result, self.runtime.fetched, guess, self._informed)
            result.indexer_topk_output = told if told.rows else None
        result.accept_lens = self._ones[: len(next_tokens)]
        result.speculative_num_draft_tokens = 1  # tokens per request in next_token_ids
        result.new_seq_lens = new_seq_lens
        result.next_draft_input = DualDraftInput(next_tokens)
        return result

    def _record(self, batch: ScheduleBatch, tokens, input_ids, next_tokens) -> dict[str, Any]:
        """What a recording keeps of a step, beside its selections."""
        return {
            "requests": [req.rid for req in batch.reqs],
            "temperatures": [req.sampling_params.temperature for req in batch.reqs],
            "guide": self.runtime.policy.guide if self.rows == 2 else "none",
            "lengths": batch.seq_lens.tolist(),
            "tokens": tokens.tolist(),
            "guesses": input_ids[1::2].tolist() if self.rows == 2 else None,
            "next": next_tokens.tolist(),
        }

    def _forward_batch(self, batch: ScheduleBatch, slots: torch.Tensor, tokens: torch.Tensor) -> ForwardBatch:
        """A forward over tokens, int [N, rows], from the committed length on."""
        rows = tokens.shape[1]
        positions = batch.seq_lens[:, None] + self._offsets[:rows]
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens.reshape(-1).long()
        batch.out_cache_loc = self.req_to_token[slots[:, None], positions].reshape(-1).long()
        batch.spec_info = DualVerifyInput(positions.reshape(-1), rows)
        return ForwardBatch.init_new(batch, self._runner, return_hidden_states_before_norm=False)

    def _forward(self, forward_batch: ForwardBatch) -> GenerationBatchResult:
        return self._target_worker.forward_batch_generation(None, forward_batch=forward_batch, is_verify=True)

    def _sample(
        self, result: GenerationBatchResult, forward_batch: ForwardBatch, positions: torch.Tensor
    ) -> torch.Tensor:
        """Row 0's tokens, int [N], by SGLang's sampler; leaves `result` with row 0's outputs alone."""
        output: LogitsProcessorOutput = result.logits_output
        hidden = output.hidden_states
        output = dataclasses.replace(
            output,
            next_token_logits=output.next_token_logits[:: self.rows].contiguous(),
            # A copy: under overlap it is fetched while the next step's graph writes to the same buffer.
            hidden_states=None if hidden is None else hidden[:: self.rows].clone(),
        )
        row0 = copy.copy(forward_batch)
        row0.forward_mode = ForwardMode.DECODE  # in any other mode the sampler takes positions to be seq_lens - 1
        row0.positions = positions
        next_tokens = self._runner.sample(output, row0)
        if output.next_token_logprobs is not None:
            output.next_token_logprobs = output.next_token_logprobs.view(-1, 1)  # [N, tokens per step]
        result.logits_output = output
        return next_tokens

    # ------------------------------------------------------------------ requests

    def _key_noise(self, batch: ScheduleBatch, slots: torch.Tensor) -> None:
        keys = self._upload([self._noise_seeds.of(req) for req in batch.reqs], torch.int64)
        self._noise_keys[slots] = keys
        sampling.couple(batch.sampling_info, keys)

    def _admit(self, reqs: Sequence[Req], slots: torch.Tensor) -> None:
        """Each request of a prefill owns its slot from here on, whoever had it before."""
        params = [req.sampling_params for req in reqs]
        rates = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params]
        self._penalty_rates[slots] = self._upload(rates, torch.float32)
        # Greedy requests come as top-k 1 at temperature 1.
        looks_up = [p.top_k == 1 or p.temperature < guide.LOOK_UP_BELOW for p in params]
        self.guide_state.looks_up[slots] = self._upload(looks_up, torch.bool)
        for req in reqs:
            self._started.discard(req.req_pool_idx)
            self._informed.pop(req.req_pool_idx, None)
            if asks(req):
                self._informed[req.req_pool_idx] = (0, 0)
            if self.config.most_rows == 2:
                self._plan_look_ahead(req)
            if self.runtime.history is not None:
                # All of the prompt, what the radix cache holds of it too: each chunk again, a few bytes a token.
                self.runtime.history.fill(req.req_pool_idx, self._pinned(np.asarray(req.get_fill_ids()), torch.int32))

    def _upload(self, values: Sequence, dtype: torch.dtype) -> torch.Tensor:
        return self._pinned(values, dtype).to(self.device, non_blocking=True)

    def _pinned(self, values: Sequence | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """On the host, where a copy to the device need not wait; pinned only where there is a GPU."""
        made = torch.as_tensor(values, dtype=dtype)  # torch cannot build a pinned tensor from a numpy array
        return made.pin_memory() if is_pin_memory_available(self.device) else made

    # ------------------------------------------------------------------ one row or two

    @property
    def rows(self) -> int:
        """Rows a request in the step that runs."""
        return self.runtime.rows

    def _enter(self, batch: ScheduleBatch) -> None:
        """Choose the step's variant, on the host from lengths alone."""
        slots, runtime = batch.req_pool_indices_cpu, self.runtime
        if runtime.policy.rows == 2 == runtime.config.rows:
            return  # policy changes between requests only: nothing to remember either
        if runtime.policy.check:
            known = self._chooser.lengths[slots.numpy()].tolist()
            assert known == batch.seq_lens.tolist(), "lengths on the host are wrong"
        runtime.variant = self._chooser.choose(slots, runtime)
        if self._graphs is not None:
            self._graphs.select(runtime.variant)
        if runtime.variant is not Variant.TWO_ROWS:
            self._started.clear()  # their guesses would be old when they are wanted
            return
        places = self._chooser.take_unguessed(slots)
        if places:
            self._forget_guesses(batch.req_pool_indices[self._upload(places, torch.int64)])
            for place in places:
                self._plan_look_ahead(batch.reqs[place])

    def _forget_guesses(self, slots: torch.Tensor) -> None:
        """Nothing is known of what follows the last tokens of these requests. slots: int [N]."""
        self.guide_state.start(slots)
        if self.config.most_rows == 2:
            self.runtime.gate.start(slots)

    def _plan_look_ahead(self, req: Any) -> None:
        limit = req.sampling_params.max_new_tokens
        if limit is None or limit - len(req.output_ids) >= LOOK_AHEAD_MIN_TOKENS:
            self._started.add(req.req_pool_idx)

    # ------------------------------------------------------------------ guides

    def _look_ahead(self, batch: ScheduleBatch, tokens: torch.Tensor, everywhere: bool) -> None:
        """Give the requests that have just started, or all, the guess that this step's row 0 will confirm.

        The forward is that of the step to come, with nothing committed: row 0 writes the same K/V to the same place
        again a moment later, and the pages that it fetches are those that the step itself will want.
        """
        if not everywhere and not self._started:
            return
        rows = [i for i, req in enumerate(batch.reqs) if everywhere or req.req_pool_idx in self._started]
        self._started.clear()
        if not rows:
            return
        slots = batch.req_pool_indices
        # Row 1 is of no use here; the step's own token is a cheap one to give it.
        forward_batch = self._forward_batch(batch, slots, tokens[:, None].expand(-1, self.rows))
        if len(rows) < len(batch.reqs):
            index = self._upload(rows, torch.int64)
            slots = slots[index]
            forward_batch = narrow(forward_batch, rows, index, self.rows)
        logits = self._forward(forward_batch).logits_output.next_token_logits
        info = forward_batch.sampling_info
        info.update_regex_vocab_mask()
        first = logits[:: self.rows].contiguous()
        guess = sampling.draw_guess(first, info, forward_batch.seq_lens, self._runner.sampler)
        info.grammar_mask = None
        self.guide_state.set(slots, guess)
        self.runtime.end_step(len(rows))

    def _prepare_guess_mask(self, batch: ScheduleBatch, input_ids: torch.Tensor) -> Callable | None:
        """Row 1's grammar mask, to be built under the forward; None without grammars. input_ids: int64 [N * 2]."""
        if not batch.has_grammar or not sampling.can_rewind(req.grammar for req in batch.reqs):
            return None
        tree = GrammarTree.from_linear_chain(input_ids.view(-1, 2))
        reqs, info = batch.reqs, batch.sampling_info
        return lambda: sampling.guess_grammar_mask(reqs, tree, info, input_ids.device)
