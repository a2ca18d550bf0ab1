"""A page's landmark against plain Python, and what scores by it must and must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sparse_kv.geometry import LANDMARK_PARTS, Geometry
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.ops.landmarks import MOST, Landmarks, empty, make, store, vectors, warp_sum, weighted_means

CPU = torch.device("cpu")


def rand(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores(q: torch.Tensor, landmarks: Landmarks) -> torch.Tensor:
    """Of every page, in order: [pages]. q [D]; landmarks of [pages] units."""
    pages = landmarks.codes.shape[0]
    table, lo = torch.arange(pages, dtype=torch.int32)[None], torch.zeros((1, 1), dtype=torch.int64)
    units = Landmarks(landmarks.codes[:, None], landmarks.scales[:, None])
    return reference.score(q.view(1, 1, 1, 1, -1), units, table, lo, lo + pages, 1.0).flatten()


def weighted_by_hand(keys: list[list[float]]) -> list[float]:
    tokens, dim = len(keys), len(keys[0])
    mean = [math.fsum(key[d] for key in keys) / tokens for d in range(dim)]
    slow = [d for d in range(dim) if d % (dim // 2) >= dim // 4]
    far = [math.fsum((key[d] - mean[d]) ** 2 for d in slow) for key in keys]
    average = math.fsum(far) / tokens
    weights = [(1 + distance / average / 10) ** 8 if average else 1.0 for distance in far]
    return [math.fsum(w * key[d] for w, key in zip(weights, keys)) / math.fsum(weights) for d in range(dim)]


@pytest.mark.parametrize(("page", "dim"), [(4, 2), (8, 4), (16, 64), (32, 128), (16, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_plain_python(page, dim, dtype):
    """Weighted means of quarters, the nearest of fifteen steps; a step is the largest magnitude's seventh, to eight
    bits.
    """
    keys = torch.randn(2, page, dim, generator=rand(page)).to(dtype)
    made = make(keys)
    each = page // LANDMARK_PARTS
    for unit, part in ((0, 0), (0, 3), (1, 2)):
        mean = weighted_by_hand(keys[unit, part * each : (part + 1) * each].tolist())
        found = weighted_means(keys[unit, part * each : (part + 1) * each].float())
        torch.testing.assert_close(found, torch.tensor(mean), atol=1e-5, rtol=1e-4)
        step = float(made.scales[unit, part])
        assert step == pytest.approx(max(map(abs, mean)) / MOST, rel=2**-8)
        for d in range(dim):
            byte = int(made.codes[unit, part, d // 2])
            code = (byte >> 4 if d % 2 else byte & 15) - 8
            assert abs(code) <= MOST
            assert abs(mean[d] - code * step) <= step * (0.5 + 0.03), "0.03: where the step was rounded down"


def test_one_key_that_stands_out_counts_for_more_than_its_share():
    keys = torch.zeros(4, 8)
    keys[2] = 1.0
    assert bool((weighted_means(keys) > 0.5).all()), "a plain mean would hold a quarter of it"


def test_what_turns_fast_gives_no_weight():
    keys = torch.zeros(4, 8)
    keys[2, [0, 1, 4, 5]] = 1.0
    torch.testing.assert_close(weighted_means(keys), keys.mean(0))


def test_like_keys_keep_their_plain_mean():
    """Two groups at equal distances from the mean: nobody stands out, at any scale."""
    for scale in (0.0, 1e-20, 1.0, 1e15):
        keys = torch.ones(4, 8) * scale
        keys[::2] *= -1
        torch.testing.assert_close(weighted_means(keys), torch.zeros(8))
    torch.testing.assert_close(weighted_means(torch.full((4, 8), 3.0)), torch.full((8,), 3.0))


@given(st.integers(0, 10**6))
def test_sums_in_a_warps_order_are_sums(seed):
    values = torch.randn(3, 80, generator=rand(seed))
    torch.testing.assert_close(warp_sum(values), values.sum(-1), atol=1e-4, rtol=1e-5)


def test_packing_round_trip():
    """Every code comes back as it went in, beside every neighbour."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, LANDMARK_PARTS, 64)
    scales = torch.tensor([[0.5, 2.0, -1.0, 0.0]], dtype=torch.bfloat16)
    found = vectors(Landmarks(codes, scales))
    for part in range(LANDMARK_PARTS):
        for i in range(64):
            byte = int(codes[0, part, i])
            expected = [((byte & 15) - 8) * float(scales[0, part]), ((byte >> 4) - 8) * float(scales[0, part])]
            assert found[0, part, 2 * i : 2 * i + 2].tolist() == expected


