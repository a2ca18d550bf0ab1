"""When the engine's own gate would have let a context fetch ahead, had it run on what was recorded."""

from __future__ import annotations

import numpy as np
import torch

from benchmark.predictability.recording import Trace


def opened(trace: Trace, floor: float, late: int) -> np.ndarray:
    """Whether each layer may fetch what each step predicts, bool [S, L]. late: layers, counted from the last, that
    fetch in the step after.
    """
    from sglang.srt.sparse_kv.gate import EARLY, LATE, Gate

    count, layers = trace.true.shape[:2]
    gate, slot = Gate(1, "cpu"), torch.zeros(1, dtype=torch.int64)
    gate.start(slot)
    open_ = np.zeros((count, layers), dtype=bool)
    early = layers - min(late, layers)
    in_sync = torch.ones(1, dtype=torch.bool)  # a look-ahead gives the first guess
    for step, right in enumerate(torch.from_numpy(trace.right)[:, None]):
        gate.decide(slot, in_sync, floor)
        open_[step, :early] = bool(gate.open[EARLY, 0])
        gate.observe(slot, in_sync, right)
        open_[step, early:] = bool(gate.open[LATE, 0])
        in_sync = right
    return open_
