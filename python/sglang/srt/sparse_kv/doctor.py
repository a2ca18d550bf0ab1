"""`sglang-sparse-kv doctor`: what stands in the way of ``--sparse-kv`` on this machine, and what to do about it.

Each check answers with findings of three kinds: "ok", "note" (it works, but slower or less than it could), "fault" (a
server cannot start).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import sglang_dualdecoder
from sglang.srt.sparse_kv import host_memory

OK, NOTE, FAULT = "ok", "note", "fault"
MIN_HOST_BYTES = 4 * 10**9  # below this a server is of little use
SYS = Path("/sys")


@dataclasses.dataclass(frozen=True)
class Finding:
    """kind: OK, NOTE or FAULT. what: what was found, with numbers. do: what to do; empty where nothing is."""

    kind: str
    subject: str
    what: str
    do: str = ""

    def line(self) -> str:
        advice = f"; {self.do}" if self.do else ""
        return f"{self.kind:<5}  {self.subject}: {self.what}{advice}"


def run(as_json: bool = False) -> int:
    """Prints all findings. Returns the exit status: 0 when --sparse-kv can start, else 1."""
    findings = examine()
    faults = [finding for finding in findings if finding.kind == FAULT]
    if as_json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"can_start": not faults, "findings": found}, indent=1))
        return bool(faults)
    print("\n".join(finding.line() for finding in findings))
    print(f"--sparse-kv cannot start: {len(faults)} faults" if faults else "--sparse-kv can start")
    return bool(faults)


def examine() -> list[Finding]:
    """All findings, in the order in which a start would meet them."""
    checks: list[Callable[[], Iterator[Finding]]] = [versions, hooks, engine, memory, kernel_settings]
    if _gpus():
        from sglang.srt.sparse_kv import doctor_gpu

        checks.append(doctor_gpu.examine)
    return [finding for check in checks for finding in _guarded(check)]


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that fails is a finding, and the rest still runs."""
    try:
        return list(check())
    except Exception as error:
        return [Finding(FAULT, check.__name__, f"{type(error).__name__}: {error}", "report it with this line")]


def versions() -> Iterator[Finding]:
    """Python, SGLang, torch, and this project."""
    problem = sglang_dualdecoder.version_problem()
    found = ", ".join(f"{name} {_version(name)}" for name in ("sglang", "torch", "sglang-dualdecoder"))
    if problem:
        yield Finding(FAULT, "versions", problem.split(";")[0], f"install sglang=={sglang_dualdecoder.SGLANG_VERSION}")
    else:
        yield Finding(OK, "versions", f"Python {platform.python_version()}, {found}")
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if any(point.value == "sglang_dualdecoder:register" for point in points):
        yield Finding(OK, "plugin", "SGLang finds it")
    else:
        yield Finding(FAULT, "plugin", "SGLang does not find it", "install this project beside SGLang: pip install .")
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen and "dualdecoder" not in chosen.split(","):
        yield Finding(FAULT, "plugin", f"SGLANG_PLUGINS={chosen} leaves it out", "add dualdecoder to it or unset it")


def hooks() -> Iterator[Finding]:
    """The ledger against the SGLang that is installed."""
    from sglang.srt.sparse_kv import plugin, refusals

    try:
        for group in (plugin.ARGUMENTS, plugin.LAUNCHER, plugin.SCHEDULER):
            plugin.start(group)
        yield Finding(OK, "hooks", f"all {len(plugin.HOOKS)} of the ledger fit and are in force")
    except refusals.StartRefused as refused:
        what, _, do = str(refused).rstrip(".").partition("; ")
        yield Finding(FAULT, "hooks", what, do)
    for name, why in refusals.ENVIRONMENT.items():
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            yield Finding(FAULT, "environment", f"{name} is set, and {why}", "unset it")


