"""The predictability study from start to report, on a server of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from texts import question

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.predictability import __main__ as study

pytestmark = pytest.mark.slow


def test_a_study_of_two_contexts(fleet, demo_model, tmp_path):
    fleet.stop()  # one server at a time
    contexts = tmp_path / "contexts.jsonl"
    contexts.write_text("".join(json.dumps({"text": question(kind, 2500)}) + "\n" for kind in ("records", "tale")))
    output = tmp_path / "study"
    arguments = ["--model", demo_model, "--output", str(output), "--prompts", str(contexts), "--tokens", "20"]
    arguments += ["--budget", "128", "--temperatures", "0", "0.6", "--guides", "resync", "forced"]
    arguments += ["--", "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192"]
    assert study.main(arguments) == 0
    found = json.loads((output / "report.json").read_text())["temperatures"]
    assert set(found) == {"0", "0.6"}
    for part in found.values():
        assert part["contexts"] == 2 and part["steps"] == 2 * 19 and part["pages_of_budget"] == 8
        assert part["same_text"] and part["sync"]["forced"]["hits"] == 2 * 19
        assert part["recall"]["forced"]["recall"] > part["recall"]["last set"]["recall"] > 0.3
        assert len(part["recall"]["forced"]["by_layer"]) == 30
        one = {name: part["caches"][f"{name}, 2 k"] for name in ("LRU alone", "forced", "oracle")}
        assert one["oracle"]["missed"] <= one["forced"]["missed"] < one["LRU alone"]["missed"]
    files = len(list(output.glob("*.steps")))
    assert study.main(arguments) == 0, "a second time, nothing runs and the report is made anew"
    assert len(list(output.glob("*.steps"))) == files == 1
