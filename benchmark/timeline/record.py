"""Has a running server profile itself while it decodes, through SGLang's own /start_profile."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

WARM = 16  # tokens before the profile starts: the cache has settled, and the chain of guesses
FILE_TIMEOUT = 300  # seconds


def describe(url: str) -> dict[str, Any]:
    """What /server_info says of sparse KV, and the device. Raises ValueError when sparse KV is off."""
    info = requests.get(url + "/server_info", timeout=60).json()
    state = info["internal_states"][0].get("sparse_kv")
    if state is None:
        raise ValueError(f"the server at {url} runs without sparse KV; start it with --sparse-kv dualdecoder")
    return {
        "device": info["device"],
        "layers": len(state["layers"]),
        "model": info["model_path"],
        "plan": state["plan"],
    }


def record(url: str, folder: Path, steps: int, device: str, prompt: str, count: int) -> dict[str, Any]:
    """Profile `steps` decode steps of `count` requests that begin with `prompt`; returns the profile of rank 0.

    folder: where the server writes, on the machine that both share. Raises TimeoutError when nothing appears there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    started = False
    for tokens in _generate(url, prompt, count, WARM + 2 * steps + 16):
        if tokens >= WARM and not started:
            started = True
            body = {
                "output_dir": str(folder.resolve()),
                "num_steps": steps,
                "activities": ["GPU"] if device == "cuda" else ["CPU"],
                "with_stack": False,
            }
            requests.post(url + "/start_profile", json=body, timeout=120).raise_for_status()
    return _wait_for(folder, before)


def _generate(url: str, prompt: str, count: int, tokens: int) -> Iterator[int]:
    """Tokens so far of the request that has fewest, whenever one more is there."""
    body = {
        "text": [f"Text {number}. {prompt}" for number in range(count)],
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    so_far = dict.fromkeys(range(count), 0)
    with requests.post(url + "/generate", json=body, timeout=600, stream=True) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b"data:") and b"[DONE]" not in line:
                chunk = json.loads(line[len(b"data:") :])
                so_far[chunk.get("index", 0)] = chunk["meta_info"]["completion_tokens"]
                yield min(so_far.values())


def _wait_for(folder: Path, before: set[Path]) -> dict[str, Any]:
    deadline = time.monotonic() + FILE_TIMEOUT
    while time.monotonic() < deadline:
        for path in sorted(set(folder.iterdir()) - before):
            if path.name.endswith(".trace.json.gz") and "-TP-0" in path.name:
                try:
                    return load(path)
                except (EOFError, json.JSONDecodeError, zlib.error, gzip.BadGzipFile):
                    pass  # still being written
        time.sleep(1)
    raise TimeoutError(f"the server wrote no profile to {folder} within {FILE_TIMEOUT} s; its log says why")


def load(path: Path) -> dict[str, Any]:
    """A torch profile, packed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
