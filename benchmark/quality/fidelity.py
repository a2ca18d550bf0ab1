"""How often sparse decoding predicts what full attention predicts, for several page scores at equal budgets.

    python -m benchmark.quality.fidelity MODEL --score mean quest gauss exact --budget 256 512 1024

Real contexts are read once with exact attention; their last tokens are then decoded sparsely as one block
(`sparse_rows`). Every score sees the same rows, so that differences are paired.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmark.corpus import load_tokenizer
from benchmark.models.llama_ref import Held
from benchmark.quality.scores import SCORES
from benchmark.quality.sparse_rows import RECENT, Prefilled, SparseRows, selecting
from benchmark.quality.texts import KINDS, contexts
from benchmark.serving.record import facts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Agreement of sparse decoding with full attention.")
    parser.add_argument("model", type=Path, help="Hugging Face directory of a Llama model")
    parser.add_argument("--score", nargs="+", default=["landmark", "mean", "exact"], choices=[*sorted(SCORES), RECENT])
    parser.add_argument("--budget", nargs="+", type=int, default=[512], help="tokens")
    parser.add_argument("--page", nargs="+", type=int, default=[16], help="tokens")
    parser.add_argument("--sinks", nargs="+", type=int, default=[16], help="tokens")
    parser.add_argument("--window", nargs="+", type=int, default=[64], help="tokens")
    parser.add_argument("--reduce", nargs="+", default=["max"], choices=["max", "sum", "shared"])
    parser.add_argument("--normalise", nargs="+", default=["candidates"], choices=["candidates", "all"])
    parser.add_argument("--hysteresis", nargs="+", type=float, default=[0.0], help="nats")
    parser.add_argument("--length", type=int, default=6144, help="tokens of a context")
    parser.add_argument("--tail", type=int, default=256, help="tokens at its end that are predicted")
    parser.add_argument("--rows", type=int, help="predict only so many of them, the first")
    parser.add_argument("--each", type=int, default=3, help="contexts of every kind of text")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS, help="of text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=Path, help="folder for prefilled contexts, for later runs (0.3 GB each)")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        checkpoint, tokenizer = Held(args.model, args.device), load_tokenizer(args.model)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    settings = {
        f"{name} budget {budget} page {page} sinks {sinks} window {window} {reduce} {normalise} "
        f"hysteresis {hysteresis:g}": selecting(
            name, budget, page, sinks, window, reduce=reduce, normalise=normalise, hysteresis=hysteresis
        )
        for page in args.page
        for budget in args.budget
        for sinks in args.sinks
        for window in args.window
        for reduce in args.reduce
        for normalise in args.normalise
        for hysteresis in args.hysteresis
        for name in args.score
    }
    about = facts("benchmark.quality.fidelity", argv) | {"seed": 0, "device": args.device}
    about |= {"backend": "torch rows in float32"}
    measured = {name: Measured() for name in settings}
    texts = contexts(tokenizer, args.length, args.tail, args.each)
    rows: list[dict] = []
    for number, (kind, ids) in enumerate(texts):
        if kind not in args.kind:
            continue
        file = args.keep / f"{number}-{kind}-{args.length}.pt" if args.keep else None
        context = Prefilled.read(checkpoint, ids, args.tail, args.device, file)
        if args.rows is not None:
            context = context.first(args.rows)
        for name, how in settings.items():
            run = SparseRows(checkpoint, context, how)
            measured[name].add(kind, run.predictions(), context.logits, run)
        done = time.monotonic() - start
        print(f"[fidelity] {done:6.1f} s  {number + 1} of {len(texts)} contexts ({kind})", file=sys.stderr, flush=True)
        baseline = next(iter(measured.values()))
        rows = [{"setting": name, **found.summary(baseline)} for name, found in measured.items()]
        if args.json:  # after every context, so that a run that is cut short leaves what it has
            args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))
    print(table(rows))
    return 0


@dataclass
class Measured:
    """What one setting's rows gave, context after context."""

    kinds: list[str] = field(default_factory=list)  # of each row
    same: list[torch.Tensor] = field(default_factory=list)  # float64 [R] 1 where the top token is the dense one
    far: list[torch.Tensor] = field(default_factory=list)  # float64 [R] KL of dense to sparse, nats
    attended: list[list[float]] = field(default_factory=list)  # of each context and layer
    lost: list[list[float]] = field(default_factory=list)

    def add(self, kind: str, sparse: torch.Tensor, dense: torch.Tensor, run: SparseRows) -> None:
        """sparse, dense: logits [R, vocabulary] after the same tokens."""
        p, q = dense.log_softmax(-1), sparse.log_softmax(-1)
        self.same.append((sparse.argmax(-1) == dense.argmax(-1)).double().cpu())
        self.far.append((p.exp() * (p - q)).sum(-1).double().cpu())
        self.kinds += [kind] * len(sparse)
        self.attended.append(run.attended)
        self.lost.append(run.lost)

    def summary(self, baseline: Measured) -> dict:
        """Means over all rows, and gains over the baseline's same rows with their standard errors."""
        same, far = torch.cat(self.same), torch.cat(self.far)
        found = {"rows": len(same), "agreement": same.mean().item(), "kl": far.mean().item()}
        for name, gain in (("agreement", same - torch.cat(baseline.same)), ("kl", far - torch.cat(baseline.far))):
            found[f"{name}_gain"] = gain.mean().item()
            found[f"{name}_gain_error"] = (gain.std() / len(gain) ** 0.5).item()
        for kind in dict.fromkeys(self.kinds):
            rows = torch.tensor([each == kind for each in self.kinds])
            found[f"agreement_{kind}"], found[f"kl_{kind}"] = same[rows].mean().item(), far[rows].mean().item()
        attended, lost = torch.tensor(self.attended), torch.tensor(self.lost)  # [contexts, L]
        by_layer = {"attended_by_layer": attended.mean(0).tolist(), "lost_by_layer": lost.mean(0).tolist()}
        return found | {"attended": attended.mean().item(), "lost": lost.mean().item()} | by_layer


def table(rows: list[dict]) -> str:
    """A line a setting; gains are against the first one, in points of agreement and in nats."""
    width = max(len(row["setting"]) for row in rows)
    lines = [f"{rows[0]['rows']} rows; gains against: {rows[0]['setting']}"]
    lines.append(f"{'':{width}}  same top-1          gain        KL              gain  attention kept  output lost")
    for row in rows:
        gain, error = 100 * row["agreement_gain"], 100 * row["agreement_gain_error"]
        lines.append(
            f"{row['setting']:{width}}  {row['agreement']:10.2%}  {gain:+5.2f} ± {error:4.2f}  {row['kl']:8.4f}  "
            f"{row['kl_gain']:+.4f} ± {row['kl_gain_error']:.4f}  {row['attended']:14.2%}  {row['lost']:11.2%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
