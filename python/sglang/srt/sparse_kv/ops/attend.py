"""Attention of the CUDA engine: FlashInfer over the selected pages, our kernels around it.

Each (request, kv head) is one sequence of FlashInfer's decode wrapper, with the query heads of both rows. The wrapper
is planned once per batch size for the longest selection; a kernel writes the lengths of the moment, so that a captured
graph needs no host.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.sparse_kv.ops import abi
from sglang.srt.sparse_kv.ops.launching import contiguous, inner_contiguous, ints, launch, pointer, view_of
from sglang.srt.sparse_kv.ops.reference import LayerView
from sglang.srt.sparse_kv.ops.workspace import Workspace, workspace

logger = logging.getLogger(__name__)

FLOAT_WORKSPACE = 128 << 20
INT_WORKSPACE = 4 << 20


# Sequences for each multiprocessor from which on they are attended to whole. An H200 (132) takes 35.2 us for 128 in one
# piece each, 37.5 as FlashInfer divides them; 41.6 and 48.0 for 176, 53.3 and 58.6 for 256; but 33.1 and 32.1 for 96.
# Two to five pieces each are slower from 128 on (benchmark/attention_pieces.py).
WHOLE = 0.9


def in_one_piece(sequences: int, multiprocessors: int) -> bool:
    """Whether no sequence is divided over blocks, so that nothing has to be merged."""
    return sequences >= WHOLE * multiprocessors


class AttendPlan:
    """FlashInfer's wrapper and the buffers it reads, for one batch size and selection width.

    whole: attends to each sequence in one piece; None: where that is faster.
    """

    def __init__(
        self,
        space: Workspace,
        requests: int,
        q_heads: int,
        width: int,
        view: LayerView,
        scale: float,
        whole: bool | None = None,
    ):
        device = space.device
        sequences = requests * view.kv.shape[0]
        self.indptr = torch.arange(sequences + 1, dtype=torch.int32, device=device) * width
        self.indices = torch.zeros(sequences * width, dtype=torch.int32, device=device)
        page_size, dim = view.kv.shape[3:]
        self.last_page = torch.full((sequences,), page_size, dtype=torch.int32, device=device)
        self.page_size, self.scale = page_size, scale
        self.wrapper: Any = self._plan(space, q_heads, dim, view.kv.dtype, whole) if device.type == "cuda" else None

    def _plan(self, space: Workspace, q_heads: int, dim: int, dtype: torch.dtype, whole: bool | None):
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        # Split attention keeps partial results here. FlashInfer wants it zeroed before its first use.
        floats = space.plans.get("floats")
        if floats is None:
            floats = space.plans["floats"] = torch.zeros(FLOAT_WORKSPACE, dtype=torch.uint8, device=space.device)
        if whole is None:
            whole = in_one_piece(len(self.last_page), _multiprocessors(space.device.index or 0))
        # What FlashInfer calls graph mode is not needed for a graph, since the buffers are ours: it divides sequences
        # to fill a grid of fixed size, and merges even where it has left them whole.
        fixed: dict[str, Any] = (
            {}
            if whole
            else {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self.indptr,
                "paged_kv_indices_buffer": self.indices,
                "paged_kv_last_page_len_buffer": self.last_page,
            }
        )
        wrapper = BatchDecodeWithPagedKVCacheWrapper(floats, "NHD", use_tensor_cores=True, backend="fa2", **fixed)
        wrapper.reset_workspace_buffer(floats, torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=space.device))
        wrapper.plan(
            self.indptr,
            self.indices,
            self.last_page,
            q_heads,
            1,
            dim,
            self.page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
            sm_scale=self.scale,
            fixed_split_size=len(self.indices) // len(self.last_page) if whole else None,
        )
        ours = {"indptr": self.indptr, "indices": self.indices, "last_page_len": self.last_page}
        for name, tensor in ours.items():
            if getattr(wrapper, f"_paged_kv_{name}_buf").data_ptr() != tensor.data_ptr():
                raise RuntimeError(
                    f"FlashInfer's decode wrapper copied {name}: it would not see the pages of each step"
                )
        return wrapper

    def run(self, q: torch.Tensor, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [sequences, q_heads, D]; units [slots of all heads, 2, P, D]. Returns (out, lse float32 base 2)."""
        # Launch overlap stays off: FlashInfer reads the lengths before it waits for the kernel that writes them.
        return self.wrapper.run(q, units.unsqueeze(3), return_lse=True, enable_pdl=False)


def attend_plan(view: LayerView, requests: int, q_heads: int, width: int, scale: float) -> AttendPlan:
    """The plan for a batch, made when first asked for, which must be outside a graph capture. Raises RuntimeError."""
    space = workspace(view.kv.device)
    heads, _, _, page_size, dim = view.kv.shape
    key = ("attend", requests, heads, q_heads, width, page_size, dim, view.kv.dtype, scale)
    plan = space.plans.get(key)
    if plan is None:
        if space.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"attention for {requests} requests was not planned before the CUDA graph capture")
        plan = space.plans[key] = AttendPlan(space, requests, q_heads, width, view, scale)
    return plan


@dataclass
class Inputs:
    """What attention reads beside the cache: a page table in the plan's buffers, and queries in its order."""

    plan: AttendPlan
    flat: torch.Tensor  # [N*R, H, G, D], rows may be strided
    ordered: torch.Tensor  # [N*H, R*G, D]
    last_tokens: torch.Tensor  # int [N]

    @property
    def needs_order(self) -> bool:
        """Whether `ordered` is still to be written."""
        return self.ordered.data_ptr() != self.flat.data_ptr()


