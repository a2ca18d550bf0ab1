"""Many prompts without a server: an ``Engine`` in this process, and what its page cache did.

python examples/offline.py --model-path MODEL
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import sglang as sgl
import torch


def run(model: str, prompts: list[str], tokens: int = 24, **arguments: Any) -> dict[str, Any]:
    """Generate from all prompts together.

    arguments: of ``sgl.Engine``, beside what this example sets.

    Returns:
        {"texts": one for each prompt, "hit": share of selected pages that were on the device, "missed": units fetched
        while a step waited}.
    """
    # Without a GPU, the CPU engine.
    device = {} if torch.cuda.is_available() else {"device": "cpu", "dtype": "float32"}
    engine = sgl.Engine(model_path=model, sparse_kv="dualdecoder", **{**device, **arguments})
    try:
        replies = engine.generate(prompts, {"max_new_tokens": tokens, "temperature": 0})
        total = engine.get_server_info()["internal_states"][0]["sparse_kv"]["total"]
    finally:
        engine.shutdown()
    return {
        "texts": [reply["text"] for reply in replies],
        "hit": round(total["hit"] / max(total["selected"], 1), 4),
        "missed": total["missed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate from several prompts with sgl.Engine.")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--document", type=Path, default=Path(__file__).with_name("report.txt"))
    parser.add_argument("--budget", type=int, default=512, help="tokens attended per request, layer and KV head")
    arguments = parser.parse_args()
    paragraphs = [text for text in arguments.document.read_text().split("\n\n") if len(text) > 100]
    prompts = [f"{text}\n\nIn short," for text in paragraphs]
    print(json.dumps(run(arguments.model_path, prompts, sparse_kv_budget=arguments.budget), indent=2))


# Child processes import this file.
if __name__ == "__main__":
    main()
