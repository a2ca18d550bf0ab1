"""The served text at a small budget is that of a second implementation of the same selection, on transformers."""

from __future__ import annotations

import gc

import pytest
from checks import assert_same_tokens
from oracle import Oracle
from serving import Server
from texts import TWENTY, question

TOKENS = 24
RECORDS = question("records", 2600, 14000)


def _expected(demo_model: str, budget: int, prompts: list[str], whole: int = 0) -> list[list[int]]:
    oracle = Oracle(demo_model, budget, whole=whole)
    try:
        return [oracle.generate(prompt, TOKENS) for prompt in prompts]
    finally:
        del oracle
        gc.collect()


def _compare(server: Server, demo_model: str, budget: int, prompts: list[str]) -> None:
    expected = _expected(demo_model, budget, prompts)
    server.policy(budget=budget)
    assert [answer.ids for answer in server.ask_each(prompts, TOKENS)] == expected
    selected, forwards = server.totals()["selected"], server.totals()["steps"]
    assert selected / forwards < 30 * 3 * (budget / 16 + 7), "more was attended than the budget allows"


def test_a_thousand_tokens_at_budget_128(sparse: Server, demo_model: str):
    _compare(sparse, demo_model, 128, [RECORDS])


def test_a_context_that_outgrows_whole_alone_and_beside_a_longer_one(sparse: Server, demo_model: str):
    """Alone its steps score nothing until then, and all of them beside the other."""
    budget, short, long = 96, question("code", 1500), RECORDS
    tokens = sparse.ask(short, 1).prompt_tokens
    whole = tokens + TOKENS // 2
    policy = {"budget": budget, "rows": "auto", "skip_scores": True}
    sparse.policy(**policy, whole=whole)
    alone = sparse.ask(short, TOKENS)
    assert tokens > 3 * budget and len(alone.ids) == TOKENS
    assert alone.ids == _expected(demo_model, budget, [short], whole)[0]
    totals = sparse.totals()
    # The first answer is the prefill's; a step at `whole` tokens or more has scores.
    assert (totals["all_pages"], totals["one_row"]) == (TOKENS // 2, TOKENS // 2 - 1)
    other = sparse.ask(long, TOKENS)
    sparse.policy(**policy, whole=whole)
    assert_same_tokens(sparse.ask_all([short, long], TOKENS), [alone, other], "side by side")
    assert sparse.totals()["all_pages"] < TOKENS // 2
    sparse.policy(**policy)
    assert sparse.ask(short, TOKENS).ids != alone.ids, "a context of which nothing shows that it was selected whole"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 256, 512])
def test_two_thousand_tokens(sparse: Server, demo_model: str, budget: int):
    _compare(sparse, demo_model, budget, [TWENTY[15], *TWENTY[-3:]])
