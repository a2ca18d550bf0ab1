"""The timeline command against a running server."""

from __future__ import annotations

import json
import xml.etree.ElementTree

import pytest

from benchmark.timeline.__main__ import main
from benchmark.timeline.lanes import LANES


@pytest.mark.slow
def test_a_running_server_draws_its_steps(sparse, tmp_path, capsys):
    sparse.policy(budget=256, cache_slots=64)
    out, picture = tmp_path / "timeline.json", tmp_path / "timeline.svg"
    arguments = ["--url", sparse.url, "--steps", "3", "--characters", "3000", "--out", str(out), "--svg", str(picture)]
    assert main(arguments) == 0, capsys.readouterr().err
    trace = json.loads(out.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    layers = [(event["args"]["step"], event["args"]["layer"]) for event in events if event["cat"] == "layers"]
    steps = 1 + layers[-1][0]
    assert layers == [(step, layer) for step in range(steps) for layer in range(30)] and steps >= 2
    assert {event["cat"] for event in events} == set(LANES), "misses, prefetches and the model all took their time"
    assert "attention" in capsys.readouterr().out
    xml.etree.ElementTree.parse(picture)
