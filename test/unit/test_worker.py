"""The worker's step, on a model that fits in one line: the next token is a function of token and position."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import sampler as upstream
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.sparse_kv import sampling, sizing, worker
from sglang.srt.sparse_kv.gate import EARLY, LATE, Gate
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.history import TokenHistory
from sglang.srt.sparse_kv.request_info import ASK, KEYS
from sglang.srt.sparse_kv.variants import SETTLE, Variant
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


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
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


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("guide", ["chain", "random", "frozen", "forced", "greedy", "lookup", "resync", "none"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_text_does_not_depend_on_the_guide(guide, overlap):
    rig = Rig(guide, overlap)
    one, two = request(3), request(1, prompt=(8, 8, 1, 40))
    rig.prefill(one)
    for _ in range(5):
        rig.decode()
    rig.prefill(two)
    for _ in range(8):
        rig.decode()
    assert one.output_ids == greedy_text((5, 9, 2), 14)
    assert two.output_ids == greedy_text((8, 8, 1, 40), 9)


@pytest.mark.parametrize("guide", ["random", "greedy", "resync", "none"])
def test_sampled_text_does_not_depend_on_the_guide_either(guide):
    texts = []
    for kind in ("chain", guide):
        rig = Rig(kind)
        requests = [request(2, greedy=False, seed=5), request(4, greedy=False, temperature=0.6)]
        rig.prefill(*requests)
        for _ in range(12):
            rig.decode()
        texts.append([req.output_ids for req in requests])
    assert texts[0] == texts[1]
    assert texts[0][0] != greedy_text((5, 9, 2), 13)


def test_a_seed_gives_the_same_text_in_other_company():
    alone, among = Rig(), Rig()
    first = request(2, greedy=False, seed=5)
    alone.prefill(first)
    second = request(4, greedy=False, seed=5)
    among.prefill(request(1, greedy=False), second)
    for _ in range(9):
        alone.decode()
        among.decode()
    assert first.output_ids == second.output_ids


def test_requests_of_a_batch_have_noise_of_their_own():
    rig = Rig()
    rig.prefill(request(1, seed=5), request(2, seed=6), request(3), request(4, seed=5))
    one, two, three, four = rig.worker._noise_keys[[1, 2, 3, 4]].tolist()
    assert one == four != 0
    assert len({one, two, three, 0}) == 4


# ---------------------------------------------------------------- one row or two


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [1, 2, "auto"])
def test_the_text_does_not_depend_on_the_rows(rows, overlap):
    rig = Rig("resync", overlap, rows="auto")
    rig.runtime.policy.rows = rows
    one, two = request(3), request(1, prompt=(8, 8, 1, 40))
    rig.prefill(one)
    for _ in range(5):
        rig.decode()
    rig.prefill(two)
    for step in range(48):
        rig.runtime.cache.usable = 1 if step == 3 else 10_000
        rig.decode()
    assert one.output_ids == greedy_text((5, 9, 2), 54)
    assert two.output_ids == greedy_text((8, 8, 1, 40), 49)
    ran = [variant for variant in rig.runtime.ran if variant is not Variant.TWO_ROWS]
    assert len(ran) == {1: 53, 2: 0, "auto": 53 - SETTLE}[rows]


def test_sampled_text_does_not_depend_on_the_rows_either():
    texts = []
    for rows in (1, 2):
        rig = Rig(rows="auto")
        rig.runtime.policy.rows = rows
        requests = [request(2, greedy=False, seed=5), request(4, greedy=False, temperature=0.6)]
        rig.prefill(*requests)
        for _ in range(12):
            rig.decode()
        texts.append([req.output_ids for req in requests])
    assert texts[0] == texts[1]


def test_a_second_row_starts_with_right_guesses():
    """After steps of one row each request's guess is computed first, and so is that of one which has just started."""
    rig = Rig(rows="auto")
    rig.prefill(request(3), request(1, prompt=(7, 7)))
    for _ in range(4):
        rig.decode()
    assert rig.runtime.hits == [] and len(rig.target.forwards) == 1 + 4, "one row looks ahead for nobody"
    assert [len(forward.input_ids) for forward in rig.target.forwards[1:]] == [2] * 4
    rig.prefill(request(2, prompt=(4, 9)))
    rig.runtime.cache.usable = 1
    for _ in range(3):
        rig.decode()
    assert rig.runtime.hits == [[True, True, True]] * 3
    assert [len(forward.input_ids) for forward in rig.target.forwards[6:]] == [6] * 4, "one look-ahead, three steps"
    assert rig.runtime.variant is Variant.TWO_ROWS


