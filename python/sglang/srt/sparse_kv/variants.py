"""Which kind of step a batch takes, chosen on the host from what is known without waiting for the device.

Two rows a request pay where pages come and go: row 1 says what to fetch. Once every page of every running request fits
the page cache, misses die out by themselves: a page that was needed stays, since nothing but pages of these requests is
still wanted. Then one row does. And where contexts are within the budget, sinks and window, or shorter than `whole`,
all pages are selected whatever their scores, so that none need be computed.

A choice costs time or saves it; the tokens are the same.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime

# Steps for which a batch must have been able to go with one row before it does, once it had two. On the way back every
# request's guess is computed by a step of its own, so that going to and fro takes 3 % of the time at most.
SETTLE = 32


class Variant(enum.Enum):
    TWO_ROWS = "two_rows"
    ONE_ROW = "one_row"
    ALL_PAGES = "all_pages"  # one row, and no scores: every page is selected

    @property
    def rows(self) -> int:
        return 2 if self is Variant.TWO_ROWS else 1


class Chooser:
    """Keeps the length of every running request, and chooses. Slots of arguments are int64 [N] on the host.

    All ranks see the same batches, so they choose alike.
    """

    def __init__(self, num_slots: int) -> None:
        # numpy's calls take a fraction of torch's time, and this is on every step's way.
        self.lengths = np.zeros(num_slots, np.int64)  # committed tokens
        self._unguessed = np.zeros(num_slots, np.bool_)  # ran with one row since their last guess
        self._settled = SETTLE  # steps in a row for which one row would have done

    def start(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """A prefill: the slots' owners have so many tokens."""
        self.lengths[slots.numpy()] = lengths.numpy()
        self._unguessed[slots.numpy()] = False

    def choose(self, slots: torch.Tensor, runtime: SparseKVRuntime) -> Variant:
        """The variant of the next step of these requests, which adds one token to each."""
        places = slots.numpy()
        lengths = self.lengths[places]
        self.lengths[places] = lengths + 1
        variant = self._choose(lengths, runtime)
        if variant is not Variant.TWO_ROWS:
            self._unguessed[places] = True
        return variant

    def take_unguessed(self, slots: torch.Tensor) -> list[int]:
        """Places in the batch of the requests that have no guess because they ran with one row; they are told once."""
        places = self._unguessed[slots.numpy()].nonzero()[0].tolist()
        if places:
            self._unguessed[slots.numpy()] = False
        return places

    def reset(self) -> None:
        """No request is alive."""
        self._unguessed[:] = False
        self._settled = SETTLE

    def _choose(self, lengths: np.ndarray, runtime: SparseKVRuntime) -> Variant:
        policy, shape, cache = runtime.policy, runtime.shape, runtime.cache
        if policy.rows == 2:
            return Variant.TWO_ROWS
        everything = False
        if policy.skip_scores and not cache.scoped and runtime.recorder is None:
            everything = shape.takes_every_page(int(lengths.max()))
        alone = Variant.ALL_PAGES if everything else Variant.ONE_ROW
        if policy.rows == 1 or runtime.config.most_rows == 1:
            return alone
        pages = int((lengths // shape.page_size + 1).sum())
        does = not cache.scoped and pages <= cache.usable and runtime.recorder is None
        if not everything:
            most = shape.most_alone(cache.usable)
            does = does and len(lengths) <= (most if runtime.most_alone is None else min(most, runtime.most_alone))
        self._settled = min(self._settled + 1, SETTLE) if does else 0
        return alone if self._settled == SETTLE else Variant.TWO_ROWS
