"""Scores, top pages and selections against a model in plain Python, over every length of a small context."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sglang.srt.sparse_kv.geometry import LANDMARK_PARTS, Geometry, SelectionShape
from sglang.srt.sparse_kv.ops import reference, reference_batch
from sglang.srt.sparse_kv.ops.landmarks import empty, make, store, vectors
from sglang.srt.sparse_kv.ops.reference import NONE
from sglang.srt.sparse_kv.step import DecodeStep
from sglang.srt.sparse_kv.variants import Variant

PAGE = 4
LENGTHS = range(5 * PAGE + 1)
WINDOWS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 100)
SINKS = (0, 1, PAGE, PAGE + 1, 3 * PAGE, 100)
BUDGETS = (PAGE, 2 * PAGE + 3, 100)


def shapes(window: int) -> list[SelectionShape]:
    return [SelectionShape.from_tokens(PAGE, *tokens, window) for tokens in itertools.product(BUDGETS, SINKS)]


each_window = pytest.mark.parametrize("window", WINDOWS)


def forced_pages(length: int, shape: SelectionShape) -> tuple[set[int], set[int]]:
    """Sink and window pages of a query at position `length`, token by token."""
    window = {t // PAGE for t in range(max(0, length + 1 - shape.window), length + 1)}
    sinks = {page for page in range(shape.sink_pages) if page * PAGE <= length}
    return sinks, window


def candidates(length: int, shape: SelectionShape) -> list[int]:
    sinks, window = forced_pages(length, shape)
    return [page for page in range(length // PAGE + 1) if page not in sinks | window]


@each_window
def test_bounds_and_forced_pages_token_by_token(window):
    for shape in shapes(window):
        length = torch.tensor(LENGTHS)
        lo, hi = shape.candidate_bounds(length)
        for n in LENGTHS:
            assert list(range(lo[n], hi[n])) == candidates(n, shape)
            assert all(PAGE * (page + 1) <= n for page in candidates(n, shape)), "a candidate is not closed"
            sinks, window = forced_pages(n, shape)
            assert len(sinks | window) <= shape.forced_pages and len(window) <= shape.window_pages
        assert shape.window_pages == max(len(forced_pages(n, shape)[1]) for n in range(200, 200 + PAGE))


@each_window
def test_row_1_looks_where_row_0_will(window):
    for shape in shapes(window):
        geometry = Geometry(1, 1, 1, 2, PAGE, 50, 30, 1, torch.float32)
        table = torch.arange(120, dtype=torch.int32)[None].expand(2, -1) + PAGE
        req, two = torch.ones(1, dtype=torch.int64), Variant.TWO_ROWS
        build = [DecodeStep.build(geometry, shape, two, table, req, torch.tensor([n])) for n in range(5 * PAGE + 2)]
        for now, later in itertools.pairwise(build):
            assert now.lo[0, 1] == later.lo[0, 0] and now.hi[0, 1] == later.hi[0, 0]


def selections(length: torch.Tensor, ranking: list[int], shape: SelectionShape) -> list[list[int]]:
    """What every request selects when `ranking` holds all pages from best to worst."""
    found = []
    for n in length.tolist():
        best = [page for page in ranking if page in candidates(n, shape)][: shape.budget_pages]
        found.append(sorted(set.union(*forced_pages(n, shape), best)))
    return found


@each_window
def test_selections_of_every_length_at_once(window):
    for shape in shapes(window):
        length = torch.tensor(LENGTHS)
        n, pages = len(length), 8
        rand = torch.Generator().manual_seed(window)
        table = torch.randperm(n * pages, generator=rand).view(n, pages).to(torch.int32)
        lo, hi = shape.candidate_bounds(length[:, None] + torch.arange(2))
        rankings = [[3, 0, 2, 4, 1, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]  # one a head
        scores = torch.full((n, 2, 2, pages), float("-inf"))
        for head, ranking in enumerate(rankings):
            for rank, page in enumerate(ranking):
                inside = (page >= lo) & (page < hi)  # [N, R]
                scores[:, :, head, page] = torch.where(inside, -float(rank), float("-inf"))
        active = torch.rand(n, generator=rand) > 0.3
        found = reference.select(scores, table, length, active, shape, shape.budget_pages)
        predicted = reference.predict(scores, length, active, shape, shape.budget_pages)
        for head, ranking in enumerate(rankings):
            expected = selections(length, ranking, shape)
            later = [
                [page for page in ranking if page in candidates(m + 1, shape)][: shape.budget_pages]
                for m in length.tolist()
            ]
            for i in range(n):
                row, guess = found.pages[i, head].tolist(), predicted[i, head].tolist()
                if not active[i]:
                    assert set(row) == set(guess) == {NONE} and found.num_pages[i] == 0
                    continue
                physical = table[i, expected[i]].tolist()
                assert row == physical + [NONE] * (shape.width - len(physical))
                assert found.num_pages[i] == len(physical) and row[len(physical) - 1] == table[i, length[i] // PAGE]
                assert guess == later[i] + [NONE] * (shape.budget_pages - len(later[i]))


def test_the_whole_context_is_selected_when_the_budget_covers_it():
    shape = SelectionShape.from_tokens(PAGE, 5 * PAGE, 1, 1)
    for n in LENGTHS:
        assert selections(torch.tensor([n]), [4, 2, 0, 1, 3], shape) == [list(range(n // PAGE + 1))]


def test_ties_go_to_the_lower_page():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, float("-inf"), 0.0, -0.0]])
    assert reference.top_pages(scores, 2).tolist() == [[1, 2]]
    assert reference.top_pages(scores, 5).tolist() == [[1, 2, 4, 0, 3]]
    assert reference.top_pages(scores, 9).tolist() == [[1, 2, 4, 0, 3, 6, 7, NONE, NONE]]
    many = torch.zeros(3, 1000)
    assert torch.equal(reference.top_pages(many, 300), torch.arange(300, dtype=torch.int32).expand(3, -1))


def test_pages_without_a_score_are_never_chosen():
    scores = torch.full((2, 1, 1, 6), float("-inf"))
    assert bool((reference.top_pages(scores, 3) == NONE).all())


@pytest.mark.parametrize("group", [1, 3])
def test_scores_against_a_loop(group):
    """Landmarks nobody may look at are NaN; a page's logit is the logarithm of the sum of
    exponentials over its vectors, its score the best of its group's log-probabilities.
    """
    rand = torch.Generator().manual_seed(group)
    n, heads, dim, pages, scale = 5, 2, 6, 9, 0.3
    q = torch.randn(n, 2, heads, group, dim, generator=rand) * 4
    table = torch.randperm(60, generator=rand)[: n * pages].view(n, pages).to(torch.int32)
    lo = torch.tensor([[0, 0], [1, 1], [2, 2], [0, 0], [3, 3]])
    hi = torch.tensor([[4, 5], [1, 2], [2, 2], [0, 1], [9, 9]])
    landmarks = empty(60, heads, dim=dim, device=q.device)
    landmarks.scales.fill_(float("nan"))
    for i in range(n):
        seen = table[i, int(lo[i].min()) : int(hi[i].max())].long()
        store(landmarks, seen, torch.randn(len(seen), heads, PAGE, dim, generator=rand))
    found = reference.score(q, landmarks, table, lo, hi, scale)
    assert found.shape == (n, 2, heads, pages) and found.dtype == torch.float32
    for i, row, h in itertools.product(range(n), range(2), range(heads)):
        span = range(int(lo[i, row]), int(hi[i, row]))
        parts = [vectors(landmarks)[table[i, p], h] for p in span]  # [PARTS, D] each
        queries = [q[i, row, h, g] * scale for g in range(group)]
        logits = [[math.log(sum(math.exp(query @ part) for part in page)) for page in parts] for query in queries]
        norms = [math.log(sum(map(math.exp, line))) if line else 0.0 for line in logits]
        for p in range(pages):
            if p in span:
                best = max(line[p - span.start] - norm for line, norm in zip(logits, norms))
                assert found[i, row, h, p].item() == pytest.approx(best, abs=1e-4)
            else:
                assert found[i, row, h, p] == float("-inf")


@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 8), (3, 3, 64), (1, 7, 128)])
def test_neighbours_change_no_bit_of_a_score(heads, group, dim):
    """A sum over a wider table rounds differently; where two pages are close, another one would be chosen."""
    rand = torch.Generator().manual_seed(dim)
    landmarks = make(torch.randn(1000, heads, LANDMARK_PARTS, dim, generator=rand))
    table = torch.randint(1, 1000, (3, 600), dtype=torch.int32, generator=rand)
    q = torch.randn(3, 2, heads, group, dim, generator=rand)
    for own in (1, 2, 17, 40, 128, 300):
        alone = None
        for other in (0, 1, own, own + 37, 600):
            hi = torch.tensor([[own, own], [other, other], [0, other]])
            scores = reference.score(q, landmarks, table, torch.zeros_like(hi), hi, 0.3)[0]
            alone = scores if alone is None else alone
            assert torch.equal(scores, alone), f"{own} pages beside {other}"
        assert torch.equal(reference.score(q[:1], landmarks, table[:1], hi[:1] * 0, hi[:1], 0.3)[0], alone)


def test_far_pages_stay_apart():
    """A softmax in float32 would give both of the last pages zero, and the tie the lower one."""
    q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 1, 2)
    keys = torch.tensor([0.0, 500.0, -300.0, -200.0]).view(4, 1, 1, 1) * torch.tensor([1.0, 0.0])
    landmarks = make(keys.expand(4, 1, PAGE, 2))
    table = torch.arange(4, dtype=torch.int32)[None]
    scores = reference.score(q, landmarks, table, torch.tensor([[0]]), torch.tensor([[4]]), 1.0)
    assert reference.top_pages(scores, 4).tolist() == [[[[1, 0, 3, 2]]]]


@pytest.mark.parametrize("rows", [1, 2])
def test_nobody_to_score(rows):
    scores = reference.score(
        torch.zeros(0, rows, 2, 1, 4),
        empty(3, 2, dim=4, device=torch.device("cpu")),
        torch.zeros((0, 5), dtype=torch.int32),
        torch.zeros((0, rows), dtype=torch.int64),
        torch.zeros((0, rows), dtype=torch.int64),
        1.0,
    )
    shape = SelectionShape.from_tokens(PAGE, 8, 4, 4)
    none = torch.zeros(0, dtype=torch.int64)
    found = reference.select(scores, torch.zeros((0, 5), dtype=torch.int32), none, none.bool(), shape, 2)
    if rows == 2:
        found.predicted = reference.predict(scores, none, none.bool(), shape, 2)
    assert scores.shape == (0, rows, 2, 5) and found.pages.shape == (0, 2, shape.width)
    assert found.predicted.shape == (0, 2, 2) and found.num_pages.shape == (0,)


def test_lookup_keeps_none_and_reads_each_requests_own_table():
    table = torch.tensor([[9, 8, 7], [4, 5, 6]], dtype=torch.int32)
    logical = torch.tensor([[[2, NONE, 0]], [[NONE, NONE, 1]]], dtype=torch.int32)
    assert reference.lookup(table, logical).tolist() == [[[7, NONE, 9]], [[NONE, NONE, 5]]]


def test_physical_pages_stop_at_the_table():
    req_to_token = torch.tensor([[0] * 10, [20, 21, 22, 23, 8, 9, 10, 11, 40, 41]], dtype=torch.int32)
    pages = reference_batch.physical_pages(req_to_token, torch.tensor([1, 0]), PAGE, 2)
    assert pages.tolist() == [[5, 2], [0, 0]] and pages.dtype == torch.int32
    assert reference_batch.physical_pages(req_to_token, torch.tensor([1]), PAGE, 9).tolist() == [[5, 2, 10]]