@given(st.integers(0, 10**6), st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e15]))
def test_rounding_is_bounded_at_any_scale(seed, size):
    keys = torch.randn(3, 16, 8, generator=rand(seed)) * size
    means = weighted_means(keys.unflatten(1, (LANDMARK_PARTS, -1)))
    found = vectors(make(keys))
    worst = means.abs().amax(-1, keepdim=True) / MOST * 0.53
    assert bool(((found - means).abs() <= worst).all())


@given(st.integers(0, 10**6))
def test_what_is_on_the_grid_is_kept(seed):
    """Parts of two equal keys each, whose values are steps already."""
    full = torch.randint(-MOST, MOST + 1, (5, LANDMARK_PARTS, 8), generator=rand(seed)).float()
    full[..., 0] = MOST
    assert torch.equal(vectors(make(full.repeat_interleave(2, 1))), full)


@given(st.integers(0, 10**6), st.sampled_from([4, 8, 16, 32]))
def test_pages_of_equal_keys_score_their_exact_mass(seed, page):
    """Where a page's keys are alike, and on the grid, nothing is lost: scores are attention's own shares."""
    keys = torch.randint(-MOST, MOST + 1, (9, 1, 8), generator=rand(seed)).float()
    keys[..., 0] = MOST
    q = torch.randn(8, generator=rand(seed))
    exact = (keys.expand(9, page, 8) @ q).logsumexp(-1).log_softmax(0)
    torch.testing.assert_close(scores(q, make(keys.expand(9, page, 8))), exact, atol=1e-4, rtol=1e-4)


def test_one_key_among_many_is_found():
    """What a single mean loses: a quarter that answers the query, the rest of the page against it."""
    q = torch.tensor([4.0, 0.0])
    keys = torch.zeros(2, 16, 2)
    keys[0, :, 0] = 0.5
    keys[1, :, 0] = -1.0
    keys[1, 4:8, 0] = 2.0
    assert float(keys[1].mean(0) @ q) < float(keys[0].mean(0) @ q)
    found = scores(q, make(keys))
    assert found[1] > found[0]


def test_equal_pages_tie_to_the_lower():
    keys = torch.randn(1, 16, 8, generator=rand(3)).expand(6, -1, -1)
    found = scores(torch.randn(8, generator=rand(4)), make(keys))
    assert bool((found == found[0]).all())
    assert reference.top_pages(found[None], 3).tolist() == [[0, 1, 2]]


def test_tokens_of_a_quarter_may_change_places():
    """But for rounding, which may move a value by a step; tokens of two quarters may not."""
    keys = torch.randn(4, 16, 8, generator=rand(5))
    order = torch.tensor([3, 1, 0, 2]).repeat(4) + torch.arange(16) // 4 * 4
    base = weighted_means(keys.unflatten(1, (4, 4)))
    torch.testing.assert_close(weighted_means(keys[:, order].unflatten(1, (4, 4))), base, atol=1e-5, rtol=1e-4)
    other = weighted_means(keys[:, torch.arange(16) - 1].unflatten(1, (4, 4)))
    assert not torch.allclose(other, base, atol=1e-2)


@pytest.mark.parametrize("size", [0.0, 1e-38])
def test_keys_of_nothing_are_zero(size):
    made = make(torch.randn(2, 16, 8, generator=rand(7)) * size)
    assert torch.equal(vectors(made), torch.zeros(2, LANDMARK_PARTS, 8))


def test_a_key_that_is_no_number_shows():
    keys = torch.zeros(2, 16, 8)
    keys[1, 5, 3] = float("nan")
    found = vectors(make(keys)).isnan()
    assert found[1, 1].all() and int(found.sum()) == 8


@pytest.mark.parametrize("dim", [8, 64, 128])
def test_bytes_are_what_the_plan_counts(dim):
    made = empty(7, 3, dim=dim, device=CPU)
    geometry = Geometry(1, 3, 1, dim, 16, 7, 7, 1, torch.float16)
    assert sum(t.numel() * t.element_size() for t in made) == 21 * geometry.landmark_bytes == 21 * (2 * dim + 8)


def test_store_reaches_its_pages_only():
    landmarks = empty(6, 2, dim=8, device=CPU)
    keys = torch.randn(2, 2, 16, 8, generator=rand(6))
    store(landmarks, torch.tensor([4, 1]), keys)
    assert all(map(torch.equal, (landmarks.codes[[4, 1]], landmarks.scales[[4, 1]]), make(keys)))
    others = [0, 2, 3, 5]
    assert not landmarks.codes[others].any() and not landmarks.scales[others].any()