def test_a_request_about_to_end_starts_without_a_guess():
    rig = Rig(rows="auto")
    rig.prefill(request(3, max_new_tokens=LOOK_AHEAD_MIN_TOKENS - 1), request(1))
    rig.decode()
    rig.runtime.cache.usable = 1
    rig.decode()
    assert rig.runtime.hits == [[None, True]]


def test_guesses_from_before_are_not_believed():
    """What the worker and the gate knew of a request is old once it has run with one row."""
    rig = Rig("chain", rows="auto")
    rig.runtime.policy.rows = 2
    rig.prefill(request(3, max_new_tokens=20))
    for _ in range(3):
        rig.decode()
    assert rig.worker.guide_state.guess[3] >= 0
    rig.runtime.policy.rows = 1
    rig.decode()
    rig.runtime.policy.rows = 2
    rig.decode()
    assert rig.runtime.hits[-1] == [None]


# ---------------------------------------------------------------- guides


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("greedy", [True, False])
def test_the_chain_is_right_from_the_first_step_and_stays_so(overlap, greedy):
    rig = Rig(overlap=overlap)
    rig.prefill(request(3, greedy=greedy), request(1, prompt=(7, 7), greedy=greedy, temperature=0.7))
    for _ in range(10):
        rig.decode()
    assert rig.runtime.hits == [[True, True]] * 10


def upstreams_sampler():
    plain = upstream.Sampler.__new__(upstream.Sampler)
    torch.nn.Module.__init__(plain)
    return plain


@pytest.mark.parametrize("coupled", [True, False])
def test_upstreams_sampler_is_replaced_where_noise_is_shared(monkeypatch, coupled):
    monkeypatch.setattr(sampling.CoupledSampler, "__init__", torch.nn.Module.__init__)
    rig = Rig(coupled_sampling=coupled)
    rig.target.model_runner.sampler = plain = upstreams_sampler()
    rig.worker._couple_sampler()
    assert (rig.target.model_runner.sampler is plain) is not coupled
    assert rig.worker._coupled is coupled


def test_a_sampler_of_somebody_else_stays(caplog):
    rig = Rig()
    rig.target.model_runner.sampler = plain = torch.nn.Identity()
    rig.worker._couple_sampler()
    assert rig.target.model_runner.sampler is plain
    assert "Identity is not SGLang's own" in caplog.text


def test_the_look_ahead_runs_for_started_requests_alone():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.decode()
    rig.prefill(request(1), request(2))
    rig.decode()
    rig.decode()
    sizes = [len(forward.req_pool_indices) for forward in rig.target.forwards]
    assert sizes == [1, 1, 1, 1, 2, 2, 3, 3], "prefill, look-ahead, two steps, prefill, look-ahead, two steps"
    ahead, step = rig.target.forwards[5], rig.target.forwards[6]
    assert ahead.batch_size == 2 and ahead.req_pool_indices.tolist() == [1, 2]
    assert ahead.input_ids[::2].tolist() == step.input_ids[2::2].tolist()
    assert ahead.positions.tolist() == step.positions[2:].tolist()
    assert ahead.out_cache_loc.tolist() == step.out_cache_loc[2:].tolist()
    assert ahead.seq_lens_sum == int(ahead.seq_lens_cpu.sum()) == int(ahead.seq_lens.sum())
    assert ahead.spec_info.positions is ahead.positions
    assert rig.runtime.hits[-2:] == [[True] * 3] * 2
    assert rig.runtime.steps == 6


