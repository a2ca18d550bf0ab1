"""Host memory for the pool: pieces, undoing, progress. Registration is faked, so no GPU is needed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from sglang.srt.sparse_kv import host_memory
from sglang.srt.sparse_kv.host_memory import HostMemoryError
from sglang.srt.sparse_kv.ops import pinned


class FakeDriver:
    def __init__(self, fail_at: int | None = None):
        self.calls: list[tuple[str, int]] = []
        self.fail_at = fail_at

    def register(self, address: int, length: int) -> int:
        if self.fail_at is not None and len(self.calls) == self.fail_at:
            return 2
        self.calls.append(("register", address))
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pinned, "PIECE", 4 << 20)
    monkeypatch.setattr(pinned, "STEP", 3 << 20)
    monkeypatch.setattr(pinned, "TOUCH", 1 << 20)


def region(total: int, seen: list | None = None) -> pinned.Region:
    return pinned.Region(total, None, lambda done, size: seen.append((done, size)) if seen is not None else None)


def test_pieces_cover_the_region_and_go_in_reverse(small_pieces):
    driver, seen = FakeDriver(), []
    memory = region(9 << 20, seen)
    memory.register(driver.register, driver.unregister)
    addresses = [memory.address + i * (4 << 20) for i in range(3)]
    assert driver.calls == [("register", a) for a in addresses]
    assert memory.size == 10 << 20, "whole huge pages"
    assert seen[-1] == (memory.size, memory.size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    pinned.unregister_all(memory.registered, driver.unregister)
    pinned.unregister_all(memory.registered, driver.unregister)
    assert driver.calls[3:] == [("unregister", a) for a in reversed(addresses)]


def test_a_failed_piece_undoes_those_before_it(small_pieces):
    driver = FakeDriver(fail_at=2)
    memory = region(12 << 20)
    with pytest.raises(HostMemoryError, match=r"refused to pin host memory after 0\.0 of 0\.0 GB .* locked memory"):
        memory.register(driver.register, driver.unregister)
    first, second = memory.address, memory.address + (4 << 20)
    assert driver.calls == [("register", first), ("register", second), ("unregister", second), ("unregister", first)]


def test_a_step_without_room_is_one_sentence(small_pieces, monkeypatch):
    """As with a second server on one host: what the first took is gone."""
    left = iter([9, 6, 3])
    monkeypatch.setattr(pinned, "PATIENCE", -1)
    monkeypatch.setattr(pinned, "MARGIN", 1 << 20)
    monkeypatch.setattr(host_memory, "available", lambda: next(left) << 20)
    seen: list = []
    with pytest.raises(HostMemoryError) as caught:
        region(10 << 20, seen)
    assert [done for done, _ in seen] == [3 << 20, 6 << 20], "two steps were taken"
    text = str(caught.value)
    assert "\n" not in text and "only 0.0 GB are left; lower --sparse-kv-host-memory" in text


def test_memory_that_grows_when_it_is_touched_is_waited_for(small_pieces, monkeypatch):
    answers = iter([0, 1, 2, 500, *[500] * 10])
    monkeypatch.setattr(pinned, "MARGIN", 1 << 20)
    monkeypatch.setattr(host_memory, "available", lambda: next(answers) << 20)
    region(4 << 20)
    assert next(answers) == 500


def test_a_kernel_that_does_not_say_refuses_nothing(small_pieces, monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 0)
    monkeypatch.setattr(host_memory, "meminfo", lambda name: 0)
    region(4 << 20)


def test_the_tensor_is_zero_writable_and_holds_the_memory():
    memory = region(1000 * 6)
    tensor = memory.tensor((3, 1000), torch.bfloat16)
    address = memory.address
    del memory
    assert tensor.data_ptr() == address
    assert not bool(tensor.any())
    tensor[2, 999] = 1.5
    assert float(tensor.sum()) == 1.5


def test_the_mapping_can_be_watched():
    """Unregistering hangs on the death of the mapping, which only the tensor keeps alive."""
    memory = region(1 << 20)
    tensor, gone = memory.tensor((1 << 18,), torch.float32), []
    weakref.finalize(memory.memory, gone.append, True)
    del memory
    gc.collect()
    assert not gone
    del tensor
    gc.collect()
    assert gone


def test_a_refused_wish_for_a_node_is_told():
    memory = region(1 << 20)
    assert pinned.bind_to_node(memory.address, memory.size, None) == "no NUMA node known"
    text = pinned.bind_to_node(memory.address, memory.size, 900)
    assert text.startswith("NUMA node 900 refused") or text == "no NUMA node known"


def test_pinned_memory_serves_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    tensor = pinned.pinned_empty((3, 1 << 20), torch.float16)
    assert tensor.is_pinned() and not bool(tensor.any())
    tensor.fill_(2)
    copy = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert bool((copy == 2).all())
