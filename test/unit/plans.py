"""What `sglang-sparse-kv plan` is asked: models of the documents, and its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang.srt.sparse_kv import command

MODELS = Path(__file__).resolve().parents[2] / "docs" / "models"


def options(model: str, gpu: str, **given: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command._add_plan(parser)
    argv = ["--model-path", str(MODELS / f"{model}.json"), "--gpu", gpu, "--host-memory", given.pop("host", "96GB")]
    for name, value in given.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    return parser.parse_args(argv)
