"""The Grafana dashboard asks for metrics that exist, by labels that they have."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import prometheus_client
import pytest
import yaml
from sglang.srt.sparse_kv import prometheus

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "examples" / "monitoring" / "grafana" / "dashboards" / "json"
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
    told = {prometheus.PREFIX + name for name in ("cache_slots", "host_pool_bytes", "link_bytes_per_second")}
    assert unused <= told, "show them, or drop them"


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


# ------------------------------------------------------------ a Prometheus that scrapes

ACCEPT = {
    "2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,*/*;q=0.1",
    "a browser": "*/*",
}


@pytest.mark.parametrize("asks", ACCEPT)
def test_the_dashboards_names_are_what_prometheus_stores(asks):
    """By the configuration in examples/monitoring: the library's answer depends on what it is asked for."""
    registry = prometheus_client.CollectorRegistry()
    names = sorted(COUNTERS)
    for name in names:
        prometheus_client.Counter(name, "of a test", registry=registry).inc()
    write, _ = prometheus_client.exposition.choose_encoder(ACCEPT[asks])
    config = yaml.safe_load((FOLDER.parents[2] / "prometheus.yaml").read_text())
    (rule,) = config["scrape_configs"][0]["metric_relabel_configs"]
    assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
    stored = set()
    for line in write(registry).decode().splitlines():
        name = line.split(" ")[0]
        if not line.startswith("#") and not name.endswith("_created"):
            renamed = re.fullmatch(rule["regex"], name)
            stored.add(rule["replacement"].replace("$1", renamed[1]) if renamed else name)
    assert sorted(stored) == names


# ------------------------------------------------------------ scripts/check_dashboard.py


class Prometheus(BaseHTTPRequestHandler):
    """Answers range queries: two points of each series that the query's first metric has, none for `missing`."""

    missing = ""

    def do_GET(self):
        given = parse_qs(urlsplit(self.path).query)
        query, end = given["query"][0], float(given["end"][0])
        if "$" in query:
            return self.reply(400, {"status": "error", "error": "a variable was left in"})
        labels = [{"layer": "0"}, {"layer": "1"}] if "by (layer)" in query else [{"tp_rank": "0"}]
        values = [[end - 10, "NaN"], [end - 5, "0.5"], [end, "0.25"]]
        found = [] if self.missing and self.missing in query else [{"metric": m, "values": values} for m in labels]
        self.reply(200, {"status": "success", "data": {"resultType": "matrix", "result": found}})

    def reply(self, status, answer):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def prometheus_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("missing", ["", "sparse_kv_cache_occupancy"])
def test_a_panel_without_data_is_noticed(prometheus_url, monkeypatch, capsys, missing):
    check = runpy.run_path(str(REPOSITORY / "scripts" / "check_dashboard.py"))
    monkeypatch.setattr(Prometheus, "missing", missing)
    assert check["main"]([prometheus_url]) == bool(missing)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(expressions()) + bool(missing)
    assert "Selected units found in the cache / hit rate: hit rate: 0.25" in lines
    assert "Memory in use / host pool, rank {{tp_rank}}: host pool, rank 0: 0.25" in lines
    assert "Units missed by layer / {{layer}}: 0: 0.25, 1: 0.25" in lines
    assert sum("no data" in line for line in lines) == bool(missing)


def test_every_panel_can_be_drawn():
    units = runpy.run_path(str(REPOSITORY / "scripts" / "check_dashboard.py"))["UNITS"]
    for panel in DASHBOARD["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"] in units and panel["type"] in ("timeseries", "bargauge")
        assert all(target["legendFormat"] for target in panel["targets"])


def test_a_refused_query_is_told(prometheus_url):
    check = runpy.run_path(str(REPOSITORY / "scripts" / "check_dashboard.py"))
    with pytest.raises(RuntimeError, match="a variable was left in"):
        check["ask"](prometheus_url, "$x", "", 0, 1, 1)
