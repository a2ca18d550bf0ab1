"""Servers that end, by order or by accident: nothing of them is left, nobody waits for them, and the next one starts.

All of them use one port, one after another, so that each start shows what the end before it left behind.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests
import tiny_models
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

    def __init__(self, server: Server, tokens: int = 2000):
        self.server = server
        self.main = server.process
        self.family = [psutil.Process(self.main.pid), *psutil.Process(self.main.pid).children(recursive=True)]
        self.outcome: list[object] = []
        stream = server.stream(PROMPT, tokens, "running", ignore_eos=True)
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

    def shared_memory(self) -> set[str]:
        """Files of /dev/shm that its processes have mapped, but for the page of its load that SGLang leaves behind."""
        return {
            entry.path
            for process in self.family
            for entry in process.memory_maps(grouped=True)
            if entry.path.startswith("/dev/shm/") and "sglang_loads" not in entry.path
        }

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
        for server in servers:
            server.stop()  # those that a failed test left
        servers.append(Server(f"victim-{len(servers)}", KIND, demo_model, folder, port))
        answers.append(servers[-1].ask(PROMPT, 24).ids)
        assert answers[-1] == answers[0], "after another one's end it answers otherwise"
        return servers[-1]

    yield go
    for server in servers:
        server.stop()


def test_terminated(start):
    """SIGTERM: requests are answered to their end, then everything goes, the host pool first of all."""
    victim = Victim(start(), 400)
    shared = victim.shared_memory()
    held = sum(process.memory_info().rss for process in victim.family)
    assert held > HOST_MEMORY
    os.kill(victim.main.pid, signal.SIGTERM)
    victim.gone()
    assert victim.outcome == ["length"], victim.outcome
    assert not [path for path in shared if os.path.exists(path)], "shared memory is left"


def test_the_scheduler_is_killed(start):
    """As the kernel does when memory runs out."""
    victim = Victim(start())
    victim.scheduler.kill()
    assert victim.gone() != 0
    assert victim.outcome and victim.outcome != ["length"], "the client took it for an answer"


def test_the_launcher_is_killed(start):
    """Nobody is told; the children notice that they are alone."""
    victim = Victim(start())
    victim.main.kill()
    assert victim.gone() == -signal.SIGKILL
    assert victim.outcome and victim.outcome != ["length"]


def test_memory_runs_out_in_a_prefill(start):
    victim = Victim(start())
    scheduler = victim.scheduler
    size = scheduler.memory_info().vms
    resource.prlimit(scheduler.pid, resource.RLIMIT_AS, (size + (1 << 20), size + (1 << 20)))
    with pytest.raises((RuntimeError, requests.RequestException)):
        # Logprobs of a chunk's tokens are 100 MB at once; everything else fits what was freed before.
        victim.server.ask(excerpt("code", 9000), 4, return_logprob=True, logprob_start_len=0)
    assert victim.gone() != 0
    log = victim.server.log()
    assert "allocate memory" in log or "bad_alloc" in log or "MemoryError" in log, log[-2000:]


def test_the_link_breaks(start):
    """No copy from host memory succeeds any more: the server says so and ends, and nobody is told a wrong text."""
    server = start()
    server.policy(transfer="broken")
    victim_ids = None
    with pytest.raises((RuntimeError, requests.RequestException)):
        victim_ids = server.ask(PROMPT + " And then", 24).ids
    assert victim_ids is None and server.process.wait(ENDED) != 0
    assert "a copy from host memory failed 16 times in a row" in server.log()


@pytest.mark.parametrize("how", ["the scheduler dies", "terminated"])
def test_a_start_that_ends_half_way(start, demo_model: str, tmp_path: Path, how: str):
    """Between the start of the scheduler and the first answer."""
    command = KIND.command(tiny_models.make("qwen2", tmp_path, demo_model), free_port())
    with (tmp_path / "log").open("w") as log:
        main = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        family = psutil.Process(main.pid)
        give_up = time.monotonic() + 120
        while not (found := [p for p in family.children(True) if "scheduler" in " ".join(p.cmdline())]):
            assert time.monotonic() < give_up and main.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.05)
        children = family.children(recursive=True)
        if how == "terminated":
            main.terminate()
        else:
            found[0].kill()
        assert main.wait(ENDED) != 0
        _, alive = psutil.wait_procs(children, ENDED)
        assert not alive, f"{[process.name() for process in alive]} live on"
    finally:
        if main.poll() is None:
            os.killpg(main.pid, signal.SIGKILL)
    assert start().ask("Once upon a time", 4).ids
