"""A page's landmark against plain Python, and what it must and must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sparse_kv.ops.landmarks import landmark


def by_hand(keys: list[list[float]]) -> list[float]:
    tokens, dim = len(keys), len(keys[0])
    mean = [math.fsum(key[d] for key in keys) / tokens for d in range(dim)]
    slow = [d for d in range(dim) if d % (dim // 2) >= dim // 4]
    far = [math.fsum((key[d] - mean[d]) ** 2 for d in slow) for key in keys]
    average = math.fsum(far) / tokens
    weights = [math.exp(0.7 * distance / average) if average else 1.0 for distance in far]
    total = math.fsum(weights)
    return [math.fsum(weight * key[d] for weight, key in zip(weights, keys)) / total for d in range(dim)]


@pytest.mark.parametrize(("page", "dim"), [(4, 2), (8, 4), (16, 64), (32, 128), (5, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_plain_python(page, dim, dtype):
    keys = torch.randn(2, 3, page, dim, generator=torch.Generator().manual_seed(page)).to(dtype)
    found = landmark(keys)
    assert found.shape == (2, 3, dim) and found.dtype == torch.float32
    for i in range(2):
        for j in range(3):
            expected = torch.tensor(by_hand(keys[i, j].tolist()))
            torch.testing.assert_close(found[i, j], expected, atol=1e-5, rtol=1e-4)


def test_one_key_that_stands_out_counts_for_more_than_its_share():
    keys = torch.zeros(16, 8)
    keys[5] = 1.0
    assert bool((landmark(keys) > 0.99).all()), "a plain mean would hold a sixteenth of it"


def test_what_turns_fast_gives_no_weight():
    keys = torch.zeros(16, 8)
    keys[5, [0, 1, 4, 5]] = 1.0
    torch.testing.assert_close(landmark(keys), keys.mean(0))


def test_like_keys_keep_their_plain_mean():
    """Two groups at equal distances from the mean: nobody stands out, at any scale."""
    for scale in (0.0, 1e-20, 1.0, 1e15):
        keys = torch.ones(16, 8) * scale
        keys[::2] *= -1
        torch.testing.assert_close(landmark(keys), torch.zeros(8))
    torch.testing.assert_close(landmark(torch.full((16, 8), 3.0)), torch.full((8,), 3.0))


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(-10, 10))
def test_order_scale_and_place_do_not_matter(seed, scale, shift):
    rand = torch.Generator().manual_seed(seed)
    keys = torch.randn(16, 8, generator=rand, dtype=torch.float32)
    base = landmark(keys)
    torch.testing.assert_close(landmark(keys[torch.randperm(16, generator=rand)]), base, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(landmark(keys * scale) / scale, base, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(landmark(keys + shift) - shift, base, atol=1e-4, rtol=1e-3)
    assert bool((base <= keys.amax(0) + 1e-6).all()) and bool((base >= keys.amin(0) - 1e-6).all())
