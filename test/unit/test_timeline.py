"""From profiles to lanes: on made-up kernels and operations of known times."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree

import pytest
import torch
from sglang.srt.sparse_kv.variants import Variant
from sparse_rig import Rig

from benchmark.timeline import draw, lanes, prefill, record
from benchmark.timeline.__main__ import main
from benchmark.timeline.lanes import AHEAD, ATTENTION, LAYERS, MODEL, SELECTION, TABLE


def kernel(name: str, start: float, length: float, cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}


def gpu_layer(start: float) -> list[dict]:
    """Ten microseconds: a GEMM, our kernels, and a fetch on another stream."""
    return [
        kernel("void skv::score_kernel<4>(SkvView)", start, 1),
        kernel("skv::select_kernel(SkvSelect)", start + 1, 1),
        kernel("void skv::resolve_kernel<true>(SkvView)", start + 2, 1),
        kernel("skv::write_token_kernel(SkvView)", start + 3, 1),
        kernel("void flashinfer::BatchDecodeWithPagedKVCacheKernel<1>(x)", start + 4, 2),
        kernel("nvjet_hsh_64x8(y)", start + 6, 4),
        kernel("void skv::gather_kernel<true>(SkvView)", start + 5, 4),
    ]


def gpu_profile(layers: int, steps: int, cut: int = 0) -> dict:
    """cut: layers missing from the first step."""
    spans = [span for number in range(cut, layers * steps) for span in gpu_layer(10.0 * number)]
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *spans]}


def test_kernels_go_to_lanes_and_are_numbered_from_the_end():
    events = lanes.number(lanes.read(gpu_profile(layers=3, steps=3, cut=2)), layers=3)
    assert {(event.step, event.layer) for event in events} == {(s, i) for s in range(2) for i in range(3)}
    first = [event for event in events if (event.step, event.layer) == (0, 1) and event.lane != LAYERS]
    assert [(event.name, event.lane) for event in first] == [
        ("score", SELECTION),
        ("select", SELECTION),
        ("resolve", TABLE),
        ("write_token", TABLE),
        ("flashinfer::BatchDecodeWithPagedKVCacheKernel", ATTENTION),
        ("gather", AHEAD),
        ("nvjet_hsh_64x8", MODEL),
    ]
    spans = [event.end - event.start for event in events if event.lane == LAYERS]
    assert spans == [10, 10, 6] * 2, "the last layer ends with its attention"


def test_how_much_of_fetching_is_hidden():
    figures = lanes.summary(lanes.number(lanes.read(gpu_profile(layers=2, steps=1)), layers=2))
    # The second layer's fetch ends after the step's last attention.
    assert figures[AHEAD] == 0.004 and figures["hidden share of fetch ahead"] == 1.0
    alone = {"traceEvents": [*gpu_layer(0.0)[:6], kernel("skv::gather_kernel", 10, 10), *gpu_layer(20.0)[:6]]}
    assert lanes.summary(lanes.number(lanes.read(alone), layers=2))["hidden share of fetch ahead"] == 0.0


def test_too_little_of_a_profile_is_said():
    with pytest.raises(ValueError, match="holds 2 layers and a step has 5"):
        lanes.number(lanes.read(gpu_profile(layers=2, steps=1)), layers=5)
    with pytest.raises(ValueError, match="none of 1 spans"):
        lanes.read({"traceEvents": [kernel("gemm", 0, 1)]})


@pytest.mark.parametrize("window", [1, 16])
def test_operations_of_the_cpu_engine_name_themselves(window, tmp_path):
    rig = Rig(seed=3, layers=3, pages=120, context=300, requests=2, window=window)
    rig.runtime.policy.check = False
    rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width})
    rig.start(1)
    rig.extend({1: 200})
    rig.decode([1], verify=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            rig.decode([1], verify=False)
    path = tmp_path / "profile.json"
    profile.export_chrome_trace(str(path))
    events = lanes.number(lanes.read(record.load(path)), layers=3)
    assert {(event.step, event.layer) for event in events} == {(s, i) for s in range(2) for i in range(3)}
    assert {event.lane for event in events} == {LAYERS, MODEL, SELECTION, TABLE, ATTENTION, AHEAD}
    order = [event.name for event in events if (event.step, event.layer) == (1, 1) and event.lane in (TABLE, SELECTION)]
    assert order[0] == ("append" if window == 1 else "score")
    assert order.index("score") < order.index("select") < order.index("resolve")
    assert window == 1 or order.index("resolve") < order.index("write_token") < order.index("close_pages")
    assert {event.name for event in events if event.lane == SELECTION} == {"score", "select", "predict"}


def test_a_layer_whose_pages_are_known_begins_with_its_write():
    rig = Rig(seed=3, layers=3, pages=40, context=100, requests=1)
    rig.runtime.variant = Variant.ALL_PAGES
    rig.start(1)
    rig.extend({1: 40})
    rig.decode([1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            rig.decode([1])
    spans = [
        {"ph": "X", "name": e.name, "ts": e.time_range.start, "dur": e.time_range.elapsed_us()}
        for e in profile.events()
    ]
    events = lanes.number(lanes.read({"traceEvents": spans}), layers=3)
    named = [event.name for event in events if (event.step, event.layer) == (1, 1) and event.lane in (TABLE, ATTENTION)]
    assert [name for name in named if name != "gather"] == [
        *("write_token", "attend", "close_pages", "resolve", "attend_inputs")
    ]
    assert any(event.lane == MODEL for event in events)


def test_the_command_converts_a_profile(tmp_path, capsys):
    packed, out, picture = tmp_path / "rank-TP-0.trace.json.gz", tmp_path / "out.json", tmp_path / "out.svg"
    packed.write_bytes(gzip.compress(json.dumps(gpu_profile(layers=4, steps=2)).encode()))
    arguments = ["--profile", str(packed), "--out", str(out), "--svg", str(picture), "--title", "two <steps>"]
    assert main(arguments) == 1 and "add --layers" in capsys.readouterr().err
    assert main([*arguments, "--layers", "4"]) == 0
    assert "2 steps in" in capsys.readouterr().out
    trace = json.loads(out.read_text())
    names = [row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "thread_name"]
    assert names == list(lanes.LANES) and trace["otherData"]["summary"]["model"] > 0
    assert all(row["dur"] > 0 and row["ts"] >= 0 for row in trace["traceEvents"] if row["ph"] == "X")
    drawn = xml.etree.ElementTree.parse(picture).getroot()
    assert len(drawn) > 30 and any(element.text == "two <steps>" for element in drawn)


def test_a_picture_of_a_layer_that_is_not_there_is_refused():
    events = lanes.number(lanes.read(gpu_profile(layers=2, steps=1)), layers=2)
    with pytest.raises(ValueError, match="no layer 7"):
        draw.svg(events, 0, 7, 2, "title")


def copied(start: float, length: float, size: int) -> dict:
    return kernel("Memcpy HtoD (Pinned -> Device)", start, length, "gpu_memcpy") | {"args": {"bytes": size}}


def prefill_profile(layers: int) -> dict:
    """A hundred microseconds a layer, of which pages land in fifty, in two copies, beside ten of attention."""
    spans = [copied(0, 1, 4096)]
    for start in range(0, 100 * layers, 100):
        spans += [
            kernel("skv::store_chunk_kernel(SkvView)", start, 20),
            copied(start + 10, 20, 1 << 20),
            copied(start + 31, 29, 1 << 20),
            kernel("skv::look_up_kernel(SkvView)", start + 30, 2),
            kernel("skv::stage_landed_kernel(SkvView)", start + 61, 5),
            kernel("void flashinfer::SinglePrefillWithKVCacheKernel<1>(x)", start + 50, 10),
            kernel("nvjet_hsh_64x8(y)", start + 70, 30),
        ]
    return {"traceEvents": spans}


def test_a_prefills_copies_are_told_from_what_computes():
    events = prefill.read(prefill_profile(3), 3)
    lands = [event for event in events if event.lane == prefill.FROM_HOST]
    assert [(event.layer, event.start, event.end) for event in lands] == [
        (i, 100 * i + 10, 100 * i + 60) for i in range(3)
    ]
    assert [event.name for event in events if event.lane == prefill.TABLES] == ["look_up"] * 3
    assert [event.end - event.start for event in events if event.lane == LAYERS] == [100, 100, 60]
    figures = prefill.summary(events)
    assert figures[prefill.FROM_HOST] == 0.15 and figures["from the first byte to the last"] == 0.25
    assert figures["link's share of it"] == 0.6 and figures["share of computation under it"] == round(30 / 121, 3)
    assert draw.svg(events, 0, 0, 3, "prefill", prefill.LANES).count("land, layer") == 3


def test_a_profile_of_something_else_is_no_prefill(tmp_path, capsys):
    with pytest.raises(ValueError, match="holds 0 layers of prefill"):
        prefill.read(gpu_profile(layers=2, steps=1), 2)
    with pytest.raises(ValueError, match="holds 3 layers"):
        prefill.read(prefill_profile(3), 2)
    assert main(["--prefill"]) == 1 and "--profile" in capsys.readouterr().err
    path = tmp_path / "p.json"
    path.write_text(json.dumps(prefill_profile(2)))
    out, svg = tmp_path / "t.json", tmp_path / "t.svg"
    assert main(["--prefill", "--profile", str(path), "--layers", "2", "--out", str(out), "--svg", str(svg)]) == 0
    assert "link's share" in capsys.readouterr().out and "from the host" in svg.read_text()
