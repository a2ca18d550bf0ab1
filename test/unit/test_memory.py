"""Memory beside peers: the formulas by hand, and what longer contexts add."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sglang.srt.sparse_kv import model_shape
from sglang.srt.sparse_kv.config import SparseKVConfig

from benchmark import memory

MODELS = Path(__file__).resolve().parents[2] / "docs" / "models"
SHAPE = model_shape.read(str(MODELS / "llama-3.1-8b.json"), SparseKVConfig())


def test_longer_contexts_add_little():
    """The paper's target: from 64K to 512K tokens 3.7 GB at most, at 8B; one landmark per 8 tokens takes 3.76."""
    short, long = (memory.ours(SHAPE, 1, context, 2048) for context in (65536, 524288))
    grown = {name: long[name] - short[name] for name in long}
    assert sum(grown.values()) < 3.7e9
    per_page = 32 * 8 * SHAPE.geometry(SparseKVConfig(), 16, 1, 65536).landmark_bytes
    assert grown["landmarks"] == pytest.approx(458752 / 16 * per_page, rel=1e-3)
    assert grown["page cache"] == 0
    assert sum(grown.values()) - grown["landmarks"] < 0.1e9


@pytest.mark.parametrize("batch", [1, 12])
def test_ours_by_hand(batch):
    found = memory.ours(SHAPE, batch, 131072, 2048)
    width = 2048 // 16 + 1 + 5  # budget, sinks, and a window of 64 tokens over five pages
    slots = batch * (width + 1) + 128
    assert found["page cache"] == slots * 32 * 8 * 2 * 16 * 128 * 2
    buffers = memory.ours(SHAPE, batch, 131072, 2048, "none")
    assert buffers["page cache"] == found["page cache"] * 3 // 32
    assert buffers["landmarks"] == found["landmarks"]


def test_peers_by_hand():
    kv = 128 * 1024  # bytes of a token: 32 layers, 8 heads of 128, keys and values, 2 bytes
    assert memory.full(SHAPE, 3, 1000) == {"keys and values": 3 * 1000 * kv}
    assert memory.shadowkv(SHAPE, 2, 65536, 2048) == {
        "low-rank keys": 2 * 32 * (65536 + 1024) * 160 * 2,
        "landmarks": 2 * 32 * 8192 * 2048,
        "selection": 2 * (2048 + 416) * kv,
    }
    assert memory.specache(SHAPE, 2, 65536, 2048) == {
        "2-bit keys and values": 2 * 65536 * kv // 8,
        "selection": 2 * 2048 * kv,
    }


def test_the_command(tmp_path, capsys):
    arguments = [str(MODELS / "qwen2.5-32b.json"), "--batch", "1", "4", "--context", "32768", "65536"]
    assert memory.main([*arguments, "--json", str(tmp_path / "m.json"), "--svg", str(tmp_path / "m.svg")]) == 0
    data = json.loads((tmp_path / "m.json").read_text())
    assert len(data["rows"]) == 2 * 2 * 5 and data["machine"]["cores"] and data["versions"]["python"]
    total = {(row["batch"], row["context"], row["system"]): row["total"] for row in data["rows"]}
    assert total[4, 65536, "ours, buffers"] < total[4, 65536, "ours"] < total[4, 65536, "ShadowKV, computed"]
    printed = capsys.readouterr().out
    added = (total[4, 65536, "ours"] - total[4, 32768, "ours"]) / 1e9
    assert f"{added:.2f} GB" in printed.splitlines()[-1]
    assert len(ElementTree.parse(tmp_path / "m.svg").findall("{*}polyline")) == 5
    assert memory.main(["nowhere"]) == 1 and "neither a folder" in capsys.readouterr().err
