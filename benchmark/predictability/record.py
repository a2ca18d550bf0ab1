"""Runs every context under every guide and temperature on one server that writes down what it selects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import requests

from benchmark.predictability.recording import Run
from benchmark.serving import policies, server

# What row 1 is fed and attends to, as policies of the server.
GUIDES = {
    "greedy": "guide=greedy,guide_attends=selected",
    "chain": "guide=chain,guide_attends=selected",
    "lookup": "guide=lookup,guide_attends=selected",
    "resync": "guide=resync,guide_attends=selected",
    "forced": "guide=forced,guide_attends=selected",
    "random": "guide=random,guide_attends=selected",
    "own": "guide=chain,guide_attends=own",
}
SEED = 1


def command(
    model: str, recording: Path, budget: int, requests_: int, config: dict[str, Any], more: list[str]
) -> list[str]:
    """The command line of a recording server, on which scores decide at every length. config: more of
    --sparse-kv-config; more: other flags.
    """
    ours = {"debug": True, "record": str(recording), "guide": "resync", "whole": 0}
    settings = {"budget": budget, **config, **ours}
    flags = ["--max-running-requests", str(requests_), "--sparse-kv", "dualdecoder"]
    if "--device" not in more or "cuda" in more:
        flags.append("--disable-cuda-graph")
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--sleep-on-idle"),
        *(*flags, "--sparse-kv-config", json.dumps(settings), *more),
    ]


def record(url: str, contexts: list[list[int]], runs: Iterable[Run], tokens: int, say: Callable[[str], None]) -> None:
    """Decodes `tokens` tokens after every context, once a run, all contexts of a run as one batch.

    Raises:
        RuntimeError: the server refused.
    """
    before = server.state(url)["sparse_kv"]["policy"]
    for ids in contexts:  # the prefix cache holds them from here on
        _generate(url, [ids], [{"temperature": 0, "max_new_tokens": 1}], ["prefill"])
    for run in runs:
        policies.switch(url, f"{GUIDES[run.guide]},whole=0", before)
        names = [run.request(number) for number in range(len(contexts))]
        parameters = {"temperature": run.temperature, "max_new_tokens": tokens, "ignore_eos": True}
        # A seed of its own for each context: two that are alike may not draw alike.
        each = [{**parameters, "sampling_seed": SEED + number} for number in range(len(contexts))]
        _generate(url, contexts, each, names)
        state = server.state(url)["sparse_kv"]
        say(f"{run}: guide right in {state['guide_hits']} of {state['guides']} steps since the start")


def _generate(url: str, contexts: list[list[int]], parameters: list[dict], names: list[str]) -> None:
    body: dict[str, Any] = {"input_ids": contexts, "sampling_params": parameters, "rid": names}
    reply = requests.post(f"{url}/generate", json=body, timeout=3600)
    if not reply.ok:
        raise RuntimeError(f"the server answered {reply.status_code} to {names}: {reply.text[:300]}")
