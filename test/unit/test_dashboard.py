"""The Grafana dashboard asks for metrics that exist, by labels that they have."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from sglang.srt.sparse_kv import prometheus

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "monitoring" / "grafana" / "dashboards" / "json"
DASHBOARD = json.loads((FOLDER / "sparse-kv-dashboard.json").read_text())
LABELS = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
LAYERED = {prometheus.PREFIX + name for name, _ in prometheus.LAYER_COUNTERS.values()}
COUNTERS = LAYERED | {prometheus.PREFIX + name for name, _ in prometheus.COUNTERS.values()}
GAUGES = {prometheus.PREFIX + name for name, _ in prometheus.GAUGES.values()}


def upstream_names() -> set[str]:
    source = Path(importlib.util.find_spec("sglang.srt.observability.metrics_collector").origin).read_text()
    return set(re.findall(r'name="(sglang:\w+)"', source))


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_exists():
    known = COUNTERS | GAUGES | upstream_names()
    queries = [*expressions(), *(str(entry["query"]) for entry in DASHBOARD["templating"]["list"])]
    named = {name for query in queries for name in re.findall(r"sglang:\w+", query)}
    assert len(named) > 10 and named <= known
    ours = {name for name in named if name.startswith(prometheus.PREFIX)}
    unused = (COUNTERS | GAUGES) - ours
    assert unused <= {prometheus.PREFIX + "cache_slots", prometheus.PREFIX + "host_pool_bytes"}, (
        "show them, or drop them"
    )


def test_counters_are_asked_for_rates_and_gauges_for_values():
    for expression in expressions():
        for name in re.findall(r"sglang:sparse_kv_\w+", expression):
            assert (f"rate({name}" in expression) == (name in COUNTERS), expression
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_labels_are_those_of_the_metrics():
    for expression in expressions():
        used = set(re.findall(r"(\w+)=~", expression))
        by = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))
        allowed = LABELS | ({"layer"} if any(name in expression for name in LAYERED) else set())
        assert used | by <= allowed, expression
        variables = set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"}
        assert variables <= {entry["name"] for entry in DASHBOARD["templating"]["list"]}


def test_panels_have_places_of_their_own():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["targets"] and panel["title"] for panel in DASHBOARD["panels"])
