"""What a decode step knows about its batch, position by position."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape
from sglang.srt.sparse_kv.ops.reference import NONE
from sglang.srt.sparse_kv.step import DecodeStep
from sglang.srt.sparse_kv.variants import Variant

PAGE, PAGES = 4, 30


def geometry(max_pages: int = 12) -> Geometry:
    return Geometry(1, 2, 1, 2, PAGE, PAGES, max_pages, 8, torch.float32)


def table(requests: int, width: int = 12 * PAGE) -> torch.Tensor:
    """req_to_token int32 [slots, context] of scattered pages; row 0 is SGLang's padding."""
    rand = torch.Generator().manual_seed(requests)
    rows = torch.zeros((requests + 1, width), dtype=torch.int32)
    pages = torch.randperm(1000, generator=rand)[: requests * -(-width // PAGE)].view(requests, -1) + 1
    rows[1:] = (pages.repeat_interleave(PAGE, 1) * PAGE + torch.arange(PAGE).repeat(pages.shape[1]))[:, :width]
    return rows


def build(lengths: list[int], req: list[int] | None = None, shape=None, rows: int = 2, dtype=torch.int64, **kwargs):
    variant = Variant.TWO_ROWS if rows == 2 else kwargs.get("variant", Variant.ONE_ROW)
    shape = shape or SelectionShape.from_tokens(PAGE, 2 * PAGE, PAGE, PAGE + 1)
    tokens = kwargs["tokens"] if "tokens" in kwargs else table(len(lengths))
    req = list(range(1, len(lengths) + 1)) if req is None else req
    index = torch.tensor(req, dtype=torch.int64)
    step = DecodeStep.build(
        kwargs.get("geometry", geometry()), shape, variant, tokens, index, torch.tensor(lengths, dtype=dtype)
    )
    return step, tokens, shape


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_0_sits_at_the_committed_length(dtype):
    lengths = list(range(1, 5 * PAGE))
    step, tokens, _ = build(lengths, dtype=dtype)
    for i, length in enumerate(lengths):
        slot = int(tokens[i + 1, length])
        assert (int(step.open_page[i]), int(step.offset[i])) == divmod(slot, PAGE)
        assert int(step.closed_pages[i]) == length // PAGE, "pages that hold page_size committed tokens"
        assert int(step.last_tokens[i]) == length % PAGE + 1
        assert bool(step.active[i])
        assert step.table[i].tolist() == (tokens[i + 1, ::PAGE] // PAGE).tolist()
    assert step.open_page.dtype == step.table.dtype == torch.int32


@pytest.mark.parametrize("window", [1, 2, PAGE, PAGE + 1, 3 * PAGE, 100])
@pytest.mark.parametrize("sinks", [0, 1, PAGE, 3 * PAGE, 100])
def test_forced_pages_and_their_committed_tokens(window, sinks):
    """Token by token: what row 0 must attend to and the host already holds."""
    shape = SelectionShape.from_tokens(PAGE, PAGE, sinks, window, max_pages=12)
    lengths = list(range(6 * PAGE + 1))
    step, tokens, _ = build(lengths, shape=shape)
    pages, counts = step.forced(shape)
    assert pages.shape == counts.shape == (len(lengths), shape.forced_pages)
    for i, length in enumerate(lengths):
        committed: dict[int, int] = {}
        for t in range(length):
            page = int(tokens[i + 1, t]) // PAGE
            committed[page] = committed.get(page, 0) + 1
        wanted = {t // PAGE for t in range(max(0, length + 1 - window), length + 1)}
        wanted |= set(range(min(shape.sink_pages, length // PAGE + 1)))
        expected = {int(tokens[i + 1, p * PAGE]) // PAGE for p in wanted}
        expected = {page: committed[page] for page in expected if committed.get(page, 0)}
        found = [(p, c) for p, c in zip(pages[i].tolist(), counts[i].tolist()) if p != NONE]
        assert dict(found) == expected and len(found) == len(expected), f"length {length}"


def test_padding_is_no_request():
    step, _, shape = build([1, 9, 1], req=[0, 2, 0], tokens=table(3))
    assert step.active.tolist() == [False, True, False]
    pages, _ = step.forced(shape)
    assert bool((pages[[0, 2]] == NONE).all()) and bool((pages[1] != NONE).any())
    assert step.open_page.tolist()[::2] == [0, 0], "padding may touch the dummy page only"


def test_nobody():
    step, _, shape = build([], req=[], tokens=table(1))
    assert step.table.shape == (0, 12) and step.lo.shape == (0, 2)
    assert step.forced(shape)[0].shape == (0, shape.forced_pages)


@pytest.mark.parametrize("rows", [1, 2])
def test_bounds_of_each_row(rows):
    step, _, shape = build([13, 16, 30], rows=rows)
    assert step.lo.shape == step.hi.shape == (3, rows)
    for row in range(rows):
        lo, hi = shape.candidate_bounds(torch.tensor([13, 16, 30]) + row)
        assert torch.equal(step.lo[:, row], lo) and torch.equal(step.hi[:, row], hi)


def test_the_last_position_of_the_context():
    """SGLang's table is a few tokens wider than the context and no multiple of the page; geometry rounds up."""
    context = 5 * PAGE
    width = context + 6
    tokens = table(1, width)
    for length in range(context - 2, context + 2):
        step, _, shape = build([length], tokens=tokens, geometry=geometry(-(-(context + 8) // PAGE) + 1))
        assert int(step.open_page[0]) == int(tokens[1, length]) // PAGE
        assert int(step.hi.max()) <= step.table.shape[1]
        step.forced(shape)