@pytest.mark.parametrize("limit", [0, LOOK_AHEAD_MIN_TOKENS - 1])
def test_short_requests_start_without_a_guess(limit):
    rig = Rig()
    rig.prefill(request(3, max_new_tokens=limit))
    rig.decode()
    step = rig.target.forwards[-1]
    assert len(rig.target.forwards) == 2, "prefill and step"
    assert step.input_ids[0] == step.input_ids[1], "row 1 needs some token"
    rig.decode()
    assert [hits[0] is None for hits in rig.runtime.hits] == [True, False]


def test_a_slot_that_changes_hands_loses_its_guess():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.running.clear()
    rig.prefill(request(3, prompt=(50, 51), max_new_tokens=4))
    rig.decode()
    assert rig.runtime.hits[-1] == [None]


def test_a_slot_prefilled_but_never_decoded_is_forgotten():
    rig = Rig()
    rig.prefill(request(3))
    rig.running.clear()  # it ended with its first token
    rig.prefill(request(2))
    rig.decode()
    rig.decode()
    assert [len(forward.req_pool_indices) for forward in rig.target.forwards] == [1, 1, 1, 1, 1]
    assert rig.worker._started == set()


def test_requests_without_a_limit_start_with_a_guess():
    rig = Rig()
    rig.prefill(request(3, max_new_tokens=None))
    rig.decode()
    assert rig.runtime.hits == [[True]]


def test_a_short_request_in_a_fresh_slot_is_not_taken_for_its_last_owner():
    rig = Rig()
    rig.prefill(request(3))
    rig.running.clear()
    rig.prefill(request(3, max_new_tokens=4))
    rig.decode()
    assert [len(forward.req_pool_indices) for forward in rig.target.forwards] == [1, 1, 1], "no look-ahead"


def test_the_forced_guide_shows_row_1_right():
    rig = Rig("forced")
    rig.prefill(request(3), request(1, max_new_tokens=4))
    for _ in range(3):
        rig.decode()
    assert len(rig.target.forwards) == 1 + 2 * 3
    rig.runtime.policy.guide = "chain"
    rig.decode()
    assert rig.runtime.hits == [[True, True]] * 4


def test_guides_recover_when_the_policy_changes_back():
    rig = Rig("random")
    rig.prefill(request(3))
    for _ in range(20):
        rig.decode()
    assert sum(hits[0] for hits in rig.runtime.hits) < 5
    rig.runtime.policy.guide = "forced"
    rig.decode()
    rig.runtime.policy.guide = "chain"
    rig.decode()
    assert rig.runtime.hits[-2:] == [[True], [True]]


def test_the_history_is_the_text_so_far():
    rig = Rig("resync")
    one, two = request(3), request(1, prompt=(8, 8, 1, 40))
    rig.prefill(one)
    rig.decode()
    rig.prefill(two)
    rig.decode()
    rig.decode()
    for req in (one, two):
        kept = rig.runtime.history.tokens[req.req_pool_idx]
        assert kept[: req.length].tolist() == req.tokens[: req.length], "all that is committed"
    rig.running.clear()
    retracted = request(2, prompt=one.tokens)
    rig.prefill(retracted)
    assert rig.runtime.history.tokens[2, : len(one.tokens)].tolist() == one.tokens


def test_resync_finds_a_lost_text_in_its_repetition():
    """A chain that was thrown off continues where the text has been before."""
    loop = [5]
    while loop.count(loop[-1]) < 3:  # the model without positions runs into a circle
        loop.append(int(model(torch.tensor(loop[-1:]), torch.tensor([0])).argmax()))
    found = {}
    for guide in ("chain", "resync"):
        rig = Rig(guide)
        rig.target.model = lambda tokens, positions: model(tokens, positions * 0)
        rig.prefill(request(3, prompt=loop))
        for _ in range(3):
            rig.decode()
        rig.worker.guide_state.set(torch.tensor([3]), torch.tensor([VOCAB - 1]), False)
        for _ in range(4):
            rig.decode()
        found[guide] = [hit for (hit,) in rig.runtime.hits]
    assert found["chain"][:4] == [True, True, True, False]
    assert found["resync"] == [True] * 7


