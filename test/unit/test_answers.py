"""Answers of many rows at once, against the same answers decoded as one block each; and the grid built on them."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import tiny_llama
import torch

from benchmark import chart
from benchmark.models.llama_ref import Checkpoint, Llama
from benchmark.quality import grid
from benchmark.quality.answers import Answers, Read
from benchmark.quality.scores import SCORES, mean
from benchmark.quality.sparse_rows import Prefilled, Selecting, SparseRows

LENGTHS, TOKENS = (152, 121, 160), 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return tiny_llama.checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, tiny_llama.VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]


def test_every_row_says_what_it_says_alone(checkpoint, prompts):
    """Given a row's own answer as the tail, the block decoder predicts each of its tokens."""
    ways = [Selecting(SCORES[name], budget, 8, 8, 10) for name in sorted(SCORES) for budget in (16, 48)]
    ways += [Selecting(mean, 0, 8, 8, 34), None]
    said = Answers(checkpoint, Read(checkpoint, prompts, "cpu", 8), ways, TOKENS).run()
    for ids, answers in zip(prompts, said):
        for way, answer in zip(ways, answers):
            assert len(answer) == TOKENS
            whole = ids + answer
            if way is None:
                model = Llama(checkpoint)
                logits = torch.cat(list(model.logits(model.last_stream(torch.tensor(whole))[len(ids) - 1 :])))
                assert logits[:-1].argmax(-1).tolist() == answer
            else:
                context = Prefilled.read(checkpoint, whole, TOKENS, "cpu")
                found = SparseRows(checkpoint, context, way).predictions()
                assert found[:-1].argmax(-1).tolist() == answer[1:]
    assert len({tuple(answer) for answer in said[0]}) > 4, "no way left anything out"


def test_an_answer_ends_where_it_says_so(checkpoint, prompts):
    ways = [Selecting(mean, 16, 8, 8, 10), None]
    read = Read(checkpoint, prompts, "cpu", 8)
    whole = Answers(checkpoint, read, ways, TOKENS).run()
    end = whole[0][0][5]
    cut = Answers(checkpoint, read, ways, TOKENS).run([end])
    for before, after in zip(whole, cut):
        for long, short in zip(before, after):
            assert short == long[: long.index(end) if end in long else TOKENS]
    every = Answers(checkpoint, read, ways, TOKENS).run(range(97))
    assert every == [[[], []]] * 3


def test_ways_that_cannot_run_together_are_refused(checkpoint, prompts):
    with pytest.raises(ValueError, match="one page size"):
        Answers(checkpoint, Read(checkpoint, prompts, "cpu"), [Selecting(mean, 16, 16), Selecting(mean, 16, 8)], 4)


# ---------------------------------------------------------------- the grid


def cell(task: str, dense: list[float], sparse: list[float], length: int = 2048) -> dict:
    return {"task": task, "length": length, "scores": {"dense": dense, "mean@128": sparse, "mean@256": dense}}


CELLS = [cell("niah", [1, 1, 1, 0.5], [1, 0, 1, 0.5]), cell("vt", [0.6, 0.6], [0.2, 0.8]), cell("cwe", [0.5], [1])]


def test_only_tasks_that_dense_can_do_count():
    rows = {row["way"]: row for row in grid.summary(CELLS)}
    assert rows["dense"]["score"] == pytest.approx((0.875 + 0.6) / 2) and rows["dense"]["tasks"] == 2
    assert rows["mean@128"]["score"] == pytest.approx((0.625 + 0.5) / 2)
    gaps = torch.tensor([0, -1, 0, 0, -0.4, 0.2], dtype=torch.float64)
    assert rows["mean@128"]["against_dense"] == pytest.approx(float(gaps.mean()))
    assert rows["mean@128"]["error"] == pytest.approx(float(gaps.std()) / 6**0.5)
    assert rows["mean@256"]["against_dense"] == rows["mean@256"]["error"] == 0
    assert grid.summary(CELLS[2:]) == []


