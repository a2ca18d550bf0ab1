"""Whether every panel of the Grafana dashboard shows something, by the Prometheus that scrapes a server.

python scripts/check_dashboard.py http://127.0.0.1:9090

Sends each query of the dashboard as Grafana would, for the last minutes, and says what came back; the status is 1 when
one of them came back empty. With --picture, draws the panels as they are laid out (wants matplotlib).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DASHBOARD = REPOSITORY / "examples" / "monitoring" / "grafana" / "dashboards" / "json" / "sparse-kv-dashboard.json"
UNITS = {"percentunit": ("%", 100), "cps": ("1/s", 1), "Bps": ("MB/s", 1e-6), "s": ("ms", 1e3), "short": ("", 1)}


@dataclass(frozen=True)
class Series:
    """label: the legend. points: (seconds, value), finite values only."""

    label: str
    points: list[tuple[float, float]]


def queries(dashboard: dict[str, Any], interval: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """(panel, target, PromQL) with the dashboard's variables set to all, and rates taken over `interval`."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", interval)
            for variable in dashboard["templating"]["list"]:
                query = query.replace(f"${variable['name']}", ".*")
            yield panel, target, query


def ask(url: str, query: str, legend: str, start: float, end: float, step: float) -> list[Series]:
    """What Prometheus answers for a range of time. Raises RuntimeError when it refuses the query."""
    given = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": step})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{given}", timeout=30) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{query}: {json.load(error).get('error', error)}") from error
    found = []
    for result in answer["data"]["result"]:
        label = legend
        for name, value in result["metric"].items():
            label = label.replace("{{" + name + "}}", value)
        points = [(float(when), float(value)) for when, value in result["values"] if math.isfinite(float(value))]
        if points:
            found.append(Series(label, points))
    return found


def draw(dashboard: dict[str, Any], shown: dict[int, list[Series]], file: Path) -> None:
    """The panels, laid out as the dashboard says: lines over time, bars for the last values."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = [panel["gridPos"] for panel in dashboard["panels"]]
    height = max(place["y"] + place["h"] for place in places)
    figure = plt.figure(figsize=(15, 0.5 * height), layout="constrained")
    grid = figure.add_gridspec(height, 24)
    times = [when for series in shown.values() for one in series for when, _ in one.points]
    for panel, place in zip(dashboard["panels"], places, strict=True):
        axes = figure.add_subplot(grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]])
        unit, scale = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        axes.set_title(f"{panel['title']} [{unit}]" if unit else panel["title"], loc="left", fontsize=10)
        series = shown[panel["id"]]
        if panel["type"] == "bargauge":
            last = sorted((int(one.label), one.points[-1][1] * scale) for one in series)
            axes.bar([layer for layer, _ in last], [value for _, value in last])
            axes.set_xlabel("layer", fontsize=8)
        else:
            for one in series:
                axes.plot(
                    [when - min(times) for when, _ in one.points], [v * scale for _, v in one.points], label=one.label
                )
            axes.legend(fontsize=8, loc="best")
            axes.set_xlim(0, max(times) - min(times))
            axes.set_xlabel("seconds", fontsize=8)
        axes.set_ylim(bottom=0, top=105 if unit == "%" else None)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    figure.savefig(file, dpi=80)


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Whether every panel of the dashboard shows something.")
    parser.add_argument("url", help="a Prometheus that scrapes a server, such as http://127.0.0.1:9090")
    parser.add_argument("--seconds", type=float, default=300, help="how far to look back")
    parser.add_argument("--interval", default="1m", help="what rates are taken over; at least two scrapes")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the panels into a PNG or SVG")
    options = parser.parse_args(argv)
    dashboard = json.loads(DASHBOARD.read_text())
    end = time.time()
    shown: dict[int, list[Series]] = {panel["id"]: [] for panel in dashboard["panels"]}
    empty = 0
    for panel, target, query in queries(dashboard, options.interval):
        legend = target["legendFormat"]
        series = ask(options.url, query, legend, end - options.seconds, end, max(1.0, options.seconds / 250))
        shown[panel["id"]] += series
        empty += not series
        said = ", ".join(f"{one.label}: {one.points[-1][1]:.4g}" for one in series[:3]) or "no data"
        print(f"{panel['title']} / {legend}: {said}{', …' if len(series) > 3 else ''}")
    if options.picture and any(shown.values()):
        draw(dashboard, shown, options.picture)
    if empty:
        print(f"{empty} queries came back empty; does {options.url} scrape the server, and did it serve a request?")
    return int(empty > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
