"""`sglang-sparse-kv plan` as it is called."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys

import pytest
from models import write_model
from plans import MODELS, options
from sglang.srt.sparse_kv import command, model_shape
from sglang.srt.sparse_kv.config import SparseKVConfig

RUN = [sys.executable, "-c", "import sglang_dualdecoder; sglang_dualdecoder.main()"]


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([*RUN, *argv], capture_output=True, text=True, timeout=60)


def test_it_answers_without_torch():
    show = "import sys; sys.argv[1:] = sys.argv[2:]; import sglang_dualdecoder as s, atexit\n"
    show += "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\ns.main()"
    argv = ["plan", "--model-path", str(MODELS / "llama-3.1-8b.json"), "--gpu", "h200", "--host-memory", "96GB"]
    done = subprocess.run([sys.executable, "-c", show, "-", *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.strip() == "False", done.stderr
    assert "sparse KV plan (per rank)" in done.stdout and "plain SGLang in the same memory" in done.stdout


def test_json_holds_the_same():
    argv = ["--model-path", str(MODELS / "llama-3.1-8b.json"), "--gpu", "h200", "--host-memory", "96GB"]
    said = json.loads(run("plan", *argv, "--json").stdout)
    plan = command.plan(options("llama-3.1-8b", "h200"))["plan"]
    assert said["plan"] == json.loads(json.dumps(plan.as_dict()))
    assert said["gpu"] == "H200" and said["measured"] is True and len(said["dense"]) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--gpu", "T1000"], "T1000 is not among the GPUs"),
        (["--gpu-memory", "10GB"], "the weights of one rank take 16.1 GB"),
        (
            ["--gpu", "l4", "--gpu-memory", "20.8GB", "--host-memory", "auto"],
            "the page cache of one request and the scratch",
        ),
        (["--gpu", "l4", "--gpu-memory", "20.8GB"], "landmarks, tables and scratch for 9.0 GB"),
        (["--gpu-memory", "much"], "--gpu-memory is 'much', which is not a size"),
        (["--tp", "3"], "--tp is 3 and the model has 8 KV heads"),
        (["--tp", "0"], "--tp is 0"),
        (["--context", "-5"], "--context is -5"),
        (["--mem-fraction-static", "1.7"], "--mem-fraction-static is 1.7"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static is 0.0"),
        (["--max-running-requests", "0"], "--max-running-requests is 0"),
        (["--link-rate", "0"], "--link-rate is '0'"),
        (["--page-size", "7"], "--page-size is 7"),
        (["--budget", "few"], "--sparse-kv-budget is 'few'"),
        (["--host-memory", "1MB"], "hold 0 pages"),
        (["--config", '{"residencey": 1}'], "perhaps 'residency' was meant"),
        (["--model-path", "/no/where"], "--model-path /no/where is neither a folder"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_a_status(given, words):
    # Only one of them as a process; the rest by the same function.
    argv = ["plan", "--model-path", str(MODELS / "llama-3.1-8b.json"), "--gpu", "h200", "--host-memory", "9GB", *given]
    if given[0] == "--tp":
        done = run(*argv)
        status, text = done.returncode, done.stderr
    else:
        status, text = captured(argv)
    assert status == 1 and text.startswith("sglang-sparse-kv: ") and words in text, text
    assert text.count("\n") == 1 and "Traceback" not in text


def captured(argv: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        status = command.main(argv)
    return status, err.getvalue()


def test_a_model_that_is_not_served_is_refused(tmp_path):
    path = write_model(tmp_path / "m", "MixtralForCausalLM", "mixtral")
    status, text = captured(["plan", "--model-path", path, "--gpu", "h200", "--host-memory", "9GB"])
    assert status == 1 and "does not serve MixtralForCausalLM" in text
    windowed = write_model(tmp_path / "w", "MistralForCausalLM", "mistral", sliding_window=4096)
    status, text = captured(["plan", "--model-path", windowed, "--gpu", "h200", "--host-memory", "9GB"])
    assert status == 1 and "window of 4096 tokens" in text
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    status, text = captured(["plan", "--model-path", str(tmp_path / "broken")])
    assert status == 1 and "says nothing about 'num_attention_heads'" in text


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    write_model(tmp_path / "hub" / "models--org--name" / "snapshots" / "abc", "LlamaForCausalLM", "llama")
    assert model_shape.read("org/name", SparseKVConfig()).layers == 4
    with pytest.raises(ValueError, match="neither a folder"):
        model_shape.read("org/other", SparseKVConfig())
