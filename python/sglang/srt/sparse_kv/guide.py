"""Which token row 1 is fed: a guess at the token that this step's row 0 will give.

A guide decides what is fetched ahead, never what is generated. All strategies keep one state, a guess per request slot,
so that a running server can change from one to another.

How the chain gets into step: row 1 reads (row 0's token, guess) and its output is the guess for the next step. So a
right guess is followed by the computation that row 0 does one step later, and mostly stays right: row 1 attends to the
pages that row 0 selected, not to its own, and now and then draws another token. A wrong guess is followed by what would
follow *it*, and the chain stays lost until it happens to fall in with the text. Two things bring it back. After a
prefill, a *look-ahead*, one forward over the new requests alone that commits nothing, gives the first guess as row 0
will draw it. After a wrong guess, the next one is looked up in the text so far (`history.py`).
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod

import torch
from sglang.srt.sparse_kv.gate import Gate
from sglang.srt.sparse_kv.history import TokenHistory
from sglang.srt.sparse_kv.sampling import mix
from sglang.srt.utils import DynamicGradMode

# From this temperature on a text repeats itself so little that a lost chain, whose noise is the text's, is right at
# least as often as a lookup: in an earlier study of the demo model lookups helped at 0 and 0.6 and hurt at 1.
LOOK_UP_BELOW = 0.8


class LookAhead(enum.Enum):
    """For which requests a step first computes its own outcome, to feed it as the guide."""

    STARTED = enum.auto()  # those in their first step after a prefill
    ALL = enum.auto()


class GuideState:
    """A guess per request slot.

    guess: int64 [slots], the token believed to follow the last one drawn, or NONE. in_sync: bool [slots], whether that
    belief rests on a right guess. Every owner of a slot starts with a prefill, which overwrites what the last owner
    left. history: what lookups search, or None where no strategy looks up. looks_up: bool [slots], requests for which a
    lookup is worth more than a lost chain.
    """

    NONE = -1

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str, history: TokenHistory | None = None
    ) -> None:
        self.guess = torch.full((num_slots,), self.NONE, dtype=torch.int64, device=device)
        self.in_sync = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.looks_up = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.vocab_size = vocab_size
        self.history = history

    def start(self, slots: torch.Tensor) -> None:
        """A prefill ended for `slots`, int [N]: nothing is known of what follows its token."""
        # Not by assignment: torch would bring the number to the device, and wait until it is there.
        self.guess.index_fill_(0, slots.long(), self.NONE)
        self.in_sync.index_fill_(0, slots.long(), False)

    def set(self, slots: torch.Tensor, guess: torch.Tensor, in_sync: torch.Tensor | bool = True) -> None:
        """slots, guess: int [N]; in_sync: bool [N], or one for all."""
        self.guess[slots] = guess.to(self.guess.dtype)
        if isinstance(in_sync, bool):
            self.in_sync.index_fill_(0, slots.long(), in_sync)
        else:
            self.in_sync[slots] = in_sync

    def reset(self) -> None:
        self.guess.fill_(self.NONE)
        self.in_sync.fill_(False)


class Guide(ABC):
    """A strategy over the shared state. All tensors are [N]; slots and positions are those of row 0."""

    look_ahead = LookAhead.STARTED
    draws_greedily = False  # row 1 takes its likeliest token, whatever the request's temperature

    def __init__(self, state: GuideState) -> None:
        self.state = state

    @abstractmethod
    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [N]: the guess for each request, or GuideState.NONE."""

    def observe(self, slots: torch.Tensor, drawn: torch.Tensor, right: torch.Tensor) -> None:
        """Row 1 drew `drawn`, int [N], to follow the tokens that row 0 has just drawn; right, bool [N]: row 1 was fed
        those tokens.
        """
        self.state.set(slots, drawn, right)


class ChainGuide(Guide):
    """Row 1 continues its own guesses."""

    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.state.guess[slots]


