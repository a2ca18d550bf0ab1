"""Predictions made useless on purpose: the counters must show it, and the text must not.

Two requests of about 1300 tokens decode side by side over the smallest legal cache, a quarter of their KV.
"""

from __future__ import annotations

import pytest
from checks import assert_same_tokens
from serving import Answer, Server
from texts import question

BUDGET, TOKENS = 128, 32
SELECTION = 8 + 1 + 5  # pages: budget, sink, window with the open page
SLOTS = 2 * (SELECTION + 1) + 8  # the capacity rule, with a budget of prefetch headroom
PROMPTS = [question("records", 3250, 11000), question("code", 4300, 9000)]
RUNS = {
    "honest": {},
    "right guide": {"guide": "forced"},
    "no prefetch": {"prefetch": False},
    "frozen guide": {"guide": "frozen"},
    "shuffled predictions": {"shuffle_predictions": True},
}


@pytest.fixture(scope="module")
def runs(fleet) -> dict[str, tuple[list[Answer], dict[str, int]]]:
    """Answers and counters of each run, over prompts that were prefilled once."""
    server = fleet.server("sparse")
    server.ask_all(PROMPTS, 1)
    found = {}
    for name, policy in RUNS.items():
        server.policy(budget=BUDGET, cache_slots=SLOTS, hysteresis=0, **policy)  # selections that change
        found[name] = (server.ask_all(PROMPTS, TOKENS, ignore_eos=True), server.totals())
    host = server.counters()["plan"]["host_tokens"] // 16
    held = sum(a.prompt_tokens for a in found["honest"][0]) // 16
    assert host >= held >= 4 * SLOTS
    return found


def missed(totals: dict[str, int]) -> float:
    """Units fetched on the critical path, as a share of those selected."""
    return totals["missed"] / totals["selected"]


def useful(totals: dict[str, int]) -> float:
    return totals["useful"] / totals["prefetched"]


@pytest.mark.parametrize("name", RUNS)
def test_text_does_not_depend_on_predictions(runs, sparse: Server, name: str):
    assert_same_tokens(runs[name][0], runs["honest"][0], name)
    totals = runs[name][1]
    assert totals["evicted"] > 0 and totals["missed"] > 0
    assert (totals["useful"] > 0) == (name != "no prefetch")


def test_frozen_guide_falls_to_the_level_of_the_last_set(runs, sparse: Server):
    """A guess out of sync predicts what the last step selected, and that is in the cache anyway."""
    honest, right, frozen, without = (
        runs[name][1] for name in ("honest", "right guide", "frozen guide", "no prefetch")
    )
    assert right["guide_hits"] == right["guides"]
    assert honest["guide_hits"] > 0.4 * honest["guides"]
    assert frozen["guide_hits"] < 0.1 * frozen["guides"]
    assert missed(right) < 0.3 * missed(without)
    assert missed(honest) < 0.75 * missed(without)
    assert missed(frozen) > 0.8 * missed(without)


def test_shuffled_predictions_fall_to_chance(runs, sparse: Server):
    honest, shuffled, without = (runs[name][1] for name in ("honest", "shuffled predictions", "no prefetch"))
    assert useful(honest) > 0.5
    # The other request's pages are right as often as pages drawn blindly: budget of the candidates.
    chance = (BUDGET // 16) / (min(a.prompt_tokens for a in runs["honest"][0]) // 16)
    assert useful(shuffled) < 1.5 * chance
    assert missed(shuffled) > missed(without)
