"""Servers of a benchmark: started as a user would, watched for the memory they take, stopped as a group."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import requests

READY_SECONDS = 480
LEAVING_SECONDS = 30  # for what an ended process held of a GPU
UNUSED_BYTES = 1 << 30  # of a GPU in use, below which nobody is on it
GIB = 1 << 30


class Server:
    """One ``launch_server`` process group, on a free port of this machine.

    A server may be left running by one command and taken over by the next, if both ask for the same: starting
    one and prefilling its prompts takes minutes.

    Args:
        command: command line without the port.
        folder: where its log goes, and the note by which a later command finds it.
        environment: added to the inherited one.
        say: told about progress.

    Raises:
        RuntimeError: it ended, or did not answer within READY_SECONDS; the text holds the end of its log.
    """

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str], say: Callable[[str], None]):
        folder.mkdir(parents=True, exist_ok=True)
        self.command, self.log, self._note = command, folder / "server.log", folder / "server.json"
        self.keep = False
        self._process: subprocess.Popen | None = None
        left = self._left_running()
        self.taken_over = left is not None and left["command"] == command
        if left is not None and self.taken_over:
            say(f"taking over the server with pid {left['pid']}")
            self.url, self._pid = left["url"], left["pid"]
        else:
            if left is not None:
                say(f"stopping the server with pid {left['pid']}, which was started otherwise")
                _end_group(left["pid"])
            self._start(environment, say)
        self.memory = MemoryWatch(self._pid)
        try:
            self.start_seconds = self._wait(say)
        except BaseException:
            self.stop()
            raise

    def _left_running(self) -> dict[str, Any] | None:
        if not self._note.is_file():
            return None
        left = json.loads(self._note.read_text())
        try:
            # The time tells it from a stranger that was given the same number later.
            same = abs(psutil.Process(left["pid"]).create_time() - left["created"]) < 1
        except psutil.Error:
            return None
        return left if same else None

    def _start(self, environment: dict[str, str], say: Callable[[str], None]) -> None:
        wait_for_gpus(say)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        say(f"starting {shlex.join(self.command)}")
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                [*self.command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._pid = self._process.pid
        created = psutil.Process(self._pid).create_time()
        note = {"pid": self._pid, "created": created, "url": self.url, "command": self.command}
        self._note.write_text(json.dumps(note))

    def _wait(self, say: Callable[[str], None]) -> float:
        start = last = time.monotonic()
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health_generate", timeout=30).status_code == 200:
                    say(f"ready after {time.monotonic() - start:.0f} s")
                    return time.monotonic() - start
            self.check_alive()
            now = time.monotonic()
            if now - start > READY_SECONDS:
                raise RuntimeError(f"the server gave no answer within {READY_SECONDS} s:\n{self.tail()}")
            if now - last > 15:
                say(f"waiting for the server, {now - start:.0f} s: {self.tail(1)[:150]}")
                last = now
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raise RuntimeError if the process has ended."""
        if self._process is None:
            if not psutil.pid_exists(self._pid):
                raise RuntimeError(f"the server ended:\n{self.tail()}")
        elif self._process.poll() is not None:
            raise RuntimeError(f"the server ended with status {self._process.returncode}:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line[:500] for line in text)

    def stop(self) -> None:
        """End the whole group, or leave it to a later command if ``keep`` is set."""
        self.memory.stop()
        if self.keep:
            return
        _end_group(self._pid)
        if self._process is not None:
            self._process.wait()
        self._note.unlink(missing_ok=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def _end_group(pid: int) -> None:
    """End a process and its group: a server that is killed early leaves its scheduler behind."""
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        with contextlib.suppress(psutil.Error):
            psutil.wait_procs([psutil.Process(pid)], timeout=seconds)


class MemoryWatch:
    """Samples what a process and its children take: device memory by nvidia-smi, else resident memory.

    Attributes:
        peaks: most bytes seen so far on each GPU, by its place among those in use; one entry without a GPU.
        source: "process", "device" (nvidia-smi does not tell processes apart here) or "resident".
    """

    def __init__(self, pid: int, seconds: float = 2.0):
        self.pid, self.source = pid, "resident"
        self.peaks: list[int] = []
        self._stop = threading.Event()
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def peak(self) -> int:
        """Most bytes seen on any one GPU."""
        return max(self.peaks, default=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            sizes, self.source = taken(self.pid)
            longer = range(max(len(sizes), len(self.peaks)))
            self.peaks = [max(of[i] if i < len(of) else 0 for of in (sizes, self.peaks)) for i in longer]
            self._stop.wait(self._seconds)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)


def taken(pid: int) -> tuple[list[int], str]:
    """Bytes that a process and its children have on each GPU that they use, in the GPUs' order, and where the figure
    is from, as `MemoryWatch.source`.
    """
    pids = _family(pid)
    table = nvidia_smi("--query-compute-apps=pid,used_memory,gpu_bus_id")
    if table is None:
        total = 0
        for each in pids:
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(each).memory_info().rss
        return [total], "resident"
    ours: dict[str, int] = {}
    for of, used, gpu in table:
        if of.isdigit() and int(of) in pids and used.isdigit():
            ours[gpu] = ours.get(gpu, 0) + (int(used) << 20)
    if ours:
        return [ours[gpu] for gpu in sorted(ours)], "process"
    rows = nvidia_smi("--query-gpu=memory.used") or []
    return [int(row[0]) << 20 for row in rows if row[0].isdigit()], "device"


def _family(pid: int) -> set[int]:
    with contextlib.suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return {pid}


def nvidia_smi(query: str) -> list[list[str]] | None:
    """Rows of an nvidia-smi query as stripped fields, of the GPUs that this process sees; None where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")  # which it does not look at by itself
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    return [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines() if line]


def wait_for_gpus(say: Callable[[str], None], seconds: float = LEAVING_SECONDS) -> None:
    """Waits until no GPU is in use, or tells that one stays so.

    What an ending process frees while the next one loads its weights, SGLang takes for memory that these do not need.
    """
    give_up = time.monotonic() + seconds
    while True:
        used = [int(row[0]) << 20 for row in nvidia_smi("--query-gpu=memory.used") or [] if row[0].isdigit()]
        if max(used, default=0) <= UNUSED_BYTES:
            return
        if time.monotonic() > give_up:
            say(f"{max(used) / 1e9:.1f} GB of a GPU are in use by others")
            return
        time.sleep(0.5)


def gpu_total_bytes() -> int | None:
    """Memory of the first GPU, None without one."""
    table = nvidia_smi("--query-gpu=memory.total")
    return int(table[0][0]) << 20 if table else None


def gpu_names() -> list[str]:
    """Names and drivers of the GPUs, empty without any."""
    return [", ".join(row) for row in nvidia_smi("--query-gpu=name,driver_version") or []]


# ------------------------------------------------------------------ what a server says and does


def info(url: str) -> dict[str, Any]:
    """``/server_info`` of a running server."""
    reply = requests.get(f"{url}/server_info", timeout=60)
    reply.raise_for_status()
    return reply.json()


def free_port() -> int:
    """Below those that the system gives to connections: one of them could take it while the server loads."""
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports between 15000 and 32000 is free")


def state(url: str) -> dict[str, Any]:
    """The part of ``/server_info`` that the scheduler wrote."""
    return info(url)["internal_states"][0]


def flush(url: str) -> None:
    """Empty the prefix cache; waits for the server to be idle."""
    for _ in range(60):
        if requests.post(f"{url}/flush_cache", timeout=60).ok:
            return
        time.sleep(0.5)
    raise RuntimeError("the server would not flush its cache")
