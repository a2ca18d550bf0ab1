"""The predictability study's arithmetic, without a model: every figure against the plainest way to get it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.recorder import Recorder

from benchmark.predictability import __main__ as study
from benchmark.predictability import prompts, record, report, signals
from benchmark.predictability.bursts import bursts, excess
from benchmark.predictability.caches import WARM_UP, replay
from benchmark.predictability.gates import opened
from benchmark.predictability.recording import Run, Trace, load
from benchmark.serving.policies import resolve

LAYERS, HEADS, K, PAGES = 2, 2, 4, 24


def trace(steps: int = 20, seed: int = 0, right=None, change: float = 0.3) -> Trace:
    """Sets that change a little from step to step; the prediction is the next set where the guess is right."""
    draw = np.random.default_rng(seed)
    sets = np.empty((steps + 1, LAYERS, HEADS, K), dtype=np.int32)
    for lane in np.ndindex(LAYERS, HEADS):
        now = list(draw.choice(PAGES, K, replace=False))
        for step in range(steps + 1):
            for place in range(K):
                if draw.random() < change:
                    now[place] = draw.choice([page for page in range(PAGES) if page not in now])
            sets[(step, *lane)] = sorted(now)
    right = np.ones(steps, dtype=bool) if right is None else np.array(right, dtype=bool)
    predicted = np.where(right[:, None, None, None], sets[1:], sets[:-1])
    return Trace(sets[:-1], predicted, right, np.arange(steps), np.arange(steps) + 400)


def test_sync_counts_stays_and_returns():
    found = signals.sync([trace(6, right=[1, 1, 0, 0, 1, 1]), trace(3, right=[1, 1, 1])])
    assert (found.hits, found.steps) == (7, 9)
    assert (found.stay, found.back) == (4 / 5, 1 / 2)
    assert np.isnan(signals.sync([trace(4)]).back), "never lost, never returned"


def test_recall_is_the_share_that_was_named():
    one = trace()
    true, named = one.true[1:], one.predicted[:-1]
    assert signals.recall(true, named).tolist() == [1.0] * LAYERS
    plain = [
        np.mean([len(set(one.true[s + 1, 0, h]) & set(one.true[s, 0, h])) / K for s in range(19) for h in range(HEADS)])
    ]
    assert signals.recall(true, one.true[:-1])[0] == pytest.approx(plain[0])


def test_signals_beside_one_another():
    wrong = trace(right=[False] * 20)
    found = signals.recalls([trace()], {"chain": [trace()], "lost": [wrong]})
    assert found["chain"][1].mean() == 1.0 and found["right guess"][1].mean() == 1.0
    assert found["lost"][1].mean() == pytest.approx(found["last set"][1].mean())
    assert found["wrong guess"][1].mean() == pytest.approx(found["last set"][1].mean())
    assert found["last set"][0] == 1.0 < found["union of last 2"][0] < found["union of last 4"][0]
    assert found["last set"][1].mean() < found["union of last 2"][1].mean() < found["union of last 4"][1].mean()


def plain_lru(one: Trace, slots: int) -> float:
    """Misses a step in units of k of a dictionary in order of last use."""
    missed = []
    for lane in np.ndindex(LAYERS, HEADS):
        sets = [[int(page) for page in row] for row in one.true[(slice(None), *lane)]]
        highest = int(one.true[0].max())
        cache = dict.fromkeys(range(max(0, highest + 1 - slots), highest + 1), 0)
        for step, wanted in enumerate(sets):
            clock = step + 2
            top = int(one.true[step].max())
            if step and top > int(one.true[:step].max()):
                cache[top] = max(cache.get(top, -1), clock - 1)
                _shrink(cache, slots, clock)
            count = sum(page not in cache for page in wanted)
            cache |= dict.fromkeys(wanted, clock)
            _shrink(cache, slots, clock)
            if step >= WARM_UP:
                missed.append(count)
    return float(np.mean(missed)) / K


def _shrink(cache: dict[int, int], slots: int, clock: int) -> None:
    old = sorted((stamp, page) for page, stamp in cache.items() if stamp < clock)
    for _, page in old[: max(0, len(cache) - slots)]:
        del cache[page]


@pytest.mark.parametrize("slots", [K, K + 1, 2 * K, PAGES])
@pytest.mark.parametrize("seed", range(3))
def test_the_replayed_cache_is_lru(slots, seed):
    one = trace(30, seed)
    found = replay([one], slots, None)
    assert found.missed == pytest.approx(plain_lru(one, slots))
    assert found.moved == found.missed and found.useful == 0


def test_a_right_prediction_leaves_no_miss_and_moves_no_more():
    one = trace(40)
    alone, guided = replay([one], 2 * K, None), replay([one], 2 * K, [one.predicted])
    assert alone.missed > 0.05
    assert guided.missed == 0 and guided.clean == 1 and guided.useful == pytest.approx(1, abs=0.1)
    assert guided.moved < 1.3 * alone.missed


def test_a_prediction_never_evicts_what_the_step_selected():
    one = trace(40)
    full = replay([one], K, [one.predicted])
    assert full.missed == replay([one], K, None).missed, "the selection fills the cache, and nothing may be fetched"
    assert full.moved == full.missed


def test_wrong_predictions_move_bytes_for_nothing():
    one = trace(40)
    useless = np.stack([np.random.default_rng(1).permutation(PAGES)[:K] for _ in range(40 * LAYERS * HEADS)])
    found = replay([one], 2 * K, [useless.reshape(one.true.shape)])
    assert found.useful < 0.5 and found.moved > 1.3 * replay([one], 2 * K, None).missed


def test_a_gate_stops_prefetching():
    one = trace(40)
    shut = replay([one], 2 * K, [one.predicted], [np.zeros((40, LAYERS), dtype=bool)])
    assert shut.missed == shut.moved == replay([one], 2 * K, None).missed


def test_a_gate_may_stop_one_layer():
    one = trace(40)
    half = np.tile([True, False], (40, 1))
    by_layer = replay([one], 2 * K, [one.predicted], [half]).by_layer
    assert by_layer[0] == 0 and by_layer[1] == replay([one], 2 * K, None).by_layer[1]


def test_what_is_fetched_ahead_is_told_by_layer():
    one = trace(40)
    half = np.zeros((40, LAYERS), dtype=bool)
    half[:, 1] = True
    found = replay([one, one], 2 * K, [one.predicted] * 2, [half] * 2)
    assert [ahead.shape for ahead in found.ahead] == [(40 - WARM_UP, LAYERS)] * 2
    assert all(not ahead[:, 0].any() and ahead[:, 1].any() for ahead in found.ahead)
    units = sum(int(ahead.sum()) for ahead in found.ahead) / (LAYERS * HEADS) / (2 * (40 - WARM_UP))
    assert found.moved == pytest.approx(found.missed + units / K)


def test_the_excess_is_that_of_the_worst_run_of_layers():
    draw = np.random.default_rng(1)
    sizes = draw.exponential(1, (50, 7))
    runs = [(a, b) for a in range(8) for b in range(a, 8)]
    assert excess(sizes) == pytest.approx([max(row[a:b].sum() - (b - a) for a, b in runs) for row in sizes])


def test_bursts_are_of_all_requests_together():
    even = [np.full((20, 4), 3)]
    assert bursts(even, 8) == {"layer": 1.0, "step": 1.0, "typical": 0.0, "run": 0.0}
    one_layer = [np.tile([0, 4, 0, 0], (20, 1))]
    assert bursts(one_layer, 3) == {"layer": 4.0, "step": 1.0, "typical": 3.0, "run": 3.0}
    one_step = [np.array([[8] * 4] + [[0] * 4] * 7)]
    alone, many = bursts(one_step, 1), bursts(one_step, 64)
    assert alone["run"] == 28.0 > many["run"] > 0 and alone["step"] == 8.0 > many["step"] > 1
    assert set(bursts([np.zeros((5, 4), dtype=int)], 2).values()) == {0.0}


def test_the_engine_s_gate_decides_in_replays():
    lost = opened(trace(20, right=[True] * 6 + [False] * 10 + [True] + [False] * 3), 0.25, late=1)
    assert lost[:7].all(), "in sync"
    assert not lost[10:16].any()
    assert lost[16].tolist() == [False, True], "the layer that fetches in the step after knows"
    assert opened(trace(20, right=[False] * 20), 0.0, late=1).all()


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="record more tokens"):
        replay([trace(WARM_UP)], 2 * K, None)


# ---------------------------------------------------------------- contexts and files


class Letters:
    def encode(self, text, **_):
        return [ord(letter) for letter in text]


def test_contexts_come_from_jsonl_and_text(tmp_path):
    lines, plain = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('{"text": "abc"}\n\n{"prompt": "de"}\n{"input_ids": [1, 2, 3, 4]}\n')
    plain.write_text("xyz")
    assert prompts.load([lines, plain], Letters(), 9, 3) == [[97, 98, 99], [100, 101], [2, 3, 4], [120, 121, 122]]
    assert [len(ids) for ids in prompts.load([], Letters(), 2, 500)] == [500, 500]


@pytest.mark.parametrize("line", ['{"question": "why"}', '["text"]', '{"text": 3}'])
def test_a_line_without_a_text_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(ValueError, match="line 2 has neither"):
        prompts.load([path], Letters(), 1, 10)


def write(path: Path, run: Run, contexts: dict[int, Trace]) -> None:
    recorder = Recorder(str(path), 16, 4096)
    for step in range(len(next(iter(contexts.values())).right)):
        recorder._layers = [
            np.stack([np.stack([t.true[step, layer], t.predicted[step, layer]], 1) for t in contexts.values()])
            for layer in range(LAYERS)
        ]
        drawn = [int(t.tokens[step]) for t in contexts.values()]
        guesses = [token if t.right[step] else -5 for token, t in zip(drawn, contexts.values())]
        header = {"requests": [run.request(c) for c in contexts], "next": drawn, "guesses": guesses}
        recorder.commit({**header, "lengths": [int(t.lengths[step]) for t in contexts.values()]})


def test_scores_decide_at_every_length_of_a_study(monkeypatch):
    """Or its sets would be wider than the budget, whose pages are the unit of all it says."""
    command = record.command("model", Path("steps"), 1664, 4, {"sinks": 32}, [])
    config = SparseKVConfig.from_dict(json.loads(command[command.index("--sparse-kv-config") + 1]))
    assert (config.budget, config.sinks, config.whole_at(1664)) == (1664, 32, 0)
    policies = []  # of a server that runs already
    monkeypatch.setattr(record.policies, "switch", lambda url, name, before: policies.append(resolve(name)))
    monkeypatch.setattr(record, "_generate", lambda *them: None)
    monkeypatch.setattr(record.server, "state", lambda url: {"sparse_kv": {"policy": {}, "guide_hits": 0, "guides": 0}})
    record.record("url", [[1]], [Run(0.0, guide) for guide in record.GUIDES], 8, print)
    assert len(policies) == len(record.GUIDES) and all(policy["whole"] == 0 for policy in policies)


def test_a_folder_of_recordings_becomes_a_report(tmp_path, capsys):
    lost = [step % 3 > 0 for step in range(20)]
    for number, (guide, right) in enumerate((("chain", lost), ("forced", None))):
        for temperature in (0.0, 0.6):
            write(
                tmp_path / f"part-{number}-{temperature}.steps",
                Run(temperature, guide),
                {context: trace(20, context, right) for context in range(2)},
            )
    write(tmp_path / "broken-off.steps", Run(0.0, "chain"), {0: trace(3, 0)})
    assert study.main(["--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "report.json").read_text())
    part = result["temperatures"]["0.6"]
    assert part["sync"]["forced"]["hits"] == 40 and part["sync"]["chain"]["hits"] == 2 * sum(lost)
    assert part["recall"]["forced"]["recall"] == 1.0 > part["recall"]["chain"]["recall"]
    two = {name: part["caches"][f"{name}, 2 k"] for name in ("LRU alone", "chain", "forced", "oracle")}
    assert two["oracle"]["missed"] == two["forced"]["missed"] == 0 < two["chain"]["missed"] < two["LRU alone"]["missed"]
    selection = LAYERS * HEADS * K * 4096 / 1e3
    assert two["chain"]["missed_kb"] == pytest.approx(two["chain"]["missed"] * selection, abs=0.1)
    shown = capsys.readouterr().out
    assert shown.count("| chain |") == 2 and "| chain, floor 0.5, 2 k |" in shown
    assert (tmp_path / "report.md").read_text() == shown


def test_guides_that_change_the_text_are_an_error(tmp_path):
    write(tmp_path / "a.steps", Run(0.0, "chain"), {0: trace(20, 0)})
    write(tmp_path / "b.steps", Run(0.0, "forced"), {0: trace(20, 1)})
    assert study.main(["--output", str(tmp_path)]) == 1


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no recorded steps"):
        load(tmp_path)
    assert load(tmp_path, empty=True).traces == {}, "a server that has only started has recorded its own warm-up"


def test_tables_have_a_column_a_temperature():
    found = {"0": report._temperature(_recording(), 0.0, 50e9)}
    lines = report.text(found).splitlines()
    assert all(line.count("|") in (0, 3) for line in lines)


def _recording():
    from benchmark.predictability.recording import Recording

    return Recording({Run(0.0, "chain"): {0: trace(20)}}, 16, 4096)
