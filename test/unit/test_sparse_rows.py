"""Sparse decoding of a block at once, on a model small enough to check against dense and against one row at a time."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.models.llama_ref import Checkpoint
from benchmark.quality.scores import SCORES, exact, gauss, mean, tangent
from benchmark.quality.sparse_rows import Prefilled, Selecting, SparseRows

TOKENS, TAIL = 152, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def context(checkpoint) -> Prefilled:
    ids = torch.randint(0, 97, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return Prefilled.read(checkpoint, ids.tolist(), TAIL, "cpu")


def test_everything_selected_is_dense(checkpoint, context):
    rows = SparseRows(checkpoint, context, Selecting(mean, budget=TOKENS + 16))
    torch.testing.assert_close(rows.predictions(), context.logits, rtol=1e-4, atol=1e-4)
    assert min(rows.attended) == pytest.approx(1)


@pytest.mark.parametrize("name", sorted(SCORES))
def test_a_row_does_not_see_what_comes_later(checkpoint, context, name):
    """The first rows alone, and the same with other tokens behind them."""
    how = Selecting(SCORES[name], budget=32, page=8, sinks=8, window=10)
    together = SparseRows(checkpoint, context, how).predictions()
    other = dataclasses.replace(context, ids=context.ids.clone())
    other.ids[-5:] = 3
    changed = SparseRows(checkpoint, other, how).predictions()
    torch.testing.assert_close(changed[:-5], together[:-5], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(changed[-5:], together[-5:], atol=1e-2)
    assert not torch.allclose(together, context.logits, atol=1e-2), "a budget of 32 left nothing out"


@pytest.mark.parametrize("budget", [16, 48])
def test_exact_scores_keep_the_most_attention(checkpoint, context, budget):
    kept = {
        score: SparseRows(checkpoint, context, Selecting(score, budget, 8, 8, 8, reduce="sum", normalise="all"))
        for score in (mean, exact)
    }
    for rows in kept.values():
        rows.predictions()
    # Only the first layer's rows see the same queries whatever the score.
    assert kept[exact].attended[0] > kept[mean].attended[0] + 0.001


def test_gauss_is_exact_to_second_order():
    """For queries near zero the moment estimate differs from the exact one by the log of the page's size alone."""
    rand = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 16, 1, generator=rand)  # one dimension: the diagonal is the whole covariance
    q = torch.randn(2, 2, 5, 1, generator=rand) * 0.05
    closing = torch.zeros(2, 2, 3, 1)
    expected = exact(q, keys, closing) - math.log(16)
    torch.testing.assert_close(gauss(q, keys, closing), expected, rtol=0, atol=2e-4)
    assert not torch.allclose(mean(q, keys, closing), expected, rtol=0, atol=5e-4)


def test_tangent_touches_at_the_closing_query_and_lies_below():
    rand = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 16, 8, generator=rand)
    closing = torch.randn(2, 1, 3, 8, generator=rand)
    below = exact(closing, keys, closing) - math.log(16) - tangent(closing, keys, closing)  # [2, 1, 3, 3]
    torch.testing.assert_close(below.diagonal(dim1=2, dim2=3), torch.zeros(2, 1, 3), rtol=0, atol=1e-5)
    assert bool((below > -1e-5).all()) and below.max() > 0.1


def test_a_prefilled_context_is_found_again(checkpoint, context, tmp_path):
    file = tmp_path / "context.pt"
    first = Prefilled.read(checkpoint, context.ids.tolist(), TAIL, "cpu", file)
    again = Prefilled.read(checkpoint, context.ids.tolist(), TAIL, "cpu", file)
    assert torch.equal(first.keys, again.keys) and torch.equal(first.logits, again.logits)
    other = Prefilled.read(checkpoint, context.ids.tolist()[::-1], TAIL, "cpu", file)
    assert not torch.equal(other.logits, first.logits), "another text must not get this one's"
