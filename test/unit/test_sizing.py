"""The planner in a scheduler process: what it asks SGLang, the host and the GPU, and each refusal in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sparse_kv import host_memory, host_pool, launch, planner, report, sizing
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.ops import pinned
from sglang.srt.sparse_kv.planner import Plan

GB = 10**9
GIB = 1 << 30


def sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and re.search(r"\d", text) and re.search(r"; (raise|lower|use|end) ", text), text
    assert not re.search(r"-\d", text), f"a negative number means nothing to a reader: {text}"
    return text


def configurator(monkeypatch, device="cpu", tp=1, free=50 * GB, room=None, gpu="NVIDIA H200", context=2000, **given):
    """As much of SGLang's configurator as is read. given: server arguments, and `sparse`: our settings.

    free: host memory that the kernel calls available. room: what the container may use of it.
    """
    from sglang.srt import runtime_context

    schedule = SimpleNamespace(page_size=16, mem_fraction_static=0.8)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=tp))
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(host_memory, "meminfo", lambda name: {"MemTotal": 100 * GB, "MemAvailable": free}[name])
    monkeypatch.setattr(host_memory, "cgroup_room", lambda: room)
    monkeypatch.setattr(host_memory, "cgroup_limit", lambda: room)
    monkeypatch.setattr(host_memory, "available", lambda: free if room is None else min(free, room))
    monkeypatch.setattr(sizing, "_gpu", lambda device: (gpu, 150 * GB))
    arguments = {"max_running_requests": None, "max_total_tokens": None, "tp_size": tp, "dp_size": 1, **given}
    config = SparseKVConfig.from_dict({"budget": 64, "sinks": 8, "window": 16, **arguments.pop("sparse", {})})
    arguments["_sparse_kv"] = config.to_dict()
    arguments[sizing.HOST_ATTRIBUTE] = sizing.host_bytes(config, device == "cpu")  # as the launching process does
    heads = SimpleNamespace(
        get_num_kv_heads=lambda tp_size: max(1, 4 // tp_size), num_attention_heads=8, head_dim=64, context_len=context
    )
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments),
        device=device,
        model_config=heads,
        kv_cache_dtype=torch.float16,
        layer_info=SimpleNamespace(num_effective_layers=4),
    )


def test_defaults_on_the_cpu(monkeypatch):
    plan = sizing.plan_for_configurator(configurator(monkeypatch), 10 * GB)
    page_bytes = sizing.geometry_of(configurator(monkeypatch)).page_bytes
    assert sizing.current_plan() is plan
    assert plan.max_running_requests == sizing.DEFAULT_MAX_RUNNING_CPU
    assert 0 <= sizing.CPU_HOST_BYTES - plan.host_bytes - page_bytes < page_bytes
    assert plan.device_bytes["page cache"] <= sizing.CPU_CACHE_BYTES
    assert plan.residency == "all" and plan.estimates == (), "no figures of a CPU are known"


def test_auto_on_a_small_machine_takes_what_there_is(monkeypatch):
    plan = sizing.plan_for_configurator(configurator(monkeypatch, free=GB), 10 * GB)
    assert plan.host_bytes <= GB
    plan = sizing.plan_for_configurator(configurator(monkeypatch, room=GB // 2), 10 * GB)
    assert plan.host_bytes <= GB // 2, "within the container's limit"


@pytest.mark.parametrize("tokens", [32, 100, 4096, 4097])
def test_a_pool_of_the_tokens_that_were_asked_for(monkeypatch, tokens):
    """SGLang rounds the limit down to whole pages and checks that the pool has just as many."""
    plan = sizing.plan_for_configurator(configurator(monkeypatch, max_total_tokens=tokens), GB)
    assert plan.host_tokens == tokens // 16 * 16


def test_ranks_share_the_host(monkeypatch):
    one = sizing.plan_for_configurator(configurator(monkeypatch, sparse={"host_memory": "1GB"}), GB)
    two = sizing.plan_for_configurator(configurator(monkeypatch, tp=2, sparse={"host_memory": "1GB"}), GB)
    assert 2 * two.host_bytes <= GB and abs(two.host_tokens - one.host_tokens) <= 16, "half the bytes, half the heads"


def test_replicas_share_the_host(monkeypatch):
    one = sizing.plan_for_configurator(configurator(monkeypatch, tp=2, sparse={"host_memory": "1GB"}), GB)
    four = sizing.plan_for_configurator(configurator(monkeypatch, tp=2, dp_size=4, sparse={"host_memory": "1GB"}), GB)
    assert abs(4 * four.host_tokens - one.host_tokens) <= 8 * 16, "each has a page for padding"


def test_the_launching_process_looks_once(monkeypatch):
    """Ranks look at a busy machine at different moments, and one token of difference would end in a wrong answer."""
    given = configurator(monkeypatch, "cuda", tp=2, free=60 * GB)
    before = sizing.plan_for_configurator(given, 20 * GB)
    monkeypatch.setattr(host_memory, "available", lambda: 20 * GB)
    assert sizing.plan_for_configurator(given, 20 * GB) == before


def test_what_is_called_available_refuses_nothing_that_was_asked_for(monkeypatch):
    """On virtual machines it grows as memory is touched; the attempt decides."""
    given = configurator(monkeypatch, sparse={"host_memory": "60GB"})
    assert sizing.plan_for_configurator(given, GB).host_bytes > 59 * GB
    given = configurator(monkeypatch, "cuda", sparse={"host_memory": "60GB"})
    assert sizing.plan_for_configurator(given, 20 * GB).host_bytes > 59 * GB


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sparse": {"host_memory": "60GB"}, "room": 40 * GB}, r"asks for 60.0 GB and this container may use 40.0 GB"),
        ({"sparse": {"host_memory": "90%"}, "room": 40 * GB}, r"asks for 90.0 GB and this container may use 40.0 GB"),
        ({"sparse": {"host_memory": 1000}}, r"host memory hold 0 pages"),
        ({"sparse": {"cache_memory": 1000}}, r"has 0 slots per layer and kv head, one request needs"),
    ],
)
def test_refusals(monkeypatch, device, given, words):
    given = {**given, "sparse": {"host_memory": "1GB", **given["sparse"]}}
    with pytest.raises(ValueError, match=words) as caught:
        sizing.plan_for_configurator(configurator(monkeypatch, device, **given), GB)
    sentence(caught.value)


@settings(max_examples=60)
@given(
    device=st.integers(1 * GB, 40 * GB),
    host=st.integers(GB // 100, 40 * GB),
    requested=st.integers(1, 100),
    residency=st.sampled_from(["auto", "all", "none", 0.5]),
)
def test_on_a_gpu_everything_together_fits(device, host, requested, residency):
    with pytest.MonkeyPatch.context() as patch:
        sparse = {"host_memory": host, "residency": residency}
        given = configurator(patch, "cuda", max_running_requests=requested, sparse=sparse)
        try:
            plan = sizing.plan_for_configurator(given, device)
        except ValueError as error:
            sentence(error)
            assert host > 10 * device, "only landmarks can crowd the cache out"
            return
    assert sum(plan.device_bytes.values()) <= device
    assert "kernel scratch" in plan.device_bytes


@pytest.mark.parametrize("sparse", [{"host_memory": "40GB"}, {"host_memory": "1GB", "cache_memory": "99%"}])
def test_a_gpu_that_is_too_small_is_one_sentence(monkeypatch, sparse):
    with pytest.raises(ValueError) as caught:
        sizing.plan_for_configurator(configurator(monkeypatch, "cuda", sparse=sparse), GB)
    sentence(caught.value)


def test_auto_host_memory_shrinks_where_landmarks_would_crowd_the_cache_out(monkeypatch):
    given = configurator(monkeypatch, "cuda", free=5000 * GB)
    plan = sizing.plan_for_configurator(given, 2 * GB)
    assert plan.host_bytes < 4000 * GB and any(reason.startswith("host memory: ") for reason in plan.reasons)
    summaries = plan.device_bytes["landmarks"] + plan.device_bytes["unit tables"]
    assert 0.2 * 2 * GB < summaries < 0.3 * 2 * GB, "about a quarter"
    asked = configurator(monkeypatch, "cuda", sparse={"host_memory": "4000GB"})
    with pytest.raises(ValueError, match="lower --sparse-kv-host-memory"):
        sizing.plan_for_configurator(asked, 2 * GB)


def test_every_byte_of_the_gpu_has_a_purpose(monkeypatch):
    before = 140 * GB
    kept = int(before * (1 - 0.8))
    free = before - kept - 15 * GB  # what SGLang's sizing leaves when the weights take 15 GB
    plan = sizing.plan_for_configurator(configurator(monkeypatch, "cuda"), free, before)
    assert plan.outside["weights"] == 15 * GB
    slack = free - sum(plan.device_bytes.values())
    assert sum(plan.outside.values()) + free == 150 * GB and slack >= 0
    assert json.loads(json.dumps(plan.as_dict()))["outside"] == plan.outside


def recorded_starts() -> list[dict]:
    """Servers with sparse KV that ran on a GPU and said what their start took."""
    files = sorted((Path(__file__).parents[2] / "benchmark" / "results").glob("*h200-serving-*.json"))
    servers = [server for file in files for run in json.loads(file.read_text())["runs"] for server in run["servers"]]
    return [server for server in servers if planner.LEFT in (server.get("plan") or {}).get("outside", ())]


def test_there_are_recorded_starts():
    assert len(recorded_starts()) >= 2


@pytest.mark.parametrize("server", recorded_starts())
def test_what_a_gpu_held_after_a_start_was_planned(server, monkeypatch, caplog):
    """The plan and the graphs of servers that ran, against what the GPU said was in use: within 2 %."""
    known = {field.name for field in dataclasses.fields(Plan)}
    plan = Plan(**{name: value for name, value in server["plan"].items() if name in known})
    share = float(server["command"][server["command"].index("--mem-fraction-static") + 1])
    before = plan.outside[planner.LEFT] / (1 - share)
    total = int(before) + plan.outside["in use before loading (context, other processes)"]
    free = int(server["memory_usage"]["startup_available"] * GIB)
    runtime = SimpleNamespace(plan=plan, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    with caplog.at_level("INFO"):
        sizing.note_start(runtime, server["memory_usage"]["graph"], {})
    found = runtime.plan
    assert sum(found.in_use.values()) == total - free and found.unused == free
    purposes = {*plan.device_bytes, *plan.outside, planner.GRAPHS, planner.REST}
    assert set(found.in_use) == purposes - {planner.LEFT, planner.ONE_ROW_GRAPHS}
    assert 0.2 * GB < found.in_use[planner.GRAPHS] < GB
    assert abs(found.in_use[planner.REST]) <= 0.02 * (total - free)
    for name in ("KV pool", *found.in_use):
        assert len(re.findall(rf"^    {re.escape(name)} ", caplog.text, re.MULTILINE)) == 1, name
    assert json.loads(json.dumps(found.as_dict()))["in_use"] == found.in_use


def test_what_was_set_aside_for_graphs_is_not_counted_twice(monkeypatch):
    given = configurator(monkeypatch, "cuda", sparse={"rows": "auto"})
    plan = sizing.plan_for_configurator(given, 50 * GB, 140 * GB)
    assert plan.device_bytes[planner.ONE_ROW_GRAPHS] > 0
    found = planner.started(plan, graphs=10**9, free=60 * GB, total=150 * GB).in_use
    assert planner.ONE_ROW_GRAPHS not in found and found[planner.GRAPHS] == 10**9 and sum(found.values()) == 90 * GB


def test_without_a_gpu_nothing_is_measured():
    runtime = SimpleNamespace(plan=None, device=torch.device("cpu"))
    sizing.note_start(runtime, {"decode": 1.0})
    assert runtime.plan is None


def test_a_gpu_without_figures_is_told(monkeypatch):
    plan = sizing.plan_for_configurator(configurator(monkeypatch, "cuda", gpu="NVIDIA T4"), 10 * GB)
    assert any("NVIDIA T4 is not among the GPUs whose figures are known" in reason for reason in plan.reasons)


def test_the_table_names_every_purpose_once(monkeypatch):
    plan = sizing.plan_for_configurator(configurator(monkeypatch, "cuda", context=4000), 10 * GB, 20 * GB)
    text = report.table(plan)
    assert text.splitlines()[0] == "sparse KV plan (per rank)"
    for name in ("KV pool", *plan.device_bytes, *plan.outside):
        assert len(re.findall(rf"^    {re.escape(name)} ", text, re.MULTILINE)) == 1, name
    assert len(plan.estimates) == 3
    for row in plan.estimates:
        least, most = row["tokens_per_second"]
        assert 0 < least <= most and f"  {least:.0f} to {most:.0f}  " in text
        assert 1 <= row["requests"] <= plan.max_running_requests
    assert all(reason in text for reason in plan.reasons) and "lookahead: the last " in text


def test_weights_that_leave_nothing_are_one_sentence(monkeypatch):
    def too_large(configurator, before):
        raise ValueError("Loaded weights leave no GPU memory. Raise it. And more sentences.")

    configurator(monkeypatch)
    with pytest.raises(SystemExit, match=r"the weights leave no GPU memory .* 24\.7 GB were free") as caught:
        launch.host_budget(too_large, None, 23)
    sentence(caught.value)


@pytest.mark.parametrize("host", ["auto", "64MB"])
def test_the_pool_is_built_as_planned(monkeypatch, caplog, host):
    given = configurator(monkeypatch, max_total_tokens=20_000, sparse={"host_memory": host, "cache_memory": "30MB"})
    plan = sizing.plan_for_configurator(given, GB)
    with caplog.at_level("INFO"):
        pool = host_pool.build_host_pool(given, plan.host_tokens)
    page_bytes = pool.geometry.page_bytes
    assert pool.get_kv_size_bytes() == plan.host_bytes + page_bytes and not bool(pool.host[:, -1].any())
    assert pool.runtime.policy.residency == "all", "decided, not auto"
    assert report.table(plan) in caplog.text
    assert json.loads(json.dumps(pool.runtime.summary()["plan"]))["host_tokens"] == plan.host_tokens


def test_host_memory_that_is_not_there_ends_the_start_in_a_sentence(monkeypatch):
    given = configurator(monkeypatch, max_total_tokens=20_000, sparse={"host_memory": "64MB", "cache_memory": "30MB"})
    plan = sizing.plan_for_configurator(given, GB)
    monkeypatch.setattr(pinned, "PATIENCE", -1)
    monkeypatch.setattr(host_memory, "available", lambda: 10**6)
    with pytest.raises(SystemExit, match=r"0\.1 GB of host memory were to be taken .* only 0\.0 GB are left") as caught:
        launch.build_pool(given, max_total_num_tokens=plan.host_tokens)
    sentence(caught.value)


@pytest.mark.parametrize(("allowed", "status"), [(0, 801), (1, 2)], ids=["no right to pin", "half way"])
def test_pinning_that_is_refused_ends_the_start_in_a_sentence(monkeypatch, allowed, status):
    """As in a container without the right to pin, and where the driver has had enough: nothing stays registered."""
    held: list[int] = []

    def register(address, length):
        if len(held) == allowed:
            return status
        held.append(address)
        return 0

    monkeypatch.setattr(pinned, "PIECE", 4 << 20)
    monkeypatch.setattr(pinned, "cuda_register", register)
    monkeypatch.setattr(pinned, "cuda_unregister", lambda address: held.remove(address) or 0)
    monkeypatch.setattr(pinned, "numa_node", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    geometry = sizing.geometry_of(configurator(monkeypatch), num_pages=1200, max_requests=1)
    with (
        pytest.raises(SystemExit, match=rf"CUDA refused to pin host memory after .*status {status}") as caught,
        launch._refusing(),
    ):
        host_pool.allocate_host(geometry, torch.device("cuda"), True)
    assert not held
    text = str(caught.value)
    assert "\n" not in text and "; lower --sparse-kv-host-memory or raise that limit (ulimit -l, " in text


def test_prompts_leave_room_for_an_answer():
    """Whatever may enter the queue is admitted by SGLang's rule, at the latest when nothing else runs."""
    page, pool = 16, 2048
    worker = SimpleNamespace(model_runner=SimpleNamespace(server_args=SimpleNamespace(page_size=page)))
    info = launch.room_to_answer(lambda self: (pool, 0, 4, None, pool - 1, pool - 6, 0), worker)
    assert info[:5] == (pool, 0, 4, None, pool - 1) and info[6:] == (0,)

    def admitted(prompt: int, wanted: int) -> bool:
        whole = -(-prompt // page) * page
        new = max(0, min(wanted, pool - 1 - prompt - 1, pool - whole - page - 1))  # SGLang's cut of max_new_tokens
        return new > 0 and prompt + new + page < pool

    longest = info[5] - 1  # SGLang refuses from the limit on
    assert all(admitted(prompt, 4000) for prompt in range(1, longest + 1))
    assert not admitted(longest + 1, 4000), "not one token is given away"
    small = launch.room_to_answer(lambda self: (16, 0, 4, None, 15, 10, 0), worker)
    assert small[5] == 1


def test_a_forgotten_plan_is_noticed(monkeypatch):
    monkeypatch.setattr(sizing, "_current", None)
    with pytest.raises(RuntimeError, match="was not planned"):
        sizing.current_plan()
