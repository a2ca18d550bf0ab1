"""The worker on a model that fits in one line: the next token is a function of token and position."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch
from sglang.srt.layers import sampler as upstream
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.sparse_kv import sampling, worker
from sglang.srt.sparse_kv.gate import Gate
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.history import TokenHistory
from sglang.srt.sparse_kv.request_info import ASK
from sglang.srt.sparse_kv.variants import Variant
from sglang.srt.sparse_kv.worker import LOOK_AHEAD_MIN_TOKENS, DualDecodeWorker, DualDraftInput

VOCAB, SLOTS, TOKENS, PAGE = 97, 6, 128, 16
LONG = 10 * LOOK_AHEAD_MIN_TOKENS


def model(tokens, positions):
    """float32 [T, VOCAB] logits; every token has a successor of its own, and plausible others."""
    best = (tokens * 31 + positions * 7 + 11) % VOCAB
    spread = (tokens[:, None] * 13 + torch.arange(VOCAB) * positions[:, None]) % VOCAB
    logits = torch.sin(spread.float())
    return logits.scatter_add_(1, best[:, None], torch.full((len(tokens), 1), 2.0))


class Runtime:
    def __init__(self):
        self.policy = SimpleNamespace(guide="chain", prefetch_floor=0.25, rows=2, skip_scores=True, check=True)
        self.config = None  # of the worker
        self.variant = self.started = Variant.TWO_ROWS
        self.shape = SelectionShape.from_tokens(PAGE, 2 * PAGE, PAGE, PAGE)
        self.cache = SimpleNamespace(usable=10_000, scoped=[])
        self.most_alone = None
        self.ran = []
        self.gate = Gate(SLOTS, "cpu")
        self.history = TokenHistory(SLOTS, TOKENS, "cpu")
        self.hits, self.steps, self.flushes = [], 0, 0
        self.recorder, self.records = None, []
        self.fetched = torch.zeros(SLOTS, 2, dtype=torch.int32)

    def note_guides(self, guess, tokens):
        pairs = zip(guess.tolist(), tokens.tolist(), strict=True)
        self.hits.append([guessed == token if guessed >= 0 else None for guessed, token in pairs])

    @property
    def rows(self):
        return self.variant.rows

    def end_step(self, requests, record=None):
        self.ran.append(self.variant)
        self.steps += 1
        self.stored = [*getattr(self, "stored", []), requests]
        self.records.append(record)

    def flush(self):
        self.flushes += 1


def make_sampler():
    # Upstream's constructor wants a process group, which only synchronising ranks needs.
    made = sampling.CoupledSampler.__new__(sampling.CoupledSampler)
    torch.nn.Module.__init__(made)
    made.enable_deterministic = made.use_ascend_backend = made.use_log_softmax_logprob = False
    made.rl_on_policy_target = None
    made.output_logprob_processor = OutputLogprobProcessor()
    made._sync_token_ids_across_tp = lambda *args: None
    return made


class Runner:
    device = "cpu"

    def __init__(self):
        self.model_config = SimpleNamespace(vocab_size=VOCAB)
        self.token_to_kv_pool = SimpleNamespace(runtime=Runtime())
        self.sampler = make_sampler()
        self.begun = []  # arguments of each prefill that was sent ahead of its forward
        self.attn_backend = SimpleNamespace(begin_prefill=lambda *prefill: self.begun.append(prefill))

    def sample(self, output, batch):
        """As upstream's, whose positions depend on the mode."""
        assert batch.forward_mode.is_decode() or batch.forward_mode is ForwardMode.EXTEND
        batch.sampling_info.update_regex_vocab_mask()
        batch.sampling_info.apply_logits_bias(output.next_token_logits)
        positions = batch.positions if batch.forward_mode.is_decode() else batch.seq_lens - 1
        return self.sampler(
            output,
            batch.sampling_info,
            batch.return_logprob,
            batch.top_logprobs_nums,
            batch.token_ids_logprobs,
            positions,
        )


class Target:
    """Upstream's worker: runs forwards and keeps a list of them."""

    def __init__(self):
        self.model_runner = Runner()
        self.model = model
        self.forwards = []
        self.enable_overlap = "asked for on the target"

    def forward_batch_generation(self, batch, forward_batch=None, is_verify=False):
        forward = batch if batch is not None else forward_batch
        self.forwards.append(forward)
        if is_verify:
            assert forward.forward_mode is ForwardMode.TARGET_VERIFY
            logits = self.model(forward.input_ids, forward.positions)
            hidden = torch.stack([forward.input_ids, forward.positions], dim=1)
            return GenerationBatchResult(LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden))
        output = LogitsProcessorOutput(next_token_logits=self.model(batch.input_ids, batch.seq_lens - 1))
        return GenerationBatchResult(output, next_token_ids=self.model_runner.sample(output, batch))


