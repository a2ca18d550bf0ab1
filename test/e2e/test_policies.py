"""At a budget far below the context, no policy changes a token, nor the last bit of its probability."""

from __future__ import annotations

import pytest
from checks import assert_same_bits, assert_same_tokens
from serving import Answer, Server
from texts import question

BUDGET, TOKENS = 256, 16
SELECTION = 16 + 1 + 5  # pages: budget, sink, window with the open page
PROMPTS = [question("records", 2400, 2000), question("code", 2800)]


def answers(server: Server) -> list[Answer]:
    return server.ask_each(PROMPTS, TOKENS, return_logprob=True)


@pytest.fixture(scope="module")
def expected(fleet) -> list[Answer]:
    """What the policy as started says at this budget. The prompts are in the radix cache from then on."""
    server = fleet.server("sparse")
    server.policy(budget=BUDGET)
    server.ask_each(PROMPTS, 1)
    found = answers(server)
    assert all(a.prompt_tokens > 3 * BUDGET and a.cached_tokens > a.prompt_tokens - 17 for a in found)
    return found


POLICIES = {
    "random guide": {"guide": "random"},
    "frozen guide": {"guide": "frozen"},
    "right guide": {"guide": "forced"},
    "chain without lookups": {"guide": "chain"},
    "lookup guide": {"guide": "lookup"},
    "prefetch off": {"prefetch": False},
    "prefetch capped": {"prefetch_cap": 0.1},
    "nothing resident": {"residency": 0.0},
    "half of the layers resident": {"residency": 0.5},
    "smallest cache": {"cache_slots": SELECTION, "check": True},
    "delayed transfers": {"transfer": "delayed", "cache_slots": 2 * SELECTION},
    "reordered transfers": {"transfer": "reordered", "cache_slots": 2 * SELECTION},
    "failing transfers": {"transfer": "failing", "cache_slots": 2 * SELECTION},
    "delayed, nothing resident": {"transfer": "delayed", "residency": 0.0, "cache_slots": SELECTION},
    "reordered, a third resident, random guide, smallest cache": {
        "transfer": "reordered",
        "seed": 3,
        "residency": 0.33,
        "guide": "random",
        "cache_slots": SELECTION,
        "check": True,
    },
}


# What another policy of the fast tier shows as well, or the unit tests do.
SLOW = {
    "frozen guide",
    "right guide",
    "chain without lookups",
    "lookup guide",
    "prefetch capped",
    "half of the layers resident",
    "smallest cache",
    "failing transfers",
    "delayed, nothing resident",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in POLICIES])
def test_policy_changes_no_bit(sparse: Server, expected: list[Answer], name: str):
    policy = POLICIES[name]
    sparse.policy(budget=BUDGET, **policy)
    assert_same_bits(answers(sparse), expected, name)

    totals = sparse.totals()
    assert totals["selected"] == totals["hit"] + totals["missed"]
    if "cache_slots" in policy:
        assert totals["evicted"] > 0
    if policy.get("guide") == "random":
        assert totals["guide_hits"] <= totals["guides"] / 10
    if policy.get("guide") == "forced":
        assert totals["guide_hits"] == totals["guides"] > 0
    if not policy.get("prefetch", True):
        assert totals["prefetched"] == totals["useful"] == 0
    elif "cache_slots" in policy or "residency" in policy:  # else a prefix stays in the cache whole
        assert totals["prefetched"] > 0
    if "residency" in policy and policy["residency"] == 0.0:
        # Each step brings every selected unit anew.
        assert totals["prefetched"] + totals["missed"] > 0.9 * totals["selected"]


ROWS = {
    "one row": {"rows": 1},
    "one row, every page selected": {"rows": 1, "skip_scores": True, "budget": 2048},
    "one row, every page scored": {"rows": 1, "budget": 2048},
    "as few as will do": {"rows": "auto", "skip_scores": True},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n.endswith("scored") else []) for n in ROWS]
)
def test_rows_change_no_token(sparse: Server, expected: list[Answer], name: str):
    """Another number of rows may round another way, so that bits are not compared."""
    policy = {"budget": BUDGET, "check": True, **ROWS[name]}
    wanted = expected
    if policy["budget"] > BUDGET:
        sparse.policy(budget=policy["budget"])
        wanted = answers(sparse)
    sparse.policy(**policy)
    assert_same_tokens(answers(sparse), wanted, name)

    totals, steps = sparse.totals(), len(PROMPTS) * (TOKENS - 1)
    assert totals["guides"] == 0
    assert totals["all_pages"] == (steps if "every page selected" in name else 0)
    assert totals["one_row"] == steps - totals["all_pages"]


def test_started_policy_is_refused_when_wrong(sparse: Server):
    for wrong in ({"sparse_kv.budget": 4096}, {"sparse_kv.cache_slots": 3}, {"sparse_kv.nonsense": 1}):
        assert sparse.post("/set_internal_state", {"server_args": wrong}) == [False]
    assert "unknown sparse_kv policy 'nonsense'" in sparse.log()
