"""Serving under load: what arrives, and the arithmetic of what came back; the client itself runs end to end."""

from __future__ import annotations

import http.server
import json
import threading
import time
from xml.etree import ElementTree

import pytest

from benchmark.corpus import Corpus
from benchmark.serving import load
from benchmark.serving.workloads import QUESTION, Workload


class Letters:
    def encode(self, text, **kwargs):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


AGENTS = Workload("agents", sessions=3, answer=10, first=400, shared=100, turns=3, later=50)


def test_agents_share_a_system_prompt_and_nothing_else(tmp_path):
    arguments = AGENTS.arguments(Letters(), tmp_path, Corpus())
    assert arguments[:4] == ["--backend", "sglang-oai-chat", "--dataset-name", "agentic-trace"]
    conversations = json.loads((tmp_path / "agents.json").read_text())["conversations"]
    assert len(conversations) == 3 and {len(turns) for turns in conversations} == {3}
    systems, firsts = set(), set()
    for turns in conversations:
        roles = [[message["role"] for message in turn["messages"]] for turn in turns]
        assert roles == [["system", "user"], ["user"], ["user"]]
        systems.add(turns[0]["messages"][0]["content"])
        firsts.add(turns[0]["messages"][1]["content"][:60])
        sizes = [len(turn["messages"][-1]["content"]) - len(QUESTION) for turn in turns]
        assert sizes == [400, 50, 50] and len(turns[0]["messages"][0]["content"]) == 100
    assert len(systems) == 1 and len(firsts) == 3
    assert AGENTS.kept == 3 * (400 + 2 * 50 + 3 * 10) + 100
    assert AGENTS.longest >= 100 + 400 + 2 * 50 + 3 * 10


def test_other_workloads_are_made_by_the_client(tmp_path):
    random = Workload("random", 6, 10, 400).arguments(Letters(), tmp_path, Corpus())
    assert "random-ids" in random and random[random.index("--random-input-len") + 1] == "400"
    shared = Workload("shared", 6, 10, 40, shared=300, groups=2)
    arguments = shared.arguments(Letters(), tmp_path, Corpus())
    assert arguments[arguments.index("--gsp-prompts-per-group") + 1] == "3"
    assert shared.kept == 6 * 50 + 2 * 300
    with pytest.raises(ValueError, match="7 sessions do not divide into 2"):
        Workload("shared", 7, 10, 40, shared=300, groups=2).arguments(Letters(), tmp_path, Corpus())
    with pytest.raises(ValueError, match="is no workload"):
        Workload("chat", 7, 10, 40).arguments(Letters(), tmp_path, Corpus())


def test_quantiles():
    values = [float(value) for value in range(100, 0, -1)]
    assert load.quantile(values, 0.99) == 99 and load.quantile(values, 0.5) == 50
    assert load.quantile([3.0], 0.99) == 3 and load.quantile([1.0, 2.0], 0.5) == 1


# Two sessions of two turns; the second one's second turn takes 70 s.
FOUND = {
    "errors": ["", "", "", ""],
    "ttfts": [1.0, 0.5, 2.0, 10.0],
    "itls": [[0.1, 0.3], [0.2, 0.2], [1.0, 1.0], [30.0, 30.0]],
    "output_lens": [3, 3, 5, 5],
    "cached_tokens": [0, 100, 20, 300],
    "duration": 80.0,
    "max_concurrent_requests": 2,
    "client": "python -m sglang.bench_serving",
}


def test_figures_of_a_run():
    cell = load.figures(FOUND, 2, limit=60)
    assert cell["completion_s_p50"] == pytest.approx(1.4) and cell["completion_s_p99"] == pytest.approx(70)
    assert cell["tpot_ms_p50"] == pytest.approx(200) and cell["tpot_ms_p99"] == pytest.approx(15000)
    assert cell["session_s_p50"] == pytest.approx(1.4 + 0.9) and cell["session_s_p99"] == pytest.approx(74)
    assert cell["goodput_rps"] == pytest.approx(3 / 80) and cell["p99_within_limit"] is False
    assert cell["output_tokens_per_second"] == pytest.approx(16 / 80)
    assert [turn["cached_tokens"] for turn in cell["turns"]] == [10, 200]
    assert [turn["ttft_s_p99"] for turn in cell["turns"]] == [2.0, 10.0]
    assert load.figures(FOUND, 2, limit=70)["p99_within_limit"] is True
    with pytest.raises(ValueError, match="1 of 4 requests failed: no memory"):
        load.figures({**FOUND, "errors": ["", "no memory", "", ""]}, 2, 60)


