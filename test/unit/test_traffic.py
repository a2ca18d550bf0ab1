"""What a soak's clients ask, and what they take for a failure."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from benchmark.soak.traffic import Client, Failed, Tally

PIECES = ("one ", "two ", "three ", "four ")


class Scripted(http.server.BaseHTTPRequestHandler):
    """Streams of PIECES, a token each: as `server.incremental` says, the last `server.missing` left out."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        pieces = PIECES[: len(PIECES) - self.server.missing]
        for number, piece in enumerate(pieces, 1):
            text = piece if self.server.incremental else "".join(pieces[:number])
            end = {"type": "length"} if number == len(pieces) else None
            said = {"text": text, "meta_info": {"finish_reason": end, "completion_tokens": number}}
            self.wfile.write(b"data: " + json.dumps(said).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    made.incremental, made.missing = False, 0
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()


def follow(server, incremental: bool) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    client = Client(url, "text " * 20_000, 100, {}, Tally(), 1, incremental=incremental)
    client._few = lambda: len(PIECES)
    client.follow()


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_is_read_to_its_end(server, incremental):
    server.incremental = incremental
    follow(server, incremental)


def test_a_stream_that_takes_back_what_it_said_is_noticed(server):
    server.incremental = True
    with pytest.raises(Failed, match="took back what it had said"):
        follow(server, incremental=False)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_that_lacks_tokens_is_noticed(server, incremental):
    server.incremental, server.missing = incremental, 1
    with pytest.raises(Failed, match="a stream of 4 tokens had 3"):
        follow(server, incremental)
