"""Who gets in: prompts beyond the page cache, prompts beyond the host pool, and three times as much as the pool holds.

The server's host pool holds POOL tokens, its page cache three quarters of that.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import requests
import tiny_models
from kinds import PAGE, SMALL_POOL_TOKENS, TINY, smallest_cache
from serving import Kind, Server

pytestmark = pytest.mark.slow

POOL = SMALL_POOL_TOKENS
CONTEXT = 4096  # of the tiny models
ANSWER = 2000  # tokens that are asked for: more than the pool, and with a prompt of its size within the context
STALLED = 60  # seconds without a token, a hundred times what a step takes
PATIENCE = 300  # seconds for an answer


def test_host_memory_that_cannot_be_had_refuses_to_start(demo_model: str, tmp_path: Path):
    """More than a process can address, so that the attempt fails at once and nobody else is short of memory."""
    sparse = {"budget": 64, "cache_memory": smallest_cache(64, 1, TINY), "host_memory": "200TB"}
    command = Kind((), sparse).command(tiny_models.make("qwen2", tmp_path, demo_model), 1)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    sentence = ended.stderr.strip().splitlines()[-1]
    assert sentence.startswith("sglang-dualdecoder: 200000.0 GB of host memory could not be mapped"), ended.stderr[
        -3000:
    ]
    assert sentence.endswith("; lower --sparse-kv-host-memory.")


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt of exactly `count` tokens that begins like no other."""
    return [1000 + (seed * 7919 + i * 31) % 30000 for i in range(count)]


def ask(server: Server, count: int, new: int, seed: int = 0) -> requests.Response:
    parameters = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": tokens(count, seed), "sampling_params": parameters}
    return requests.post(server.url + "/generate", json=body, timeout=PATIENCE)


@pytest.mark.parametrize("served", ["small-pool"], indirect=True)
def test_a_prompt_longer_than_the_page_cache_is_served(served: Server):
    plan = served.counters()["plan"]
    count = POOL - 3 * PAGE
    assert count > plan["slots"] * PAGE, "the prompt has to be longer than the page cache"
    reply = ask(served, count, 8)
    assert reply.status_code == 200, reply.text
    assert reply.json()["meta_info"]["completion_tokens"] == 8


@pytest.mark.parametrize("count", [POOL - 2 * PAGE + 1, POOL - PAGE, POOL - 10, POOL, POOL + 50, 3 * POOL, 9000])
@pytest.mark.parametrize("served", ["small-pool"], indirect=True)
def test_a_prompt_beyond_the_host_pool_is_refused_with_both_numbers(served: Server, count: int):
    reply = ask(served, count, ANSWER, seed=count)
    assert reply.status_code == 400, reply.text
    text = reply.json()["error"]["message"]
    # SGLang looks first whether prompt and answer together fit the model's context.
    limit = CONTEXT if count + ANSWER > CONTEXT else POOL - 2 * PAGE + 1
    assert str(count) in text and str(limit) in text, text


@pytest.mark.parametrize("count", [POOL - 100, POOL - 2 * PAGE, POOL // 2])
@pytest.mark.parametrize("served", ["small-pool"], indirect=True)
def test_generated_tokens_are_counted(served: Server, count: int):
    """What is asked for beyond the pool ends early and in order, whatever waits beside it."""
    replies: list[requests.Response] = []
    threads = [
        threading.Thread(target=lambda seed=seed: replies.append(ask(served, count, ANSWER, seed))) for seed in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies] == [200] * 2, [reply.text for reply in replies]
    for reply in replies:
        meta = reply.json()["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        assert 0 < meta["completion_tokens"] <= POOL - count
        assert meta["completion_tokens"] >= POOL - count - 3 * PAGE, "most of the rest of the pool is used"


@pytest.mark.parametrize("served", ["small-pool"], indirect=True)
def test_three_times_the_pool_never_stalls(served: Server):
    prompt, new, count = 192, 64, 3 * POOL // 256
    progress, finished = [time.monotonic()], []

    def run(seed: int) -> None:
        parameters = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": tokens(prompt, seed), "sampling_params": parameters, "stream": True}
        last: dict[str, Any] = {}
        with requests.post(served.url + "/generate", json=body, timeout=600, stream=True) as reply:
            for line in reply.iter_lines():
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    last = json.loads(line[len(b"data:") :])
                    progress[0] = time.monotonic()
        finished.append(last["meta_info"])

    threads = [threading.Thread(target=run, args=(100 + seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        idle = time.monotonic() - progress[0]
        assert idle < STALLED, f"no token for {idle:.0f} s with {len(finished)} of {count} answers done"
        time.sleep(0.2)
    assert [meta["completion_tokens"] for meta in finished] == [new] * count