def test_table_and_picture():
    printed = grid.table(CELLS)
    assert "(cwe)" in printed and "(vt)" not in printed and "mean of 2 that count" in printed
    row = next(line for line in printed.splitlines() if line.startswith("niah"))
    assert row.split() == ["niah", "87.5", "62.5"]
    drawn = ElementTree.fromstring(grid.picture(CELLS))
    assert len(drawn.findall("{*}polyline")) == 2 and grid.picture(CELLS[2:]) is None
    assert "(cwe)" in grid.table(CELLS[2:])


def test_budgets_that_leave_nothing_out_are_not_run():
    found = grid.ways(["mean", "recent"], [128, 1024, 2048], 2048)
    assert list(found) == ["dense", "mean@128", "recent@128", "mean@1024", "recent@1024"]
    assert found["dense"] is None and found["recent@128"].budget == 0 and found["recent@128"].window == 192


class Letters:
    """A token for each character of printable ASCII."""

    chat_template, eos_token_id = None, 0

    def encode(self, text, **kwargs):
        return [ord(letter) % 97 for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture
def letters(monkeypatch):
    monkeypatch.setattr(grid, "load_tokenizer", lambda folder: Letters())


def test_the_grid_continues_where_it_stopped(checkpoint, letters, tmp_path, capsys):
    arguments = [str(checkpoint.folder), "--device", "cpu", "--prompts", "2", "--length", "900", "--budget", "128"]
    arguments += ["--score", "mean", "recent", "--json", str(tmp_path / "grid.json"), "--svg", str(tmp_path / "g.svg")]
    assert grid.main([*arguments, "--task", "niah_single_1"]) == 0
    first = json.loads((tmp_path / "grid.json").read_text())
    assert grid.main([*arguments, "--task", "niah_single_1", "vt", "--seconds", "0"]) == 3
    assert "same command again" in capsys.readouterr().err
    assert grid.main([*arguments, "--task", "niah_single_1", "vt"]) == 0
    data = json.loads((tmp_path / "grid.json").read_text())
    assert data["cells"][0] == first["cells"][0] and [c["task"] for c in data["cells"]] == ["niah_single_1", "vt"]
    assert set(data["cells"][1]["scores"]) == {"dense", "mean@128", "recent@128"}
    assert len(data["cells"][1]["scores"]["dense"]) == 2 and data["runs"][-1]["command"].endswith("vt")
    assert data["runs"][0]["machine"]["cores"] and data["runs"][0]["versions"]["torch"] and data["summary"] == []
    assert grid.main([*arguments, "--seed", "1"]) == 1 and "name another file" in capsys.readouterr().err
    assert grid.main(["nowhere", "--json", str(tmp_path / "x")]) == 1


def test_a_chart_places_its_points():
    drawn = ElementTree.fromstring(chart.lines("A < B", "x", "y", {"one": [(4, 1), (1, 0), (2, 2)]}, log_x=True))
    spots = [tuple(map(float, spot.split(","))) for spot in drawn.find("{*}polyline").get("points").split()]
    assert spots[0][0] + spots[2][0] == pytest.approx(2 * spots[1][0])
    assert spots[0][1] > spots[2][1] > spots[1][1]
    assert spots[0][1] - spots[2][1] == pytest.approx(spots[2][1] - spots[1][1])
    with pytest.raises(ValueError, match="no point"):
        chart.lines("A", "x", "y", {"one": []})
    with pytest.raises(ValueError, match="x <= 0"):
        chart.lines("A", "x", "y", {"one": [(0, 1)]}, log_x=True)
    with pytest.raises(ValueError, match="y <= 0"):
        chart.lines("A", "x", "y", {"one": [(1, 0)]}, log_y=True)


def test_a_chart_of_small_values_has_its_decades_and_no_label_on_another():
    series = {"one": [(1, 0.003), (1000, 0.03), (1001, 0.3)]}
    drawn = ElementTree.fromstring(chart.lines("A", "x", "y", series, log_y=True))
    heights = [float(spot.split(",")[1]) for spot in drawn.find("{*}polyline").get("points").split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2) and heights[0] > heights[1]
    said = [text.text for text in drawn.findall("{*}text")]
    assert said[3:] == ["0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "1000", "one"]