class Rig:
    """What the scheduler does with the worker: lengths, last tokens and slots of running requests."""

    def __init__(self, guide="chain", overlap=False, rows=2, **config):
        config = {"guide": "none" if guide == "none" else "chain", "rows": rows, **config}
        args = SimpleNamespace(_sparse_kv=config, random_seed=3)
        self.target = Target()
        self.worker = DualDecodeWorker(args, 0, None, 0, self.target)
        table = torch.arange(SLOTS * TOKENS, dtype=torch.int32).view(SLOTS, TOKENS) + PAGE
        self.worker.alloc_memory_pool(req_to_token_pool=SimpleNamespace(req_to_token=table))
        self.runtime = runtime = self.worker.runtime
        runtime.config = started = self.worker.config
        runtime.policy.rows = rows if rows == "auto" else started.most_rows
        runtime.policy.skip_scores = rows == "auto"
        if guide == "none":
            runtime.variant = runtime.started = Variant.ONE_ROW
        self.runtime.policy.guide = "chain" if guide == "none" else guide
        self.overlap = overlap
        self.running: list = []
        self.published = []

    def batch(self, requests, mode, **fields):
        info = SamplingBatchInfo(
            temperatures=torch.tensor([[req.temperature] for req in requests]),
            top_ps=torch.ones(len(requests)),
            top_ks=torch.tensor([req.top_k for req in requests], dtype=torch.int32),
            min_ps=torch.zeros(len(requests)),
            is_all_greedy=all(req.top_k == 1 for req in requests),
            is_any_greedy=any(req.top_k == 1 for req in requests),
            need_top_p_sampling=False,
            need_top_k_sampling=any(req.top_k != TOP_K_ALL for req in requests),
            need_min_p_sampling=False,
            vocab_size=VOCAB,
            device="cpu",
        )
        return SimpleNamespace(
            forward_mode=mode,
            reqs=requests,
            req_pool_indices=torch.tensor([req.req_pool_idx for req in requests]),
            seq_lens=torch.tensor([req.length for req in requests]),
            req_pool_indices_cpu=torch.tensor([req.req_pool_idx for req in requests]),
            seq_lens_cpu=torch.tensor([req.length for req in requests]),
            seq_lens_sum=None,
            orig_seq_lens=None,
            sampling_info=info,
            has_grammar=False,
            enable_overlap=self.overlap,
            return_logprob=False,
            top_logprobs_nums=None,
            token_ids_logprobs=None,
            lora_ids=None,
            rids=None,
            **fields,
        )

    def publish(self, seq_lens):
        self.published.append((len(self.target.forwards), seq_lens.tolist()))

    def prefill(self, *requests):
        batch = self.batch(list(requests), ForwardMode.EXTEND)
        batch.input_ids = torch.tensor([req.tokens[-1] for req in requests])
        batch.prefix_lens, batch.extend_lens = [0] * len(requests), [req.length for req in requests]
        batch.out_cache_loc = torch.zeros(sum(batch.extend_lens), dtype=torch.int64)
        result = self.worker.forward_batch_generation(batch, self.publish)
        self._commit(requests, result, new_lengths=[req.length for req in requests])
        self.running += requests
        return result

    def decode(self, **fields):
        batch = self.batch(list(self.running), ForwardMode.DECODE)
        batch.__dict__.update(fields)
        batch.spec_info = DualDraftInput(torch.tensor([req.tokens[-1] for req in self.running]))
        result = self.worker.forward_batch_generation(batch, self.publish)
        self._commit(self.running, result, new_lengths=[req.length + 1 for req in self.running])
        return result

    def _commit(self, requests, result, new_lengths):
        assert result.new_seq_lens.tolist() == new_lengths
        assert self.published[-1][1] == new_lengths
        assert torch.equal(result.next_draft_input.bonus_tokens, result.next_token_ids)
        for req, token, length in zip(requests, result.next_token_ids.tolist(), new_lengths):
            req.tokens.append(token)
            req.output_ids.append(token)
            req.length = length


def stand_in(monkeypatch):
    """For what SGLang's forward batch and sampler ask the running server."""

    def init_new(batch, runner, return_hidden_states_before_norm):
        fields = dict(vars(batch), positions=batch.spec_info.positions, batch_size=len(batch.reqs))
        return SimpleNamespace(**fields)

    context = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(worker, "ForwardBatch", SimpleNamespace(init_new=init_new))
    monkeypatch.setattr(sampling, "get_exec", lambda: context)
    monkeypatch.setattr(upstream, "get_exec", lambda: context)


def request(slot, prompt=(5, 9, 2), temperature=1.0, greedy=True, seed=None, max_new_tokens=LONG, asks=False):
    sampling_params = SimpleNamespace(
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        sampling_seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=1 if greedy else TOP_K_ALL,
        custom_params={ASK: True} if asks else None,
    )
    tokens = list(prompt)
    return SimpleNamespace(
        req_pool_idx=slot,
        rid=f"r{slot}",
        tokens=tokens,
        get_fill_ids=lambda: array("q", tokens),
        output_ids=[],
        length=len(prompt),
        temperature=temperature,
        top_k=1 if greedy else TOP_K_ALL,
        sampling_params=sampling_params,
        grammar=None,
        customized_info=None,
        is_retracted=False,
        finished=lambda: False,
    )


def greedy_text(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor(tokens[-1:]), torch.tensor([len(tokens) - 1]))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
