"""Plans for a GPU: ten pairs of model and GPU, and properties of every plan."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import write_model
from plans import MODELS, options
from sglang.srt.server_args import ServerArgs
from sglang.srt.sparse_kv import arguments, command, dense, devices, model_shape, planner, report, split, variants
from sglang.srt.sparse_kv.config import SparseKVConfig

GB = 10**9


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-3.2-1b", 1.236),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-32b", 32.76),
        ("qwen3-8b", 8.19),
        ("mistral-7b-v0.3", 7.25),
    ],
)
def test_weights_are_what_the_makers_say(model, billions):
    shape = model_shape.read(str(MODELS / f"{model}.json"), SparseKVConfig())
    assert shape.weights(1) / shape.dtype.itemsize == pytest.approx(billions * 1e9, rel=0.005)
    assert shape.weights(2) * 2 == pytest.approx(shape.weights(1), rel=0.001)


# model, GPU, ranks, host, context; then most requests by the capacity rule, and plain SGLang's of 32K tokens
PAIRS = [
    ("llama-3.1-8b", "rtx 4090", 1, "96GB", 131072, 5, 1),
    ("llama-3.1-8b", "l4", 1, "32GB", 131072, 6, 0),
    ("llama-3.1-8b", "h100", 1, "256GB", 131072, 157, 12),
    ("llama-3.1-8b", "h200", 1, "256GB", 131072, 389, 27),
    ("qwen3-8b", "a100-40gb", 1, "96GB", 40960, 45, 3),
    ("mistral-7b-v0.3", "l40s", 1, "96GB", 32768, 76, 5),
    ("llama-3.2-1b", "a10", 1, "32GB", 131072, 210, 15),
    ("qwen2.5-32b", "a100-80gb", 1, "32GB", 32768, 6, 0),
    ("qwen2.5-32b", "h100", 2, "200GB", 32768, 120, 8),
    ("llama-3.1-70b", "h100", 8, "800GB", 131072, 400, 38),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[2]}x{pair[1]}")
def test_ten_pairs(pair):
    model, gpu, tp, host, context, requests, plain = pair
    more = {"max_running_requests": 400, "config": '{"residency": "all", "rows": 2}'}
    result = command.plan(options(model, gpu, tp=tp, host=host, context=context, budget=2048, **more))
    plan, memory = result["plan"], result["gpu_memory"]
    check(plan, memory)
    shape = model_shape.read(str(MODELS / f"{model}.json"), SparseKVConfig())
    heads = shape.layers * max(1, shape.kv_heads // tp)
    assert plan.host_bytes == plan.host_tokens * heads * 2 * shape.head_dim * 2, "K and V of every layer and head"
    assert plan.device_bytes["landmarks"] == (plan.host_tokens // 16 + 1) * heads * (shape.head_dim * 2 + 8)
    # Scratch and tables come and go with the kernels, and a request more or less with them.
    assert abs(plan.max_running_requests - requests) <= max(1, 0.02 * requests)
    slot = heads * (2 * 16 * shape.head_dim * 2 + 9)
    assert requests == 400 or plan.slots < (plan.max_running_requests + 1) * 135 + 128 + 4 * memory / 100 / slot, (
        "one more does not fit, within scratch"
    )
    left = memory - sum(plan.outside.values()) - sum(plan.device_bytes.values())
    assert left < slot or plan.slots == plan.host_tokens // 16, "nothing is left over"
    assert at(result["dense"], 32768)["requests"] == plain


def at(rows, context):
    return min(rows, key=lambda row: abs(row["context"] - context))


def check(plan: planner.Plan, memory: int) -> None:
    """Nothing beyond what was given, and the capacity rule, both by arithmetic of their own."""
    assert sum(plan.outside.values()) + sum(plan.device_bytes.values()) <= memory, "more than there is"
    shape = plan.shape
    selection = max(shape.budget_pages + shape.sink_pages + shape.window_pages, -(-shape.whole // shape.page_size))
    assert plan.slots >= plan.max_running_requests * (selection + 1) + plan.prefetch_headroom, "the capacity rule"
    assert len(plan.lookahead) in (1, plan.max_running_requests) and min(plan.lookahead) >= 1
    assert plan.max_running_requests >= 1 and plan.host_tokens >= 2 * plan.shape.page_size


def test_a_broken_rule_is_noticed(monkeypatch):
    monkeypatch.setattr(planner, "needed_slots", lambda requests, *rest: requests)
    monkeypatch.setattr(planner, "largest_batch", lambda slots, *rest: slots)
    result = command.plan(options("llama-3.1-8b", "rtx 4090", max_running_requests=300))
    with pytest.raises(AssertionError, match="the capacity rule"):
        check(result["plan"], result["gpu_memory"])


def test_a_byte_too_many_is_noticed(monkeypatch):
    monkeypatch.setattr(planner, "slot_bytes", lambda geometry, config: 2**20)
    result = command.plan(options("llama-3.1-8b", "rtx 4090", max_running_requests=300))
    with pytest.raises(AssertionError, match="more than there is"):
        check(result["plan"], result["gpu_memory"])


SITUATIONS = {
    "model": st.sampled_from([path.stem for path in sorted(MODELS.iterdir())]),
    "gpu": st.sampled_from([device.name for device in devices.DEVICES]),
    "tp": st.sampled_from([1, 2, 4, 8]),
    "memory": st.integers(10, 190),
    "host": st.integers(1, 2000),
    "budget": st.sampled_from([64, 512, 2048, 8192]),
    "rows": st.sampled_from([1, 2, "auto"]),
}


def plan_or_none(model, gpu, tp, memory, host, budget, rows, residency="auto", **more):
    settings = json.dumps({"rows": rows, "residency": residency})
    given = options(
        model, gpu, tp=tp, gpu_memory=f"{memory}GB", host=f"{host}GB", budget=budget, config=settings, **more
    )
    try:
        return command.plan(given)
    except ValueError as error:
        assert "\n" not in str(error) and ";" in str(error), "one sentence that says what to do"
        return None


@settings(max_examples=60)
@given(**SITUATIONS, running=st.none() | st.integers(1, 300))
def test_never_beyond_what_was_given(model, gpu, tp, memory, host, budget, rows, running):
    more = {} if running is None else {"max_running_requests": running}
    result = plan_or_none(model, gpu, tp, memory, host, budget, rows, **more)
    if result is None:
        return
    plan = result["plan"]
    check(plan, memory * GB)
    assert tp * plan.host_bytes <= host * GB
    assert plan.max_running_requests <= (running or split.DEFAULT_MAX_RUNNING_CUDA)
    json.dumps(plan.as_dict())
    for row in plan.estimates:
        assert row["requests"] <= plan.max_running_requests
        assert row["requests"] == 1 or row["requests"] * row["context"] <= plan.host_tokens


@settings(max_examples=40)
@given(**SITUATIONS, more=st.integers(1, 100))
def test_more_gpu_memory_is_never_slower(model, gpu, tp, memory, host, budget, rows, more):
    here = plan_or_none(model, gpu, tp, memory, host, budget, rows, mem_fraction_static=0.85)
    there = plan_or_none(model, gpu, tp, memory + more, host, budget, rows, mem_fraction_static=0.85)
    if here is None:
        return
    assert there is not None, "what started with less starts with more"
    assert there["plan"].host_tokens >= here["plan"].host_tokens
    if budget == 2048:
        assert judged(there, model, tp, host) * split.WORTH * (1 + 1e-9) >= judged(here, model, tp, host)


def judged(result: dict[str, Any], model: str, tp: int, host: int) -> float:
    """What the chosen split is worth by the planner's own measure."""
    plan = result["plan"]
    config = SparseKVConfig.from_dict({"budget": 2048, "rows": plan.rows, "residency": plan.residency})
    shape = model_shape.read(str(MODELS / f"{model}.json"), config)
    geometry = shape.geometry(config, 16, tp, shape.context)
    device = devices.find(result["gpu"])
    assert device is not None
    given = split.Given(device, 0, host * GB // tp, 1, shape.weights(tp), shape.context)
    return split._judge(config, geometry, given, plan.max_running_requests, plan.slots)


@settings(max_examples=40)
@given(**SITUATIONS, more=st.integers(1, 500), running=st.integers(1, 200))
def test_more_memory_never_admits_fewer(model, gpu, tp, memory, host, budget, rows, more, running):
    fixed = {"mem_fraction_static": 0.85, "max_running_requests": running, "residency": "all"}
    here = plan_or_none(model, gpu, tp, memory, host, budget, rows, **fixed)
    if here is None:
        return
    gpu_more = plan_or_none(model, gpu, tp, memory + more, host, budget, rows, **fixed)
    assert gpu_more is not None
    assert gpu_more["plan"].max_running_requests >= here["plan"].max_running_requests
    assert gpu_more["plan"].slots >= min(here["plan"].slots, gpu_more["plan"].host_tokens // 16)
    host_more = plan_or_none(model, gpu, tp, memory, host + more, budget, rows, **fixed)
    if host_more is not None:  # else its landmarks crowd the cache out, in a sentence
        assert host_more["plan"].host_tokens >= here["plan"].host_tokens


@settings(max_examples=40)
@given(
    model=SITUATIONS["model"],
    free=st.integers(200, 100_000),
    host=st.integers(1, 10_000),
    budget=SITUATIONS["budget"],
    more=st.integers(1, 50_000),
)
def test_auto_host_memory_never_crowds_the_cache_out(model, free, host, budget, more):
    """However much host there is, a GPU that can hold one request's pages starts; sizes in MB and GB."""
    config = SparseKVConfig.from_dict({"budget": budget})
    shape = model_shape.read(str(MODELS / f"{model}.json"), config)
    geometry = shape.geometry(config, 16, 1, shape.context)

    def plan(free: int) -> planner.Plan | None:
        given = split.Given(
            devices.DEVICES[0], free * 10**6, host * GB, 16, shape.weights(1), shape.context, fixed_host=False
        )
        try:
            return split.plan_gpu(config, geometry, given)
        except ValueError as error:
            assert re.search(r"the page cache of one request .* are free; use a larger GPU", str(error))
            return None

    here, there = plan(free), plan(free + more)
    if here is None:
        return
    assert sum(here.device_bytes.values()) <= free * 10**6 and here.host_bytes <= host * GB
    assert there is not None and there.host_tokens >= here.host_tokens
    if there.host_bytes < 0.99 * host * GB:
        assert any(reason.startswith("host memory: ") for reason in there.reasons)


def test_fewer_layers_keep_a_cache_only_where_memory_is_short():
    ample = command.plan(options("llama-3.1-8b", "h200"))["plan"]
    short = command.plan(options("llama-3.1-8b", "l4"))["plan"]
    assert ample.residency == "all" and short.residency == 0.0
    assert any(reason.startswith("residency: 0%") for reason in short.reasons)
    asked = command.plan(options("llama-3.1-8b", "h200", config='{"residency": "none"}'))["plan"]
    assert asked.residency == "none" and not any(reason.startswith("residency") for reason in asked.reasons)


def test_too_many_requests_are_told():
    asked = command.plan(options("llama-3.1-8b", "h200", gpu_memory="40GB", max_running_requests=40))["plan"]
    found = [re.match(r"requests: 40, as set; (\d+) would give (\d+) instead of (\d+)", r) for r in asked.reasons]
    assert found[0] is not None and int(found[0][1]) < 40 and int(found[0][2]) > 1.05 * int(found[0][3])
    more = command.plan(options("llama-3.1-8b", "h200", gpu_memory="40GB", max_running_requests=500))["plan"]
    assert more.max_running_requests < 500
    assert any(f"requests: {more.max_running_requests} of the 500 set fit; " in reason for reason in more.reasons)
    small = command.plan(options("llama-3.1-8b", "rtx 4090", max_running_requests=500))["plan"]
    assert any("of the 500 set fit" in reason for reason in small.reasons), small.reasons
    few = command.plan(options("llama-3.1-8b", "h200", gpu_memory="40GB", max_running_requests=8))["plan"]
    assert not any(reason.startswith("requests") for reason in few.reasons)


@pytest.mark.parametrize("host", range(31, 38))
def test_no_batch_is_smaller_for_what_short_contexts_select(host):
    """A full host pool leaves 128 requests some 1850 to 2200 tokens each, and they wait for no link."""
    plan = command.plan(options("llama-3.1-8b", "h200", host=f"{host}GB"))["plan"]
    assert plan.max_running_requests == 128 and not any(reason.startswith("requests") for reason in plan.reasons)


@pytest.mark.parametrize(("context", "most"), [(131072, 3), (32768, 64), (2100, 128), (400, 16)])
def test_the_rows_that_are_told_are_those_that_run(context, most, capsys):
    given = options("llama-3.1-8b", "h200", gpu_memory="40GB", context=context, config='{"rows": "auto"}')
    given.max_running_requests = most
    result = command.plan(given)
    plan = result["plan"]
    assert plan.rows == "auto" and "1 or 2 rows each" in report.table(plan)
    for row in plan.estimates:
        requests, chooser = row["requests"], variants.Chooser(row["requests"])
        slots = torch.arange(requests)
        chooser.start(slots, torch.full((requests,), row["context"]))
        runtime = SimpleNamespace(
            policy=SimpleNamespace(rows="auto", skip_scores=True),
            config=SimpleNamespace(most_rows=2),
            shape=plan.shape,
            cache=SimpleNamespace(usable=plan.slots, scoped=[]),
            most_alone=None,
            recorder=None,
        )
        assert row["rows"] == chooser.choose(slots, runtime).rows, row
    two = options("llama-3.1-8b", "h200", gpu_memory="40GB", context=context, config='{"rows": 2}')
    fixed = command.plan(two)["plan"]
    assert {row["rows"] for row in fixed.estimates} == {2} and "  rows  " not in report.table(fixed)


def test_both_numbers_of_rows_are_told():
    given = options("llama-3.1-8b", "h200", gpu_memory="40GB", context=4000, config='{"rows": "auto"}')
    given.max_running_requests = 40
    plan = command.plan(given)["plan"]
    assert [row["rows"] for row in plan.estimates] == [1, 1, 2]
    assert re.search(r"context +requests +rows +limited by", report.table(plan))


def test_a_slower_link_is_counted():
    full, half = (
        command.plan(options("llama-3.1-8b", "h200", gpu_memory="40GB", link_rate=rate))["plan"]
        for rate in ("51GB", "25GB")
    )
    assert at(full.estimates, 32768)["tokens_per_second"] > at(half.estimates, 32768)["tokens_per_second"]
    assert command.plan(options("llama-3.1-8b", "h200", gpu_memory="40GB"))["plan"] == full


def test_a_slower_link_leaves_fewer_layers_late():
    """As many requests, on slots as many: by the link alone."""

    def late(**more) -> tuple[planner.Plan, str]:
        given = {"gpu_memory": "46GB", "mem_fraction_static": 0.82, "max_running_requests": 22, **more}
        result = command.plan(options("llama-3.1-8b", "h200", **given))
        return result["plan"], report.table(result["plan"])

    (fast, said), (slow, said_too) = late(link_rate="51GB"), late(link_rate="25GB")
    assert fast.slots == slow.slots and len(fast.lookahead) == len(slow.lookahead) == 22
    assert all(few <= many for few, many in zip(slow.lookahead, fast.lookahead)) and slow.lookahead != fast.lookahead
    for plan, text in ((fast, said), (slow, said_too)):
        assert plan.lookahead[0] == 30 and 16 <= plan.lookahead[-1] < 30
        assert f"lookahead: the last 30 of 32 layers ({plan.lookahead[-1]} with 22 requests) fetch ahead" in text
    asked, text = late(config='{"lookahead": 8}')
    assert asked.lookahead == (8,) and "lookahead" not in text
    assert late(config='{"lookahead": 99}')[0].lookahead == (32,)


def test_buffers_that_fill_first_leave_the_others_more_time():
    """Layers without a cache of their own begin the step's queue."""
    shape = model_shape.read(str(MODELS / "llama-3.1-8b.json"), SparseKVConfig())

    def late(residency) -> tuple[int, ...]:
        config = SparseKVConfig.from_dict({"residency": residency})
        geometry = shape.geometry(config, 16, 1, 32768)
        given = split.Given(devices.DEVICES[0], 40 * GB, 96 * GB, 8, shape.weights(1), 32768)
        return split.plan_gpu(config, geometry, given).lookahead

    most, some = late("all"), late(0.9)
    assert all(few <= many for few, many in zip(some, most)) and some != most


def test_the_batch_is_the_fastest_one():
    """Every other batch that fits is slower by the mean of the curves; a batch that was asked for is left alone."""
    given = options("llama-3.1-8b", "h200", gpu_memory="40GB")
    best = command.plan(given)["plan"]
    assert any(reason.startswith(f"requests: {best.max_running_requests} of the ") for reason in best.reasons)

    def mean_speed(requests):
        plan = command.plan(options("llama-3.1-8b", "h200", gpu_memory="40GB", max_running_requests=requests))["plan"]
        assert plan.max_running_requests == requests and not any("that fit" in reason for reason in plan.reasons)
        return sum(at(plan.estimates, 32768)["tokens_per_second"])

    # Beyond 22 requests of 32K tokens the host pool is full, so that the estimate speaks of 22, with a few slots less.
    speeds = {n: mean_speed(n) for n in (4, 12, best.max_running_requests, 22)}
    assert speeds[best.max_running_requests] >= 0.999 * max(speeds.values())
    assert speeds[12] < 0.95 * speeds[best.max_running_requests]


@pytest.mark.parametrize(
    ("memory_gib", "tp", "chunk"), [(24, 1, 2048), (40, 1, 4096), (80, 1, 8192), (139, 8, 8192), (180, 1, 16384)]
)
def test_what_sglang_keeps_for_itself(memory_gib, tp, chunk):
    """Graphs of prefills included: a plan without a GPU promises what a server there finds."""
    args = ServerArgs.__new__(ServerArgs)
    given = {field.name: field.default for field in dataclasses.fields(ServerArgs)}
    given |= {"device": "cuda", "tp_size": tp, "speculative_algorithm": arguments.refusals.ALGORITHM}
    given["cuda_graph_max_bs_prefill"] = arguments.GRAPH_TOKENS
    vars(args).update(given)
    args._parse_cuda_graph_config()
    captures = dense.captures_prefills(memory_gib << 30, tp, chunk)
    args.cuda_graph_config.prefill.backend = "breakable" if captures else "disabled"
    args.use_mla_backend = lambda: False
    args.get_model_config = lambda: SimpleNamespace(is_multimodal=False)
    args._handle_gpu_memory_settings(memory_gib << 10)
    assert dense.default_chunk(memory_gib << 30) == args.chunked_prefill_size == chunk
    assert len(args.cuda_graph_config.prefill.bs) == dense.PREFILL_GRAPHS
    assert dense.static_share(memory_gib << 30, tp, chunk) == args.mem_fraction_static
    assert captures == (memory_gib > 24), "with 2 GiB for a chunk, SGLang captures nothing and keeps room for it"


@pytest.mark.parametrize(
    ("gpu", "given", "disabled"),
    [
        ("NVIDIA L4", {}, True),
        ("NVIDIA L4", {"mem_fraction_static": 0.7}, False),
        ("NVIDIA L4", {"chunked_prefill_size": 4096}, False),
        ("NVIDIA L4", {"cuda_graph_max_bs_prefill": 64}, False),
        ("NVIDIA H200", {}, False),
        ("a GPU of tomorrow", {}, False),
    ],
)
def test_room_is_kept_for_graphs_of_prefills_only_where_there_will_be_some(gpu, given, disabled, monkeypatch):
    monkeypatch.setattr(devices, "this_gpu", lambda: gpu)
    kwargs = {"model_path": str(MODELS / "llama-3.1-8b.json"), "device": "cuda", **given}
    derived = arguments._derived(kwargs, SparseKVConfig())
    assert derived.get("disable_prefill_cuda_graph", False) == disabled


def write_llama_2_7b(folder: Path) -> str:
    """A model with a KV head for each query head."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096}
    return write_model(folder, "LlamaForCausalLM", "llama", **sizes, torch_dtype="float16")


def test_a_chunk_is_longer_where_a_prefix_takes_long_to_arrive(tmp_path):
    given = options("llama-3.1-8b", "rtx 4090")
    assert command.plan(given)["chunked_prefill_size"] == dense.default_chunk(24 << 30)
    given.model_path = write_llama_2_7b(tmp_path)
    result = command.plan(given)
    assert result["chunked_prefill_size"] == 4096 >= result["chunk_that_hides_its_prefix"] > 2048
    assert result["mem_fraction_static"] < command.plan(options("llama-3.1-8b", "rtx 4090"))["mem_fraction_static"]


@pytest.mark.parametrize(
    ("gpu", "given", "chosen"),
    [
        ("NVIDIA GeForce RTX 4090", {}, 4096),
        ("NVIDIA GeForce RTX 4090", {"model": "llama-3.1-8b"}, None),
        ("Tesla T4", {}, None),
        (None, {}, None),
    ],
)
def test_a_server_chooses_the_same_chunk(gpu, given, chosen, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "this_gpu", lambda: gpu)
    path = str(MODELS / f"{given['model']}.json") if given else write_llama_2_7b(tmp_path)
    assert arguments._chunk({"model_path": path}, SparseKVConfig()) == chosen
    assert arguments._chunk({"model_path": str(tmp_path / "nothing")}, SparseKVConfig()) is None
