"""A budget that holds the context gives what plain SGLang gives, and what runs is really sparse KV."""

from __future__ import annotations

import pytest
from checks import assert_same_tokens, worst_gap
from serving import Answer, Server, recorded
from texts import TWENTY, question

LAYERS, KV_HEADS = 30, 3  # of the demo model


# Chats and continuations of every kind, from 10 to 2000 tokens.
FAST = [0, 2, 5, 7, 9, 12, 16, 19]


def greedy_answers(server: Server, prompts: list[str]) -> list[Answer]:
    server.flush()
    return server.ask_all(prompts, 24, return_logprob=True)


@recorded("plain")
def fast_answers(server: Server) -> list[Answer]:
    return greedy_answers(server, [TWENTY[i] for i in FAST])


@recorded("plain", slow=True)
def twenty_answers(server: Server) -> list[Answer]:
    return greedy_answers(server, TWENTY)


@recorded("plain")
def what_the_server_is(server: Server) -> dict:
    return server.info()


@pytest.mark.parametrize("answers", [fast_answers, pytest.param(twenty_answers, marks=pytest.mark.slow)])
def test_prompts_as_plain_sglang(sparse, recorded_on, answers):
    expected, ours = recorded_on("plain", answers), answers(sparse)
    assert_same_tokens(ours, expected, "budget above every context")
    assert worst_gap(ours, expected) < 0.05
    assert [a.prompt_tokens for a in ours] == [a.prompt_tokens for a in expected]
    assert max(a.prompt_tokens for a in ours) > 1900


def test_prompts_that_the_radix_cache_holds(sparse, recorded_on):
    """The same from pages that an earlier request left in host memory, one prompt at a time."""
    some = [5, 9, 19]
    expected = [recorded_on("plain", fast_answers)[FAST.index(i)] for i in some]
    sparse.ask_all([TWENTY[i] for i in some], 1)
    ours = sparse.ask_each([TWENTY[i] for i in some], 24, return_logprob=True)
    assert_same_tokens(ours, expected, "radix hits")
    assert worst_gap(ours, expected) < 0.05
    assert all(a.cached_tokens == (a.prompt_tokens - 1) // 16 * 16 for a in ours)


def test_nothing_else_than_sparse_kv_answers(sparse, recorded_on):
    """Would catch a server that fell back to dense attention, to one row, or to SGLang's own pool."""
    info = sparse.info()
    assert info["attention_backend"] == "dualdecoder"
    assert info["speculative_algorithm"] == "DUALDECODER"
    summary = sparse.counters()
    assert summary["engine"] == "cpu" and summary["rows"] == 2
    assert len(summary["layers"]) == LAYERS
    assert summary["plan"]["host_tokens"] == info["max_total_num_tokens"]

    plain = recorded_on("plain", what_the_server_is)
    assert plain["attention_backend"] == "torch_native" and not plain["speculative_algorithm"]
    assert "sparse_kv" not in plain["internal_states"][0]

    prompt, tokens, budget = question("records", 5000, 2000), 24, 128
    whole = sparse.ask(prompt, tokens)
    sparse.policy(budget=budget)
    part = sparse.ask(prompt, tokens)
    assert part.ids != whole.ids, "128 tokens of a context of 2000 gave the text of all of it"
    totals = sparse.totals()
    forwards = len(part.ids) - 1  # the first token comes from the prefill
    assert totals["steps"] == forwards
    assert totals["guides"] == forwards - 1  # a text this short starts without a guess
    # Every layer and head selected sinks (1 page), the budget (8), and the window with the open page (4 or 5).
    pages = totals["selected"] / (forwards * LAYERS * KV_HEADS)
    assert 1 + 8 + 4 <= pages <= 1 + 8 + 5
    assert totals["selected"] == totals["hit"] + totals["missed"]
    for layer in sparse.counters()["layers"]:
        assert layer["selected"] * LAYERS == totals["selected"]
    assert "sparse hit:" in sparse.log(), "the decode log line lacks the counters"
