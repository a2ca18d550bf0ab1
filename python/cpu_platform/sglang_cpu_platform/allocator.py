"""SGLang's paged allocator with its two Triton kernels in torch."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Hands out the same slots as upstream's allocator, on any torch device."""

    free_pages: torch.Tensor  # int64 [free], page numbers; the next to be handed out first

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for tokens ``[prefix_lens, seq_lens)`` of each request, the started page first.

        Args:
            prefix_lens: int [N], tokens that have a slot.
            prefix_lens_cpu: the same on the CPU.
            seq_lens: int [N], tokens that shall have one.
            seq_lens_cpu: the same on the CPU.
            last_loc: int [N], slot of the last token that has one, -1 if none.
            extend_num_tokens: sum of ``seq_lens - prefix_lens``.
            num_new_pages: pages that this takes, if the caller knows.

        Returns:
            int64 [extend_num_tokens], or None when the pages do not suffice.
        """
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if self.need_sort and num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        slots = extend_slots(prefix_lens, seq_lens, last_loc, self.free_pages, extend_num_tokens, self.page_size)
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot per request, for token ``seq_lens - 1``; shapes as in ``alloc_extend``."""
        return self.alloc_extend(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Slots of the new tokens, request after request; pages are taken from the front of ``free_pages``."""
    prefix_lens, seq_lens = prefix_lens.long(), seq_lens.long()
    counts = seq_lens - prefix_lens
    request = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=num_tokens)
    first = torch.cumsum(counts, 0) - counts
    position = torch.arange(num_tokens, device=counts.device) - first[request] + prefix_lens[request]

    pages_before = (prefix_lens + page_size - 1) // page_size
    new_pages = (seq_lens + page_size - 1) // page_size - pages_before
    first_page = torch.cumsum(new_pages, 0) - new_pages
    in_started_page = position < (pages_before * page_size)[request]
    # Tokens of the started page take no page: they read entry 0, which torch.where throws away.
    page = torch.where(in_started_page, 0, first_page[request] + position // page_size - pages_before[request])
    if len(free_pages) == 0:
        free_pages = torch.zeros(1, dtype=torch.int64, device=counts.device)
    started = last_loc.long()[request] + 1 + position - prefix_lens[request]
    return torch.where(in_started_page, started, free_pages[page] * page_size + position % page_size)
