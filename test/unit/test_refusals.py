"""Each start that cannot be ends with one sentence: what, why, and what to do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from models import write_model
from sglang.srt.plugins import load_plugins
from sglang.srt.sparse_kv import arguments, refusals
from sglang.srt.sparse_kv.refusals import ARCHITECTURES, ENVIRONMENT, REFUSALS, StartRefused

load_plugins()

from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402

ON = ["--sparse-kv", "dualdecoder"]

# What a user would type for each entry of the table.
TYPED = {
    "pp_size": "2",
    "nnodes": "2",
    "cuda_graph_backend_prefill": "tc_piecewise",
    "cuda_graph_config": '{"prefill": {"backend": "full"}}',
    "dcp_size": "2",
    "attn_cp_size": "2",
    "lora_paths": "adapter=/some/where",
    "chunked_prefill_size": "-1",
    "disaggregation_mode": "prefill",
    "hicache_storage_backend": "file",
    "speculative_algorithm": "NGRAM",
    "speculative_draft_model_path": "/some/where",
    "speculative_num_steps": "3",
    "speculative_eagle_topk": "4",
    "speculative_num_draft_tokens": "4",
    "kv_cache_dtype": "fp8_e4m3",
    "radix_cache_backend": "other",
    "kv_canary": "log",
    "return_hidden_states_mode": "last",
    "dllm_algorithm": "LowConfidence",
    "tokenizer_worker_num": "2",
    "attention_backend": "triton",
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": "flashinfer",
}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Whether this process was started from a command line is remembered; each test begins without."""
    monkeypatch.setattr(refusals, "_from_command_line", False)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "llama")


def refusal(*argv: str) -> str:
    """The sentence that ends a start with these arguments, checked in form."""
    with pytest.raises(SystemExit) as stop:
        prepare_server_args(list(argv))
    # Python prints a SystemExit's text to stderr and leaves with status 1.
    text = stop.value.code
    assert isinstance(text, str), f"not a refusal of ours: exit status {text}"
    assert text.startswith("sglang-dualdecoder: ") and text.endswith(".")
    assert "\n" not in text and ". " not in text
    return text


def test_the_table_names_fields_of_sglang_once_each():
    fields = {field.name: field for field in dataclasses.fields(ServerArgs)}
    names = [entry.field for entry in REFUSALS]
    assert len(set(names)) == len(names)
    for name in names:
        assert name in fields, f"SGLang has no argument {name}"
        assert fields[name].default is not dataclasses.MISSING, f"{name} has no plain default to compare with"


@pytest.mark.parametrize("entry", REFUSALS, ids=lambda entry: entry.field)
def test_an_option_that_is_not_served(entry, model):
    flag = "--" + entry.field.replace("_", "-")
    typed = [flag, TYPED[entry.field]] if entry.field in TYPED else [flag]
    text = refusal("--model-path", model, *ON, *typed)
    assert flag in text and entry.why in text and entry.instead in text


@pytest.mark.parametrize("entry", REFUSALS, ids=lambda entry: entry.field)
def test_the_same_option_is_fine_without_sparse_kv_and_at_its_default(entry):
    default = {field.name: field.default for field in dataclasses.fields(ServerArgs)}
    refusals.check_arguments({entry.field: default[entry.field]}, default)


