"""Small random models of other architectures, with every optional weight of theirs in use."""

from __future__ import annotations

import shutil
from pathlib import Path

NAMES = ("qwen2", "qwen3", "mistral")


def make(name: str, folder: Path, tokenizer: str) -> str:
    """Saves a random model of that architecture with the tokenizer of the model at `tokenizer`; returns its path."""
    import torch
    from transformers import AutoTokenizer, MistralConfig, Qwen2Config, Qwen3Config, set_seed
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    vocabulary = AutoTokenizer.from_pretrained(tokenizer)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        # Far apart logits: the likeliest token shall not depend on the last bit.
        "initializer_range": 0.2,
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_id,
    }
    kinds = {
        "qwen2": lambda: Qwen2Config(**sizes, use_sliding_window=False),
        "qwen3": lambda: Qwen3Config(**sizes, use_sliding_window=False),
        "mistral": lambda: MistralConfig(**sizes, sliding_window=None),
    }
    path = folder / f"tiny-{name}"
    if not path.exists():
        set_seed(1)
        model = AutoModelForCausalLM.from_config(kinds[name](), dtype=torch.float32)
        with torch.no_grad():
            # What transformers leaves at zero or one would hide that it is forgotten: biases and norms.
            for key, weight in model.named_parameters():
                if key.endswith("bias"):
                    weight.normal_(std=0.5)
                elif "norm" in key:
                    weight.uniform_(0.5, 1.5)
        building = folder / f"building-{name}"
        model.save_pretrained(building)
        vocabulary.save_pretrained(building)
        shutil.move(building, path)
    return str(path)
