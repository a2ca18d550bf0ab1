"""Which requests may fetch ahead: those whose guesses have been right, by their own record.

A prediction is worth something if its guess is right. After a wrong one it names hardly anything that the cache does
not hold anyway, and much of what it fetches is never used. Whether the guess of a step is right shows at its end, so
layers that fetch under the step itself go by the request's record. The last layers, which fetch under the next step,
know the outcome, and a right guess opens them, too. A wrong one does not shut them: some of what it brings is needed,
and waiting costs more than three times a transfer that hides (measured, see docs).
"""

from __future__ import annotations

import torch

EARLY, LATE = 0, 1  # layers that fetch in the step that predicts, and in the one after
# What a new request is taken for: guesses after a wrong one, and after a right one. Measured, see docs.
PRIOR = (0.3, 0.95)
MEMORY = 16  # guesses that a record remembers, roughly


class Gate:
    """Records of request slots, all on the device. slots of arguments are int [N], flags bool [N].

    open: bool [2, slots]; EARLY, whether the predictions of the step that runs may be fetched, and LATE, those of the
    step before. rate: float32 [slots, 2], share of right guesses after a wrong one and after a right one.
    """

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self.open = torch.ones(2, num_slots, dtype=torch.bool, device=device)
        self.rate = torch.tensor([PRIOR], device=device).repeat(num_slots, 1)
        self._prior = torch.tensor(PRIOR, device=device)

    def start(self, slots: torch.Tensor) -> None:
        """New owners: their predictions are still to come, and the first forward's guesses may be anything."""
        self.rate[slots] = self._prior
        self.open.index_fill_(1, slots.long(), False)  # an assignment would wait for the device

    def decide(self, slots: torch.Tensor, in_sync: torch.Tensor, floor: float) -> None:
        """A step begins whose guesses rest on a right one, or not. floor: least chance of a right guess that is worth a
        fetch; 0 opens everything.
        """
        chance = self.rate[slots].gather(1, in_sync.long()[:, None])[:, 0]
        self.open[EARLY, slots] = chance >= floor

    def observe(self, slots: torch.Tensor, in_sync: torch.Tensor, right: torch.Tensor) -> None:
        """The step of `decide` has ended, and its guesses were right, or not."""
        place = in_sync.long()
        rate = self.rate[slots, place]
        self.rate[slots, place] = rate + (right.float() - rate) / MEMORY
        self.open[LATE, slots] = right | self.open[EARLY, slots]

    def reset(self) -> None:
        """No request is alive; without guesses nothing is held back."""
        self.open.fill_(True)
