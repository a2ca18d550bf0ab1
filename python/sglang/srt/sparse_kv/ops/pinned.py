"""Pinned host memory for the host pool: mapped, bound near the GPU, touched by all cores, registered in pieces.

Torch's own pinned allocator rounds sizes up to a power of two, which for a pool is far too much.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sparse_kv import host_memory
from sglang.srt.sparse_kv.host_memory import HostMemoryError

logger = logging.getLogger(__name__)

PIECE = 64 << 30  # bytes per registration: drivers refuse larger ones
STEP = 1 << 30  # bytes that are tried before the kernel is asked again what is left
TOUCH = 32 << 20  # bytes that one thread touches at a time
MARGIN = 256 << 20  # bytes that a step leaves to everybody else
PATIENCE = 10  # seconds for the kernel to find more: on virtual machines memory grows as it is touched
PAGE = 2 << 20
PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
MPOL_PREFERRED = 1
MBIND = {"x86_64": 237, "aarch64": 235}

Progress = Callable[[int, int], None]


def pinned_empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: int | None = None, progress: Progress | None = None
) -> torch.Tensor:
    """A zeroed CPU tensor in registered memory that kernels of every device may read and write at its own address.

    device: the GPU to be near, default the current one. progress(done, total) is called with bytes; by default the log
    tells. The memory is unregistered when the tensor dies or the interpreter exits, by a signal handler's SystemExit
    too; a killed process leaves that to the driver. Raises HostMemoryError, leaving nothing registered.
    """
    if device is None:
        device = torch.cuda.current_device()
    total = math.prod(shape) * dtype.itemsize
    region = Region(total, numa_node(device), progress or log_progress())
    region.register(cuda_register, cuda_unregister)
    check_mapping(region, device)
    # The tensor keeps the mapping alive, nothing else does: when the mapping goes, its registrations go first.
    weakref.finalize(region.memory, unregister_all, region.registered, cuda_unregister)
    return region.tensor(shape, dtype)


class Region:
    """Anonymous memory of at least `total` bytes; `where` says what became of the wish to be near a NUMA node."""

    def __init__(self, total: int, node: int | None, progress: Progress):
        self.total = total
        size = max(-(-total // PAGE) * PAGE, PAGE)
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostMemoryError(
                f"{size / 1e9:.1f} GB of host memory could not be mapped ({error.strerror}); "
                "lower --sparse-kv-host-memory"
            ) from error
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address, self.size = self.bytes.data_ptr(), size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                logger.debug("The kernel offers no huge pages for the host pool")
        self.where = bind_to_node(self.address, size, node)
        self.registered: list[int] = []
        touch(self.address, size, progress)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[: self.total].view(dtype).view(shape)

    def register(self, register: Callable[[int, int], int], unregister: Callable[[int], int]) -> None:
        """Registers piece by piece. Raises HostMemoryError after undoing the pieces that succeeded."""
        for start in range(0, self.size, PIECE):
            length = min(PIECE, self.size - start)
            status = register(self.address + start, length)
            if status:
                done = start / 1e9
                unregister_all(self.registered, unregister)
                limit = host_memory.memlock_limit()
                locked = "no limit" if limit is None else f"a limit of {limit / 1e9:.3f} GB"
                raise HostMemoryError(
                    f"CUDA refused to pin host memory after {done:.1f} of {self.size / 1e9:.1f} GB (status {status}, "
                    f"{locked} on locked memory); lower --sparse-kv-host-memory or raise that limit (ulimit -l, "
                    "docker run --ulimit memlock=-1)"
                )
            self.registered.append(self.address + start)


def unregister_all(registered: list[int], unregister: Callable[[int], int]) -> None:
    """Undoes registrations, last first. May be called twice."""
    while registered:
        status = unregister(registered.pop())
        if status:  # at interpreter exit the driver may be gone already, and the memory with it
            logger.debug("unregistering host memory returned status %d", status)


def touch(address: int, size: int, progress: Progress) -> None:
    """Writes zeros to all of it with every core, so that the pages exist before they are pinned one by one.

    In steps, since touching more than there is ends the process without a word. Raises HostMemoryError at a step that
    the kernel has no room for.
    """
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        for begin in range(0, size, STEP):
            end = min(begin + STEP, size)
            wait_for_room(end - begin, begin, size)
            starts = range(begin, end, TOUCH)
            # memset through ctypes lets go of the interpreter lock.
            list(threads.map(lambda start, end=end: _zero(address + start, min(TOUCH, end - start)), starts))
            progress(end, size)


def wait_for_room(step: int, done: int, size: int) -> None:
    """Returns when the kernel has `step` bytes to give. Raises HostMemoryError when that takes too long."""
    give_up = time.monotonic() + PATIENCE
    while (left := host_memory.available()) < step + MARGIN:
        if not host_memory.meminfo("MemAvailable"):
            return  # a kernel that does not say
        if time.monotonic() > give_up:
            raise HostMemoryError(
                f"{size / 1e9:.1f} GB of host memory were to be taken and after {done / 1e9:.1f} GB only "
                f"{left / 1e9:.1f} GB are left; lower --sparse-kv-host-memory or end what else uses this machine's "
                "memory, such as another server"
            )
        time.sleep(0.1)


def _zero(address: int, length: int) -> int:
    ctypes.memset(address, 0, length)
    return length


def log_progress() -> Progress:
    """Reports every tenth, unless it is all over within seconds."""
    start = time.monotonic()
    last = start

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 5 or (done == total and now - start >= 5):
            last = now
            logger.info("Preparing host memory: %.0f of %.0f GB after %.0f s", done / 1e9, total / 1e9, now - start)

    return report


def numa_node(device: int) -> int | None:
    """NUMA node of a GPU's PCI slot, or None where the system does not say."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        slot = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{slot}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind_to_node(address: int, size: int, node: int | None) -> str:
    """Prefers a node for memory not yet touched. Returns what became of it, in words."""
    number = MBIND.get(platform.machine())
    if node is None or number is None:
        return "no NUMA node known"
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (address, size, MPOL_PREFERRED, ctypes.addressof(mask), 16 * 64, 0)
    status = libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
    if status:
        return f"NUMA node {node} refused ({os.strerror(ctypes.get_errno())})"
    return f"NUMA node {node}"


def cuda_register(address: int, length: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, length, PORTABLE_AND_MAPPED))


def cuda_unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


def check_mapping(region: Region, device: int) -> None:
    """Raises HostMemoryError where kernels would need another address than the host's."""
    from sglang.srt.sparse_kv.ops import build

    library = build.library()
    for address in list(region.registered):
        mapped = library.skv_device_pointer(address, device)
        if mapped != address:
            unregister_all(region.registered, cuda_unregister)
            raise HostMemoryError(
                f"GPU {device} reaches pinned host memory at another address ({mapped} for {address}), which the "
                "kernels do not support on this platform; use another machine"
            )
    logger.info("Pinned %.2f GB of host memory (%s)", region.size / 1e9, region.where)