def test_short_requests_start_with_a_lookup():
    rig = Rig("resync")
    drawn = greedy_text((0, 44, 5, 9, 2), 1)[0]
    rig.prefill(request(3, prompt=(drawn, 44, 5, 9, 2), max_new_tokens=4))
    rig.decode()
    assert len(rig.target.forwards) == 2, "no look-ahead"
    assert rig.target.forwards[-1].input_ids.tolist() == [drawn, 44]


def test_fetching_ahead_follows_the_guesses():
    """Not in a look-ahead, whose row 1 is fed anything; then by the record, and late layers by the outcome."""
    rig = Rig("chain")
    seen = []
    forward = rig.target.forward_batch_generation

    def watch(batch, forward_batch=None, is_verify=False):
        seen.append(rig.runtime.gate.open[:, 3].tolist())
        return forward(batch, forward_batch, is_verify)

    rig.target.forward_batch_generation = watch
    rig.prefill(request(3))
    for _ in range(3):
        rig.decode()
    assert seen[1:] == [[False, False], [True, False], [True, True], [True, True]], "look-ahead and three steps"
    rig.runtime.policy.guide = "random"
    for _ in range(12):
        rig.decode()
    assert seen[5:7] == [[True, True], [True, False]] and seen[-1] == [False, False]
    rig.runtime.policy.prefetch_floor = 0
    rig.decode()
    rig.decode()
    assert seen[-1] == [True, True]
    rig.worker.clear_cache_pool()
    assert rig.runtime.gate.open.all()


def test_one_row_holds_nothing_back():
    rig = Rig("none")
    rig.prefill(request(3))
    rig.decode()
    assert rig.runtime.gate.open[EARLY].all() and rig.runtime.gate.open[LATE].all()


@pytest.mark.parametrize(
    ("temperature", "greedy", "expected"), [(1.0, True, True), (0.6, False, True), (1.0, False, False)]
)
def test_hot_requests_do_not_look_up(temperature, greedy, expected):
    rig = Rig("resync")
    rig.prefill(request(1), request(3, temperature=temperature, greedy=greedy))
    assert rig.worker.guide_state.looks_up[[1, 3]].tolist() == [True, expected]


def test_a_recording_keeps_steps_and_no_look_ahead():
    rig = Rig("resync")
    rig.runtime.recorder = object()
    req = request(3, greedy=False, temperature=0.7)
    rig.prefill(req)
    rig.decode()
    ahead, step = rig.runtime.records
    assert ahead is None
    assert (step["requests"], step["guide"], step["lengths"]) == (["r3"], "resync", [3])
    assert step["tokens"] + step["next"] == req.output_ids and step["guesses"] == step["next"]


@pytest.mark.parametrize("overlap", [False, True])
def test_row_1_pays_for_the_token_that_the_next_step_will_have_counted(monkeypatch, overlap):
    """Upstream counts a drawn token in the next step, and under overlap, where it comes late, in the one after."""
    charged = []
    monkeypatch.setattr(sampling, "advance_penalties", lambda info, *charge: charged.append(charge))
    rig = Rig(overlap=overlap)
    req = request(3)
    req.sampling_params.frequency_penalty, req.sampling_params.repetition_penalty = 0.25, 1.5
    rig.prefill(request(1), req)
    rig.decode()
    assert not charged, "no penalties in this batch"
    monkeypatch.setattr(sampling, "has_penalties", lambda info: True)
    rig.decode()
    ((tokens, rates),) = charged
    assert int(tokens[1]) == req.output_ids[1 if overlap else 2]
    assert rates.tolist() == [[0.0, 0.0, 1.0], [0.25, 0.0, 1.5]]


