"""From a torch profile of decode steps to lanes, each event with its step and layer.

On CUDA the events are kernels, ours known by their names. On the CPU engine they are our operations, one after another:
what lies between a layer's attention and the next operation is the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

LAYERS, MODEL, SELECTION, TABLE, ATTENTION, AHEAD = LANES = (
    "layers",
    "model",
    "selection",
    "page table and misses",
    "attention",
    "fetch ahead",
)

# Our operations on the CPU, our kernels on CUDA, where `append` and `resolve` bring misses themselves and a `gather` is
# always ahead of its layer.
OURS = {
    "score": SELECTION,
    "select": SELECTION,
    "predict": SELECTION,
    "score_few": SELECTION,
    "score_plain": SELECTION,
    "dense": SELECTION,
    "append": TABLE,
    "write_token": TABLE,
    "close_pages": TABLE,
    "resolve": TABLE,
    "plan_prefetch": TABLE,
    "plan_prefetches": TABLE,
    "clear": TABLE,
    "gather": AHEAD,
    "attend_inputs": ATTENTION,
    "attend": ATTENTION,
    "prepare": ATTENTION,
    "finish": ATTENTION,
}
BEGINS = {"append"}, {"score", "score_few", "score_plain"}  # of layers, if there are any
KERNEL = re.compile(r"\bskv::(\w+?)_kernel\b")
ATTENTION_KERNEL = re.compile(
    r"BatchDecode|BatchPrefill|SinglePrefill|PrefillWithKVCache|flash_fwd|merge_state", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Event:
    """Times in microseconds, as the profile has them."""

    name: str
    lane: str
    start: float
    end: float
    step: int = -1
    layer: int = -1


def read(trace: dict[str, Any]) -> list[Event]:
    """Events of a profile by start. Raises ValueError when none of ours is among them."""
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("dur", 0) > 0]
    kernels = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events = _of_kernels(kernels) if kernels else _of_operations(spans)
    if not any(event.lane != MODEL for event in events):
        raise ValueError(f"none of {len(spans)} spans in the profile is ours; was the server started with --sparse-kv?")
    return events


def _of_kernels(spans: Iterable[dict[str, Any]]) -> list[Event]:
    events = []
    for span in sorted(spans, key=lambda e: e["ts"]):
        ours = KERNEL.search(span["name"])
        name = ours[1] if ours else span["name"].removeprefix("void ").partition("<")[0].partition("(")[0]
        theirs = ATTENTION if ATTENTION_KERNEL.search(span["name"]) else MODEL
        lane = OURS.get(name, MODEL) if ours else theirs
        events.append(Event(name, lane, span["ts"], span["ts"] + span["dur"]))
    return events


def _of_operations(spans: Iterable[dict[str, Any]]) -> list[Event]:
    events: list[Event] = []
    busy_until, before = None, ""
    for span in sorted((e for e in spans if e["name"].startswith("sparse_kv::")), key=lambda e: e["ts"]):
        name = span["name"].removeprefix("sparse_kv::")
        lane = OURS.get(name, TABLE)
        if name == "gather":
            # What a resolve or, within its own time, an append asks for is waited for.
            lane = TABLE if before == "resolve" or (busy_until and span["ts"] < busy_until) else AHEAD
        else:
            before = name
        if busy_until and span["ts"] > busy_until and (events[-1].name == "attend" or name == "attend_inputs"):
            events.append(Event("model", MODEL, busy_until, span["ts"]))
        events.append(Event(name, lane, span["ts"], span["ts"] + span["dur"]))
        busy_until = max(busy_until or 0.0, span["ts"] + span["dur"])
    return events


def number(events: list[Event], layers: int) -> list[Event]:
    """The events of whole steps, numbered, with a span for each layer.

    layers: of the model. A layer begins with its scores, with an append before them, or, where it has none, with the
    write of its token. Counted from the end: a profile may start within a step and ends after one. Raises ValueError
    without a whole step.
    """
    names = {event.name for event in events}
    anchors = next((first for first in BEGINS if names & first), {"write_token"})
    begins = [event.start for event in events if event.name in anchors]
    steps = len(begins) // layers
    if not steps:
        raise ValueError(f"the profile holds {len(begins)} layers and a step has {layers}; record more steps")
    begins = begins[len(begins) - steps * layers :]
    # The last layer ends with its attention; what follows belongs to no layer.
    last = max(event.end for event in events if event.lane == ATTENTION and event.start >= begins[-1])
    ends = [*begins[1:], last]
    numbered, place = [], 0
    for event in events:
        while place + 1 < len(begins) and event.start >= begins[place + 1]:
            place += 1
        if begins[0] <= event.start and event.end <= last:
            numbered.append(dataclasses.replace(event, step=place // layers, layer=place % layers))
    for place, (start, end) in enumerate(zip(begins, ends, strict=True)):
        if place % layers == layers - 1:  # between steps there is no layer
            own = [e.end for e in numbered if (e.step, e.layer, e.lane) == (*divmod(place, layers), ATTENTION)]
            end = max(own, default=end)
        numbered.append(Event(f"layer {place % layers}", LAYERS, start, end, *divmod(place, layers)))
    return sorted(numbered, key=lambda event: event.start)


def chrome(events: list[Event], about: dict[str, Any], lanes: tuple[str, ...] = LANES) -> dict[str, Any]:
    """A trace for Perfetto (ui.perfetto.dev) or chrome://tracing: one lane a thread. about: goes along as it is."""
    begin = min(event.start for event in events)
    rows: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "sparse KV"}}]
    for tid, lane in enumerate(lanes):
        rows.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}})
        rows.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    rows += [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.lane,
            "pid": 0,
            "tid": lanes.index(event.lane),
            "ts": round(event.start - begin, 3),
            "dur": round(event.end - event.start, 3),
            "args": {"step": event.step, "layer": event.layer},
        }
        for event in events
    ]
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about}


def summary(events: list[Event]) -> dict[str, float]:
    """Milliseconds a step in each lane, and the share of the time fetching ahead that lies under other lanes."""
    steps = 1 + max(event.step for event in events)
    busy = {lane: [(e.start, e.end) for e in events if e.lane == lane] for lane in LANES[1:]}
    figures = {lane: length(union(spans)) / 1000 / steps for lane, spans in busy.items()}
    compute = union([span for lane in LANES[1:-1] for span in busy[lane]])
    ahead = union(busy[AHEAD])
    hidden = length(compute) + length(ahead) - length(union([*compute, *ahead]))
    figures["hidden share of fetch ahead"] = hidden / length(ahead) if ahead else 0.0
    return {name: round(value, 3) for name, value in figures.items()}


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
