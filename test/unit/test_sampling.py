"""Shared noise draws from upstream's distribution, and both rows draw alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.layers import sampler as upstream
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.sparse_kv import sampling
from sglang.srt.speculative.spec_utils import GrammarTree

MASK = 2**64 - 1


@pytest.fixture(autouse=True)
def torch_filters(monkeypatch):
    context = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sampling, "get_exec", lambda: context)
    monkeypatch.setattr(upstream, "get_exec", lambda: context)


def batch_info(rows, temperature=1.0, top_p=1.0, top_k=TOP_K_ALL, min_p=0.0, vocab=50, **more):
    def per_row(value, dtype=torch.float32):
        return torch.tensor([value] * rows if not isinstance(value, list) else value, dtype=dtype)

    top_ks, top_ps, min_ps = per_row(top_k, torch.int32), per_row(top_p), per_row(min_p)
    return SamplingBatchInfo(
        temperatures=per_row(temperature).view(-1, 1),
        top_ps=top_ps,
        top_ks=top_ks,
        min_ps=min_ps,
        is_all_greedy=bool((top_ks <= 1).all()),
        is_any_greedy=bool((top_ks <= 1).any()),
        need_top_p_sampling=bool((top_ps != 1).any()),
        need_top_k_sampling=bool((top_ks != TOP_K_ALL).any()),
        need_min_p_sampling=bool((min_ps > 0).any()),
        vocab_size=vocab,
        device="cpu",
        **more,
    )


def coupled_sampler():
    # Upstream's constructor wants a process group, which only synchronising ranks needs.
    sampler = sampling.CoupledSampler.__new__(sampling.CoupledSampler)
    torch.nn.Module.__init__(sampler)
    return sampler


def chi_square(counts, probs):
    """How far counts are from probs, in standard deviations of the statistic; categories with few hits are merged."""
    expected = probs.double() * counts.sum()
    order = expected.argsort(descending=True)
    counts, expected = counts.double()[order], expected[order]
    big = int((expected >= 10).sum())
    counts = torch.cat([counts[:big], counts[big:].sum()[None]])
    expected = torch.cat([expected[:big], expected[big:].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


# ---------------------------------------------------------------- noise


def splitmix(state):
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


@pytest.mark.parametrize("value", [0, 1, -1, 2**63 - 1, -(2**63), 1234567890123])
def test_mix_is_splitmix64(value):
    mixed = int(sampling.mix(torch.tensor(value)))
    assert mixed & MASK == splitmix((value - 0x9E3779B97F4A7C15) & MASK)


def test_noise_is_exponential():
    keys = torch.arange(40)
    noise = sampling.exponential(keys, keys * 7, torch.arange(5000)).double().flatten()
    assert noise.min() > 0 and noise.max() < 20
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    cumulative = 1 - torch.exp(-noise.sort().values)
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert float((cumulative - steps).abs().max()) < 1.95 / len(noise) ** 0.5


def test_small_noise_keeps_its_precision():
    noise = sampling.exponential(torch.arange(400), torch.zeros(400), torch.arange(10_000)).flatten()
    small = noise[noise < 1e-4]
    assert abs(len(small) / len(noise) / 1e-4 - 1) < 0.2
    assert len(small.unique()) == len(small), "equal small values would make rare tokens tie"


@pytest.mark.parametrize("which", ["keys", "positions", "tokens"])
def test_noise_streams_do_not_resemble_each_other(which):
    base = torch.arange(200)
    one = sampling.exponential(base, base + 10, torch.arange(500)).flatten()
    shift = {name: int(name == which) for name in ("keys", "positions", "tokens")}
    other = sampling.exponential(
        base + shift["keys"], base + 10 + shift["positions"], torch.arange(500) + 500 * shift["tokens"]
    ).flatten()
    correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
    assert abs(float(correlation)) < 4 / len(one) ** 0.5


def test_noise_depends_on_nothing_else():
    keys, positions = torch.tensor([5, -9, 12]), torch.tensor([100, 3, 8])
    together = sampling.exponential(keys, positions, torch.arange(64))
    for row in range(3):
        alone = sampling.exponential(keys[row : row + 1], positions[row : row + 1].int(), torch.arange(64))
        assert torch.equal(alone[0], together[row])


# ---------------------------------------------------------------- draws

TRIALS = 40_000


def skewed(vocab=50, seed=0):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.softmax(logits, dim=-1)


@pytest.mark.parametrize("by", ["position", "request"])
def test_draws_follow_the_distribution(by):
    probs = skewed()
    varied, fixed = torch.arange(TRIALS), torch.full((TRIALS,), 77)
    keys, positions = (fixed, varied) if by == "position" else (varied, fixed)
    drawn = sampling.draw(probs.expand(TRIALS, -1), keys, positions)
    assert chi_square(torch.bincount(drawn.long(), minlength=50), probs) < 4


def test_a_certain_token_is_always_drawn():
    weights = torch.zeros(20_000, 30)
    weights[:, 17] = 1e-30
    drawn = sampling.draw(weights, torch.arange(20_000), torch.arange(20_000))
    assert (drawn == 17).all()


def upstream_kept(monkeypatch, probs, info):
    """What upstream's torch sampler draws from, in token order."""
    seen = []

    def multinomial(weights, num_samples):
        seen.append(weights.clone())
        return torch.zeros(weights.shape[0], 1, dtype=torch.int64)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    upstream.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), info.top_ks, info.top_ps, info.min_ps, info.need_min_p_sampling, None, None
    )
    tokens = probs.sort(dim=-1, descending=True).indices
    return torch.zeros_like(probs).scatter_(-1, tokens, seen[0])


