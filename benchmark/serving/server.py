"""Servers of a benchmark: started as a user would, watched for the memory they take, stopped as a group."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import requests

READY_SECONDS = 480
GIB = 1 << 30


class Server:
    """One ``launch_server`` process group.

    Args:
        command: full command line.
        url: where it will listen.
        log: file for its output.
        environment: added to the inherited one.
        say: told about progress.

    Raises:
        RuntimeError: it ended, or did not answer within READY_SECONDS; the text holds the end of its log.
    """

    def __init__(
        self, command: list[str], url: str, log: Path, environment: dict[str, str], say: Callable[[str], None]
    ):
        self.command, self.url, self.log = command, url, log
        say(f"starting {shlex.join(command)}")
        self._output = log.open("w")
        self._process = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.memory = MemoryWatch(self._process.pid)
        try:
            self.start_seconds = self._wait(say)
        except BaseException:
            self.stop()
            raise

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
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with status {self._process.returncode}:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line[:500] for line in text)

    def stop(self) -> None:
        """End the whole group: a server that is killed early leaves its scheduler behind."""
        self.memory.stop()
        for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self._output.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class MemoryWatch:
    """Samples what a process and its children take: device memory by nvidia-smi, else resident memory.

    Attributes:
        peak: most bytes seen so far.
        source: "process", "device" (nvidia-smi does not tell processes apart here) or "resident".
    """

    def __init__(self, pid: int, seconds: float = 2.0):
        self.pid, self.peak, self.source = pid, 0, "resident"
        self._stop = threading.Event()
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            size, self.source = self.sample()
            self.peak = max(self.peak, size)
            self._stop.wait(self._seconds)

    def sample(self) -> tuple[int, str]:
        """Bytes now, and where the figure is from."""
        pids = _family(self.pid)
        table = _nvidia_smi("--query-compute-apps=pid,used_memory")
        if table is None:
            total = 0
            for pid in pids:
                with contextlib.suppress(psutil.Error):
                    total += psutil.Process(pid).memory_info().rss
            return total, "resident"
        ours = [row[1] for row in table if row[0].isdigit() and int(row[0]) in pids and row[1].isdigit()]
        if ours:
            return sum(map(int, ours)) << 20, "process"
        used = _nvidia_smi("--query-gpu=memory.used") or []
        return sum(int(row[0]) for row in used if row[0].isdigit()) << 20, "device"

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)


def _family(pid: int) -> set[int]:
    with contextlib.suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return {pid}


def _nvidia_smi(query: str) -> list[list[str]] | None:
    """Rows of an nvidia-smi query as stripped fields; None where there is no GPU."""
    try:
        result = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    return [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines() if line]


def gpu_total_bytes() -> int | None:
    """Memory of the first GPU, None without one."""
    table = _nvidia_smi("--query-gpu=memory.total")
    return int(table[0][0]) << 20 if table else None


def gpu_names() -> list[str]:
    """Names and drivers of the GPUs, empty without any."""
    return [", ".join(row) for row in _nvidia_smi("--query-gpu=name,driver_version") or []]


# ------------------------------------------------------------------ what a server says and does


def info(url: str) -> dict[str, Any]:
    """``/server_info`` of a running server."""
    reply = requests.get(f"{url}/server_info", timeout=60)
    reply.raise_for_status()
    return reply.json()


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
