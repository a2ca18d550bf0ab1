"""Bytes and capacities, decided once at start: how much the host holds, how many slots the cache has, who may run.

Arithmetic alone: sizing.py asks the machine, and `sglang-sparse-kv plan` does without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape, resident_layers
from sglang.srt.sparse_kv.lookahead import late_layers

# Of a staging slot on a GPU: a prefix of 32K and a chunk of 8K, which one attention call then reads; or fewer, so that
# both slots take at most this share of the memory that is free for KV.
STAGING_TOKENS = (40960, 24576, 16384, 8192)
STAGING_SHARE = 0.025
# Of each of two places where pieces of a prefix land. Each piece costs the host 0.03 to 0.1 ms, which pieces of 4096
# tokens did not hide on a slow one; these take 1.2 ms of a PCIe 5 link at 8B. Of smaller staging slots, half.
LANDING_TOKENS = 16384
SLOT_STATE_BYTES = 4 + 4 + 1  # page, stamp, ahead
LEFT = "left to SGLang (activations, graphs, workspaces)"
ONE_ROW_GRAPHS = "graphs for one row"
GRAPHS, REST = "CUDA graphs", "the rest (SGLang's buffers and tables)"


@dataclass(frozen=True)
class Plan:
    """What was decided. Sizes in bytes of one rank; slots per layer and kv head.

    host_bytes: exactly host_tokens of KV. The pool also allocates one page for the dummy, out of what was given.
    device_bytes: what sparse KV allocates, by purpose. lookahead: layers, counted from the last, that fetch under the
    step that needs the pages, by the number of requests in it, from 1; the last entry is for more, too. in_use: what is
    taken once graphs are captured, measured, by purpose; unused: what is left then. estimates: what is expected of
    requests of some lengths, see split.py. reasons: one sentence for each choice that the user did not make.
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
    rows: str | int = 2
    lookahead: tuple[int, ...] = (1,)
    max_context: int = 0  # tokens of one request, prompt and answer, that the host pool takes
    device: str = ""  # whose figures the estimates use; none without a GPU
    outside: dict[str, int] = dataclasses.field(default_factory=dict)  # device bytes of SGLang and others
    in_use: dict[str, int] = dataclasses.field(default_factory=dict)
    unused: int = 0
    estimates: tuple[dict[str, Any], ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def landing_pages(self) -> int:
        """Of each of the two places where pieces of a prefix land."""
        return landing_tokens(self.staging_tokens) // self.shape.page_size

    def as_dict(self) -> dict[str, Any]:
        """The plan as builtins."""
        return dataclasses.asdict(self)


def started(plan: Plan, graphs: int, free: int, total: int) -> Plan:
    """The plan with what is in use after the start, bytes: graphs as captured; free, of total, as the GPU says."""
    planned = plan.outside | plan.device_bytes
    named = {name: size for name, size in planned.items() if name not in (LEFT, ONE_ROW_GRAPHS)}
    named[GRAPHS] = graphs
    named[REST] = total - free - sum(named.values())
    return dataclasses.replace(plan, in_use=named, unused=free)


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
        "last selections": (geometry.max_requests + 1) * geometry.selected_bytes,
        "prefill staging": staging_bytes(geometry, geometry.staging_tokens),
    }
    if config.keeps_history:
        sizes["token history"] = (geometry.max_requests + 1) * geometry.max_pages * geometry.page_size * 4
    if cuda:
        if config.landing:
            sizes["prefill landing"] = staging_bytes(geometry, landing_tokens(geometry.staging_tokens))
        sizes["kernel scratch"] = scratch_bytes(geometry, config, shape)
        if config.rows == "auto":
            sizes[ONE_ROW_GRAPHS] = len(graph_sizes(range(1, geometry.max_requests + 1))) * ONE_ROW_BYTES
    return sizes


def staging_bytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of prefill's two staging slots of so many tokens."""
    return 2 * tokens * geometry.kv_heads * geometry.unit_bytes // geometry.page_size


def staging_tokens(geometry: Geometry, free: int) -> int:
    """Tokens of a staging slot on a GPU with so many bytes free for KV: no more than a request can have."""
    room = (tokens for tokens in STAGING_TOKENS if staging_bytes(geometry, tokens) <= STAGING_SHARE * free)
    return min(next(room, STAGING_TOKENS[-1]), geometry.max_pages * geometry.page_size)