FILTERS = [
    {"top_p": [0.9, 0.3, 1.0, 0.5]},
    {"top_k": [5, 1, TOP_K_ALL, 20]},
    {"min_p": [0.1, 0.0, 0.5, 0.01]},
    {"top_p": [0.9, 0.3, 1.0, 0.5], "top_k": [5, 40, TOP_K_ALL, 2], "min_p": [0.1, 0.0, 0.5, 0.01]},
]


@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "+".join(f))
def test_filters_are_upstreams(monkeypatch, filters):
    probs = torch.stack([skewed(seed=seed) for seed in range(4)])
    info = batch_info(4, **filters)
    before = probs.clone()
    kept = sampling.filtered(probs, info)
    assert torch.equal(probs, before), "logprobs are read from the unfiltered distribution"
    assert torch.equal(kept, upstream_kept(monkeypatch, probs, info))


@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "+".join(f))
def test_filtered_draws_follow_upstreams_distribution(filters):
    probs = skewed(seed=3)
    alike = {name: values[0] for name, values in filters.items()}
    info = batch_info(TRIALS, **alike)
    sampling.couple(info, torch.arange(TRIALS))
    drawn = coupled_sampler()._sample_from_probs(probs.expand(TRIALS, -1).clone(), info, torch.arange(TRIALS), False)
    torch.manual_seed(0)
    theirs = upstream.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.expand(TRIALS, -1).clone(), info.top_ks, info.top_ps, info.min_ps, info.need_min_p_sampling, None, None
    )
    kept = sampling.filtered(probs[None], batch_info(1, **alike))[0]
    for tokens in (drawn, theirs):
        assert chi_square(torch.bincount(tokens.long(), minlength=50), kept / kept.sum()) < 4


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
def test_the_gpu_draws_as_the_cpu_does():
    weights = torch.stack([skewed(5000, seed) for seed in range(16)])
    keys, positions = torch.arange(16) * 12345, torch.arange(16) + 7
    noise = sampling.exponential(keys, positions, torch.arange(5000))
    theirs = sampling.exponential(keys.cuda(), positions.cuda(), torch.arange(5000).cuda())
    torch.testing.assert_close(theirs.cpu(), noise, rtol=1e-5, atol=0)
    for rows in (1, 2, 16):
        drawn = sampling.draw(weights[:rows].cuda(), keys[:rows].cuda(), positions[:rows].cuda())
        assert drawn.tolist() == sampling.draw(weights[:rows], keys[:rows], positions[:rows]).tolist()


