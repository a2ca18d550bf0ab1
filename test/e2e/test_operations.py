"""What an operator does while requests run: flush, pause, new weights, memory. It works, or a sentence refuses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import tiny_models
from checks import assert_same_tokens
from serving import Answer, Server
from texts import chat, question

PROMPT = question("licence", 700, 4000)
TOKENS = 34  # long enough for a look-ahead


@pytest.fixture(scope="module")
def alone(fleet) -> Answer:
    server = fleet.server("sparse")
    server.policy()
    return server.ask(PROMPT, TOKENS, ignore_eos=True)


@contextmanager
def running(server: Server) -> Iterator[list[dict]]:
    """A request that decodes within, and has ended afterwards; the list grows with its replies."""
    replies: list[dict] = []
    stream = server.stream(PROMPT, TOKENS, f"run-{time.monotonic()}", ignore_eos=True)
    replies.append(next(stream))
    thread = threading.Thread(target=lambda: replies.extend(stream), daemon=True)
    thread.start()
    try:
        yield replies
    finally:
        thread.join(300)
        assert not thread.is_alive(), "the request that was running hangs"


@contextmanager
def paused(server: Server, mode: str) -> Iterator[None]:
    """Nothing is decoded within."""
    assert call(server, "/pause_generation", mode=mode).ok
    try:
        yield
    finally:
        assert call(server, "/continue_generation").ok


def ids(replies: list[dict]) -> list[int]:
    return replies[-1]["output_ids"]


def call(server: Server, path: str, **body) -> requests.Response:
    return requests.post(server.url + path, json=body, timeout=300)


def test_flushing_waits_for_nobody_and_takes_nothing_away(sparse: Server, alone: Answer):
    with running(sparse) as replies:
        refused = call(sparse, "/flush_cache")
        assert len(replies) < TOKENS, "the request had ended before"
    assert refused.status_code == 400 and refused.text.strip()
    assert ids(replies) == alone.ids
    sparse.flush()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_text(sparse: Server, alone: Answer, mode: str):
    others: list[dict] = []
    asked = sparse.stream(PROMPT, 8, f"late-{mode}", ignore_eos=True)
    late = threading.Thread(target=lambda: others.extend(asked), daemon=True)
    with running(sparse) as replies, paused(sparse, mode):
        before, seen = sparse.totals()["steps"], len(replies)
        late.start()
        time.sleep(1.5)
        steps, late_ones = sparse.totals()["steps"] - before, len(others)
    late.join(120)
    assert seen < TOKENS and (steps, late_ones) == (0, 0), "a step was made in the pause"
    assert ids(replies) == alone.ids and ids(others) == alone.ids[:8]


def test_a_pause_that_aborts(sparse: Server, alone: Answer):
    with running(sparse) as replies:
        assert call(sparse, "/pause_generation", mode="abort").ok
    assert replies[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert call(sparse, "/continue_generation").ok
    assert sparse.ask(PROMPT, TOKENS, ignore_eos=True).ids == alone.ids


def test_memory_is_not_released(sparse: Server, alone: Answer):
    def refusals() -> list[requests.Response]:
        return [call(sparse, f"/{what}_memory_occupation") for what in ("release", "resume")]

    idle = refusals()
    with running(sparse) as replies:
        busy = refusals()
        assert len(replies) < TOKENS, "the request had ended before"
    assert ids(replies) == alone.ids
    for refused in (*idle, *busy):
        assert refused.status_code == 400
        text = refused.json()["error"]["message"]
        assert text.startswith("sglang-dualdecoder: ") and text.endswith(".") and "\n" not in text
    assert sparse.ask(PROMPT, TOKENS, ignore_eos=True).ids == alone.ids


@pytest.mark.slow
@pytest.mark.parametrize("served", ["qwen2"], indirect=True)
def test_new_weights(served: Server, fleet, demo_model: str, tmp_path: Path):
    """No page of the old weights is read with the new ones, and the old ones give the old text again."""
    old = tiny_models.make("qwen2", fleet.folder, demo_model)
    new = tiny_models.make("qwen2", tmp_path, demo_model, seed=2)
    prompts = [PROMPT, chat("Name a river.")]
    served.policy(budget=128, check=True)
    before = served.ask_each(prompts, 24)

    def update(path: str, **options) -> None:
        reply = call(served, "/update_weights_from_disk", model_path=path, **options)
        assert reply.ok and reply.json()["success"], reply.text

    update(new)
    assert served.ask(PROMPT, 24).cached_tokens == 0
    after = served.ask_each(prompts, 24)
    assert all(a.ids != b.ids for a, b in zip(before, after))
    with running(served) as replies:
        update(old)  # waits until nothing runs
    assert len(ids(replies)) == TOKENS
    assert_same_tokens(served.ask_each(prompts, 24), before, "with the old weights again")
    with running(served) as replies:
        update(old, abort_all_requests=True)
    assert replies[-1]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    # Paused in place: what runs keeps its pages, so they must not be flushed.
    with running(served) as replies, paused(served, "in_place"):
        update(old, flush_cache=False)
    assert len(ids(replies)) == TOKENS
    refused = call(served, "/update_weights_from_disk", model_path=str(tmp_path / "nowhere"))
    assert refused.status_code == 400 and not refused.json()["success"]
    assert_same_tokens(served.ask_each(prompts, 24), before, "after all of it")


@pytest.mark.slow
@pytest.mark.parametrize("served", ["qwen2"], indirect=True)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_new_weights_may_not_flush_what_is_paused(served: Server, fleet, demo_model: str, mode: str):
    path = tiny_models.make("qwen2", fleet.folder, demo_model)
    with running(served) as replies, paused(served, mode):
        refused = call(served, "/update_weights_from_disk", model_path=path)
    assert refused.status_code == 400 and "flush_cache" in refused.json()["message"]
    assert len(ids(replies)) == TOKENS
