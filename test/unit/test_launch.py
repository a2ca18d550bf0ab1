"""What the hooks do in the launcher and in a scheduler process."""

from __future__ import annotations

import asyncio
import contextlib
import types
from array import array

import pytest
import sglang_dualdecoder
import spawned
from models import write_model
from sglang.srt.plugins import load_plugins
from sglang.srt.sparse_kv import launch
from sglang.srt.sparse_kv.refusals import StartRefused

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "llama")


# ------------------------------------------------------------ in the launcher


def test_the_launcher_wraps_only_servers_with_sparse_kv(model):
    calls = []

    def original(cls, server_args, port_args, run):
        calls.append(run)
        return types.SimpleNamespace(wait_for_ready=lambda: None), []

    dense = ServerArgs(model_path=model)
    launch.launch_schedulers(original, object, dense, None, spawned.report_and_refuse)
    sparse = ServerArgs(model_path=model, sparse_kv="dualdecoder")
    result, _ = launch.launch_schedulers(original, object, sparse, None, spawned.report_and_refuse)
    assert calls[0] is spawned.report_and_refuse
    assert calls[1].func is sglang_dualdecoder.run_scheduler_process and calls[1].args[0] is spawned.report_and_refuse
    result.wait_for_ready()
    assert getattr(sparse, launch.sizing.HOST_ATTRIBUTE) > 0 and not hasattr(dense, launch.sizing.HOST_ATTRIBUTE)


def test_the_launcher_refuses_host_memory_beyond_the_container(model, monkeypatch):
    monkeypatch.setattr(launch.sizing.host_memory, "cgroup_room", lambda *where: 10**9)
    args = ServerArgs(model_path=model, sparse_kv="dualdecoder", sparse_kv_host_memory="2GB")
    with pytest.raises(StartRefused, match=r"asks for 2\.0 GB and this container may use 1\.0 GB more"):
        launch.launch_schedulers(None, object, args, None, spawned.report_and_refuse)


def test_memory_is_kept_by_servers_with_sparse_kv(model):
    released = []

    async def original(self, obj, request):
        released.append(obj)

    dense = types.SimpleNamespace(server_args=ServerArgs(model_path=model))
    asyncio.run(launch.keep_memory(original, dense, "all"))
    sparse = types.SimpleNamespace(server_args=ServerArgs(model_path=model, sparse_kv="dualdecoder"))
    with pytest.raises(ValueError, match=r"^sglang-dualdecoder: memory that the GPU [^\n]+\.$"):
        asyncio.run(launch.keep_memory(original, sparse, "all"))
    assert released == ["all"]


@pytest.mark.parametrize("wrong", [-1, -(2**62), 100, 2**62, -(2**70), 2**70])
def test_token_ids_that_the_model_does_not_know_are_refused(model, wrong):
    checked = []

    def ask(server_args, ids):
        manager = types.SimpleNamespace(server_args=server_args, model_config=types.SimpleNamespace(vocab_size=100))

        def original(self, obj, input_text, input_ids, token_type_ids):
            checked.append(input_ids)
            return input_text, token_type_ids

        assert launch.sound_request(original, manager, None, "text", ids, "types") == ("text", "types")

    dense, sparse = ServerArgs(model_path=model), ServerArgs(model_path=model, sparse_kv="dualdecoder")
    with pytest.raises(ValueError, match=rf"^sglang-dualdecoder: .* token id {wrong} and .* 0 to 99; [^\n]+\.$"):
        ask(sparse, [3, wrong, 5])
    for ids in ([0, 99], None):
        ask(sparse, ids)
    ask(dense, [wrong])
    assert checked == [array("q", [0, 99]), None, [wrong]]  # SGLang's own form, for it to copy


