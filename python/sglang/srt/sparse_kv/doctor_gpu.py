"""The doctor's checks that take a GPU: whether host memory can be pinned, how fast it comes over the link, and how fast
the host gives orders.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from sglang.srt.sparse_kv import devices
from sglang.srt.sparse_kv.doctor import FAULT, NOTE, OK, Finding
from sglang.srt.sparse_kv.host_memory import HostMemoryError
from sglang.srt.sparse_kv.ops import pinned

SAMPLE = 256 << 20  # bytes of a copy
ROUNDS = 4
FAIR = 0.8  # of what the GPU's kind is known for
LAUNCHES = 400  # in a row, fewer than a stream holds
# Seconds of the host for a small launch; 7 us beside an H200, where a prefill's orders hide under its work.
SLOW = 20e-6


def examine() -> Iterator[Finding]:
    """Findings for every GPU."""
    for number in range(torch.cuda.device_count()):
        yield from link(number)
    if torch.cuda.device_count():
        yield orders(launch_seconds())


def link(number: int) -> Iterator[Finding]:
    """Free memory, pinning, and the rate of pinned copies alone and beside matrix products."""
    name = f"GPU {number}"
    with torch.cuda.device(number):
        free, total = torch.cuda.mem_get_info()
        kind, advice = (OK, "") if free > 0.9 * total else (NOTE, "end other processes on it (nvidia-smi lists them)")
        yield Finding(kind, f"{name} memory", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free", advice)
        region = pinned.Region(SAMPLE, pinned.numa_node(number), lambda done, size: None)
        try:
            region.register(pinned.cuda_register, pinned.cuda_unregister)
        except HostMemoryError as error:
            what, _, do = str(error).partition("; ")
            yield Finding(FAULT, f"{name} link", what, do)
            return
        try:
            host = region.tensor((SAMPLE,), torch.uint8)
            alone, loaded = rate(host, busy=False), rate(host, busy=True)
        finally:
            torch.cuda.synchronize()
            pinned.unregister_all(region.registered, pinned.cuda_unregister)
    said = f"{alone / 1e9:.1f} GB/s from pinned memory, {loaded / 1e9:.1f} GB/s beside products; {region.where}"
    known = devices.find(torch.cuda.get_device_name(number), total)
    if known is None or alone >= FAIR * known.link:
        yield Finding(OK, f"{name} link", said)
        return
    said += f"; a {known.name} is planned with {known.link / 1e9:.1f} GB/s"
    yield Finding(NOTE, f"{name} link", said, "check that its slot has all lanes (nvidia-smi -q -d PCIE)")


def orders(seconds: float) -> Finding:
    """Whether the host gives orders as fast as a GPU obeys them."""
    said = f"a small launch takes {seconds * 1e6:.0f} us of the host"
    if seconds <= SLOW:
        return Finding(OK, "orders", said)
    said += f"; from {SLOW * 1e6:.0f} us on first tokens wait for it"
    return Finding(
        NOTE, "orders", said, "end what else runs on its cores, or give the container or machine more of them"
    )


def launch_seconds() -> float:
    """What one small launch takes the host, one of many in a row."""
    one, found = torch.zeros(1, device="cuda"), []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            one.add_(1)
        found.append((time.perf_counter() - begin) / LAUNCHES)
    torch.cuda.synchronize()
    return statistics.median(found)


def rate(host: torch.Tensor, busy: bool) -> float:
    """Bytes a second of copies to the current GPU. busy: products run meanwhile."""
    target = torch.empty_like(host, device="cuda")
    matrix = torch.ones((4096, 4096), dtype=torch.float16, device="cuda") if busy else None
    side = torch.cuda.Stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    if matrix is not None:
        for _ in range(50 * ROUNDS):
            torch.mm(matrix, matrix)
    with torch.cuda.stream(side):
        begin.record(side)
        for _ in range(ROUNDS):
            target.copy_(host, non_blocking=True)
        end.record(side)
    torch.cuda.synchronize()
    return ROUNDS * host.numel() / (begin.elapsed_time(end) / 1e3)
