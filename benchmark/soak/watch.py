"""What a server takes while it runs, sampled, and whether that stays as it is."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests

from benchmark.serving.server import taken

MIB = 1 << 20
# Of the server's counters, those of the page cache.
COUNTED = ("selected", "hit", "missed", "prefetched", "useful", "evicted")


def pid_behind(url: str) -> int:
    """The process that listens where `url` says. Raises ValueError when there is none of ours."""
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise ValueError(f"nothing that this user may look at listens on port {port}; start the server on this machine.")


def compiles(command: list[str]) -> bool:
    """Whether a process is one of those that torch compiles with, one a core, which end when they had nothing to do."""
    return any("compile_worker" in word for word in command)


class Watch:
    """Samples of a server's processes and counters; `samples` grows until `stop`."""

    def __init__(self, url: str, seconds: float):
        self.url, self.pid = url, pid_behind(url)
        self.samples: list[dict[str, Any]] = []
        self._seconds, self._start = seconds, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(requests.RequestException, psutil.Error, KeyError):
                self.samples.append(self.sample())
            self._over.wait(self._seconds)

    def sample(self) -> dict[str, Any]:
        server = psutil.Process(self.pid)
        sizes = {
            f"{process.pid}": process.memory_info().rss / MIB
            for process in (server, *server.children(recursive=True))
            if not compiles(process.cmdline())
        }
        on_gpus, source = taken(self.pid)
        found = requests.get(f"{self.url}/server_info", timeout=120).json()["internal_states"][0]["sparse_kv"]
        total = found["total"]
        return {
            "seconds": time.monotonic() - self._start,
            "rss_mib": sum(sizes.values()),
            "processes_mib": sizes,
            "gpu_mib": 0 if source == "resident" else sum(on_gpus) / MIB,
            "steps": found["steps"],
            **{name: total[name] for name in COUNTED},
        }

    def stop(self) -> None:
        self._over.set()
        self._thread.join(150)


def verdict(samples: list[dict[str, Any]], growth: float, drop: float) -> dict[str, Any]:
    """Compares the last third of the samples with the third before; the first is for warming up.

    growth: by how much of itself memory may grow; drop: by how much the hit rate may fall. `complaints` is empty when
    all is flat.
    """
    third = len(samples) // 3
    if third < 2:
        return {"complaints": [f"{len(samples)} samples are too few to compare"]}
    middle, last = samples[third : 2 * third], samples[-third:]
    found: dict[str, Any] = {}
    complaints = []
    for name in ("rss_mib", "gpu_mib"):
        before, after = (statistics.median(sample[name] for sample in part) for part in (middle, last))
        found[name] = [round(before, 1), round(after, 1)]
        if after > before * (1 + growth):
            complaints.append(f"{name} grew from {before:.0f} to {after:.0f}")
    rates = [_rate(part) for part in (middle, last)]
    found["hit_rate"] = [round(rate, 4) for rate in rates]
    if rates[1] < rates[0] - drop:
        complaints.append(f"the hit rate fell from {rates[0]:.3f} to {rates[1]:.3f}")
    if last[-1]["steps"] <= middle[0]["steps"]:
        complaints.append("no step was made")
    found["counted"] = {name: last[-1][name] - samples[0][name] for name in ("steps", *COUNTED)}
    gone = set(samples[0]["processes_mib"]) - set(samples[-1]["processes_mib"])
    if gone:
        complaints.append(f"processes ended: {', '.join(sorted(gone))}")
    return {**found, "complaints": complaints}


def _rate(part: list[dict[str, Any]]) -> float:
    return (part[-1]["hit"] - part[0]["hit"]) / max(part[-1]["selected"] - part[0]["selected"], 1)
