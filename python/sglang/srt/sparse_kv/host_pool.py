"""The host pool: SGLang's KV pool, whose slot numbers name places in host memory.

SGLang's allocator and radix tree hand out and share slot numbers and never look at the data, so they manage the host
pool without knowing it. Layout [layer][page][kv_head][K|V][page_size][head_dim]: one (page, kv head) unit is
contiguous.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.sparse_kv import report, sizing
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.ops import pinned
from sglang.srt.sparse_kv.planner import Plan
from sglang.srt.sparse_kv.runtime import SparseKVRuntime

logger = logging.getLogger(__name__)

GIB = 1 << 30


class HostPool(KVCache):
    """SGLang's pool interface over host memory. Attention goes through `runtime`; the stock accessors raise."""

    def __init__(self, size: int, geometry: Geometry, config: SparseKVConfig, plan: Plan, device: str):
        super().__init__(
            size=size,
            page_size=geometry.page_size,
            dtype=geometry.dtype,
            layer_num=geometry.num_layers,
            device=device,
            enable_memory_saver=False,
        )
        self.geometry = geometry
        self.head_num, self.head_dim = geometry.kv_heads, geometry.head_dim
        self.host = allocate_host(geometry, torch.device(device), config.host_memory != "auto")
        self.runtime = SparseKVRuntime(config, geometry, plan, self.host, torch.device(device))
        self.mem_usage = sum(plan.device_bytes.values()) / GIB

    def get_kv_size_bytes(self) -> int:
        return self.host.numel() * self.host.element_size()

    def get_kv_cache_quant_method(self) -> None:
        return None

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} was asked of the sparse KV host pool, which only the attention backend dualdecoder may touch"
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("a key buffer")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("a value buffer")

    def get_kv_buffer(self, layer_id: int):
        self._refuse("a KV buffer")

    def set_kv_buffer(self, *args, **kwargs) -> None:
        self._refuse("a KV write")


def allocate_host(geometry: Geometry, device: torch.device, asked_for: bool) -> torch.Tensor:
    """Host memory for every layer: [L, NP, H, 2, P, D], pinned when the device is a GPU.

    asked_for: somebody named the size, so that it is taken whole at start, or refused; else, without a GPU, pages come
    as they are written. Raises HostMemoryError.
    """
    shape = (
        geometry.num_layers,
        geometry.num_pages,
        geometry.kv_heads,
        2,
        geometry.page_size,
        geometry.head_dim,
    )
    if device.type == "cuda":
        return pinned.pinned_empty(shape, geometry.dtype)
    if asked_for:
        total = math.prod(shape) * geometry.dtype.itemsize
        return pinned.Region(total, None, pinned.log_progress()).tensor(shape, geometry.dtype)
    return torch.zeros(shape, dtype=geometry.dtype)


def build_host_pool(configurator, max_total_num_tokens: int) -> HostPool:
    """The pool for SGLang's configurator, after the planner sized it."""
    plan = sizing.current_plan()
    # "auto" was decided by the plan.
    config = dataclasses.replace(sizing.config_of(configurator.server_args), residency=plan.residency)
    page_size = sizing.geometry_of(configurator).page_size
    geometry = sizing.geometry_of(
        configurator,
        num_pages=max_total_num_tokens // page_size + 1,
        max_requests=plan.max_running_requests,
    )
    pool = HostPool(max_total_num_tokens, geometry, config, plan, str(configurator.device))
    logger.info(report.table(plan))
    return pool