@gpu
@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "+".join(f))
def test_flashinfer_filters_are_upstreams(monkeypatch, filters):
    context = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="flashinfer"))
    monkeypatch.setattr(sampling, "get_exec", lambda: context)
    monkeypatch.setattr(upstream, "get_exec", lambda: context)
    probs = skewed(seed=3).cuda().expand(TRIALS, -1).contiguous()
    info = batch_info(TRIALS, **{name: values[0] for name, values in filters.items()})
    for name in ("temperatures", "top_ps", "top_ks", "min_ps"):
        setattr(info, name, getattr(info, name).cuda())
    sampler, keys = coupled_sampler(), torch.arange(TRIALS, device="cuda")
    theirs = sampler._sample_from_probs(probs, info, keys, False)
    sampling.couple(info, keys)
    ours = sampler._sample_from_probs(probs, info, keys, False)
    kept = sampling.filtered(probs, info)[0].cpu()
    for tokens in (ours, theirs):
        counts = torch.bincount(tokens.long().cpu(), minlength=50)
        assert not counts[kept == 0].any()
        assert chi_square(counts, kept / kept.sum()) < 4


# ---------------------------------------------------------------- the sampler


@pytest.mark.parametrize("reason", ["no keys", "deterministic inference"])
def test_without_shared_noise_the_sampler_is_upstreams(monkeypatch, reason):
    calls = []
    monkeypatch.setattr(
        upstream, "sampling_from_probs_torch", lambda probs, **rest: calls.append(rest) or torch.zeros(len(probs))
    )
    info = batch_info(2)
    if reason == "deterministic inference":
        info.sampling_seed = torch.tensor([1, 2])
        sampling.couple(info, torch.tensor([1, 2]))
    coupled_sampler()._sample_from_probs(torch.ones(2, 50) / 50, info, torch.tensor([4, 9]), True)
    assert len(calls) == 1


@pytest.mark.parametrize("filters", [{}, *FILTERS], ids=lambda f: "+".join(f) or "none")
def test_the_guess_is_what_row_0_draws_one_step_later(filters):
    keys, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([10, 20, 30, 40])
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5)) * 3
    sampler = coupled_sampler()
    guessing, drawing = batch_info(4, temperature=[0.5, 1.0, 1.0, 2.0], **filters), None
    sampling.couple(guessing, keys)
    guess = sampling.draw_guess(logits.clone(), guessing, positions + 1, sampler)
    drawing = batch_info(4, temperature=[0.5, 1.0, 1.0, 2.0], **filters)
    sampling.couple(drawing, keys)
    probs = torch.softmax(logits / drawing.temperatures, dim=-1)
    later = sampler._sample_from_probs(probs, drawing, positions + 1, sampling.is_unfiltered(drawing))
    assert torch.equal(guess, later)


def test_samples_of_one_prompt_differ():
    # n samples have the same distribution at the same position, and different keys.
    probs = torch.ones(1000, 50) / 50
    keys = sampling.NoiseKeys(0, 0)
    requests = [request(rid=f"r{i}") for i in range(1000)]
    drawn = sampling.draw(probs, torch.tensor([keys.of(req) for req in requests]), torch.full((1000,), 12))
    assert len(drawn.unique()) == 50


def test_greedy_requests_of_a_mixed_batch_stay_greedy():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    info = batch_info(3, temperature=[1.0, 1.0, 3.0], top_k=[1, TOP_K_ALL, TOP_K_ALL])
    for key in range(30):
        sampling.couple(info, torch.tensor([key, key + 1, key + 2]))
        guess = sampling.draw_guess(logits.clone(), info, torch.tensor([1, 2, 3]), coupled_sampler())
        assert int(guess[0]) == int(logits[0].argmax())


def test_without_a_coupled_sampler_the_guess_is_the_likeliest_token():
    logits = torch.randn(3, 50)
    guess = sampling.draw_guess(logits.clone(), batch_info(3), torch.tensor([1, 2, 3]), torch.nn.Identity())
    assert torch.equal(guess, logits.argmax(-1))


