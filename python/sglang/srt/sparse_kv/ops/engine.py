"""Chooses the engine of page operations for a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch

# What an engine must provide; both engines are checked against this list by a test.
OPERATIONS = (
    "decode_step",
    "count_guides",
    "score",
    "select",
    "predict",
    "resolve",
    "plan_prefetch",
    "plan_prefetches",
    "append",
    "write_token",
    "close_pages",
    "gather",
    "lands",
    "absent",
    "land",
    "plan_stage",
    "stage",
    "stage_cached",
    "stage_landed",
    "store_chunk",
    "refresh",
    "clear",
    "attend_inputs",
    "attend",
    "attend_block",
    "merge",
)


def engine_for(device: torch.device) -> SimpleNamespace:
    """The operations for tensors on `device`: torch on the CPU, our kernels on CUDA. Raises ImportError without
    them.
    """
    if device.type == "cuda":
        from sglang.srt.sparse_kv.ops import cuda, cuda_prefill

        modules = [cuda, cuda_prefill]
    else:
        from sglang.srt.sparse_kv.ops import reference, reference_attention, reference_batch, reference_prefill

        modules = [reference, reference_batch, reference_prefill, reference_attention]
    found = {name: getattr(module, name) for name in OPERATIONS for module in modules if hasattr(module, name)}
    missing = [name for name in OPERATIONS if name not in found]
    if missing:
        raise ImportError(f"the {device.type} engine lacks the operations {', '.join(missing)}")
    if device.type == "cuda":
        # One launch finds the misses and brings them.
        found["resolve"] = functools.partial(found["resolve"], move=True)
    else:
        found = {name: _visible(name, operation) for name, operation in found.items()}
    return SimpleNamespace(name=device.type, **found)


def _visible(name: str, operation: Callable) -> Callable:
    """The operation under its name in a torch profile, where kernels have theirs on CUDA.

    Of torch's two ways to name a span, the one that costs a quarter of a microsecond when nobody looks.
    """

    @functools.wraps(operation)
    def run(*args, **kwargs):
        with torch._C._profiler._RecordFunctionFast(f"sparse_kv::{name}"):
            return operation(*args, **kwargs)

    return run
