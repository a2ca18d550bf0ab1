"""Print the results of the serving benchmark as tables.

    python -m benchmark.serving.table result.json [more.json …]

One table per prompt length: speeds, and beside them the ratios that decide. ``x dense`` compares with dense at
the same batch, ``x best`` with dense at its best batch; ``of oracle`` with the same graph without copies. Shares
and bytes come from the counters of the measured window only. A step is ``stalled`` while it brings missed units, by
the server's counter, and ``exposed`` is what it takes longer than without copies: stalls, waits for fetches ahead, and
what copies cost the kernels beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmark.serving.record import Record

Cell = dict[str, Any]
HEAD = (
    *("variant", "policy", "batch", "tok/s", "TPOT ms", "x dense", "x best", "of oracle", "hit %", "missed %"),
    *("useful %", "MB/step", "link %", "stalled µs", "exposed µs", "guide %", "remarks"),
)


def rate(cell: Cell | None) -> float | None:
    return cell.get("tokens_per_second") if cell else None


def rows(record: Record, length: int) -> list[list[str]]:
    """The table of one prompt length, as text."""
    cells = [c for c in record.data["cells"] if c["length"] == length]
    cells.sort(key=lambda c: (c["variant"] != "dense", c["variant"], c["policy"], c.get("streams", 10**6)))
    dense = {c["streams"]: c for c in cells if c["variant"] == "dense" and rate(c)}
    best = max((rate(c) or 0 for c in dense.values()), default=None)
    oracle = {(c["variant"], c["streams"]): c for c in cells if c["policy"] == "oracle" and rate(c)}
    found = []
    for cell in cells:
        row = [cell["variant"], cell["policy"], str(cell.get("streams", cell["batch"]))]
        if "tokens_per_second" not in cell:
            row += ["-"] * (len(HEAD) - 4) + [cell.get("skipped") or cell.get("failed") or ""]
            found.append(row)
            continue
        free = oracle.get((cell["variant"], cell["streams"]))
        row += [f"{rate(cell):.1f}", f"{cell['tpot_ms']:.2f}"]
        row += [_ratio(rate(cell), rate(dense.get(cell["streams"]))), _ratio(rate(cell), best)]
        row += [_ratio(rate(cell), rate(free))]
        row += _counters(record, cell, free)
        found.append(row)
    return found


def _counters(record: Record, cell: Cell, free: Cell | None) -> list[str]:
    counters = cell.get("counters")
    if not counters or not counters.get("steps"):
        return ["-"] * 8 + [_remarks(record, cell)]
    total, steps = counters["total"], counters["steps"]
    moved, stalled = total.get("bytes_in", 0), total.get("stall_seconds")
    seconds = steps * cell["tpot_ms"] / 1e3
    link = record.data["runs"][cell["run"]].get("link_bytes_per_second")
    exposed = (cell["tpot_ms"] - free["tpot_ms"]) * 1e3 if free and cell is not free else None
    return [
        _percent(total.get("hit"), total.get("selected")),
        _percent(total.get("missed"), total.get("selected")),
        _percent(total.get("useful"), total.get("prefetched")),
        f"{moved / steps / 1e6:.2f}",
        _percent(moved, link * seconds) if link else "-",
        f"{stalled / steps * 1e6:.0f}" if stalled is not None else "-",
        f"{exposed:.0f}" if exposed is not None else "-",
        _percent(counters.get("guide_hits"), counters.get("guides")),
        _remarks(record, cell),
    ]


def _remarks(record: Record, cell: Cell) -> str:
    """What keeps a cell from counting."""
    remarks = [f"not exercised: {name}" for name in cell.get("not_exercised", [])]
    servers = record.data["runs"][cell["run"]]["servers"]
    mine: dict[str, Any] = next((s for s in servers if s["variant"] == cell["variant"]), {})
    if mine.get("over_cap"):
        remarks.append(f"took {mine['peak_memory_gb']} GB, over the cap")
    plan = mine.get("plan") or {}
    cache = (plan.get("device_bytes") or {}).get("page cache")
    if cache and plan["host_bytes"] < 4 * cache:
        remarks.append(f"host KV only {plan['host_bytes'] / cache:.1f} x cache")
    return "; ".join(remarks)


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else "-"


def _percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.1f}" if part is not None and whole else "-"


def render(table: list[list[str]]) -> str:
    """Columns as wide as they must be; the last one is text, the first two too, numbers are set right."""
    lines = [list(HEAD), *table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = []
    for line in lines:
        parts = [
            part.ljust(width) if column in (0, 1, len(HEAD) - 1) else part.rjust(width)
            for column, (part, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(parts).rstrip())
    return "\n".join(text)


def describe(record: Record) -> str:
    """Machines, servers and cold prefill of all commands."""
    lines = []
    for number, run in enumerate(record.data["runs"]):
        gpus = " + ".join(run["machine"]["gpus"]) or run["machine"]["cpu"]
        link = run.get("link_bytes_per_second")
        lines.append(
            f"run {number}: {run['date']}, {gpus}, sglang {run['versions'].get('sglang')}, "
            f"commit {run['sources']['commit']}, sources {run['sources']['digest']}, text {run['corpus']}"
            + (f", link {link / 1e9:.1f} GB/s" if link else "")
        )
        for server in run["servers"]:
            cold = [f"{key}={value}" for key, value in server.items() if key.startswith(("cold_", "prefill_"))]
            lines.append(
                f"  {server['variant']}: {server.get('peak_memory_gb', '-')} GB "
                f"({server.get('peak_memory_source', '-')}), {server.get('max_total_num_tokens')} tokens, "
                f"{server.get('max_running_requests')} requests at most; {', '.join(cold)}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    paths = [Path(path) for path in (sys.argv[1:] if argv is None else argv)]
    missing = [str(path) for path in paths if not path.is_file()]
    if not paths or missing:
        print(f"error: {'no result file named' if not paths else f'no file {missing[0]}'}.", file=sys.stderr)
        return 2
    record = Record(paths[0], paths[1:])
    print(describe(record))
    for length in sorted({cell["length"] for cell in record.data["cells"]}):
        print(f"\nprompt {length} tokens")
        print(render(rows(record, length)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
