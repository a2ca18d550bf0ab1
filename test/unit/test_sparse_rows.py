"""Sparse decoding of a block at once, on a model small enough to check against dense and against one row at a time."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import tiny_llama
import torch
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.landmarks import make

from benchmark.models.llama_ref import Checkpoint
from benchmark.quality.fidelity import Measured
from benchmark.quality.scores import SCORES, exact, gauss, landmark, mean, outliers, parts
from benchmark.quality.sparse_rows import Prefilled, Selecting, SparseRows, choose, select

TOKENS, TAIL = 152, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return tiny_llama.checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def context(checkpoint) -> Prefilled:
    ids = torch.randint(0, tiny_llama.VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return Prefilled.read(checkpoint, ids.tolist(), TAIL, "cpu")


def test_everything_selected_is_dense(checkpoint, context):
    rows = SparseRows(checkpoint, context, Selecting(mean, budget=TOKENS + 16))
    torch.testing.assert_close(rows.predictions(), context.logits, rtol=1e-4, atol=1e-4)
    assert min(rows.attended) == pytest.approx(1) and max(rows.lost) < 1e-8


def test_the_first_rows_alone_are_what_they_were(checkpoint, context):
    how = Selecting(landmark, budget=32, page=8, sinks=8, window=10)
    few = context.first(7)
    assert few.tail == 7 and len(few.ids) == TOKENS - TAIL + 7 and torch.equal(few.logits, context.logits[:7])
    whole = SparseRows(checkpoint, context, how).predictions()
    torch.testing.assert_close(SparseRows(checkpoint, few, how).predictions(), whole[:7], rtol=1e-4, atol=1e-4)


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
    assert 0.001 < kept[exact].lost[0] < kept[mean].lost[0]


def test_gauss_is_exact_to_second_order():
    """For queries near zero the moment estimate differs from the exact one by the log of the page's size alone."""
    rand = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 16, 1, generator=rand)  # one dimension: the diagonal is the whole covariance
    q = torch.randn(2, 2, 5, 1, generator=rand) * 0.05
    expected = exact(q, keys) - math.log(16)
    torch.testing.assert_close(gauss(q, keys), expected, rtol=0, atol=2e-4)
    assert not torch.allclose(mean(q, keys), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("whole", [0, 140, 200])
@pytest.mark.parametrize(("sinks", "window"), [(8, 1), (16, 20), (1, 64)])
def test_the_study_selects_what_the_product_selects(sinks, window, whole):
    heads, group, dim, page, total, rows = 2, 3, 8, 8, 152, 24
    rand = torch.Generator().manual_seed(window)
    keys, q = torch.randn(heads, total, dim, generator=rand), torch.randn(heads, group, rows, dim, generator=rand)
    position = torch.arange(total - rows, total)
    how = Selecting(landmark, 40, page, sinks, window, whole=whole)
    found = select(q, keys, torch.zeros(()), position, how)  # [H, R, NP]
    shape = SelectionShape.from_tokens(page, 40, sinks, window, whole=whole)
    lo, hi = shape.candidate_bounds(position[:, None])
    landmarks = make(keys.unflatten(1, (-1, page)).transpose(0, 1))  # of [NP, H] units
    table = torch.arange(total // page, dtype=torch.int32).expand(rows, -1)
    queries = q.permute(2, 0, 1, 3)[:, None]  # a row of the study is a request
    scores = reference.score(queries, landmarks, table, lo, hi, 1.0)
    active = torch.ones(rows, dtype=torch.bool)
    pages = reference.select(scores, table, position, active, shape, shape.budget_pages).pages  # [R, H, C]
    for head in range(heads):
        for row in range(rows):
            expected = set(pages[row, head].tolist()) - {reference.NONE}
            assert set(found[head, row].nonzero()[:, 0].tolist()) == expected | set(
                range(position[row] // page + 1, 19)
            )


@pytest.mark.parametrize("first_scored", [0, 11])
def test_the_study_chooses_with_hysteresis_as_the_product_does(first_scored):
    """Rows of the study are steps of one request, from where all candidates fit the budget on, or are taken anyhow."""
    heads, pages, budget, rows = 2, 40, 12, 30
    rand = torch.Generator().manual_seed(5)
    shape = SelectionShape.from_tokens(8, budget * 8, 16, 8)
    length = 8 * 14 + 4 * torch.arange(rows)
    lo, hi = shape.candidate_bounds(length)
    index = torch.arange(pages)
    inside = (index >= lo[:, None]) & (index < hi[:, None])  # [R, pages]
    best = torch.where(inside, torch.randn(heads, rows, pages, generator=rand), float("-inf"))
    found = choose(best, budget, 1.0, torch.arange(rows) < first_scored) & inside
    last = Last(torch.zeros((1, 2, heads, 2), dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    odd = torch.arange(rows)  # steps of one token: their parity tells which half of the memory is read
    for row in range(rows):
        scores = last.favoured(best[None, :, row], odd[row : row + 1], shape.sink_pages)
        expected = reference.top_pages(scores, budget)[0]
        competed = torch.tensor([bool(inside[row].sum() > budget) and row >= first_scored])
        last.remember(expected[None], competed, odd[row : row + 1], shape.sink_pages)
        for head in range(heads):
            assert set(found[head, row].nonzero()[:, 0].tolist()) == set(expected[head].tolist()) - {reference.NONE}
    assert bool((choose(best, budget, 0.0) & inside != found).any())


@pytest.mark.parametrize("page", [8, 16])
def test_parts_of_single_tokens_are_exact(page):
    """Landmarks of one token each are the keys; fewer bits move them, whatever their scale."""
    rand = torch.Generator().manual_seed(0)
    keys, q = torch.randn(2, 3, page, 8, generator=rand), torch.randn(2, 2, 5, 8, generator=rand)
    torch.testing.assert_close(parts(page)(q, keys), exact(q, keys))
    torch.testing.assert_close(parts(page, 8)(q, keys), exact(q, keys), rtol=0, atol=0.1)
    assert (parts(page, 4)(q, keys) - exact(q, keys)).abs().max() > 0.1
    torch.testing.assert_close(parts(1)(q, keys), outliers(q, keys))


def test_a_prefilled_context_is_found_again(checkpoint, context, tmp_path):
    file = tmp_path / "context.pt"
    first = Prefilled.read(checkpoint, context.ids.tolist(), TAIL, "cpu", file)
    again = Prefilled.read(checkpoint, context.ids.tolist(), TAIL, "cpu", file)
    assert torch.equal(first.keys, again.keys) and torch.equal(first.logits, again.logits)
    other = Prefilled.read(checkpoint, context.ids.tolist()[::-1], TAIL, "cpu", file)
    assert not torch.equal(other.logits, first.logits), "another text must not get this one's"


def test_gains_are_paired():
    """Four rows: the baseline is right in rows 0 and 1, the other in 0, 1 and 3; two kinds of text."""
    dense = torch.eye(4) * 5
    wrong = dense.roll(1, 1)
    base, other = Measured(), Measured()
    for found, right in ((base, [1, 1, 0, 0]), (other, [1, 1, 0, 1])):
        logits = torch.where(torch.tensor(right)[:, None] == 1, dense, wrong)
        found.add("code", logits[:2], dense[:2], SimpleNamespace(attended=[0.5, 1.0], lost=[0.2, 0.0]))
        found.add("lookup", logits[2:], dense[2:], SimpleNamespace(attended=[1.0, 1.0], lost=[0.0, 0.0]))
    gain = other.summary(base)
    assert gain["agreement"] == 0.75 and gain["agreement_gain"] == 0.25 and gain["agreement_gain_error"] == 0.25
    assert gain["agreement_code"] == 1 and gain["agreement_lookup"] == 0.5 and gain["attended_by_layer"] == [0.75, 1]
    assert gain["lost_by_layer"] == pytest.approx([0.1, 0]) and gain["lost"] == pytest.approx(0.05)
    assert gain["kl_gain"] < 0 and gain["kl_code"] == pytest.approx(0, abs=1e-9)
    assert base.summary(base)["agreement_gain"] == base.summary(base)["kl_gain_error"] == 0
