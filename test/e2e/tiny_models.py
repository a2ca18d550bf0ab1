"""Small random models of other architectures, with every optional weight of theirs in use; and the demo model with
more KV heads.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("qwen2", "qwen3", "mistral")
EIGHT_HEADS = "tp8"  # the demo model's function with 8 KV heads instead of 3; the shape's name


def make(name: str, folder: Path, demo_model: str, seed: int = 1) -> str:
    """Saves the model of that name, which has the demo model's tokenizer; returns its path. seed: of random weights."""
    if name == EIGHT_HEADS:
        path = folder / name
        command = [sys.executable, "-m", "benchmark.models.inflate", demo_model, str(path)]
        command += ["--shape", name, "--dtype", "float32"]  # does nothing where it is there
        subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2], capture_output=True)
        return str(path)
    return _random(name, folder, demo_model, seed)


def _random(name: str, folder: Path, tokenizer: str, seed: int) -> str:
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
        set_seed(seed)
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
