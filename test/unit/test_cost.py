"""The cost model: against what was measured on the H200, and shapes that hold whatever the figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sparse_kv import cost, devices
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape

RESULTS = Path(__file__).resolve().parents[2] / "benchmark" / "results"
HALF = SimpleNamespace(itemsize=2)
H200 = devices.find("NVIDIA H200")
CALIBRATED = "2026-11-29-h200-serving-32k-2"  # whose latencies the model has
DEFAULTS = "2026-11-30-h200-serving-hysteresis"  # with today's defaults, whose misses are the high curve
SHORTER = "2026-11-30-h200-rows-8k"  # with today's defaults, whose misses are the low curve
SLOWED = "2026-11-30-h200-serving-1536"  # without hysteresis
EIGHT_B = Geometry(32, 8, 4, 128, 16, 45776, 2080, 55, HALF)  # type: ignore[arg-type]


def load(rows: int = 2, scoped: int = 0, geometry: Geometry = EIGHT_B, budget: int = 2048) -> cost.Load:
    return cost.Load(geometry, SelectionShape(16, budget // 16, 1, 64), int(13.812 * 2**30), rows, scoped)


def measured() -> list[tuple[str, dict]]:
    """(day and number of the run, cell) of each run of the 8B shape on the H200."""
    found = []
    for path in [*sorted(RESULTS.glob("*h200-serving-*.json")), RESULTS / f"{SHORTER}.json"]:
        result = json.loads(path.read_text())
        for cell in result["cells"]:
            if "tokens_per_second" in cell and not without_graph(cell) and not disturbed(path.stem, cell):
                cell["budget"] = result["runs"][cell["run"]]["options"]["budget"]
                found.append((path.stem, cell))
    return found


def without_graph(cell: dict) -> bool:
    """Steps of one row of more requests than such graphs are captured for, in a server that would choose two rows."""
    return cell["policy"] == "one_row" and cell["streams"] == 32


def disturbed(run: str, cell: dict) -> bool:
    """The last cells of this run were a fifth slower than the same steps are elsewhere, see docs/history.md."""
    return run == SLOWED and (cell["length"], cell["streams"]) in ((122880, 5), (1800, 1), (1800, 8))


def rows_of(cell: dict) -> int:
    """Of most steps; servers whose counters do not say had two."""
    counters = cell["counters"]
    alone = counters.get("one_row", 0) + counters.get("all_pages", 0)
    return 1 if 2 * alone > counters["steps"] else 2


def expected(cell: dict) -> float:
    """Tokens a second by the model, given the misses and the bytes that the cell counted."""
    requests = cell["streams"]
    if cell["variant"] == "dense":
        return requests / cost.dense_seconds(load(), H200, requests, cell["length"])
    steps, total = cell["counters"]["steps"], cell["counters"]["total"]
    missed = total["missed"] / steps * EIGHT_B.unit_bytes
    moved = cost.Transfers(missed, max(0.0, total["bytes_in"] / steps - missed))
    if cell["policy"] == "oracle":
        moved = cost.NOTHING
    ahead = cell["policy"] != "on_demand"
    work = load(rows_of(cell), budget=cell["budget"])
    return requests / cost.step_seconds(work, H200, requests, cell["length"], moved, prefetch=ahead)


def name(run_and_cell) -> str:
    run, cell = run_and_cell
    return f"{run}-{cell['variant']}-{cell['length']}-{cell['policy']}-{cell['streams']}"


@pytest.mark.parametrize("measured", measured(), ids=name)
def test_measured_throughput_given_the_measured_misses(measured):
    run, cell = measured
    ratio = expected(cell) / cell["tokens_per_second"]
    assert 0.8 < ratio < 1.25, "recalibrate cost.py, or say in docs/sizing.md how far it is"
    if run == CALIBRATED:
        assert 0.9 < ratio < 1.1, "docs/sizing.md says within 10 % for the run that the latencies were read off"


def test_there_are_measurements_of_each_kind():
    kinds = {(run, cell["variant"], cell["policy"], cell["streams"]) for run, cell in measured()}
    for policy in ("default", "on_demand", "oracle"):
        assert {(CALIBRATED, "sparse", policy, requests) for requests in (1, 4, 8, 16, 22)} <= kinds
    assert any(variant == "dense" for _, variant, _, _ in kinds)


# run, curve, requests, context and slots of the cells that the curves were read off
CURVE_CELLS = [
    (DEFAULTS, cost.HIGH, 8, 32768, 8499),
    (DEFAULTS, cost.HIGH, 16, 32768, 8499),
    (DEFAULTS, cost.HIGH, 22, 32768, 8499),
    (SHORTER, cost.LOW, 32, 8192, 9382),
]


def cell_of(run: str, policy: str, requests: int, context: int, variant: str = "sparse") -> dict:
    key = (run, variant, policy, requests, context)
    (cell,) = (c for r, c in measured() if (r, c["variant"], c["policy"], c["streams"], c["length"]) == key)
    return cell


def shares(cell: dict) -> tuple[float, float]:
    """Of the selected units, how many were waited for and how many crossed the link."""
    total = cell["counters"]["total"]
    return total["missed"] / total["selected"], total["bytes_in"] / EIGHT_B.unit_bytes / total["selected"]


@pytest.mark.parametrize(("run", "curve", "requests", "context", "slots"), CURVE_CELLS)
def test_the_curves_say_what_the_default_moved(run, curve, requests, context, slots):
    moved = cost.transfers(load(budget=1536), curve, requests, context, slots)
    selected = load(budget=1536).selected_bytes(requests, context)
    found = moved.missed / selected, (moved.missed + moved.ahead) / selected
    assert found == pytest.approx(shares(cell_of(run, "default", requests, context)), rel=0.1)


def test_the_curves_say_what_is_missed_when_nothing_is_fetched_ahead():
    alone = cell_of(DEFAULTS, "on_demand", 22, 32768), cell_of(SHORTER, "default", 32, 8192, "one_row")
    for cell, (_, curve, requests, _, slots) in zip(alone, CURVE_CELLS[2:], strict=True):
        assert shares(cell)[0] == shares(cell)[1], "nothing was fetched ahead"
        assert cost.miss_share(curve, slots / (requests * 102)) == pytest.approx(shares(cell)[0], rel=0.02)


def test_layers_without_a_cache_wait_as_measured():
    (cell,) = (cell for run, cell in measured() if run == "2026-11-30-h200-serving-paper")
    assert shares(cell)[0] == pytest.approx(cost.WAITING, rel=0.02)
    assert shares(cell)[1] >= 1, "whole selections cross the link"


@pytest.mark.parametrize(("run", "curve", "requests", "context", "slots"), CURVE_CELLS[1:])
def test_the_band_before_the_start(run, curve, requests, context, slots):
    """What docs/sizing.md tells of the largest batches."""
    guide = " ".join((RESULTS.parents[1] / "docs" / "sizing.md").read_text().split())
    was = cell_of(run, "default", requests, context)["tokens_per_second"]
    work = load(budget=1536)
    high, low = (cost.tokens_per_second(work, H200, c, requests, context, slots) for c in (cost.HIGH, cost.LOW))
    assert f"{high:.0f} to {low:.0f}" in guide and f"measured {was:.0f}" in guide
    assert 0.8 * high < was < 1.25 * low


LOADS = st.builds(load, rows=st.sampled_from([1, 2]), scoped=st.sampled_from([0, 16, 32]))
REQUESTS, CONTEXTS, SLOTS = st.integers(1, 200), st.integers(1, 200_000), st.integers(1, 100_000)
CURVES = st.sampled_from(cost.CURVES)


@given(LOADS, CURVES, REQUESTS, CONTEXTS, SLOTS, st.integers(0, 50_000))
def test_more_slots_are_never_slower(load, curve, requests, context, slots, more):
    def speed(slots):
        return cost.tokens_per_second(load, H200, curve, requests, context, slots)

    assert speed(slots + more) >= speed(slots) * (1 - 1e-12)


@given(st.sampled_from([0, 16, 32]), REQUESTS, CONTEXTS, SLOTS)
def test_the_low_curve_is_never_slower_than_the_high_one(scoped, requests, context, more):
    """With slots for every selection, as the capacity rule has it."""
    two_rows = load(scoped=scoped)
    slots = requests * two_rows.width(context) + more
    low, high = (cost.tokens_per_second(two_rows, H200, curve, requests, context, slots) for curve in cost.CURVES)
    assert low >= high * (1 - 1e-12)


@given(LOADS, CURVES, REQUESTS, CONTEXTS, SLOTS)
def test_a_step_is_never_faster_than_the_link(load, curve, requests, context, slots):
    moved = cost.transfers(load, curve, requests, context, slots)
    assert moved.missed >= 0 and moved.ahead >= 0
    assert moved.missed + moved.ahead <= load.selected_bytes(requests, context) * (1 + 1e-9)
    assert cost.step_seconds(load, H200, requests, context, moved) >= (moved.missed + moved.ahead) / H200.link


@given(CURVES, st.floats(0.01, 1000), st.floats(1.0, 10))
def test_miss_shares_are_shares_and_fall(curve, ratio, factor):
    here, further = cost.miss_share(curve, ratio), cost.miss_share(curve, ratio * factor)
    assert 0 < further <= here <= 1


@pytest.mark.parametrize("curve", cost.CURVES)
def test_a_miss_curve_goes_through_its_measured_points(curve):
    for ratio, share in curve.demand:
        assert cost.miss_share(curve, ratio) == pytest.approx(share)


def test_whole_contexts_in_the_cache_move_nothing():
    slots = 4 * load().pages(8192)
    assert cost.transfers(load(), cost.HIGH, 4, 8192, slots) == cost.NOTHING
    assert cost.transfers(load(), cost.HIGH, 4, 8192, slots - 1) != cost.NOTHING


def test_a_host_pool_in_the_cache_moves_nothing():
    small = dataclasses.replace(load(), host_pages=3000)
    assert cost.transfers(small, cost.HIGH, 50, 8192, 3000) == cost.NOTHING
    assert cost.transfers(small, cost.HIGH, 50, 8192, 2999) != cost.NOTHING


def test_without_residency_the_link_sets_the_pace():
    """268 MB and the forced pages a request and step, whatever the batch."""
    speeds = [cost.tokens_per_second(load(scoped=32), H200, cost.LOW, n, 32768, 1000) for n in (8, 16, 32)]
    bound = H200.link / load().selected_bytes(1, 32768)
    assert all(speed <= bound for speed in speeds) and speeds[-1] > 0.6 * bound


def test_a_chunk_hides_its_prefix():
    chunk = cost.smallest_chunk(load(), H200)
    one_kv_head_a_query = dataclasses.replace(EIGHT_B, kv_heads=32, group=1)
    assert 1000 < chunk < 8192 < cost.smallest_chunk(load(geometry=one_kv_head_a_query), H200)


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("NVIDIA H200", None, "H200"),
        ("NVIDIA H100 80GB HBM3", None, "H100"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80GB"),
        ("NVIDIA A100-PCIE", 39, "A100-40GB"),
        ("a100-40gb", None, "A100-40GB"),
        ("NVIDIA L40S", None, "L40S"),
        ("NVIDIA L4", None, "L4"),
        ("NVIDIA A10G", None, "A10"),
        ("NVIDIA GeForce RTX 4090", None, "RTX 4090"),
        ("Tesla T4", None, None),
    ],
)
def test_a_gpu_is_known_by_its_name(name, gib, found):
    device = devices.find(name, gib and gib << 30)
    assert (device and device.name) == found


def test_one_gpu_was_measured_and_the_rest_say_so():
    assert [device.name for device in devices.DEVICES if device.measured] == ["H200"]
    assert devices.stand_in(24 << 30).memory < 26e9


def test_a_whole_context_is_all_of_its_pages():
    work = load(2, budget=1664)
    work = dataclasses.replace(work, shape=dataclasses.replace(work.shape, whole=2048))
    assert [work.width(context) for context in (10, 1800, 2047, 2048, 32768)] == [1, 113, 128, 110, 110]
