"""The gate's records: what opens it, what shuts it, and that requests do not share theirs."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sparse_kv.gate import EARLY, LATE, PRIOR, Gate

SLOTS = torch.tensor([2, 5])
FLOOR = 0.25


def step(gate, in_sync, right, floor=FLOOR):
    in_sync, right = torch.tensor(in_sync), torch.tensor(right)
    gate.decide(SLOTS, in_sync, floor)
    early = gate.open[EARLY, SLOTS].tolist()
    gate.observe(SLOTS, in_sync, right)
    return early, gate.open[LATE, SLOTS].tolist()


@pytest.fixture
def gate():
    made = Gate(7, "cpu")
    made.start(SLOTS)
    return made


def test_nobody_fetches_before_the_first_decision(gate):
    assert not gate.open[:, SLOTS].any() and gate.open[:, [0, 1, 3, 4, 6]].all()


def test_late_layers_go_by_the_record_or_the_outcome(gate):
    for _ in range(20):
        step(gate, [False, False], [False, False])
    assert step(gate, [False, False], [True, False]) == ([False, False], [True, False]), "the outcome opens"
    assert step(gate, [True, True], [True, False]) == ([True, True], [True, True]), "and a wrong guess shuts nothing"
    assert step(gate, [True, False], [False, True]) == ([True, False], [True, True])


def test_early_layers_go_by_the_record(gate):
    for _ in range(3):
        early, _ = step(gate, [False, False], [True, False])
    assert early == [True, True]
    for _ in range(10):
        early, _ = step(gate, [False, False], [True, False])
    assert early == [True, False], "one is right after a wrong guess, the other never"
    for _ in range(10):
        early, _ = step(gate, [False, False], [False, True])
    assert early[1], "a record forgets"


def test_records_after_right_and_after_wrong_guesses_are_two(gate):
    for _ in range(30):
        step(gate, [False, False], [False, False])
    assert step(gate, [True, False], [True, True])[0] == [True, False]


def test_a_new_owner_starts_anew(gate):
    for _ in range(30):
        step(gate, [False, False], [False, False])
    gate.start(SLOTS[:1])
    torch.testing.assert_close(gate.rate[2], torch.tensor(PRIOR))
    assert step(gate, [False, False], [False, False])[0] == [True, False]


def test_no_floor_no_gate(gate):
    for _ in range(30):
        early, late = step(gate, [False, True], [False, False], floor=0.0)
        assert early == late == [True, True]


def test_a_reset_opens_everything(gate):
    gate.reset()
    assert gate.open.all()
