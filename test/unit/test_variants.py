"""One row or two: who may go with one, and that no bit of row 0 depends on it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.step import DecodeStep
from sglang.srt.sparse_kv.variants import SETTLE, Chooser, Variant
from sparse_rig import Rig

PAGE = 8
SHAPE = SelectionShape.from_tokens(PAGE, budget=4 * PAGE, sinks=PAGE, window=2 * PAGE)
TWO, ONE, ALL = Variant.TWO_ROWS, Variant.ONE_ROW, Variant.ALL_PAGES


def fake(
    rows="auto", skip_scores=True, usable=1000, scoped=(), most_rows=2, most_alone=None, recorder=None, shape=SHAPE
):
    return SimpleNamespace(
        policy=SimpleNamespace(rows=rows, skip_scores=skip_scores),
        config=SimpleNamespace(most_rows=most_rows),
        shape=shape,
        cache=SimpleNamespace(usable=usable, scoped=list(scoped)),
        most_alone=most_alone,
        recorder=recorder,
    )


def chooser(*lengths: int) -> tuple[Chooser, torch.Tensor]:
    made, slots = Chooser(len(lengths) + 1), torch.arange(1, len(lengths) + 1)
    made.start(slots, torch.tensor(lengths))
    return made, slots


def choose(runtime, *lengths: int) -> Variant:
    made, slots = chooser(*lengths)
    return made.choose(slots, runtime)


# ---------------------------------------------------------------- the choice


def test_a_short_context_needs_no_scores_and_one_that_fits_needs_one_row():
    assert choose(fake(), 10) is ALL
    assert choose(fake(), 10, 400) is ONE
    assert choose(fake(skip_scores=False), 10) is ONE
    assert choose(fake(usable=60), 10, 400) is ONE  # 2 and 51 pages; two selections of 8 pages are 16
    assert choose(fake(usable=52), 10, 400) is TWO


@pytest.mark.parametrize("whole", [0, 1, 50, 12 * PAGE - 1, 12 * PAGE, 12 * PAGE + 1])
@pytest.mark.parametrize("length", range(PAGE * SHAPE.width + 7 * PAGE))
def test_scores_are_skipped_exactly_where_they_decide_nothing(length, whole):
    """Selected are all pages if and only if row 0's candidates are within the budget, whatever their scores, or there
    are fewer than `whole` tokens.
    """
    shape = SelectionShape.from_tokens(PAGE, 4 * PAGE, PAGE, 2 * PAGE, whole=whole)
    low, high = shape.candidate_bounds(torch.tensor([length]))
    within = bool(high - low <= shape.budget_pages) or length < whole
    assert (choose(fake(shape=shape), length) is ALL) is within
    if not within:
        return
    tokens = torch.arange(400, dtype=torch.int32)[None].expand(2, -1) + PAGE
    request = torch.ones(1, dtype=torch.int64), torch.tensor([length])
    geometry = SimpleNamespace(max_pages=40, kv_heads=2)
    step = DecodeStep.build(geometry, shape, ALL, tokens, *request)
    selection = step.every_page(shape, 2)
    assert int(selection.num_pages) == length // PAGE + 1
    rand = torch.Generator().manual_seed(length)
    scores = torch.randn(1, 1, 2, 40, generator=rand)
    index = torch.arange(40)
    scores[..., (index < low) | (index >= high)] = float("-inf")
    expected = reference.select(scores, step.table, step.length, step.active, shape, shape.budget_pages)
    assert torch.equal(selection.pages, expected.pages)
    assert torch.equal(selection.num_pages, expected.num_pages)


def test_the_lengths_grow_with_the_steps():
    made, slots = chooser(10)
    runtime = fake(usable=8)
    variants = [made.choose(slots, runtime) for _ in range(70)]
    assert int(made.lengths[1]) == 80
    assert variants == [ALL] * 53 + [TWO] * 17  # at 63 tokens five pages compete for the budget of four


def test_padding_selects_nothing():
    tokens = torch.arange(400, dtype=torch.int32)[None].expand(3, -1) + PAGE
    geometry = SimpleNamespace(max_pages=5, kv_heads=2)  # fewer pages than a selection is wide
    step = DecodeStep.build(geometry, SHAPE, ALL, tokens, torch.tensor([0, 2]), torch.tensor([1, 17]))
    selection = step.every_page(SHAPE, 2)
    assert selection.num_pages.tolist() == [0, 3]
    assert selection.pages[0].eq(-1).all()
    assert selection.pages[1].tolist() == [[1, 2, 3] + [-1] * (SHAPE.width - 3)] * 2


def test_what_was_set_is_done():
    assert choose(fake(rows=2), 10) is TWO
    assert choose(fake(rows=1, usable=10), 400) is ONE
    assert choose(fake(rows=1, usable=10), 20) is ALL
    assert choose(fake(rows=1, skip_scores=False), 20) is ONE
    assert choose(fake(most_rows=1, usable=10), 400) is ONE, "without a guide there is no second row"


def test_layers_without_a_cache_of_their_own_want_predictions_and_so_does_a_recording():
    assert choose(fake(scoped=[1]), 10) is TWO
    assert choose(fake(most_rows=1, scoped=[1]), 10) is ONE
    assert choose(fake(recorder=object()), 10) is TWO


def test_batches_without_a_graph_keep_two_rows():
    long = 12 * PAGE * 2
    assert SHAPE.most_alone(1000) == dataclasses.replace(SHAPE, whole=400).most_alone(1000) == 62
    assert choose(fake(), *[long] * 5) is ONE
    assert choose(fake(most_alone=4), *[long] * 5) is TWO
    assert choose(fake(most_alone=4), *[20] * 5) is ALL
    assert choose(fake(usable=SHAPE.width * 2 * 3), *[60] * 3, 70) is TWO


def test_it_does_not_go_to_and_fro():
    """Once there were two rows, one must have been enough for a while."""
    made, slots = chooser(10)
    wide, narrow = fake(), fake(usable=1)
    assert made.choose(slots, wide) is ALL
    assert made.choose(slots, narrow) is TWO
    found = [made.choose(slots, wide) for _ in range(SETTLE + 1)]
    assert found == [TWO] * (SETTLE - 1) + [ALL] * 2
    for _ in range(SETTLE - 1):
        made.choose(slots, narrow)
        assert made.choose(slots, wide) is TWO
    made.reset()
    assert made.choose(slots, wide) is ONE


def test_who_ran_with_one_row_is_told_once():
    made, slots = chooser(10, 10, 10)
    made.choose(slots[:2], fake())
    assert made.take_unguessed(slots.flip(0)) == [1, 2]
    assert made.take_unguessed(slots) == []
    made.choose(slots, fake())
    made.start(slots[1:2], torch.tensor([50]))
    assert made.take_unguessed(slots) == [0, 2]
    made.choose(slots, fake(rows=2))
    assert made.take_unguessed(slots) == []


# ---------------------------------------------------------------- the step


def rig_of(lengths: dict[int, int], **config) -> Rig:
    rig = Rig(seed=11, layers=4, pages=300, context=600, requests=2, rows="auto", **config)
    for req, length in lengths.items():
        rig.start(req)
        rig.extend({req: length})
    return rig


def row0s(lengths: dict[int, int], variants) -> list[torch.Tensor]:
    """Row 0's outputs of one step after another, each of its own variant, on the same inputs."""
    rig, kept = rig_of(lengths), []
    for variant in variants:
        rig.runtime.variant, n = variant, len(lengths)
        data = [(rig.rand(n, 2, 4, 8), rig.rand(n, 2, 2, 8), rig.rand(n, 2, 2, 8)) for _ in range(4)]
        data = [tuple(t[:, : variant.rows].reshape(-1, *t.shape[2:]) for t in layer) for layer in data]
        kept += [out[:: variant.rows].clone() for out in rig.decode(list(lengths), data)]
    return kept