# ---------------------------------------------------------------- what upstream sees


def test_the_start_is_measured_once_graphs_are_captured(monkeypatch):
    rig, seen = Rig(), []
    rig.target.graph_memory_usage = {"target_verify": 0.4}
    monkeypatch.setattr(sizing, "note_start", lambda runtime, *graphs: seen.append((runtime, *graphs)))
    rig.worker.init_cuda_graphs()
    ((runtime, theirs, ours),) = seen
    assert runtime is rig.runtime and theirs == {"target_verify": 0.4} and not any(ours.values())


@pytest.mark.parametrize(("guide", "rows"), [("chain", 2), ("none", 1)])
def test_rows_of_a_request_lie_together(guide, rows):
    rig = Rig(guide)
    one, two = request(3, max_new_tokens=4), request(1, prompt=tuple(range(16)), max_new_tokens=4)
    rig.prefill(one, two)
    rig.decode()
    step = rig.target.forwards[-1]
    assert step.forward_mode is ForwardMode.TARGET_VERIFY
    assert step.positions.tolist() == [length + row for length in (3, 16) for row in range(rows)]
    slots = [slot for slot in (3, 1) for _ in range(rows)]
    assert step.out_cache_loc.tolist() == [PAGE + s * TOKENS + p for s, p in zip(slots, step.positions.tolist())]
    assert step.input_ids[::rows].tolist() == [one.output_ids[0], two.output_ids[0]]
    assert step.seq_lens.tolist() == [3, 16], "committed tokens, the step's own left out"
    assert all(value.dtype == torch.int64 for value in (step.input_ids, step.positions, step.out_cache_loc))
    assert step.spec_info.num_tokens_per_req == rows
    assert step.spec_info.capture_hidden_mode is CaptureHiddenMode.NULL
    assert step.spec_info.is_verify_input() and not step.spec_info.is_draft_input()


def test_lengths_are_published_once_and_before_the_forward():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.decode()
    assert rig.published == [(0, [3]), (1, [4]), (3, [5])]


def test_a_step_reports_one_token_a_request():
    rig = Rig()
    rig.prefill(request(3), request(1))
    result = rig.decode()
    assert result.accept_lens.tolist() == [1, 1] and result.accept_lens.dtype == torch.int32
    assert result.speculative_num_draft_tokens == 1
    assert result.next_token_ids.shape == (2,)
    assert result.logits_output.next_token_logits.shape == (2, VOCAB)
    hidden = result.logits_output.hidden_states.tolist()
    assert hidden == [[req.output_ids[0], 3] for req in rig.running], "row 0's alone"


def test_logprobs_are_row_0s():
    rig = Rig()
    rig.prefill(request(3), request(1))
    result = rig.decode(return_logprob=True, top_logprobs_nums=[2, 0], token_ids_logprobs=[None, [7]])
    output = result.logits_output
    tokens = torch.tensor([req.output_ids[0] for req in rig.running])
    expected = torch.log_softmax(model(tokens, torch.tensor([3, 3])), dim=-1)
    assert output.next_token_logprobs.shape == (2, 1)
    torch.testing.assert_close(output.next_token_logprobs, expected.gather(1, result.next_token_ids[:, None].long()))
    torch.testing.assert_close(output.next_token_top_logprobs_val[0], expected[0].topk(2).values)
    torch.testing.assert_close(output.next_token_token_ids_logprobs_val[1], expected[1, [7]])


def test_flushing_forgets_guesses_and_empties_the_cache():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.prefill(request(2))
    rig.worker.clear_cache_pool()
    assert rig.runtime.flushes == 1
    assert (rig.worker.guide_state.guess < 0).all() and not rig.worker._started


