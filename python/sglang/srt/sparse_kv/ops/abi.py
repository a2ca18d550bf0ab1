"""The kernel library's argument structs, field for field as in csrc/sparse_kv/abi.h, and its functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_void_p
from typing import Any

import torch

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST_HEADS = 64  # whose misses are moved by several blocks each
JOBS = 3  # tables that may be edited at a time: a layer's own, and those of two prefetches beside it


class Ints(ctypes.Structure):
    """A device array of int32 or int64."""

    _fields_ = [("data", c_void_p), ("wide", c_int64)]


def _struct(name: str, spec: str) -> type[ctypes.Structure]:
    """spec: fields as name:kind, kinds p pointer, i integer, f double, n integers of either width."""
    kinds = {"p": c_void_p, "i": c_int64, "f": c_double, "n": Ints}
    fields = [(field, kinds[kind]) for field, kind in (item.split(":") for item in spec.split())]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


View: Any = _struct(
    "View",
    "kv:p slot_of:p page_of:p stamp:p ahead:p host:p landmarks:p scales:p counters:p stalled:p heads:i slots:i pages:i "
    "page_size:i head_dim:i dtype:i",
)
Work: Any = _struct("Work", "error:p cursor:p urgent:p tasks:p list:p rows:p skip:p miss_rate:p list_width:i")
Resolve: Any = _struct(
    "Resolve",
    "pages:n tokens:n index:n stride_n:i stride_head:i table:p table_width:i closed:n active:p slots:p units:p count:p "
    "step:p cap:p fetched:p owner:n num_pages:n last_tokens:n open_tokens:n indptr:p indices:p last_page:p "
    "n:i width:i mode:i tally:i move:i waited:i",
)
Append: Any = _struct(
    "Append",
    "k:p v:p stride_k:i stride_v:i page:n offset:n active:p slots:p step:p q:p q_out:p stride_q:i group:i n:i "
    "through:i",
)
Score: Any = _struct(
    "Score",
    "q:p stride_q:i q_dtype:i table:p table_width:i lo:n hi:n logits:p partials:p q_out:p tickets:p scale:f n:i rows:i "
    "group:i blocks:i",
)
Select: Any = _struct(
    "Select",
    "logits:p partials:p scores:p dense:p lo:n hi:n table:p table_width:i length:n active:p pages:p num_pages:p "
    "predicted:p keep:n keep_stride:i keep_stride_head:i last:p owner:n last_stride:i last_words:i bonus:p rest:p n:i "
    "rows:i row:i heads:i group:i page_size:i sinks:i window:i budget:i whole:i width:i",
)
Gather: Any = _struct("Gather", "units:p count:p blocks:i ahead:i")
Stage: Any = _struct(
    "Stage",
    "pages:n tokens:n target:p stride_values:i stride_head:i slots:p list:p missing:p due:p landing:p first:i places:i "
    "count:i blocks:i parts:i",
)
RESIDENT, MISSING = 1, 2  # parts of a stage
Land: Any = _struct("Land", "runs:p landing:p count:i")
Absent: Any = _struct("Absent", "tables:p pages:n absent:p layers:i heads:i num_pages:i count:i")
Chunk: Any = _struct("Chunk", "k:p v:p stride_k:i stride_v:i loc:n tokens:i through:i")
Step: Any = _struct(
    "Step",
    "req_to_token:p row_length:i req:n length:n table:p active:p lengths:p open_page:p offset:p closed:p last_tokens:p "
    "lo:p hi:p n:i rows:i width:i page_size:i sinks:i window:i",
)
Attend: Any = _struct(
    "Attend",
    "q:p q_out:p k_row1:p v_row1:p stride_q:i stride_k:i stride_v:i slots:p num_pages:n last_tokens:n indptr:p "
    "indices:p last_page:p partial:p lse:p out:p scale:f n:i rows:i group:i width:i",
)


class Launch(ctypes.Structure):
    """Where a kernel runs. overlap: let its launch overlap the end of the kernel before it."""

    _fields_ = [("stream", c_void_p), ("device", c_int), ("overlap", c_int)]


STRUCTS = (Ints, View, Work, Resolve, Append, Score, Select, Gather, Stage, Chunk, Step, Attend, Land, Absent, Launch)

# Every function ends with a Launch and returns a CUDA status. Structs named twice may be null from the second on.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "resolve": (View, Work, Resolve),
    "append": (View, Work, Append),
    "plan_prefetches": (Work, View, Resolve, View, Resolve),
    "write_token": (View, Append),
    "close_pages": (View, Append),
    "score": (View, Score),
    "dense_scores": (Select,),
    "select": (Select,),
    "gather": (View, Work, Gather),
    "plan_stage": (View, Work, Resolve, Stage),
    "stage": (View, Stage),
    "stage_cached": (View, Stage),
    "stage_landed": (View, Stage),
    "land": (View, Land),
    "absent": (Absent,),
    "store_chunk": (View, Chunk),
    "fill": (View, Chunk),
    "refresh": (View, Work, Resolve, Chunk, c_int64),
    "step": (Step,),
    "count_guides": (Ints, Ints, c_int64, c_void_p),
    "attend_prepare": (View, Attend),
    "attend_finish": (View, Attend),
    "invalidate": (View, Ints, c_int64),
    "clear": (View,),
    "check": (View, c_void_p),
    "sleep": (c_int64,),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the functions. Raises RuntimeError when the library was built from other structs."""
    for name, arguments in FUNCTIONS.items():
        function = getattr(library, f"skv_{name}")
        structs = [POINTER(a) if issubclass(a, ctypes.Structure) else a for a in (*arguments, Launch)]
        function.argtypes, function.restype = structs, c_int
    library.skv_error.argtypes, library.skv_error.restype = [c_int], c_char_p
    library.skv_lands.argtypes, library.skv_lands.restype = [], c_int64
    library.skv_sources.argtypes, library.skv_sources.restype = [], c_char_p
    library.skv_device_pointer.argtypes, library.skv_device_pointer.restype = [c_void_p, c_int64], c_void_p
    library.skv_select_shared.argtypes, library.skv_select_shared.restype = [c_int64], c_int64
    library.skv_shared_limit.argtypes, library.skv_shared_limit.restype = [c_int64], c_int64
    library.skv_sizes.argtypes, library.skv_sizes.restype = [POINTER(c_int64), c_int64], c_int64
    sizes = (c_int64 * 32)()
    found = list(sizes[: library.skv_sizes(sizes, len(sizes))])
    expected = [ctypes.sizeof(struct) for struct in STRUCTS]
    if found != expected:
        raise RuntimeError(f"the kernel library's argument sizes are {found}, expected {expected}; rebuild it")
    return library
