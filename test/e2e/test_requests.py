"""Requests beside and after one another: batches, turns, aborts, clients that hang up."""

from __future__ import annotations

import threading
import time

import requests
from checks import assert_same_tokens, ids
from serving import Server, recorded
from texts import chat, excerpt, question

EIGHT = [
    chat("What is the capital of France?"),
    excerpt("tale", 300, 4000),
    question("records", 350, 12000),
    question("licence", 700, 5000),
    excerpt("code", 800, 9000),
    question("tale", 1500, 1500),
    question("records", 1000, 14000),
    question("code", 1800, 10000),
]


def test_batch_of_eight_equals_each_alone(sparse: Server):
    """Mixed lengths, a budget below most of them, one page cache for all; tables checked in every step."""
    sparse.flush()
    sparse.policy(budget=64, check=True)
    cold = sparse.ask_all(EIGHT, 14)
    sparse.policy(budget=64, check=True)
    together = sparse.ask_all(EIGHT, 14)
    assert sparse.totals()["steps"] < 2 * 14, "the eight did not run together"
    sparse.policy(budget=64)
    alone = sparse.ask_each(EIGHT, 14)
    assert sum(answer.prompt_tokens > 64 + 16 + 80 for answer in alone) >= 4
    assert_same_tokens(cold, alone, "in a batch of eight, prefilled together")
    assert_same_tokens(together, alone, "in a batch of eight")


@recorded("plain")
def two_turns(server: Server) -> list:
    """A chat whose second prompt holds the first one and its answer: (tokens, cached tokens) of both turns."""
    server.flush()
    ask = f"{excerpt('tale', 2500)}\n\nWho is Marit?"
    first = server.ask(chat(ask), 30)
    second = server.ask(chat(ask, first.text, "And who is Joren?"), 30)
    return [(a.ids, a.cached_tokens, a.prompt_tokens) for a in (first, second)]


def test_two_turns_cache_as_much_as_plain_sglang(sparse: Server, recorded_on):
    ours = two_turns(sparse)
    assert ours == recorded_on("plain", two_turns)
    assert ours[1][1] > 500


def test_one_prompt_many_times_at_once(sparse: Server):
    """Requests share pages; each still writes its own open page."""
    prompt = question("licence", 1500, 3000)
    sparse.policy(budget=128, check=True)
    alone = sparse.ask(prompt, 34)  # two pages are opened, after a look-ahead
    assert ids(sparse.ask_all([prompt] * 4, 34)) == [alone.ids] * 4


def _free_tokens(server: Server) -> int:
    """Tokens that the pool can still hand out, after all that nobody holds was given back."""
    load = server.wait_idle()
    return load["max_total_num_tokens"] - load["num_used_tokens"]


def test_abort_gives_everything_back(sparse: Server):
    before = _free_tokens(sparse)
    prompt = question("tale", 3000, 2500)
    stream = sparse.stream(prompt, 2000, "to-abort", ignore_eos=True)
    replies = [next(stream) for _ in range(3)]
    assert sparse.load()["num_running_reqs"] == 1
    requests.post(sparse.url + "/abort_request", json={"rid": "to-abort"}, timeout=30)
    replies += list(stream)
    assert replies[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(replies[-1]["output_ids"]) < 1000
    assert _free_tokens(sparse) == before
    # The aborted request's pages are in the radix cache or free, in any case not lost: all of the pool can be used.
    sparse.flush()
    assert sparse.ask(prompt, 8).cached_tokens == 0


def test_abort_while_waiting_and_while_prefilling(sparse: Server):
    before = _free_tokens(sparse)
    prompts = [question(kind, 4200, 1000 * i) for i, kind in enumerate(("tale", "licence", "code", "records"))]
    streams = [sparse.stream(prompt, 200, f"burst-{i}", ignore_eos=True) for i, prompt in enumerate(prompts)]
    threads = [threading.Thread(target=list, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    time.sleep(2)  # some are prefilled, others wait
    requests.post(sparse.url + "/abort_request", json={"rid": "", "abort_all": True}, timeout=30)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert _free_tokens(sparse) == before


def test_client_that_hangs_up_gives_everything_back(sparse: Server):
    before = _free_tokens(sparse)
    stream = sparse.stream(question("records", 2000, 7000), 4000, "to-hang-up", ignore_eos=True)
    for _ in range(3):
        next(stream)
    stream.close()
    assert _free_tokens(sparse) == before
    sparse.check_idle()


def test_a_survivor_does_not_notice(sparse: Server):
    """One of two requests is aborted while both decode; the other one's text is that of the request alone."""
    sparse.policy(budget=128, check=True)
    prompt = question("code", 1500, 6000)
    alone = sparse.ask(prompt, 34)
    stream = sparse.stream(question("licence", 1500, 1000), 2000, "neighbour", ignore_eos=True)
    next(stream)
    found: list = []
    thread = threading.Thread(target=lambda: found.append(sparse.ask(prompt, 34)))
    thread.start()
    for _ in range(6):
        next(stream)
    stream.close()
    thread.join(120)
    assert found and found[0].ids == alone.ids


def test_token_ids_beyond_the_vocabulary_are_refused(sparse: Server):
    """SGLang looks them up in the embeddings, which ends it."""
    for wrong in (-1, 49152, 2**40):
        for path, body in (
            ("/generate", {"input_ids": [504, wrong]}),
            ("/generate", {"input_ids": [[504, 3575], [wrong]]}),
            ("/v1/completions", {"model": "served", "prompt": [504, wrong]}),
        ):
            reply = requests.post(sparse.url + path, json=body, timeout=60)
            assert reply.status_code == 400 and f"token id {wrong} and this model knows 0 to 49151" in reply.text


def test_prompts_without_tokens_are_refused(sparse: Server):
    """In a list of prompts; SGLang looks at one that is alone."""
    for path, name in (("/generate", "input_ids"), ("/v1/completions", "prompt")):
        reply = requests.post(sparse.url + path, json={"model": "served", name: [[504, 3575], []]}, timeout=60)
        assert reply.status_code == 400 and "the prompt has no tokens" in reply.text


def test_lists_in_place_of_one_value_are_refused(sparse: Server):
    """SGLang splits them for many prompts; for one, its scheduler adds them to text or compares them with a number."""
    for wrong in ({"lora_id": ["a"]}, {"extra_key": ["a"], "lora_id": "a"}, {"logprob_start_len": [0]}):
        body = {"text": "One, two,", "return_logprob": True, "sampling_params": {"max_new_tokens": 2}, **wrong}
        reply = requests.post(f"{sparse.url}/generate", json=body, timeout=60)
        assert reply.status_code == 400 and f"{next(iter(wrong))} is a list and the prompt is one" in reply.text
    each = {"text": ["One, two,", "Three,"], "return_logprob": True, "logprob_start_len": [0, 1]}
    assert requests.post(f"{sparse.url}/generate", json={**body, **each}, timeout=60).ok