def test_new_weights_concern_the_target_alone():
    rig = Rig()
    assert rig.worker.update_weights_from_disk(None)[0]
    assert rig.worker.update_weights_from_ipc(None)[0]
    assert rig.worker.draft_worker is None
    assert rig.worker.enable_overlap == "asked for on the target"
    assert not hasattr(rig.worker, "nothing_has_this")


# ---------------------------------------------------------------- between steps


def draft_input(tokens, indices=None):
    made = DualDraftInput(torch.tensor(tokens))
    if indices is not None:
        made.future_indices = torch.tensor(indices)
    return made


def test_the_batch_carries_last_tokens_without_overlap():
    running, joined = draft_input([1, 2, 3]), draft_input([4])
    running.filter_batch(torch.tensor([2, 0]), [2, 0])
    running.merge_batch(joined)
    assert running.bonus_tokens.tolist() == [3, 1, 4]
    assert not running.is_draft_input() and not running.is_verify_input()


def test_the_relay_carries_last_tokens_under_overlap():
    running, joined = draft_input([1, 2, 3], [7, 8, 9]), draft_input([4], [5])
    running.filter_batch(torch.tensor([2, 0]), [2, 0])
    running.merge_batch(joined)
    assert running.future_indices.tolist() == [9, 7, 5]


# ---------------------------------------------------------------- a request's own figures


def told(rig, result):
    """What SGLang does with a result before it hands out the tokens."""
    if result.indexer_topk_output is not None:
        result.indexer_topk_output.map_device_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))
        rig.runtime.fetched += 100  # the next step is under way
        rig.runtime.fetched -= 100
        result.indexer_topk_output.finalize()


@pytest.mark.parametrize("guide, hits", [("forced", 1), ("none", 0)])
def test_a_request_that_asks_is_told_what_each_token_cost(guide, hits):
    rig = Rig(guide)
    one, two = request(3, asks=True), request(1, prompt=(8, 8, 1, 40))
    assert rig.prefill(one, two).indexer_topk_output is None
    costs = [(5, 2), (0, 0), (7, 1)]
    for missed, ahead in costs:
        rig.runtime.fetched[3] += torch.tensor([missed, ahead], dtype=torch.int32)
        rig.runtime.fetched[1] += 50
        result = rig.decode()
        one.output_ids.pop(), two.output_ids.pop()  # SGLang appends them after it was told
        told(rig, result)
        one.output_ids.append(one.tokens[-1]), two.output_ids.append(two.tokens[-1])
    # The first token came from the prefill.
    assert one.customized_info == dict(zip(KEYS, [[0, 5, 0, 7], [0, 2, 0, 1], [0, hits, hits, hits]]))
    assert all(len(values) == len(one.output_ids) for values in one.customized_info.values())
    assert two.customized_info is None


def test_nobody_asks_and_nothing_is_copied():
    rig = Rig()
    one = request(3, asks=True)
    rig.prefill(one)
    assert rig.decode().indexer_topk_output is not None
    rig.running.clear()
    rig.prefill(request(1))
    assert rig.decode().indexer_topk_output is None
    rig.running.clear()
    rig.prefill(request(3))  # the next owner of the slot
    assert not rig.worker._informed and rig.decode().indexer_topk_output is None


def test_a_finished_request_gets_no_figure_for_the_step_too_many():
    rig = Rig()
    one = request(3, asks=True)
    rig.prefill(one)
    result = rig.decode()
    one.finished = lambda: True
    told(rig, result)
    assert one.customized_info is None


def test_the_place_in_sglangs_results_is_there():
    """Copied beside the tokens, then told: by the source of SGLang's own functions."""
    import inspect

    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    assert "self.indexer_topk_output," in inspect.getsource(GenerationBatchResult.copy_to_cpu)
    source = inspect.getsource(SchedulerBatchResultProcessor.process_batch_result_decode)
    assert source.index("copy_done.synchronize()") < source.index("indexer_topk_output.finalize()")
    assert source.index("indexer_topk_output.finalize()") < source.index("req.output_ids.extend")
