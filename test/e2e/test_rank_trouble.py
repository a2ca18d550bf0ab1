"""Two ranks in trouble: late and failing transfers on one of them, retraction, aborts. And two replicas.

The model is a random one with a KV head for each rank.
"""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
import requests
import tiny_models
from checks import assert_ranks_agree, assert_same_bits, assert_same_tokens
from serving import Kind, Server
from texts import question

pytestmark = pytest.mark.slow

TOKENS = 24
BUDGET = 128
SELECTION = 8 + 1 + 5  # pages: budget, sink, window with the open page
FOUR = [question(kind, 1600, 800 * i) for i, kind in enumerate(("tale", "licence", "code", "records"))]
TROUBLE = {
    "delayed": {"transfer": 1},
    "reordered": {"transfer": 2, "seed": 3},
    "failing": {"transfer": 3, "seed": 5},
    "without prefetch": {"prefetch": 0},
}


@pytest.mark.parametrize("served", ["two-ranks-retracting"], indirect=True)
def test_trouble_on_one_rank_changes_no_bit(served: Server):
    policy = {"budget": BUDGET, "cache_slots": 2 * SELECTION}
    served.policy(**policy)
    served.ask_each(FOUR, 1)  # the prompts are in the radix cache from here on
    expected = served.ask_each(FOUR, TOKENS, return_logprob=True)
    assert min(answer.prompt_tokens for answer in expected) > 2 * BUDGET
    for name, values in TROUBLE.items():
        served.policy(**policy)
        update = {f"sparse_kv.{key}": value for key, value in {"rank": 1, **values}.items()}
        assert served.post("/set_internal_state", {"server_args": update}) == [True]
        assert_same_bits(served.ask_each(FOUR, TOKENS, return_logprob=True), expected, f"rank 1 {name}")
        first, second = served.ranks()
        assert first["policy"] != second["policy"] and first["policy"]["budget"] == second["policy"]["budget"]
        assert min(first["total"]["missed"], second["total"]["missed"]) > 0
        assert_ranks_agree(served)
    wrong = {"sparse_kv.rank": 1, "sparse_kv.budget": 64}
    assert served.post("/set_internal_state", {"server_args": wrong}) == [False]


@pytest.mark.parametrize("served", ["two-ranks-retracting"], indirect=True)
def test_drawn_tokens_are_the_same_on_both_ranks(served: Server):
    """Noise is each rank's own computation; a rank that drew another token would write other keys from there on, and
    miss other guesses.
    """
    drawn = {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 11, "ignore_eos": True}
    first = served.ask_all(FOUR, 40, **drawn)
    again = served.ask_all(FOUR, 40, **drawn)
    assert_same_tokens(again, first, "the same seed")
    assert_ranks_agree(served)


@pytest.mark.parametrize("served", ["two-ranks-retracting"], indirect=True)
def test_retraction_and_aborts_leave_the_ranks_equal(served: Server):
    alone = served.ask_each(FOUR, 60, ignore_eos=True)
    assert_same_tokens(served.ask_all(FOUR, 60, ignore_eos=True), alone, "retracted every few steps")
    assert "etract" in served.log()
    streams = [served.stream(FOUR[i % 4][i:], 300, f"storm-{i}", ignore_eos=True) for i in range(8)]
    threads = [threading.Thread(target=list, args=(stream,)) for stream in streams]
    for i, thread in enumerate(threads):
        thread.start()
        if i % 2:
            time.sleep(0.4)
            requests.post(served.url + "/abort_request", json={"rid": f"storm-{i - 1}"}, timeout=30)
    time.sleep(1)
    requests.post(served.url + "/abort_request", json={"rid": "", "abort_all": True}, timeout=30)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a stream hangs"
    served.wait_idle()
    assert_ranks_agree(served)
    served.flush()
    assert_ranks_agree(served)
    assert served.ranks()[0]["free_tokens"] == served.ranks()[0]["host_tokens"]
    assert_same_tokens(served.ask_each(FOUR, 60, ignore_eos=True), alone, "after the storm")


@pytest.mark.parametrize("served", ["two-replicas"], indirect=True)
def test_replicas_answer_alike_and_share_the_host(served: Server):
    one, other = served.ask_each(FOUR[:1] * 2, 24)  # SGLang sends one to each
    assert one.ids == other.ids and other.cached_tokens == 0
    states = [state["sparse_kv"] for state in served.info()["internal_states"]]
    assert len(states) == 2 and all(state["steps"] >= 23 for state in states)
    assert [len(state["ranks"]) for state in states] == [1, 1]


@pytest.mark.parametrize("flag", ["--tp-size", "--dp-size"])
def test_a_refusal_ends_all_processes_in_one_sentence(demo_model: str, tmp_path: Path, flag: str):
    """Whoever waits for the process that refused is told, too."""
    model = tiny_models.make("qwen2", tmp_path, demo_model)
    command = Kind((flag, "2"), {"budget": 64, "cache_memory": 1000}).command(model, 1)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    sentence = ended.stderr.strip().splitlines()[-1]
    assert sentence.startswith("sglang-dualdecoder: the page cache of 0.000 GB has 0 slots"), ended.stderr[-3000:]
    assert "raise cache_memory" in sentence