def engine() -> Iterator[Finding]:
    """A GPU, or the CPU engine."""
    gpus = _gpus()
    for number, name in enumerate(gpus):
        yield Finding(OK, f"GPU {number}", name)
    if gpus:
        yield from compiler()
        return
    platforms = importlib.metadata.entry_points(group="sglang.srt.platforms")
    installed = any(point.name == "torch_cpu" for point in platforms)
    chosen = os.environ.get("SGLANG_PLATFORM", "")
    if not installed:
        yield Finding(
            FAULT,
            "GPU",
            "there is none, and the CPU engine is not installed",
            "install ./python/cpu_platform and set SGLANG_PLATFORM=torch_cpu, or use a machine with an NVIDIA GPU",
        )
    elif chosen not in ("", "torch_cpu"):
        yield Finding(FAULT, "GPU", f"there is none, and SGLANG_PLATFORM is {chosen}", "set SGLANG_PLATFORM=torch_cpu")
    elif not chosen:
        yield Finding(
            NOTE,
            "GPU",
            "there is none; the CPU engine serves, which is for tests and small models",
            "set SGLANG_PLATFORM=torch_cpu and give the server --device cpu",
        )
    else:
        yield Finding(NOTE, "GPU", "there is none; the CPU engine serves", "give the server --device cpu")


def compiler() -> Iterator[Finding]:
    """What compiles the kernels at first use."""
    from sglang.srt.sparse_kv.ops import build

    nvcc = build.find_nvcc()
    if nvcc:
        yield Finding(OK, "kernels", f"{nvcc} compiles them at the first start")
    elif os.environ.get("SPARSE_KV_LIBRARY") or (build.source_dir() / build.LIBRARY).is_file():
        yield Finding(OK, "kernels", "built ahead of time")
    elif any(build.cache_dir().glob(f"{build.source_hash(build.source_dir())}-*/{build.LIBRARY}")):
        yield Finding(OK, "kernels", f"compiled earlier, in {build.cache_dir()}")
    else:
        yield Finding(FAULT, "kernels", "not built, and no nvcc", "install the CUDA toolkit or set CUDA_HOME")


def memory() -> Iterator[Finding]:
    """Host memory: how much there is, and what the container and the shell allow."""
    available, total = host_memory.available(), host_memory.meminfo("MemTotal")
    said = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB are available"
    limit = host_memory.cgroup_limit()
    if limit is not None:
        said += f", within this container's limit of {limit / 1e9:.1f} GB"
    if available < MIN_HOST_BYTES:
        yield Finding(NOTE, "host memory", said, "end what else uses it, or raise the container's limit")
    else:
        yield Finding(OK, "host memory", said)
    locked = host_memory.memlock_limit()
    if locked is None:
        yield Finding(OK, "locked memory", "no limit (RLIMIT_MEMLOCK)")
    elif _gpus():
        yield Finding(
            NOTE,
            "locked memory",
            f"RLIMIT_MEMLOCK is {locked / 1e9:.3f} GB; some drivers count pinned memory against it",
            "if pinning fails, raise it: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    else:
        yield Finding(OK, "locked memory", f"RLIMIT_MEMLOCK is {locked / 1e9:.3f} GB; the CPU engine locks none")


def kernel_settings(root: Path = SYS) -> Iterator[Finding]:
    """Huge pages and NUMA nodes, which decide how fast host memory is reached."""
    pages = _read(root / "kernel" / "mm" / "transparent_hugepage" / "enabled")
    chosen = pages.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        yield Finding(OK, "huge pages", f"transparent huge pages are on ({chosen})")
    else:
        yield Finding(
            NOTE,
            "huge pages",
            f"transparent huge pages are {chosen or 'not offered'}, so that pinning takes longer",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    nodes = sorted((root / "devices" / "system" / "node").glob("node[0-9]*"))
    if len(nodes) > 1:
        yield Finding(OK, "NUMA", f"{len(nodes)} nodes; each rank's memory is asked for near its GPU")
    else:
        yield Finding(OK, "NUMA", "one node")


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