def landing_tokens(staging: int) -> int:
    """Tokens of a place where a prefix lands, with staging slots of so many."""
    return min(LANDING_TOKENS, staging // 2)


def scratch_bytes(geometry: Geometry, config: SparseKVConfig, shape: SelectionShape) -> int:
    """Bytes that the CUDA engine's kernels and FlashInfer work in."""
    lines = geometry.max_requests * config.most_rows * geometry.kv_heads * geometry.group
    scores = lines * geometry.max_pages * 4
    lists = (
        geometry.kv_heads * max(geometry.max_requests * shape.width, geometry.staging_tokens // geometry.page_size) * 28
    )
    return scores + lists + FLASHINFER_BYTES


def graph_sizes(captured: Iterable[int]) -> list[int]:
    """Of the batch sizes that two rows are captured for, those for one row: a padded request costs it less."""
    sizes = sorted(captured)

    def step(size: int) -> int:
        return 1 if size <= 4 else 8 if size <= 32 else 16 if size <= 64 else 32

    return [size for size in sizes if size % step(size) == 0 or size == sizes[-1]]


FLASHINFER_BYTES = (128 + 4 * 24) << 20  # partial results, and a plan for each batch size that is captured
# Of a batch size that is captured for one row, with scores and without, and its attention's plan: 70 and 90 MB were
# taken for three and four sizes (8B, H200).
ONE_ROW_BYTES = 2 * 23 * 10**6


def slot_bytes(geometry: Geometry, config: SparseKVConfig) -> int:
    """Bytes of one slot in every layer-sized buffer and kv head."""
    return num_buffers(geometry, config) * geometry.kv_heads * (geometry.unit_bytes + SLOT_STATE_BYTES)


def selection_shape(geometry: Geometry, config: SparseKVConfig) -> SelectionShape:
    return SelectionShape.from_tokens(
        geometry.page_size,
        config.budget,
        config.sinks,
        config.window,
        geometry.max_pages,
        config.whole_at(config.budget),
    )


def largest(config: SparseKVConfig, shape: SelectionShape) -> str:
    """The setting that makes a selection as large as it is, and its value. A lower budget lowers "auto", too."""
    if config.whole != "auto" and shape.whole_pages > shape.scored_width:
        return f"whole in --sparse-kv-config ({config.whole})"
    return f"--sparse-kv-budget ({config.budget})"


def num_buffers(geometry: Geometry, config: SparseKVConfig) -> int:
    """Layer-sized buffers of the cache: one a resident layer and the ring; all of both when policy can be switched."""
    resident = geometry.num_layers if config.debug else len(resident_layers(config.residency, geometry.num_layers))
    return resident + (config.ring if resident < geometry.num_layers or config.debug else 0)


def lookahead_in_words(late: tuple[int, ...], layers: int) -> str:
    """What was decided of `lookahead`, and why. late: as `Plan.lookahead`."""
    fewer = f" ({late[-1]} with {len(late)} requests)" if late[-1] != late[0] else ""
    return (
        f"lookahead: the last {late[0]} of {layers} layers{fewer} fetch ahead under the step that needs the pages; the "
        "others, with too few layers before them to hide it, under the one before"
    )


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
            f"{needed}; {more} or lower {largest(config, shape)}"
        )
    # More slots than the host has pages would never be used.
    slots = min(slots, max(needed_slots(running, shape, geometry.max_pages, headroom), host_pages))
    settled = dataclasses.replace(geometry, max_requests=running, num_pages=host_pages + 1)
    # By figures of a device split.py knows better. The CPU engine copies at once, so that no transfer takes time.
    late = late_layers(geometry.num_layers, 0.0, 0.0)
    if isinstance(config.lookahead, int):
        late = min(config.lookahead, geometry.num_layers)
    return Plan(
        host_bytes=host_pages * geometry.page_bytes,
        host_tokens=host_pages * geometry.page_size,
        max_running_requests=running,
        slots=slots,
        prefetch_headroom=headroom,
        shape=shape,
        staging_tokens=geometry.staging_tokens,
        device_bytes=device_bytes(settled, slots, config, shape, cuda),
        residency="all" if config.residency == "auto" else config.residency,
        rows=config.rows if config.most_rows == 2 else 1,
        lookahead=(late,),
        reasons=(lookahead_in_words((late,), geometry.num_layers),) if config.lookahead == "auto" else (),
        max_context=max(0, (host_pages - 1) * geometry.page_size - 1),  # SGLang keeps a page in reserve
    )