def test_the_guess_obeys_logit_bias():
    bias = torch.zeros(2, 50)
    bias[:, 11] = 1000.0
    guess = sampling.draw_guess(
        torch.randn(2, 50), batch_info(2, top_k=1, logit_bias=bias), torch.tensor([1, 2]), torch.nn.Identity()
    )
    assert guess.tolist() == [11, 11]


# ---------------------------------------------------------------- penalties


def request(rid="r", seed=None, frequency=0.0, presence=0.0, repetition=1.0, max_new_tokens=100):
    params = SimpleNamespace(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=0,
        stop_token_ids=set(),
        sampling_seed=seed,
        max_new_tokens=max_new_tokens,
    )
    return SimpleNamespace(rid=rid, sampling_params=params)


def test_penalties_advance_as_upstream_counts():
    requests = [
        request(frequency=0.5, presence=0.3),
        request(repetition=1.3),
        request(frequency=0.2, repetition=0.8),
        request(),
    ]

    class Batch:
        reqs, device = requests, "cpu"

    batch = Batch()  # upstream refers to it weakly
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(vocab_size=50, batch=batch, penalizers=kinds)
    rates = torch.tensor([[0.5, 0.3, 1.0], [0.0, 0.0, 1.3], [0.2, 0.0, 0.8], [0.0, 0.0, 1.0]])
    info = batch_info(4, penalizer_orchestrator=orchestrator)
    for tokens in torch.tensor([[3, 4, 5, 6], [7, 4, 8, 9], [3, 4, 5, 6]]):
        info.update_penalties()
        now = info.copy_for_forward()
        assert sampling.has_penalties(now)
        sampling.advance_penalties(now, tokens, rates)
        orchestrator.cumulate_output_tokens(tokens)
        info.update_penalties()
        torch.testing.assert_close(now.acc_additive_penalties, info.acc_additive_penalties)
        torch.testing.assert_close(now.acc_scaling_penalties, info.acc_scaling_penalties)


def test_batches_without_penalties_need_no_advance():
    info = batch_info(2)
    assert not sampling.has_penalties(info)
    sampling.advance_penalties(info, torch.tensor([1, 2]), torch.zeros(2, 3))
    assert info.acc_additive_penalties is None and info.acc_scaling_penalties is None


def test_selecting_requests_takes_all_their_parameters():
    grammar = object()
    info = batch_info(
        3,
        temperature=[0.1, 0.2, 0.3],
        top_p=[0.4, 0.5, 0.6],
        logit_bias=torch.arange(150.0).view(3, 50),
        acc_additive_penalties=torch.arange(3.0).view(3, 1).expand(3, 50),
        grammars=[None, grammar, None],
    )
    sampling.couple(info, torch.tensor([7, 8, 9]))
    part = sampling.select(info, [2, 1], torch.tensor([2, 1]))
    torch.testing.assert_close(part.temperatures, torch.tensor([[0.3], [0.2]]))
    torch.testing.assert_close(part.top_ps, torch.tensor([0.6, 0.5]))
    assert part.logit_bias[:, 0].tolist() == [100.0, 50.0]
    assert part.acc_additive_penalties[:, 0].tolist() == [2.0, 1.0]
    assert part.grammars == [None, grammar]
    sampler = coupled_sampler()
    probs = torch.ones(3, 50) / 50
    whole = sampler._sample_from_probs(probs, info, torch.tensor([1, 2, 3]), True)
    assert sampler._sample_from_probs(probs[:2], part, torch.tensor([3, 2]), True).tolist() == whole[[2, 1]].tolist()
    assert sampling.select(info, [0], torch.tensor([0])).grammars is None


# ---------------------------------------------------------------- keys


def test_a_seed_gives_the_same_noise_anywhere():
    assert sampling.NoiseKeys(0, 1).of(request("a", seed=5)) == sampling.NoiseKeys(9, 9).of(request("b", seed=5))
    assert sampling.NoiseKeys(0, 1).of(request("a", seed=5)) != sampling.NoiseKeys(0, 1).of(request("a", seed=6))


