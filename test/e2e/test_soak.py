"""A short while of mixed traffic, as `benchmark/soak` makes it for an hour."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from serving import Server

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.serving import server as benchmark_server
from benchmark.soak import run, watch


def soak(server: Server, seconds: int, output: Path, *more: str) -> dict:
    words = ["--url", server.url, "--seconds", str(seconds), "--log", str(server.log_path), "--output", str(output)]
    status = run.main([*words, "--clients", "4", "--longest", "500", "--period", "2", *more])
    found = json.loads(output.read_text())
    assert status == 0, found["complaints"]
    return found


def test_agents_for_a_while(sparse: Server, tmp_path: Path):
    """Too short to see a slow leak: memory may still grow by a tenth."""
    sparse.policy(budget=256)
    found = soak(sparse, 15, tmp_path / "soak.json", "--growth", "0.1", "--drop", "0.3")
    assert found["requests"] >= 6 and found["tokens"] > 50
    assert found["host_tokens"] > 0 < found["cache_tokens"] and found["counted"]["hit"] > 0


def sample(second: int, rss: float = 1000, hit: float = 0.9, steps: int = 1) -> dict:
    processes = {"1": rss}
    counts = dict.fromkeys(watch.COUNTED, 0) | {"selected": 100 * second, "hit": round(100 * hit * second)}
    counts["steps"] = steps * second
    return {"seconds": second, "rss_mib": rss, "gpu_mib": 0, "processes_mib": processes, **counts}


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        ([sample(i) for i in range(30)], None),
        ([sample(i, rss=1000 + (i < 10) * i) for i in range(30)], None),
        ([sample(i, rss=1000 + 5 * i) for i in range(30)], "rss_mib grew"),
        ([sample(i, hit=0.9 - 0.02 * i) for i in range(30)], "hit rate fell"),
        ([sample(i, steps=0) for i in range(30)], "no step"),
        ([sample(i) for i in range(5)], "too few"),
    ],
)
def test_what_is_not_flat_is_noticed(samples, complaint):
    found = watch.verdict(samples, growth=0.02, drop=0.1)
    complaints = found["complaints"]
    assert (not complaints) if complaint is None else complaint in complaints[0]
    if len(samples) > 5:
        assert found["counted"]["selected"] == 2900


def test_a_neighbours_memory_is_not_the_servers(sparse: Server, monkeypatch):
    pid = watch.pid_behind(sparse.url)
    rows = [[str(pid), "300", "a"], ["1", "70000", "a"]]
    monkeypatch.setattr(benchmark_server, "nvidia_smi", lambda query: rows)
    looked = watch.Watch(sparse.url, 60)
    looked.stop()
    assert [found["gpu_mib"] for found in looked.samples] == [300]


def test_what_torch_compiles_with_is_no_part_of_a_server():
    """It ends by itself after minutes without work, and a soak took that for a crash."""
    python = "/usr/bin/python3"
    worker = [python, "/site-packages/torch/_inductor/compile_worker/__main__.py", "--workers=32", "--parent=7"]
    assert watch.compiles(worker) and not watch.compiles(["sglang::scheduler"]) and not watch.compiles([])
    assert not watch.compiles([python, "-m", "sglang.launch_server", "--model-path", "compile"])
