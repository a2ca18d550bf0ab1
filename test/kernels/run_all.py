"""Everything about the kernels in one go on a GPU machine: build, parity, benchmarks, sanitizers, attention.

    python test/kernels/run_all.py [--out DIR] [--site DIR] [--skip STAGE ...] [--budget SECONDS]

Stages are independent; each has a time limit, and a table of them comes last. --site: a folder of Python packages that
hold FlashInfer. An sglang there is left out, because this repository's package is used on its own here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "test" / "kernels"
MODULES = (("float16", 128), ("bfloat16", 128), ("float16", 64), ("bfloat16", 64))

# FlashInfer compiles for minutes: in the background, while other stages run.
WARM_UP = """
import sys, torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper, single_prefill_with_kv_cache as prefill
dtype, dim = getattr(torch, sys.argv[1]), int(sys.argv[2])
make = lambda *shape: torch.zeros(shape, dtype=torch.int32, device="cuda")
floats = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
wrapper = Wrapper(floats, "NHD", True, True, make(2), make(4), make(1), "fa2")
one = torch.tensor([0, 1], dtype=torch.int32)
wrapper.plan(one, make(1), one[1:], 8, 1, dim, 16, q_data_type=dtype, kv_data_type=dtype)
if dtype == torch.float16 and dim == 128:
    x = torch.zeros((16, 8, dim), dtype=dtype, device="cuda")
    for causal in (True, False):
        prefill(x, x, x, causal=causal, return_lse=True, backend="fa2")
"""


def overlay(site: Path) -> Path:
    """A folder with links to the packages of `site`, without sglang and what this Python must bring itself."""
    folder = Path(tempfile.mkdtemp(prefix="site-"))
    for path in site.resolve().iterdir():
        if not path.name.startswith(("sglang", "torch", "triton", "numpy")):
            (folder / path.name).symlink_to(path)
    return folder


def without_sglang(search_path: str) -> list[str]:
    return [entry for entry in search_path.split(os.pathsep) if entry and not (Path(entry) / "sglang").exists()]


class Runner:
    def __init__(self, out: Path, environment: dict[str, str], budget: float):
        self.out, self.environment, self.end = out, environment, time.monotonic() + budget
        self.rows: list[tuple[str, str, float]] = []

    def stage(self, name: str, command: list[str], limit: float, tail: int = 25, **environment: str) -> None:
        left = self.end - time.monotonic()
        if left < 10:
            self.rows.append((name, "not run: no time left", 0.0))
            return
        start = time.monotonic()
        print(f"\n===== {name}", flush=True)
        log = self.out / f"{name}.log"
        with open(log, "w") as file:
            try:
                code: int | str = subprocess.run(
                    command,
                    cwd=REPOSITORY,
                    env={**self.environment, **environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=min(limit, left),
                ).returncode
            except subprocess.TimeoutExpired:
                code = "time limit"
        print("\n".join(log.read_text(errors="replace").splitlines()[-tail:]), flush=True)
        result = "ok" if code == 0 else f"FAILED ({code})"
        self.rows.append((name, result, time.monotonic() - start))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "sparse-kv-kernels")
    parser.add_argument("--site", type=Path, help="folder of packages with FlashInfer")
    parser.add_argument("--skip", nargs="*", default=[], help="stages to leave out, by the start of their names")
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    paths = [str(REPOSITORY / "python"), str(KERNELS)]
    if args.site:
        paths.append(str(overlay(args.site)))
    environment = {**os.environ, "SPARSE_KV_TEST_GPU_ONLY": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *without_sglang(os.environ.get("PYTHONPATH", ""))])
    runner = Runner(args.out, environment, args.budget)
    python = sys.executable
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--durations=8"]
    background: list[subprocess.Popen] = []

    def wanted(name: str) -> bool:
        return not any(name.startswith(skipped) for skipped in args.skip)

    try:
        if wanted("attend") and args.site:
            for dtype, dim in MODULES:
                log = open(args.out / f"flashinfer-{dtype}-{dim}.log", "w")  # noqa: SIM115
                command = [python, "-c", WARM_UP, dtype, str(dim)]
                background.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        build = "import torch; from sglang.srt.sparse_kv.ops import build; print(build.library())"
        logged = f"import logging; logging.basicConfig(level='INFO'); {build}"
        if wanted("build"):
            runner.stage("build", [python, "-c", logged], 240)
        parity = [f"test/kernels/test_{name}.py" for name in ("tables", "prefetches", "scores", "data")]
        if wanted("parity"):
            runner.stage("parity", [*tests, *parity, "test/unit/test_pinned.py", "test/unit/test_kernel_abi.py"], 200)
        if wanted("graph"):
            runner.stage("graph", [*tests, "test/kernels/test_graph.py"], 150)
        if wanted("bench"):
            bench = [python, "benchmark/kernels.py", "--json", str(args.out / "kernels.json")]
            runner.stage("bench", bench, 240, tail=140)
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        for tool in ("memcheck", "racecheck", "synccheck"):
            if wanted("sanitizer"):
                command = [sanitizer, "--tool", tool, "--error-exitcode", "9", python, str(KERNELS / "sanitize.py")]
                runner.stage(f"sanitizer-{tool}", command, 110, 15, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if wanted("attend"):
            for process in background:
                process.wait(timeout=max(1.0, runner.end - time.monotonic()))
            runner.stage("attend", [*tests, "test/kernels/test_attend.py"], 200)
            runner.stage("attend-bench", [python, "benchmark/kernels.py", "--only", "attend"], 60)
    finally:
        for process in background:
            if process.poll() is None:
                process.kill()
    print("\nstage                  result                    seconds")
    for name, result, seconds in runner.rows:
        print(f"{name:<22} {result:<25} {seconds:7.0f}")
    return 0 if all(result == "ok" for _, result, _ in runner.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
