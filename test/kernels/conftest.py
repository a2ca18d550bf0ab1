"""Engines under test: the CUDA sources compiled for a GPU, and the same sources run by the emulator on the CPU."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from sglang.srt.sparse_kv.ops import build, workspace

# Processes side by side, each with as many threads as the machine has cores, are ten times slower than one thread each.
if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)

EMULATOR = Path(__file__).parent / "emulator"
CUDA_INCLUDES = ("/usr/local/cuda/include",)


def _cuda_include() -> str | None:
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "include"] if home else []
    candidates += map(Path, CUDA_INCLUDES)
    try:
        import nvidia

        candidates += [p for root in nvidia.__path__ for p in Path(root).glob("*/include")]
    except ImportError:
        pass
    return next((str(p) for p in candidates if (p / "cuda_bf16.h").is_file()), None)


def build_emulator(major: int) -> Path:
    """Compiles the sources for the emulator. major: the compute capability to pretend, 8 (no bulk copies) or 9."""
    include = _cuda_include()
    if include is None:
        pytest.skip("the emulator needs the CUDA headers (cuda_bf16.h): install the CUDA toolkit or set CUDA_HOME")
    folder = build.source_dir()
    digest = hashlib.sha256(build.source_hash(folder).encode())
    digest.update((EMULATOR / "cuda_emulator.h").read_bytes())
    target = Path(tempfile.gettempdir()) / f"sparse-kv-emulator-{os.getuid()}-{digest.hexdigest()[:16]}-{major}.so"
    if target.is_file():
        return target
    objects = []
    flags = ["-O2", "-std=c++17", "-fPIC", f"-DSPARSE_KV_EMULATE={major}", f"-DSKV_SOURCES={build.source_hash(folder)}"]
    flags += [f"-I{EMULATOR}", f"-isystem{include}", "-Wno-unknown-pragmas"]
    with tempfile.TemporaryDirectory() as scratch:
        running = []
        for source in sorted(folder.glob("*.cu")):
            objects.append(f"{scratch}/{source.stem}.o")
            command = ["g++", *flags, "-x", "c++", "-c", str(source), "-o", objects[-1]]
            running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate()[1] for process in running]
        assert all(process.returncode == 0 for process in running), "\n".join(errors)
        subprocess.run(["g++", "-shared", *objects, "-o", f"{scratch}/emulator.so"], check=True)
        os.replace(f"{scratch}/emulator.so", target)
    return target


class Engine:
    """Where the operations run. `small`: keep the sizes down, every thread is simulated."""

    def __init__(self, name: str, device: torch.device, library=None):
        self.name, self.device, self.library = name, device, library
        self.small = library is not None

    def seed(self, seed: int) -> None:
        """Another order of threads and blocks, where that can be chosen."""
        if self.library is not None:
            self.library.skv_seed(seed)


@pytest.fixture(params=["emulator-sm90", "emulator-sm80", "cuda"])
def engine(request):
    name = request.param
    if name == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        yield Engine(name, torch.device("cuda", torch.cuda.current_device()))
        return
    if os.environ.get("SPARSE_KV_TEST_GPU_ONLY"):
        pytest.skip("SPARSE_KV_TEST_GPU_ONLY is set")
    library = build.load(build_emulator(9 if name.endswith("90") else 8))
    build.use(library)
    workspace._workspaces.pop(torch.device("cpu"), None)
    yield Engine(name, torch.device("cpu"), library)
    build.use(None)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device("cuda", torch.cuda.current_device())
