"""What the machine says about host memory: available, allowed to this container, allowed to be locked."""

from __future__ import annotations

import resource
from pathlib import Path


class HostMemoryError(RuntimeError):
    """Host memory could not be had; the text is one sentence for the person who asked."""


PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # cgroup v1 says so with a number near 2**63


def meminfo(name: str, proc: Path = PROC) -> int:
    """Bytes of an entry of /proc/meminfo such as "MemAvailable"; 0 where there is none."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split() for line in lines if line.startswith(name + ":")]
    return int(found[0][1]) * 1024 if found else 0


def cgroup_limit(proc: Path = PROC, root: Path = CGROUP) -> int | None:
    """Bytes that this container may use, None without a limit: the smallest of its group and those above."""
    limits = [limit for limit, _ in _groups(proc, root)]
    return min(limits, default=None)


def cgroup_room(proc: Path = PROC, root: Path = CGROUP) -> int | None:
    """Bytes left below the limit, not counting file caches, which the kernel gives up; None without a limit."""
    return min((max(0, limit - used) for limit, used in _groups(proc, root)), default=None)


def available(proc: Path = PROC, root: Path = CGROUP) -> int:
    """Bytes that can be had now: what the kernel calls available, within the container's limit."""
    room = cgroup_room(proc, root)
    free = meminfo("MemAvailable", proc)
    return free if room is None else min(free, room)


def memlock_limit() -> int | None:
    """Bytes that a process may lock, None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _groups(proc: Path, root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use beside file caches) of each group above this process that has a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {name: path for _, name, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    new = "" in paths and (root / "cgroup.controllers").exists()
    names = ("memory.max", "memory.current") if new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    base = root if new else root / "memory"
    path = paths.get("", "/") if new else next((p for n, p in paths.items() if "memory" in n.split(",")), "/")
    group = base / path.lstrip("/")
    found = []
    for folder in (group, *group.parents):
        limit = _number(folder / names[0])
        if limit is not None and limit < _NO_LIMIT:
            cached = _stat(folder / "memory.stat", "file" if new else "total_cache")
            found.append((limit, max(0, (_number(folder / names[1]) or 0) - cached)))
        if folder == base:
            break
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(line[1]) for line in lines if len(line) == 2 and line[0] == name), 0)
