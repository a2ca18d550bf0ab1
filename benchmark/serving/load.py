"""Serving under load: requests arrive at random, as `sglang.bench_serving` sends them, at one server after another.

    python -m benchmark.serving.load --model MODEL --output load.json --variants dense sparse --workload agents \\
        --sessions 36 --turns 3 --shared 2048 --first 12000 --later 500 --answer 384 --rates 0.75 --cap-gb 40

Arrivals are Poisson, `--rates` sessions a second; a session's next turn follows its last answer. Options that this
command does not know are those of `benchmark.serving.run`, which start the servers. Every cell is saved when it is
done; the same command again measures what is missing. README.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmark import chart
from benchmark.corpus import Corpus, plain_tokenizer
from benchmark.serving import options, server
from benchmark.serving.record import difference, facts
from benchmark.serving.workloads import NAMES, Workload

_START = time.monotonic()
KEY = ("variant", "rate", "workload")


def say(text: str) -> None:
    print(f"[load] {time.monotonic() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def figures(found: dict[str, Any], turns: int, limit: float) -> dict[str, Any]:
    """Of one run's line of `bench_serving` with details: turns of a session follow one another in every list.

    limit: seconds within which a request must be answered whole to count for goodput.

    Raises:
        ValueError: requests failed; the text holds the first error.
    """
    errors = [error for error in found["errors"] if error]
    if errors:
        raise ValueError(f"{len(errors)} of {len(found['errors'])} requests failed: {errors[0].strip()[-300:]}")
    ttft, lengths = found["ttfts"], found["output_lens"]
    done = [first + sum(gaps) for first, gaps in zip(ttft, found["itls"])]
    tpot = [1e3 * (whole - first) / (n - 1) for whole, first, n in zip(done, ttft, lengths) if n > 1]
    sessions = [sum(done[at : at + turns]) for at in range(0, len(done), turns)]
    result: dict[str, Any] = {
        "requests": len(done),
        "seconds": found["duration"],
        "output_tokens_per_second": sum(lengths) / found["duration"],
        "most_at_once": found["max_concurrent_requests"],
        "goodput_rps": sum(each <= limit for each in done) / found["duration"],
        "p99_within_limit": quantile(done, 0.99) <= limit,
    }
    named = {"ttft_s": ttft, "tpot_ms": tpot, "completion_s": done, "session_s": sessions}
    for name, values in named.items():
        result |= {f"{name}_p50": quantile(values, 0.5), f"{name}_p99": quantile(values, 0.99)}
    result["turns"] = [
        {
            "turn": turn + 1,
            "ttft_s_p50": quantile(ttft[turn::turns], 0.5),
            "ttft_s_p99": quantile(ttft[turn::turns], 0.99),
            "tpot_ms_p50": quantile(tpot[turn::turns], 0.5) if len(tpot) == len(done) else None,
            "cached_tokens": sum(found["cached_tokens"][turn::turns]) / (len(done) // turns),
        }
        for turn in range(turns)
    ]
    return result


def send(url: str, load: Workload, rate: float, chosen: argparse.Namespace, fixed: list[str]) -> dict[str, Any]:
    """One run of the client. Raises RuntimeError with the end of its output when it fails."""
    lines, log = chosen.logs / "client.jsonl", chosen.logs / "client.log"
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.bench_serving", "--base-url", url, "--model", chosen.model]
    command += ["--num-prompts", str(load.sessions), "--request-rate", str(rate), "--seed", str(chosen.seed), *fixed]
    # A chat takes its temperature from the body alone.
    body = {"temperature": chosen.temperature} if "sglang-oai-chat" in fixed else {}
    command += ["--temperature", str(chosen.temperature), "--extra-request-body", json.dumps(body)]
    command += ["--output-details", "--cache-report", "--flush-cache", "--disable-tqdm", "--output-file", str(lines)]
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=chosen.patience).returncode
    if status or not lines.is_file():
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"the client ended with status {status}:\n{end}")
    return json.loads(lines.read_text().splitlines()[-1]) | {"client": shlex.join(["python", *command[1:]])}


def measure(
    url: str, variant: str, load: Workload, rate: float, chosen: argparse.Namespace, fixed: list[str]
) -> dict[str, Any]:
    before = server.state(url)
    found = send(url, load, rate, chosen, fixed)
    after = server.state(url)
    cell = {"variant": variant, "rate": rate, "workload": load.name, "sizes": vars(load), "client": found["client"]}
    cell |= figures(found, load.turns, chosen.limit)
    if before.get("sparse_kv"):
        counters = difference(before["sparse_kv"], after["sparse_kv"])
        cell["counters"] = {name: value for name, value in counters.items() if name not in ("plan", "policy", "ranks")}
        cell["policy_in_force"] = after["sparse_kv"]["policy"]
        cell["not_exercised"] = [name for name in ("evicted", "useful", "missed") if not counters["total"].get(name)]
        plan = after["sparse_kv"]["plan"]
        cache = (plan.get("device_bytes") or {}).get("page cache")
        if cache:
            per_token = plan["host_bytes"] / plan["host_tokens"]
            cell["kept_over_cache"] = min(load.kept, plan["host_tokens"]) * per_token / cache
            cell["running_over_cache"] = cell["most_at_once"] * load.longest * per_token / cache
            if cell["kept_over_cache"] < 4:
                cell["not_exercised"].append("4 x the cache")
    speed, first, whole = (cell[name] for name in ("output_tokens_per_second", "ttft_s_p99", "completion_s_p99"))
    say(f"{variant}, {rate} a second: {speed:.0f} tok/s, TTFT p99 {first:.2f} s, completion p99 {whole:.1f} s")
    return cell


def table(cells: list[dict[str, Any]]) -> str:
    """A line a cell, then a line a turn; a figure that is missing shows as nan."""
    cells = sorted(cells, key=lambda cell: (cell["workload"], cell["rate"]))
    which = "workload    rate  variant "
    lines = [which + " tok/s  TTFT p50    p99 s  TPOT p50   p99 ms  whole p50    p99 s  goodput/s  at once"]
    shown = ("ttft_s_p50", "ttft_s_p99", "tpot_ms_p50", "tpot_ms_p99", "completion_s_p50", "completion_s_p99")
    for cell in cells:
        name = f"{cell['workload']:9} {cell['rate']:6g}  {cell['variant']:8}"
        numbers = "".join(f"{cell[each]:10.2f}" for each in shown)
        rest = f"{cell['goodput_rps']:10.2f}{cell['most_at_once']:9}"
        remarks = "".join(f"  not exercised: {each}" for each in cell.get("not_exercised", ()))
        lines.append(f"{name}{cell['output_tokens_per_second']:6.0f}{numbers}{rest}{remarks}")
    lines.append(f"\n{which}  turn  TTFT p50    p99 s  TPOT p50  cached tokens")
    for cell in cells:
        name = f"{cell['workload']:9} {cell['rate']:6g}  {cell['variant']:8}"
        for turn in cell["turns"] if len(cell["turns"]) > 1 else ():
            each = (turn["ttft_s_p50"], turn["ttft_s_p99"], turn["tpot_ms_p50"] or math.nan)
            numbers = "".join(f"{value:10.2f}" for value in each)
            lines.append(f"{name}{turn['turn']:6}{numbers}{turn['cached_tokens']:15.0f}")
    return "\n".join(lines)


def picture(cells: list[dict[str, Any]]) -> str:
    """P99 of completion over the arrival rate, as SVG."""
    series: dict[str, chart.Points] = {}
    for cell in cells:
        series.setdefault(f"{cell['variant']}, {cell['workload']}", []).append((cell["rate"], cell["completion_s_p99"]))
    return chart.lines("Completion of a request, 99th percentile", "sessions a second", "seconds", series)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description="Latency and goodput under random arrivals.", add_help=False)
    parser.add_argument("--workload", choices=NAMES, default="agents")
    sizes = {"--sessions": 24, "--answer": 128, "--first": 2048, "--shared": 1024, "--groups": 4}
    for flag, size in sizes.items():
        parser.add_argument(flag, type=int, default=size)
    parser.add_argument("--turns", type=int, default=3, help="of an agent")
    parser.add_argument("--later", type=int, default=256, help="tokens that each later turn brings")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="sessions a second")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a request that counts for goodput")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for one run of the client")
    parser.add_argument("--svg", type=Path)
    mine, rest = parser.parse_known_args(argv)
    chosen = options.parse(rest)
    agents = mine.workload == "agents"
    load = Workload(
        mine.workload,
        mine.sessions,
        mine.answer,
        mine.first,
        shared=0 if mine.workload == "random" else mine.shared,
        groups=mine.groups if mine.workload == "shared" else 1,
        turns=mine.turns if agents else 1,
        later=mine.later if agents else 0,
    )
    chosen.context = chosen.context or load.longest
    for name in ("rates", "limit", "patience", "svg"):
        setattr(chosen, name, getattr(mine, name))
    return chosen, load


def main(argv: list[str] | None = None) -> int:
    chosen, load = parse(argv)
    chosen.logs.mkdir(parents=True, exist_ok=True)
    data = json.loads(chosen.output.read_text()) if chosen.output.is_file() else {"runs": [], "cells": []}
    corpus = Corpus(chosen.text, chosen.seed)
    run = facts("benchmark.serving.load", argv) | {"seed": chosen.seed, "corpus": corpus.digest, "servers": []}
    data["runs"].append(run)

    def save() -> None:
        chosen.output.write_text(json.dumps(data, indent=1))

    fixed: list[str] = []
    have = {tuple(cell[name] for name in KEY) for cell in data["cells"]}
    failed = False
    for variant in chosen.variants:
        todo = [rate for rate in chosen.rates if (variant, rate, load.name) not in have]
        if not todo:
            continue
        try:
            fixed = fixed or load.arguments(plain_tokenizer(chosen.model), chosen.logs, corpus)
            if chosen.url:
                cells = [measure(chosen.url, variant, load, rate, chosen, fixed) for rate in todo]
                data["cells"] += [{**cell, "run": len(data["runs"]) - 1} for cell in cells]
                continue
            with server.Server(options.command(chosen, variant), chosen.logs, {"HF_HUB_OFFLINE": "1"}, say) as running:
                started = {"variant": variant, "command": running.command, "start_seconds": running.start_seconds}
                run["servers"].append(started)
                started["max_total_num_tokens"] = server.info(running.url)["max_total_num_tokens"]
                plan = (server.state(running.url).get("sparse_kv") or {}).get("plan")
                started["plan"] = plan
                for rate in todo:
                    cell = measure(running.url, variant, load, rate, chosen, fixed)
                    data["cells"].append({**cell, "run": len(data["runs"]) - 1})
                    started["peak_memory_gb"] = round(running.memory.peak / 1e9, 2)
                    started["peak_memory_source"] = running.memory.source
                    save()
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            # The other variants may still be measured.
            failed = True
            print(f"error: {variant}: {error}", file=sys.stderr)
    save()
    if data["cells"]:
        print(table(data["cells"]))
        if chosen.svg:
            chosen.svg.write_text(picture(data["cells"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
