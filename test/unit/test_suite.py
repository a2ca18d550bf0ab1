"""All serving benchmarks in one command: what is asked of whom, in which order, what a second command leaves out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmark.serving import load, options, suite

PLAN = suite.SUITES["h200"]


class Servers:
    """In place of `server.Server`: notes what was started, and what stays."""

    def __init__(self, left=None):
        self.started, self.left, self.memory = [], left, SimpleNamespace(peak=3e9, source="process")

    def __call__(self, command, folder, environment, say):
        self.command, self.url, self.start_seconds, self.keep = command, "http://none", 7.0, False
        self.taken_over = self.left == command
        self.started.append((command, self.taken_over))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.left = self.command if self.keep else None


@pytest.fixture
def asked(monkeypatch):
    """Arguments of each command that ran; `answer` decides with what status."""
    found = SimpleNamespace(argvs=[], warm=0, answer=lambda name, argv: 0)
    monkeypatch.setattr(suite.Suite, "_warm_up", lambda self, url, chosen: setattr(found, "warm", found.warm + 1))
    monkeypatch.setattr(suite.run, "rates", lambda: {"link_bytes_per_second": 55e9, "launch_us": 7.0})
    monkeypatch.setattr(options, "memory_fraction", lambda chosen: 0.25)
    return found


def command(tmp_path, asked, servers, *more, name="h200"):
    def asks(kind):
        def main(argv):
            asked.argvs.append((kind, argv))
            return asked.answer(kind, argv)

        return main

    chosen = suite.parse([name, "--model", "MODEL", "--folder", str(tmp_path), *more])
    return suite.Suite(chosen, suite.SUITES[name], {kind: asks(kind) for kind in suite.COMMANDS}, servers).run()


def value(argv, flag):
    return argv[argv.index(flag) + 1 :][0]


def test_each_server_is_started_once_and_asked_everything(tmp_path, asked):
    servers = Servers()
    assert command(tmp_path, asked, servers) == 0
    assert len(servers.started) == asked.warm == len(PLAN["variants"]) and servers.left is None
    of = [(value(argv, "--variants"), kind) for kind, argv in asked.argvs]
    expected = [
        (variant, step["command"]) for variant in PLAN["variants"] for step in PLAN["steps"].values() if variant in step
    ]
    assert of == expected and len(of) >= 10
    state = json.loads((tmp_path / "suite.json").read_text())
    assert len(state["done"]) == len(of) and state["failed"] == []
    assert state["servers"]["dense"]["peak_memory_gb"] == 3.0
    again = Servers()
    assert command(tmp_path, asked, again) == 0 and again.started == []


@pytest.mark.parametrize("name", suite.SUITES)
def test_every_step_is_understood_by_its_command(name, tmp_path, asked):
    assert command(tmp_path, asked, Servers(), name=name) == 0
    for kind, argv in asked.argvs:
        if kind == "load":
            chosen, workload = load.parse(argv)
            assert workload.longest < chosen.context and chosen.patience > 0
        else:
            chosen = options.parse(argv)
            assert max(chosen.lengths) + chosen.tokens < chosen.context
        assert chosen.url == "http://none" and chosen.variants == [value(argv, "--variants")]


def test_out_of_time_the_server_stays_and_the_next_command_goes_on(tmp_path, asked):
    servers = Servers()
    asked.answer = lambda kind, argv: suite.OUT_OF_TIME if kind == "prefill" else 0
    assert command(tmp_path, asked, servers) == suite.OUT_OF_TIME
    assert [kind for kind, _ in asked.argvs] == ["run", "prefill"] and servers.left == servers.started[0][0]
    asked.answer, asked.argvs = (lambda kind, argv: 0), []
    assert command(tmp_path, asked, servers) == 0
    assert servers.started[1] == (servers.started[0][0], True) and asked.argvs[0][0] == "prefill"
    assert asked.warm == len(PLAN["variants"])


def test_what_cannot_be_begun_in_time_is_not_begun(tmp_path, asked):
    servers = Servers()
    assert command(tmp_path, asked, servers, "--seconds", "20") == suite.OUT_OF_TIME
    assert servers.started == [] and asked.argvs == []


def test_a_step_that_fails_is_told_and_the_others_go_on(tmp_path, asked):
    def answer(kind, argv):
        if kind == "prefill" and value(argv, "--variants") == "dense":
            raise ConnectionError("gone")
        return 1 if kind == "load" else 0

    asked.answer = answer
    assert command(tmp_path, asked, Servers(), "--variants", "dense", "--steps", "decode", "first", "agents") == 1
    state = json.loads((tmp_path / "suite.json").read_text())
    assert state["done"] == ["decode dense"]
    assert state["failed"] == [["first dense", "status ConnectionError gone"], ["agents dense", "status 1"]]


def test_a_step_that_no_suite_has_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        suite.parse(["cpu", "--model", "MODEL", "--folder", str(tmp_path), "--steps", "speed"])
    assert "--steps has speed; the suite has decode, first, shared" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cpu_runs_the_small_suite(demo_model, tmp_path):
    assert suite.main(["cpu", "--model", demo_model, "--folder", str(tmp_path), "--seconds", "900"]) == 0
    state = json.loads((tmp_path / "suite.json").read_text())
    steps = suite.SUITES["cpu"]["steps"]
    assert state["done"] == [f"{name} {variant}" for variant in ("sparse", "dense") for name in steps]
    cells = json.loads((tmp_path / "decode.json").read_text())["cells"]
    assert [(cell["variant"], cell["policy"], cell["batch"]) for cell in cells] == [
        ("sparse", "default", 1),
        ("sparse", "default", 2),
        ("sparse", "on_demand", 2),
        ("dense", "default", 1),
        ("dense", "default", 2),
    ]
    assert all(cell["tokens_per_second"] > 0 for cell in cells)
    assert {cell["variant"] for cell in json.loads((tmp_path / "shared.json").read_text())["cells"]} == {
        "sparse",
        "dense",
    }
    for variant in ("sparse", "dense"):
        assert variant in json.loads((tmp_path / f"first-{variant}.json").read_text())["variants"]
