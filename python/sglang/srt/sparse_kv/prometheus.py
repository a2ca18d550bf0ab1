"""Counters at `/metrics`, beside SGLang's own: same prefix, same labels, fed when SGLang feeds its own.

SGLang's collector holds one set of labels for each scheduler process, its rank among them, and with several processes
a folder that the server's `/metrics` adds up. So nothing here knows about ranks: a rank publishes its own share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.sparse_kv import devices, metrics
from sglang.srt.sparse_kv.variants import Variant

if TYPE_CHECKING:
    from sglang.srt.sparse_kv.runtime import SparseKVRuntime

PREFIX = "sglang:sparse_kv_"

# By the name in metrics.summary: for each layer, with a label of that name.
LAYER_COUNTERS = {
    "selected": ("selected_units_total", "Units (a page of one KV head) that selections named."),
    "hit": ("hit_units_total", "Selected units that were in the page cache."),
    "missed": ("missed_units_total", "Units fetched while the step waited."),
    "prefetched": ("prefetched_units_total", "Units fetched ahead."),
    "useful": ("prefetched_useful_units_total", "Units fetched ahead and selected before they left the cache."),
    "wasted": ("prefetched_wasted_units_total", "Units fetched ahead that left the cache unselected."),
    "evicted": ("evicted_units_total", "Units that made room for another."),
    "bytes_in": ("fetched_bytes_total", "Bytes brought from host memory for decode."),
    "stall_seconds": ("stall_seconds_total", "Seconds that steps waited for missed units, and did nothing else."),
}
COUNTERS = {
    "steps": ("steps_total", "Decode steps."),
    "one_row": ("one_row_steps_total", "Of these, with one row a request, and scores."),
    "all_pages": ("all_pages_steps_total", "Of these, with one row a request, and every page selected."),
    "guides": ("guides_total", "Guesses at the next token."),
    "guide_hits": ("guide_hits_total", "Guesses that were the next token."),
    "bytes_stored": ("stored_bytes_total", "Bytes of keys and values written to host memory."),
    "bytes_staged": ("staged_bytes_total", "Bytes brought from host memory for prefill."),
    "link_busy_seconds": ("link_busy_seconds_total", "Seconds that both take at the link's rate; 0 without a GPU."),
}
GAUGES = {
    "cache_occupancy": ("cache_occupancy", "Share of the page cache's slots that hold a page."),
    "cache_slots": ("cache_slots", "Slots of the page cache per layer and KV head."),
    "link_bytes": ("link_bytes_per_second", "What the plan takes the link from the host to carry; 0 without a GPU."),
    "host_pool_bytes": ("host_pool_bytes", "Size of the host pool."),
    "host_pool_usage": ("host_pool_usage", "Share of the host pool that requests and the radix cache hold."),
}


class Exporter:
    """The metrics of one scheduler process.

    collector: SGLang's, which has the labels and may name other classes than prometheus_client's.
    """

    def __init__(self, collector: Any) -> None:
        # Here, and not at the top: SGLang sets the folder for several processes before it makes its own.
        import prometheus_client

        counter = collector._counter_cls or prometheus_client.Counter
        gauge = collector._gauge_cls or prometheus_client.Gauge
        self._labels = dict(collector.labels)
        names = list(self._labels)
        self._layered = {
            key: counter(name=PREFIX + name, documentation=text, labelnames=[*names, "layer"])
            for key, (name, text) in LAYER_COUNTERS.items()
        }
        self._counters = {
            key: counter(name=PREFIX + name, documentation=text, labelnames=names)
            for key, (name, text) in COUNTERS.items()
        }
        self._gauges = {
            key: gauge(name=PREFIX + name, documentation=text, labelnames=names, multiprocess_mode="mostrecent")
            for key, (name, text) in GAUGES.items()
        }
        self._published: dict[tuple[str, int], list] = {}  # by key and layer: the counter, its sum

    def publish(self, runtime: SparseKVRuntime, stats: Any) -> None:
        """stats: SGLang's ``SchedulerStats``, for what its allocator knows."""
        cache = runtime.cache
        table, stalled, (right, guesses) = runtime.read(cache.counters, cache.stalled, runtime.guide_hits)
        rows = metrics.layers(runtime, table, stalled)
        for layer, row in enumerate(rows):
            for key, counter in self._layered.items():
                self._raise_to(counter, key, row[key], layer)
        token = metrics.token_bytes(runtime)
        size, device = runtime.plan.host_tokens, devices.find(runtime.plan.device)
        values = {
            "steps": sum(runtime.steps.values()),
            "one_row": runtime.steps[Variant.ONE_ROW],
            "all_pages": runtime.steps[Variant.ALL_PAGES],
            "guides": guesses,
            "guide_hits": right,
            "bytes_stored": runtime.tokens_stored * token,
            "bytes_staged": runtime.tokens_staged * token,
            "link_busy_seconds": metrics.link_seconds(runtime, sum(row["bytes_in"] for row in rows)),
        }
        for key, counter in self._counters.items():
            self._raise_to(counter, key, values[key])
        gauges = {
            "cache_occupancy": metrics.occupancy(runtime),
            "cache_slots": cache.usable,
            "link_bytes": device.link if device else 0,
            "host_pool_bytes": runtime.plan.host_bytes,
            "host_pool_usage": (size - stats.kv_available_tokens) / size,
        }
        for key, gauge in self._gauges.items():
            gauge.labels(**self._labels).set(gauges[key])

    def _raise_to(self, counter: Any, key: str, value: float, layer: int = -1) -> None:
        """Prometheus counters are told what was added; ours know their sum, and start anew when they are reset."""
        if (key, layer) not in self._published:
            labels = self._labels if layer < 0 else {**self._labels, "layer": layer}
            self._published[key, layer] = [counter.labels(**labels), 0]
        known = self._published[key, layer]
        child, before = known
        if value != before:
            child.inc(value - before if value > before else value)
            known[1] = value
