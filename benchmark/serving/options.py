"""Options of the serving benchmark, and the command lines of the servers that follow from them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark.serving import policies, server

# What each variant adds to --sparse-kv-config; None for plain SGLang.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "hicache": None,
    "sparse": {},
    "one_row": {"guide": "none"},
    "paper": {"residency": "none"},
}
# The backend and layout that loaded a prefix soonest: docs/results.md, time to the first token.
HICACHE = ["--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct", "--page-size", "64"]
# A batch runs in the next larger captured size, so gaps are narrow where time grows with the size.
GRAPHS = [1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode throughput of dense SGLang and sparse KV over HTTP.")
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--output", type=Path, required=True, help="result file; what it holds is not repeated")
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="more result files, read only")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["dense", "sparse"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192], help="prompt tokens")
    parser.add_argument("--batches", nargs="+", default=["1", "4", "max"], help='streams, or "max"')
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["default"],
        help="of policies.json, or key=value,…; NAME@4+16@32768: at these batches and lengths only",
    )
    parser.add_argument("--tokens", type=int, default=384, help="tokens each stream decodes")
    parser.add_argument("--warmup", type=int, default=128, help="tokens of each stream before counting")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0, help="of texts and sampling")
    parser.add_argument("--stream-interval", type=int, default=4, help="tokens per chunk")
    parser.add_argument("--budget", type=int, default=1664, help="of the sparse variants (tokens)")
    parser.add_argument("--host-memory", default="auto", help="--sparse-kv-host-memory")
    parser.add_argument("--sparse-config", type=json.loads, default={}, help="more --sparse-kv-config (JSON)")
    parser.add_argument("--server-args", default="", help="added to every server's command line")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a server, --tp-size")
    parser.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size")
    parser.add_argument("--max-requests", type=int, default=64, help="--max-running-requests")
    parser.add_argument("--graphs", type=int, nargs="*", default=GRAPHS, help="captured batch sizes")
    parser.add_argument("--cap-gb", type=float, default=0, help="memory of each GPU of a server, 0 for no cap")
    parser.add_argument("--reserve-gb", type=float, default=4.0, help="part of the cap beside weights and KV")
    parser.add_argument("--seconds", type=float, default=560, help="the command ends within about this time")
    parser.add_argument("--text", type=Path, help="folder with text (default: Python's standard library)")
    parser.add_argument("--url", help="measure this running server instead of starting one")
    parser.add_argument("--context", type=int, help="--context-length (default: the longest prompt and answer)")
    parser.add_argument("--keep-server", action="store_true", help="leave it running when time runs out")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "serving-benchmark")
    options = parser.parse_args(argv)
    for policy in options.policies:
        policies.resolve(policy_choice(policy)[0])
    for batch in options.batches:
        if batch != "max" and not (batch.isdigit() and int(batch)):
            parser.error(f'--batches has {batch!r}; use positive numbers or "max"')
    if "hicache" in options.variants and not options.host_memory.removesuffix("GB").isdigit():
        parser.error(f"hicache takes --host-memory in whole GB, such as 48GB, got {options.host_memory!r}")
    if options.tokens <= options.warmup:
        parser.error(f"--tokens {options.tokens} leave nothing to count after --warmup {options.warmup}")
    if options.url and len(options.variants) != 1:
        parser.error("--url is one server; name its one variant with --variants")
    return options


def policy_choice(choice: str) -> tuple[str, list[str], list[str]]:
    """NAME@BATCHES@LENGTHS as name, batches and prompt lengths; an empty list stands for all."""
    name, _, only = choice.partition("@")
    batches, _, lengths = only.partition("@")
    return name, [part for part in batches.split("+") if part], [part for part in lengths.split("+") if part]


def command(options: argparse.Namespace, variant: str) -> list[str]:
    """How a variant is started, but for its port; the flags beside ``--sparse-kv`` are the same for all."""
    o = options
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", o.model]
    command += ["--random-seed", str(o.seed), "--incremental-streaming-output"]
    command += ["--context-length", str(o.context or max(o.lengths) + o.tokens + 16)]
    if o.device == "cpu":
        command += ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle", "--page-size", "16"]
        command += ["--max-running-requests", str(max(numbers(options)))]
        if VARIANTS[variant] is None:
            command += ["--max-total-tokens", "20000"]
    else:
        command += ["--dtype", o.dtype, "--sampling-backend", "pytorch"]
        command += ["--chunked-prefill-size", str(o.chunk)]
        # Request tables are sized by the most requests times the context: 2 GB where SGLang decides alone.
        command += ["--max-running-requests", str(o.max_requests)]
        graphs = {size for size in (*numbers(options), *o.graphs) if size <= o.max_requests}
        command += ["--cuda-graph-bs-decode", *map(str, sorted({*graphs, o.max_requests}))]
        fraction = memory_fraction(options)
        if fraction:
            command += ["--mem-fraction-static", f"{fraction:.4f}"]
        if o.tp > 1:
            command += ["--tp-size", str(o.tp)]
        if VARIANTS[variant] is None:
            # Its second turns come sooner without graphs of prefills: docs/results.md, time to the first token.
            command += ["--attention-backend", "flashinfer", "--disable-prefill-cuda-graph"]
    if variant == "hicache":
        command += ["--enable-hierarchical-cache", "--hicache-size", str(int(o.host_memory.removesuffix("GB")))]
        command += HICACHE
    more = VARIANTS[variant]
    if more is not None:
        config = {"debug": True, **o.sparse_config, **more}
        command += ["--sparse-kv", "dualdecoder", "--sparse-kv-budget", str(o.budget)]
        command += ["--sparse-kv-host-memory", o.host_memory, "--sparse-kv-config", json.dumps(config)]
    return command + o.server_args.split()


def memory_fraction(options: argparse.Namespace) -> float | None:
    """``--mem-fraction-static`` that keeps a process within ``--cap-gb``.

    SGLang counts weights and KV against this share of what is free before loading; context, workspaces,
    activations and graphs come on top, for which ``--reserve-gb`` is set aside.
    """
    total = server.gpu_total_bytes()
    if not options.cap_gb or total is None:
        return None
    return (options.cap_gb - options.reserve_gb) * 1e9 / (total - 0.7e9)


def numbers(options: argparse.Namespace) -> list[int]:
    """The batch sizes given as numbers."""
    return [int(batch) for batch in options.batches if batch != "max"] or [1]
