"""Shapes that every room agrees on: the model's KV geometry and the selection's page arithmetic.

Imports no torch: `sglang-sparse-kv plan` does this arithmetic, too, and answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


LANDMARK_PARTS = 4  # vectors that stand for a page, each for as many neighbouring tokens


@dataclass(frozen=True)
class Geometry:
    """KV geometry of one rank.

    num_pages counts the dummy page 0, which SGLang's allocators never hand out and which padded rows may touch.
    max_pages is the number of logical pages that one request can own; staging_tokens, which the plan settles, are those
    of each of prefill's two staging slots.
    """

    num_layers: int
    kv_heads: int
    group: int  # query heads per kv head
    head_dim: int
    page_size: int
    num_pages: int
    max_pages: int
    max_requests: int
    dtype: torch.dtype  # for arithmetic alone, anything with an itemsize
    staging_tokens: int = 1024

    @property
    def unit_bytes(self) -> int:
        """Bytes of one (page, kv head) unit: K and V of page_size tokens."""
        return 2 * self.page_size * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers and heads of the host pool."""
        return self.num_layers * self.kv_heads * self.unit_bytes

    @property
    def selection_words(self) -> int:
        """int32 words with a bit for each page that a request can own."""
        return -(-self.max_pages // 32)

    @property
    def selected_bytes(self) -> int:
        """Bytes of a request's last two selections, a bit for each page."""
        return self.num_layers * self.kv_heads * 2 * self.selection_words * 4

    @property
    def landmark_bytes(self) -> int:
        """Bytes of one unit's landmark: half a byte a value, and two for each part's scale."""
        return LANDMARK_PARTS * (self.head_dim // 2 + 2)


@dataclass(frozen=True)
class SelectionShape:
    """How many pages a selection may hold, and which are forced.

    A selection of row 0 at committed length `len` is: sink pages, up to budget_pages chosen pages, and the pages of the
    last `window` tokens, the open page (that of position `len`) included. Where `len` is below `whole`, all pages are
    chosen.
    """

    page_size: int
    budget_pages: int
    sink_pages: int
    window: int  # tokens, at least 1: the open page is always forced
    whole: int = 0  # tokens

    @classmethod
    def from_tokens(
        cls, page_size: int, budget: int, sinks: int, window: int, max_pages: int | None = None, whole: int = 0
    ) -> SelectionShape:
        """max_pages: most that a request can own. What is said beyond it selects nothing more and would cost memory."""
        if max_pages is not None:
            most = max_pages * page_size
            budget, sinks, window, whole = (min(tokens, most) for tokens in (budget, sinks, window, whole))
        return cls(page_size, budget // page_size, -(-sinks // page_size), max(window, 1), whole)

    @property
    def window_pages(self) -> int:
        """Most pages that `window` tokens ending anywhere can touch."""
        return -(-(self.window - 1) // self.page_size) + 1

    @property
    def forced_pages(self) -> int:
        return self.sink_pages + self.window_pages

    @property
    def scored_width(self) -> int:
        """Pages in a selection whose scores decide."""
        return self.budget_pages + self.forced_pages

    @property
    def whole_pages(self) -> int:
        """Pages of the longest context below `whole`, the open page included."""
        return -(-self.whole // self.page_size)

    @property
    def width(self) -> int:
        """Pages in the largest selection."""
        return max(self.scored_width, self.whole_pages)

    def prefetch_pages(self, share: float) -> int:
        """Pages that `share` of the budget is, rounded up."""
        return math.ceil(round(share * self.budget_pages, 6))

    def most_alone(self, slots: int) -> int:
        """Most requests for which one row with scores is held ready: contexts of two selections each still fit."""
        return slots // (2 * self.scored_width)

    def takes_every_page(self, length: int) -> bool:
        """Whether contexts of up to so many committed tokens are selected whole, whatever the scores."""
        closed = max(0, length + 1 - self.window) // self.page_size
        return length < self.whole or closed - min(closed, self.sink_pages) <= self.budget_pages

    def candidate_bounds(self, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logical pages [lo, hi) that compete for the budget when the query sits at position `length`.

        length: int [...], committed tokens before the query's own. Every candidate is closed, because the open page and
        the window are forced; lo == hi when there is none.
        """
        hi = (length + 1 - self.window).clamp(min=0) // self.page_size
        return hi.clamp(max=self.sink_pages), hi


def resident_layers(residency: Any, num_layers: int) -> frozenset[int]:
    """Layers that keep their slots between steps.

    residency: "all" (or "auto", unless the planner decided otherwise), "none", a fraction of the layers (the first
    ones), or a list of layer numbers.
    Raises ValueError on anything else.
    """
    share = (
        {"auto": 1.0, "all": 1.0, "none": 0.0}.get(residency, residency) if isinstance(residency, str) else residency
    )
    if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1:
        return frozenset(range(round(share * num_layers)))
    if isinstance(share, (list, tuple)) and all(type(i) is int and 0 <= i < num_layers for i in share):
        return frozenset(share)
    raise ValueError(
        f'residency must be "all", "none", a fraction, or a list of layers below {num_layers}, got {residency!r}'
    )
