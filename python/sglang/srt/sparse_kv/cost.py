"""How long a decode step takes: bytes over the GPU's memory and over the link, products, and launches.

Times are those of one rank; what ranks say to each other is not counted. The shares of the peaks, the latencies and the
miss curves are measurements, and each says where it comes from. Nothing here knows SGLang or torch.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from sglang.srt.sparse_kv.devices import Device
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape

# Shares of the memory's peak, H200: FlashInfer over selected pages; landmark scores (both from benchmark/results,
# kernels); weights and dense keys and values (docs/results.md: plain SGLang with 1 and 4 requests).
ATTENTION_SHARE = 0.85
SCORE_SHARE = 0.60
WEIGHT_SHARE = 0.80
DENSE_SHARE = 0.875
PRODUCT_SHARE = 0.5  # of the peak of products: what a prefill of 32K tokens reaches (cold first token of plain SGLang)

# Seconds, H200. A step beside its layers: sampling and the gap between steps (plain SGLang, one request); what the
# operations around attention add to a layer however small the batch, and for each request (sparse KV without transfers,
# 1 to 22 requests, run of 29 November 2026, 20:39); planning what is fetched ahead, a layer (default against no
# transfers, 4 and 8 requests).
STEP_SECONDS = 0.9e-3
LAYER_SECONDS = 36e-6
REQUEST_SECONDS = 1.7e-6
PLAN_SECONDS = 3e-6
# A guessed row costs 0.2 to 0.3 ms a step at 8B (plain SGLang with two rows against one, 1 and 8 requests).
ROW_SECONDS = 8e-6  # a layer
# Share of the link's rate at which misses arrive (nothing fetched ahead, 16 and 22 requests), and share of the time of
# transfers ahead that is not hidden: they slow the kernels beside them (default, 16 and 22 requests).
MISS_SHARE = 0.9
INTERFERENCE = 0.3


# Share of a selection that layers without a cache of their own wait for: residency none, 4 requests of 32K tokens
# (2026-11-30-h200-serving-paper).
WAITING = 0.14


@dataclass(frozen=True)
class MissCurve:
    """Shares of a selection that are brought from the host, by slots per request and page of it.

    demand: (slots ÷ (requests times pages of a selection), share missing when nothing is fetched ahead).
    remaining: share of it that is still waited for when predictions are fetched. extra: units moved then, over the
    demand. source: where measured.
    """

    name: str
    demand: tuple[tuple[float, float], ...]
    remaining: float
    extra: float
    source: str


# A budget of 1536 and hysteresis 1, where 2, the default, misses less; temperature 0.6, positions beyond those that the
# small model was trained for.
HIGH = MissCurve(
    "high",
    ((3.79, 0.0448), (5.21, 0.0299), (10.4, 0.0095)),
    0.36,
    1.25,
    "8B shape, 8, 16 and 22 requests of 32K tokens (2026-11-30-h200-serving-hysteresis)",
)
# One point with hysteresis. With fewer slots misses rise steeply, and nothing was measured since: there it has the
# small model's shares from before hysteresis, when more was missed. With more slots it has the slope of the high one.
LOW = MissCurve(
    "low",
    ((1.0, 0.246), (2.0, 0.074), (2.87, 0.0163), (10.4, 0.0019)),
    0.22,
    1.13,
    "8B shape, 32 requests of 8K tokens (2026-11-30-h200-rows-8k); below it the small model, texts of 6K to 7K tokens, "
    "without hysteresis",
)
CURVES = (LOW, HIGH)


@dataclass(frozen=True)
class Load:
    """What one rank's steps work on.

    weights: bytes of this rank's, read in every step. rows: 1 or 2. scoped: layers without a cache of their own.
    host_pages: pages of the host pool, more than which all requests together never have.
    """

    geometry: Geometry
    shape: SelectionShape
    weights: int
    rows: int
    scoped: int = 0
    host_pages: float = math.inf

    def width(self, context: int) -> int:
        """Pages in a selection at a context of so many tokens."""
        pages = self.pages(context)
        return pages if self.shape.takes_every_page(context) else min(self.shape.scored_width, pages)

    def pages(self, context: int) -> int:
        return -(-(context + 1) // self.geometry.page_size)

    def selected_bytes(self, requests: int, context: int) -> int:
        """Bytes that all layers' selections hold."""
        geometry = self.geometry
        return requests * self.width(context) * geometry.kv_heads * geometry.unit_bytes * geometry.num_layers


