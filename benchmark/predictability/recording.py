"""Recordings as arrays: what each context selected in every step, and what each guide predicted for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, order=True)
class Run:
    """All contexts under one guide at one temperature."""

    temperature: float
    guide: str

    def request(self, context: int) -> str:
        """The name under which a context's steps are recorded."""
        return f"{self.guide}/{self.temperature:g}/{context}"

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, guide {self.guide}"


@dataclasses.dataclass
class Trace:
    """One context under one guide. S steps, L layers, H kv heads, K pages of the budget; -1 pads page sets.

    true: int32 [S, L, H, K], row 0's chosen pages of each step. predicted: int32 [S, L, H, K], best first, what step s
    predicts for step s + 1. right: bool [S], whether row 1 was fed the token that row 0 drew. tokens: int [S], drawn.
    lengths: int [S], committed tokens.
    """

    true: np.ndarray
    predicted: np.ndarray
    right: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass
class Recording:
    traces: dict[Run, dict[int, Trace]]
    page_size: int
    unit_bytes: int

    def temperatures(self) -> list[float]:
        return sorted({run.temperature for run in self.traces})

    def guides(self, temperature: float) -> list[str]:
        return [run.guide for run in self.traces if run.temperature == temperature]


def load(folder: Path, empty: bool = False) -> Recording:
    """All files `*.steps` of a folder.

    Raises:
        ValueError: they hold no step of a study, and the recording may not be empty.
    """
    import sglang_dualdecoder

    sglang_dualdecoder.find_overlay()
    from sglang.srt.sparse_kv.recorder import PREDICTED, TRUE, read

    steps: dict[str, list] = {}
    constants = {"page_size": 0, "unit_bytes": 0}
    for path in sorted(folder.glob("*.steps")):
        found: dict[str, list] = {}
        for header, sets in read(path):
            constants = {name: header[name] for name in constants}
            for i, name in enumerate(header["requests"]):
                if name.count("/") != 2:
                    continue  # the server's own, and prefills
                drawn, guess = header["next"][i], header["guesses"][i]
                found.setdefault(name, []).append((header["lengths"][i], drawn, guess == drawn, sets[i]))
        # A recording that was broken off is taken up by another file, which has the run whole.
        steps |= {name: rows for name, rows in found.items() if len(rows) > len(steps.get(name, []))}
    if not steps and not empty:
        raise ValueError(f"{folder} holds no recorded steps; name a model to record some.")
    traces: dict[Run, dict[int, Trace]] = {}
    for name, rows in steps.items():
        guide, temperature, context = name.split("/")
        lengths, drawn, right, sets = zip(*rows)
        both = np.stack(sets)
        traces.setdefault(Run(float(temperature), guide), {})[int(context)] = Trace(
            both[:, :, :, TRUE], both[:, :, :, PREDICTED], np.array(right), np.array(drawn), np.array(lengths)
        )
    return Recording(traces, **constants)
