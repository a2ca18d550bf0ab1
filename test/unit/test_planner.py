"""The planner: nothing beyond what it was given, the capacity rule always, and one sentence when it cannot."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sparse_kv import planner
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape
from sglang.srt.sparse_kv.prefill import Prefill
from sglang.srt.sparse_kv.runtime import SparseKVRuntime

GB = 10**9


def model(layers=2, kv_heads=2, dim=8, page=8, context=200, dtype=torch.float32) -> Geometry:
    return Geometry(layers, kv_heads, 2, dim, page, 0, -(-(context + 8) // page) + 1, 0, dtype)


def config(**values) -> SparseKVConfig:
    return SparseKVConfig.from_dict({"budget": 64, "sinks": 8, "window": 16, **values})


SITUATIONS = {
    "geometry": st.builds(
        model,
        layers=st.integers(1, 5),
        kv_heads=st.integers(1, 3),
        dim=st.sampled_from([8, 64]),
        page=st.sampled_from([8, 16, 32]),
        context=st.integers(1, 3000),
        dtype=st.sampled_from([torch.float32, torch.float16]),
    ),
    "settings": st.builds(
        config,
        budget=st.integers(32, 4096),
        sinks=st.integers(0, 300),
        window=st.integers(0, 300),
        residency=st.sampled_from(["all", "none", 0.5, [0]]),
        ring=st.integers(2, 4),
        prefetch_cap=st.floats(0, 1),
        debug=st.booleans(),
    ),
    "cache": st.floats(0.8, 40),  # in what one request needs
    "host": st.floats(1.5, 3000),  # in pages
    "requested": st.integers(1, 300),
}


def plan_or_none(geometry, settings, cache: int, host: int, requested: int):
    try:
        return planner.plan(settings, geometry, cache, host, requested)
    except ValueError as error:
        sentence(error)
        return None


def in_bytes(geometry, settings, cache: float, host: float) -> tuple[int, int]:
    shape = planner.selection_shape(geometry, settings)
    slots = planner.needed_slots(1, shape, geometry.max_pages, shape.prefetch_pages(settings.prefetch_cap))
    return int(cache * slots * planner.slot_bytes(geometry, settings)), int(host * geometry.page_bytes)


def sentence(error: Exception) -> str:
    text = str(error)
    assert "\n" not in text and re.search(r"\d", text) and re.search(r"; (raise|lower) ", text), text
    assert not re.search(r"-\d", text), f"a negative number means nothing to a reader: {text}"
    return text


@settings(max_examples=150)
@given(**SITUATIONS)
def test_never_more_than_was_given(geometry, settings, cache, host, requested):
    cache, host = in_bytes(geometry, settings, cache, host)
    plan = plan_or_none(geometry, settings, cache, host, requested)
    if plan is None:
        return
    page = geometry.page_size
    assert 1 <= plan.max_running_requests <= requested
    assert plan.host_tokens % page == 0 and plan.host_bytes + geometry.page_bytes <= host
    assert plan.host_bytes == plan.host_tokens * geometry.page_bytes // page, "SGLang divides this by bytes a token"
    assert plan.slots * planner.slot_bytes(geometry, settings) <= cache
    assert plan.device_bytes["page cache"] <= cache
    needed = planner.needed_slots(plan.max_running_requests, plan.shape, geometry.max_pages, plan.prefetch_headroom)
    assert plan.slots >= needed, "the capacity rule"
    assert 0 <= plan.prefetch_headroom <= plan.shape.budget_pages
    assert plan.shape.width <= 3 * geometry.max_pages + 1, "what no request can own costs nothing"


@settings(max_examples=60)
@given(**SITUATIONS, more=st.integers(1, 10**9))
def test_more_memory_never_serves_less(geometry, settings, cache, host, requested, more):
    cache, host = in_bytes(geometry, settings, cache, host)
    plan = plan_or_none(geometry, settings, cache, host, requested)
    if plan is None:
        return
    cached, hosted = (
        plan_or_none(geometry, settings, cache + more, host, requested),
        plan_or_none(geometry, settings, cache, host + more, requested),
    )
    assert cached.slots >= plan.slots and cached.max_running_requests >= plan.max_running_requests
    assert hosted.host_tokens >= plan.host_tokens and hosted.max_running_requests == plan.max_running_requests


@pytest.mark.parametrize("requests", [1, 2, 7])
@pytest.mark.parametrize(
    "values", [{}, {"residency": "none"}, {"debug": True}, {"prefetch_cap": 0.3}, {"budget": 4096}]
)
def test_one_slot_less_admits_one_request_less(requests, values):
    geometry, settings = model(), config(**values)
    shape = planner.selection_shape(geometry, settings)
    headroom = shape.prefetch_pages(settings.prefetch_cap)
    needed = planner.needed_slots(requests, shape, geometry.max_pages, headroom)
    exact = needed * planner.slot_bytes(geometry, settings)
    assert planner.plan(settings, geometry, exact, GB, 8).max_running_requests == requests
    assert planner.plan(settings, geometry, exact, GB, requests).slots >= needed
    if requests > 1:
        assert planner.plan(settings, geometry, exact - 1, GB, 8).max_running_requests == requests - 1
    else:
        with pytest.raises(ValueError) as caught:
            planner.plan(settings, geometry, exact - 1, GB, 8)
        text = sentence(caught.value)
        assert f"one request needs {needed}" in text and f"to {exact} bytes" in text, "the advice is exact"


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_host_that_holds_next_to_nothing(pages):
    geometry = model()
    with pytest.raises(ValueError, match="host memory hold") as caught:
        planner.plan(config(), geometry, GB, (pages + 1) * geometry.page_bytes - 1, 1)
    sentence(caught.value)
    assert planner.plan(config(), geometry, GB, 3 * geometry.page_bytes, 1).host_tokens == 2 * geometry.page_size


def sizes(runtime: SparseKVRuntime, prefill: Prefill) -> dict[str, int]:
    """Bytes of the tensors that were really made."""

    def size(*tensors) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    buffers = runtime.cache.buffers()
    history = {} if runtime.history is None else {"token history": size(runtime.history.tokens)}
    return {
        **history,
        "page cache": size(*(b.kv for b in buffers)),
        "unit tables": sum(size(b.slot_of, b.page_of, b.stamp, b.ahead) for b in buffers),
        "landmarks": size(*runtime.landmarks),
        "predictions": size(runtime.predicted),
        "last selections": size(runtime.selected),
        "prefill staging": size(prefill.staging),
    }


@pytest.mark.parametrize("guide", ["chain", "lookup", "resync", "none"])
def test_the_token_history_is_planned_for_guides_that_look_up(guide):
    plan = planner.plan(config(guide=guide), model(), GB, 100 * model().page_bytes, 3)
    assert ("token history" in plan.device_bytes) == (guide in ("lookup", "resync"))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("residency", ["all", "none", [1], 0.5])
@pytest.mark.parametrize("page", [8, 32])
def test_the_table_is_what_is_allocated(page, residency, debug):
    geometry = model(layers=3, page=page, dtype=torch.float16)
    settings = config(residency=residency, debug=debug, ring=2)
    host_bytes = 60 * geometry.page_bytes
    plan = planner.plan(settings, geometry, 20_000_000, host_bytes, 3)
    settled = dataclasses.replace(
        geometry, num_pages=plan.host_tokens // page + 1, max_requests=plan.max_running_requests
    )
    host = torch.zeros((3, settled.num_pages, 2, 2, page, 8), dtype=torch.float16)
    runtime = SparseKVRuntime(settings, settled, plan, host, torch.device("cpu"))
    assert sizes(runtime, Prefill(runtime)) == plan.device_bytes
    assert host.numel() * host.element_size() == plan.host_bytes + geometry.page_bytes <= host_bytes


def test_settings_beyond_the_context_cost_nothing():
    geometry = model(context=200)
    small = planner.plan(config(budget=400, sinks=400, window=400, whole=400), geometry, GB, GB, 4)
    large = planner.plan(config(budget=10**7, sinks=10**7, window=10**7), geometry, GB, GB, 4)
    assert small.device_bytes == large.device_bytes and small.shape == large.shape
    length = torch.arange(200)
    huge = SelectionShape.from_tokens(8, 10**7, 10**7, 10**7)
    assert all(torch.equal(a, b) for a, b in zip(large.shape.candidate_bounds(length), huge.candidate_bounds(length)))


@pytest.mark.parametrize(("asked", "late"), [("auto", 3), (1, 1), (4, 4), (9, 5)])
def test_without_times_all_but_the_first_layers_fetch_late(asked, late):
    plan = planner.plan(config(lookahead=asked), model(layers=5), GB, GB, 4)
    assert plan.lookahead == (late,)
    said = [reason for reason in plan.reasons if reason.startswith("lookahead: the last 3 of 5 layers fetch ahead")]
    assert len(said) == (asked == "auto"), "what the user chose needs no reason"


def test_steps_of_one_row_take_graphs_of_their_own():
    """Set aside where they are captured: on CUDA, with rows auto."""
    geometry, name = dataclasses.replace(model(), max_requests=20, num_pages=100), "graphs for one row"
    for chosen in (config(rows="auto"), config(rows="auto", guide="none")):
        sizes = planner.device_bytes(geometry, 50, chosen, planner.selection_shape(geometry, chosen), cuda=True)
        assert sizes[name] == 7 * planner.ONE_ROW_BYTES  # 1 to 4, 8, 16 and 20 requests
    for chosen, cuda in ((config(rows=2), True), (config(rows=1), True), (config(rows="auto"), False)):
        sizes = planner.device_bytes(geometry, 50, chosen, planner.selection_shape(geometry, chosen), cuda)
        assert name not in sizes


def test_staging_slots_take_a_prefix_of_32k_and_a_chunk_where_there_is_room():
    geometry = model(context=131072)  # 2 kv heads of 8 elements
    token = planner.staging_bytes(geometry, 1)
    for tokens in planner.STAGING_TOKENS:
        free = round(tokens * token / planner.STAGING_SHARE)
        assert planner.staging_tokens(geometry, free) == tokens
        assert planner.staging_tokens(geometry, free - 100) == max(
            (fewer for fewer in planner.STAGING_TOKENS if fewer < tokens), default=planner.STAGING_TOKENS[-1]
        )
    short = model(context=1000)
    assert planner.staging_tokens(short, GB) == short.max_pages * short.page_size, "no more than a request can have"