def state(steps: int, cache: int) -> dict:
    total = {"evicted": steps, "useful": steps, "missed": 0}
    plan = {"device_bytes": {"page cache": cache}, "host_bytes": 8000, "host_tokens": 1000}
    return {"sparse_kv": {"steps": steps, "total": total, "plan": plan, "policy": {"prefetch": True}}}


@pytest.fixture
def scripted(monkeypatch):
    states = iter([state(1, 100), state(5, 100), state(5, 4000), state(9, 4000)] * 2)
    monkeypatch.setattr(load.server, "state", lambda url: next(states))
    monkeypatch.setattr(load, "plain_tokenizer", lambda folder: Letters())
    sent = []

    def send(url, workload, rate, chosen, fixed):
        sent.append((workload, rate, fixed))
        if rate == 9:
            raise RuntimeError("the client ended with status 1")
        return FOUND

    monkeypatch.setattr(load, "send", send)
    return sent


def test_the_command(scripted, tmp_path, capsys):
    arguments = ["--model", "m", "--output", str(tmp_path / "load.json"), "--url", "http://x", "--variants", "sparse"]
    arguments += ["--sessions", "2", "--turns", "2", "--first", "100", "--shared", "20", "--later", "10"]
    arguments += ["--answer", "5", "--logs", str(tmp_path), "--svg", str(tmp_path / "load.svg")]
    assert load.main([*arguments, "--rates", "0.5", "2"]) == 0
    data = json.loads((tmp_path / "load.json").read_text())
    first, second = data["cells"]
    assert first["counters"] == {"steps": 4, "total": {"evicted": 4, "useful": 4, "missed": 0}}
    assert first["kept_over_cache"] == pytest.approx(min(2 * (100 + 10 + 10) + 20, 1000) * 8 / 100)
    assert first["not_exercised"] == ["missed"] and second["not_exercised"] == ["missed", "4 x the cache"]
    assert data["runs"][0]["machine"]["cores"] and data["runs"][0]["seed"] == 0
    printed = capsys.readouterr().out
    assert "not exercised: 4 x the cache" in printed and printed.count("agents") == 6
    assert len(ElementTree.parse(tmp_path / "load.svg").findall("{*}polyline")) == 1
    # Measured cells are not measured again; one that fails ends the command with a sentence.
    assert load.main([*arguments, "--rates", "2", "9"]) == 1
    assert [rate for _, rate, _ in scripted] == [0.5, 2, 9]
    assert "sparse: the client ended with status 1" in capsys.readouterr().err


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers a chat with five tokens, one every 10 ms, and counts what it was asked."""

    def reply(self, body: str, kind: str = "application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        state = {"internal_states": [{}], "max_total_num_tokens": 1000}
        self.reply(json.dumps({"data": [{"id": "m"}]} if self.path == "/v1/models" else state))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/flush_cache":
            self.server.flushed = len(self.server.asked)
            return self.reply("{}")
        self.server.asked.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for n in range(5):
            time.sleep(0.01)
            part = {"choices": [{"index": 0, "delta": {"content": f" t{n}"}}], "usage": {"completion_tokens": n + 1}}
            part["sglext"] = {"cached_tokens_details": {"device": 10 * len(body["messages"])}}
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_the_client_is_told_what_it_understands(demo_model, tmp_path):
    """SGLang's own client sends our agents, turn by turn, and what it writes down is what is read."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.asked, server.flushed = [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    arguments = ["--model", demo_model, "--output", str(tmp_path / "load.json"), "--variants", "dense", "--logs"]
    arguments += [str(tmp_path), "--url", f"http://127.0.0.1:{server.server_port}", "--sessions", "2", "--turns", "2"]
    sizes = ["--shared", "64", "--first", "96", "--later", "16", "--answer", "5", "--rates", "20"]
    status = load.main([*arguments, *sizes, "--temperature", "0.6"])
    server.shutdown()
    assert status == 0
    (cell,) = json.loads((tmp_path / "load.json").read_text())["cells"]
    assert cell["requests"] == 4 and 0.01 <= cell["ttft_s_p50"] <= cell["completion_s_p99"]
    assert [turn["cached_tokens"] for turn in cell["turns"]] == [20, 40]  # system and user; then answer and user
    asked = server.asked[server.flushed :]
    assert len(asked) == 4 and all(body["temperature"] == 0.6 and body["ignore_eos"] for body in asked)
    assert {body["max_completion_tokens"] for body in asked} == {5}
    (later,) = (body["messages"] for body in asked[-1:])
    assert [message["role"] for message in later] == ["system", "user", "assistant", "user"]
    assert later[2]["content"] == " t0 t1 t2 t3 t4"
