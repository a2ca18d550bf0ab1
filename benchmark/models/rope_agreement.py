"""How well RoPE scaling keeps a small model's predictions, at lengths within and beyond its limit.

    python -m benchmark.models.rope_agreement MODEL --rope yarn ntk --length 8192 32768 --context 131072

Inflation keeps the function exactly, RoPE scaling included, so the small model answers for the inflated one.
Within the model's limit the yardstick is the unscaled model. Beyond it the unscaled model is undefined; the
yardstick there is the unscaled model reading only a window of the most recent tokens, half the limit to the
whole limit long, and both are also judged by the text itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch

from benchmark.corpus import Corpus, load_tokenizer
from benchmark.models.inflate import ROPES, rope_settings
from benchmark.models.llama_ref import Checkpoint, Llama


def predictions(model: Llama, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top token after each position [tokens] and the log-probability of the next token [tokens - 1]."""
    top: list[torch.Tensor] = []
    logprob: list[torch.Tensor] = []
    start = 0
    wanted = torch.cat([ids[1:], ids[:1]]).to(model.device)
    for logits in model.logits(model.last_stream(ids)):
        top.append(logits.argmax(-1))
        target = wanted[start : start + len(logits)]
        start += len(logits)
        chosen = logits.gather(-1, target[:, None])[:, 0]
        logprob.append(chosen - logits.logsumexp(-1))
    return torch.cat(top).cpu(), torch.cat(logprob)[:-1].cpu()


def windowed(model: Llama, ids: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``predictions`` where no position sees more than ``limit`` tokens back, and at least half of it."""
    top, logprob = predictions(model, ids[:limit])
    half = limit // 2
    for start in range(limit, len(ids), half):
        block = ids[start - half : start + half]
        more_top, more_logprob = predictions(model, block)
        # The block's first half is context only; its first prediction replaces none of the earlier ones.
        top = torch.cat([top, more_top[half:]])
        logprob = torch.cat([logprob, more_logprob[half - 1 :]])
    return top, logprob


def ranges(length: int, limit: int) -> list[tuple[int, int]]:
    """Position ranges to report: quarters of the limit doubled up to ``length``."""
    edges = [0, limit // 4, limit // 2, limit]
    while edges[-1] < length:
        edges.append(edges[-1] * 2)
    edges = [edge for edge in edges if edge < length] + [length]
    return list(itertools.pairwise(edges))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Top-1 agreement of RoPE scaling with the unscaled model.")
    parser.add_argument("model", type=Path, help="Hugging Face directory of the small model")
    parser.add_argument("--rope", nargs="+", default=["yarn"], choices=ROPES[1:])
    parser.add_argument("--length", nargs="+", type=int, default=[8192], help="lengths to read (tokens)")
    parser.add_argument("--context", type=int, default=131072, help="positions the scaling is made for")
    parser.add_argument("--texts", type=int, default=1, help="texts per length")
    parser.add_argument("--text", type=Path, help="folder with text (default: Python's standard library)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    args = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[rope] {time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    try:
        checkpoint = Checkpoint(args.model)
        tokenizer = load_tokenizer(args.model)
        corpus = Corpus(args.text)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    limit = checkpoint.config["max_position_embeddings"]
    plain = Llama(checkpoint, device=args.device)
    scaled = {
        name: Llama(
            checkpoint,
            device=args.device,
            rope=rope_settings(checkpoint.config, checkpoint.shape.head_dim, name, args.context),
        )
        for name in args.rope
    }
    rows = []
    for length in args.length:
        for number, prompt in enumerate(corpus.prompts(tokenizer, args.texts, length)):
            ids = torch.tensor(prompt)
            say(f"{length} tokens, text {number}: unscaled")
            base_top, base_logprob = windowed(plain, ids, limit)
            for name, model in scaled.items():
                say(f"{length} tokens, text {number}: {name}")
                top, logprob = predictions(model, ids)
                for low, high in ranges(length, limit):
                    span, inner = slice(low, high), slice(low, min(high, length - 1))
                    truth = ids[1:][inner]
                    rows.append(
                        {
                            "length": length,
                            "text": number,
                            "rope": name,
                            "from": low,
                            "to": high,
                            "agreement": _mean(top[span] == base_top[span]),
                            "accuracy": _mean(top[inner] == truth),
                            "accuracy_unscaled": _mean(base_top[inner] == truth),
                            "nll": -_mean(logprob[inner]),
                            "nll_unscaled": -_mean(base_logprob[inner]),
                        }
                    )
    print(f"scaling made for {args.context} tokens; unscaled beyond {limit} = a window of {limit // 2} to {limit}")
    head = ("length", "rope", "positions", "top-1 agreement", "accuracy (unscaled)", "nll (unscaled)")
    print("{:>7s} {:>7s} {:>15s} {:>16s} {:>20s} {:>16s}".format(*head))
    for length, name, low, high in dict.fromkeys((r["length"], r["rope"], r["from"], r["to"]) for r in rows):
        same = [r for r in rows if (r["length"], r["rope"], r["from"]) == (length, name, low)]
        mean = {key: sum(r[key] for r in same) / len(same) for key in same[0] if key not in ("rope",)}
        print(
            f"{length:7d} {name:>7s} {f'{low}-{high}':>15s} {mean['agreement']:16.3f} "
            f"{mean['accuracy']:9.3f} ({mean['accuracy_unscaled']:.3f})   "
            f"{mean['nll']:6.3f} ({mean['nll_unscaled']:.3f})"
        )
    if args.json:
        args.json.write_text(
            json.dumps(
                {"context": args.context, "text": corpus.digest, "device": args.device, "rows": rows},
                indent=1,
            )
        )
    return 0


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean())


if __name__ == "__main__":
    sys.exit(main())
