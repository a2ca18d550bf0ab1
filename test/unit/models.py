"""Model folders that hold a configuration and no weights: enough for everything before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def write_model(folder: Path, architecture: str, model_type: str, **more: Any) -> str:
    """Write ``config.json`` for an architecture into ``folder``; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [architecture], "model_type": model_type, **SIZES, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