@pytest.mark.parametrize("lengths", [{1: 300, 2: 450}, {1: 40}, {1: 7, 2: 33}])
def test_row_0_does_not_depend_on_the_variant(lengths):
    """To the last bit among variants of as many rows; a product of another shape may round another way."""
    two, one = row0s(lengths, [TWO] * 12), row0s(lengths, [ONE] * 12)
    mixed = row0s(lengths, [ONE, TWO] * 6)
    for a, b, c in zip(two, one, mixed, strict=True):
        torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(c, a, atol=1e-6, rtol=1e-5)
    if max(lengths.values()) < 50:
        for variants in ([ALL] * 12, [ALL, ONE, ONE] * 4):
            assert all(torch.equal(a, b) for a, b in zip(one, row0s(lengths, variants), strict=True))


def test_all_pages_beyond_the_budget_would_be_noticed():
    """Sabotage: the oracle, which knows only history, contradicts a step that skipped scores it needed."""
    rig = rig_of({1: 300})
    rig.runtime.variant = ALL
    with pytest.raises(AssertionError):
        rig.decode([1])


def test_the_choice_keeps_to_the_oracle_as_contexts_grow():
    """Past the budget, and past what the cache holds, with steps of every kind on the way."""
    rig = rig_of({1: 50, 2: 40})
    rig.runtime.apply_policy({"cache_slots": 32})
    made = Chooser(3)
    made.start(torch.tensor([1, 2]), torch.tensor([50, 40]))
    for _ in range(95):
        rig.runtime.variant = made.choose(torch.tensor([1, 2]), rig.runtime)
        assert [rig.length(1), rig.length(2)] == (made.lengths[1:] - 1).tolist()
        rig.decode([1, 2])
    steps = rig.runtime.steps
    assert all(steps[variant] > 5 for variant in Variant), steps


def test_one_row_fetches_nothing_ahead_and_misses_die_out():
    rig = rig_of({1: 300, 2: 200})
    # Which empties the cache. Without hysteresis every page's turn comes soon.
    rig.runtime.apply_policy({"rows": 1, "skip_scores": 0, "hysteresis": 0})
    rig.runtime.variant = ONE
    for _ in range(150):
        rig.decode([1, 2], verify=False)
    before = rig.runtime.summary()["total"]
    for _ in range(10):
        rig.decode([1, 2], verify=False)
    after = rig.runtime.summary()["total"]
    assert before["missed"] > 0 == after["prefetched"]
    assert after["missed"] == before["missed"] and after["selected"] > before["selected"]
