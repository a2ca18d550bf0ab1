"""Real text for benchmarks on machines without a network: the sources of Python's standard library.

Twelve megabytes of code, comments and documentation that every interpreter carries. A benchmark states
``Corpus.digest``, since another Python version has other text.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path
from typing import Protocol

_SUFFIXES = (".py", ".md", ".rst", ".txt")
_SKIP = ("site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3")
# Shorter files are mostly imports; longer ones are tables of data.
_MIN_BYTES, _MAX_BYTES = 2_000, 400_000


class Tokenizer(Protocol):
    def encode(self, text: str, /, **kwargs) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...


class Corpus:
    """Text files of one folder, in an order that only ``seed`` decides.

    Args:
        folder: where to look for text; None takes Python's standard library.
        seed: of the shuffle.

    Raises:
        ValueError: the folder holds no usable text.
    """

    def __init__(self, folder: str | Path | None = None, seed: int = 0):
        root = Path(folder or sysconfig.get_paths()["stdlib"])
        found = []
        for path in sorted(root.rglob("*")):
            parts = path.relative_to(root).parts
            if path.suffix in _SUFFIXES and not any(part in _SKIP for part in parts) and path.is_file():
                size = path.stat().st_size
                if _MIN_BYTES <= size <= _MAX_BYTES or folder is not None:
                    found.append(path)
        if not found:
            raise ValueError(f"{root} holds no text file; name a folder with {', '.join(_SUFFIXES)} files.")
        random.Random(seed).shuffle(found)
        self.root, self.seed, self.files = root, seed, found

    @property
    def digest(self) -> str:
        """Names and sizes of the files in order: equal digests mean equal prompts in practice."""
        text = "\n".join(f"{path.relative_to(self.root)} {path.stat().st_size}" for path in self.files)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def prompts(self, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
        """Token ids of ``count`` prompts of exactly ``length`` tokens that share no prefix.

        Files are dealt to the prompts one after another. Once all are used they are dealt again, so two
        prompts may share files, but each starts with its own number.
        """
        encoded: list[list[int] | None] = [None] * len(self.files)
        prompts, turn = [], 0
        for number in range(count):
            ids = tokenizer.encode(f"# Document set {number} of seed {self.seed}\n", add_special_tokens=False)
            while len(ids) < length:
                index = turn % len(self.files)
                turn += 1
                known = encoded[index]
                if known is None:
                    path = self.files[index]
                    text = f"\n# File {path.relative_to(self.root)}\n" + path.read_text(errors="replace")
                    known = encoded[index] = tokenizer.encode(text, add_special_tokens=False)
                ids = ids + known
            prompts.append(ids[:length])
        return prompts


class _Plain:
    """A tokenizer by its own library: importing transformers takes seconds, on a busy machine many."""

    def __init__(self, file: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], /) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def plain_tokenizer(folder: str | Path) -> Tokenizer:
    """Text to ids and back, and nothing else."""
    return _Plain(Path(folder) / "tokenizer.json")


def load_tokenizer(folder: str | Path):
    """The tokenizer of a model directory, without warnings about texts longer than the model's context."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 10**9
    return tokenizer
