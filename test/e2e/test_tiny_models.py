"""Other architectures: random models of a few layers answer as under plain SGLang."""

from __future__ import annotations

import pytest
import tiny_models
from checks import assert_same_bits, assert_same_tokens, worst_gap
from serving import Answer, Server, recorded
from texts import TWENTY

pytestmark = pytest.mark.slow


@recorded(*(f"plain-{name}" for name in tiny_models.NAMES))
def answers(server: Server) -> list[Answer]:
    return server.ask_all(TWENTY[::3] + TWENTY[-1:], 24, ignore_eos=True, return_logprob=True)


@pytest.mark.parametrize("served", tiny_models.NAMES, indirect=True)
def test_architecture(served: Server, recorded_on):
    expected = recorded_on(f"plain-{served.name}", answers)
    ours = answers(served)
    assert_same_tokens(ours, expected, served.name)
    assert worst_gap(ours, expected) < 0.05
    assert served.counters()["rows"] == 2
    # A text that repeats itself would hide a guide that is lost and attention that reads the wrong page.
    assert max(len(set(a.ids)) for a in ours) > 12


@pytest.mark.parametrize("served", tiny_models.NAMES, indirect=True)
def test_architecture_under_policies(served: Server):
    prompt = TWENTY[-1]
    served.ask(prompt, 1)
    served.policy(budget=256)
    base = [served.ask(prompt, 32, ignore_eos=True, return_logprob=True)]
    served.policy(budget=256, guide="random", residency=0.5, transfer="reordered", cache_slots=22, check=True)
    assert_same_bits([served.ask(prompt, 32, ignore_eos=True, return_logprob=True)], base, served.name)
