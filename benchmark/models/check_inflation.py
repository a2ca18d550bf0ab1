"""Compare an inflated model with its source on real text, layer by layer and by logits.

    python -m benchmark.models.check_inflation SOURCE TARGET --tokens 512 --dtype float32

The source runs in float64 as the reference, and once more in ``--dtype``: the distance between those two is
what the dtype alone costs, the yardstick for the target's distance. Weights are read one layer at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from benchmark.corpus import Corpus, load_tokenizer
from benchmark.models.inflate import DTYPES, RECORD, basis, rope_settings
from benchmark.models.llama_ref import Checkpoint, Llama
from benchmark.models.shapes import plan_layers


@dataclasses.dataclass
class Distance:
    """How far logits [tokens, vocabulary] are from the reference's.

    Attributes:
        largest: largest absolute difference of a logit.
        mean: mean absolute difference.
        top1: share of positions with the same argmax.
        kl: mean Kullback-Leibler divergence from the reference, nats.
    """

    largest: float
    mean: float
    top1: float
    kl: float

    @classmethod
    def between(cls, reference: torch.Tensor, other: torch.Tensor) -> Distance:
        difference = (reference - other).abs()
        log_p, log_q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        same = (reference.argmax(-1) == other.argmax(-1)).float().mean()
        return cls(float(difference.max()), float(difference.mean()), float(same), float(kl))


@dataclasses.dataclass
class Report:
    """Outcome of one comparison; ``layers`` holds relative errors of the residual stream per target layer."""

    target: Distance
    source_in_dtype: Distance
    layers: list[float]
    outside: float
    largest_activation: float


def compare(
    source: Checkpoint, target: Checkpoint, ids: torch.Tensor, dtype: torch.dtype, device: str, say=print
) -> Report:
    """Run ``ids`` [tokens] through both models.

    ``outside`` is the largest share of the target's residual stream that lies outside the source's subspace,
    0 for exact arithmetic.
    """
    record = json.loads((target.folder / RECORD).read_text())
    rope = rope_settings(source.config, source.shape.head_dim, record["rope"], record["context"])
    reference = Llama(source, torch.float64, device, rope)
    states = list(reference.hidden_states(ids))
    expected = torch.cat(list(reference.logits(states[-1])))

    same_dtype = Llama(source, dtype, device, rope)
    baseline = torch.cat(list(same_dtype.logits(same_dtype.last_stream(ids))))

    inside = basis(source.shape.hidden, target.shape.hidden, record["fill"], record["seed"]).to(device)
    model = Llama(target, dtype, device)
    after = [0] + [layer + 1 for layer, _ in plan_layers(source.shape.layers, target.shape.layers)]
    layers, outside, largest, stream = [], 0.0, 0.0, None
    for index, stream in enumerate(model.hidden_states(ids)):
        wide = stream.double()
        back = wide @ inside.T
        wanted = states[after[index]]
        layers.append(float((back - wanted).norm() / wanted.norm()))
        outside = max(outside, float((wide - back @ inside).norm() / wide.norm()))
        largest = max(largest, float(wide.abs().max()))
        say(f"layer {index:3d}: relative error {layers[-1]:.2e}")
    assert stream is not None
    got = torch.cat(list(model.logits(stream)))
    return Report(Distance.between(expected, got), Distance.between(expected, baseline), layers, outside, largest)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare an inflated model with its source.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", choices=list(DTYPES), help="compute in this dtype (default: as stored)")
    parser.add_argument("--text", type=Path, help="folder with text (default: Python's standard library)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, help="fail if a logit differs by more than this")
    parser.add_argument("--json", type=Path, help="write the report there too")
    args = parser.parse_args(argv)
    # float32 must mean float32, also on tensor cores.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[check] {time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    try:
        source, target = Checkpoint(args.source), Checkpoint(args.target)
        record = json.loads((args.target / RECORD).read_text())
        dtype = args.dtype or record["dtype"]
        tokenizer = load_tokenizer(args.source)
        corpus = Corpus(args.text)
        ids = torch.tensor(corpus.prompts(tokenizer, 1, args.tokens)[0])
        say(f"comparing on {len(ids)} tokens in {dtype} on {args.device}")
        report = compare(source, target, ids, DTYPES[dtype], args.device, say)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = {
        "record": record,
        "compute_dtype": dtype,
        "device": args.device,
        "tokens": args.tokens,
        "text": corpus.digest,
        **dataclasses.asdict(report),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
    print(f"{'':24s} {'max |Δ logit|':>14s} {'mean |Δ|':>10s} {'top-1':>8s} {'KL (nats)':>10s}")
    for name, row in (("inflated", report.target), (f"source in {dtype}", report.source_in_dtype)):
        print(f"{name:24s} {row.largest:14.2e} {row.mean:10.2e} {row.top1:8.4f} {row.kl:10.2e}")
    print(
        f"residual stream: relative error {max(report.layers):.2e} at most, {report.layers[-1]:.2e} last; "
        f"outside the source's subspace {report.outside:.2e}; largest value {report.largest_activation:.1f}"
    )
    if args.limit is not None and not report.target.largest <= args.limit:
        print(f"error: a logit differs by {report.target.largest:.2e}, more than {args.limit}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
