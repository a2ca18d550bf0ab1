"""Two ranks on one machine, over gloo, say what one says: the demo model in a shape with eight KV heads."""

from __future__ import annotations

import pytest
from checks import assert_ranks_agree, assert_same_tokens, worst_gap
from serving import Answer, Server, recorded
from texts import chat, question

pytestmark = pytest.mark.slow

TOKENS = 24
# About 50 and 900 tokens of the demo model: in its shape with eight heads it is slow on a CPU.
PROMPTS = [chat("Name three rivers of France."), question("records", 2700, 2000)]


@recorded("plain-eight-heads")
def whole_contexts(server: Server) -> list[Answer]:
    return server.ask_each(PROMPTS, TOKENS, return_logprob=True)


@recorded("one-rank")
def at_budget_512(server: Server) -> list[Answer]:
    server.policy(budget=512)
    return server.ask_each(PROMPTS, TOKENS, return_logprob=True)


@pytest.mark.parametrize("served", ["two-ranks"], indirect=True)
def test_a_budget_above_the_context_is_dense(served: Server, recorded_on):
    expected = recorded_on("plain-eight-heads", whole_contexts)
    ours = served.ask_each(PROMPTS, TOKENS, return_logprob=True)
    assert_same_tokens(ours, expected, "two ranks against plain SGLang on one")
    assert worst_gap(ours, expected) < 0.05
    assert_ranks_agree(served)


@pytest.mark.parametrize("served", ["two-ranks"], indirect=True)
def test_a_small_budget_gives_what_one_rank_gives(served: Server, recorded_on):
    expected = recorded_on("one-rank", at_budget_512)
    served.policy(budget=512)
    ours = served.ask_each(PROMPTS, TOKENS, return_logprob=True)
    assert ours[-1].prompt_tokens > 512 + 16 + 80 + 128, "budget, sinks and window leave pages out"
    assert_same_tokens(ours, expected, "two ranks against one")
    assert worst_gap(ours, expected) < 1e-3, "the sums of two ranks differ from one's in last bits only"
    assert_ranks_agree(served)
