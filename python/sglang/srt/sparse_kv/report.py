"""The plan in words: one table of every byte, what is expected, and why it was decided so."""

from __future__ import annotations

from sglang.srt.sparse_kv.planner import REST, Plan


def table(plan: Plan) -> str:
    """The plan as lines of text. Sizes are those of one rank."""
    gpu = [*((name, size) for name, size in plan.outside.items()), *plan.device_bytes.items()]
    lines = ["sparse KV plan (per rank)", *memory("device memory", gpu)]
    rows = {"auto": "1 or 2 rows", 1: "1 row"}.get(plan.rows, f"{plan.rows} rows")
    lines += memory("host memory", [("KV pool", plan.host_bytes)])
    lines += [
        f"  {plan.host_tokens} tokens in the host pool, at most {plan.max_context} of one request",
        f"  {plan.max_running_requests} requests at once, {rows} each; {plan.slots} slots per layer and kv "
        f"head, {plan.shape.width} pages a selection, residency {plan.residency}",
    ]
    lines += expected(plan)
    return "\n".join([*lines, *(f"  {reason}" for reason in plan.reasons)])


def in_use(plan: Plan) -> str:
    """What a started server holds, as lines of text."""
    total, rest = sum(plan.in_use.values()), plan.in_use[REST]
    return "\n".join(
        [
            "sparse KV memory in use (per rank)",
            *memory("device memory, with graphs captured", list(plan.in_use.items())),
            *memory("host memory", [("KV pool", plan.host_bytes)]),
            f"  {plan.unused / 1e9:.3f} GB of the GPU are free for activations; plan and graphs account for what is in "
            f"use within {abs(rest) / total:.1%}",
        ]
    )


def memory(title: str, rows: list[tuple[str, int]]) -> list[str]:
    """Sizes by purpose, and their sum."""
    rows = [*rows, ("together", sum(size for _, size in rows))] if len(rows) > 1 else rows
    width = max(len(name) for name, _ in rows)
    return [f"  {title}", *(f"    {name:<{width}}  {size / 1e9:9.3f} GB" for name, size in rows)]


def expected(plan: Plan) -> list[str]:
    """What requests of three lengths can expect, as lines."""
    if not plan.estimates:
        return []
    rows = [
        (
            str(row["context"]),
            str(row["requests"]),
            *([str(row["rows"])] if plan.rows == "auto" else []),
            row["limit"],
            "{:.0f} to {:.0f}".format(*row["tokens_per_second"]),
            row["slowest"],
        )
        for row in plan.estimates
    ]
    title = f"  expected with the figures of {plan.device}, from the high to the low miss curve"
    rows_too = ["rows"] if plan.rows == "auto" else []
    heading = ("context", "requests", *rows_too, "limited by", "tokens/s", "slowest part of a step")
    return [title, *columns([heading, *rows])]


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of text, the first a heading, as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["    " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
