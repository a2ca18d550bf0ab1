"""Bytes and capacities, decided once at start: how much the host holds, how many slots the cache has, who may run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from sglang.srt.sparse_kv.config import SparseKVConfig, parse_size
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape
from sglang.srt.sparse_kv.page_cache import resident_layers

CPU_HOST_BYTES = 2 * 10**9
CPU_CACHE_BYTES = 1 << 30
DEFAULT_MAX_RUNNING_CPU = 8
DEFAULT_MAX_RUNNING_CUDA = 128
STAGING_TOKENS_CPU = 1024  # of each of the two staging slots
STAGING_TOKENS_CUDA = 8192
SLOT_STATE_BYTES = 4 + 4 + 1  # page, stamp, ahead
HOST_SHARE = 0.8  # of available host memory, at most


@dataclass(frozen=True)
class Plan:
    """What was decided. Sizes in bytes of one rank; slots per layer and kv head.

    host_bytes: exactly host_tokens of KV. The pool also allocates one page for the dummy, out of what was given.
    """

    host_bytes: int
    host_tokens: int
    max_running_requests: int
    slots: int
    prefetch_headroom: int
    shape: SelectionShape
    staging_tokens: int  # of each of the two staging slots of prefill
    device_bytes: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The plan as lines of text, one purpose a line."""
        rows = [
            ("host KV pool", f"{self.host_bytes / 1e9:.2f} GB, {self.host_tokens} tokens"),
            *((f"device {name}", f"{size / 1e9:.3f} GB") for name, size in self.device_bytes.items()),
            ("slots", f"{self.slots} per layer and kv head, {self.shape.width} pages a selection"),
            ("max running requests", str(self.max_running_requests)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(["sparse KV plan (per rank)", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def needed_slots(requests: int, shape: SelectionShape, max_pages: int, headroom: int) -> int:
    """The capacity rule: slots per layer and kv head that `requests` need, sharing not counted."""
    return requests * (min(shape.width, max_pages) + 1) + headroom


def largest_batch(slots: int, shape: SelectionShape, max_pages: int, headroom: int) -> int:
    """Most requests whose selections fit `slots`."""
    return max(0, (slots - headroom) // (min(shape.width, max_pages) + 1))


def device_bytes(
    geometry: Geometry, slots: int, config: SparseKVConfig, shape: SelectionShape, cuda: bool = False
) -> dict[str, int]:
    """Bytes of everything on the device, by purpose. cuda: with the scratch of the CUDA engine."""
    buffers = num_buffers(geometry, config)
    per_buffer = geometry.kv_heads * slots
    sizes = {
        "page cache": buffers * per_buffer * geometry.unit_bytes,
        "landmarks": geometry.num_layers * geometry.num_pages * geometry.kv_heads * geometry.landmark_bytes,
        "unit tables": buffers * (geometry.kv_heads * geometry.num_pages * 4 + per_buffer * SLOT_STATE_BYTES),
        "predictions": (geometry.max_requests + 1) * geometry.num_layers * geometry.kv_heads * shape.budget_pages * 4,
        "prefill staging": 2 * staging_tokens(cuda) * geometry.kv_heads * geometry.unit_bytes // geometry.page_size,
    }
    if cuda:
        sizes["kernel scratch"] = scratch_bytes(geometry, config, shape)
    return sizes


def staging_tokens(cuda: bool) -> int:
    return STAGING_TOKENS_CUDA if cuda else STAGING_TOKENS_CPU


def scratch_bytes(geometry: Geometry, config: SparseKVConfig, shape: SelectionShape) -> int:
    """Bytes that the CUDA engine's kernels and FlashInfer work in."""
    lines = geometry.max_requests * config.rows * geometry.kv_heads * geometry.group
    scores = lines * geometry.max_pages * 4
    lists = geometry.kv_heads * max(geometry.max_requests * shape.width, STAGING_TOKENS_CUDA // geometry.page_size) * 28
    return scores + lists + FLASHINFER_BYTES


FLASHINFER_BYTES = (128 + 4 * 24) << 20  # partial results, and a plan for each batch size that is captured


def slot_bytes(geometry: Geometry, config: SparseKVConfig) -> int:
    """Bytes of one slot in every layer-sized buffer and kv head."""
    return num_buffers(geometry, config) * geometry.kv_heads * (geometry.unit_bytes + SLOT_STATE_BYTES)


def selection_shape(geometry: Geometry, config: SparseKVConfig) -> SelectionShape:
    return SelectionShape.from_tokens(
        geometry.page_size, config.budget, config.sinks, config.window, geometry.max_pages
    )


def num_buffers(geometry: Geometry, config: SparseKVConfig) -> int:
    """Layer-sized buffers of the cache: one a resident layer and the ring; all of both when policy can be switched."""
    resident = geometry.num_layers if config.debug else len(resident_layers(config.residency, geometry.num_layers))
    return resident + (config.ring if resident < geometry.num_layers or config.debug else 0)


def plan(
    config: SparseKVConfig,
    geometry: Geometry,
    cache_bytes: int,
    host_bytes: int,
    requested_running: int,
    cuda: bool = False,
) -> Plan:
    """Applies the capacity rule to what there is.

    geometry: with max_requests and num_pages still to be decided (its values are ignored). Raises ValueError, one
    sentence with numbers, when not even one request fits.
    """
    shape = selection_shape(geometry, config)
    host_pages = host_bytes // geometry.page_bytes - 1  # one is the dummy's
    if host_pages < 2:
        raise ValueError(
            f"{host_bytes / 1e9:.3f} GB of host memory hold {max(host_pages, 0)} pages of {geometry.page_size} tokens "
            f"beside one for padding, at {geometry.page_bytes} bytes a page; raise --sparse-kv-host-memory"
        )
    headroom = shape.prefetch_pages(config.prefetch_cap)
    slots = max(0, cache_bytes) // slot_bytes(geometry, config)
    running = min(requested_running, largest_batch(slots, shape, geometry.max_pages, headroom))
    if running < 1:
        needed = needed_slots(1, shape, geometry.max_pages, headroom)
        raise ValueError(
            f"the page cache of {cache_bytes / 1e9:.3f} GB has {slots} slots per layer and kv head, one request needs "
            f"{needed}; raise cache_memory in --sparse-kv-config to {needed * slot_bytes(geometry, config)} bytes or "
            f"lower --sparse-kv-budget ({config.budget})"
        )
    # More slots than the host has pages would never be used.
    slots = min(slots, max(needed_slots(running, shape, geometry.max_pages, headroom), host_pages))
    settled = dataclasses.replace(geometry, max_requests=running, num_pages=host_pages + 1)
    return Plan(
        host_bytes=host_pages * geometry.page_bytes,
        host_tokens=host_pages * geometry.page_size,
        max_running_requests=running,
        slots=slots,
        prefetch_headroom=headroom,
        shape=shape,
        staging_tokens=staging_tokens(cuda),
        device_bytes=device_bytes(settled, slots, config, shape, cuda),
    )


# ------------------------------------------------------------------ from SGLang's configurator

_current: Plan | None = None


def current_plan() -> Plan:
    """The plan of this process. Raises RuntimeError before one was made."""
    if _current is None:
        raise RuntimeError("sparse KV memory was not planned: SGLang's sizing did not pass through our hook")
    return _current


def geometry_of(configurator, num_pages: int = 0, max_requests: int = 0) -> Geometry:
    """Geometry of this rank's share of the model. num_pages and max_requests are settled by the plan."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    model, config = configurator.model_config, config_of(configurator.server_args)
    tp_size = get_parallel().attn_tp_size
    kv_heads = model.get_num_kv_heads(tp_size)
    dtype = configurator.kv_cache_dtype
    landmark_dtype = dtype if config.landmark_dtype == "auto" else getattr(torch, config.landmark_dtype)
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
        landmark_dtype=landmark_dtype,
    )


def config_of(server_args) -> SparseKVConfig:
    return SparseKVConfig.from_dict(server_args._sparse_kv)


def fixed_bytes(config: SparseKVConfig, geometry: Geometry, host_bytes: int, running: int, cuda: bool) -> int:
    """Device bytes that do not depend on the number of slots."""
    settled = dataclasses.replace(geometry, max_requests=running, num_pages=host_bytes // geometry.page_bytes)
    return sum(device_bytes(settled, 0, config, selection_shape(geometry, config), cuda).values())


def plan_for_configurator(configurator, available_device_bytes: int) -> Plan:
    """Plans this rank's memory. available_device_bytes: what SGLang found free for KV. Raises ValueError."""
    global _current
    server_args = configurator.server_args
    config = config_of(server_args)
    on_cpu = torch.device(configurator.device).type == "cpu"
    available_host = psutil.virtual_memory().available
    if config.host_memory == "auto":
        host = CPU_HOST_BYTES if on_cpu else int(HOST_SHARE * available_host)
    else:
        host = parse_size(config.host_memory, total=psutil.virtual_memory().total, name="--sparse-kv-host-memory")
    if on_cpu and host > available_host:
        raise ValueError(
            f"--sparse-kv-host-memory asks for {host / 1e9:.1f} GB and {available_host / 1e9:.1f} GB are available"
            "; lower it"
        )
    host //= max(1, server_args.tp_size)
    running = server_args.max_running_requests or (DEFAULT_MAX_RUNNING_CPU if on_cpu else DEFAULT_MAX_RUNNING_CUDA)
    geometry = geometry_of(configurator)
    if server_args.max_total_tokens:
        pages = server_args.max_total_tokens // geometry.page_size + 1  # and the dummy page
        host = min(host, pages * geometry.page_bytes)
    fixed = fixed_bytes(config, geometry, host, running, cuda=not on_cpu)
    cache = available_device_bytes - fixed
    if not on_cpu and cache <= 0:
        raise ValueError(
            f"landmarks, tables and scratch for {host / 1e9:.1f} GB of host KV take {fixed / 1e9:.2f} GB of device "
            f"memory and {available_device_bytes / 1e9:.2f} GB are free; lower --sparse-kv-host-memory"
        )
    if config.cache_memory != "auto":
        wanted = parse_size(config.cache_memory, total=available_device_bytes, name="cache_memory")
        if not on_cpu and wanted > cache:
            raise ValueError(
                f"cache_memory asks for {wanted / 1e9:.2f} GB and {cache / 1e9:.2f} GB of device memory are left "
                "beside landmarks and scratch; lower it, raise --mem-fraction-static or lower --sparse-kv-host-memory"
            )
        cache = wanted
    elif on_cpu:
        cache = CPU_CACHE_BYTES
    _current = plan(config, geometry, cache, host, running, cuda=not on_cpu)
    return _current
