"""The result file of the serving benchmark: what was run, on what, and one record per measured cell."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmark.serving.server import gpu_names

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "sglang", "sglang-kernel", "flashinfer-python", "triton", "sglang-dualdecoder")
# What makes two cells the same measurement.
KEY = ("variant", "length", "policy", "batch", "temperature")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        if distribution.name in _PACKAGES:
            found.setdefault(distribution.name, distribution.version)
    return found


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "gpus": gpu_names(),
        "cpu": cpu,
        "cores": len(psutil.Process().cpu_affinity()),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def sources() -> dict[str, str]:
    """The commit, where git knows it, and a digest of the files that a server runs, where it does not."""
    digest = hashlib.sha256()
    for folder in ("python", "sgl-kernel"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp") and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {"commit": commit or "unknown", "digest": digest.hexdigest()[:16]}


def facts(module: str, words: list[str] | None = None) -> dict[str, Any]:
    """What every result file says of the run: when, what was typed, on which machine, with which code.

    module: as ``python -m`` takes it; words: what follows, of this process where it is None.
    """
    words = sys.argv[1:] if words is None else words
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *words]),
        "machine": machine(),
        "versions": versions(),
        "sources": sources(),
    }


class Record:
    """Results on disk; every change is saved at once, so that a command may be cut off anywhere.

    Args:
        path: the file; cells that it already holds are kept and not measured again.
        earlier: further files of earlier commands, read only.
    """

    def __init__(self, path: Path, earlier: list[Path] | None = None):
        self.path = path
        self.data: dict[str, Any] = {"benchmark": "serving", "runs": [], "cells": []}
        for source in [path, *(earlier or [])]:
            if source.is_file():
                self._merge(json.loads(source.read_text()))

    def _merge(self, data: dict[str, Any]) -> None:
        offset = len(self.data["runs"])
        self.data["runs"] += data["runs"]
        for cell in data["cells"]:
            if self.find(cell) is None:
                self.data["cells"].append({**cell, "run": cell["run"] + offset})

    def begin(self, options: dict[str, Any], corpus: str, words: list[str] | None = None) -> None:
        """Note one command; cells added from here on refer to it. words: as `facts` takes them."""
        self.data["runs"].append(
            {**facts("benchmark.serving.run", words), "options": options, "corpus": corpus, "servers": []}
        )
        self.save()

    def server(self, description: dict[str, Any]) -> None:
        """Note a server of this command, or more about the last one with the same name."""
        servers = self.data["runs"][-1]["servers"]
        if servers and servers[-1]["variant"] == description["variant"]:
            servers[-1].update(description)
        else:
            servers.append(description)
        self.save()

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The cell with the same key, if it was measured."""
        for cell in self.data["cells"]:
            if all(cell.get(name) == key.get(name) for name in KEY) and "failed" not in cell:
                return cell
        return None

    def add(self, cell: dict[str, Any]) -> None:
        run = len(self.data["runs"]) - 1
        self.data["cells"] = [old for old in self.data["cells"] if any(old.get(name) != cell.get(name) for name in KEY)]
        self.data["cells"].append({**cell, "run": run})
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1))
        partial.replace(self.path)


def difference(before: Any, after: Any) -> Any:
    """``after - before`` for every number of two equal trees of dicts and lists; other leaves are dropped."""
    if isinstance(after, dict) and isinstance(before, dict):
        parts = {key: difference(before[key], after[key]) for key in after if key in before}
        return {key: value for key, value in parts.items() if value is not None}
    if isinstance(after, list) and isinstance(before, list) and len(after) == len(before):
        entries = [difference(old, new) for old, new in zip(before, after, strict=True)]
        return None if None in entries else entries
    if isinstance(after, bool) or not isinstance(after, (int, float)) or not isinstance(before, (int, float)):
        return None
    return after - before
