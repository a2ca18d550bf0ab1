"""Documents say what the code says: tables, links, and every command that they show."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from doc_commands import COMMANDS, DOCUMENTS, REPOSITORY, commands, name
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402

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
