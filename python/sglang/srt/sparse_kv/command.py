"""The command line `sglang-sparse-kv`: `plan` without a GPU, weights or torch; `doctor` on the machine that serves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from sglang.srt.sparse_kv import cost, dense, devices, host_memory, model_shape, planner, refusals, report, split
from sglang.srt.sparse_kv.config import DEFAULT_PAGE_SIZE, MODE, config_from_arguments, parse_size
from sglang.srt.sparse_kv.devices import Device


def main(argv: list[str]) -> int:
    """Runs a subcommand. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sglang-sparse-kv", description="Sparse KV for SGLang: what fits, what works."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands.add_parser("plan", help="what a server would do with a GPU and a host, without starting one"))
    doctor = commands.add_parser("doctor", help="whether --sparse-kv can start on this machine, and what to do")
    doctor.add_argument("--json", action="store_true", help="findings as JSON")
    options = parser.parse_args(argv)
    try:
        if options.command == "plan":
            return _plan(options)
        from sglang.srt.sparse_kv import doctor as examination

        return examination.run(options.json)
    except ValueError as error:
        print(f"sglang-sparse-kv: {str(error).rstrip('.')}.", file=sys.stderr)
        return 1


def _add_plan(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(device.name for device in devices.DEVICES)
    parser.add_argument(
        "--model-path", required=True, help="folder of the model, its config.json, or a cached Hub name"
    )
    parser.add_argument("--gpu", help=f"GPU whose figures to use: {names}; default: this machine's, else the H200")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU, such as 40GB; default: all of it")
    parser.add_argument(
        "--link-rate", metavar="SIZE", help="bytes a second from the host, as doctor measures them: 25GB"
    )
    parser.add_argument("--host-memory", metavar="SIZE", default="auto", help="as --sparse-kv-host-memory")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="as --context-length; default: the model's")
    parser.add_argument("--tp", type=int, default=1, help="as --tp-size")
    parser.add_argument("--page-size", type=int, default=DEFAULT_PAGE_SIZE)
    parser.add_argument("--budget", metavar="TOKENS", help="as --sparse-kv-budget")
    parser.add_argument("--config", metavar="JSON", help="as --sparse-kv-config")
    parser.add_argument("--max-running-requests", type=int, metavar="N")
    parser.add_argument("--mem-fraction-static", type=float, metavar="SHARE", help="default: SGLang's for this GPU")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")


def _plan(options: argparse.Namespace) -> int:
    result = plan(options)
    if options.json:
        print(json.dumps({**result, "plan": result["plan"].as_dict()}, indent=1))
    else:
        print("\n".join(_lines(result)))
    return 0


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """The plan and what surrounds it. Raises ValueError, one sentence."""
    config = config_from_arguments(MODE, options.budget, options.host_memory, options.config)
    assert config is not None
    config.check_page_size(options.page_size)
    if options.tp < 1:
        raise ValueError(f"--tp is {options.tp}; give the number of GPUs, at least 1")
    running, share = options.max_running_requests, options.mem_fraction_static
    if running is not None and running < 1:
        raise ValueError(f"--max-running-requests is {running}; give a positive number")
    if share is not None and not 0 < share < 1:
        raise ValueError(f"--mem-fraction-static is {share}; give a share of the GPU's memory between 0 and 1")
    shape = model_shape.read(options.model_path, config)
    refusals.check_ranks(shape.kv_heads, options.tp, "--tp")
    context = options.context or shape.context
    if context < 1:
        raise ValueError(f"--context is {context}; give a positive number of tokens")
    device = _device(options.gpu)
    if options.link_rate:
        device = dataclasses.replace(device, link=float(parse_size(options.link_rate, name="--link-rate")))
    memory = parse_size(options.gpu_memory, name="--gpu-memory") if options.gpu_memory else device.memory
    weights = shape.weights(options.tp)
    geometry = shape.geometry(config, options.page_size, options.tp, context)
    load = split.load_of(config, geometry, weights)
    chunk = dense.chunk(load, device, memory)
    share = share or dense.static_share(memory, options.tp, chunk)
    before = memory - dense.CONTEXT_BYTES
    free = int(before * share) - weights
    if free <= 0:
        raise ValueError(
            f"the weights of one rank take {weights / 1e9:.1f} GB and weights and cache may have "
            f"{max(0, before) * share / 1e9:.1f} GB of the GPU; use a larger GPU, a higher --tp or a higher "
            "--mem-fraction-static"
        )
    given = split.Given(
        device=device,
        free=free,
        host=_host(config.host_memory) // options.tp,
        running=running or split.DEFAULT_MAX_RUNNING_CUDA,
        weights=weights,
        context=context,
        fixed_host=config.host_memory != "auto",
        fixed_running=running is not None,
    )
    made = split.plan_gpu(config, geometry, given)
    outside = {
        "weights": weights,
        "CUDA context": dense.CONTEXT_BYTES,
        planner.LEFT: int(before * (1 - share)),
    }
    return {
        "model": shape.architecture,
        "tp": options.tp,
        "gpu": device.name,
        "gpu_memory": memory,
        "measured": device.measured,
        "mem_fraction_static": share,
        "chunked_prefill_size": chunk,
        "chunk_that_hides_its_prefix": cost.smallest_chunk(load, device),
        "plan": dataclasses.replace(made, outside=outside),
        "dense": [dense.estimate(load, device, free, row["context"]) for row in made.estimates],
    }


def _lines(result: dict[str, Any]) -> list[str]:
    figures = "measured" if result["measured"] else "published bandwidths, times the shares that an H200 reaches"
    lines = [
        f"{result['model']} on {result['tp']} x {result['gpu']} with {result['gpu_memory'] / 1e9:.1f} GB "
        f"({figures}); --mem-fraction-static {result['mem_fraction_static']}",
        report.table(result["plan"]),
        "  plain SGLang in the same memory",
    ]
    rows = [
        (str(row["context"]), str(row["requests"]), f"{row['tokens_per_second']:.0f}")
        if row["requests"]
        else (str(row["context"]), "does not fit", "")
        for row in result["dense"]
    ]
    lines += report.columns([("context", "requests", "tokens/s"), *rows])
    chunk, least = result["chunked_prefill_size"], result["chunk_that_hides_its_prefix"]
    lines.append(f"  --chunked-prefill-size {chunk}: from {least} tokens on a chunk hides the transfer of its prefix")
    if result["tp"] > 1:
        lines.append("  what ranks say to each other is not counted in any tokens/s")
    return lines


def _host(size: int | str) -> int:
    if size == "auto":
        return int(split.HOST_SHARE * host_memory.available())
    return parse_size(size, total=host_memory.meminfo("MemTotal"), name="--host-memory")


def _device(name: str | None) -> Device:
    found = devices.find(name or devices.this_gpu() or "H200")
    if found is None:
        names = ", ".join(device.name for device in devices.DEVICES)
        raise ValueError(
            f"{name or 'this GPU'} is not among the GPUs whose figures are known; give --gpu, one of {names}"
        )
    return found