def attend_inputs(q, view: LayerView, last_tokens, width: int, scale: float) -> Inputs:
    """As reference_attention.attend_inputs. width: of the selections."""
    n, rows, heads, group, dim = q.shape
    plan = attend_plan(view, n, rows * group, width, scale)
    flat = inner_contiguous(q.reshape(n * rows, heads, group, dim), "q", view.kv.dtype)
    if rows == 1 and flat.is_contiguous():
        ordered = flat.reshape(n * heads, group, dim)
    else:
        ordered = torch.empty((n * heads, rows * group, dim), dtype=q.dtype, device=q.device)
    return Inputs(plan, flat, ordered, last_tokens)


def attend(
    q, k_row1, v_row1, view: LayerView, slots, num_pages, last_tokens, scale: float, inputs: Inputs | None = None
) -> torch.Tensor:
    """As reference_attention.attend; rows of padded requests are zero, or junk when R == 1. Without inputs, a kernel
    makes them from the slots.
    """
    n, rows, heads, group, dim = q.shape
    capacity, page_size = view.kv.shape[1], view.kv.shape[3]
    if n == 0:
        return torch.empty_like(q)
    kernel_view = view_of(view)
    prepared = inputs is not None
    if inputs is None:
        inputs = attend_inputs(q, view, last_tokens, slots.shape[2], scale)
    plan, flat, ordered = inputs.plan, inputs.flat, inputs.ordered
    args = abi.Attend(
        q=pointer(flat),
        stride_q=flat.stride(0),
        num_pages=ints(num_pages, "num_pages"),
        scale=scale,
        n=n,
        rows=rows,
        group=group,
    )
    if not prepared:
        args.slots, args.width = pointer(contiguous(slots, "slots", torch.int32)), slots.shape[2]
        args.last_tokens = ints(last_tokens, "last_tokens")
        args.indptr, args.indices, args.last_page = map(pointer, (plan.indptr, plan.indices, plan.last_page))
        args.q_out = pointer(ordered) if inputs.needs_order else None
        launch("attend_prepare", q.device, kernel_view, args)
    if rows == 2:  # copies, if any, before attention: the last kernel reads them while attention's may still run
        k_row1 = inner_contiguous(k_row1, "k_row1", view.kv.dtype)
        v_row1 = inner_contiguous(v_row1, "v_row1", view.kv.dtype)
    partial, lse = plan.run(ordered, view.kv.view(heads * capacity, 2, page_size, dim))
    if rows == 1:
        return partial.view(n, 1, heads, group, dim)
    out = torch.empty((n, rows, heads, group, dim), dtype=q.dtype, device=q.device)
    args.k_row1, args.stride_k = pointer(k_row1), k_row1.stride(0)
    args.v_row1, args.stride_v = pointer(v_row1), v_row1.stride(0)
    args.partial, args.lse, args.out = pointer(partial), pointer(lse), pointer(out)
    launch("attend_finish", q.device, kernel_view, args)
    return out


TILE = 128  # rows of a tile of FlashInfer's prefill kernels


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _prefill_backend(tokens: int, heads: int, device: torch.device) -> str:
    """FlashInfer's own choice ("fa3" on sm_90) once its tiles fill the GPU; below, fa2, which also divides the keys."""
    return "auto" if -(-tokens // TILE) * heads >= _multiprocessors(device.index or 0) else "fa2"


def attend_block(q, k, v, scale: float, causal: bool, alone: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As reference_attention.attend_block, by FlashInfer."""
    from flashinfer import single_prefill_with_kv_cache

    backend = _prefill_backend(q.shape[0], q.shape[1], q.device)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k.transpose(0, 1), v.transpose(0, 1)))
    more: Any = {"causal": causal, "kv_layout": "NHD", "sm_scale": scale, "backend": backend}
    if alone:
        return single_prefill_with_kv_cache(q, k, v, **more), None
    out, lse = single_prefill_with_kv_cache(q, k, v, return_lse=True, **more)
    return out, lse.mul_(math.log(2))


def prepare_prefill(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles or loads what `attend_block` and `merge` will run, so that no request waits for it: up to two minutes
    when it is the first time on a machine.
    """
    from flashinfer.utils import determine_attention_backend

    many = determine_attention_backend(device, 0, False, False, dtype, dtype, head_dim_qk=dim, head_dim_vo=dim)
    logger.info(
        "Preparing prefill attention: FlashInfer's %s, fa2 for short chunks; once on a machine, up to two minutes", many
    )
    for tokens in (1, -(-_multiprocessors(device.index or 0) // q_heads) * TILE):
        q = torch.zeros((tokens, q_heads, dim), dtype=dtype, device=device)
        k = torch.zeros((kv_heads, tokens, dim), dtype=dtype, device=device)
        for causal in (True, False):
            part = attend_block(q, k, k, 1.0, causal)
            attend_block(q, k, k, 1.0, causal, alone=True)
        merge(*part, *part)


def merge(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference_attention.merge, by SGLang's own kernel, weighted in float32."""
    from sglang.srt.layers.attention.merge_state import merge_state

    return merge_state(out_a, lse_a, out_b, lse_b)
