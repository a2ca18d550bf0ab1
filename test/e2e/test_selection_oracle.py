"""The served text at a small budget is that of a second implementation of the same selection, on transformers."""

from __future__ import annotations

import gc

import pytest
from oracle import Oracle
from serving import Server
from texts import TWENTY, question

TOKENS = 24
RECORDS = question("records", 2600, 14000)


def _compare(server: Server, demo_model: str, budget: int, prompts: list[str]) -> None:
    oracle = Oracle(demo_model, budget)
    try:
        expected = [oracle.generate(prompt, TOKENS) for prompt in prompts]
    finally:
        del oracle
        gc.collect()
    server.policy(budget=budget)
    assert [answer.ids for answer in server.ask_each(prompts, TOKENS)] == expected
    selected, forwards = server.totals()["selected"], server.totals()["steps"]
    assert selected / forwards < 30 * 3 * (budget / 16 + 7), "more was attended than the budget allows"


def test_a_thousand_tokens_at_budget_128(sparse: Server, demo_model: str):
    _compare(sparse, demo_model, 128, [RECORDS])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 256, 512])
def test_two_thousand_tokens(sparse: Server, demo_model: str, budget: int):
    _compare(sparse, demo_model, budget, [TWENTY[15], *TWENTY[-3:]])
