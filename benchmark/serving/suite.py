"""All serving benchmarks in one command: each server is started once and asked everything.

    python -m benchmark.serving.suite h200 --model MODEL --folder results --seconds 560

`suites.json` holds the suites: how servers are started, and steps, each a command of this folder with its options, in
the order of what matters. Every step of every variant writes into the folder; what is there is not repeated. When the
next step would not fit into the time that is left, the command ends with status 3 and leaves its server running, and
the same command goes on from there. A step that fails is told and does not end the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.corpus import Corpus, plain_tokenizer
from benchmark.serving import load, options, prefill, run, server
from benchmark.serving.client import first_tokens
from benchmark.serving.record import facts

SUITES: dict[str, Any] = json.loads(Path(__file__).with_name("suites.json").read_text())
COMMANDS: dict[str, Callable[[list[str]], int]] = {"run": run.main, "prefill": prefill.main, "load": load.main}
OUT_OF_TIME = 3
# Seconds for which a step is worth beginning, and that a server may take until it answers.
STEP_SECONDS, START_SECONDS = 45, 150
WARM_UP_TOKENS = 9000  # more than a chunk: with a prefix and without, so that nothing is compiled while it counts

_START = time.monotonic()


def say(text: str) -> None:
    print(f"[suite] {time.monotonic() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


class Suite:
    """chosen: as `parse` gave it; plan: of suites.json."""

    def __init__(self, chosen: argparse.Namespace, plan: dict[str, Any], commands=COMMANDS, start=server.Server):
        self.chosen, self.plan, self.commands, self.start = chosen, plan, commands, start
        self.begin = time.monotonic()
        self._file = chosen.folder / "suite.json"
        self.state: dict[str, Any] = {"done": [], "failed": [], "servers": {}, "runs": []}
        if self._file.is_file():
            self.state = json.loads(self._file.read_text())
        self.state["failed"] = []  # each command tries again
        self.state["runs"].append(facts("benchmark.serving.suite", chosen.argv))

    @property
    def left(self) -> float:
        return self.chosen.seconds - (time.monotonic() - self.begin)

    def save(self) -> None:
        self._file.write_text(json.dumps(self.state, indent=1) + "\n")

    def todo(self, variant: str) -> list[str]:
        """Steps of a variant that are not done yet."""
        names = [name for name, step in self.plan["steps"].items() if variant in step]
        wanted = self.chosen.steps or names
        return [name for name in names if name in wanted and f"{name} {variant}" not in self.state["done"]]

    def run(self) -> int:
        for variant in self.chosen.variants or self.plan["variants"]:
            if not self.todo(variant):
                continue
            if self.left < START_SECONDS:
                return self._out_of_time(f"{variant}: no time to start it")
            try:
                if not self._variant(variant):
                    return self._out_of_time(f"{variant}: {', '.join(self.todo(variant))} left to do")
            except RuntimeError as error:  # its server
                self._failed(variant, str(error)[-2000:])
            self.save()
        return 1 if self.state["failed"] else 0

    def _variant(self, variant: str) -> bool:
        """Whether all of its steps were tried in time; else its server stays."""
        chosen = options.parse(self._arguments(variant))
        with self.start(options.command(chosen, variant), chosen.logs, {"HF_HUB_OFFLINE": "1"}, say) as running:
            known = self.state["servers"].setdefault(variant, {"command": running.command})
            if not running.taken_over:
                known["start_seconds"] = round(running.start_seconds, 1)
                if chosen.device == "cuda":
                    known |= run.rates()
                self._warm_up(running.url, chosen)
            for name in self.todo(variant):
                running.keep = self.left < STEP_SECONDS or not self._step(name, variant, running.url)
                known["peak_memory_gb"] = max(known.get("peak_memory_gb", 0), round(running.memory.peak / 1e9, 2))
                known["peak_memory_source"] = running.memory.source
                self.save()
                if running.keep:
                    return False
        return True

    def _step(self, name: str, variant: str, url: str) -> bool:
        """Whether there was time for it."""
        step = self.plan["steps"][name]
        prefills = step["command"] == "prefill"  # which writes its file anew, where the others add to theirs
        output = self.chosen.folder / (f"{name}-{variant}.json" if prefills else f"{name}.json")
        argv = [*self._arguments(variant), *step["args"], *step[variant], "--url", url, "--output", str(output)]
        argv += ["--patience" if step["command"] == "load" else "--seconds", str(self.left)]
        say(f"{variant}: {name}")
        try:
            status = self.commands[step["command"]](argv)
        except Exception as error:  # the other steps may still be measured
            status = f"{type(error).__name__} {error}"[:2000]
        if status == OUT_OF_TIME:
            return False
        if status == 0:
            self.state["done"].append(f"{name} {variant}")
        else:
            self._failed(f"{name} {variant}", f"status {status}")
        return True

    def _arguments(self, variant: str) -> list[str]:
        """Of `options.parse`, the same for a variant's server and for its steps."""
        logs = self.chosen.folder / "logs" / variant
        fixed = ["--model", self.chosen.model, "--variants", variant, "--logs", str(logs)]
        return [*fixed, "--output", str(self.chosen.folder / "none.json"), *self.plan["server"], *self.chosen.server]

    def _warm_up(self, url: str, chosen: argparse.Namespace) -> None:
        length = min(WARM_UP_TOKENS, chosen.context // 2)
        (prompt,) = Corpus(chosen.text, chosen.seed + 1).prompts(plain_tokenizer(chosen.model), 1, length)
        for more in ([], prompt[:200]):
            first_tokens(url, [prompt + more])
        server.flush(url)

    def _failed(self, what: str, why: str) -> None:
        say(f"{what} failed: {why}")
        self.state["failed"].append([what, why])

    def _out_of_time(self, what: str) -> int:
        self.save()
        say(f"stopped, {what}; run the same command again to continue")
        return OUT_OF_TIME


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="All serving benchmarks, one server after the other.",
        epilog="\n".join(f"{name}: {suite['about']}" for name, suite in SUITES.items()),
    )
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--folder", type=Path, required=True, help="where results go; what it holds is not repeated")
    parser.add_argument("--variants", nargs="+", help="instead of the suite's")
    parser.add_argument("--steps", nargs="+", help="of the suite, some only")
    parser.add_argument("--seconds", type=float, default=560, help="the command ends within about this time")
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="more options of benchmark.serving.run")
    chosen = parser.parse_args(argv)
    known = SUITES[chosen.suite]["steps"]
    if unknown := [name for name in chosen.steps or () if name not in known]:
        parser.error(f"--steps has {', '.join(unknown)}; the suite has {', '.join(known)}")
    chosen.argv = argv
    return chosen


def main(argv: list[str] | None = None) -> int:
    chosen = parse(argv)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    return Suite(chosen, SUITES[chosen.suite]).run()


if __name__ == "__main__":
    sys.exit(main())
