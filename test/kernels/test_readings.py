"""Counters are read while the device works, and the reader does not wait for it."""

from __future__ import annotations

import time

import torch
from sglang.srt.sparse_kv.metrics import Reader


def test_a_reading_waits_for_nothing(gpu):
    counters, guides = torch.arange(8, device=gpu).view(2, 4), torch.tensor([3, 4], device=gpu)
    read = Reader(gpu)
    expected = [[[0, 1, 2, 3], [4, 5, 6, 7]], [3, 4]]
    assert read(counters, guides) == expected
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # two seconds at 2 GHz, on the stream of the forward
    begin = time.monotonic()
    assert read(counters, guides) == expected
    with read.aside():
        used = (counters >= 4).sum()
    assert read(used) == [4]
    assert time.monotonic() - begin < 0.5
    torch.cuda.synchronize()
    assert time.monotonic() - begin > 0.5, "the device was not busy meanwhile"


def test_a_reading_on_the_cpu():
    assert Reader(torch.device("cpu"))(torch.tensor([[1, 2]]), torch.tensor(3)) == [[[1, 2]], 3]
