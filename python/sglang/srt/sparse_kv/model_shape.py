"""A model's shape from its config.json: what planning needs to know before weights are loaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.sparse_kv import refusals
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.geometry import Geometry


@dataclass(frozen=True)
class Dtype:
    """Stands in for a torch dtype where only its size counts."""

    name: str
    itemsize: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder, of the whole model.

    weight_bytes: bytes of one parameter of a linear layer. tied: whether the output layer is the embedding.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    dtype: Dtype
    weight_bytes: float
    tied: bool

    def weights(self, tp: int) -> int:
        """Bytes of one rank's weights."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * max(self.kv_heads, tp))
        linear = self.layers * (attention + 3 * self.hidden * self.intermediate)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        norms = (2 * self.layers + 1) * self.hidden * self.dtype.itemsize
        return int(linear * self.weight_bytes + embeddings * self.dtype.itemsize) // tp + norms

    def geometry(self, config: SparseKVConfig, page_size: int, tp: int, context: int) -> Geometry:
        """Geometry of one rank, as sizing.py finds it in a running process."""
        kv_heads = max(1, self.kv_heads // tp)
        return Geometry(
            num_layers=self.layers,
            kv_heads=kv_heads,
            group=max(1, self.heads // tp // kv_heads),
            head_dim=self.head_dim,
            page_size=page_size,
            num_pages=0,
            max_pages=-(-(context + 8) // page_size) + 1,
            max_requests=0,
            dtype=self.dtype,  # type: ignore[arg-type]
        )


def find(path: str) -> Path:
    """The config.json of a folder, a file, or a model of the Hub that is in its cache. Raises ValueError."""
    given = Path(path).expanduser()
    candidates = [given / "config.json", given] if given.exists() else []
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
    cached = home / f"models--{path.strip('/').replace('/', '--')}" / "snapshots"
    candidates += sorted(cached.glob("*/config.json"))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ValueError(
        f"--model-path {path} is neither a folder with a config.json nor a model in {home}; download its config.json"
    )


def read(path: str, config: SparseKVConfig) -> ModelShape:
    """Raises ValueError, one sentence, where the file does not describe a model that sparse KV serves."""
    file = find(path)
    try:
        values = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no JSON that can be read ({error}); give a model's config.json") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no JSON object; give a model's config.json")
    values.setdefault("sliding_window", None)
    hf_config = SimpleNamespace(**values)
    try:
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        name = str(values.get("torch_dtype") or values.get("dtype") or "bfloat16").removeprefix("torch.")
        # SGLang serves float32 checkpoints in half precision unless --dtype says otherwise.
        dtype = Dtype("float16" if name == "float32" else name, 2)
        shape = ModelShape(
            architecture=(values.get("architectures") or ["unnamed"])[0],
            layers=values["num_hidden_layers"],
            hidden=values["hidden_size"],
            intermediate=values["intermediate_size"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocabulary=values["vocab_size"],
            context=values["max_position_embeddings"],
            dtype=dtype,
            weight_bytes=_weight_bytes(values.get("quantization_config") or {}, dtype),
            tied=bool(values.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ValueError(f"{file} says nothing about {error}; give the config.json of a dense decoder") from None
    model = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config,
        head_dim=head_dim,
        v_head_dim=values.get("v_head_dim", head_dim),
        num_hidden_layers=shape.layers,
    )
    refusals.check_model(model, config)
    return shape


def _weight_bytes(quantization: dict[str, Any], dtype: Dtype) -> float:
    """Bytes of a parameter of a linear layer; scales are a few per cent more."""
    if not quantization:
        return float(dtype.itemsize)
    bits = quantization.get("bits") or quantization.get("w_bit")
    return bits / 8 if bits else 1.0  # fp8 and its like name no number
