"""What the machine says about host memory, read from folders that are laid out like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.sparse_kv import host_memory

GIB = 1 << 30


def machine(folder: Path, group: str, files: dict[str, str], available: int = 40 * GIB) -> tuple[Path, Path]:
    """Folders in place of /proc and /sys/fs/cgroup. group: the text of /proc/self/cgroup."""
    proc, root = folder / "proc", folder / "cgroup"
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (proc / "self").mkdir(exist_ok=True)
    (proc / "self" / "cgroup").write_text(group)
    root.mkdir(exist_ok=True)
    return proc, root


V2 = {"cgroup/cgroup.controllers": "memory"}


def test_without_a_limit(tmp_path):
    proc, root = machine(tmp_path, "0::/app\n", {**V2, "cgroup/app/memory.max": "max\n"})
    assert host_memory.cgroup_limit(proc, root) is None and host_memory.cgroup_room(proc, root) is None
    assert host_memory.available(proc, root) == 40 * GIB


def test_the_smallest_limit_above_counts_and_file_caches_do_not(tmp_path):
    files = {
        **V2,
        "cgroup/pod/memory.max": f"{20 * GIB}",
        "cgroup/pod/memory.current": f"{15 * GIB}",
        "cgroup/pod/memory.stat": f"anon {5 * GIB}\nfile {10 * GIB}\n",
        "cgroup/pod/app/memory.max": f"{30 * GIB}",
        "cgroup/pod/app/memory.current": f"{GIB}",
    }
    proc, root = machine(tmp_path, "0::/pod/app\n", files)
    assert host_memory.cgroup_limit(proc, root) == 20 * GIB
    assert host_memory.cgroup_room(proc, root) == 15 * GIB == host_memory.available(proc, root)


@pytest.mark.parametrize(("limit", "expected"), [(8 * GIB, 8 * GIB), (2**63 - 4096, None)])
def test_the_older_kind_of_groups(tmp_path, limit, expected):
    files = {"cgroup/memory/job/memory.limit_in_bytes": f"{limit}", "cgroup/memory/job/memory.usage_in_bytes": "0"}
    proc, root = machine(tmp_path, "5:cpu:/x\n4:memory:/job\n", files)
    assert host_memory.cgroup_limit(proc, root) == expected


def test_a_machine_that_says_nothing(tmp_path):
    empty = tmp_path / "nothing"
    assert host_memory.meminfo("MemAvailable", empty) == 0
    assert host_memory.cgroup_limit(empty, empty) is None


def test_this_machine():
    assert 0 < host_memory.available() <= host_memory.meminfo("MemTotal")
    limit = host_memory.memlock_limit()
    assert limit is None or limit > 0
