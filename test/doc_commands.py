"""The documents and the shell commands that they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmark/**/*.md", ".github/**/*.md")
    for path in REPOSITORY.glob(pattern)
)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


PROGRAMS = ("make", "python", "pip", "sglang", "sglang-sparse-kv", "curl", "uv", "prometheus")


def blocks(text: str) -> Iterator[str]:
    """Code blocks, fenced or indented."""
    text = COMMENT.sub("", text)
    yield from re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for indented in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE):
        yield re.sub(r"^ {4}", "", indented, flags=re.MULTILINE)


def commands(path: Path) -> Iterator[str]:
    """Shell commands of the code blocks and of inline code, continuation lines joined."""
    text = path.read_text(encoding="utf-8")
    for block in blocks(text):
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            if line.split(" ", 1)[0] in PROGRAMS:
                yield line.partition("  #")[0].strip()
    for line in re.findall(r"`([^`\n]+)`", COMMENT.sub("", text)):
        if line.split(" ", 1)[0] in PROGRAMS and " " in line and "…" not in line:
            yield line


COMMANDS = sorted({(name(path), command) for path in DOCUMENTS for command in commands(path)})
