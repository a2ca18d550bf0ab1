"""Cells of the serving benchmark as a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmark.serving import plot

CELLS = [
    ("sparse", 32768, "default", 1, 100.0),
    ("sparse", 32768, "default", 8, 800.0),
    ("sparse", 32768, "oracle", 8, 900.0),
    ("dense", 32768, "default", 1, 100.0),
    ("dense", 32768, "default", 5, 300.0),
    ("dense", 1400, "default", 5, 7000.0),
    ("dense", 32768, "default", 8, None),  # it holds five
]


def result(path, cells=CELLS):
    written = []
    for variant, length, policy, streams, speed in cells:
        cell = {"variant": variant, "length": length, "policy": policy, "batch": streams, "temperature": 0.6, "run": 0}
        written.append(
            cell | ({"skipped": "holds 5"} if speed is None else {"streams": streams, "tokens_per_second": speed})
        )
    path.write_text(json.dumps({"benchmark": "serving", "runs": [{}], "cells": written}))
    return str(path)


def test_the_command(tmp_path, capsys):
    svg = tmp_path / "a.svg"
    assert plot.main([result(tmp_path / "a.json"), "--length", "32768", "--svg", str(svg)]) == 0
    drawn = ElementTree.parse(svg)
    lines = [
        [tuple(map(float, p.split(","))) for p in line.get("points").split()] for line in drawn.findall("{*}polyline")
    ]
    said = [text.text for text in drawn.findall("{*}text")]
    assert said[-3:] == ["dense", "sparse", "sparse, oracle"] and {"1", "5", "8"} <= set(said)
    dense, sparse, oracle = lines
    assert len(dense) == len(sparse) == 2 and len(oracle) == 1
    assert dense[0] == sparse[0], "as fast with one request"
    assert sparse[1][1] < dense[1][1] and oracle[0][0] == sparse[1][0] and oracle[0][1] < sparse[1][1]
    assert plot.main([str(tmp_path / "a.json"), "--length", "7", "--svg", str(svg)]) == 1
    assert "prompts of 7 tokens; measured were 1400, 32768" in capsys.readouterr().err
    assert plot.main([str(tmp_path / "b.json"), "--length", "7", "--svg", str(svg)]) == 1
    assert "b.json" in capsys.readouterr().err


def test_files_are_drawn_together(tmp_path):
    first, second = result(tmp_path / "a.json", CELLS[:2]), result(tmp_path / "b.json", CELLS[3:5])
    svg = tmp_path / "c.svg"
    assert plot.main([first, second, "--length", "32768", "--svg", str(svg)]) == 0
    assert len(ElementTree.parse(svg).findall("{*}polyline")) == 2


@pytest.mark.parametrize("length", [32768, 122880])
def test_the_kept_run_can_be_drawn(length, tmp_path):
    kept = plot.Path(plot.__file__).parents[1] / "results" / "2026-11-30-h200-serving-suite.json"
    assert plot.main([str(kept), "--length", str(length), "--svg", str(tmp_path / "d.svg")]) == 0
