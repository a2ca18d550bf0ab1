"""Counters are read while the device works, and the reader does not wait for it."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import pytest
import torch
from sglang.srt.sparse_kv.metrics import Reader

EXPECTED = [[[0, 1, 2, 3], [4, 5, 6, 7]], [3, 4]]


@contextlib.contextmanager
def held(stream: torch.cuda.Stream, most: float = 30):
    """The stream goes no further until the block is left, or, for what waits for the stream there, so many seconds."""
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    status = wait(stream.cuda_stream, gate.data_ptr(), 1, 0)
    if status:
        pytest.skip(f"this driver cannot hold a stream: CUDA error {status}")
    rescue = threading.Timer(most, lambda: gate.fill_(1))
    rescue.start()
    try:
        yield
    finally:
        rescue.cancel()
        gate.fill_(1)
        torch.cuda.synchronize()


def reading(read: Reader, counters: torch.Tensor, guides: torch.Tensor) -> list:
    with read.aside():
        used = (counters >= 4).sum()
    return [*read(counters, guides), *read(used)]


def test_a_reading_waits_for_nothing(gpu):
    counters, guides = torch.arange(8, device=gpu).view(2, 4), torch.tensor([3, 4], device=gpu)
    read = Reader(gpu)
    assert reading(read, counters, guides) == [*EXPECTED, 4]
    counters.add_(0)  # a kernel is loaded at its first use, and loading waits for the device
    torch.cuda.synchronize()
    forward = torch.cuda.current_stream()
    with held(forward):
        counters.add_(1)
        done = forward.record_event()
        assert reading(read, counters, guides) == [*EXPECTED, 4], "a reading holds what there is now"
        assert not done.query(), "the reader waited for the forward"
    assert done.query() and read(guides) == [[3, 4]]
    assert reading(read, counters, guides)[0] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_reader_that_waits_is_noticed(gpu):
    counters = torch.zeros(2, device=gpu)
    with held(torch.cuda.current_stream(), most=1):
        done = torch.cuda.current_stream().record_event()
        counters.tolist()
        assert done.query()


def test_a_reading_on_the_cpu():
    assert Reader(torch.device("cpu"))(torch.tensor([[1, 2]]), torch.tensor(3)) == [[[1, 2]], 3]