@dataclass(frozen=True)
class Transfers:
    """Bytes brought from the host in one step: waited for, and ahead of their use."""

    missed: float
    ahead: float


NOTHING = Transfers(0.0, 0.0)


def miss_share(curve: MissCurve, ratio: float) -> float:
    """Share of a selection that is not cached. Beyond the measured points the nearest slope goes on, up to 1."""
    points = [(math.log(x), math.log(y)) for x, y in curve.demand]
    at = math.log(max(ratio, 1e-9))
    right = min(max(bisect.bisect([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return min(1.0, math.exp(y0 + (at - x0) * (y1 - y0) / (x1 - x0)))


def transfers(load: Load, curve: MissCurve, requests: int, context: int, slots: int) -> Transfers:
    """What a curve says of `requests` requests with `slots` slots per layer and kv head."""
    selected = load.selected_bytes(requests, context)
    scoped = load.scoped / load.geometry.num_layers
    share = 0.0
    if slots < min(requests * load.pages(context), load.host_pages):  # else whole contexts are cached
        share = miss_share(curve, slots / (requests * load.width(context)))
    moved = min(1.0, share * curve.extra)
    missed = share * curve.remaining
    if load.rows == 1:
        moved = missed = share
    missed = (1 - scoped) * missed + scoped * WAITING
    moved = max((1 - scoped) * moved + scoped, missed)
    return Transfers(selected * missed, selected * (moved - missed))


def compute_seconds(load: Load, device: Device, requests: int, context: int) -> dict[str, float]:
    """Seconds of a step without transfers, by what they are spent on."""
    geometry = load.geometry
    layers = geometry.num_layers
    units = requests * geometry.kv_heads * layers
    return {
        "weights": _weights(load.weights, geometry.dtype.itemsize, device, requests * load.rows),
        "attention": load.selected_bytes(requests, context) / (device.hbm * ATTENTION_SHARE),
        "landmarks": units * load.pages(context) * geometry.landmark_bytes / (device.hbm * SCORE_SHARE),
        "requests": layers * requests * REQUEST_SECONDS,
        "launches": STEP_SECONDS + layers * (LAYER_SECONDS - (2 - load.rows) * ROW_SECONDS),
    }


def link_seconds(load: Load, device: Device, moved: Transfers, prefetch: bool = True) -> dict[str, float]:
    """Seconds that a step waits for the link, by why."""
    return {
        "misses": moved.missed / (device.link * MISS_SHARE),
        "fetching ahead": moved.ahead / device.link * INTERFERENCE
        + (load.geometry.num_layers * PLAN_SECONDS if prefetch else 0.0),
    }


def step_seconds(
    load: Load, device: Device, requests: int, context: int, moved: Transfers, prefetch: bool = True
) -> float:
    """Seconds of one decode step; never less than the link takes for what is moved."""
    computed = sum(compute_seconds(load, device, requests, context).values())
    waited = sum(link_seconds(load, device, moved, prefetch).values())
    return max(computed + waited, (moved.missed + moved.ahead) / device.link)


def tokens_per_second(load: Load, device: Device, curve: MissCurve, requests: int, context: int, slots: int) -> float:
    """Tokens a second of `requests` requests at one miss curve."""
    return requests / step_seconds(load, device, requests, context, transfers(load, curve, requests, context, slots))


def dense_seconds(load: Load, device: Device, requests: int, context: int) -> float:
    """Seconds of plain SGLang's step, which reads the whole context."""
    geometry = load.geometry
    read = requests * context * geometry.page_bytes / geometry.page_size
    return (
        _weights(load.weights, geometry.dtype.itemsize, device, requests)
        + read / (device.hbm * DENSE_SHARE)
        + STEP_SECONDS
    )


def smallest_chunk(load: Load, device: Device) -> int:
    """Tokens of a prefill chunk from which on attention to a prefix takes longer than bringing it from the host."""
    geometry = load.geometry
    flops = 4 * geometry.kv_heads * geometry.group * geometry.head_dim  # per pair of tokens
    read = geometry.page_bytes / geometry.page_size / geometry.num_layers
    return math.ceil(read / device.link * device.flops * PRODUCT_SHARE / flops)


def _weights(size: int, itemsize: int, device: Device, rows: int) -> float:
    products = 2 * size / itemsize * rows / (device.flops * PRODUCT_SHARE)
    return max(size / (device.hbm * WEIGHT_SHARE), products)
