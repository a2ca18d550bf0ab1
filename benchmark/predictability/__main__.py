"""What predicts the next step's pages of a model on given contexts.

    python -m benchmark.predictability --model MODEL --output FOLDER [--prompts FILE ...] [-- SERVER FLAGS]

Starts a server that writes down what it selects, decodes every context under every guide and temperature, and reports.
What a folder holds already is not run again, so a long study may be done in parts, and a finished one reported anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmark.corpus import load_tokenizer
from benchmark.predictability import prompts, record, report
from benchmark.predictability.recording import Run, Trace, load
from benchmark.serving import server
from benchmark.serving.record import facts


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of the model; without it, only a report is made")
    parser.add_argument("--output", type=Path, required=True, help="folder of recordings and report")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSONL or plain text files")
    parser.add_argument("--count", type=int, default=4, help="contexts, where no files are given")
    parser.add_argument("--context", type=int, default=4096, help="most tokens of a context")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded after each")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--config", type=json.loads, default={}, help="more --sparse-kv-config (JSON)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument(
        "--guides",
        nargs="+",
        choices=record.GUIDES,
        default=list(record.GUIDES),
        help="own: a chain over its own pages",
    )
    parser.add_argument("--link", type=float, default=50.0, help="GB/s to the host, for the time of misses")
    parser.add_argument("--url", help="a recording server that runs already")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: more flags of the server")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.model:
        _record(options)
    recording = load(options.output)
    found = report.analyse(recording, options.link * 1e9)
    result = {
        "benchmark": "predictability",
        **facts("benchmark.predictability", argv),
        "page_size": recording.page_size,
        "unit_bytes": recording.unit_bytes,
        "temperatures": found,
    }
    (options.output / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    text = report.text(found)
    (options.output / "report.md").write_text(text + "\n")
    print(text)
    if not report.plot(found, options.output / "report.png"):
        say("no plot: matplotlib is not installed")
    if not all(part["same_text"] for part in found.values()):
        say("error: the guides did not see one text; a policy changed what was generated.")
        return 1
    return 0


def _record(options: argparse.Namespace) -> None:
    contexts = prompts.load(options.prompts, load_tokenizer(options.model), options.count, options.context)
    wanted = [Run(t, guide) for t in options.temperatures for guide in options.guides]
    present = load(options.output, empty=True).traces
    missing = [run for run in wanted if not _complete(present.get(run, {}), len(contexts), options.tokens - 1)]
    if not missing:
        return
    if options.url:
        record.record(options.url, contexts, missing, options.tokens, say)
        return
    number = len(list(options.output.glob("*.steps")))
    path = options.output.resolve() / f"part-{number}.steps"
    more = [flag for flag in options.flags if flag != "--"]
    command = record.command(options.model, path, options.budget, len(contexts), options.config, more)
    with server.Server(command, options.output, {"HF_HUB_OFFLINE": "1"}, say) as running:
        record.record(running.url, contexts, missing, options.tokens, say)


def _complete(traces: dict[int, Trace], contexts: int, steps: int) -> bool:
    return all(number in traces and len(traces[number].right) >= steps for number in range(contexts))


if __name__ == "__main__":
    sys.exit(main())
