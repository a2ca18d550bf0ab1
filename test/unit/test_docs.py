"""Documents say what the code says: tables, links, and every command that they show."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from doc_commands import COMMANDS, DOCUMENTS, REPOSITORY, commands, name
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.sparse_kv.arguments import KEYWORDS, SETTINGS  # noqa: E402
from sglang.srt.sparse_kv.command import main  # noqa: E402
from sglang.srt.sparse_kv.config import SparseKVConfig  # noqa: E402
from sglang.srt.sparse_kv.policy import Policy  # noqa: E402

PACKAGE = REPOSITORY / "python" / "sglang" / "srt" / "sparse_kv"
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


# ------------------------------------------------------------ tables and links


def test_tables_are_those_of_the_code():
    tables = runpy.run_path(str(REPOSITORY / "scripts" / "doc_tables.py"))
    found = {path.name: (text, wanted) for path, text, wanted in tables["documents"]()}
    assert set(found) >= {"supported.md", "upstream.md", "metrics.md"}
    for document, (text, wanted) in found.items():
        assert text == wanted, f"docs/{document} is out of date; run python scripts/doc_tables.py"


def table(document: str, heading: str) -> dict[str, list[str]]:
    """Cells of the first table below a heading, by each name in its first column."""
    text = (REPOSITORY / "docs" / document).read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", text.split("\n## ")[0], re.MULTILINE)]
    return {name: cells[1:] for cells in rows[2:] for name in re.findall(r"`([\w-]+)", cells[0])}


def test_every_setting_is_told_with_its_default():
    settings = table("configuration.md", "Settings in `--sparse-kv-config`")
    assert list(settings) == SETTINGS
    for key, (default, *_) in settings.items():
        assert default.strip("`") == json.dumps(getattr(SparseKVConfig(), key)), key
    flags_told = table("configuration.md", "Flags")
    assert {word.replace("-", "_").removeprefix("__") for word in flags_told} == {*KEYWORDS, "page_size"}


def test_every_switch_is_told():
    switches = table("configuration.md", "Switches for measurements and tests")
    assert set(switches) == {field.name for field in dataclasses.fields(Policy)} | {"reset_counters", "rank"}


def anchors(path: Path) -> set[str]:
    """What a forge makes of the headings."""
    headings = HEADING.findall(path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path):
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), f"{link} is no https address"
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{name(path)} links to {link}, which is not there"
        assert not anchor or anchor in anchors(file), f"{name(path)} links to {link}, and there is no such heading"


FILE = re.compile(r"`([\w.-]*/[\w./-]+\.\w+|\w+\.(?:py|cu|cuh|h))`")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_that_are_named_are_there(path):
    """With a folder or an ending of sources; by the end of their path. What users have or make has neither."""
    for file in set(FILE.findall(path.read_text(encoding="utf-8"))):
        pattern = file.removeprefix("../")
        assert file.startswith("/") or next(REPOSITORY.rglob(pattern), None), f"{name(path)} names {file}"


def test_every_page_is_in_the_site_and_reached_from_the_start():
    listed = set(re.findall(r"[\w-]+\.md", (REPOSITORY / "mkdocs.yml").read_text()))
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")}
    assert listed == pages
    reached, waiting = set(), ["index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = LINK.findall((REPOSITORY / "docs" / page).read_text(encoding="utf-8"))
            waiting += [link.partition("#")[0] for link in links if link.partition("#")[0] in pages]
    assert reached == pages


# ------------------------------------------------------------ commands


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.fixture(scope="session")
def server_flags() -> set[str]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return set(parser._option_string_actions)


@pytest.fixture(scope="session")
def endpoints() -> set[str]:
    """Paths that SGLang's server answers, by its source: the module itself wants a GPU's libraries on some machines."""
    source = Path(importlib.util.find_spec("sglang.srt.entrypoints.http_server").origin).read_text()
    return set(re.findall(r"@app\.\w+\(\s*\"([^\"]+)\"", source)) | {"/metrics"}


def test_there_are_commands():
    assert len(COMMANDS) > 20 and {command.split()[0] for _, command in COMMANDS} >= {"make", "python", "curl"}


@pytest.mark.parametrize("document, command", COMMANDS)
def test_commands_name_what_exists(document, command, server_flags, endpoints):
    program, *words = shlex.split(command)
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
        assert words[0] in targets
    elif program == "curl":
        url = next(word for word in words if word.startswith("http://"))
        assert re.fullmatch(r"http://127\.0\.0\.1:30000(/.+)", url)[1] in endpoints
        if "-d" in words:
            json.loads(words[words.index("-d") + 1])
    elif (program, *words[:2])[:2] == ("sglang", "serve") or words[:2] == ["-m", "sglang.launch_server"]:
        assert flags(words) - {"--help"} <= server_flags
    elif program == "python":
        ours = words.index("--") if "--" in words else len(words)  # what follows goes to a server
        check_program(words[:ours])
        assert flags(words[ours + 1 :]) <= server_flags
    elif program == "prometheus":
        assert (REPOSITORY / words[0].removeprefix("--config.file=")).is_file()
    elif program == "sglang-sparse-kv":
        source = "".join(path.read_text() for path in PACKAGE.glob("*.py"))
        assert words[0] in ("plan", "doctor") and all(f'"{flag}"' in source for flag in flags(words))
    elif program == "pip":
        assert words[0] in ("install", "show", "uninstall")
        packages = {"sglang-dualdecoder", "sglang==0.5.17"}
        assert all(word in packages or (REPOSITORY / word / "pyproject.toml").is_file() for word in words[1:])
    else:
        pytest.fail(f"{document} shows {command!r}; teach this test to check it")


def check_program(words: list[str]) -> None:
    """A module or a script of ours, and flags that its source names."""
    if words[:2] == ["-m", "build"]:
        return
    if words[0] == "-m":
        base = REPOSITORY / words[1].replace(".", "/")
        if words[1].startswith("sglang.srt.sparse_kv"):
            base = REPOSITORY / "python" / words[1].replace(".", "/")
        # A command's flags may be in another file of its folder.
        files = sorted((base if base.is_dir() else base.parent).glob("*.py"))
        files = files if base.is_dir() or base.with_suffix(".py").is_file() else []
    else:
        files = [REPOSITORY / words[0]]
    text = "".join(file.read_text() for file in files if file.is_file())
    assert text, f"{words[:2]} is no program of this repository"
    for flag in flags(words):
        assert f'"{flag}"' in text, f"{words[:2]} has no {flag}"


@pytest.mark.parametrize(
    "command",
    sorted({c for _, c in COMMANDS if c.startswith("sglang-sparse-kv plan --model-path") and "[" not in c}),
)
def test_plans_are_made(command, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(command.replace(" MODEL ", " docs/models/llama-3.1-8b.json "))[1:]
    status = main(words)
    said = capsys.readouterr()
    if "70b" in command:  # shown as one that cannot be
        assert status == 1 and said.err.count("\n") == 1
    else:
        assert status == 0 and "requests at once" in said.out


def test_make_help_lists_what_is_shown():
    done = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True)
    listed = set(re.findall(r"^  make ([a-z-]+)", done.stdout, re.MULTILINE))
    shown = {command.split()[1] for _, command in COMMANDS if command.startswith("make ")}
    assert done.returncode == 0 and shown - {"help"} <= listed


def test_make_serve_names_flags_that_exist(server_flags):
    done = subprocess.run(["make", "--dry-run", "serve", "ARGS=--log-level info"], cwd=REPOSITORY, capture_output=True)
    (line,) = re.findall(r"-m sglang\.launch_server .*", done.stdout.decode().replace("\\\n", " "))
    named = flags(shlex.split(line))
    assert {"--sparse-kv", "--device", "--enable-metrics", "--log-level"} <= named <= server_flags


# Who runs what is shown: a test, CI, a dated run on a GPU whose figures the document links to, or the list in
# CONTRIBUTING.md of what is run by hand. The first pattern that matches a command speaks for it.
_UNIT, _E2E, _RESULTS = "test/unit/test_", "test/e2e/test_", "benchmark/results/"
EVIDENCE = (
    (r"curl http", _E2E + "documents.py::test_curl"),
    (r"python examples/(code_agent)\.py", _E2E + "examples.py::test_a_coding_agent_reads_files_and_answers"),
    (r"python examples/(offline)\.py", _E2E + "examples.py::test_offline"),
    (r"python examples/", _E2E + "examples.py::test_from_the_command_line"),
    (r"make (test|check|env)$", ".ci/run"),
    (r"make help$", _UNIT + "docs.py::test_make_help_lists_what_is_shown"),
    (r"make ", "CONTRIBUTING.md"),
    (r"sglang-sparse-kv plan", _UNIT + "docs.py::test_plans_are_made"),
    (r"sglang-sparse-kv doctor", _UNIT + "doctor.py::test_as_a_program_without_a_gpu"),
    (r"python scripts/renew_sizing\.py", _UNIT + "sizing_guide.py::test_the_examples_are_what_the_program_prints"),
    (r"python scripts/doc_tables\.py", _UNIT + "docs.py::test_tables_are_those_of_the_code"),
    (r"python scripts/check_dashboard\.py", _UNIT + "dashboard.py::test_a_panel_without_data_is_noticed"),
    (r"prometheus ", _UNIT + "dashboard.py::test_the_dashboards_names_are_what_prometheus_stores"),
    (r"(python -m sglang\.launch_server|sglang serve) --help", _UNIT + "plugin.py::test_help_shows_the_flags"),
    (r"python -m build", _UNIT + "packaging.py::test_a_source_distribution_is_complete"),
    (r"pip install \.", _UNIT + "packaging.py::test_beside_each_kind_of_installation"),
    (r"pip (show|uninstall) |pip install sglang==", "CONTRIBUTING.md"),
    (r"sglang serve", "CONTRIBUTING.md"),
    (r"python -m sglang\.launch_server", _RESULTS + "2026-11-29-h200-serving-32k-3.json"),
    (r"python -m benchmark\.predictability", _E2E + "predictability.py::test_a_study_of_two_contexts"),
    (r"python -m benchmark\.models\.", _E2E + "benchmark.py::test_a_model_is_inflated_and_checked"),
    (r"python -m benchmark\.soak\.run", _E2E + "soak.py::test_agents_for_a_while"),
    (r"python -m benchmark\.quality\.recall", _UNIT + "recall.py::test_the_command"),
    (r"python -m benchmark\.quality\.grid", _UNIT + "answers.py::test_the_grid_continues_where_it_stopped"),
    (r"python -m benchmark\.quality\.plot", _UNIT + "quality_plot.py::test_the_command"),
    (r"python -m benchmark\.quality\.fidelity", _E2E + "benchmark.py::test_scores_are_compared"),
    (r"python -m benchmark\.serving\.(run|table)", _E2E + "benchmark.py::test_the_benchmark_measures_a_running_server"),
    (r"python -m benchmark\.serving\.plot", _UNIT + "serving_plot.py::test_the_command"),
    (r"python -m benchmark\.serving\.prefill", _E2E + "benchmark.py::test_first_tokens_are_measured"),
    (r"python -m benchmark\.serving\.suite", _UNIT + "suite.py::test_a_cpu_runs_the_small_suite"),
    (r"python -m benchmark\.serving\.load", _E2E + "benchmark.py::test_agents_arrive_at_random"),
    (r"python -m benchmark\.timeline --profile", _UNIT + "timeline.py::test_the_command_converts_a_profile"),
    (r"python -m benchmark\.timeline --url", _E2E + "recorded_steps.py::test_a_running_server_draws_its_steps"),
    (r"python -m benchmark\.memory", _UNIT + "memory.py::test_the_command"),
    (r"python benchmark/kernels\.py", _RESULTS + "2026-11-29-h200-kernels.json"),
    (r"python -m benchmark\.layer_parts", _RESULTS + "2026-12-01-h200-layer-parts.json"),
    (r"python -m benchmark\.prefill_parts", _RESULTS + "2026-12-01-h200-prefill-parts.json"),
)


@pytest.mark.parametrize("document, command", COMMANDS)
def test_somebody_ran_what_is_shown(document, command):
    found = next((where for pattern, where in EVIDENCE if re.match(pattern, command)), None)
    assert found, f"nothing runs {command!r}: have a test run it, or show its dated output on a GPU"
    file, _, function = found.partition("::")
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    if function:
        assert f"def {function}(" in text
    elif file.startswith(_RESULTS):
        shown = (REPOSITORY / document).read_text(encoding="utf-8")
        assert Path(file).name in shown or "results.md" in shown, f"{document} has to link to {file}"
        assert command.split()[2].split(".")[-1] in text, f"{file} is of another command"
    elif file == "CONTRIBUTING.md":
        (by_hand,) = re.findall(r"^## Run by hand$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
        words = " ".join(command.split()[:2])
        assert f"`{words}" in by_hand and re.search(r"\d+ \w+ 20\d\d", by_hand)
    else:  # CI makes the tests, and they the rest
        assert "make test" in text


def test_every_evidence_speaks_for_a_command():
    commands_shown = [command for _, command in COMMANDS]
    seen = {next(p for p, _ in EVIDENCE if re.match(p, command)) for command in commands_shown}
    assert {pattern for pattern, _ in EVIDENCE} == seen


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a\n\n    make test\n    # no\n\nb `make help`", ["make test", "make help"]),
        ("```sh\ncurl http://x \\\n  -d '{}'\n```", ["curl http://x -d '{}'"]),
        ("<!-- `make gone` -->\n`make`", []),
    ],
)
def test_commands_are_found(tmp_path, text, expected):
    file = tmp_path / "a.md"
    file.write_text(text + "\n")
    assert list(commands(file)) == expected
