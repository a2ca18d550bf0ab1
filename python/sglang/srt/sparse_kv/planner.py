"""Bytes and capacities, decided once at start: how much the host holds, how many slots the cache has, who may run.

Arithmetic alone: sizing.py asks the machine, and `sglang-sparse-kv plan` does without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.sparse_kv import cost
from sglang.srt.sparse_kv.config import SparseKVConfig, parse_size
from sglang.srt.sparse_kv.devices import Device
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape, resident_layers

STAGING_TOKENS_CPU = 1024  # of each of the two staging slots
STAGING_TOKENS_CUDA = 8192
SLOT_STATE_BYTES = 4 + 4 + 1  # page, stamp, ahead
DEFAULT_MAX_RUNNING_CUDA = 128
HOST_SHARE = 0.8  # of available host memory, which "auto" takes
LANDMARK_SHARE = 0.25  # of the GPU memory free for KV, which "auto" host memory may ask for in landmarks and tables
JUDGED_CONTEXT = 32768  # most tokens at which batches are compared: where the high miss curve was measured
RESIDENCIES = (1.0, 0.75, 0.5, 0.25, 0.0)  # that "auto" compares
WORTH = 1.05  # how much faster fewer resident layers have to be, since the model is no better than this


@dataclass(frozen=True)
class Plan:
    """What was decided. Sizes in bytes of one rank; slots per layer and kv head.

    host_bytes: exactly host_tokens of KV. The pool also allocates one page for the dummy, out of what was given.
    device_bytes: what sparse KV allocates, by purpose. estimates: what is expected of requests of some lengths, see
    ``estimate``. reasons: one sentence for each choice that the user did not make.
    """

    host_bytes: int
    host_tokens: int
    max_running_requests: int
    slots: int
    prefetch_headroom: int
    shape: SelectionShape
    staging_tokens: int  # of each of the two staging slots of prefill
    device_bytes: dict[str, int]

    residency: str | float | tuple[int, ...] = "all"
    rows: int = 2
    max_context: int = 0  # tokens of one request, prompt and answer, that the host pool takes
    device: str = ""  # whose figures the estimates use; none without a GPU
    outside: dict[str, int] = dataclasses.field(default_factory=dict)  # device bytes of SGLang and others
    estimates: tuple[dict[str, Any], ...] = ()
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The plan as builtins."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Given:
    """What one rank has on a GPU, and what the user chose.

    free: bytes of device memory that SGLang leaves for KV. host: bytes of host memory; fixed_host is False where they
    are only what could be had. running: most requests; fixed_running is False where the planner may choose fewer.
    weights: bytes. context: most tokens of a request.
    """

    device: Device
    free: int
    host: int
    running: int
    weights: int
    context: int
    fixed_host: bool = True
    fixed_running: bool = True


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
        more = f"raise cache_memory in --sparse-kv-config to {needed * slot_bytes(geometry, config)} bytes"
        if cuda and config.cache_memory == "auto":
            more = "use a larger GPU, raise --mem-fraction-static, lower --sparse-kv-host-memory"
        raise ValueError(
            f"the page cache of {cache_bytes / 1e9:.3f} GB has {slots} slots per layer and kv head, one request needs "
            f"{needed}; {more} or lower --sparse-kv-budget ({config.budget})"
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
        residency="all" if config.residency == "auto" else config.residency,
        rows=config.rows,
        max_context=max(0, (host_pages - 1) * geometry.page_size - 1),  # SGLang keeps a page in reserve
    )


# ------------------------------------------------------------------ on a GPU


def fixed_bytes(config: SparseKVConfig, geometry: Geometry, host_bytes: int, running: int) -> int:
    """Device bytes that do not depend on the number of slots."""
    settled = dataclasses.replace(geometry, max_requests=running, num_pages=host_bytes // geometry.page_bytes)
    return sum(device_bytes(settled, 0, config, selection_shape(geometry, config), cuda=True).values())


def fitting_host(config: SparseKVConfig, geometry: Geometry, given: Given) -> int:
    """Bytes of host memory, at most those given, whose landmarks and tables leave room for a page cache.

    They may take a quarter of the device memory that is free, and never so much that not one request fits the rest.
    """
    shape = selection_shape(geometry, config)
    least = fixed_bytes(config, geometry, 0, 1)
    a_page = (fixed_bytes(config, geometry, 1000 * geometry.page_bytes, 1) - least) // 1000
    headroom = shape.prefetch_pages(config.prefetch_cap)
    cache = needed_slots(1, shape, geometry.max_pages, headroom) * slot_bytes(geometry, config)
    pages = max(0, min(int(LANDMARK_SHARE * given.free), given.free - least - cache)) // a_page
    return min(given.host, pages * geometry.page_bytes)


def load_of(config: SparseKVConfig, geometry: Geometry, weights: int) -> cost.Load:
    """What the cost model needs to know."""
    resident = len(resident_layers(config.residency, geometry.num_layers))
    return cost.Load(geometry, selection_shape(geometry, config), weights, config.rows, geometry.num_layers - resident)


def speeds(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int, context: int, slots: int):
    """(least, most) tokens a second that the miss curves promise to `requests` requests of `context` tokens."""
    load = load_of(config, geometry, given.weights)
    found = [cost.tokens_per_second(load, given.device, curve, requests, context, slots) for curve in cost.CURVES]
    return min(found), max(found)


def splits(config: SparseKVConfig, geometry: Geometry, given: Given) -> Iterator[tuple[int, int]]:
    """(requests, slots) for every number of requests that the capacity rule allows, 1 first.

    Raises ValueError where cache_memory asks for more than there is.
    """
    shape = selection_shape(geometry, config)
    headroom = shape.prefetch_pages(config.prefetch_cap)
    for requests in range(1, given.running + 1):
        slots = slots_of(config, geometry, given, requests)
        if slots < needed_slots(requests, shape, geometry.max_pages, headroom):
            return
        yield requests, slots


def slots_of(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int) -> int:
    """Slots per layer and kv head when so many requests may run."""
    return max(0, cache_bytes(config, geometry, given, requests)) // slot_bytes(geometry, config)


def cache_bytes(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int) -> int:
    """Bytes of the page cache when so many requests may run; negative when the rest does not fit by itself."""
    cache = given.free - fixed_bytes(config, geometry, given.host, requests)
    if config.cache_memory == "auto":
        return cache
    return min(cache, parse_size(config.cache_memory, total=given.free, name="cache_memory"))


def plan_gpu(config: SparseKVConfig, geometry: Geometry, given: Given) -> Plan:
    """Splits what a rank has on a GPU. Raises ValueError, one sentence with numbers, when it is not enough."""
    reasons = []
    if not given.fixed_host:
        host = fitting_host(config, geometry, given)
        if host < given.host:
            reasons.append(
                f"host memory: {host / 1e9:.1f} of {given.host / 1e9:.1f} GB, because page summaries and tables of "
                f"more would take over {LANDMARK_SHARE:.0%} of the {given.free / 1e9:.1f} GB of GPU memory free for KV"
            )
            given = dataclasses.replace(given, host=host)
    _check_cache_memory(config, geometry, given)
    auto = config.residency == "auto"
    options = [dataclasses.replace(config, residency=share) for share in RESIDENCIES] if auto else [config]
    best: tuple[float, SparseKVConfig, int] | None = None
    most = 0
    for option in options:
        found = list(splits(option, geometry, given))
        if not found:
            continue
        judged = found[-1:] if given.fixed_running else found
        speed, requests = max((_judge(option, geometry, given, *split), -split[0]) for split in judged)
        if best is None or speed > WORTH * best[0]:
            best, most = (speed, option, -requests), found[-1][0]
    if best is None:
        # For its sentence: the option that needs the least.
        least = cache_bytes(options[-1], geometry, given, 1)
        return plan(options[-1], geometry, least, given.host, 1, cuda=True)
    _, chosen, requests = best
    limit = "--max-running-requests" if requests == given.running else "page cache"
    if requests < most:
        limit = "link"
        reasons.append(
            f"requests: {requests} of the {most} that fit, because more would wait for the link; "
            "set --max-running-requests to choose"
        )
    if chosen.rows == 2:
        both, one = (
            _judge(option, geometry, given, requests, slots_of(option, geometry, given, requests))
            for option in (chosen, dataclasses.replace(chosen, guide="none"))
        )
        if one > WORTH * both:
            reasons.append(
                f'rows: two, as set; with "guide": "none" {one:.0f} instead of {both:.0f} tokens/s are expected, '
                "because there is little to predict"
            )
    if auto and chosen.residency != 1.0:
        reasons.append(
            f"residency: {chosen.residency:.0%} of the layers keep a cache of their own, because GPU memory is short"
        )
    settled = plan(chosen, geometry, cache_bytes(chosen, geometry, given, requests), given.host, requests, cuda=True)
    settled = dataclasses.replace(settled, max_context=min(settled.max_context, given.context))
    return dataclasses.replace(
        settled,
        residency="all" if auto and chosen.residency == 1.0 else chosen.residency,
        device=given.device.name,
        estimates=tuple(
            estimate(chosen, geometry, given, settled, context, limit) for context in contexts(settled.max_context)
        ),
        reasons=tuple(reasons),
    )


def contexts(longest: int) -> list[int]:
    """The three lengths that are spoken of: the longest possible one, a quarter and a sixteenth."""
    return sorted({max(1, longest // part) for part in (16, 4, 1)})


def estimate(
    config: SparseKVConfig, geometry: Geometry, given: Given, plan: Plan, context: int, limit: str
) -> dict[str, Any]:
    """What requests of `context` tokens can expect.

    Returns builtins: context, requests (most at once), limit (what keeps it from more), tokens_per_second (least and
    most, by the two miss curves), step_ms and slowest (what takes longest of a step) at the worse of them.
    """
    page = geometry.page_size
    by_host = plan.host_tokens // (-(-(context + 1) // page) * page)
    requests = max(1, min(plan.max_running_requests, by_host))
    low, high = speeds(config, geometry, given, requests, context, plan.slots)
    load = load_of(config, geometry, given.weights)
    moved = cost.transfers(load, cost.HIGH, requests, context, plan.slots)
    parts = cost.compute_seconds(load, given.device, requests, context)
    parts["link"] = sum(cost.link_seconds(load, given.device, moved).values())
    return {
        "context": context,
        "requests": requests,
        "limit": "host memory" if by_host < plan.max_running_requests else limit,
        "tokens_per_second": [round(low, 1), round(high, 1)],
        "step_ms": round(1e3 * requests / low, 2),
        "slowest": max(parts, key=lambda name: parts[name]),
    }


def _judge(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int, slots: int) -> float:
    """What splits are compared by: the mean of the two miss curves, at contexts that fill the host pool."""
    room = given.host // geometry.page_bytes * geometry.page_size // requests
    context = max(1, min(JUDGED_CONTEXT, given.context, room))
    return sum(speeds(config, geometry, given, requests, context, slots)) / 2


def _check_cache_memory(config: SparseKVConfig, geometry: Geometry, given: Given) -> None:
    fixed = fixed_bytes(config, geometry, given.host, 1)
    cache = given.free - fixed
    if cache <= 0:
        raise ValueError(
            f"landmarks, tables and scratch for {given.host / 1e9:.1f} GB of host KV take {fixed / 1e9:.2f} GB of "
            f"device memory and {given.free / 1e9:.2f} GB are free; lower --sparse-kv-host-memory"
        )
    if config.cache_memory == "auto":
        return
    wanted = parse_size(config.cache_memory, total=given.free, name="cache_memory")
    if wanted > cache:
        raise ValueError(
            f"cache_memory asks for {wanted / 1e9:.2f} GB and {cache / 1e9:.2f} GB of device memory are left "
            "beside landmarks and scratch; lower it, raise --mem-fraction-static or lower --sparse-kv-host-memory"
        )
