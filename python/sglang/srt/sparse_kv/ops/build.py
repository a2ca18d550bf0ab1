"""Finds or makes the kernel library.

Order: the library named by SPARSE_KV_LIBRARY; one built ahead of time beside the sources (`make kernels`); one
compiled earlier on this machine; a compilation now, which takes about a minute and is announced in the log. A library
built from other sources is never used.

As a program it builds ahead of time:  python -m sglang.srt.sparse_kv.ops.build --arch 80 90 100
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from sglang.srt.sparse_kv.ops import abi

logger = logging.getLogger(__name__)

LIBRARY = "libsparse_kv.so"
HOST_FLAGS = ("-Xcompiler", "-fPIC,-fvisibility=hidden")
FLAGS = (
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "-lineinfo",
    "-shared",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
)

_library: ctypes.CDLL | None = None


def source_dir() -> Path:
    """The folder of the CUDA sources: in a checkout, or installed as package data."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "csrc"
    if installed.is_dir():
        return installed
    checkout = package.parents[3] / "sgl-kernel" / "csrc" / "sparse_kv"
    if checkout.is_dir():
        return checkout
    raise RuntimeError(f"the CUDA sources are in neither {installed} nor {checkout}; install the package again")


def source_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(path) for path in candidates if path.is_file()), None)


def compile_library(target: Path, architectures: list[str], verbose: bool = False) -> None:
    """Compiles the sources into one library for compute capabilities such as "90" (sm_90). Raises RuntimeError."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "the CUDA kernels are not built and no nvcc was found; install the CUDA toolkit or set CUDA_HOME"
        )
    folder = source_dir()
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    newest = max(architectures, key=int)
    gencode.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")  # later devices compile it themselves
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / LIBRARY
        command = [nvcc, *FLAGS, *HOST_FLAGS, *gencode, "--threads", "0", f"-DSKV_SOURCES={source_hash(folder)}"]
        command += ["-Xptxas", "-v"] if verbose else []
        command += [*map(str, sorted(folder.glob("*.cu"))), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True)
        if verbose:
            print(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(f"compiling the CUDA kernels failed: {' '.join(command)}\n{done.stderr.strip()}")
        os.replace(fresh, target)


def load(path: Path, expected_hash: str | None = None) -> ctypes.CDLL:
    """Loads and checks a library. Raises OSError or RuntimeError."""
    handle = ctypes.CDLL(str(path))
    handle.skv_sources.restype = ctypes.c_char_p
    found = handle.skv_sources().decode()
    if expected_hash is not None and found != expected_hash:
        raise RuntimeError(f"{path} was built from other sources ({found}, here {expected_hash})")
    return abi.bind(handle)


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sglang-dualdecoder"


def use(handle: ctypes.CDLL | None) -> None:
    """Puts another library in place of the built one; None undoes it. For tests."""
    global _library
    _library = handle


def library() -> ctypes.CDLL:
    """The kernel library for the current CUDA device, found or made once per process. Raises RuntimeError."""
    global _library
    if _library is None:
        _library = _find_or_make()
    return _library


def _find_or_make() -> ctypes.CDLL:
    import torch

    named = os.environ.get("SPARSE_KV_LIBRARY")
    if named:
        return load(Path(named))
    folder = source_dir()
    wanted = source_hash(folder)
    ahead_of_time = folder / LIBRARY
    if ahead_of_time.is_file():
        try:
            return load(ahead_of_time, wanted)
        except (OSError, RuntimeError) as error:
            logger.warning("CUDA kernels built ahead of time are not usable: %s", error)
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}"
    target = cache_dir() / f"{wanted}-sm{architecture}" / LIBRARY
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        # Ranks of one server start together: one compiles, the others wait and load.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            logger.info("Compiling the sparse KV kernels for sm_%s, once on this machine: about a minute", architecture)
            start = time.monotonic()
            compile_library(target, [architecture])
            logger.info("Compiled the sparse KV kernels in %.0f s into %s", time.monotonic() - start, target)
    return load(target, wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the sparse KV kernels ahead of time.")
    parser.add_argument("--arch", nargs="+", default=["80", "90", "100"], help="compute capabilities: 90 is sm_90")
    parser.add_argument("--out", type=Path, help=f"target file; default {LIBRARY} beside the sources")
    parser.add_argument("--verbose", action="store_true", help="registers, shared memory and spills of each kernel")
    args = parser.parse_args()
    target = args.out or source_dir() / LIBRARY
    start = time.monotonic()
    compile_library(target, args.arch, args.verbose)
    print(f"{target}: sm_{', sm_'.join(args.arch)} in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
