"""A soak: mixed agent traffic on a running server for a given time, and whether everything stayed as it was.

    python -m benchmark.soak.run --url http://127.0.0.1:30000 --seconds 600

Prints one JSON object; the status is 1 when something went wrong. Afterwards the server is idle, its caches are empty,
and every token of its pool is free again.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import requests

from benchmark.corpus import Corpus
from benchmark.serving import server
from benchmark.soak.traffic import CHARACTERS, Client, Tally
from benchmark.soak.watch import Watch, verdict

IDLE_SECONDS = 120
BAD_LOG = ("Traceback (most recent call last)", "leak detected", "use-after-free", "double free")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server on this machine")
    where.add_argument("--serve", metavar="FLAGS", help="start one with these flags of launch_server, and end it")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--longest", type=int, default=0, help="tokens of the longest prompt; 0: an eighth of the pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--period", type=float, default=5, help="seconds between samples")
    parser.add_argument("--growth", type=float, default=0.02, help="share by which memory may grow in a third")
    parser.add_argument("--drop", type=float, default=0.1, help="by how much the hit rate may fall")
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a silent request hangs")
    parser.add_argument("--without", nargs="*", default=[], help="kinds of traffic to leave out, such as form")
    parser.add_argument("--inexact", action="store_true", help="for half precision, where batches round differently")
    parser.add_argument("--log", type=Path, help="the server's log: what it gains is searched for tracebacks and leaks")
    parser.add_argument("--output", type=Path, help="the same JSON, with all samples")
    options = parser.parse_args(words)
    if options.url:
        return report(soak(options.url, options), options)
    folder = Path(tempfile.gettempdir()) / "soak"
    command = [sys.executable, "-m", "sglang.launch_server", *shlex.split(options.serve)]
    with server.Server(command, folder, {}, lambda text: print(text, file=sys.stderr, flush=True)) as started:
        options.log = started.log
        return report(soak(started.url, options), options)


def soak(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the traffic and returns what was seen; `complaints` is empty when all is well."""
    logged = options.log.stat().st_size if options.log else 0
    asked = server.info(url)
    plan, incremental = asked["internal_states"][0]["sparse_kv"]["plan"], asked["incremental_streaming_output"]
    longest = options.longest or min(plan["host_tokens"], plan["max_context"]) // 8
    # Documents first, in the same order for every seed: they are what requests share.
    files = Corpus().files[:40]
    text = "\n".join(path.read_text(errors="replace") for path in files)
    probes = {text[i * 5000 : i * 5000 + longest * CHARACTERS // 3]: [] for i in range(1, 4)}
    tally = Tally()
    first = Client(url, text, longest, probes, tally, options.seed, (), options.patience, incremental)
    for prompt in probes:
        probes[prompt] = first.ask_probe(prompt)
    watch = Watch(url, options.period)
    known = {} if options.inexact else probes
    seeds = [random.Random(f"{options.seed} {number}").getrandbits(32) for number in range(options.clients)]
    more = (options.without, options.patience, incremental)
    clients = [Client(url, text, longest, known, tally, seed, *more) for seed in seeds]
    start = time.monotonic()
    threads = [threading.Thread(target=client.run, args=(start + options.seconds,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    watch.stop()
    found = verdict(watch.samples, options.growth, options.drop)
    complaints = [*found.pop("complaints"), *tally.failures, *afterwards(url, first, options, logged)]
    return {
        "seconds": round(seconds, 1),
        "clients": options.clients,
        "longest": longest,
        "host_tokens": plan["host_tokens"],
        "cache_tokens": plan["slots"] * plan["shape"]["page_size"],
        "requests": sum(tally.done.values()),
        "tokens": tally.tokens,
        "done": dict(sorted(tally.done.items())),
        **found,
        "complaints": complaints,
        "samples": watch.samples,
    }


def afterwards(url: str, client: Client, options: argparse.Namespace, logged: int) -> list[str]:
    """What is wrong with an idle server: tokens still in use, answers that changed, complaints in its log.

    logged: bytes of the log from before the traffic.
    """
    give_up = time.monotonic() + IDLE_SECONDS
    while True:
        server.state(url)  # wakes a sleeping scheduler
        load = requests.get(f"{url}/v1/loads?include=core", timeout=60).json()["loads"][0]
        if load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0:
            break
        if time.monotonic() > give_up:
            return [f"not idle after {IDLE_SECONDS} s: {load}"]
        time.sleep(0.5)
    wrong = []
    for prompt in client.probes:
        found = client.ask_probe(prompt)
        if not options.inexact and found != client.probes[prompt]:
            wrong.append(f"afterwards a probe gave {found}, not {client.probes[prompt]}")
    time.sleep(1)
    server.flush(url)
    ranks = [(rank["free_tokens"], rank["host_tokens"]) for rank in server.state(url)["sparse_kv"]["ranks"]]
    wrong += [f"{free} tokens are free of {total}" for free, total in ranks if free != total]
    if options.log:
        text = options.log.read_bytes()[logged:].decode(errors="replace")
        wrong += [f"the log has {bad!r}" for bad in BAD_LOG if bad in text]
    return wrong


def report(found: dict[str, Any], options: argparse.Namespace) -> int:
    head = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    found = {"command": shlex.join(sys.argv), "commit": head, "date": time.strftime("%Y-%m-%d"), **found}
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    return 1 if found["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
