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
from pathlib import Path

import torch

from benchmark.corpus import load_tokenizer
from benchmark.models.llama_ref import Checkpoint
from benchmark.quality.scores import SCORES
from benchmark.quality.sparse_rows import Prefilled, Selecting, SparseRows
from benchmark.quality.texts import KINDS, contexts


def compare(sparse: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(same top token bool [R], KL of dense to sparse in nats float32 [R]) of logits [R, vocabulary]."""
    p, q = dense.log_softmax(-1), sparse.log_softmax(-1)
    return sparse.argmax(-1) == dense.argmax(-1), (p.exp() * (p - q)).sum(-1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Agreement of sparse decoding with full attention.")
    parser.add_argument("model", type=Path, help="Hugging Face directory of a Llama model")
    parser.add_argument("--score", nargs="+", default=["mean", "exact"], choices=sorted(SCORES))
    parser.add_argument("--budget", nargs="+", type=int, default=[512], help="tokens")
    parser.add_argument("--page", nargs="+", type=int, default=[16], help="tokens")
    parser.add_argument("--sinks", nargs="+", type=int, default=[16], help="tokens")
    parser.add_argument("--window", nargs="+", type=int, default=[64], help="tokens")
    parser.add_argument("--reduce", nargs="+", default=["max"], choices=["max", "sum", "shared"])
    parser.add_argument("--normalise", nargs="+", default=["candidates"], choices=["candidates", "all"])
    parser.add_argument("--length", type=int, default=6144, help="tokens of a context")
    parser.add_argument("--tail", type=int, default=256, help="tokens at its end that are predicted")
    parser.add_argument("--each", type=int, default=3, help="contexts of every kind of text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=Path, help="folder for prefilled contexts, for later runs (0.3 GB each)")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        checkpoint, tokenizer = Checkpoint(args.model), load_tokenizer(args.model)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    settings = {
        f"{name} budget {budget} page {page} sinks {sinks} window {window} {reduce} {normalise}": Selecting(
            SCORES[name], budget, page, sinks, window, reduce, normalise
        )
        for page in args.page
        for budget in args.budget
        for sinks in args.sinks
        for window in args.window
        for reduce in args.reduce
        for normalise in args.normalise
        for name in args.score
    }
    same: dict[str, list[torch.Tensor]] = {name: [] for name in settings}
    far: dict[str, list[torch.Tensor]] = {name: [] for name in settings}
    attended: dict[str, list[float]] = {name: [] for name in settings}
    texts = contexts(tokenizer, args.length, args.tail, args.each)
    for number, (kind, ids) in enumerate(texts):
        file = args.keep / f"{number}-{kind}-{args.length}.pt" if args.keep else None
        context = Prefilled.read(checkpoint, ids, args.tail, args.device, file)
        for name, how in settings.items():
            rows = SparseRows(checkpoint, context, how)
            agrees, distance = compare(rows.predictions(), context.logits)
            same[name].append(agrees.cpu())
            far[name].append(distance.cpu())
            attended[name] += rows.attended
        done = time.monotonic() - start
        print(f"[fidelity] {done:6.1f} s  {number + 1} of {len(texts)} contexts ({kind})", file=sys.stderr, flush=True)
    baseline = next(iter(settings))
    rows = [
        {
            "setting": name,
            "rows": sum(map(len, same[name])),
            "agreement": float(torch.cat(same[name]).double().mean()),
            "kl": float(torch.cat(far[name]).double().mean()),
            "attended": sum(attended[name]) / len(attended[name]),
            **difference(
                torch.cat(same[name]), torch.cat(same[baseline]), torch.cat(far[name]), torch.cat(far[baseline])
            ),
            "agreement_by_kind": {
                kind: float(torch.cat([s for s, (k, _) in zip(same[name], texts) if k == kind]).double().mean())
                for kind in KINDS
            },
        }
        for name in settings
    ]
    print(table(rows, baseline))
    if args.json:
        record = {"command": sys.argv, "date": time.strftime("%Y-%m-%d"), "length": args.length, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1))
    return 0


def summary(name: str, same: torch.Tensor, far: torch.Tensor, kinds: list[str]) -> dict:
    """Means over all rows, and the agreement over the rows of each kind of text."""
    by_kind = {kind: same[[found == kind for found in kinds]].double().mean().item() for kind in KINDS}
    found = {"setting": name, "rows": len(same), "agreement": same.double().mean().item()}
    return found | {"kl": far.double().mean().item(), "agreement_by_kind": by_kind}


def difference(same, base_same, far, base_far) -> dict[str, float]:
    """Differences to the baseline on the same rows, each with its standard error."""
    found = {}
    for name, gain in (("agreement", same.double() - base_same.double()), ("kl", far.double() - base_far.double())):
        found[f"{name}_gain"] = float(gain.mean())
        found[f"{name}_gain_error"] = float(gain.std() / len(gain) ** 0.5)
    return found


def table(rows: list[dict], baseline: str) -> str:
    """A line a setting; gains are against `baseline`, in points of agreement and in nats."""
    width = max(len(row["setting"]) for row in rows)
    lines = [f"{rows[0]['rows']} rows; gains against: {baseline}"]
    lines.append(f"{'':{width}}  same top-1          gain        KL              gain  attention kept")
    for row in rows:
        gain, error = 100 * row["agreement_gain"], 100 * row["agreement_gain_error"]
        lines.append(
            f"{row['setting']:{width}}  {row['agreement']:10.2%}  {gain:+5.2f} ± {error:4.2f}  {row['kl']:8.4f}  "
            f"{row['kl_gain']:+.4f} ± {row['kl_gain_error']:.4f}  {row['attended']:14.2%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
