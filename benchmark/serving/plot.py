"""Decoding over the number of requests as a picture, from files that `run` wrote; nothing is measured.

python -m benchmark.serving.plot result.json [more.json …] --length 32768 --svg FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmark import chart
from benchmark.serving.record import Record


def picture(record: Record, length: int) -> str:
    """Tokens a second over requests, a line for each variant and policy, as SVG.

    Raises:
        ValueError: nothing was measured with this prompt length.
    """
    series: dict[str, chart.Points] = {}
    for cell in record.data["cells"]:
        if cell["length"] != length or "tokens_per_second" not in cell:
            continue
        name = cell["variant"] if cell["policy"] == "default" else f"{cell['variant']}, {cell['policy']}"
        series.setdefault(name, []).append((float(cell["streams"]), cell["tokens_per_second"]))
    if not series:
        known = sorted({cell["length"] for cell in record.data["cells"] if "tokens_per_second" in cell})
        raise ValueError(
            f"No cell has prompts of {length} tokens; measured were {', '.join(map(str, known)) or 'none'}."
        )
    order = sorted(series, key=lambda name: (name != "dense", name))
    return chart.lines(
        f"{length} tokens a request", "requests", "tokens a second", {name: series[name] for name in order}
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw tokens a second over the number of requests.")
    parser.add_argument("files", type=Path, nargs="+", help="that benchmark.serving.run wrote")
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        if missing := [str(path) for path in args.files if not path.is_file()]:
            raise ValueError(f"There is no file {' or '.join(missing)}.")
        drawn = picture(Record(args.files[0], args.files[1:]), args.length)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.svg.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
