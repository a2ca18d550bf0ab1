"""The ledger against SGLang itself, the arguments that follow from ours, and what reaches child processes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import multiprocessing
import pickle
import pickletools

import pytest
import sglang_dualdecoder
import spawned
from models import write_model
from sglang.srt.model_executor.cuda_graph_config import default_prefill_backend
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sparse_kv import arguments, launch, plugin, refusals
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.refusals import StartRefused

load_plugins()

from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402

ARGUMENT_HOOKS = [hook.target for hook in plugin.HOOKS if hook.group == plugin.ARGUMENTS]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    monkeypatch.setattr(refusals, "_from_command_line", False)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "llama")


@pytest.fixture
def registry():
    """Hooks that a test registers and functions that it patches are gone after it."""
    saved = {key: list(value) for key, value in HookRegistry._hooks.items()}, set(HookRegistry._patched)
    yield HookRegistry
    HookRegistry._hooks.clear()
    HookRegistry._hooks.update(saved[0])
    HookRegistry._patched.clear()
    HookRegistry._patched.update(saved[1])


# ------------------------------------------------------------ the ledger


@pytest.mark.parametrize("hook", plugin.HOOKS, ids=lambda hook: hook.target.removeprefix("sglang.srt."))
def test_each_hook_meets_what_it_was_written_for(hook):
    if hook.parameters:
        assert plugin._parameters(hook.target) == hook.parameters
    assert hook.reason and hook.without and not hook.reason.endswith(".")
    owner = plugin._owner(hook.owner)
    # A hook takes what SGLang's registry passes it, for a call by the target's parameters.
    extra = {HookType.AROUND: 1, HookType.AFTER: 1, HookType.BEFORE: 0, HookType.REPLACE: 0}[hook.kind]
    names = hook.parameters or ("self",)
    keyword_only = (
        [
            parameter.name
            for parameter in inspect.signature(inspect.unwrap(plugin._raw(hook.target))).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        if hook.kind is HookType.REPLACE
        else []
    )
    positional = [None] * (extra + len(names) - len(keyword_only))
    inspect.signature(owner).bind(*positional, **dict.fromkeys(keyword_only))


def test_targets_are_hooked_once():
    targets = [hook.target for hook in plugin.HOOKS]
    assert len(set(targets)) == len(targets)


def test_another_signature_is_refused(registry):
    hook = dataclasses.replace(plugin.HOOKS[-1], parameters=("self", "something_else"))
    with pytest.raises(StartRefused, match=r"set_internal_state takes \(self, recv_req\)"):
        plugin._register(hook)


def test_a_hook_that_sglang_did_not_apply_is_refused(registry, monkeypatch):
    plugin.start(plugin.LAUNCHER)
    monkeypatch.setattr(registry, "apply_hooks", lambda: None)
    target = "sglang.srt.utils.common.get_device_count"
    lost = plugin.Hook(target, HookType.BEFORE, plugin.LAUNCHER, (), "launch:log_counters", "a test", "nothing breaks")
    monkeypatch.setattr(plugin, "HOOKS", (*plugin.HOOKS, lost))
    with pytest.raises(StartRefused, match="get_device_count is not hooked in this process, and then nothing breaks"):
        plugin.start(plugin.LAUNCHER)


def test_a_hook_that_somebody_removed_is_noticed(monkeypatch):
    hook = next(hook for hook in plugin.HOOKS if hook.target.endswith("add_cli_args"))
    assert plugin.in_force(hook)
    monkeypatch.setattr(ServerArgs, "add_cli_args", staticmethod(inspect.unwrap(ServerArgs.add_cli_args)))
    assert not plugin.in_force(hook)


def test_starting_twice_hooks_once():
    for _ in range(2):
        plugin.start(plugin.LAUNCHER)
    for hook in plugin.HOOKS:
        ours = [source for _, _, source in HookRegistry._hooks.get(hook.target, []) if source == plugin.SOURCE]
        assert len(ours) == (hook.group != plugin.SCHEDULER)


# ------------------------------------------------------------ arguments


def test_help_shows_the_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        prepare_server_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--sparse-kv ", "--sparse-kv-budget", "--sparse-kv-host-memory", "--sparse-kv-config"):
        assert flag in text


def test_sglang_serve_still_answers_help_before_plugins_load():
    """Once it does not, docs/faq.md and docs/troubleshooting.md are wrong."""
    from sglang.cli import serve

    source = inspect.getsource(serve.serve)
    assert source.index('"--help"') < source.index("return") < source.index("load_plugins()")


@pytest.mark.parametrize("guide, rows", [("chain", 2), ("none", 1)])
def test_what_follows_from_sparse_kv(model, guide, rows):
    args = prepare_server_args(
        ["--model-path", model, "--sparse-kv", "dualdecoder", "--sparse-kv-config", json.dumps({"guide": guide})]
    )
    assert args.speculative_algorithm == "DUALDECODER"
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    assert args.speculative_num_draft_tokens == args.max_speculative_num_draft_tokens == rows
    assert args.get_attention_backends() == ("dualdecoder", "dualdecoder")
    assert args.page_size == 16
    if args.device == "cpu":
        assert args.disable_overlap_schedule and args.cuda_graph_config.prefill.backend == "disabled"
    else:
        assert max(args.cuda_graph_config.prefill.bs) == 1024
    assert args._sparse_kv["guide"] == guide


@pytest.mark.parametrize(
    ("given", "most", "sizes", "backend"),
    [
        ({}, 1024, None, "as is"),
        ({"cuda_graph_config": {"decode": {"max_bs": 8}}}, 1024, None, "as is"),
        ({"cuda_graph_config": {"prefill": {"max_bs": 256}}}, 256, None, "as is"),
        ({"cuda_graph_max_bs_prefill": 4096}, 4096, None, "as is"),
        ({"cuda_graph_max_bs_prefill": 0}, 0, None, "as is"),  # none
        ({"cuda_graph_bs_prefill": [64, 2048]}, None, [64, 2048], "as is"),
        ({"cuda_graph_backend_prefill": "breakable"}, 1024, None, "breakable"),
        ({"disable_prefill_cuda_graph": True}, 1024, None, "disabled"),
        ({"disable_cuda_graph": True}, 1024, None, "disabled"),
    ],
)
def test_graphs_of_prefills_are_for_short_ones_unless_somebody_says_of_them(model, given, most, sizes, backend):
    kwargs = {"model_path": model, "device": "cuda", **given}
    args = ServerArgs.__new__(ServerArgs)
    vars(args).update({field.name: field.default for field in dataclasses.fields(ServerArgs)})
    vars(args).update(kwargs | arguments._derived(kwargs, SparseKVConfig()))
    args._parse_cuda_graph_config()
    prefill = args.cuda_graph_config.prefill
    assert (prefill.max_bs, prefill.bs) == (most, sizes)
    assert prefill.backend == (default_prefill_backend() if backend == "as is" else backend)


def test_keywords_flags_and_a_file_say_the_same(model, tmp_path):
    flags = ["--sparse-kv-budget", "512", "--sparse-kv-host-memory", "1GB", "--page-size", "8"]
    by_flags = prepare_server_args(["--model-path", model, "--sparse-kv", "dualdecoder", *flags])
    by_keywords = ServerArgs(
        model_path=model, sparse_kv="dualdecoder", sparse_kv_budget=512, sparse_kv_host_memory="1GB", page_size=8
    )
    file = tmp_path / "server.yaml"
    file.write_text(
        f"model-path: {model}\nsparse-kv: dualdecoder\nsparse-kv-budget: 512\n"
        "sparse-kv-host-memory: 1GB\npage-size: 8\n"
    )
    by_file = prepare_server_args(["--config", str(file)])
    positional = ServerArgs(
        model, sparse_kv="dualdecoder", sparse_kv_budget=512, sparse_kv_host_memory="1GB", page_size=8
    )
    for args in (by_keywords, by_file, positional):
        assert args._sparse_kv == by_flags._sparse_kv
        assert args.page_size == by_flags.page_size == 8


def without_seed(args: ServerArgs) -> dict:
    values = dict(vars(args), random_seed=None)
    values.pop("model_config", None)
    return {key: value for key, value in values.items() if not key.startswith("_")}


def test_without_the_flag_sglang_resolves_as_without_us(model):
    ours = ServerArgs(model_path=model, device="cpu")
    plain = object.__new__(ServerArgs)
    inspect.unwrap(ServerArgs.__init__)(plain, model_path=model, device="cpu")
    assert without_seed(ours) == without_seed(plain)
    assert not hasattr(ours, "_sparse_kv")
    with pytest.raises(ValueError, match="DUALDECODER"):
        ServerArgs(model_path=model, device="cpu", speculative_algorithm="DUALDECODER")


def test_an_unknown_keyword_stays_unknown(model):
    with pytest.raises(TypeError, match="sparse_kv_budgett"):
        ServerArgs(model_path=model, sparse_kv_budgett=1)


# ------------------------------------------------------------ children


def test_pickled_arguments_need_no_code_of_ours(model):
    args = ServerArgs(model_path=model, sparse_kv="dualdecoder")
    pickled = pickle.dumps(args)
    strings = [value for op, value, _ in pickletools.genops(pickled) if "UNICODE" in op.name or op.name == "GLOBAL"]
    assert not [text for text in strings if "sparse_kv." in text or "sglang_dualdecoder" in text]
    for copied in (pickle.loads(pickled), copy.deepcopy(args)):
        assert copied._sparse_kv == args._sparse_kv
    json.dumps(args._sparse_kv)


def run_child(function, *args):
    """Run ``function(*args)`` in a spawned process and return its exit status."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join(300)
    return process.exitcode


