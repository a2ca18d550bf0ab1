"""The noise that both rows of a request share: its distribution, and which requests have the same."""

from __future__ import annotations

import pytest
import torch
from batches import request
from sglang.srt.sparse_kv import sampling

MASK = 2**64 - 1


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
