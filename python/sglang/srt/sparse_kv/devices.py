"""Figures of GPUs that the cost model works with: one was measured, the others are their makers' numbers."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """One kind of GPU.

    memory: bytes. hbm: peak of its memory, bytes/s. flops: peak of dense half-precision products, FLOP/s. link: bytes/s
    that kernels bring from pinned host memory, one direction. measured: whether ``link``, and the shares of the peaks
    that cost.py takes for granted, were measured on this kind; else the peaks are published and the link is its
    published rate times the share that the H200 reaches of its own.
    """

    name: str
    memory: int
    hbm: float
    flops: float
    link: float
    measured: bool = False


# Published per direction, times the share that was measured: 51.0 of 64 GB/s (benchmark/results, H200 kernels).
_PCIE5 = 51.0e9
_PCIE4 = _PCIE5 / 2

DEVICES = (
    Device("H200", 143771 << 20, 4.8e12, 989e12, _PCIE5, measured=True),
    Device("B200", 183359 << 20, 8.0e12, 2250e12, _PCIE5),
    Device("H100", 81559 << 20, 3.35e12, 989e12, _PCIE5),
    Device("A100-80GB", 81920 << 20, 2.039e12, 312e12, _PCIE4),
    Device("A100-40GB", 40960 << 20, 1.555e12, 312e12, _PCIE4),
    Device("L40S", 46068 << 20, 0.864e12, 362e12, _PCIE4),
    Device("RTX 4090", 24564 << 20, 1.008e12, 165e12, _PCIE4),
    Device("A10", 23028 << 20, 0.6e12, 125e12, _PCIE4),
    Device("L4", 23034 << 20, 0.3e12, 121e12, _PCIE4),
)


def _key(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def find(name: str, memory: int | None = None) -> Device | None:
    """The device that a name such as "NVIDIA A100-SXM4-80GB" speaks of, None when it is not in the table.

    memory: bytes of the device; tells apart two of one name, the nearer size wins.
    """
    words = _key(name)
    matches = [device for device in DEVICES if _key(device.name.split("-")[0]) in words]
    if not matches:
        return None
    # The longest name first: an L40S is no L4.
    longest = max(len(device.name.split("-")[0]) for device in matches)
    matches = [device for device in matches if len(device.name.split("-")[0]) == longest]
    exact = [device for device in matches if _key(device.name) in words]
    if exact or memory is None:
        return (exact or matches)[0]
    return min(matches, key=lambda device: abs(device.memory - memory))


def stand_in(memory: int) -> Device:
    """The device of the table whose memory is nearest: figures for one that is not in it."""
    return min(DEVICES, key=lambda device: abs(device.memory - memory))


def this_gpu() -> str | None:
    """Name of the first GPU of this machine, None without one. Asks the driver, so that no CUDA context is made."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
