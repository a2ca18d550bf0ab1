"""The serving benchmark's arithmetic and its file, without a model: a scripted server plays SGLang's part."""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark import corpus
from benchmark.serving import options, policies, prefill, run, server, table
from benchmark.serving.client import Trace, run_streams, window_of
from benchmark.serving.record import Record, difference


def trace(sent, *chunks):
    return Trace(sent, [t for t, _ in chunks], [n for _, n in chunks], cached=7)


def test_window_counts_only_what_all_streams_decode_together():
    early = trace(0.0, (1.0, 1), (2.0, 5), (3.0, 9), (4.0, 13))
    late = trace(0.5, (1.5, 1), (2.5, 5), (3.5, 9), (4.5, 13))
    window = window_of([early, late], warmup=4)
    assert (window.start, window.end) == (2.5, 4.0)
    # Both decode 4 tokens a second; the window's edges fall between chunks of one of them each.
    assert window.tokens == pytest.approx(2 * 4 * 1.5)
    figures = window.summary()
    assert figures["tokens_per_second"] == pytest.approx(8.0)
    assert figures["tpot_ms"] == pytest.approx(250.0)
    assert figures["ttft_s_p50"] == pytest.approx(1.0)
    assert figures["cached_tokens"] == 14


@pytest.mark.parametrize(
    "traces, complaint",
    [
        ([trace(0, (1, 1), (2, 9)), trace(0, (3, 1), (5, 9))], "finished"),
        ([trace(0, (1, 1), (2, 3))], "before its warm-up of 4"),
        ([Trace(error="HTTP 500: no")], "HTTP 500"),
        ([Trace()], "no token came"),
    ],
)
def test_a_window_that_is_none_is_refused(traces, complaint):
    with pytest.raises(ValueError, match=complaint):
        window_of(traces, warmup=4)


def test_difference_of_counters():
    before = {"steps": 3, "total": {"hit": 5, "name": "x"}, "layers": [{"hit": 1}, {"hit": 2}], "on": True}
    after = {"steps": 10, "total": {"hit": 6, "name": "y"}, "layers": [{"hit": 4}, {"hit": 2}], "on": True}
    assert difference(before, after) == {"steps": 7, "total": {"hit": 1}, "layers": [{"hit": 3}, {"hit": 0}]}


