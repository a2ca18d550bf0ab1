"""Scratch of the CUDA engine on one device: allocated when first needed, never inside a graph capture, never freed."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sparse_kv.ops import abi
from sglang.srt.sparse_kv.ops.reference import CapacityError

ERROR_WORDS = 8


class Workspace:
    """Buffers that kernels share, and the flag by which they report failure. Who may run beside whom: see cuda.py.

    A buffer that must grow is replaced, and the old one kept: captured graphs still name it. So call `reserve` with the
    largest sizes before the first capture.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.error = torch.zeros(ERROR_WORDS, dtype=torch.int32, device=device)
        self.cursor = torch.zeros(2 * abi.JOBS, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(2, dtype=torch.int32, device=device)
        self.urgent = torch.zeros(4, dtype=torch.int32, device=device)
        self.tasks = torch.zeros(8 * abi.MOST_HEADS, dtype=torch.int32, device=device)
        self.skip = torch.zeros(1, dtype=torch.int32, device=device)
        self.miss_rate = torch.zeros(1, dtype=torch.int32, device=device)
        self._buffers: dict[str, torch.Tensor] = {}
        self._retired: list[torch.Tensor] = []
        self._works: dict[tuple[int, int], abi.Work] = {}  # by heads and entries
        self.plans: dict[Any, Any] = {}  # attention plans, by what they were planned for

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Scratch of at least `numel` elements, uninitialised. Raises RuntimeError when a capture had to allocate."""
        found = self._buffers.get(name)
        if found is not None and found.numel() >= numel and found.dtype == dtype:
            return found
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            have = 0 if found is None else found.numel()
            raise RuntimeError(
                f"scratch {name!r} has {have} elements and a CUDA graph capture needs {numel}; reserve it first"
            )
        if found is not None:
            self._retired.append(found)
        made = torch.empty(max(numel, 1), dtype=dtype, device=self.device)
        self._buffers[name] = made
        self._works.clear()  # they name the buffer that was there
        return made

    def work(self, heads: int, entries: int) -> abi.Work:
        """Scratch of operations on tables: `entries` units may be asked for per kv head and table."""
        known = self._works.get((heads, entries))
        if known is not None:
            return known
        lists = self.buffer("list", abi.JOBS * heads * entries, torch.int32)
        rows = self.buffer("rows", heads * entries * 4, torch.int32)
        width = min(lists.numel() // abi.JOBS, rows.numel() // 4) // heads
        used = (self.error, self.cursor, self.urgent, self.tasks, lists, rows, self.skip, self.miss_rate)
        made = self._works[heads, entries] = abi.Work(*(t.data_ptr() for t in used), width)
        return made

    def reserve(self, requests: int, rows: int, heads: int, group: int, max_pages: int, width: int, chunk_pages: int):
        """Makes room for decode steps of up to `requests` requests, selections of `width` pages and prefill chunks of
        `chunk_pages` pages. Returns the bytes held.
        """
        self.work(heads, max(requests * width, chunk_pages))
        self.scores(requests, rows, heads, group, max_pages)
        return self.nbytes

    def scores(self, requests: int, rows: int, heads: int, group: int, max_pages: int):
        """(logits, partial sums) of a score."""
        lines = requests * rows * heads * group
        logits = self.buffer("logits", lines * max_pages, torch.float32)
        partials = self.buffer("partials", lines * chunks(max_pages) * 2, torch.float32)
        return logits, partials

    @property
    def nbytes(self) -> int:
        held = [
            *self._buffers.values(),
            *self._retired,
            self.error,
            self.cursor,
            self.tickets,
            self.urgent,
            self.tasks,
            self.skip,
            self.miss_rate,
        ]
        return sum(t.numel() * t.element_size() for t in held)

    def check(self) -> None:
        """Raises CapacityError if a kernel reported one since the last call. Waits for the device."""
        code, head, needed, usable = self.error[:4].tolist()
        if code:
            self.error.zero_()
            raise CapacityError(
                f"kv head {head} needs {needed} slots and {usable} may be evicted; "
                "lower --max-running-requests or --sparse-kv-budget, or raise cache_memory"
            )


CHUNK = 64  # pages per partial sum: kChunk of the kernels


def chunks(max_pages: int) -> int:
    return -(-max_pages // CHUNK)


_workspaces: dict[torch.device, Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """The workspace of a device."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _workspaces:
        _workspaces[device] = Workspace(device)
    return _workspaces[device]


def skip_copies(device: torch.device, skip: bool) -> None:
    """Lets fetches on a device move nothing, captured ones too: wrong results, the times of a perfect link."""
    workspace(device).skip.fill_(int(skip))


def set_miss_rate(device: torch.device, rate: float) -> None:
    """Lets `resolve` with move, captured ones too, bring this share of hits (0 to 1, drawn anew in each step) from the
    host again, and count them as missed: same results, the times of a worse prediction.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"miss rate must be between 0 and 1, got {rate}")
    workspace(device).miss_rate.fill_(round(rate * 1_000_000))