def test_a_prompt_without_tokens_is_refused(model):
    """SGLang refuses one that is alone; in a list of prompts it ended the scheduler, whose kernels expect a row."""
    server_args, asked = ServerArgs(model_path=model, sparse_kv="dualdecoder"), []
    manager = types.SimpleNamespace(server_args=server_args, model_config=types.SimpleNamespace(vocab_size=100))
    with pytest.raises(ValueError, match=r"^sglang-dualdecoder: the prompt has no tokens; [^\n]+\.$"):
        launch.sound_request(lambda *them: asked.append(them), manager, None, "", [])
    assert asked == []


def test_lists_in_place_of_one_prompts_values_are_refused(model):
    from sglang.srt.managers.io_struct import GenerateReqInput

    manager = types.SimpleNamespace(model_config=types.SimpleNamespace(vocab_size=100))
    checked = []

    def ask(sparse, request):
        manager.server_args = ServerArgs(model_path=model, sparse_kv=sparse)
        request.normalize_batch_and_arguments()
        for each in [request] if request.is_single else [request[i] for i in range(request.batch_size)]:
            launch.sound_request(lambda self, obj, *others: checked.append(obj), manager, each, "a", [1, 2])

    wrong = {"extra_key": ["a"], "lora_id": ["a"], "return_logprob": [True], "top_logprobs_num": [5], "rid": ["a"]}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"^sglang-dualdecoder: {name} is a list and [^\n]+\.$"):
            ask("dualdecoder", GenerateReqInput(text="a", **{name: value}))
        ask(None, GenerateReqInput(text="a", **{name: value}))
        ask("dualdecoder", GenerateReqInput(text=["a"], **{name: value}))
    lists = {"token_ids_logprob": [1], "stream": True, "session_params": {"id": "a"}}
    ask("dualdecoder", GenerateReqInput(input_ids=[1, 2], return_hidden_states="last", **lists))
    assert len(checked) == 2 * len(wrong) + 1


# ------------------------------------------------------------ inside a scheduler


@pytest.mark.parametrize(("flush", "idle"), [(True, True), (False, False), (True, False)])
def test_weights_that_would_flush_paused_requests_are_refused(flush, idle):
    updater = types.SimpleNamespace(is_fully_idle=lambda: idle)
    answer = launch.new_weights(lambda self, request: "done", updater, types.SimpleNamespace(flush_cache=flush))
    if flush and not idle:
        assert not answer.success and "flush_cache false" in answer.message and "\n" not in answer.message
    else:
        assert answer == "done"


class Runtime:
    def __init__(self):
        self.updates = []
        self.resets = 0

    def summary(self):
        plan = {"slots": 40, "host_tokens": 2048}
        names = ("guide_hits", "guides", "bytes_stored", "bytes_staged", "total", "cache_occupancy", "policy")
        return {"steps": 3, "plan": plan, **dict.fromkeys(names, 0)}

    def log_suffix(self):
        return "sparse hit: 1.000"

    def reset_counters(self):
        self.resets += 1

    def apply_policy(self, update):
        if "bad" in update:
            raise ValueError("no such policy")
        self.updates.append(update)


@pytest.fixture
def scheduler():
    pool = types.SimpleNamespace(runtime=Runtime())
    allocator = types.SimpleNamespace(get_kvcache=lambda: pool, available_size=lambda: 96)
    return types.SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        is_fully_idle=lambda: True,
        ps=types.SimpleNamespace(tp_rank=1, tp_size=2),
    )


def test_counters_in_server_info_and_in_the_log(scheduler, monkeypatch):
    output = types.SimpleNamespace(internal_state={"other": 1})
    launch.report_state(output, scheduler, None)
    assert output.internal_state["other"] == 1
    summary = output.internal_state["sparse_kv"]
    assert summary["steps"] == 3 and summary["plan"]
    (rank,) = summary["ranks"]
    assert (rank["steps"], rank["slots"], rank["host_tokens"], rank["free_tokens"]) == (3, 40, 2048, 96)
    monkeypatch.setattr(launch._Counters, "runtime", Runtime())
    assert launch.log_counters(["token usage: 0.1"], None) == ["token usage: 0.1", "sparse hit: 1.000"]