class FakeSGLang(BaseHTTPRequestHandler):
    """Streams one token a chunk, counts steps, takes policies; ``server.refuse`` names policies to refuse."""

    def log_message(self, *args):
        pass

    def reply(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        server = self.server
        counters = {"hit": 90 * server.steps, "selected": 100 * server.steps, "missed": 10 * server.steps}
        counters |= {"prefetched": 8 * server.steps, "useful": 4 * server.steps, "evicted": 0}
        counters |= {"bytes_in": 10**6 * server.steps, "stall_seconds": 123e-6 * server.steps}
        sparse = {"steps": server.steps, "total": counters, "policy": {"prefetch": True, "transfer": 0}}
        sparse["plan"] = {"host_bytes": 100, "device_bytes": {"page cache": 50}}
        state = {"effective_max_running_requests_per_dp": 3, "sparse_kv": sparse}
        self.reply({"max_total_num_tokens": 100_000, "internal_states": [state]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        server = self.server
        if self.path == "/set_internal_state":
            server.policies.append(body["server_args"])
            self.reply([body["server_args"]["sparse_kv.prefetch"] != 7])
        elif self.path == "/flush_cache":
            self.reply("flushed")
        else:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            server.prompts.append(body["input_ids"])
            server.arrival = time.monotonic()
            for count in range(1, body["sampling_params"]["max_new_tokens"] + 1):
                meta = {"completion_tokens": count, "cached_tokens": 5}
                self.wfile.write(b"data: " + json.dumps({"text": "x", "meta_info": meta}).encode() + b"\n\n")
                self.wfile.flush()
                time.sleep(0.001)
                # Streams that are sent together decode together, however slow the machine is to connect them.
                while count == 10 and time.monotonic() < server.arrival + 0.3:
                    time.sleep(0.01)
                with server.lock:
                    server.steps += 1
            self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def fake():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeSGLang)
    server.steps, server.policies, server.prompts, server.lock = 0, [], [], threading.Lock()
    server.arrival = 0.0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    server.server_close()


def test_streams_are_read_and_probed(fake):
    async def probe():
        return "seen"

    sampling = {"max_new_tokens": 40}
    traces, before, after = asyncio.run(run_streams(fake.url, [[1, 2], [3]], sampling, 4, probe))
    assert [t.tokens[-1] for t in traces] == [40, 40] and all(t.error is None for t in traces)
    assert [t.cached for t in traces] == [5, 5] and before == "seen" and after == "seen"
    assert all(earlier < later for t in traces for earlier, later in zip(t.tokens, t.tokens[1:], strict=False))


def test_a_dead_server_is_an_error_and_no_exception():
    async def probe():
        return None

    traces, _, _ = asyncio.run(run_streams("http://127.0.0.1:9", [[1]], {"max_new_tokens": 4}, 1, probe))
    assert "ClientConnectorError" in traces[0].error


class Words:
    def encode(self, text, **kwargs):
        return [len(word) for word in text.split()]


def measure(fake, tmp_path, monkeypatch, *arguments):
    texts = tmp_path / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "a.txt").write_text("some words and more words " * 30)
    monkeypatch.setattr(run, "plain_tokenizer", lambda model: Words())
    given = ["--model", "m", "--output", str(tmp_path / "result.json"), "--text", str(texts), "--url", fake.url]
    given += ["--variants", "sparse", "--lengths", "64", "--tokens", "60", "--warmup", "4", "--device", "cpu"]
    status = run.main([*given, *arguments])
    return status, json.loads((tmp_path / "result.json").read_text())


def test_a_whole_run_its_file_and_its_table(fake, tmp_path, monkeypatch, capsys):
    arguments = ("--batches", "1", "2", "8", "max", "--policies", "default", "on_demand", "prefetch=7", "nonsense=1")
    status, data = measure(fake, tmp_path, monkeypatch, *arguments)
    assert status == 0
    cells = {(c["policy"], c["batch"]): c for c in data["cells"]}
    assert len(cells) == 16
    assert cells["default", 8]["skipped"] == "holds 3 requests"
    assert cells["default", "max"]["streams"] == 3 and cells["default", 1]["tokens_per_second"] > 0
    assert cells["default", 1]["not_exercised"] == ["evicted"]
    assert "refused" in cells["prefetch=7", 1]["failed"]
    assert "no policy nonsense" in cells["nonsense=1", 1]["failed"]
    assert {len(prompt) for prompt in fake.prompts} == {64}
    assert fake.policies[0] == {"sparse_kv.prefetch": 1, "sparse_kv.transfer": 0}
    assert data["runs"][0]["servers"][0]["cold_ttft_s_64"] >= 0

    assert table.main([str(tmp_path / "result.json")]) == 0
    printed = capsys.readouterr().out
    assert "host KV only 2.0 x cache" in printed and "not exercised: evicted" in printed
    rows = [dict(zip(table.HEAD, row, strict=True)) for row in table.rows(Record(tmp_path / "result.json"), 64)]
    assert {row["stalled µs"] for row in rows if row["tok/s"] != "-"} == {"123"}
    assert {row["exposed µs"] for row in rows} == {"-"}, "there is no oracle to compare with"
    assert "90.0" in printed and "holds 3 requests" in printed

    # A second command measures nothing again except what had failed.
    fake.prompts.clear()
    status, again = measure(fake, tmp_path, monkeypatch, *arguments[:-2])
    assert status == 0 and not fake.prompts and len(again["runs"]) == 2
    assert [c["run"] for c in again["cells"] if c["policy"] == "default"] == [0, 0, 0, 0]


def test_a_policy_may_be_for_some_batches_and_lengths_only(tmp_path):
    asked = [
        "--model",
        "m",
        "--output",
        str(tmp_path / "result.json"),
        "--lengths",
        "64",
        "128",
        "--batches",
        "1",
        "8",
        "max",
    ]
    chosen = options.parse([*asked, "--policies", "default", "on_demand@8+max", "oracle@1@128", "one_row@@64"])
    chosen.text = tmp_path
    (tmp_path / "text.txt").write_text("words " * 200)
    cells = run.Benchmark(chosen, None).cells("sparse", None)
    found = {
        (c["policy"], c["length"]): [
            d["batch"] for d in cells if (d["policy"], d["length"]) == (c["policy"], c["length"])
        ]
        for c in cells
    }
    assert found == {
        ("default", 64): [1, 8, "max"],
        ("on_demand", 64): [8, "max"],
        ("one_row", 64): [1, 8, "max"],
        ("default", 128): [1, 8, "max"],
        ("on_demand", 128): [8, "max"],
        ("oracle", 128): [1],
    }


def test_plain_sglang_with_its_host_cache(tmp_path, capsys):
    asked = ["--model", "m", "--output", str(tmp_path / "result.json"), "--variants", "hicache", "--host-memory"]
    command = options.command(options.parse([*asked, "48GB"]), "hicache")
    own = ["--enable-hierarchical-cache", "--hicache-size", "48", *options.HICACHE]
    assert command[-len(own) :] == own and "--sparse-kv" not in command
    with pytest.raises(SystemExit):
        options.parse([*asked, "auto"])
    assert "whole GB" in capsys.readouterr().err
    # 100 tokens on the GPU: four more prompts of 30 push the first out; there are not eleven of 10.
    measured = prefill.Measurement("", {}, None, room=100)
    prompts = [[i] * 30 for i in range(8)]
    assert measured.pushing_out(prompts) == prompts[1:5]
    assert measured.pushing_out([[i] * 10 for i in range(8)]) == []


def test_it_stops_in_time_and_says_so(fake, tmp_path, monkeypatch, capsys):
    status, data = measure(fake, tmp_path, monkeypatch, "--seconds", "0.1")
    assert status == 3 and "run the same command again" in capsys.readouterr().err and data["cells"] == []


@pytest.mark.parametrize(
    "arguments", [["--batches", "none"], ["--policies", "good"], ["--warmup", "60"], ["--variants", "dense", "sparse"]]
)
def test_bad_arguments_are_refused(fake, tmp_path, monkeypatch, arguments):
    try:
        status, _ = measure(fake, tmp_path, monkeypatch, *arguments)
    except (SystemExit, FileNotFoundError):
        return
    assert status == 2


def test_the_memory_cap_becomes_a_fraction(monkeypatch):
    chosen = options.parse(["--model", "m", "--output", "x", "--cap-gb", "40", "--reserve-gb", "4"])
    monkeypatch.setattr("benchmark.serving.server.gpu_total_bytes", lambda: 141 * 10**9)
    assert options.memory_fraction(chosen) == pytest.approx(36 / 140.3)
    command = options.command(chosen, "one_row")
    assert json.loads(command[command.index("--sparse-kv-config") + 1]) == {"debug": True, "guide": "none"}
    assert "--sparse-kv" not in options.command(chosen, "dense")


def test_plain_sglang_starts_as_it_is_fastest():
    chosen = options.parse(["--model", "m", "--output", "x", "--host-memory", "48GB"])
    eager = {name for name in options.VARIANTS if "--disable-prefill-cuda-graph" in options.command(chosen, name)}
    assert eager == {"dense", "hicache"}


PROGRAM = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

print("listening", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ready).serve_forever()
"""


def test_a_server_is_left_and_taken_over_and_replaced(tmp_path):
    said = []
    command = [sys.executable, "-c", PROGRAM]
    with server.Server(command, tmp_path, {}, said.append) as first:
        first.keep = True
    assert psutil.pid_exists(first._pid)
    with server.Server(command, tmp_path, {}, said.append) as second:
        assert second.url == first.url and said[-2].startswith("taking over")
        assert server.taken(second.memory.pid)[0][0] > 0
        second.keep = True
    with server.Server([*command, "--other"], tmp_path, {}, said.append) as third:
        assert third.url != first.url and any("started otherwise" in text for text in said)
    assert not psutil.pid_exists(third._pid) and not (tmp_path / "server.json").exists()
    first._process.wait(5)


def test_a_server_that_ends_is_reported_with_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="status 3:\nno such model"):
        server.Server([sys.executable, "-c", "print('no such model'); exit(3)"], tmp_path, {}, lambda text: None)


def test_a_gpu_that_an_ended_process_still_holds_is_waited_for(monkeypatch):
    answers, said = iter(["6000", "6000", "100"]), []
    monkeypatch.setattr(server, "nvidia_smi", lambda query: [["5"], [next(answers)]])
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    server.wait_for_gpus(said.append)
    assert not said and next(answers, None) is None
    monkeypatch.setattr(server, "nvidia_smi", lambda query: [["6000"]])
    server.wait_for_gpus(said.append, seconds=0)
    assert said == ["6.3 GB of a GPU are in use by others"]
    monkeypatch.setattr(server, "nvidia_smi", lambda query: None)
    server.wait_for_gpus(said.append, seconds=0)
    assert len(said) == 1


def test_only_the_gpus_of_this_process_are_looked_at(monkeypatch, tmp_path):
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for visible, wanted in (("", False), ("1,3", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (row,) = server.nvidia_smi("--query-gpu=memory.used")
        assert ("--id=1" in " ".join(row)) == wanted


def test_memory_is_watched_on_each_gpu(monkeypatch):
    rows = [["7", "100", "b"], ["8", "200", "a"], ["8", "1", "b"], ["99", "5000", "a"]]
    monkeypatch.setattr(server, "_family", lambda pid: {7, 8})
    monkeypatch.setattr(server, "nvidia_smi", lambda query: rows)
    watch = server.MemoryWatch(7, seconds=0.01)
    while not watch.peaks:
        time.sleep(0.01)
    rows = [["7", "90", "b"], ["8", "300", "a"]]
    while watch.peak != 300 << 20:
        time.sleep(0.01)
    watch.stop()
    assert watch.peaks == [300 << 20, 101 << 20] and watch.source == "process"


def test_a_port_is_free_and_none_that_connections_get(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server.free_port()))
        port = taken.getsockname()[1]
        assert 15000 <= port < 32000
        draws = [[port, port + 1], [port]]
        monkeypatch.setattr(server.random.SystemRandom, "sample", lambda self, ports, count: draws.pop(0))
        assert server.free_port() == port + 1
        with pytest.raises(RuntimeError, match="none of 100 ports"):
            server.free_port()


def test_earlier_files_are_merged(tmp_path):
    cell = {"variant": "dense", "length": 8, "policy": "default", "batch": 1, "temperature": 0.0}
    for name, rate in (("a", 1.0), ("b", 2.0)):
        record = Record(tmp_path / f"{name}.json")
        record.begin({}, "digest", ["--output", name])
        assert record.data["runs"][-1]["command"] == f"python -m benchmark.serving.run --output {name}"
        record.add({**cell, "tokens_per_second": rate})
        if name == "b":
            record.add({**cell, "batch": 2, "tokens_per_second": rate})
    merged = Record(tmp_path / "a.json", [tmp_path / "b.json"])
    assert [(c["batch"], c["tokens_per_second"], c["run"]) for c in merged.data["cells"]] == [(1, 1.0, 0), (2, 2.0, 1)]


def test_every_policy_of_the_table_resolves():
    for name in policies.TABLE:
        assert policies.resolve(name) == policies.TABLE[name]
    assert policies.resolve("prefetch=0,transfer=oracle") == {"prefetch": 0.0, "transfer": "oracle"}
    with pytest.raises(ValueError, match="is no policy"):
        policies.resolve("fast")


def test_the_tokenizer_is_that_of_transformers(demo_model):
    from transformers import AutoTokenizer

    ours, theirs = corpus.plain_tokenizer(demo_model), AutoTokenizer.from_pretrained(demo_model)
    text = "def f(x):\n\treturn 12345 + x  # naïve? <|im_start|> 漢字\n"
    for special in (False, True):
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)
