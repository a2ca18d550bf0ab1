"""How well each signal names the pages that the next step selects, and how long guides stay with the text."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmark.predictability.recording import Trace


@dataclasses.dataclass
class Sync:
    """hits: right guesses; steps: guesses. stay, back: probability that a right guess follows a right, a wrong one."""

    hits: int
    steps: int
    stay: float
    back: float


def sync(traces: list[Trace]) -> Sync:
    before = np.concatenate([trace.right[:-1] for trace in traces])
    after = np.concatenate([trace.right[1:] for trace in traces])
    right = np.concatenate([trace.right for trace in traces])

    def share(which: np.ndarray) -> float:
        return float(after[which].mean()) if which.any() else float("nan")

    return Sync(int(right.sum()), len(right), share(before), share(~before))


def recall(true: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Share of the true sets that is in `sets`. true [S, L, H, K], sets [S, L, H, M], -1 padded -> float [L]."""
    count, layers = true.shape[:2]
    found = np.zeros((count, layers))
    for step in range(count):
        inside = (true[step][..., None] == sets[step][:, :, None, :]).any(-1) & (true[step] >= 0)
        found[step] = inside.sum((1, 2)) / np.maximum((true[step] >= 0).sum((1, 2)), 1)
    return found.mean(0)


def union(sets: np.ndarray, count: int) -> np.ndarray:
    """Each step's set joined with those of the `count - 1` steps before it.

    int [S, L, H, K] -> [S - count + 1, L, H, count * K].
    """
    last = len(sets) - count + 1
    return np.concatenate([sets[start : start + last] for start in range(count)], -1)


def size(sets: np.ndarray, k: int) -> float:
    """Mean number of different pages in a set, in units of k."""
    ordered = np.sort(sets, -1)
    fresh = np.ones(ordered.shape, dtype=bool)
    fresh[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return float((fresh & (ordered >= 0)).sum(-1).mean()) / k


def recalls(traces: list[Trace], guides: dict[str, list[Trace]]) -> dict[str, tuple[float, np.ndarray]]:
    """For each signal its set's size in k and the recall of the next true set by layer.

    traces: whose true sets are to be named; guides: the traces of each guide, context by context.
    """
    k = traces[0].true.shape[-1]
    found: dict[str, tuple[float, np.ndarray]] = {}
    for name, back in (("last set", 1), ("union of last 2", 2), ("union of last 4", 4)):
        sets = [union(trace.true, back)[:-1] for trace in traces]
        parts = [recall(trace.true[back:], own) for trace, own in zip(traces, sets)]
        found[name] = (float(np.mean([size(own, k) for own in sets])), np.mean(parts, 0))
    for name, own_traces in guides.items():
        parts = [recall(trace.true[1:], trace.predicted[:-1]) for trace in own_traces]
        found[name] = (1.0, np.mean(parts, 0))
    for name, known in (("right guess", True), ("wrong guess", False)):
        parts = []
        for own_traces in guides.values():
            for trace in own_traces:
                steps = np.nonzero(trace.right[:-1] == known)[0]
                if len(steps):
                    parts.append(recall(trace.true[steps + 1], trace.predicted[steps]))
        if parts:
            found[name] = (1.0, np.mean(parts, 0))
    return found
