"""The torch reference of operations on a batch's lengths and page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def physical_pages(
    req_to_token: torch.Tensor, req_indices: torch.Tensor, page_size: int, max_pages: int
) -> torch.Tensor:
    """Page table of a batch. int32 [N, MP]; entries past a request's last allocated page are junk."""
    rows = req_to_token[req_indices, : max_pages * page_size : page_size]
    return torch.div(rows, page_size, rounding_mode="floor").to(torch.int32)


@dataclass
class Batch:
    """What a decode step knows about its batch; `step.DecodeStep` says what each is."""

    active: torch.Tensor  # bool [N]
    length: torch.Tensor  # int64 [N]
    table: torch.Tensor  # int32 [N, MP]
    open_page: torch.Tensor  # int32 [N]
    offset: torch.Tensor  # int64 [N]
    closed_pages: torch.Tensor  # int64 [N]
    last_tokens: torch.Tensor  # int64 [N]
    lo: torch.Tensor  # int64 [N, R]
    hi: torch.Tensor  # int64 [N, R]


def decode_step(shape, max_pages: int, rows: int, req_to_token, req, length) -> Batch:
    """req_to_token int32 [slots, context]; req int64 [N], 0 for padding; length int [N] committed tokens."""
    length = length.long()
    table = physical_pages(req_to_token, req, shape.page_size, max_pages)
    open_logical, offset = length // shape.page_size, length % shape.page_size
    lo, hi = shape.candidate_bounds(length[:, None] + torch.arange(rows, device=length.device))
    open_page = table.gather(1, open_logical[:, None])[:, 0]
    return Batch(req > 0, length, table, open_page, offset, open_logical, offset + 1, lo, hi)


def count_guides(counts: torch.Tensor, guess: torch.Tensor, tokens: torch.Tensor) -> None:
    """Adds right guesses and guesses to counts, int64 [2]. guess, tokens int [N]; a negative guess is none."""
    counts[0] += ((guess >= 0) & (guess == tokens)).sum()
    counts[1] += (guess >= 0).sum()
