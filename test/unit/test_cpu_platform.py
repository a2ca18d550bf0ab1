"""The CPU platform: when it is chosen, and its torch functions against what they stand for."""

from __future__ import annotations

import inspect
import pkgutil
import types

import pytest
import sglang_cpu_platform
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang_cpu_platform import without_triton
from sglang_cpu_platform.allocator import TorchPagedAllocator, extend_slots
from sglang_cpu_platform.platform import TorchCpuPlatform

# ------------------------------------------------------------ choice


@pytest.mark.parametrize(
    ("cuda", "environment", "chosen"),
    [
        (False, {}, True),
        (True, {}, False),
        (True, {"SGLANG_PLATFORM": "torch_cpu"}, True),
        (False, {"SGLANG_USE_CPU_ENGINE": "1"}, False),
        (False, {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLATFORM": "torch_cpu"}, True),
    ],
)
def test_it_is_chosen_where_nothing_else_serves(cuda, environment, chosen, monkeypatch):
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    answer = sglang_cpu_platform.activate()
    assert (answer is not None) == chosen
    if answer:
        assert pkgutil.resolve_name(answer) is TorchCpuPlatform


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="--device is cuda"):
        TorchCpuPlatform().apply_server_args_defaults(types.SimpleNamespace(device="cuda"))


# ------------------------------------------------------------ the allocator


def make_allocator(num_pages: int, page_size: int) -> TorchPagedAllocator:
    return TorchPagedAllocator(num_pages * page_size, page_size, torch.float32, "cpu", None, need_sort=False)


@given(st.data(), st.sampled_from([1, 8, 16]))
def test_slots_are_those_of_upstreams_plain_version(data, page_size):
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5))
    prefix = torch.tensor([a for a, _ in lengths])
    total = torch.tensor([a + b for a, b in lengths])
    # The last slot of a request must lie at its prefix's offset in some page.
    last = torch.tensor(
        [1000 * page_size * (i + 1) + (a - 1) % page_size if a else -1 for i, (a, _) in enumerate(lengths)]
    )
    free = torch.randperm(200)
    count = int((total - prefix).sum())
    expected = torch.full((count,), -7, dtype=torch.int64)
    alloc_extend_naive(prefix, total, last, free, expected, page_size, "cpu")
    assert torch.equal(extend_slots(prefix, total, last, free, count, page_size), expected)


def test_decode_continues_a_page_and_starts_the_next():
    allocator = make_allocator(4, 8)
    lengths = torch.tensor([8, 9])  # with the token that needs a slot
    slots = allocator.alloc_decode(lengths, lengths, torch.tensor([22, 31]))
    assert slots.tolist() == [23, 8]
    assert allocator.available_size() == 3 * 8


def test_nothing_is_taken_when_pages_do_not_suffice():
    allocator = make_allocator(2, 8)
    zero, length, nowhere = torch.tensor([0]), torch.tensor([17]), torch.tensor([-1])
    assert allocator.alloc_extend(zero, zero, length, length, nowhere, 17) is None
    assert allocator.available_size() == 16
    length = torch.tensor([16])
    slots = allocator.alloc_extend(zero, zero, length, length, nowhere, 16)
    assert slots.tolist() == list(range(8, 24))
    more = torch.tensor([17])
    assert allocator.alloc_extend(length, length, more, more, slots[-1:], 1) is None
    allocator.free(slots)
    assert allocator.available_size() == 16


def test_the_allocator_overrides_what_upstream_has():
    for name in ("alloc_extend", "alloc_decode"):
        ours = inspect.signature(getattr(TorchPagedAllocator, name)).parameters
        assert list(ours) == list(inspect.signature(getattr(PagedTokenToKVPoolAllocator, name)).parameters)


# ------------------------------------------------------------ functions without Triton


def test_replacements_are_in_place_and_reach_aliases():
    without_triton.replace_triton_functions()
    without_triton.replace_triton_functions()
    for replacement in without_triton.REPLACEMENTS:
        owner, _, name = replacement.target.rpartition(".")
        assert vars(pkgutil.resolve_name(owner))[name] is replacement.function
    from sglang.srt.mem_cache import allocation

    assert allocation.support_triton is without_triton.support_triton


def test_another_signature_is_refused(monkeypatch):
    changed = without_triton.Replacement("sglang.srt.utils.common.support_triton", lambda other: False, "a test")
    monkeypatch.setattr(without_triton, "REPLACEMENTS", (changed,))
    with pytest.raises(RuntimeError, match="support_triton takes"):
        without_triton.replace_triton_functions()


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32-bit, seed 0, for lengths that are a multiple of four."""
    mask, state = 0xFFFFFFFF, 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        block = (block << 15 | block >> 17) & mask
        state ^= block * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_the_test_s_hash_is_murmur3():
    assert murmur3(b"test") == 0xBA6BD213  # a published value


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 200000))
def test_seeded_noise_is_hashed_as_on_a_gpu(seed, position, column):
    found = without_triton.murmur_hash32(
        torch.tensor([seed], dtype=torch.uint64), torch.tensor([position]), torch.tensor([column])
    )
    data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
    assert int(found) == murmur3(data)


def test_a_seeded_draw_follows_the_probabilities_and_only_the_seed():
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0])
    draws = 20000
    logprobs = probabilities.log().expand(draws, -1)
    seeds, positions = torch.full((draws,), 7), torch.arange(draws)
    first = without_triton.multinomial_with_seed(logprobs, seeds, positions)
    assert first.shape == (draws, 1)
    assert torch.equal(first, without_triton.multinomial_with_seed(logprobs, seeds, positions))
    counts = torch.bincount(first[:, 0], minlength=4).float()
    assert counts[3] == 0
    expected = probabilities[:3] * draws
    chi_square = ((counts[:3] - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # two degrees of freedom, one in a thousand


@given(st.data())
def test_new_slots_reach_the_rows_of_their_requests(data):
    rows = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    spans = [data.draw(st.tuples(st.integers(0, 20), st.integers(0, 5))) for _ in rows]
    start = torch.tensor([a for a, _ in spans])
    end = start + torch.tensor([b for _, b in spans])
    slots = torch.arange(int((end - start).sum())) + 100
    table = torch.full((10, 32), -1, dtype=torch.int32)
    expected, taken = table.clone(), 0
    for row, (begin, count) in zip(rows, spans):
        expected[row, begin : begin + count] = slots[taken : taken + count].int()
        taken += count
    without_triton.assign_req_to_token_pool_func(torch.tensor(rows), table, start, end, slots, len(rows))
    assert torch.equal(table, expected)


@pytest.mark.parametrize("vocab_size", [32, 33, 50, 4099])
def test_a_grammar_s_mask_forbids_exactly_its_zeros(vocab_size):
    xgrammar = pytest.importorskip("xgrammar")
    torch.manual_seed(vocab_size)
    mask = without_triton.allocate_token_bitmask(vocab_size, 3)
    logits = torch.randn(3, vocab_size)
    untouched = logits.clone()
    without_triton.apply_bitmask(untouched, mask)
    assert torch.equal(untouched, logits)
    mask.copy_(torch.randint(-(2**31), 2**31, mask.shape, dtype=torch.int64).int())
    expected = logits.clone()
    xgrammar.apply_token_bitmask_inplace(expected, mask)
    without_triton.apply_bitmask(logits, mask)
    assert torch.equal(logits, expected)