def test_one_exporter_publishes_whenever_sglang_does(monkeypatch):
    from sglang.srt.sparse_kv import prometheus

    made, published = [], []

    class Exporter:
        def __init__(self, collector):
            made.append(collector)

        def publish(self, runtime, stats):
            published.append((runtime, stats))

    monkeypatch.setattr(prometheus, "Exporter", Exporter)
    monkeypatch.setattr(launch._Counters, "runtime", "runtime")
    monkeypatch.setattr(launch._Counters, "exporter", None)
    for stats in (1, 2):
        launch.publish_metrics(None, "collector", stats)
    assert (made, published) == (["collector"], [("runtime", 1), ("runtime", 2)])


def request(**values):
    return types.SimpleNamespace(server_args=values)


def test_policy_travels_as_numbers_under_our_prefix(scheduler):
    runtime = scheduler.token_to_kv_pool_allocator.get_kvcache().runtime
    never = None
    assert launch.set_policy(never, scheduler, request(**{"sparse_kv.prefetch": 0, "sparse_kv.budget": 512})).updated
    assert runtime.updates == [{"prefetch": 0, "budget": 512}]
    assert not launch.set_policy(never, scheduler, request(**{"sparse_kv.bad": 1})).updated
    assert not launch.set_policy(
        never, scheduler, request(**{"sparse_kv.prefetch": 1, "max_micro_batch_size": 1})
    ).updated
    scheduler.is_fully_idle = lambda: False
    assert not launch.set_policy(never, scheduler, request(**{"sparse_kv.prefetch": 1})).updated
    assert runtime.updates == [{"prefetch": 0, "budget": 512}] and runtime.resets == 0
    scheduler.is_fully_idle = lambda: True
    assert launch.set_policy(never, scheduler, request(**{"sparse_kv.reset_counters": 1})).updated
    assert (len(runtime.updates), runtime.resets) == (1, 1)
    assert launch.set_policy(lambda self, req: "upstream's", scheduler, request(other=1)) == "upstream's"


def test_policy_of_one_rank(scheduler, monkeypatch):
    """What moves bytes may differ between ranks; what a step computes, or which tokens it attends to, may not."""
    runtime = scheduler.token_to_kv_pool_allocator.get_kvcache().runtime

    def switched(**values) -> bool:
        return launch.set_policy(None, scheduler, request(**{f"sparse_kv.{k}": v for k, v in values.items()})).updated

    assert switched(rank=1, transfer=1) and runtime.updates == [{"transfer": 1}]
    assert switched(rank=0, transfer=2, reset_counters=1) and len(runtime.updates) == 1 and runtime.resets == 0
    for wrong in ({"rank": 2, "transfer": 1}, {"rank": 1, "guide": 3}, {"rank": 1, "budget": 64, "prefetch": 0}):
        assert not switched(**wrong)
    assert len(runtime.updates) == 1
    monkeypatch.setattr(launch.ranks, "gather", lambda refused: [refused, "another rank said no"])
    assert not switched(prefetch=0), "the answer speaks for all ranks"


def test_eager_buffers_follow_a_chunk_and_the_runner_keeps_its_tokens():
    seen = []
    runner = types.SimpleNamespace(
        max_total_num_tokens=10**7, server_args=types.SimpleNamespace(max_prefill_buffer_tokens=lambda: 2048)
    )
    launch.small_eager_buffers(lambda self, mr: seen.append(mr.max_total_num_tokens), None, runner)
    assert (seen, runner.max_total_num_tokens) == ([2048], 10**7)

    def fails(self, model_runner):
        raise RuntimeError

    with contextlib.suppress(RuntimeError):
        launch.small_eager_buffers(fails, None, runner)
    assert runner.max_total_num_tokens == 10**7
