"""What each running request has read and said, on the device, and where in it the last tokens stood before."""

from __future__ import annotations

import torch

NONE = -1
# Longest run of last tokens that an earlier place is compared by. One token in common is worth a guess: where the
# alternative is a chain that has lost the text, any continuation seen before is right more often.
LONGEST = 3


class TokenHistory:
    """Tokens by request slot and position.

    tokens: int32 [slots, context]. A slot's row is valid up to the position written last; what an earlier owner left
    behind it is never read, because every owner starts with a prefill, which fills its row from the start.
    """

    def __init__(self, num_slots: int, context: int, device: torch.device | str) -> None:
        self.tokens = torch.full((num_slots, context), NONE, dtype=torch.int32, device=device)

    def fill(self, slot: int, tokens: torch.Tensor) -> None:
        """A prefill's tokens from position 0 on, int [T] on any device; pinned ones are not waited for."""
        self.tokens[slot, : len(tokens)].copy_(tokens, non_blocking=True)

    def append(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """slots, positions, tokens: int [N]."""
        self.tokens[slots, positions] = tokens.to(torch.int32)

    def following(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The token that followed the last tokens when they stood in the text before, or NONE.

        slots, positions: int [N], the position of each request's last token. The longest run of last tokens decides,
        up to LONGEST, then the latest place. Returns int64 [N]. Its work is one pass over [N, context], whatever the
        text; nothing waits for the host.
        """
        return _following(self.tokens, slots.long(), positions.long())


def _following(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """tokens int32 [slots, context]; slots, positions int64 [N]. Returns int64 [N]."""
    context = tokens.shape[1]
    rows = tokens[slots]  # [N, context]
    place = torch.arange(context, device=tokens.device)
    same = place < positions[:, None]
    length = torch.zeros_like(rows)
    for back in range(LONGEST):
        last = rows.gather(1, (positions - back).clamp(min=0)[:, None])  # [N, 1]
        earlier = torch.nn.functional.pad(rows, (back, 0), value=NONE)[:, :context]  # the token `back` before each
        same = same & (earlier == last) & (positions >= back)[:, None]
        length = length + same
    rank = torch.where(length > 0, length * context + place, NONE)
    best = rank.amax(1)
    found = rows.gather(1, (best.clamp(min=0) % context + 1).clamp(max=context - 1)[:, None])[:, 0]
    return torch.where(best >= 0, found, NONE).long()
