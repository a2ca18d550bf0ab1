"""Contexts of 6000 to 7000 tokens: dense equality, policies, and whether predictions are worth what was measured."""

from __future__ import annotations

import random

import pytest
from checks import assert_same_bits, assert_same_tokens, worst_gap
from serving import Answer, Server, recorded
from texts import chat, excerpt

pytestmark = pytest.mark.slow

CONTEXTS = {
    "code": chat(excerpt("code", 19500) + "\n\nExplain what this program is for, step by step."),
    "tale and licence": chat(excerpt("tale", 26500) + "\n\nRetell what you have read, beginning with the clock."),
    "records": chat(excerpt("records", 17000) + "\n\nName ten of these items with their price."),
}
BUDGET = 512
SELECTION = 32 + 1 + 5


@recorded("plain-long")
def dense(server: Server) -> list[Answer]:
    return server.ask_each(CONTEXTS.values(), 48, return_logprob=True)


@pytest.mark.parametrize("served", ["long"], indirect=True)
def test_whole_contexts_as_plain_sglang(served: Server, recorded_on):
    expected = recorded_on("plain-long", dense)
    ours = dense(served)
    assert all(a.prompt_tokens > 6000 for a in ours)
    assert_same_tokens(ours, expected, "7K contexts")
    assert worst_gap(ours, expected) < 0.05


def _policy(draw: random.Random) -> dict:
    """A random policy that must not change a token."""
    return {
        "guide": draw.choice(["chain", "random", "frozen", "forced", "lookup", "resync"]),
        "prefetch": draw.random() < 0.8,
        "prefetch_cap": draw.choice([0.05, 0.3, 1.0]),
        "residency": draw.choice([0.0, 0.2, 0.5, 0.9, 1.0]),
        "cache_slots": draw.choice([SELECTION, SELECTION + 1, 2 * SELECTION, 0]),
        "transfer": draw.choice(["plain", "delayed", "reordered", "failing"]),
        "seed": draw.randrange(1000),
        "check": draw.random() < 0.3,
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("served", ["long"], indirect=True)
def test_random_policies(served: Server, seed: int):
    """The seed is in the test's name; the policy is printed when it fails."""
    draw = random.Random(seed)
    prompt = list(CONTEXTS.values())[seed % len(CONTEXTS)]
    served.ask(prompt, 1)
    served.policy(budget=BUDGET)
    expected = served.ask(prompt, 40, return_logprob=True)
    for _ in range(2):
        policy = _policy(draw)
        served.policy(budget=BUDGET, **policy)
        assert_same_bits([served.ask(prompt, 40, return_logprob=True)], [expected], str(policy))


def _rates(server: Server, temperature: float, **policy) -> dict[str, float]:
    """Sync and misses over three times 96 tokens, one request at a time, over a cache in multiples of the selection."""
    server.ask_each(CONTEXTS.values(), 1)
    server.policy(budget=BUDGET, **policy)
    for seed, prompt in enumerate(CONTEXTS.values()):
        server.ask(prompt, 96, temperature=temperature, sampling_seed=seed, ignore_eos=True)
    totals = server.totals()
    chosen = totals["selected"] * (SELECTION - 6) / SELECTION  # of which sinks, window and open page are no choice
    return {
        "sync": totals["guide_hits"] / max(totals["guides"], 1),
        "missed": totals["missed"] / chosen,
        "useful": totals["useful"] / max(totals["prefetched"], 1),
        "moved": (totals["missed"] + totals["prefetched"]) / chosen,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("served", ["long"], indirect=True)
def test_predictions_are_worth_what_was_measured(served: Server, temperature: float):
    """Bounds around the measurements on this model: with the default hysteresis LRU alone misses 6 and 4 % at 1 and 2
    times the budget, and a good guide takes two thirds of the latter off the critical path: nearly all but each
    request's first step, and next to nothing of it in vain. At once the budget there is no room to fetch ahead: what a
    step has selected stays until the next has selected.
    """
    alone_one = _rates(served, temperature, cache_slots=SELECTION + 2, prefetch=False)
    alone = _rates(served, temperature, cache_slots=2 * SELECTION, prefetch=False)
    guided = _rates(served, temperature, cache_slots=2 * SELECTION, prefetch_cap=1.0)
    print(f"T={temperature} alone, 1 and 2 times: {alone_one}, {alone}; with guide: {guided}")
    assert guided["sync"] > 0.65
    assert 0.04 < alone_one["missed"] < 0.1
    assert alone["missed"] < 0.75 * alone_one["missed"]
    assert guided["missed"] < 0.45 * alone["missed"]
    assert guided["moved"] < 1.1 * alone["moved"] and guided["useful"] > 0.93


@pytest.mark.parametrize("served", ["long-batch"], indirect=True)
def test_four_long_requests_at_once(served: Server):
    """Four contexts of 6000 to 7000 tokens beside short ones, tables checked, then two more rounds from the cache."""
    prompts = [*CONTEXTS.values(), chat(excerpt("licence", 26000) + "\n\nSum this up."), chat("Who are you?")]
    alone = served.ask_each(prompts, 32)
    served.policy(check=True)
    assert_same_tokens(served.ask_all(prompts, 32), alone, "at once")
    served.policy(guide="random", residency=0.5, transfer="reordered")
    assert_same_tokens(served.ask_all(prompts[::-1], 32), alone[::-1], "at once, other policy")
