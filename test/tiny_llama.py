"""A Llama of three layers with random weights, as a checkpoint, for what decodes in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.models.llama_ref import Checkpoint

VOCAB = 97


def checkpoint(folder: Path) -> Checkpoint:
    """Written to `folder`; the same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return Checkpoint(folder)
