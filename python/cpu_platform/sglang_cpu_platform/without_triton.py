"""Functions of SGLang that reach for Triton, NCCL or pinned memory, replaced where there is none of them.

Each entry of ``REPLACEMENTS`` names the target, says why it must go, and keeps its signature. They are put in
place when SGLang initialises the platform, in the processes that run a model.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType

import torch


def support_triton(backend: str) -> bool:
    return False


def get_last_loc(
    req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    """Slot of each request's last token, -1 without one: int32 [slots, tokens], int [N], int [N] -> int [N]."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write each request's new slots into columns ``[start_offset, end_offset)`` of its row.

    req_pool_indices, start_offset, end_offset int [N]; req_to_token int32 [slots, tokens];
    out_cache_loc int64 [sum(end_offset - start_offset)], request after request.
    """
    counts = (end_offset - start_offset).long()
    request = torch.repeat_interleave(torch.arange(batch_size), counts)
    first = torch.cumsum(counts, 0) - counts
    column = torch.arange(len(request)) - first[request] + start_offset.long()[request]
    req_to_token[req_pool_indices.long()[request], column] = out_cache_loc[: len(request)].to(req_to_token.dtype)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column): uint64 [N], int [N], int [M] -> uint32 [N, M]."""
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.long() & _MASK):
        state = _mix(state, block)
    state = _mix(state[:, None], col_indices.long()[None, :] & _MASK) ^ 16  # 16 bytes were hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_MASK = 0xFFFFFFFF


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # int64 overflow keeps the low 32 bits right, which is all that the masks let through.
    block = _rotate((block * 0xCC9E2D51) & _MASK, 15)
    state = _rotate(state ^ ((block * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A draw per row by the Gumbel trick, as upstream's, uncompiled: float [N, M], int [N], int [N] -> int64 [N, 1]."""
    columns = torch.arange(logprobs.shape[1])
    uniform = murmur_hash32(seed, positions, columns).to(torch.float64) / _MASK
    lowest = torch.finfo(torch.float64).min
    noise = -torch.log(-torch.log(uniform).clamp(min=lowest))
    return torch.argmax(noise + logprobs.to(torch.float64), dim=1, keepdim=True)


def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """Nothing: torch's own products serve. Seeds then repeat a draw where the logits repeat."""


def allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """The grammar's bitmask, int32 [batch_size, ceil(vocab_size / 32)], all tokens allowed."""
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Set the logits, float [N, vocab], of tokens whose bit is 0 to -inf in place."""
    apply_bitmask(logits, vocab_mask)


def apply_bitmask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Set the logits, float [N, vocab], of tokens whose bit in int32 [N, vocab / 32] is 0 to -inf in place."""
    bits = torch.arange(32, dtype=torch.int32)
    allowed = ((vocab_mask[:, :, None] >> bits) & 1).bool().flatten(1)
    logits.masked_fill_(~allowed[:, : logits.shape[1]], float("-inf"))


def init_threads_binding(*, tp_rank: int, tp_size: int) -> str:
    """No cores: torch's threads go where the operating system sends them."""
    return ""


def find_nccl_library() -> str:
    """Raises OSError, by which upstream takes it that ranks talk through torch alone."""
    raise OSError("ranks on a CPU talk through gloo")


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function of SGLang that cannot run here."""

    target: str
    function: Callable
    reason: str


REPLACEMENTS = (
    Replacement(
        "sglang.srt.utils.common.support_triton",
        support_triton,
        "decides by the attention backend's name whether Triton kernels may run; without a GPU they never may",
    ),
    Replacement(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        get_last_loc,
        "runs a Triton kernel unless the attention backend is called torch_native",
    ),
    Replacement(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_req_to_token_pool_func,
        "runs a Triton kernel; speculative decoding needs it in every step",
    ),
    Replacement(
        "sglang.srt.layers.sampler.multinomial_with_seed",
        multinomial_with_seed,
        "hashes with a Triton kernel; requests with a sampling seed need it",
    ),
    Replacement(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        enable_batch_invariant_mode,
        "puts Triton matrix products in torch's place; deterministic inference, which seeds need, turns it on",
    ),
    Replacement(
        "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask",
        allocate_token_bitmask,
        "pins memory, which only a GPU driver can; structured output needs it",
    ),
    Replacement(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        apply_vocab_mask,
        "refuses logits on the CPU",
    ),
    Replacement(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
        staticmethod(apply_bitmask),
        "refuses logits on the CPU",
    ),
    Replacement(
        "sglang.srt.utils.numa_utils.init_threads_binding",
        init_threads_binding,
        "wants a NUMA node for each rank, to bind the threads of kernels that are not there",
    ),
    Replacement(
        "sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library",
        find_nccl_library,
        "finds the library that comes with torch for CUDA, which then asks for a GPU",
    ),
)


def replace_triton_functions() -> None:
    """Put every replacement in place; a second call changes nothing.

    Raises:
        RuntimeError: a target takes other parameters than its replacement, so SGLang is not the version expected.
    """
    for replacement in REPLACEMENTS:
        owner_name, _, name = replacement.target.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        original = vars(owner)[name]
        if original is replacement.function:
            continue
        if _parameters(original) != _parameters(replacement.function):
            raise RuntimeError(
                f"{replacement.target} takes {_parameters(original)}, not {_parameters(replacement.function)}; "
                "install the SGLang version that sglang-cpu-platform depends on."
            )
        setattr(owner, name, replacement.function)
        # `from owner import name` has copied the original into other modules.
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and vars(module).get(name) is original:
                setattr(module, name, replacement.function)


def _parameters(function: Callable) -> list[str]:
    function = getattr(function, "__func__", function)
    return list(inspect.signature(inspect.unwrap(function)).parameters)
