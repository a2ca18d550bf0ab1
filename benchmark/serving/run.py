"""Decode throughput of dense SGLang and of sparse KV, over HTTP, on one model and the same prompts.

    python -m benchmark.serving.run --model MODEL --output result.json \\
        --variants dense sparse --lengths 8192 32768 --batches 1 4 8 16 max --policies default on_demand oracle

Each variant is a ``launch_server`` of its own, one after another. Prompts are real text, distinct, of the exact
length, and prefilled once: every batch size and policy finds them in the prefix cache. B streams start together;
the speed counts from the moment when the last of them is warm until the first finishes. Results are saved after
every cell, and a second command with the same --output continues where the first stopped. README.md explains
the options and the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests

from benchmark.corpus import Corpus, plain_tokenizer
from benchmark.serving import options, policies, server
from benchmark.serving.client import first_tokens, run_streams, window_of
from benchmark.serving.record import Record, difference

_START = time.monotonic()
# A command must end by itself, so a cell starts only if it can be expected to finish in time.
_START_SECONDS, _CELL_SECONDS = 120, 20


def say(text: str) -> None:
    print(f"[serving] {time.monotonic() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


class OutOfTime(Exception):
    """The command's time does not suffice for the next piece of work."""


class Benchmark:
    """One command: ``chosen`` as ``options.parse`` gave it, ``record`` where results go."""

    def __init__(self, chosen: argparse.Namespace, record: Record):
        self.options, self.record = chosen, record
        self.corpus = Corpus(chosen.text, chosen.seed)
        self.start = time.monotonic()
        self._tokenizer: Any = None

    # ------------------------------------------------------------------ running

    def run(self) -> None:
        for variant in self.options.variants:
            missing = [cell for cell in self.cells(variant, None) if self.record.find(cell) is None]
            if not missing:
                say(f"{variant}: all cells are measured")
                continue
            if self.options.url:
                self.measure_all(variant, self.options.url, None)
                continue
            self.check_time(_START_SECONDS if self.options.device == "cuda" else 40)
            command, folder = options.command(self.options, variant), self.options.logs
            with server.Server(command, folder, {"HF_HUB_OFFLINE": "1"}, say) as running:
                try:
                    self.measure_all(variant, running.url, running)
                except OutOfTime:
                    running.keep = self.options.keep_server
                    raise
                finally:
                    self.note_server(variant, running)

    def note_server(self, variant: str, running: server.Server) -> None:
        peak, cap = running.memory.peak / 1e9, self.options.cap_gb
        self.record.server(
            {
                "variant": variant,
                "command": running.command,
                "start_seconds": round(running.start_seconds, 1),
                "peak_memory_gb": round(peak, 2),
                "peak_memory_gb_each": [round(each / 1e9, 2) for each in running.memory.peaks],
                "peak_memory_source": running.memory.source,
                "over_cap": bool(cap and running.memory.source != "resident" and peak > cap),
            }
        )
        say(f"{variant}: took {peak:.1f} GB ({running.memory.source}){' OVER THE CAP' if cap and peak > cap else ''}")

    def cells(self, variant: str, capacity: int | None, length: int | None = None) -> list[dict[str, Any]]:
        """Keys of all cells of a variant, in the order in which they are measured."""
        found = []
        for tokens in [length] if length else self.options.lengths:
            for choice in self.options.policies if options.VARIANTS[variant] is not None else ["default"]:
                policy, batches, lengths = options.policy_choice(choice)
                if lengths and str(tokens) not in lengths:
                    continue
                for batch in self.options.batches:
                    if batches and batch not in batches:
                        continue
                    number: int | str = batch if batch == "max" else int(batch)
                    found.append(
                        {
                            "variant": variant,
                            "length": tokens,
                            "policy": policy,
                            "batch": number,
                            "temperature": self.options.temperature,
                        }
                    )
        return found

    def measure_all(self, variant: str, url: str, running: server.Server | None) -> None:
        started = server.info(url)
        first = started["internal_states"][0]
        sparse = first.get("sparse_kv")
        if options.VARIANTS[variant] is not None and not sparse:
            raise RuntimeError("the server reports no sparse KV in /server_info; look at its log")
        self.record.server(
            {
                "variant": variant,
                "max_total_num_tokens": started["max_total_num_tokens"],
                "max_running_requests": first["effective_max_running_requests_per_dp"],
                "memory_usage": first.get("memory_usage"),
                "plan": sparse and sparse.get("plan"),
                "policy": sparse and sparse.get("policy"),
            }
        )
        try:
            self._measure_lengths(variant, url, running, started, sparse)
        finally:
            if sparse and self.options.policies != ["default"]:
                # What comes next takes the server's policy for that of its start.
                try:
                    policies.switch(url, "default", sparse["policy"])
                except (policies.PolicyRefused, requests.RequestException) as error:  # why it ended is told beside
                    say(f"the server keeps its last policy: {error}")

    def _measure_lengths(
        self,
        variant: str,
        url: str,
        running: server.Server | None,
        started: dict[str, Any],
        sparse: dict[str, Any] | None,
    ) -> None:
        first = started["internal_states"][0]
        for length in self.options.lengths:
            todo = [cell for cell in self.cells(variant, None, length) if self.record.find(cell) is None]
            if not todo:
                continue
            per_request = length + self.options.tokens + 16
            capacity = min(
                started["max_total_num_tokens"] // per_request, first["effective_max_running_requests_per_dp"]
            )
            say(f"{variant}, {length} tokens: holds {capacity} requests")
            wanted = [capacity if cell["batch"] == "max" else cell["batch"] for cell in todo]
            fitting = [batch for batch in wanted if batch <= capacity]
            if fitting:
                prompts = self.prompts(max(fitting) + 1, length)
                if running and running.taken_over:
                    # The command before has measured cold starts, and most prompts are still cached.
                    self.prefill_all(url, prompts[:-1])
                else:
                    self.prefill(variant, url, prompts[:-1], prompts[-1])
            for cell, batch in zip(todo, wanted, strict=True):
                if not 1 <= batch <= capacity:
                    self.record.add({**cell, "skipped": f"holds {capacity} requests"})
                    continue
                self.check_time(self._cell_seconds())
                if running:
                    running.check_alive()
                self.record.add(self.measure(url, {**cell, "streams": batch}, prompts[:batch], sparse))
            server.flush(url)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        self._tokenizer = self._tokenizer or plain_tokenizer(self.options.model)
        return self.corpus.prompts(self._tokenizer, count, length)

    # ------------------------------------------------------------------ one server

    def prefill(self, variant: str, url: str, prompts: list[list[int]], spare: list[int]) -> None:
        """Bring all prompts into the prefix cache and note the cold times to the first token.

        ``spare`` goes first, so that compilation and first allocations do not count.
        """
        length = len(spare)
        first_tokens(url, [spare])
        server.flush(url)
        alone = first_tokens(url, prompts[:1])[0].ttft
        say(f"{variant}, {length} tokens: prefilling {len(prompts)} prompts, {alone:.1f} s each at first")
        self.check_time(alone * 1.1 * len(prompts) + _CELL_SECONDS)
        start = time.monotonic()
        self.prefill_all(url, prompts[1:])
        seconds = time.monotonic() - start
        self.record.server(
            {
                "variant": variant,
                f"cold_ttft_s_{length}": round(alone, 4),
                f"prefill_tokens_per_second_{length}": (
                    round((len(prompts) - 1) * length / seconds, 1) if len(prompts) > 1 else None
                ),
            }
        )
        say(f"cold TTFT {alone:.3f} s")

    def prefill_all(self, url: str, prompts: list[list[int]]) -> None:
        # A few at a time: enough to fill chunks, and progress can be shown.
        for at in range(0, len(prompts), 4):
            first_tokens(url, prompts[at : at + 4])
            say(f"prefilled {min(at + 4, len(prompts))} of {len(prompts)}")

    def sampling(self, tokens: int, temperature: float) -> dict[str, Any]:
        return {
            "max_new_tokens": tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream_interval": self.options.stream_interval,
        }

    def measure(
        self, url: str, cell: dict[str, Any], prompts: list[list[int]], sparse: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One cell: its streams, its window, and the counters of that window."""
        o = self.options
        if sparse and (len(o.policies) > 1 or cell["policy"] != "default"):
            try:
                policies.switch(url, cell["policy"], sparse["policy"])
            except policies.PolicyRefused as refused:
                say(f"{cell['policy']}: {refused}")
                return {**cell, "failed": str(refused)}
        begin = time.monotonic()

        async def probe() -> Any:
            return await asyncio.to_thread(server.state, url) if sparse else None

        traces, before, after = asyncio.run(
            run_streams(url, prompts, self.sampling(o.tokens, o.temperature), o.warmup, probe)
        )
        try:
            window = window_of(traces, o.warmup)
        except ValueError as error:
            say(f"{cell['policy']}, batch {cell['streams']}: {error}")
            return {**cell, "failed": str(error)}
        result = {**cell, **window.summary(), "seconds": round(time.monotonic() - begin, 2)}
        if before and after:
            result["counters"] = counters = difference(before["sparse_kv"], after["sparse_kv"])
            counters.pop("policy", None)
            counters.pop("plan", None)
            for rank in counters.get("ranks", ()):
                rank.pop("policy", None)
            result["policy_in_force"] = after["sparse_kv"].get("policy")
            total = counters.get("total", {})
            result["not_exercised"] = [n for n in ("evicted", "useful", "missed") if not total.get(n)]
        say(
            f"{cell['variant']}, {cell['length']} tokens, {cell['policy']}, batch {cell['streams']}: "
            f"{result['tokens_per_second']:.1f} tok/s, {result['tpot_ms']:.2f} ms per token"
        )
        return result

    # ------------------------------------------------------------------ time

    def check_time(self, needed: float) -> None:
        left = self.options.seconds - (time.monotonic() - self.start)
        if left < needed:
            raise OutOfTime(f"{left:.0f} s are left and about {needed:.0f} s are needed")

    def _cell_seconds(self) -> float:
        known = [cell["seconds"] for cell in self.record.data["cells"][-3:] if "seconds" in cell]
        return max([*(1.5 * seconds for seconds in known), 5.0]) if known else _CELL_SECONDS


def rates() -> dict[str, float]:
    """What host and link can do just now, measured in a process of its own: `link_bytes_per_second`, the host to device
    copy rate of pinned memory, and `launch_us`, what torch takes for one small launch: 7 on a host that is left alone,
    and many times that on one that is not. Empty without a GPU.
    """
    code = (
        "import json,torch,time\n"
        "from sglang.srt.sparse_kv.doctor_gpu import launch_seconds\n"
        "a=torch.empty(1<<30,dtype=torch.uint8,pin_memory=True);b=torch.empty_like(a,device='cuda')\n"
        "b.copy_(a,non_blocking=True);torch.cuda.synchronize();t=time.perf_counter()\n"
        "for _ in range(5): b.copy_(a,non_blocking=True)\n"
        "torch.cuda.synchronize();link=5*(1<<30)/(time.perf_counter()-t)\n"
        "print(json.dumps({'link_bytes_per_second':link,'launch_us':round(launch_seconds()*1e6,2)}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return json.loads(result.stdout) if result.returncode == 0 else {}


def main(argv: list[str] | None = None) -> int:
    try:
        chosen = options.parse(argv)
        record = Record(chosen.output, chosen.resume)
        benchmark = Benchmark(chosen, record)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record.begin(
        {key: str(value) if isinstance(value, Path) else value for key, value in vars(chosen).items()}
        | {"resume": [str(path) for path in chosen.resume]},
        benchmark.corpus.digest,
        argv,
    )
    if chosen.device == "cuda" and not chosen.url:
        record.data["runs"][-1] |= rates()
    try:
        benchmark.run()
    except OutOfTime as out:
        say(f"stopped: {out}; run the same command again to continue")
        return 3
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
