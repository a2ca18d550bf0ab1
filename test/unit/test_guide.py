"""Guide strategies: what row 1 is fed, and what is remembered between steps."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sparse_kv.gate import Gate
from sglang.srt.sparse_kv.guide import (
    LOOKUPS,
    GuideState,
    LookAhead,
    begin_step,
    build_guides,
    compiled_steps,
    end_step,
    warm_up,
)
from sglang.srt.sparse_kv.history import TokenHistory
from sglang.srt.utils import DynamicGradMode

VOCAB = 100
SLOTS = torch.tensor([3, 1])
POSITIONS = torch.tensor([40, 7])
RIGHT, WRONG = torch.tensor([True, True]), torch.tensor([False, False])


@pytest.fixture
def state():
    return GuideState(6, VOCAB, "cpu", TokenHistory(6, 64, "cpu"))


@pytest.fixture
def guides(state):
    return build_guides(state)


def propose(guide, positions=POSITIONS):
    return guide.propose(SLOTS, positions).tolist()


def test_there_is_no_guess_after_a_prefill(state, guides):
    guides["chain"].observe(torch.arange(6), torch.arange(6), torch.ones(6, dtype=torch.bool))
    state.start(SLOTS)
    assert propose(guides["chain"]) == [GuideState.NONE] * 2
    assert state.guess.tolist() == [0, -1, 2, -1, 4, 5], "other slots keep their guesses"


def test_the_chain_feeds_what_row_1_drew(state, guides):
    guides["chain"].observe(SLOTS, torch.tensor([8, 9], dtype=torch.int32), WRONG)
    assert propose(guides["chain"]) == [8, 9]
    assert state.guess.dtype == torch.int64


def test_reset_forgets_all(state, guides):
    guides["chain"].observe(SLOTS, torch.tensor([8, 9]), RIGHT)
    state.reset()
    assert (state.guess == GuideState.NONE).all() and not state.in_sync.any()


def test_a_frozen_guide_keeps_the_guess_of_its_start(state, guides):
    state.set(SLOTS, torch.tensor([8, 9]))
    guides["frozen"].observe(SLOTS, torch.tensor([1, 2]), WRONG)
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
    guides["random"].observe(SLOTS, torch.tensor([8, 9]), RIGHT)
    assert propose(guides["chain"]) == [8, 9]


def test_only_the_forced_guide_looks_ahead_in_every_step(guides):
    assert {name for name, guide in guides.items() if guide.look_ahead is LookAhead.ALL} == {"forced"}


# ---------------------------------------------------------------- lookups


def remember(state, *texts):
    """The texts of SLOTS, each up to its last token; returns the positions of these."""
    for slot, text in zip(SLOTS.tolist(), texts):
        state.history.fill(slot, torch.tensor(text))
    return torch.tensor([len(text) - 1 for text in texts])


def test_a_lookup_continues_what_was_said_before(state, guides):
    positions = remember(state, [4, 5, 6, 7, 4, 5], [9, 9, 3])
    state.set(SLOTS, torch.tensor([80, 81]))
    assert propose(guides["lookup"], positions) == [6, 81], "a chain's guess where there is nothing to continue"


def test_resync_trusts_a_chain_that_was_right_and_looks_up_after_a_wrong_guess(state, guides):
    positions = remember(state, [4, 5, 6, 7, 4, 5], [1, 2, 3, 1])
    resync = guides["resync"]
    resync.observe(SLOTS, torch.tensor([80, 81]), torch.tensor([True, False]))
    assert propose(resync, positions) == [80, 2]
    resync.observe(SLOTS, torch.tensor([80, 81]), torch.tensor([False, True]))
    assert propose(resync, positions) == [6, 81]


def test_resync_leaves_a_lost_chain_to_requests_that_do_not_look_up(state, guides):
    positions = remember(state, [4, 5, 6, 4], [4, 5, 6, 4])
    state.looks_up[SLOTS[0]] = False
    guides["resync"].observe(SLOTS, torch.tensor([80, 81]), WRONG)
    assert propose(guides["resync"], positions) == [80, 5]
    state.start(SLOTS)
    assert propose(guides["resync"], positions) == [5, 5], "better than nothing"


def test_resync_keeps_the_chain_where_a_lookup_finds_nothing(state, guides):
    positions = remember(state, [4, 5, 6], [1, 2, 3])
    guides["resync"].observe(SLOTS, torch.tensor([80, 81]), WRONG)
    assert propose(guides["resync"], positions) == [80, 81]


def test_resync_looks_up_where_a_request_starts_without_a_guess(state, guides):
    positions = remember(state, [4, 5, 6, 4], [1, 2, 3, 4])
    state.start(SLOTS)
    assert propose(guides["resync"], positions) == [5, GuideState.NONE]


def test_a_look_ahead_is_trusted(state, guides):
    positions = remember(state, [4, 5, 6, 4], [4, 5, 6, 4])
    state.start(SLOTS)
    state.set(SLOTS, torch.tensor([70, 71]))
    assert propose(guides["resync"], positions) == [70, 71]


def test_without_a_history_nothing_looks_up():
    guides = build_guides(GuideState(6, VOCAB, "cpu"))
    assert set(LOOKUPS) == {"lookup", "resync"} and not set(LOOKUPS) & set(guides)


# ---------------------------------------------------------------- both ends of a step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resync", "random"])
def test_compiled_steps_are_the_same(name):
    """What a GPU runs, here compiled for the CPU: equal states after many steps of batches of any size."""
    states = []
    for begin, end in ((begin_step, end_step), compiled_steps()):
        draw = torch.Generator().manual_seed(1)
        state, gate = GuideState(6, VOCAB, "cpu", TokenHistory(6, 64, "cpu")), Gate(6, "cpu")
        state.history.tokens.random_(0, 4, generator=draw)
        found = []
        for number in range(20):
            slots = torch.randperm(6, generator=draw)[: 1 + number % 4]
            positions = torch.randint(0, 60, slots.shape, generator=draw)
            tokens, drawn = torch.randint(0, 4, (2, len(slots)), generator=draw, dtype=torch.int32)
            guess, in_sync = begin(build_guides(state)[name], gate, slots, positions, 0.25)
            end(build_guides(state)[name], gate, slots, in_sync, guess, tokens, drawn)
            found.append(guess)
        states.append([*found, state.guess, state.in_sync, gate.open, gate.rate])
    for plain, compiled in zip(*states):
        torch.testing.assert_close(compiled, plain)


@pytest.mark.slow
def test_no_request_waits_for_the_compiler():
    """Any batch size and either kind of tokens finds its code ready."""
    state, gate = GuideState(9, VOCAB, "cpu", TokenHistory(9, 64, "cpu")), Gate(9, "cpu")
    guide = build_guides(state)["resync"]
    warm_up(guide, gate, 0.25)
    begin, end = compiled_steps()
    with DynamicGradMode(), torch._dynamo.config.patch(error_on_recompile=True):  # as the scheduler steps
        for rows in (1, 2, 3, 8):
            for dtype in (torch.int32, torch.int64):
                slots, positions = torch.arange(1, rows + 1), torch.full((rows,), 20)
                guess, in_sync = begin(guide, gate, slots, positions, 0.25)
                tokens, drawn = torch.ones(rows, dtype=dtype), torch.zeros(rows, dtype=dtype)
                end(guide, gate, slots, in_sync, guess, tokens, drawn)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_starting_and_setting_do_not_wait_for_the_device():
    """They follow a prefill: whoever waits there launches the next step only when the prefill has ended."""
    state, gate, slots = GuideState(6, VOCAB, "cuda"), Gate(6, "cuda"), SLOTS.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.start(slots)
        gate.start(slots)
        state.set(slots, slots)
        state.set(slots, slots, slots > 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.in_sync.tolist() == [False, False, False, True, False, False]
