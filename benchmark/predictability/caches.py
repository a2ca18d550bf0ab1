"""A page cache of one layer after another, replayed over recorded selections under any policy of prefetching.

It follows the engine's rules: units are stamped when selected or predicted, the oldest leave, a prediction evicts
nothing that the step itself selected, and pages that leave the window are resident for a while. Forced pages live
beside the cache that is replayed here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmark.predictability.recording import Trace

WARM_UP = 8  # steps until a replayed cache is in its stride; not counted


@dataclasses.dataclass
class Outcome:
    """Units a step, as shares of k, means over layers, heads, steps and contexts.

    missed: fetched on the critical path. moved: missed and fetched ahead. useful: share of what was fetched ahead that
    was selected before it left. clean: share of (step, layer) pairs without a miss in any head. by_layer: float [L],
    missed. ahead: of each context int [S, L], units fetched ahead in each step by all heads of a layer.
    """

    missed: float
    moved: float
    useful: float
    clean: float
    by_layer: np.ndarray
    ahead: list[np.ndarray]


class Replay:
    """Caches of all layers and heads of one context, `lanes` of them, over `pages` logical pages of `slots` slots."""

    def __init__(self, lanes: int, pages: int, slots: int):
        self.stamp = np.full((lanes, pages), -1, dtype=np.int32)  # -1: not resident
        self.ahead = np.zeros((lanes, pages), dtype=bool)
        self.slots = slots

    def install(self, last: int, clock: int) -> None:
        """What a prefill leaves behind: the last pages before `last`."""
        self.stamp[:, max(0, last - self.slots) : last] = clock

    def select(self, wanted: np.ndarray, clock: int) -> np.ndarray:
        """wanted: bool [lanes, pages]. Returns bool [lanes, pages], what was missing."""
        missing = wanted & (self.stamp < 0)
        self.ahead &= ~wanted
        self.stamp[wanted] = clock
        self._evict(clock)
        return missing

    def prefetch(self, predicted: np.ndarray, clock: int) -> np.ndarray:
        """predicted: int [lanes, K], best first, -1 padded. Returns the units fetched, int [lanes]."""
        lanes = np.arange(len(predicted))[:, None]
        valid = predicted >= 0
        stamp = np.where(valid, self.stamp[lanes, predicted], 0)
        missing = valid & (stamp < 0)
        lane, rank = np.nonzero(valid & (stamp >= 0))
        self.stamp[lane, predicted[lane, rank]] = clock
        room = self.slots - (self.stamp >= clock).sum(1)
        missing &= np.cumsum(missing, 1) <= room[:, None]
        lane, rank = np.nonzero(missing)
        page = predicted[lane, rank]
        self.stamp[lane, page] = clock
        self.ahead[lane, page] = True
        self._evict(clock)
        return np.bincount(lane, minlength=len(predicted))

    def enter(self, page: int, clock: int) -> None:
        """A page that leaves the window: resident, and soon forgotten."""
        self.stamp[:, page] = np.maximum(self.stamp[:, page], clock - 1)
        self._evict(clock)

    def _evict(self, clock: int) -> None:
        excess = (self.stamp >= 0).sum(1) - self.slots
        if not (excess > 0).any():
            return
        old = np.where((self.stamp >= 0) & (self.stamp < clock), self.stamp, np.iinfo(np.int32).max)
        order = np.argsort(old, axis=1, kind="stable")
        lane, rank = np.nonzero(np.arange(order.shape[1]) < excess[:, None])
        page = order[lane, rank]
        self.stamp[lane, page] = -1
        self.ahead[lane, page] = False


def replay(traces: list[Trace], slots: int, predicted: list[np.ndarray] | None, open_: list[np.ndarray] | None = None):
    """Outcome of one policy.

    Args:
        traces: the contexts.
        slots: of each layer and head, forced pages not counted.
        predicted: for each context int [S, L, H, K], what is fetched ahead at the end of each step; None: nothing.
        open_: for each context bool [S, L], whether layers may fetch what a step predicts; None: always.
    """
    missed, ahead, useful, clean, steps, units = [], [], 0, [], 0, 0
    for number, trace in enumerate(traces):
        count, layers, heads, k = trace.true.shape
        lanes = layers * heads
        true = trace.true.reshape(count, lanes, k)
        guess = None if predicted is None else predicted[number].reshape(count, lanes, k)
        pages = 1 + max(int(true.max()), -1 if guess is None else int(guess.max()))
        cache = Replay(lanes, pages, slots)
        highest, by_step = true.max((1, 2)), []
        cache.install(int(highest[0]) + 1, 0)
        units = k
        for step in range(count):
            clock = step + 2
            if step and highest[step] > highest[:step].max():
                cache.enter(int(highest[step]), clock)
            wanted = np.zeros((lanes, pages), dtype=bool)
            lane, rank = np.nonzero(true[step] >= 0)
            wanted[lane, true[step][lane, rank]] = True
            hits = int((wanted & cache.ahead).sum())
            missing = cache.select(wanted, clock)
            fetched = np.zeros(lanes, dtype=np.int64)
            if guess is not None:
                allowed = np.True_ if open_ is None else open_[number][step].repeat(heads)[:, None]
                fetched = cache.prefetch(np.where(allowed, guess[step], -1), clock)
            if step >= WARM_UP:
                by_layer = missing.reshape(layers, heads, pages).sum((1, 2))
                missed.append(by_layer / heads)
                clean.append(float((by_layer == 0).mean()))
                by_step.append(fetched.reshape(layers, heads).sum(1))
                useful, steps = useful + hits / lanes, steps + 1
        ahead.append(np.array(by_step).reshape(-1, layers))
    if not steps:
        raise ValueError(f"contexts of {WARM_UP} steps or fewer cannot be replayed; record more tokens.")
    by_layer = np.mean(missed, 0) / units
    share = float(by_layer.mean())
    fetched_ahead = sum(float(of_steps.sum()) for of_steps in ahead) / lanes
    moved = share + fetched_ahead / steps / units
    return Outcome(share, moved, useful / max(fetched_ahead, 1e-9), float(np.mean(clean)), by_layer, ahead)
