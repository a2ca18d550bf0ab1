"""What one decode step knows about its batch, the same for every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape
from sglang.srt.sparse_kv.ops import reference_batch
from sglang.srt.sparse_kv.ops.reference import NONE, Selection
from sglang.srt.sparse_kv.variants import Variant


@dataclass
class Found:
    """Where a layer has the pages of a selection."""

    layer: int
    scale: float  # of the attention whose page table has been written
    slots: torch.Tensor  # int32 [N, H, C]


@dataclass
class DecodeStep:
    """Batch state of a decode step. N requests; lengths are committed tokens, row 0's own excluded."""

    req: torch.Tensor  # int64 [N] request slots; 0 is SGLang's padding row
    active: torch.Tensor  # bool [N]
    length: torch.Tensor  # int64 [N]
    table: torch.Tensor  # int32 [N, MP] physical page of each logical page
    open_page: torch.Tensor  # int32 [N] physical page of row 0's token
    offset: torch.Tensor  # int64 [N] its place in that page
    closed_pages: torch.Tensor  # int64 [N] pages that hold page_size committed tokens
    lo: torch.Tensor  # int64 [N, R] candidate bounds of each row
    hi: torch.Tensor  # int64 [N, R]
    last_tokens: torch.Tensor  # int64 [N] tokens in the open page, row 0's included
    selection: Selection | None = None  # of every layer, where it needs no scores
    found: Found | None = None  # where that selection lies in the layer to come

    @classmethod
    def build(
        cls,
        geometry: Geometry,
        shape: SelectionShape,
        variant: Variant,
        req_to_token,
        req,
        length,
        ops: Any = reference_batch,
    ) -> DecodeStep:
        """req_to_token int32 [slots, context]; req int64 [N]; length int [N]; ops: the device's engine."""
        batch = ops.decode_step(shape, geometry.max_pages, variant.rows, req_to_token, req, length)
        return cls(req=req, **vars(batch))

    def forced(self, shape: SelectionShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Forced pages of row 0 with the committed tokens of each: (int32 [N, F] physical, int32 [N, F]).

        An open page that holds no committed token yet is left out: there is nothing to fetch.
        """
        page_size = shape.page_size
        open_logical = (self.length // page_size)[:, None]
        first = ((self.length + 1 - shape.window).clamp(min=0) // page_size)[:, None]
        device = self.length.device
        sinks = torch.arange(shape.sink_pages, device=device).expand(self.length.shape[0], -1)
        recent = first + torch.arange(shape.window_pages, device=device)
        logical = torch.cat([torch.where(sinks < first, sinks, NONE), recent], 1)
        tokens = (self.length[:, None] - logical * page_size).clamp(0, page_size)
        wanted = (logical >= 0) & (logical <= open_logical) & (tokens > 0) & self.active[:, None]
        pages = self.table.gather(1, logical.clamp(0, self.table.shape[1] - 1))
        return torch.where(wanted, pages, NONE), tokens.to(torch.int32)

    def every_page(self, shape: SelectionShape, heads: int) -> Selection:
        """What is selected where no request has more pages than `shape` selects: all of them, the open page last."""
        pages = self.table[:, : shape.width]
        number = torch.where(self.active, self.closed_pages + 1, 0).clamp(max=pages.shape[1])
        logical = torch.arange(pages.shape[1], device=pages.device)
        pages = torch.where(logical < number[:, None], pages, NONE)
        if pages.shape[1] < shape.width:
            pages = torch.nn.functional.pad(pages, (0, shape.width - pages.shape[1]), value=NONE)
        return Selection(pages[:, None].expand(-1, heads, -1).contiguous(), number.to(torch.int32), None)
