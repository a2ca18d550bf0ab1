"""What a request's last step selected counts for more in the next: the rule against a loop, and what it must not do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sparse_rig import Rig

PAGE, HEADS, WORDS, PAGES = 8, 2, 3, 90
SHAPE = SelectionShape.from_tokens(PAGE, 6 * PAGE, 2 * PAGE, 3 * PAGE)


def memory(owners: list[int], bonus: float, slots: int = 6) -> Last:
    bits = torch.zeros((slots, 2, HEADS, WORDS), dtype=torch.int32)
    return Last(bits, torch.tensor(owners), torch.tensor([bonus]))


def step(last: Last, scores: torch.Tensor, length: torch.Tensor, active=None, shape=SHAPE) -> list[list[list[int]]]:
    """One step of requests whose table is the identity: logical pages by request and head. scores [N, R, H, MP]."""
    lo, hi = shape.candidate_bounds(length[:, None] + torch.arange(scores.shape[1]))
    index = torch.arange(PAGES)
    inside = (index >= lo[..., None]) & (index < hi[..., None])
    scores = torch.where(inside[:, :, None], scores, float("-inf"))
    table = torch.arange(PAGES, dtype=torch.int32).expand(len(length), -1)
    active = torch.ones(len(length), dtype=torch.bool) if active is None else active
    found = reference.select(scores, table, length, active, shape, shape.budget_pages, last=last)
    return [[[p for p in row if p >= 0] for row in request] for request in found.pages.tolist()]


def predictions(last: Last | None, scores: torch.Tensor, length: torch.Tensor, shape=SHAPE, pages=None) -> list:
    """What row 1 names after `step`: logical pages by request and head, best rank first."""
    lo, hi = shape.candidate_bounds(length[:, None] + torch.arange(2))
    index = torch.arange(PAGES)
    inside = (index >= lo[..., None]) & (index < hi[..., None])
    scores = torch.where(inside[:, :, None], scores, float("-inf"))
    active = torch.ones(len(length), dtype=torch.bool)
    found = reference.predict(scores, length, active, shape, pages or shape.budget_pages, last=last)
    return [[[p for p in row if p >= 0] for row in request] for request in found.tolist()]


def by_loop(scores, length: int, before: set[int], bonus: float, whole: int) -> tuple[list[int], set[int]]:
    """One head's selection and what is remembered of it. scores [MP]."""
    lo, hi = (int(bound) for bound in SHAPE.candidate_bounds(torch.tensor(length)))
    value = {page: float(scores[page] + (bonus if page in before else 0)) for page in range(lo, hi)}
    chosen = sorted(value, key=lambda page: (-value[page], page))[: SHAPE.budget_pages if length >= whole else None]
    forced = {*range(min(SHAPE.sink_pages, hi)), *range(hi, length // PAGE + 1)}
    return sorted(forced | set(chosen)), set(chosen) if hi - lo > len(chosen) else set()


@pytest.mark.parametrize("bonus", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("longer", [0, 9])
@pytest.mark.parametrize("start", [10 * PAGE - 3, 66 * PAGE])
def test_every_step_against_a_loop(start, longer, bonus):
    """From contexts that compete for nothing into those that do, over words of bits, two requests beside each other."""
    rand = torch.Generator().manual_seed(start)
    last, whole = memory([4, 1], bonus), longer and start + longer  # which the two outgrow one after the other
    before = {(i, h): set() for i in range(2) for h in range(HEADS)}
    kept = 0
    base = torch.randn(2, 1, HEADS, PAGES, generator=rand)
    for t in range(40):
        length = torch.tensor([start + t, start + t + 7])
        scores = base + 0.7 * torch.randn(2, 2, HEADS, PAGES, generator=rand)
        found = step(last, scores, length, shape=dataclasses.replace(SHAPE, whole=whole))
        for (i, h), pages in before.items():
            bonus = torch.tensor(bonus).item()
            expected, before[i, h] = by_loop(scores[i, 0, h], int(length[i]), pages, bonus, whole)
            assert found[i][h] == expected
            kept += len(pages & before[i, h])
    assert kept > 0
    assert not last.bits[[0, 2, 3, 5]].any(), "another request's memory was written"


def test_a_larger_bonus_changes_less():
    changes = {}
    for bonus in (0.0, 1.0, 4.0):
        rand = torch.Generator().manual_seed(1)
        last, before, changes[bonus] = memory([1], bonus), None, 0
        base = torch.randn(1, 1, HEADS, PAGES, generator=rand)
        for t in range(30):
            scores = base + torch.randn(1, 2, HEADS, PAGES, generator=rand)
            found = step(last, scores, torch.tensor([60 * PAGE + t % PAGE]))[0]
            changes[bonus] += sum(len(set(found[h]) - set(before[h])) for h in range(HEADS)) if before else 0
            before = found
    assert changes[0.0] > 1.5 * changes[1.0] > 2 * changes[4.0] > 0


def test_a_step_done_twice_does_the_same_twice():
    """As a look-ahead does, whose forward is that of the step that follows."""
    rand = torch.Generator().manual_seed(2)
    last = memory([3], 2.0)
    for t in range(10):
        scores = torch.randn(1, 2, HEADS, PAGES, generator=rand)
        length = torch.tensor([40 * PAGE + t])
        first = step(last, scores, length)
        bits = last.bits.clone()
        assert step(last, scores, length) == first and torch.equal(last.bits, bits)


@pytest.mark.parametrize("start", [9 * PAGE, 60 * PAGE])
def test_a_right_guess_predicts_the_next_selection(start):
    """Row 1 with the scores of the row 0 to come: all that the next step chooses, also where it begins to choose."""
    rand = torch.Generator().manual_seed(start)
    last = memory([4, 1], 1.0)
    scores, named, differs = torch.randn(2, 2, HEADS, PAGES, generator=rand), None, 0
    for t in range(30):
        length = torch.tensor([start + t, start + t + 5])
        found = step(last, scores, length)
        if named is not None:
            for i, request in enumerate(found):
                lo, hi = (int(bound) for bound in SHAPE.candidate_bounds(length[i]))
                for h, pages in enumerate(request):
                    assert [p for p in pages if lo <= p < hi] == sorted(named[i][h])
        named, plain = predictions(last, scores, length), predictions(None, scores, length)
        differs += named != plain
        scores = torch.stack([scores[:, 1], torch.randn(2, HEADS, PAGES, generator=rand)], 1)
    assert differs, "the last selection counted for nothing"


def test_row_1_leaves_no_trace():
    rand = torch.Generator().manual_seed(3)
    one, other = memory([3], 2.0), memory([3], 2.0)
    for t in range(10):
        scores = torch.randn(1, 2, HEADS, PAGES, generator=rand)
        guessed = scores.clone()
        guessed[:, 1] = torch.randn(1, HEADS, PAGES, generator=rand)
        length = torch.tensor([40 * PAGE + t])
        assert step(one, scores, length) == step(other, guessed, length) == step(other, scores[:, :1], length)
        predictions(other, guessed, length)
    assert torch.equal(one.bits, other.bits) and one.bits.any()


@pytest.mark.parametrize("whole", [0, 301])
def test_what_is_selected_whole_is_not_remembered(whole):
    """So steps that select every page without scores, as a batch of short contexts takes, change nothing."""
    last, shape = memory([1], 2.0), dataclasses.replace(SHAPE, whole=whole)
    end = whole or (SHAPE.budget_pages + SHAPE.sink_pages + 1) * PAGE + SHAPE.window - 1
    for length in range(1, end):
        assert shape.takes_every_page(length)
        step(last, torch.randn(1, 2, HEADS, PAGES), torch.tensor([length]), shape=shape)
    assert not last.bits.any() and not shape.takes_every_page(end)
    step(last, torch.randn(1, 2, HEADS, PAGES), torch.tensor([end]), shape=shape)
    assert last.bits.any()


def test_padded_rows_remember_nothing():
    last = memory([2, 0], 2.0)
    step(last, torch.randn(2, 2, HEADS, PAGES), torch.tensor([500, 500]), active=torch.tensor([True, False]))
    assert last.bits[2].any() and not last.bits[0].any()


@pytest.fixture
def rig():
    rig = Rig(hysteresis=2.0)
    rig.start(1)
    rig.extend({1: 300})
    for _ in range(6):
        rig.decode([1])
    assert rig.runtime.selected[1].any()
    return rig


def test_a_prefill_forgets(rig):
    rig.extend({1: 5})
    assert not rig.runtime.selected.any()
    rig.decode([1])
    rig.runtime.flush()
    assert not rig.runtime.selected.any()


def test_a_server_that_forgets_or_does_not_is_noticed(rig):
    """The oracle of every other test would see it."""
    rig.runtime.selected.zero_()
    with pytest.raises(AssertionError):
        for _ in range(8):
            rig.decode([1])


def test_a_policy_switches_it(rig):
    with pytest.raises(ValueError, match="from 0 to 10, got 11"):
        rig.runtime.apply_policy({"hysteresis": 11})
    for value in (0, 2):
        rig.runtime.apply_policy({"hysteresis": value})
    rig.decode([1])
    rig.runtime.apply_policy({"hysteresis": 0})
    with pytest.raises(AssertionError):  # the oracle goes on with 2
        for _ in range(8):
            rig.decode([1])
