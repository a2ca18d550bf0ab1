"""Writes what every decode step selected and predicted to a file, for studies of what predicts (config `record`).

A file is a sequence of steps, each two arrays in numpy's own format: a JSON header as uint8, and the page sets. It is
read back by `read`. Recording waits for the device in every layer, so it is for measurements only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops.reference import NONE
from sglang.srt.sparse_kv.step import DecodeStep

TRUE, PREDICTED = 0, 1  # which row's set


class Recorder:
    """One file for one engine. Raises FileExistsError: a second rank would write other heads to the same file."""

    def __init__(self, path: str, page_size: int, unit_bytes: int) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "xb")  # noqa: SIM115 (open until the process ends)
        self._layers: list[np.ndarray] = []
        self._constants = {"page_size": page_size, "unit_bytes": unit_bytes}

    def layer(self, step: DecodeStep, shape: SelectionShape, pages: torch.Tensor, predicted: torch.Tensor) -> None:
        """Remembers one layer's sets: pages int32 [N, H, C] physical, row 0's; predicted int32 [N, H, K] logical.

        Of contexts that are selected whole, row 0's may be more than K; then predictions are padded.
        """
        if pages.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("selections are recorded step by step, which a CUDA graph skips; --disable-cuda-graph")
        wider = max(0, shape.whole_pages - predicted.shape[2])
        predicted = torch.nn.functional.pad(predicted, (0, wider), value=NONE)
        chosen = torch.full_like(predicted, NONE)
        for i, length in enumerate(step.length.tolist()):
            table, order = step.table[i, : length // shape.page_size + 1].sort()
            logical = order[torch.searchsorted(table, pages[i].clamp(min=0)).clamp(max=len(order) - 1)]  # [H, C]
            candidate = (pages[i] >= 0) & (logical >= step.lo[i, 0]) & (logical < step.hi[i, 0])
            # Candidates first, in order; there are no more than the budget or, of a whole context, its pages.
            ranked = torch.where(candidate, logical, torch.iinfo(torch.int64).max).sort(-1).values
            ranked = torch.where(ranked < len(order), ranked, NONE)[:, : chosen.shape[2]]
            chosen[i, :, : ranked.shape[1]] = ranked.to(torch.int32)
        self._layers.append(torch.stack([chosen, predicted], 2).cpu().numpy())  # [N, H, 2, K]

    def commit(self, header: dict[str, Any]) -> None:
        """Writes the layers since the last call as one step. header: builtins, lists with one entry a request."""
        text = json.dumps({**self._constants, **header}).encode()
        np.save(self._file, np.frombuffer(text, dtype=np.uint8))
        np.save(self._file, np.stack(self._layers, 1))
        self._file.flush()
        self._layers.clear()

    def drop(self) -> None:
        """Forgets the layers since the last call: they belong to a forward that commits nothing."""
        self._layers.clear()


def read(path: str | Path) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """The steps of a file: (header, sets int32 [N, L, H, 2, K] of logical pages, NONE padded; TRUE and PREDICTED)."""
    with open(path, "rb") as file:
        end = file.seek(0, 2)
        file.seek(0)
        while file.tell() < end:
            header = json.loads(np.load(file).tobytes())
            yield header, np.load(file)