def test_a_kv_head_belongs_to_one_rank(model):
    text = refusal("--model-path", model, *ON, "--tp-size", "4")
    assert "--tp-size is 4 and the model has 2 KV heads" in text and "choose a divisor of 2" in text


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_variable_that_changes_what_arguments_mean(name, model, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert name in refusal("--model-path", model, *ON)
    monkeypatch.setenv(name, "0")
    refusals.check_arguments({}, {})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sparse-kv", "yes"], ["--sparse-kv is 'yes'", "'dualdecoder'"]),
        (["--sparse-kv-budget", "512"], ["--sparse-kv-budget", "add --sparse-kv dualdecoder"]),
        ([*ON, "--sparse-kv-budget", "15"], ["15 tokens", "one page of 16"]),
        ([*ON, "--sparse-kv-budget", "16", "--page-size", "32"], ["16 tokens", "one page of 32"]),
        ([*ON, "--sparse-kv-budget", "a lot"], ["--sparse-kv-budget is 'a lot'"]),
        ([*ON, "--page-size", "64"], ["--page-size is 64", "8, 16, 32"]),
        ([*ON, "--sparse-kv-host-memory", "much"], ["'much'", '"96GB"']),
        ([*ON, "--sparse-kv-config", "{"], ["no valid JSON"]),
        ([*ON, "--sparse-kv-config", '{"rings": 3}'], ["'rings'", "'ring'"]),
        ([*ON, "--sparse-kv-config", '{"ring": 9}'], ["ring is 9", "from 2 to 4"]),
        ([*ON, "--sparse-kv-config", '{"residency": [4]}'], ["layer 4", "4 layers"]),
        ([*ON, "--device", "xpu"], ["cuda and cpu", "xpu"]),
    ],
)
def test_a_bad_value(argv, words, model):
    text = refusal("--model-path", model, *argv)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("architecture", "model_type", "more", "word"),
    [
        ("GemmaForCausalLM", "gemma", {}, "GemmaForCausalLM"),
        ("MixtralForCausalLM", "mixtral", {"num_local_experts": 2}, "MixtralForCausalLM"),
        ("OPTForCausalLM", "opt", {"ffn_dim": 64}, "OPTForCausalLM"),
        ("MistralForCausalLM", "mistral", {"sliding_window": 128}, "window of 128"),
        ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": True, "sliding_window": 128}, "window of 128"),
    ],
)
def test_a_model_that_is_not_served(architecture, model_type, more, word, tmp_path):
    text = refusal("--model-path", write_model(tmp_path, architecture, model_type, **more), *ON)
    assert architecture in text and word in text


@pytest.mark.parametrize(
    ("architecture", "model_type", "more"),
    [
        ("LlamaForCausalLM", "llama", {}),
        ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": False, "sliding_window": 128}),
        ("Qwen3ForCausalLM", "qwen3", {}),
        ("MistralForCausalLM", "mistral", {"sliding_window": None}),
    ],
)
def test_a_model_that_is_served(architecture, model_type, more, tmp_path):
    assert architecture in ARCHITECTURES
    args = prepare_server_args(["--model-path", write_model(tmp_path, architecture, model_type, **more), *ON])
    assert arguments.config_of(args).budget == 1664


def test_a_cpu_without_our_platform(monkeypatch, model):
    monkeypatch.setattr(arguments, "_platform_is_ours", lambda: False)
    assert "sglang-cpu-platform" in refusal("--model-path", model, *ON, "--device", "cpu")


def test_another_version_of_sglang(monkeypatch, model):
    monkeypatch.setattr("sglang.version.__version__", "0.5.18")
    text = refusal("--model-path", model, *ON)
    assert "0.5.17" in text and "0.5.18" in text
    monkeypatch.setattr("sglang.version.__version__", "0.5.17+local.build")
    prepare_server_args(["--model-path", model, *ON])


def test_keywords_are_refused_with_an_exception(model):
    for keywords in ({"sparse_kv": "yes"}, {"sparse_kv": "dualdecoder", "pp_size": 2}, {"sparse_kv_budget": 64}):
        with pytest.raises(StartRefused):
            ServerArgs(model_path=model, **keywords)


def test_a_refused_start_leaves_the_next_one_alone(model):
    refusal("--model-path", model, *ON, "--pp-size", "2")
    args = ServerArgs(model_path=model)
    assert arguments.config_of(args) is None and args.speculative_algorithm is None


SERVE = "import sys; from sglang.cli.main import main; sys.argv[0] = 'sglang'; main()"


@pytest.mark.parametrize(
    "command",
    [["-m", "sglang.launch_server"], pytest.param(["-c", SERVE, "serve"], marks=pytest.mark.slow)],
    ids=["launch_server", "serve"],
)
def test_a_shell_sees_the_sentence_and_a_status(command, model):
    argv = [sys.executable, *command, "--model-path", model, *ON, "--pp-size", "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sglang-dualdecoder: --sparse-kv dualdecoder cannot run with --pp-size 2: ")
