"""Contexts whose last tokens are predicted: code, manual pages, and lookups in a table, all made offline."""

from __future__ import annotations

import random
from pydoc_data.topics import topics

from benchmark.corpus import Corpus, Tokenizer

KINDS = ("code", "manual", "lookup")


def contexts(tokenizer: Tokenizer, length: int, tail: int, each: int, seed: int = 0) -> list[tuple[str, list[int]]]:
    """`each` contexts of every kind: (kind, token ids), exactly `length` of them, the last `tail` to be predicted.

    code: sources of Python's standard library. manual: Python's own reference, as prose. lookup: a table of records,
    and behind it lines of it in random order, so that the tail must be read from far back.
    """
    found = [("code", ids) for ids in Corpus(seed=seed).prompts(tokenizer, each, length)]
    draw = random.Random(seed)
    pages = sorted(topics)
    draw.shuffle(pages)
    for _ in range(each):
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(topics[pages.pop()] + "\n\n", add_special_tokens=False)
        found.append(("manual", ids[:length]))
    found += [("lookup", lookup(tokenizer, length, tail, draw)) for _ in range(each)]
    return found


def lookup(tokenizer: Tokenizer, length: int, tail: int, draw: random.Random) -> list[int]:
    """A table of records, then records of it again, at least `tail` tokens of them."""
    names = ["anchor", "barrel", "candle", "dagger", "feather", "goblet", "hammer", "kettle", "lantern", "mirror"]
    colours = ["amber", "black", "cobalt", "green", "ivory", "purple", "russet", "silver"]
    towns = ["Bergen", "Cadiz", "Dover", "Emden", "Genoa", "Hull", "Kiel", "Lisbon", "Nantes", "Oporto", "Riga"]

    def line(number: int) -> str:
        return (
            f"Item {number:03d}: a {draw.choice(colours)} {draw.choice(names)} from {draw.choice(towns)}, "
            f"shelf {draw.randrange(10, 99)}, price {draw.randrange(100, 999)} crowns.\n"
        )

    again = tokenizer.encode("\nThe same items once more:\n", add_special_tokens=False)
    table: list[str] = []
    ids: list[int] = []
    while len(ids) < length - tail - len(again):
        table.append(line(len(table)))
        ids += tokenizer.encode(table[-1], add_special_tokens=False)
    ids += again
    while len(ids) < length:
        ids += tokenizer.encode(draw.choice(table), add_special_tokens=False)
    return ids[:length]