@pytest.fixture
def queue():
    return multiprocessing.get_context("spawn").SimpleQueue


def test_a_scheduler_child_has_every_hook_and_can_refuse(model, queue):
    args = ServerArgs(model_path=model, sparse_kv="dualdecoder", sparse_kv_budget=256)
    answers = queue()
    refused, writer = multiprocessing.Pipe(duplex=False)
    run = functools.partial(sglang_dualdecoder.run_scheduler_process, spawned.report_and_refuse, writer)
    assert run_child(run, args, answers) == 1
    answer = answers.get()
    wanted = {hook.target for hook in plugin.HOOKS if hook.group in (plugin.ARGUMENTS, plugin.SCHEDULER)}
    assert set(answer["hooks"]) == wanted
    assert answer["config"] == args._sparse_kv
    assert (answer["backend"], answer["algorithm"]) == (True, "DUALDECODER")
    # The child then refused, as sizing may. SGLang's handler of exceptions, a traceback, did not see it.
    assert answers.empty()
    with pytest.raises(StartRefused, match=r"^there is no room\.$"):
        launch._wait_for_ready(died, refused)


def died():
    raise RuntimeError("the scheduler died")


def test_other_deaths_of_a_scheduler_stay_what_they_are():
    nothing, _ = multiprocessing.Pipe(duplex=False)
    with pytest.raises(RuntimeError, match=r"^the scheduler died$"):
        launch._wait_for_ready(died, nothing)
    launch._wait_for_ready(lambda: None, nothing)


def test_loading_changes_only_the_arguments(queue):
    answers = queue()
    assert run_child(spawned.modules_after_loading, answers) == 0
    answer = answers.get()
    assert answer["hooked"] == sorted(ARGUMENT_HOOKS)
    assert set(answer["modules"]) <= {f"sglang.srt.sparse_kv{name}" for name in ("", ".plugin", ".refusals", ".config")}
    assert not answer["schedulers"], "loading the plugin imports SGLang's scheduler"
