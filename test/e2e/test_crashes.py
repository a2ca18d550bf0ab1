"""A server that ends by accident: nothing of it is left, and nobody waits for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
from serving import Kind, Server, free_port
from texts import excerpt

pytestmark = pytest.mark.slow

ENDED = 90  # seconds for a server to be gone
HOST_MEMORY = 1 << 30
KIND = Kind(
    ("--max-running-requests", "4"),
    {"budget": 128, "debug": True, "cache_memory": "50MB", "host_memory": HOST_MEMORY},
    model="qwen2",
)
PROMPT = excerpt("tale", 1200, 700)


class Victim:
    """A server with one request running, which it can lose."""

    def __init__(self, server: Server):
        self.server = server
        self.main = server.process
        self.family = [psutil.Process(self.main.pid), *psutil.Process(self.main.pid).children(recursive=True)]
        self.outcome: list[object] = []
        stream = server.stream(PROMPT, 2000, "running", ignore_eos=True)
        next(stream)
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def _read(self, stream: Iterator[dict]) -> None:
        try:
            self.outcome.append([*stream][-1]["meta_info"]["finish_reason"]["type"])
        except Exception as error:
            self.outcome.append(error)

    @property
    def scheduler(self) -> psutil.Process:
        (found,) = [process for process in self.family if "scheduler" in " ".join(process.cmdline())]
        return found

    def gone(self) -> int:
        """Waits for the end, asserts that it is one, and returns the status."""
        gone, alive = psutil.wait_procs([process for process in self.family if process.pid != self.main.pid], ENDED)
        status = self.main.wait(ENDED)
        assert not alive, f"{[process.name() for process in alive]} live on"
        self._reader.join(10)
        assert not self._reader.is_alive(), "the client of a dead server waits"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind(("127.0.0.1", self.server.port))
        return status


@pytest.fixture(scope="module")
def start(demo_model: str, tmp_path_factory) -> Iterator[Callable[[], Server]]:
    """Starts a server on the one port; all of them answer alike."""
    folder, servers, answers, port = tmp_path_factory.mktemp("victims"), [], [], free_port()

    def go() -> Server:
        servers.append(Server(f"victim-{len(servers)}", KIND, demo_model, folder, port))
        answers.append(servers[-1].ask(PROMPT, 24).ids)
        assert answers[-1] == answers[0], "after another one's end it answers otherwise"
        return servers[-1]

    yield go
    for server in servers:
        server.stop()


def test_the_scheduler_is_killed(start):
    """As the kernel does when memory runs out."""
    victim = Victim(start())
    victim.scheduler.kill()
    assert victim.gone() != 0
    assert victim.outcome and victim.outcome != ["length"], "the client took it for an answer"
