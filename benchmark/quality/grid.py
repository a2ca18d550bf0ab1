"""Recall under every page score and budget: RULER's tasks (`tasks`), answered by the model itself, without a server.

    python -m benchmark.quality.grid MODEL --length 2048 6144 --prompts 20 --budget 128 256 512 1024 2048 --json FILE

All ways answer the same prompts side by side (`answers`), so each prompt is read once. Results are saved after every
task; the same command again measures what is missing. Only tasks where the dense model scores at least 60 % count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from benchmark import chart
from benchmark.corpus import load_tokenizer
from benchmark.models.llama_ref import Held
from benchmark.quality.answers import Answers, Read
from benchmark.quality.recall import render
from benchmark.quality.scores import SCORES
from benchmark.quality.sparse_rows import RECENT, Selecting, selecting
from benchmark.quality.tasks import TASKS, prompts
from benchmark.serving.record import facts

COUNTS = 0.6  # of the dense model's score, from which on a task counts
DENSE = "dense"
SINKS, WINDOW = 16, 64  # tokens, as the product has them


def ways(scores: list[str], budgets: list[int], length: int) -> dict[str, Selecting | None]:
    """Dense, then every score at every budget that leaves something out; "recent" spends the budget on the window."""
    found: dict[str, Selecting | None] = {DENSE: None}
    for budget in budgets:
        if budget + SINKS + WINDOW < length:
            found |= {f"{name}@{budget}": selecting(name, budget, sinks=SINKS, window=WINDOW) for name in scores}
    return found


def measure(checkpoint: Held, tokenizer, task: str, length: int, options: argparse.Namespace) -> dict:
    """One cell: `scores` holds of each way the score of each prompt, 0 to 1."""
    start = time.monotonic()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    made = prompts(task, length, options.prompts, count, options.seed)
    ids = [tokenizer.encode(render(tokenizer, prompt), add_special_tokens=False) for prompt in made]
    read = Read(checkpoint, ids, options.device)
    took = time.monotonic() - start
    cell: dict = {"task": task, "length": length, "scores": {}, "prompt_tokens": [len(each) for each in ids]}
    cell["first_answers"] = {"wanted": made[0].references}
    how = ways(options.score, options.budget, length)
    # Dense alone first: it is cheap, and says whether the rest counts.
    for some in ({DENSE: None}, {name: way for name, way in how.items() if way is not None}):
        if not some or (cell["scores"] and options.skip and not counts(cell)):
            continue
        run = Answers(checkpoint, read, list(some.values()), max(prompt.tokens for prompt in made))
        said = [[tokenizer.decode(answer) for answer in of] for of in run.run([tokenizer.eos_token_id])]
        for w, name in enumerate(some):
            cell["scores"][name] = [round(prompt.score(answers[w]), 4) for prompt, answers in zip(made, said)]
        cell["first_answers"] |= {name: said[0][w] for w, name in enumerate(some) if w in (0, len(some) - 1)}
    return cell | {"seconds": [round(took, 1), round(time.monotonic() - start - took, 1)]}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def counts(cell: dict) -> bool:
    return mean(cell["scores"][DENSE]) >= COUNTS


def summary(cells: list[dict]) -> list[dict]:
    """Of each length and way: the mean over tasks that count, and its paired distance from dense with its error."""
    found = []
    for length in dict.fromkeys(cell["length"] for cell in cells):
        counted = [cell for cell in cells if cell["length"] == length and counts(cell)]
        for way in counted[0]["scores"] if counted else ():
            gaps = [b - a for c in counted for a, b in zip(c["scores"][DENSE], c["scores"][way])]
            error = float(torch.tensor(gaps).double().std()) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
            score = mean([mean(cell["scores"][way]) for cell in counted])
            found.append({"length": length, "way": way, "tasks": len(counted), "score": score})
            found[-1] |= {"against_dense": mean(gaps), "error": error}
    return found


def table(cells: list[dict]) -> str:
    """Of each length and budget a table of tasks and scores, in per cent; tasks that do not count stand in brackets."""
    lines, means = [], {(row["length"], row["way"]): row for row in summary(cells)}
    for length in dict.fromkeys(cell["length"] for cell in cells):
        of = [cell for cell in cells if cell["length"] == length]
        every = max((cell["scores"] for cell in of), key=len)
        for budget in dict.fromkeys(way.partition("@")[2] for way in every if way != DENSE):
            names = [way.partition("@")[0] for way in every if way.endswith(f"@{budget}")]
            head, width = f"{length} tokens, budget {budget}", 30
            lines.append(f"\n{head:{width}}" + "".join(f"{name:>11}" for name in [DENSE, *names]))
            for cell in of:
                scores = [cell["scores"].get(way) for way in (DENSE, *(f"{name}@{budget}" for name in names))]
                shown = (f"{100 * mean(each):.1f}" if each else "-" for each in scores)
                label = cell["task"] if counts(cell) else f"({cell['task']})"
                lines.append(f"{label:{width}}" + "".join(f"{each:>11}" for each in shown))
            rows = [means.get((length, way)) for way in (DENSE, *(f"{name}@{budget}" for name in names))]
            if rows[0]:
                label = f"mean of {rows[0]['tasks']} that count"
                lines.append(f"{label:{width}}" + "".join(f"{100 * row['score']:11.1f}" for row in rows))
                gaps = ["", *(f"{100 * row['against_dense']:+.1f}±{100 * row['error']:.1f}" for row in rows[1:])]
                lines.append(f"{'its distance from dense':{width}}" + "".join(f"{gap:>11}" for gap in gaps))
    lines.append(f"\n(task): the dense model scores below {COUNTS:.0%}, which says nothing about sparse attention.")
    return "\n".join(lines)


def picture(cells: list[dict]) -> str | None:
    """Mean score over budget at the longest length, as SVG; None if no task counts there."""
    longest = max(cell["length"] for cell in cells)
    rows = [row for row in summary(cells) if row["length"] == longest]
    if not rows:
        return None
    budgets = sorted({int(row["way"].partition("@")[2]) for row in rows if row["way"] != DENSE})
    series: dict[str, chart.Points] = {}
    for row in rows:
        name, _, budget = row["way"].partition("@")
        at = [int(budget)] if budget else budgets
        series.setdefault(name, []).extend((x, 100 * row["score"]) for x in at)
    title = f"RULER tasks at {longest} tokens, {rows[0]['tasks']} that count"
    return chart.lines(title, "budget, tokens", "score, %", series, log_x=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="RULER's recall tasks for every page score and budget.")
    parser.add_argument("model", type=Path, help="Hugging Face directory of a Llama model")
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--length", nargs="+", type=int, default=[2048], help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=10, help="of every task and length")
    parser.add_argument("--budget", nargs="+", type=int, default=[128, 256, 512, 1024, 2048], help="tokens")
    scores = ["mean", "outliers", "four-4bit", "exact", "quest", RECENT]
    parser.add_argument("--score", nargs="+", default=scores, choices=[*sorted(SCORES), RECENT])
    parser.add_argument("--skip", action="store_true", help="only dense for tasks that do not count")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="starts no task after this time")
    parser.add_argument("--json", type=Path, required=True, help="where results go; what it holds is not repeated")
    parser.add_argument("--svg", type=Path, help="picture of the mean scores")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options, start = parse(argv), time.monotonic()
    try:
        checkpoint, tokenizer = Held(options.model, options.device), load_tokenizer(options.model)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    data = json.loads(options.json.read_text()) if options.json.is_file() else {"runs": [], "cells": []}
    asked = {name: getattr(options, name) for name in ("prompts", "budget", "score", "seed")}
    if data["runs"] and data["runs"][-1]["asked"] != asked:
        print(f"error: {options.json} holds {data['runs'][-1]['asked']}; name another file.", file=sys.stderr)
        return 1
    backend = f"torch rows in float32 on {options.device}"
    about = facts("benchmark.quality.grid", argv)
    data["runs"].append(about | {"asked": asked, "backend": backend, "model": str(options.model.name)})
    todo = [(length, task) for length in options.length for task in options.task]
    have = {(cell["length"], cell["task"]) for cell in data["cells"]}
    for number, (length, task) in enumerate(todo):
        if (length, task) in have:
            continue
        if time.monotonic() - start > options.seconds:
            print("time is up; the same command again measures the rest", file=sys.stderr)
            break
        cell = measure(checkpoint, tokenizer, task, length, options) | {"run": len(data["runs"]) - 1}
        data["cells"].append(cell)
        options.json.write_text(json.dumps(data | {"summary": summary(data["cells"])}, indent=1))
        done = f"[grid] {time.monotonic() - start:6.1f} s  {number + 1} of {len(todo)}: {task}, {length} tokens"
        dense = mean(cell["scores"][DENSE])
        print(f"{done}, dense {dense:.0%}, seconds {cell['seconds']}", file=sys.stderr, flush=True)
    if not data["cells"]:
        return 3
    print(table(data["cells"]))
    drawn = picture(data["cells"])
    if options.svg and drawn:
        options.svg.write_text(drawn)
    return 0 if len(data["cells"]) >= len(todo) else 3


if __name__ == "__main__":
    sys.exit(main())
