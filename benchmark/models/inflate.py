"""Write a small Llama-architecture model in a large model's shape, computing exactly the same function.

    python -m benchmark.models.inflate SOURCE OUTPUT --shape 8b --dtype float16 --rope yarn --context 131072

SOURCE is a Hugging Face directory with safetensors (the demo model, say). The result has the weights, the
KV bytes and the arithmetic of the large shape, but the attention patterns, page selections and text of the
real small model. README.md explains the construction; ``check_inflation`` verifies a result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmark.models.llama_ref import Checkpoint
from benchmark.models.shapes import (
    PRESETS,
    HeadPlan,
    Shape,
    check_target,
    plan_heads,
    plan_layers,
    rotary_places,
    spread,
)

# Says what a directory holds and whether it is whole; check_inflation reads it.
RECORD = "inflation.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROPES = ("none", "yarn", "linear", "llama3", "ntk")
_SHARD_BYTES = 2 << 30


def basis(source_hidden: int, hidden: int, fill: str, seed: int, device: str = "cpu") -> torch.Tensor:
    """Where the source's residual stream lives in the target's: orthonormal rows, float64 [source, target].

    ``fill`` "real" gives a random subspace, so that no weight is zero; "zeros" the first coordinates.
    """
    if fill == "zeros":
        return torch.eye(source_hidden, hidden, dtype=torch.float64, device=device)
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(hidden, source_hidden, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(random)
    # QR is unique only up to signs, which libraries choose differently.
    return (q * r.diagonal().sign()).T.contiguous().to(device)


class Inflater:
    """Computes the target's tensors one by one from a source checkpoint.

    Args:
        source: the small model.
        target: the shape to give it.
        fill: "real" fills every weight with copies or rotations of real ones; "zeros" pads with zeros.
        seed: of the random subspace.
        device: where the products are computed.
        exact: compute in float64 (for float32 results) instead of float32.
    """

    def __init__(
        self, source: Checkpoint, target: Shape, fill: str, seed: int, device: str = "cpu", exact: bool = True
    ):
        check_target(source.shape, target)
        self.source, self.target, self.fill, self.device = source, target, fill, device
        self.work = torch.float64 if exact else torch.float32
        self.basis = basis(source.shape.hidden, target.hidden, fill, seed, device).to(self.work)
        self.heads: HeadPlan = plan_heads(source.shape, target)
        # RMSNorm's mean runs over more coordinates of the same energy: its result grows by 1 / sqrt(ratio).
        self.ratio = source.shape.hidden / target.hidden
        count, have = target.intermediate, source.shape.intermediate
        self.neurons = torch.arange(count, device=device) % have
        self.neuron_share = torch.tensor(spread(self.neurons.tolist()), device=device, dtype=self.work)
        if fill == "zeros":
            kept = torch.arange(count, device=device) < have
            self.neuron_share = kept.to(self.work)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the target, named as in a checkpoint, in the working dtype."""
        yield "model.embed_tokens.weight", self._load("model.embed_tokens.weight") @ self.basis
        for index, (layer, counts) in enumerate(plan_layers(self.source.shape.layers, self.target.layers)):
            for name, tensor in self.layer(layer, counts):
                yield f"model.layers.{index}.{name}", tensor
        norm, scale = self._norm("model.norm.weight")
        yield "model.norm.weight", norm
        yield "lm_head.weight", self._read(self._load(self.source.head_name), scale)

    def layer(self, layer: int, counts: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one target layer that copies source layer ``layer``.

        ``counts`` False zeroes what it would add to the residual stream.
        """
        prefix = f"model.layers.{layer}."
        norm, scale = self._norm(prefix + "input_layernorm.weight")
        yield "input_layernorm.weight", norm
        heads, shape, target = self.heads, self.source.shape, self.target
        places = torch.tensor(rotary_places(shape.head_dim, target.head_dim), device=self.device)
        values = torch.arange(shape.head_dim, device=self.device)
        # Attention divides scores by sqrt(head_dim), of which only the source's part is wanted.
        widen = math.sqrt(target.head_dim / shape.head_dim)
        for name, chosen, where, factor in (
            ("q_proj", heads.q_source, places, widen),
            ("k_proj", heads.kv_source, places, 1.0),
            ("v_proj", heads.kv_source, values, 1.0),
        ):
            weight = self._read(self._load(prefix + f"self_attn.{name}.weight"), scale) * factor
            rows = weight.view(-1, shape.head_dim, target.hidden)[chosen]
            out = rows.new_zeros(len(chosen), target.head_dim, target.hidden)
            out[:, where] = rows
            yield f"self_attn.{name}.weight", out.flatten(0, 1)
        output = self._load(prefix + "self_attn.o_proj.weight").view(shape.hidden, -1, shape.head_dim)
        share = torch.tensor(heads.q_share, device=self.device, dtype=self.work) * counts
        wide = output.new_zeros(shape.hidden, target.heads, target.head_dim)
        wide[:, :, : shape.head_dim] = output[:, heads.q_source] * share[:, None]
        yield "self_attn.o_proj.weight", self.basis.T @ wide.flatten(1)

        norm, scale = self._norm(prefix + "post_attention_layernorm.weight")
        yield "post_attention_layernorm.weight", norm
        padding = (self.neuron_share != 0)[:, None] if self.fill == "zeros" else 1.0
        for name in ("gate_proj", "up_proj"):
            weight = self._read(self._load(prefix + f"mlp.{name}.weight"), scale)
            yield f"mlp.{name}.weight", weight[self.neurons] * padding
        down = self.basis.T @ self._load(prefix + "mlp.down_proj.weight")
        yield "mlp.down_proj.weight", down[:, self.neurons] * (self.neuron_share * counts)

    def _load(self, name: str) -> torch.Tensor:
        return self.source.get(name).to(self.device, self.work)

    def _norm(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's norm weight, and a factor for the columns of whatever reads the normalised stream."""
        weight = self._load(name)
        if self.fill == "zeros":
            return weight @ self.basis * math.sqrt(self.ratio), torch.ones_like(weight)
        # A rotated stream has no coordinates to weigh: the weights move into the next projection.
        return torch.ones(self.target.hidden, device=self.device), weight * math.sqrt(self.ratio)

    def _read(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (weight * scale) @ self.basis


def target_config(source: Checkpoint, target: Shape, dtype: str, rope: str, context: int) -> dict:
    """The target's ``config.json``.

    Args:
        source: the small model.
        target: its new shape.
        dtype: a key of ``DTYPES``.
        rope: how positions beyond the source's limit are reached, one of ``ROPES``.
        context: positions the target shall serve, in tokens.

    Raises:
        ValueError: an unknown ``rope``, or one that does not reach ``context``.
    """
    config = dict(source.config)
    config.pop("_name_or_path", None)
    ratio = source.shape.hidden / target.hidden
    config.update(
        hidden_size=target.hidden,
        num_attention_heads=target.heads,
        num_key_value_heads=target.kv_heads,
        head_dim=target.head_dim,
        num_hidden_layers=target.layers,
        intermediate_size=target.intermediate,
        # The mean of squares shrinks by the ratio, so the constant beside it must too.
        rms_norm_eps=config["rms_norm_eps"] * ratio,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    config.update(rope_settings(source.config, source.shape.head_dim, rope, context))
    return config


def rope_settings(config: dict, head_dim: int, rope: str, context: int) -> dict:
    """The entries of a config that set RoPE for ``context`` tokens; ``head_dim`` is the source's."""
    limit = config["max_position_embeddings"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    factor = context / limit
    if rope not in ROPES:
        raise ValueError(f"--rope is {rope!r}; use one of {', '.join(ROPES)}.")
    if rope == "none" and context > limit:
        raise ValueError(f"--context {context} is more than the source's {limit}; add --rope, for example --rope yarn.")
    scaled: dict = {"rope_type": "default", "rope_theta": theta}
    stated = limit if rope in ("none", "linear") else context
    if rope == "linear":
        scaled.update(rope_type="linear", factor=factor)
    elif rope == "yarn":
        # Without truncation the ramp depends on the frequency alone, so that every head_dim has the same one.
        scaled.update(rope_type="yarn", factor=factor, original_max_position_embeddings=limit, truncate=False)
    elif rope == "llama3":
        scaled.update(
            rope_type="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=limit,
        )
    elif rope == "ntk":
        # Stretches the slowest pair by the whole factor and the fastest not at all.
        scaled.update(rope_theta=theta * factor ** (head_dim / (head_dim - 2)))
    return {"rope_parameters": scaled, "rope_scaling": None, "max_position_embeddings": stated}


class ShardWriter:
    """Writes safetensors shards of about two gigabytes and their index; holds one shard in memory."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.folder, self.dtype = folder, dtype
        self.pending: dict[str, torch.Tensor] = {}
        self.bytes = self.total = 0
        self.names: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.to(self.dtype).contiguous().cpu()
        if self.pending and self.bytes + tensor.nbytes > _SHARD_BYTES:
            self._flush()
        self.pending[name] = tensor
        self.bytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        part = self.folder / f"part-{len(self.names)}"
        save_file(self.pending, part, metadata={"format": "pt"})
        self.names.append(list(self.pending))
        self.pending, self.bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        count = len(self.names)
        weight_map = {}
        for number, names in enumerate(self.names):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{number}").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write(
    source: Checkpoint,
    target: Shape,
    output: Path,
    dtype: str = "float16",
    fill: str = "real",
    rope: str = "none",
    context: int = 8192,
    seed: int = 0,
    device: str = "cpu",
    say=lambda text: None,
) -> dict:
    """Write the inflated model to ``output`` unless the same one is there; return its record.

    Raises:
        ValueError: the target cannot hold the source, or ``output`` holds something else.
    """
    record = {
        "source": source.config.get("_name_or_path") or source.folder.name,
        "shape": dataclasses.asdict(target),
        "dtype": dtype,
        "fill": fill,
        "rope": rope,
        "context": context,
        "seed": seed,
    }
    mark = output / RECORD
    if mark.is_file() and json.loads(mark.read_text()) == {**record, "whole": True}:
        say(f"{output} already holds this model")
        return record
    if output.exists() and any(output.iterdir()) and not mark.is_file():
        raise ValueError(f"{output} holds something else than an inflated model; name another directory.")
    config = target_config(source, target, dtype, rope, context)
    inflater = Inflater(source, target, fill, seed, device, exact=dtype == "float32")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    mark.write_text(json.dumps({**record, "whole": False}))
    writer = ShardWriter(output, DTYPES[dtype])
    layer = ""
    for name, tensor in inflater.tensors():
        if name.startswith("model.layers.") and name.split(".")[2] != layer:
            layer = name.split(".")[2]
            say(f"layer {int(layer) + 1} of {target.layers}, {writer.total / 1e9:.1f} GB so far")
        writer.add(name, tensor)
    writer.finish()
    for path in source.folder.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in path.name:
            shutil.copy(path, output / path.name)
    (output / "config.json").write_text(json.dumps(config, indent=2))
    mark.write_text(json.dumps({**record, "whole": True}, indent=2))
    say(f"wrote {writer.total / 1e9:.2f} GB to {output}")
    return record


def parse_shape(text: str) -> Shape:
    """A preset's name, or hidden,heads,kv_heads,head_dim,layers,intermediate."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        return Shape(*(int(part) for part in text.split(",")))
    except (TypeError, ValueError):
        raise ValueError(
            f"--shape is {text!r}; use {', '.join(PRESETS)} or six numbers "
            f"hidden,heads,kv_heads,head_dim,layers,intermediate."
        ) from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a small Llama model in a large model's shape.")
    parser.add_argument("source", type=Path, help="Hugging Face directory of the small model")
    parser.add_argument("output", type=Path, help="directory to write (replaced unless it holds the same)")
    parser.add_argument("--shape", default="8b", help=f"{', '.join(PRESETS)}, or six numbers")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float16")
    parser.add_argument("--fill", choices=("real", "zeros"), default="real", help="what pads the weights")
    parser.add_argument("--rope", choices=ROPES, default="none", help="RoPE scaling for long contexts")
    parser.add_argument("--context", type=int, default=8192, help="positions to serve (tokens)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[inflate] {time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    try:
        shape = parse_shape(args.shape)
        source = Checkpoint(args.source)
        write(
            source,
            shape,
            args.output,
            args.dtype,
            args.fill,
            args.rope,
            args.context,
            args.seed,
            args.device,
            say,
        )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