class LookupGuide(Guide):
    """What followed the last tokens when they stood in the text before; the chain's guess where they never did."""

    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found = self._look_up(slots, positions)
        return torch.where(found >= 0, found, self.state.guess[slots])

    def _look_up(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert self.state.history is not None, "lookups need the token history"
        return self.state.history.following(slots, positions)


class ResyncGuide(LookupGuide):
    """The chain while it is right, a lookup where it was wrong, or where there is no chain yet."""

    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        looked_up, chain = super().propose(slots, positions), self.state.guess[slots]
        keep = (self.state.in_sync[slots] | ~self.state.looks_up[slots]) & (chain >= 0)
        return torch.where(keep, chain, looked_up)


class ForcedGuide(ChainGuide):
    """Always right, at the price of a second forward a step: the upper bound, and what shows a wrong row 1 in tests."""

    look_ahead = LookAhead.ALL


class GreedyGuide(ChainGuide):
    """A chain that does not share row 0's noise, to measure what sharing it is worth."""

    draws_greedily = True


class RandomGuide(Guide):
    """A token that has nothing to do with the text."""

    def propose(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Not torch's generator: upstream draws real tokens from it, and they must not change with the guide.
        return mix((slots.long() << 32) + positions).remainder(self.state.vocab_size)


class FrozenGuide(ChainGuide):
    """The guess of the moment at which it was switched on, or with which a request started."""

    def observe(self, slots: torch.Tensor, drawn: torch.Tensor, right: torch.Tensor) -> None:
        pass


_GUIDES: dict[str, type[Guide]] = {
    "chain": ChainGuide,
    "random": RandomGuide,
    "frozen": FrozenGuide,
    "forced": ForcedGuide,
    "greedy": GreedyGuide,
    "lookup": LookupGuide,
    "resync": ResyncGuide,
}
LOOKUPS = tuple(name for name, kind in _GUIDES.items() if issubclass(kind, LookupGuide))


def build_guides(state: GuideState) -> dict[str, Guide]:
    """Every strategy that the state allows by its name; those that look up need a history."""
    return {name: kind(state) for name, kind in _GUIDES.items() if state.history is not None or name not in LOOKUPS}


# ---------------------------------------------------------------- both ends of a step


def begin_step(
    guide: Guide, gate: Gate, slots: torch.Tensor, positions: torch.Tensor, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The guesses to feed, int64 [N], and whether each rests on a right one, bool [N]; tells the gate."""
    guess = guide.propose(slots, positions)
    in_sync = guide.state.in_sync[slots]
    gate.decide(slots, in_sync, floor)
    return guess, in_sync


def end_step(
    guide: Guide,
    gate: Gate,
    slots: torch.Tensor,
    in_sync: torch.Tensor,
    guess: torch.Tensor,
    tokens: torch.Tensor,
    drawn: torch.Tensor,
) -> None:
    """Row 0 drew `tokens`, row 1 `drawn`, int [N]; the rest is as `begin_step` took and gave it."""
    right = guess == tokens
    gate.observe(slots, in_sync, right)
    guide.observe(slots, drawn, right)


@functools.lru_cache(maxsize=1)
def compiled_steps():
    """The two as few kernels, for GPUs, where some thirty small ones would show in a step of few requests."""
    return torch.compile(begin_step, dynamic=True), torch.compile(end_step, dynamic=True)


@DynamicGradMode()
def warm_up(guide: Guide, gate: Gate, floor: float) -> None:
    """Compile, in the scheduler's gradient mode, so that no request waits for it. Uses the padding slot."""
    begin, end = compiled_steps()

    def zeros(rows: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        # No views: the compiler keeps tensors with a base apart from those without.
        return torch.zeros(rows, dtype=dtype, device=gate.open.device)

    # Equal sizes stay independent: that two requests are as many as the gate has rates means nothing.
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        for rows in (1, 2):  # the compiler treats one row as a case of its own
            slots = zeros(rows)
            guess, in_sync = begin(guide, gate, slots, zeros(rows), floor)
            for dtype in (torch.int64, torch.int32):  # of greedy tokens, and of sampled ones
                end(guide, gate, slots, in_sync, guess, zeros(rows, dtype), zeros(rows, dtype))
    gate.open[:, 0] = True
