"""The planner applied to this process: asks SGLang's configurator, the GPU and the host what there is."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from sglang.srt.sparse_kv import devices, host_memory, planner, ranks, report, split
from sglang.srt.sparse_kv.config import SparseKVConfig, parse_size
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.planner import Plan

logger = logging.getLogger(__name__)

CPU_HOST_BYTES = 2 * 10**9
CPU_CACHE_BYTES = 1 << 30
DEFAULT_MAX_RUNNING_CPU = 8
# Of SGLang's arguments: bytes of host memory for all ranks of all replicas. The launching process looks once, because
# what one rank takes the others would find missing.
HOST_ATTRIBUTE = "_sparse_kv_host"

_current: Plan | None = None


def current_plan() -> Plan:
    """The plan of this process. Raises RuntimeError before one was made."""
    if _current is None:
        raise RuntimeError("sparse KV memory was not planned: SGLang's sizing did not pass through our hook")
    return _current


def config_of(server_args) -> SparseKVConfig:
    return SparseKVConfig.from_dict(server_args._sparse_kv)


def geometry_of(configurator, num_pages: int = 0, max_requests: int = 0) -> Geometry:
    """Geometry of this rank's share of the model. num_pages and max_requests are settled by the plan."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    model = configurator.model_config
    tp_size = get_parallel().attn_tp_size
    kv_heads = model.get_num_kv_heads(tp_size)
    dtype = configurator.kv_cache_dtype
    page_size = get_schedule().page_size
    return Geometry(
        num_layers=configurator.layer_info.num_effective_layers,
        kv_heads=kv_heads,
        group=max(1, model.num_attention_heads // tp_size // kv_heads),
        head_dim=model.head_dim,
        page_size=page_size,
        num_pages=num_pages,
        max_pages=-(-(model.context_len + 8) // page_size) + 1,
        max_requests=max_requests,
        dtype=dtype,
    )


def plan_for_configurator(configurator, available_device_bytes: int, before_load: int = 0) -> Plan:
    """Plans each rank's memory and remembers the plan, the same on all ranks. Raises ValueError, one sentence.

    available_device_bytes: what SGLang found free for KV, on the rank with the least. before_load: device bytes that
    were free before weights, likewise.
    """
    global _current
    _current = ranks.decided_once(lambda: _plan(configurator, available_device_bytes, before_load))
    return _current


def _plan(configurator, available_device_bytes: int, before_load: int) -> Plan:
    server_args = configurator.server_args
    config = config_of(server_args)
    geometry = geometry_of(configurator)
    on_cpu = torch.device(configurator.device).type == "cpu"
    host = getattr(server_args, HOST_ATTRIBUTE) // (server_args.tp_size * server_args.dp_size)
    running = server_args.max_running_requests or (
        DEFAULT_MAX_RUNNING_CPU if on_cpu else split.DEFAULT_MAX_RUNNING_CUDA
    )
    if server_args.max_total_tokens:
        pages = server_args.max_total_tokens // geometry.page_size + 1  # and the dummy page
        host = min(host, pages * geometry.page_bytes)
    if on_cpu:
        cache = CPU_CACHE_BYTES
        if config.cache_memory != "auto":
            cache = parse_size(config.cache_memory, total=available_device_bytes, name="cache_memory")
        made = planner.plan(config, geometry, cache, host, running)
        context = min(made.max_context, configurator.model_config.context_len)
        return dataclasses.replace(made, max_context=context)
    name, total = _gpu(configurator.device)
    kept = int(before_load * (1 - _static_share()))
    weights = max(0, before_load - kept - available_device_bytes)
    given = split.Given(
        device=devices.find(name, total) or devices.stand_in(total),
        free=available_device_bytes,
        host=host,
        running=running,
        weights=weights,
        context=configurator.model_config.context_len,
        fixed_host=config.host_memory != "auto",
        fixed_running=server_args.max_running_requests is not None,
    )
    made = split.plan_gpu(config, geometry, given)
    outside = {
        "weights": weights,
        "in use before loading (context, other processes)": max(0, total - before_load),
        planner.LEFT: kept,
    }
    reasons = list(made.reasons)
    if devices.find(name, total) is None:
        reasons.append(
            f"estimates: {name} is not among the GPUs whose figures are known; those of {made.device} stand in"
        )
    return dataclasses.replace(made, outside=outside, reasons=tuple(reasons))


def note_start(runtime: Any, *graphs: dict[str, float]) -> None:
    """Measures what a GPU holds once its graphs are captured, and logs it. graphs: GiB by phase, as SGLang has them."""
    if runtime.device.type == "cpu":
        return
    free, total = torch.cuda.mem_get_info(runtime.device)
    captured = int(sum(sum(usage.values()) for usage in graphs) * (1 << 30))
    runtime.plan = planner.started(runtime.plan, captured, free, total)
    logger.info(report.in_use(runtime.plan))


def host_bytes(config: SparseKVConfig, on_cpu: bool) -> int:
    """Bytes of host memory for all ranks of all replicas. Raises ValueError where the container may not have so much.

    What the kernel calls available does not refuse a size that somebody asked for: on virtual machines it grows as
    memory is touched. The attempt decides, see ops/pinned.py.
    """
    available = host_memory.available()
    if config.host_memory == "auto":
        return min(CPU_HOST_BYTES, available) if on_cpu else int(split.HOST_SHARE * available)
    total = host_memory.meminfo("MemTotal")
    size = parse_size(config.host_memory, total=total, name="--sparse-kv-host-memory")
    room = host_memory.cgroup_room()
    if room is not None and size > room:
        raise ValueError(
            f"--sparse-kv-host-memory asks for {size / 1e9:.1f} GB and this container may use {room / 1e9:.1f} GB more "
            f"of its limit of {(host_memory.cgroup_limit() or 0) / 1e9:.1f} GB; lower it or raise the container's limit"
        )
    return size


def _gpu(device: Any) -> tuple[str, int]:
    """Name and bytes of the GPU."""
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory


def _static_share() -> float:
    from sglang.srt.runtime_context import get_schedule

    return get_schedule().mem_fraction_static
