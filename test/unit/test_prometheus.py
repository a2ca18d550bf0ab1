"""What a scrape of /metrics holds: our counters with SGLang's labels, from one process and from several."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import types
from pathlib import Path

import prometheus_client
import pytest
from sglang.srt.sparse_kv import devices, prometheus
from sparse_rig import Rig

STATS = types.SimpleNamespace(kv_available_tokens=0)
LABELS = {"model_name": "tiny", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def collector(registry):
    return types.SimpleNamespace(
        labels=LABELS,
        _counter_cls=functools.partial(prometheus_client.Counter, registry=registry),
        _gauge_cls=functools.partial(prometheus_client.Gauge, registry=registry),
    )


def running() -> Rig:
    rig = Rig(seed=3, layers=3, pages=120, context=300, requests=2)
    rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width})
    for req, length in ((1, 150), (2, 70)):
        rig.start(req)
        rig.extend({req: length})
    return rig


def samples(registry) -> dict[tuple[str, str | None], float]:
    """Values by (name without prefix, layer)."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = dict(sample.labels)
                layer = labels.pop("layer", None)
                assert labels == {name: str(value) for name, value in LABELS.items()}
                found[sample.name.removeprefix(prometheus.PREFIX), layer] = sample.value
    return found


def test_a_scrape_equals_the_summary(registry):
    rig, exporter = running(), prometheus.Exporter(collector(registry))
    for steps in (1, 4):  # counters grow by what was added since
        for _ in range(steps):
            rig.decode([1, 2])
        exporter.publish(rig.runtime, STATS)
        exporter.publish(rig.runtime, STATS)
        found, summary = samples(registry), rig.runtime.summary()
        for key, (name, _) in prometheus.LAYER_COUNTERS.items():
            shown = [found[name, str(layer)] for layer in range(3)]
            assert shown == pytest.approx([row[key] for row in summary["layers"]], rel=1e-9), key
        for key, (name, _) in prometheus.COUNTERS.items():
            assert found[name, None] == summary[key], key
        assert found["cache_occupancy", None] == summary["cache_occupancy"] > 0
    assert found["steps_total", None] == 5 and found["missed_units_total", "0"] > 0 < found["stall_seconds_total", "0"]


def test_gauges_of_the_pool(registry):
    rig, exporter = running(), prometheus.Exporter(collector(registry))
    tokens = rig.plan.host_tokens
    exporter.publish(rig.runtime, types.SimpleNamespace(kv_available_tokens=tokens // 4))
    found = samples(registry)
    assert found["host_pool_bytes", None] == rig.plan.host_bytes
    assert found["host_pool_usage", None] == pytest.approx(0.75, abs=0.01)
    assert found["cache_slots", None] == 2 * rig.runtime.shape.width
    assert found["link_bytes_per_second", None] == 0, "the CPU engine has no link"
    rig.runtime.plan = dataclasses.replace(rig.runtime.plan, device="H200")
    exporter.publish(rig.runtime, STATS)
    link = devices.find("H200").link
    assert samples(registry)["link_bytes_per_second", None] == link > 10e9


def test_how_long_the_link_was_busy(registry):
    rig, exporter = running(), prometheus.Exporter(collector(registry))
    rig.decode([1, 2])
    exporter.publish(rig.runtime, STATS)
    assert samples(registry)["link_busy_seconds_total", None] == 0, "the CPU engine has no link"
    rig.runtime.plan = dataclasses.replace(rig.runtime.plan, device="H200")
    rig.runtime.tokens_staged += 1000
    exporter.publish(rig.runtime, STATS)
    summary = rig.runtime.summary()
    moved = summary["total"]["bytes_in"] + summary["bytes_staged"]
    assert summary["total"]["bytes_in"] > 0 < summary["bytes_staged"]
    seconds = samples(registry)["link_busy_seconds_total", None]
    assert seconds == summary["link_busy_seconds"] == pytest.approx(moved / devices.find("H200").link)


def test_a_reset_does_not_take_back_what_was_counted(registry):
    rig, exporter = running(), prometheus.Exporter(collector(registry))
    rig.decode([1, 2])
    exporter.publish(rig.runtime, STATS)
    rig.runtime.reset_counters()
    exporter.publish(rig.runtime, STATS)
    rig.decode([1, 2])
    exporter.publish(rig.runtime, STATS)
    found = samples(registry)
    assert found["steps_total", None] == 2
    assert found["selected_units_total", "1"] > rig.runtime.summary()["layers"][1]["selected"]


def test_names_follow_sglangs_rules():
    names = [
        *(name for name, _ in prometheus.LAYER_COUNTERS.values()),
        *(name for name, _ in prometheus.COUNTERS.values()),
    ]
    assert all(name.endswith("_total") for name in names) and len(set(names)) == len(names)
    assert not any(name.endswith("_total") for name, _ in prometheus.GAUGES.values())


RANK = """
import sys, types
sys.path.insert(0, {here!r})
from test_prometheus import STATS, LABELS, running
from sglang.srt.sparse_kv import prometheus
collector = types.SimpleNamespace(labels={{**LABELS, "tp_rank": int(sys.argv[1])}}, _counter_cls=None, _gauge_cls=None)
rig, exporter = running(), prometheus.Exporter(collector)
for _ in range(int(sys.argv[1]) + 1):
    rig.decode([1, 2])
exporter.publish(rig.runtime, STATS)
print(rig.runtime.summary()["total"]["selected"])
"""

SCRAPE = """
import prometheus_client, prometheus_client.multiprocess
registry = prometheus_client.CollectorRegistry()
prometheus_client.multiprocess.MultiProcessCollector(registry)
print(prometheus_client.generate_latest(registry).decode())
"""


def test_each_rank_of_several_processes_publishes_its_share(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    here = Path(__file__).parent
    code = RANK.format(here=str(here))

    def run(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, cwd=here.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout

    selected = {rank: float(run(code, rank)) for rank in ("0", "1")}
    text = run(SCRAPE)
    for rank, total in selected.items():
        own = [line for line in text.splitlines() if f'tp_rank="{rank}"' in line and "selected_units_total" in line]
        assert len(own) == 3 and sum(float(line.split()[-1]) for line in own) == total
        steps = next(line for line in text.splitlines() if f'tp_rank="{rank}"' in line and "steps_total" in line)
        assert float(steps.split()[-1]) == int(rank) + 1
