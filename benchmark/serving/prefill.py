"""Time to the first token over HTTP, dense SGLang and sparse KV in one run: cold prompts, a group, a second turn.

    python -m benchmark.serving.prefill --model MODEL --output prefill.json --variants dense sparse --lengths 4096 32768

Takes the options of ``benchmark.serving.run``. Every figure is the median of a few requests of one generated token,
sent while nothing else runs:

* ``cold``: a prompt of which nothing is cached.
* ``group``: eight cold prompts of one length sent at once, until the last has its token.
* ``second_turn``: 200 new tokens after a cached prompt. For sparse KV twice: with the prompt's pages in the GPU cache
  as its prefill left them, and with that cache emptied, so that every page comes from the host (``by_kernels``: the
  same without the copy engine); the counters ``prefix_cache`` and ``prefix_host`` beside the figure say which of the
  two it was. For ``hicache``, plain SGLang with its host cache, the second of these follows as many
  other prompts as push the first one out of the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from benchmark.corpus import Corpus, plain_tokenizer
from benchmark.serving import options, policies, record, server
from benchmark.serving.client import first_tokens

REPEATS = 3
GROUP = 8
LONG = 65536  # tokens, from here on a cold prompt is measured once
NEW_TOKENS = 200


def say(text: str) -> None:
    print(f"[prefill] {text}", file=sys.stderr, flush=True)


class Measurement:
    """One variant's server, asked about one length after another."""

    def __init__(
        self, url: str, prompts: dict[int, list[list[int]]], sparse: dict[str, Any] | None, room: int | None = None
    ):
        """room: tokens that the GPU holds, for a server that keeps what does not fit on the host."""
        self.url, self.prompts, self.sparse, self.room = url, prompts, sparse, room

    def length(self, length: int, group: bool) -> dict[str, Any]:
        prompts, repeats = self.prompts[length], REPEATS if length < LONG else 1
        if length < LONG:
            first_tokens(self.url, prompts[:1])  # compilation and first allocations do not count
        cold = []
        for prompt in prompts[1 : 1 + repeats]:
            server.flush(self.url)
            cold.append(first_tokens(self.url, [prompt])[0].ttft)
        found: dict[str, Any] = {"cold_s": statistics.median(cold), "cold_runs_s": cold}
        say(f"{length} tokens, cold: {found['cold_s']:.3f} s")
        server.flush(self.url)
        first_tokens(self.url, prompts[:1])
        found["second_turn"] = {"as_left": self.second_turn(prompts, empty=False)}
        if self.sparse or (self.room and self.pushing_out(prompts)):
            found["second_turn"]["from_host"] = self.second_turn(prompts, empty=True)
        if self.sparse and self.sparse["policy"].get("landing"):
            found["second_turn"]["by_kernels"] = self.second_turn(prompts, empty=True, policy="no_landing")
            policies.switch(self.url, "default", self.sparse["policy"])
        if group:
            server.flush(self.url)
            traces = first_tokens(self.url, prompts[:GROUP])
            seconds = max(trace.times[0] for trace in traces) - min(trace.sent for trace in traces)
            found["group_s"] = seconds
            say(f"{length} tokens, {GROUP} at once: {seconds:.3f} s")
        server.flush(self.url)
        return found

    def second_turn(self, prompts: list[list[int]], empty: bool, policy: str = "default") -> dict[str, Any]:
        """After the first prompt, which is cached. Each new turn differs, so that no more than it is found there."""
        before = self._counters()
        seconds, cached = [], 0
        for turn in range(REPEATS):
            if empty and self.sparse:
                policies.switch(self.url, policy, self.sparse["policy"])  # a switch empties the page cache
            elif empty and self.room:
                for other in self.pushing_out(prompts):
                    first_tokens(self.url, [other])
            time.sleep(0.2)
            new = prompts[1 + turn][:NEW_TOKENS][:: -1 if empty else 1]
            trace = first_tokens(self.url, [prompts[0] + new])[0]
            seconds.append(trace.ttft)
            cached = trace.cached
        found: dict[str, Any] = {"s": statistics.median(seconds), "runs_s": seconds, "cached_tokens": cached}
        if self.sparse:
            found["units"] = {name: value - before[name] for name, value in self._counters().items()}
        where = f" from the host ({policy})" if empty else ""
        say(f"{len(prompts[0])} tokens, second turn{where}: {found['s']:.3f} s")
        return found

    def pushing_out(self, prompts: list[list[int]]) -> list[list[int]]:
        """Prompts after which the first is no longer on the GPU; none if there are too few."""
        count = self.room // len(prompts[0]) + 1
        return prompts[1 : 1 + count] if count < len(prompts) else []

    def _counters(self) -> dict[str, int]:
        if not self.sparse:
            return {}
        total = server.state(self.url)["sparse_kv"]["total"]
        return {name: total[name] for name in ("prefix_cache", "prefix_host")}


def measure(chosen: argparse.Namespace, variant: str, prompts: dict[int, list[list[int]]]) -> dict[str, Any]:
    """Starts the variant's server, or asks the one at ``--url``."""
    if chosen.url:
        return figures(chosen, variant, chosen.url, prompts)
    command = options.command(chosen, variant)
    with server.Server(command, chosen.logs, {"HF_HUB_OFFLINE": "1"}, say) as running:
        found = figures(chosen, variant, running.url, prompts)
        memory = running.memory
        return {
            "command": running.command,
            "peak_memory_gb": round(memory.peak / 1e9, 2),
            "peak_memory_source": memory.source,
            **found,
        }


def figures(chosen: argparse.Namespace, variant: str, url: str, prompts: dict[int, list[list[int]]]) -> dict[str, Any]:
    state = server.state(url)
    room = server.info(url)["max_total_num_tokens"] if variant == "hicache" else None
    measurement = Measurement(url, prompts, state.get("sparse_kv"), room)
    return {
        "memory_usage": state.get("memory_usage"),
        "plan": (state.get("sparse_kv") or {}).get("plan"),
        "lengths": {str(length): measurement.length(length, group=length <= 32768) for length in chosen.lengths},
    }


def main(argv: list[str] | None = None) -> int:
    try:
        chosen = options.parse(argv)
        corpus = Corpus(chosen.text, chosen.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen.context = chosen.context or max(chosen.lengths) + NEW_TOKENS + 16
    tokenizer = plain_tokenizer(chosen.model)
    prompts = {length: corpus.prompts(tokenizer, max(GROUP, REPEATS + 1), length) for length in chosen.lengths}
    report: dict[str, Any] = {
        "benchmark": "prefill",
        **record.facts("benchmark.serving.prefill", argv),
        "corpus": corpus.digest,
        "variants": {},
    }
    for variant in chosen.variants:
        try:
            report["variants"][variant] = measure(chosen, variant, prompts)
        except RuntimeError as error:
            say(f"{variant}: {error}")
            report["variants"][variant] = {"failed": str(error)[-2000:]}
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("failed" in found for found in report["variants"].values()))


if __name__ == "__main__":
    sys.exit(main())
