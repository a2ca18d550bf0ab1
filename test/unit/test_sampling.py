"""Shared noise draws from upstream's distribution, and both rows draw alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from batches import batch_info, coupled_sampler, request
from sglang.srt.layers import sampler as upstream
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.sparse_kv import sampling


@pytest.fixture(autouse=True)
def torch_filters(monkeypatch):
    context = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sampling, "get_exec", lambda: context)
    monkeypatch.setattr(upstream, "get_exec", lambda: context)


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
