"""What selection costs over the budget, from files that `fidelity` wrote; nothing is measured.

python -m benchmark.quality.plot FILE --score mean landmark exact --svg FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmark import chart


def picture(files: dict[str, dict], scores: list[str] | None = None) -> str:
    """KL over the budget, a line for each page score, as SVG.

    Args:
        files: what `fidelity` wrote, by name.
        scores: which are drawn, in this order; all of them where it is None.

    Raises:
        ValueError: a score was not measured; or settings differ in more than score and budget, or in their numbers of
            rows.
    """
    found: dict[str, dict[int, float]] = {}
    alike: dict[str, str] = {}
    for name, data in files.items():
        for row in data["rows"]:
            score, _, budget, *rest = row["setting"].split()
            alike.setdefault(f"{row['rows']} rows, {' '.join(rest)}", name)
            found.setdefault(score, {})[int(budget)] = row["kl"]
    if len(alike) != 1:
        both = " and ".join(f"{name}: {setting}" for setting, name in alike.items())
        raise ValueError(f"One picture holds one setting, and these are {len(alike)}; draw them apart: {both}.")
    scores = list(found) if scores is None else scores
    if missing := [score for score in scores if score not in found]:
        raise ValueError(f"{' and '.join(missing)} was not measured, only {', '.join(found)}; name some of these.")
    series: dict[str, chart.Points] = {score: list(found[score].items()) for score in scores}
    title = f"From full attention to sparse decoding, {next(iter(alike)).partition(',')[0]}"
    return chart.lines(title, "budget, tokens", "KL, nats", series, log_x=True, log_y=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw KL over the budget.")
    parser.add_argument("files", type=Path, nargs="+", help="that benchmark.quality.fidelity wrote")
    parser.add_argument("--score", nargs="+", help="draw only these, in this order")
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        drawn = picture({str(path): json.loads(path.read_text()) for path in args.files}, args.score)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.svg.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
