"""Writes the tables of the documents that say what the code says, from the code. A test compares them.

python scripts/doc_tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from sglang.srt.sparse_kv import plugin, prometheus, refusals

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

WHICH = {
    "chunked_prefill_size": " below 1",
    "cuda_graph_backend_prefill": " full or tc_piecewise",
    "cuda_graph_config": " with such a prefill",
}


def _refused() -> str:
    return _table(
        ("option", "why not", "instead"),
        [(f"`--{r.field.replace('_', '-')}`{_which(r)}", r.why, r.instead) for r in refusals.REFUSALS],
    )


def _which(refusal: refusals.Refusal) -> str:
    """Which values are refused, where some that are not the default are served."""
    if refusal.field.endswith("attention_backend"):
        return f" other than {refusals.ATTENTION_BACKEND}"
    return " above 1" if refusal.served is refusals._one else WHICH.get(refusal.field, "")


def _environment() -> str:
    return _table(("environment", "why not"), [(f"`{name}`", why) for name, why in refusals.ENVIRONMENT.items()])


def _hooks() -> str:
    return _table(
        ("group", "target", "kind", "why", "without it"),
        [
            (h.group, f"`{h.target.removeprefix('sglang.srt.')}`", h.kind.name.lower(), h.reason, h.without)
            for h in plugin.HOOKS
        ],
    )


def _metrics() -> str:
    kinds = (
        ("counter, `layer`", prometheus.LAYER_COUNTERS),
        ("counter", prometheus.COUNTERS),
        ("gauge", prometheus.GAUGES),
    )
    return _table(
        ("name", "type", "meaning"),
        [(f"`{prometheus.PREFIX}{name}`", kind, text) for kind, table in kinds for name, text in table.values()],
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


TABLES: dict[str, Callable[[], str]] = {
    "refusals": _refused,
    "environment": _environment,
    "hooks": _hooks,
    "metrics": _metrics,
}


def documents() -> Iterator[tuple[Path, str, str]]:
    """Each document with such a table: its path, its text, and what the text should be."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if PLACE.search(text):
            yield path, text, PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


if __name__ == "__main__":
    for path, text, wanted in documents():
        if text != wanted:
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {path.name}")
