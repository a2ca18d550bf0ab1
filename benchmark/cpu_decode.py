"""Decode speed of one request on the CPU engine, plain SGLang against sparse KV, in one run.

Each variant is a server of its own, started, measured and stopped before the next. A request of ``--context``
real tokens is decoded ``--repeats`` times after a warm-up; its speed is the tokens after the first by the time
between the first and the last, so prefill does not count. The servers run greedily and ignore the end token.

    python -m benchmark.cpu_decode --model demo-model/SmolLM2-135M-Instruct --output result.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests

from benchmark.corpus import Corpus, load_tokenizer
from benchmark.serving import record, server


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def decode(url: str, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Decode ``tokens`` tokens after ``prompt``; returns (tokens per second, token ids)."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    first = last = 0.0
    at_first = produced = 0
    ids: list[int] = []
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            last = time.perf_counter()
            produced = chunk["meta_info"]["completion_tokens"]
            ids = chunk["output_ids"]
            if not first:
                first, at_first = last, produced
    if produced != tokens:
        raise RuntimeError(f"Asked for {tokens} tokens, got {produced}.")
    return (produced - at_first) / (last - first), ids


def measure(url: str, prompt: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    decode(url, prompt, 8)
    runs = [decode(url, prompt, tokens) for _ in range(repeats)]
    speeds = [round(speed, 3) for speed, _ in runs]
    return {
        "tokens_per_second": round(statistics.median(speeds), 3),
        "runs": speeds,
        "output_ids": runs[-1][1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode speed on the CPU, plain against sparse KV.")
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048], help="one sparse server for each")
    parser.add_argument("--seed", type=int, default=0, help="of the text")
    parser.add_argument("--minimum", type=float, help="fail when a sparse server is below this share of plain")
    parser.add_argument("--output", type=Path, help="also write the result here")
    options = parser.parse_args()

    corpus = Corpus(seed=options.seed)
    prompt = corpus.prompts(load_tokenizer(options.model), 1, options.context)[0]
    common = ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle", "--max-running-requests", "4"]
    # Plain SGLang would take most of the machine's memory for its KV cache; page 16 is what sparse KV uses.
    variants = {"plain": ["--max-total-tokens", "20000", "--page-size", "16"]}
    for budget in options.budgets:
        variants[f"sparse_{budget}"] = ["--sparse-kv", "dualdecoder", "--sparse-kv-budget", str(budget)]

    results: dict[str, Any] = {}
    for name, arguments in variants.items():
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", options.model, *common, *arguments]
        with (
            tempfile.TemporaryDirectory(prefix="cpu-decode-") as folder,
            server.Server(command, Path(folder), {"HF_HUB_OFFLINE": "1"}, say) as running,
        ):
            results[name] = measure(running.url, prompt, options.tokens, options.repeats)
            if name != "plain":
                results[name]["counters"] = server.state(running.url)["sparse_kv"]["total"]
        say(f"{name}: {results[name]['tokens_per_second']} tok/s of {results[name]['runs']}")

    plain = results["plain"]
    for name, result in results.items():
        result["arguments"] = common + variants[name]
        result["share_of_plain"] = round(result["tokens_per_second"] / plain["tokens_per_second"], 3)
        same = [a == b for a, b in zip(result["output_ids"], plain["output_ids"], strict=True)]
        result["tokens_equal_to_plain"] = same.index(False) if False in same else len(same)
    for result in results.values():
        del result["output_ids"]
    report = {
        "benchmark": "cpu_decode",
        **record.facts("benchmark.cpu_decode"),
        "model": Path(options.model).name,
        "context": options.context,
        "tokens": options.tokens,
        "seed": options.seed,
        "corpus": corpus.digest,
        "results": results,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    slowest = min(result["share_of_plain"] for result in results.values())
    if options.minimum is not None and slowest < options.minimum:
        say(f"error: {slowest} of plain SGLang's speed, below the {options.minimum} asked for.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
