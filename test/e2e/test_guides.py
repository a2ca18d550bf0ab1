"""Whether row 1 is what it claims to be: row 0 one step early."""

from __future__ import annotations

import pytest
from serving import Server
from texts import chat, question

PROMPTS = [question("tale", 700, 3000), chat("List ten animals, each with one sentence."), question("records", 900)]
TOKENS = 33  # long enough for a look-ahead


@pytest.mark.parametrize("temperature", [0.0, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.6, 1.0))])
def test_a_chain_never_loses_a_context_that_its_budget_covers(sparse: Server, temperature: float):
    """Row 1 then attends to all that row 0 will attend to. The odd tie between two tokens is all that may go wrong."""
    sparse.policy(guide="chain")
    each = [{"sampling_seed": seed} for seed in range(len(PROMPTS))]
    for _ in range(2):  # prefilled, then from the radix cache
        sparse.ask_all(PROMPTS, TOKENS, each, temperature=temperature, ignore_eos=True)
    totals = sparse.totals()
    assert totals["guides"] == 2 * len(PROMPTS) * (TOKENS - 1)
    assert totals["guide_hits"] >= 0.99 * totals["guides"]


def test_lookups_bring_a_lost_guide_back(sparse: Server):
    """At a small budget row 1 sees less than row 0 will, loses the text, and finds it again where it repeats itself.
    Without hysteresis: with it, the two see too nearly the same.
    """
    prompt = question("records", 3000)
    sparse.ask(prompt, 1)
    rates = {}
    for guide in ("chain", "resync"):
        sparse.policy(guide=guide, budget=64, hysteresis=0)
        sparse.ask(prompt, 40, ignore_eos=True)
        totals = sparse.totals()
        rates[guide] = totals["guide_hits"] / totals["guides"]
    assert rates["resync"] > rates["chain"], rates


@pytest.mark.slow
def test_a_chain_over_pages_of_its_own_stays_right(sparse: Server):
    """What throws a chain off is that row 1 attends to row 0's pages; over its own it is row 0 of the next step."""
    prompt = question("tale", 9000)
    sparse.ask(prompt, 1)
    rates = {}
    for attends in ("selected", "own"):
        sparse.policy(guide="chain", guide_attends=attends, budget=256)
        sparse.ask(prompt, 40, ignore_eos=True)
        totals = sparse.totals()
        rates[attends] = totals["guide_hits"] / totals["guides"]
    assert rates["own"] >= max(0.97, rates["selected"]), rates
