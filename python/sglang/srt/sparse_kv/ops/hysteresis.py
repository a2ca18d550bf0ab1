"""A page that a request's last step selected scores better in the next: what comes has to be that much better.

Scores of neighbouring pages lie close, and at the border of the budget pages would come and go with every step, each
time over the link, for hardly any attention. Schmitt's trigger, for pages.

What a request selects then depends on its own steps since its prefill, and still on nothing else: not on its guide,
its neighbours, what is resident or what moves when. Where all candidates are selected nothing is remembered, so that
steps without scores, which select everything, may come between; the first step whose scores decide favours none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WORD = 32  # bits


@dataclass
class Last:
    """What the last step of each request selected of its candidates.

    bits: int32 [slots, 2, H, W], words of 32 candidates, the first behind the sinks in the lowest bit. A step at an
    even length reads the first of two and writes the second, one at an odd length the other way round: what it read is
    there as long as it runs, so a step that is done twice does the same twice, and what it wrote is what row 1, one
    position ahead, reads. owner: int [N] request slots. bonus: float32 [1], what a page of the last selection is better
    by, nats.
    """

    bits: torch.Tensor
    owner: torch.Tensor
    bonus: torch.Tensor

    def favoured(self, scores: torch.Tensor, length: torch.Tensor, sink_pages: int) -> torch.Tensor:
        """Scores float32 [N, H, MP] with what the last selection adds in a step at length int [N] committed tokens."""
        bits = self.bits[self.owner.long(), (length % 2).long()]  # [N, H, W]
        chosen = (bits[..., None] >> torch.arange(WORD, device=bits.device) & 1).flatten(2).bool()
        known = chosen[..., : max(scores.shape[2] - sink_pages, 0)]
        scores = scores.clone()
        part = scores[..., sink_pages : sink_pages + known.shape[2]]
        part.copy_(torch.where(known, part + self.bonus, part))
        return scores

    def remember(self, chosen: torch.Tensor, competed: torch.Tensor, length: torch.Tensor, sink_pages: int) -> None:
        """chosen int32 [N, H, K] logical pages of row 0; competed bool [N]: not of all candidates."""
        chosen, owner, length = chosen[competed], self.owner[competed].long(), length[competed].long()
        n, heads, _ = chosen.shape
        bits = torch.zeros((n, heads, self.bits.shape[3] * WORD), dtype=torch.int64, device=chosen.device)
        bits.scatter_(2, chosen.long() - sink_pages, 1)
        packed = (bits.unflatten(2, (-1, WORD)) << torch.arange(WORD, device=chosen.device)).sum(-1)
        self.bits[owner, (length + 1) % 2] = torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)
