"""How a rank's GPU memory is split between batch and page cache, by what gives most tokens a second."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.sparse_kv import cost, planner
from sglang.srt.sparse_kv.config import SparseKVConfig, parse_size
from sglang.srt.sparse_kv.devices import Device
from sglang.srt.sparse_kv.geometry import Geometry, resident_layers
from sglang.srt.sparse_kv.lookahead import SCOPED_AHEAD, late_layers
from sglang.srt.sparse_kv.planner import Plan

DEFAULT_MAX_RUNNING_CUDA = 128
HOST_SHARE = 0.8  # of available host memory, which "auto" takes
LANDMARK_SHARE = 0.25  # of the GPU memory free for KV, which "auto" host memory may ask for in landmarks and tables
MIN_HOST_PAGES = 64  # with fewer, no request of any use fits
JUDGED_CONTEXT = 32768  # most tokens at which batches are compared: where the high miss curve was measured
RESIDENCIES = (1.0, 0.75, 0.5, 0.25, 0.0)  # that "auto" compares
WORTH = 1.05  # how much faster fewer resident layers have to be, since the model is no better than this


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


def fixed_bytes(config: SparseKVConfig, geometry: Geometry, host_bytes: int, running: int) -> int:
    """Device bytes that do not depend on the number of slots."""
    settled = dataclasses.replace(geometry, max_requests=running, num_pages=host_bytes // geometry.page_bytes)
    return sum(planner.device_bytes(settled, 0, config, planner.selection_shape(geometry, config), cuda=True).values())


def fitting_host(config: SparseKVConfig, geometry: Geometry, given: Given) -> int:
    """Bytes of host memory, at most those given, whose landmarks and tables leave room for a page cache.

    They may take a quarter of the device memory that is free, and never so much that not one request fits the rest.
    Raises ValueError where a page cache for one request does not fit at all.
    """
    if config.residency == "auto":  # the option that needs the least
        config = dataclasses.replace(config, residency=RESIDENCIES[-1])
    shape = planner.selection_shape(geometry, config)
    least = fixed_bytes(config, geometry, 0, 1)
    a_page = (fixed_bytes(config, geometry, 1000 * geometry.page_bytes, 1) - least) // 1000 + 1
    headroom = shape.prefetch_pages(config.prefetch_cap)
    cache = planner.needed_slots(1, shape, geometry.max_pages, headroom) * planner.slot_bytes(geometry, config)
    pages = min(int(LANDMARK_SHARE * given.free), given.free - least - cache) // a_page
    if pages < MIN_HOST_PAGES:
        raise ValueError(
            f"the page cache of one request and the scratch of the kernels take {(least + cache) / 1e9:.2f} GB of "
            f"device memory and {given.free / 1e9:.2f} GB are free; use a larger GPU, raise --mem-fraction-static or "
            f"lower {planner.largest(config, shape)}"
        )
    return min(given.host, pages * geometry.page_bytes)


def load_of(config: SparseKVConfig, geometry: Geometry, weights: int, host: float = math.inf) -> cost.Load:
    """What the cost model needs to know. weights, host: bytes."""
    resident = len(resident_layers(config.residency, geometry.num_layers))
    shape = planner.selection_shape(geometry, config)
    pages = host // geometry.page_bytes - 1 if host < math.inf else math.inf  # one is the dummy's
    return cost.Load(geometry, shape, weights, config.most_rows, geometry.num_layers - resident, pages)


def speeds(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int, context: int, slots: int):
    """(least, most) tokens a second that the miss curves promise to `requests` requests of `context` tokens."""
    load = load_of(config, geometry, given.weights, given.host)
    load = dataclasses.replace(load, rows=rows_of(config, load, requests, context, slots))
    found = [cost.tokens_per_second(load, given.device, curve, requests, context, slots) for curve in cost.CURVES]
    return min(found), max(found)


def rows_of(config: SparseKVConfig, load: cost.Load, requests: int, context: int, slots: int) -> int:
    """Rows of a request in the steps of `requests` requests of `context` tokens, by the rule of variants.py."""
    if config.rows != "auto" or load.rows == 1:
        return load.rows
    shape, page = load.shape, load.geometry.page_size
    fits = not load.scoped and requests * (context // page + 1) <= slots
    return 1 if fits and (shape.takes_every_page(context) or requests <= shape.most_alone(slots)) else 2


def splits(config: SparseKVConfig, geometry: Geometry, given: Given) -> Iterator[tuple[int, int]]:
    """(requests, slots) for every number of requests that the capacity rule allows, 1 first.

    Raises ValueError where cache_memory asks for more than there is.
    """
    shape = planner.selection_shape(geometry, config)
    headroom = shape.prefetch_pages(config.prefetch_cap)
    for requests in range(1, given.running + 1):
        slots = slots_of(config, geometry, given, requests)
        if slots < planner.needed_slots(requests, shape, geometry.max_pages, headroom):
            return
        yield requests, slots


def slots_of(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int) -> int:
    """Slots per layer and kv head when so many requests may run."""
    return max(0, cache_bytes(config, geometry, given, requests)) // planner.slot_bytes(geometry, config)


def cache_bytes(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int) -> int:
    """Bytes of the page cache when so many requests may run; negative when the rest does not fit by itself."""
    cache = given.free - fixed_bytes(config, geometry, given.host, requests)
    if config.cache_memory == "auto":
        return cache
    return min(cache, parse_size(config.cache_memory, total=given.free, name="cache_memory"))


def plan_gpu(config: SparseKVConfig, geometry: Geometry, given: Given) -> Plan:
    """Splits what a rank has on a GPU. Raises ValueError, one sentence with numbers, when it is not enough."""
    config = dataclasses.replace(config, debug=False)  # residency is part of the CUDA graphs: nothing to hold ready
    geometry = dataclasses.replace(geometry, staging_tokens=planner.staging_tokens(geometry, given.free))
    reasons = []
    if not given.fixed_host:
        host = fitting_host(config, geometry, given)
        if host < given.host:
            reasons.append(
                f"host memory: {host / 1e9:.1f} of {given.host / 1e9:.1f} GB, because page summaries and tables of "
                f"more would take over {LANDMARK_SHARE:.0%} of the {given.free / 1e9:.1f} GB of GPU memory free for KV"
            )
            given = dataclasses.replace(given, host=host)
    auto = config.residency == "auto"
    options = [dataclasses.replace(config, residency=share) for share in RESIDENCIES] if auto else [config]
    _check_cache_memory(options[-1], geometry, given)  # that which needs the least
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
        return planner.plan(options[-1], geometry, least, given.host, 1, cuda=True)
    _, chosen, requests = best
    limit = "--max-running-requests" if requests == given.running else "page cache"
    if requests < most:
        limit = "link"
        reasons.append(
            f"requests: {requests} of the {most} that fit, because more would wait for the link; "
            "set --max-running-requests to choose"
        )
    reasons += _advice(chosen, geometry, given, requests)
    if auto and chosen.residency != 1.0:
        reasons.append(
            f"residency: {chosen.residency:.0%} of the layers keep a cache of their own, because GPU memory is short"
        )
    if geometry.staging_tokens < min(planner.STAGING_TOKENS[0], geometry.max_pages * geometry.page_size):
        reasons.append(
            f"prefill staging: {geometry.staging_tokens} tokens a slot, because two of {planner.STAGING_TOKENS[0]} "
            f"would take over {planner.STAGING_SHARE:.1%} of the {given.free / 1e9:.1f} GB of GPU memory free for KV; "
            "long prefixes are read in more blocks"
        )
    settled = planner.plan(
        chosen, geometry, cache_bytes(chosen, geometry, given, requests), given.host, requests, cuda=True
    )
    settled = dataclasses.replace(settled, max_context=min(settled.max_context, given.context))
    if config.lookahead == "auto":
        late = lookaheads(chosen, geometry, given, settled)
        settled = dataclasses.replace(settled, lookahead=late)
        reasons.append(planner.lookahead_in_words(late, geometry.num_layers))
    return dataclasses.replace(
        settled,
        residency="all" if auto and chosen.residency == 1.0 else chosen.residency,
        device=given.device.name,
        estimates=tuple(
            estimate(chosen, geometry, given, settled, context, limit) for context in contexts(settled.max_context)
        ),
        reasons=tuple(reasons),
    )


def lookaheads(config: SparseKVConfig, geometry: Geometry, given: Given, plan: Plan) -> tuple[int, ...]:
    """Late layers of each number of requests, from 1, that fetch what the high miss curve says."""
    load = load_of(config, geometry, given.weights, given.host)
    resident, layers, link = dataclasses.replace(load, scoped=0), geometry.num_layers, given.device.link

    def late(requests: int) -> int:
        context = _full_context(geometry, given, requests)
        compute = sum(cost.compute_seconds(load, given.device, requests, context).values()) - cost.STEP_SECONDS
        ahead = cost.transfers(resident, cost.HIGH, requests, context, plan.slots).ahead
        # A step begins with the buffers of the first layers that have no cache of their own.
        first = min(SCOPED_AHEAD, load.scoped) * load.selected_bytes(requests, context)
        return late_layers(layers, compute / layers, ahead / layers / link, first / layers / link)

    return tuple(late(requests) for requests in range(1, plan.max_running_requests + 1))


def contexts(longest: int) -> list[int]:
    """The three lengths that are spoken of: the longest possible one, a quarter and a sixteenth."""
    return sorted({max(1, longest // part) for part in (16, 4, 1)})


def estimate(
    config: SparseKVConfig, geometry: Geometry, given: Given, plan: Plan, context: int, limit: str
) -> dict[str, Any]:
    """What requests of `context` tokens can expect.

    Returns builtins: context, requests (most at once), rows of each, limit (what keeps it from more), tokens_per_second
    (least and most, by the two miss curves), step_ms and slowest (what takes longest of a step) at the worse of them.
    """
    page = geometry.page_size
    by_host = plan.host_tokens // (-(-(context + 1) // page) * page)
    requests = max(1, min(plan.max_running_requests, by_host))
    low, high = speeds(config, geometry, given, requests, context, plan.slots)
    load = load_of(config, geometry, given.weights, given.host)
    load = dataclasses.replace(load, rows=rows_of(config, load, requests, context, plan.slots))
    moved = cost.transfers(load, cost.HIGH, requests, context, plan.slots)
    parts = cost.compute_seconds(load, given.device, requests, context)
    parts["link"] = sum(cost.link_seconds(load, given.device, moved).values())
    return {
        "context": context,
        "requests": requests,
        "rows": load.rows,
        "limit": "host memory" if by_host < plan.max_running_requests else limit,
        "tokens_per_second": [round(low, 1), round(high, 1)],
        "step_ms": round(1e3 * requests / low, 2),
        "slowest": max(parts, key=lambda name: parts[name]),
    }


def _advice(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int) -> list[str]:
    """What the user chose and the model finds slower than another choice."""

    def speed(option: SparseKVConfig, number: int) -> float:
        return _judge(option, geometry, given, number, slots_of(option, geometry, given, number))

    said, here = [], speed(config, requests)
    if given.fixed_running:
        most, number = max((speed(config, n), n) for n in range(1, requests + 1))
        set_to = f"{requests}, as set" if requests == given.running else f"{requests} of the {given.running} set fit"
        if most > WORTH * here:
            said.append(
                f"requests: {set_to}; {number} would give {most:.0f} instead of {here:.0f} tokens/s with a full host "
                "pool"
            )
        elif requests < given.running:
            said.append(f"requests: {set_to} the page cache")
    if config.most_rows == 2:
        one = speed(dataclasses.replace(config, guide="none"), requests)
        if one > WORTH * here:
            rows = "two, as set" if config.rows == 2 else "auto"
            said.append(
                f'rows: {rows}; "guide": "none" would give {one:.0f} instead of {here:.0f} tokens/s with a full host '
                "pool, because there is little to predict"
            )
    return said


def _judge(config: SparseKVConfig, geometry: Geometry, given: Given, requests: int, slots: int) -> float:
    """What splits are compared by: the mean of the two miss curves, at contexts that fill the host pool.

    Scores decide at any length: fewer requests would seem faster where their contexts, which are longer, are not whole.
    """
    config = dataclasses.replace(config, whole=0)
    context = _full_context(geometry, given, requests)
    return sum(speeds(config, geometry, given, requests, context, slots)) / 2


def _full_context(geometry: Geometry, given: Given, requests: int) -> int:
    """Tokens of each request when together they fill the host pool, at most those that requests are judged by."""
    room = given.host // geometry.page_bytes * geometry.page_size // requests
    return max(1, min(JUDGED_CONTEXT, given.context, room))


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
