"""A Llama forward that reads its weights layer by layer, so that any shape fits into little memory.

Written for checks: one sequence, no KV cache, any dtype and device. It shares no code with the engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from benchmark.models.shapes import Shape

# Rows that pass through the feed-forward part or the head at a time; bounds memory, not results.
_ROWS = 4096


class Checkpoint:
    """The tensors of a Hugging Face safetensors directory, read one at a time.

    Raises:
        ValueError: the directory holds no Llama model in safetensors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        config = self.folder / "config.json"
        if not config.is_file():
            raise ValueError(f"{self.folder} holds no config.json; name a Hugging Face model directory.")
        self.config: dict = json.loads(config.read_text())
        if self.config.get("architectures") != ["LlamaForCausalLM"] or self.config.get("attention_bias"):
            raise ValueError(
                f"{self.folder} holds {self.config.get('architectures')}; only Llama models without "
                f"attention bias are supported."
            )
        self.shape = Shape.of_config(self.config)
        self._files = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        if not self._files:
            raise ValueError(f"{self.folder} holds no safetensors file; convert the model first.")
        tied = "lm_head.weight" not in self._files
        self.head_name = "model.embed_tokens.weight" if tied else "lm_head.weight"

    def get(self, name: str) -> torch.Tensor:
        """The tensor ``name`` in its stored dtype, on the CPU."""
        return self._files[name].get_tensor(name)


class Held(Checkpoint):
    """Keeps what was read on a device, in float32: for many passes through a small model."""

    def __init__(self, folder: str | Path, device: str):
        super().__init__(folder)
        self.device = device
        self._kept: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = super().get(name).to(self.device, torch.float32)
        return self._kept[name]


class Llama:
    """Runs one sequence through a checkpoint.

    Args:
        checkpoint: the weights.
        dtype: of weights and activations; norms and rotations are computed in float32 at least.
        device: where to compute.
        rope: replaces the config's RoPE entries (``rope_settings`` makes them).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        rope: dict | None = None,
    ):
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.wide = torch.promote_types(dtype, torch.float32)
        self.shape = checkpoint.shape
        self.eps = checkpoint.config["rms_norm_eps"]
        self.inv_freq, self.rope_scale = _frequencies(checkpoint, rope)

    @torch.inference_mode()
    def hidden_states(self, ids: torch.Tensor, first: int | torch.Tensor = 0) -> Iterator[torch.Tensor]:
        """Yield the residual stream before the first layer and after each layer, [tokens, hidden].

        first: position of the first token, or of each token (int64 [tokens]); only a subclass whose `attend` knows what
        lies before gives another than 0.
        """
        positions = torch.arange(first, first + len(ids)) if isinstance(first, int) else first
        angles = torch.outer(positions.to(self.device, torch.float32), self.inv_freq.to(self.device))
        cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
        stream = F.embedding(ids.to(self.device), self._get("model.embed_tokens.weight"))
        yield stream
        for layer in range(self.shape.layers):
            stream = self._layer(layer, stream, cos, sin)
            yield stream

    @torch.inference_mode()
    def logits(self, stream: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of the final residual stream in float32 at least, in blocks of rows [≤ 4096, vocabulary]."""
        head = self._get(self.checkpoint.head_name)
        for rows in stream.split(_ROWS):
            yield F.linear(self._norm(rows, "model.norm.weight"), head).to(self.wide)

    def last_stream(self, ids: torch.Tensor, first: int | torch.Tensor = 0) -> torch.Tensor:
        """The residual stream after the last layer, [tokens, hidden]. first: as in `hidden_states`."""
        stream = None
        for state in self.hidden_states(ids, first):
            stream = state
        assert stream is not None
        return stream

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of one layer. q [heads, tokens, D]; k, v [kv_heads, tokens, D]. Returns q's shape."""
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    def _get(self, name: str) -> torch.Tensor:
        return self.checkpoint.get(name).to(self.device, self.dtype)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.to(self.wide)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.checkpoint.get(name).to(self.device, self.wide)).to(self.dtype)

    def _layer(self, layer: int, stream: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        prefix, shape = f"model.layers.{layer}.", self.shape
        x = self._norm(stream, prefix + "input_layernorm.weight")
        q, k, v = (
            F.linear(x, self._get(prefix + f"self_attn.{name}_proj.weight"))
            .view(len(x), -1, shape.head_dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        attended = self.attend(layer, q, k, v).transpose(0, 1).flatten(1)
        stream = stream + F.linear(attended, self._get(prefix + "self_attn.o_proj.weight"))
        del q, k, v, attended
        gate, up, down = (self._get(prefix + f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        parts = []
        for rows in stream.split(_ROWS):
            y = self._norm(rows, prefix + "post_attention_layernorm.weight")
            parts.append(rows + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down))
        return torch.cat(parts)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + D/2) of ``x`` [heads, tokens, D] by the angles of [tokens, D/2]."""
    low, high = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def _frequencies(checkpoint: Checkpoint, rope: dict | None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on sines and cosines."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = {**checkpoint.config, **(rope or {})}
    table = LlamaRotaryEmbedding(LlamaConfig(**config))
    return table.inv_freq.float(), float(table.attention_scaling)
