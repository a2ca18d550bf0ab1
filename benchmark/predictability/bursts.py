"""How unevenly fetches ahead fall on layers and steps: what `lookahead.BURST` leaves room for."""

from __future__ import annotations

import numpy as np

DRAWS = 4000  # steps that are put together


def excess(sizes: np.ndarray) -> np.ndarray:
    """The most that a run of neighbouring layers needs beyond one mean fetch each, float [M].

    sizes: float [M, L], what each layer of each step fetches ahead, in means.
    """
    most = run = np.zeros(len(sizes))
    for column in sizes.T:
        run = np.maximum(0.0, run + column - 1)
        most = np.maximum(most, run)
    return most


def bursts(ahead: list[np.ndarray], requests: int) -> dict[str, float]:
    """Of steps that are put together from so many requests, each any recorded step of any context.

    ahead: for each context [S, L], units fetched ahead. Returns layer: the mean of the layer that fetches most; step:
    the nine-in-ten quantile of a step; typical, run: the median and the nine-in-ten quantile of `excess`. All in means.
    """
    draw = np.random.default_rng(0)
    steps = np.concatenate(ahead).astype(np.float64)
    if not steps.any():
        return dict.fromkeys(("layer", "step", "typical", "run"), 0.0)
    sizes = steps[draw.integers(len(steps), size=(DRAWS, requests))].sum(1)
    sizes /= steps.mean() * requests
    found = excess(sizes)
    return {
        "layer": round(float(steps.mean(0).max() / steps.mean()), 2),
        "step": round(float(np.quantile(sizes.mean(1), 0.9)), 2),
        "typical": round(float(np.median(found)), 1),
        "run": round(float(np.quantile(found, 0.9)), 1),
    }