def test_without_a_seed_every_request_has_its_own_noise():
    keys = sampling.NoiseKeys(0, 1)
    found = {keys.of(request("same")) for _ in range(100)}
    assert len(found) == 100
    assert all(-(2**63) <= key < 2**63 for key in found)
    assert sampling.NoiseKeys(0, 2).of(request("same")) not in found, "another server, other texts"


def test_ranks_agree_on_the_noise():
    ranks = [sampling.NoiseKeys(0, 1) for _ in range(2)]
    keys = [[rank.of(request(f"r{i}")) for i in range(20)] for rank in ranks]
    assert keys[0] == keys[1]


def test_a_retracted_request_keeps_its_noise():
    keys = sampling.NoiseKeys(0, 1)
    one = request("a")
    first = keys.of(one)
    keys.of(request("b"))
    assert keys.of(one) == first


def test_samples_with_one_seed_differ_and_can_be_repeated():
    def samples(keys, logical):
        keys.of(request(f"{logical}_{99:032x}", seed=5, max_new_tokens=0))  # upstream caches the prompt first
        return [keys.of(request(f"{logical}_{i:032x}", seed=5)) for i in range(4)]

    keys = sampling.NoiseKeys(0, 1)
    first = samples(keys, "one")
    assert len(set(first)) == 4
    assert samples(keys, "other") == first
    assert keys.of(request("plain_name", seed=5)) == keys.of(request("plain_name_2", seed=5)) == first[0]


def test_what_is_known_of_samples_is_bounded():
    keys = sampling.NoiseKeys()
    for number in range(3 * keys._REMEMBERED):
        keys.of(request(f"r{number}_{0:032x}", seed=1))
    assert len(keys._samples) == keys._REMEMBERED


# ---------------------------------------------------------------- grammars


class Counting(BaseGrammarObject):
    """Allows only the token after the last one."""

    def __init__(self, last):
        super().__init__()
        self.history = [last]

    def accept_token(self, token):
        if token != self.history[-1] + 1:
            raise ValueError
        self.history.append(token)

    def rollback(self, k):
        del self.history[-k:]

    def allocate_vocab_mask(self, vocab_size, batch_size, device):
        return torch.full((batch_size, (vocab_size + 31) // 32), -1, dtype=torch.int32)

    def fill_vocab_mask(self, vocab_mask, idx):
        vocab_mask[idx] = 0
        vocab_mask[idx, (self.history[-1] + 1) // 32] = 1 << ((self.history[-1] + 1) % 32)


def allowed(row):
    return [32 * word + bit for word in range(2) for bit in range(32) if (int(row[word]) >> bit) & 1]


def test_row_1_is_masked_as_its_grammar_will_be():
    reqs = [SimpleNamespace(grammar=Counting(4)), SimpleNamespace(grammar=None), SimpleNamespace(grammar=Counting(8))]
    tree = GrammarTree.from_linear_chain(torch.tensor([[4, 5], [1, 2], [8, 30]]))
    mask = sampling.guess_grammar_mask(reqs, tree, batch_info(3), torch.device("cpu"))
    assert mask.vocab_mask.shape == (3, 2)
    assert allowed(mask.vocab_mask[0]) == [6], "the guess 5 is right; 6 follows it"
    assert len(allowed(mask.vocab_mask[1])) == 64
    assert len(allowed(mask.vocab_mask[2])) == 64, "a guess that the grammar refuses leads nowhere"
    assert [reqs[0].grammar.history, reqs[2].grammar.history] == [[4], [8]], "the grammars are where they were"


class NoRewind(BaseGrammarObject):
    pass


class Reasoning(BaseGrammarObject):
    def __init__(self, grammar):
        super().__init__()
        self.grammar = grammar

    def rollback(self, k):
        self.grammar.rollback(k)


def test_only_grammars_that_can_go_back_are_tried():
    assert sampling.can_rewind([None, Counting(1), Reasoning(Counting(1))])
    assert not sampling.can_rewind([Counting(1), NoRewind()])
    assert not sampling.can_rewind([Reasoning(NoRewind())])
