"""Which token row 1 is fed: a guess at the token that this step's row 0 will give.

A guide decides what is fetched ahead, never what is generated. All strategies keep one state, a guess per request slot,
so that a running server can change from one to another.

How the chain gets into step: row 1 reads (row 0's token, guess) and its output is the guess for the next step. So a
right guess is followed by the computation that row 0 does one step later, and stays right. After a prefill there is no
guess yet. Starting from any token leaves the chain wrong until it happens to fall in with the text; a *look-ahead*, one
forward over the new requests alone that commits nothing, gives the first guess as row 0 will draw it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

import torch
from sglang.srt.sparse_kv.sampling import mix


class LookAhead(enum.Enum):
    """For which requests a step first computes its own outcome, to feed it as the guide."""

    STARTED = enum.auto()  # those in their first step after a prefill
    ALL = enum.auto()


class GuideState:
    """A guess per request slot.

    guess: int64 [slots], the token believed to follow the last one drawn, or NONE. Every owner of a slot starts with a
    prefill, which overwrites what the last owner left.
    """

    NONE = -1

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self.guess = torch.full((num_slots,), self.NONE, dtype=torch.int64, device=device)
        self.vocab_size = vocab_size

    def start(self, slots: torch.Tensor) -> None:
        """A prefill ended for `slots`, int [N]: nothing is known of what follows its token."""
        self.guess[slots] = self.NONE

    def set(self, slots: torch.Tensor, guess: torch.Tensor) -> None:
        """slots, guess: int [N]."""
        self.guess[slots] = guess.to(self.guess.dtype)

    def reset(self) -> None:
        self.guess.fill_(self.NONE)


class Guide(ABC):
    """A strategy over the shared state. All tensors are [N]; slots and positions are those of row 0."""

    look_ahead = LookAhead.STARTED

    def __init__(self, state: GuideState) -> None:
        self.state = state

    @abstractmethod
    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [N]: the guess for each request, or GuideState.NONE."""

    def observe(self, slots: torch.Tensor, drawn: torch.Tensor) -> None:
        """Row 1 drew `drawn`, int [N], to follow the tokens that row 0 has just drawn."""
        self.state.set(slots, drawn)


class ChainGuide(Guide):
    """Row 1 continues its own guesses."""

    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.state.guess[slots]


class ForcedGuide(ChainGuide):
    """Always right, at the price of a second forward a step: the upper bound, and what shows a wrong row 1 in tests."""

    look_ahead = LookAhead.ALL


class RandomGuide(Guide):
    """A token that has nothing to do with the text."""

    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Not torch's generator: upstream draws real tokens from it, and they must not change with the guide.
        return mix((slots.long() << 32) + positions).remainder(self.state.vocab_size)


class FrozenGuide(ChainGuide):
    """The guess of the moment at which it was switched on, or with which a request started."""

    def observe(self, slots: torch.Tensor, drawn: torch.Tensor) -> None:
        pass


_GUIDES: dict[str, type[Guide]] = {
    "chain": ChainGuide,
    "forced": ForcedGuide,
    "random": RandomGuide,
    "frozen": FrozenGuide,
}


def build_guides(state: GuideState) -> dict[str, Guide]:
    """Every strategy by its name, over one state."""
    return {name: kind(state) for name, kind in _GUIDES.items()}
