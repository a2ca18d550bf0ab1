"""What a decode step knows about its batch, and the count of right guesses, against the reference."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import cuda, reference_batch


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("page_size", "sinks", "window"), [(16, 16, 64), (8, 0, 1), (32, 100, 33), (16, 64, 2)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_step(engine, rows, page_size, sinks, window, dtype):
    shape = SelectionShape.from_tokens(page_size, 4 * page_size, sinks, window)
    length = torch.tensor([1, page_size - 1, page_size, page_size + 1, 97, 0, 1003 - rows], dtype=dtype)
    req = torch.tensor([3, 7, 1, 2, 5, 0, 6])
    tokens = torch.randint(0, 10**6, (8, 1003), generator=torch.Generator().manual_seed(window), dtype=torch.int32)
    to = lambda t: t.to(engine.device)  # noqa: E731
    for max_pages in (-(-1003 // page_size), 200):
        expected = reference_batch.decode_step(shape, max_pages, rows, tokens, req, length)
        got = cuda.decode_step(shape, max_pages, rows, to(tokens), to(req), to(length))
        for name, value in vars(expected).items():
            ours = getattr(got, name)
            assert ours.dtype == value.dtype and torch.equal(ours.cpu(), value), name


def test_no_request(engine):
    shape = SelectionShape.from_tokens(16, 64, 16, 64)
    none = torch.zeros(0, dtype=torch.int64, device=engine.device)
    tokens = torch.zeros((2, 64), dtype=torch.int32, device=engine.device)
    assert cuda.decode_step(shape, 4, 2, tokens, none, none).table.shape == (0, 4)


@pytest.mark.parametrize("count", [0, 1, 33, 300])
def test_count_guides(engine, count):
    random = torch.Generator().manual_seed(count)
    guess = torch.randint(-1, 3, (count,), generator=random)
    tokens = torch.randint(0, 3, (count,), generator=random, dtype=torch.int32)
    ours, expected = torch.tensor([5, 7], device=engine.device), torch.tensor([5, 7])
    for _ in range(2):
        reference_batch.count_guides(expected, guess, tokens)
        cuda.count_guides(ours, guess.to(engine.device), tokens.to(engine.device))
    assert torch.equal(ours.cpu(), expected)
