"""The contexts that a study decodes from: files of the user's, or real text that every machine has."""

from __future__ import annotations

import json
from pathlib import Path

from benchmark.corpus import Corpus, Tokenizer


def load(paths: list[Path], tokenizer: Tokenizer, count: int, context: int) -> list[list[int]]:
    """Token ids of the contexts.

    Args:
        paths: JSONL files, whose lines hold `input_ids`, `text` or `prompt`, and plain text files, one context each.
            None at all: `count` contexts of `context` tokens of Python's standard library.
        context: longest context kept, tokens; a longer text keeps its end, where the question is.

    Raises:
        ValueError: a line without a text, or a file without a line.
    """
    if not paths:
        return Corpus().prompts(tokenizer, count, context)
    found: list[list[int]] = []
    for path in paths:
        if path.suffix in (".jsonl", ".json"):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            if not lines:
                raise ValueError(f"{path} has no line; give one JSON object a line, with a text or input_ids.")
            found += [_ids(json.loads(line), tokenizer, f"{path}, line {i}") for i, line in enumerate(lines, 1)]
        else:
            found.append(tokenizer.encode(path.read_text(encoding="utf-8")))
    return [ids[-context:] for ids in found]


def _ids(line: object, tokenizer: Tokenizer, where: str) -> list[int]:
    if isinstance(line, dict):
        if isinstance(line.get("input_ids"), list):
            return line["input_ids"]
        for key in ("text", "prompt"):
            if isinstance(line.get(key), str):
                return tokenizer.encode(line[key])
    raise ValueError(f"{where} has neither input_ids nor text nor prompt.")
