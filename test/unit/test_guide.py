"""Guide strategies: what row 1 is fed, and what is remembered between steps."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sparse_kv.guide import GuideState, LookAhead, build_guides

VOCAB = 100
SLOTS = torch.tensor([3, 1])
POSITIONS = torch.tensor([40, 7])


@pytest.fixture
def state():
    return GuideState(6, VOCAB, "cpu")


@pytest.fixture
def guides(state):
    return build_guides(state)


def propose(guide, positions=POSITIONS):
    return guide.propose(SLOTS, positions).tolist()


def test_there_is_no_guess_after_a_prefill(state, guides):
    guides["chain"].observe(torch.arange(6), torch.arange(6))
    state.start(SLOTS)
    assert propose(guides["chain"]) == [GuideState.NONE] * 2
    assert state.guess.tolist() == [0, -1, 2, -1, 4, 5], "other slots keep their guesses"


def test_the_chain_feeds_what_row_1_drew(state, guides):
    guides["chain"].observe(SLOTS, torch.tensor([8, 9], dtype=torch.int32))
    assert propose(guides["chain"]) == [8, 9]
    assert state.guess.dtype == torch.int64


def test_reset_forgets_all(state, guides):
    guides["chain"].observe(SLOTS, torch.tensor([8, 9]))
    state.reset()
    assert (state.guess == GuideState.NONE).all()


def test_a_frozen_guide_keeps_the_guess_of_its_start(state, guides):
    state.set(SLOTS, torch.tensor([8, 9]))
    guides["frozen"].observe(SLOTS, torch.tensor([1, 2]))
    assert propose(guides["frozen"]) == [8, 9]


def test_random_guesses_are_tokens_that_change_with_slot_and_position(guides):
    first = guides["random"].propose(torch.arange(1000), torch.full((1000,), 5))
    later = guides["random"].propose(torch.arange(1000), torch.full((1000,), 6))
    assert int(first.min()) >= 0 and int(first.max()) < VOCAB
    assert len(first.unique()) == VOCAB
    assert float((first == later).float().mean()) < 0.05


def test_random_guesses_leave_torchs_generator_alone(guides):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    propose(guides["random"])
    assert torch.equal(torch.rand(3), expected)


def test_random_guesses_keep_the_chain_going(guides):
    guides["random"].observe(SLOTS, torch.tensor([8, 9]))
    assert propose(guides["chain"]) == [8, 9]


def test_only_the_forced_guide_looks_ahead_in_every_step(guides):
    assert {name for name, guide in guides.items() if guide.look_ahead is LookAhead.ALL} == {"forced"}
