"""The serving benchmark against a real server: every figure that a GPU run reports is there on a CPU too."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.models import check_inflation, inflate
from benchmark.quality import fidelity, grid
from benchmark.serving import load, prefill, run, server, table


def test_the_benchmark_measures_a_running_server(sparse, demo_model, tmp_path, capsys):
    output = tmp_path / "result.json"
    arguments = ["--model", demo_model, "--output", str(output), "--url", sparse.url, "--device", "cpu"]
    arguments += ["--variants", "sparse", "--lengths", "400", "--batches", "1", "2", "--policies", "default"]
    arguments += ["on_demand", "--tokens", "24", "--warmup", "4", "--stream-interval", "2", "--temperature", "0"]
    assert run.main(arguments) == 0
    after = server.state(sparse.url)["sparse_kv"]["policy"]
    assert after["prefetch"] is True, "a policy of the last cells stays with whatever comes next"
    data = json.loads(output.read_text())
    cells = {(cell["policy"], cell["batch"]): cell for cell in data["cells"]}
    assert len(cells) == 4
    for (policy, batch), cell in cells.items():
        assert cell["tokens_per_second"] > 0 and cell["ttft_s_max"] >= cell["ttft_s_p50"] > 0
        # The prompts were prefilled once; each stream recomputes less than a page and a token of its prompt.
        assert cell["cached_tokens"] >= batch * (400 - 16 - 1)
        assert cell["policy_in_force"]["prefetch"] is (policy == "default")
        counters = cell["counters"]
        assert counters["steps"] > 0 and len(counters["layers"]) == 30
        assert counters["total"]["selected"] == counters["total"]["hit"] + counters["total"]["missed"]
    started = data["runs"][0]["servers"][0]
    assert started["cold_ttft_s_400"] > 0 and started["plan"]["slots"] > 0
    assert table.main([str(output)]) == 0
    assert "on_demand" in capsys.readouterr().out


@pytest.mark.slow
def test_first_tokens_are_measured(sparse, demo_model, tmp_path):
    """A second turn reads its prefix from the cache, and from the host where that was emptied."""
    output = tmp_path / "prefill.json"
    arguments = ["--model", demo_model, "--output", str(output), "--url", sparse.url, "--device", "cpu"]
    assert prefill.main([*arguments, "--variants", "sparse", "--lengths", "208"]) == 0
    found = json.loads(output.read_text())["variants"]["sparse"]["lengths"]["208"]
    assert found["cold_s"] > 0 and found["group_s"] > 0
    turns = found["second_turn"]
    assert turns["as_left"]["cached_tokens"] == turns["from_host"]["cached_tokens"] == 208
    units = 208 // 16 * 30 * 3 * prefill.REPEATS
    assert turns["as_left"]["units"] == {"prefix_cache": units, "prefix_host": 0}
    assert turns["from_host"]["units"] == {"prefix_cache": 0, "prefix_host": units}


@pytest.mark.slow
def test_agents_arrive_at_random(sparse, demo_model, tmp_path, capsys):
    """SGLang's own client; later turns find what the earlier ones and the other agents left."""
    output = tmp_path / "load.json"
    arguments = ["--model", demo_model, "--output", str(output), "--url", sparse.url, "--device", "cpu"]
    arguments += ["--variants", "sparse", "--logs", str(tmp_path), "--sessions", "2", "--rates", "1"]
    agents = ["--turns", "2", "--shared", "96", "--first", "128", "--later", "32", "--answer", "8"]
    assert load.main([*arguments, *agents]) == 0
    assert load.main([*arguments, "--workload", "random", "--first", "64", "--answer", "8"]) == 0
    shared = ["--workload", "shared", "--groups", "1", "--shared", "64", "--first", "64", "--answer", "8"]
    assert load.main([*arguments, *shared]) == 0
    agents, random, shared = json.loads(output.read_text())["cells"]
    assert agents["requests"] == 4 and random["requests"] == shared["requests"] == 2
    first, second = agents["turns"]
    assert second["cached_tokens"] > 96 + 128 > first["cached_tokens"]
    assert random["turns"][0]["cached_tokens"] < 32
    for cell in (agents, random, shared):
        assert cell["completion_s_p99"] >= cell["ttft_s_p99"] > 0 and cell["goodput_rps"] > 0
        assert cell["counters"]["steps"] > 0 and cell["counters"]["total"]["selected"] > 0
    assert "agents" in capsys.readouterr().out


@pytest.mark.slow
def test_scores_are_compared(demo_model, tmp_path, capsys):
    output = tmp_path / "fidelity.json"
    arguments = [demo_model, "--score", "mean", "exact", "--budget", "64", "--length", "400", "--tail", "24"]
    assert fidelity.main([*arguments, "--each", "1", "--kind", "code", "--json", str(output)]) == 0
    mean, exact = json.loads(output.read_text())["rows"]
    assert mean["setting"].startswith("mean budget 64") and exact["setting"].startswith("exact budget 64")
    assert "mean budget 64" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_is_inflated_and_checked(demo_model, tmp_path, capsys):
    large = str(tmp_path / "tp8")
    shape = ["--shape", "tp8", "--dtype", "float32", "--rope", "yarn", "--context", "16384"]
    assert inflate.main([demo_model, large, *shape]) == 0
    assert check_inflation.main([demo_model, large, "--tokens", "64", "--limit", "0.05"]) == 0
    assert "inflated" in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_model_recalls_side_by_side(demo_model, tmp_path, capsys):
    """One needle, far back: found densely and at a budget; in no window of that size, unless it lies there."""
    arguments = [str(demo_model), "--device", "cpu", "--length", "700", "--prompts", "2", "--budget", "128"]
    arguments += ["--task", "niah_single_1", "--score", "mean", "recent", "--json", str(tmp_path / "grid.json")]
    assert grid.main(arguments) == 0
    (cell,) = json.loads((tmp_path / "grid.json").read_text())["cells"]
    assert cell["scores"]["dense"] == cell["scores"]["mean@128"] == [1, 1]
    assert sum(cell["scores"]["recent@128"]) < 2
    assert "mean of 1 that count" in capsys.readouterr().out
