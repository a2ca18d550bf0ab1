"""Real text of any length, the same on every machine: a tale, a licence, code, a table of records, a chat.

Lengths are given in characters; the demo model's tokenizer makes a token of 3 (code, records) to 5 (prose) of them.
"""

from __future__ import annotations

import random
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY / "test" / "data"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def records(count: int, seed: int = 0) -> str:
    """A table to look things up in: page selection matters here, since an answer is in one line of it."""
    draw = random.Random(seed)
    names = ["anchor", "barrel", "candle", "dagger", "feather", "goblet", "hammer", "kettle", "lantern", "mirror"]
    colours = ["amber", "black", "cobalt", "green", "ivory", "purple", "russet", "silver"]
    towns = ["Bergen", "Cadiz", "Dover", "Emden", "Genoa", "Hull", "Kiel", "Lisbon", "Nantes", "Oporto", "Riga"]
    lines = [
        f"Item {number:03d}: a {draw.choice(colours)} {draw.choice(names)} from {draw.choice(towns)}, "
        f"shelf {draw.randrange(10, 99)}, price {draw.randrange(100, 999)} crowns."
        for number in range(count)
    ]
    return "\n".join(lines)


def chat(*turns: str) -> str:
    """Turns of user and assistant in the demo model's template, ready for the assistant's next one."""
    roles = ("user", "assistant")
    parts = [f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns)]
    return "".join(parts) + "<|im_start|>assistant\n"


def source(kind: str) -> str:
    """All the text there is of a kind: "tale", "licence", "code" or "records"."""
    if kind == "records":
        return records(400)
    path = {"tale": DATA / "tale.txt", "licence": REPOSITORY / "LICENSE", "code": DATA / "code.txt"}[kind]
    return _read(path)


def excerpt(kind: str, characters: int, start: int = 0) -> str:
    """`characters` of a kind of text from `start` on, followed by the other kinds where it ends."""
    kinds = ["tale", "licence", "code", "records"]
    order = kinds[kinds.index(kind) :] + kinds[: kinds.index(kind)]
    text = "\n\n".join(source(name) for name in order)
    if start + characters > len(text):
        raise ValueError(f"{start + characters} characters were asked for and there are {len(text)}")
    return text[start : start + characters]


def question(kind: str, characters: int, start: int = 0) -> str:
    """A chat about an excerpt, which an instruction model continues with text of its own."""
    ask = {
        "tale": "Retell this story in your own words.",
        "licence": "Explain to me what this text allows and what it forbids.",
        "code": "Describe what each function of this program does.",
        "records": "List five of these items with their price, and name the most expensive one.",
    }[kind]
    return chat(f"{excerpt(kind, characters, start)}\n\n{ask}")


# Twenty prompts of about 50 to 2000 tokens: plain continuations and chats, of every kind.
TWENTY = [
    chat("What is the capital of France?"),
    chat("Write a short poem about a river and the moon."),
    "def fibonacci(n):\n",
    excerpt("tale", 250),
    excerpt("licence", 300),
    excerpt("code", 400),
    question("records", 500),
    question("tale", 700, 1000),
    excerpt("records", 700, 3000),
    question("licence", 1200, 2000),
    excerpt("tale", 1500, 2000),
    question("code", 1400, 3000),
    question("records", 1500, 5000),
    question("tale", 2600),
    excerpt("licence", 3000, 1000),
    question("code", 2400, 7000),
    excerpt("records", 2200, 9000),
    question("licence", 5000),
    excerpt("code", 4000, 4000),
    question("records", 5000, 2000),
]
