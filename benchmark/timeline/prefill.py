"""From a torch profile of one prefill on a GPU to lanes: what crosses the link, under what.

A layer begins where its chunk's keys and values leave for the host, which it does as soon as they are computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmark.timeline.lanes import ATTENTION, ATTENTION_KERNEL, KERNEL, LAYERS, MODEL, Event, length, union

FROM_HOST, PLACES, TABLES, TO_HOST = "from the host", "to their places", "look-ups", "to the host"
LANES = (LAYERS, MODEL, ATTENTION, FROM_HOST, PLACES, TABLES, TO_HOST)

# Our kernels. Everything else is the model's or attention's, or a copy of the device's copy engine.
OURS = {
    "stage_missing": FROM_HOST,
    "stage_landed": PLACES,
    "stage_resident": PLACES,
    "stage_cached": PLACES,
    "fill": PLACES,
    "absent": TABLES,
    "look_up": TABLES,
    "resolve": TABLES,
    "invalidate": TABLES,
    "store_chunk": TO_HOST,
}
LANDS = 32 << 10  # bytes of a copy from the host from which on it is of pages, and not SGLang's lists of numbers
TOGETHER = 5.0  # microseconds between copies that are one piece of a prefix


def read(trace: dict[str, Any], layers: int) -> list[Event]:
    """Events of the prefill in a profile, with a span for each layer. layers: of the model. Raises ValueError when the
    profile does not hold one prefill of so many layers.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in kinds and e.get("dur", 0) > 0]
    events: list[Event] = []
    last = -1  # place of the copy before
    for event in map(_event, sorted(spans, key=lambda e: e["ts"])):
        if event.name == "land" and last >= 0 and event.start - events[last].end < TOGETHER:
            events[last] = dataclasses.replace(events[last], end=max(events[last].end, event.end))
            continue
        if event.name == "land":
            last = len(events)
        events.append(event)
    begins = [event.start for event in events if event.name == "store_chunk"]
    if len(begins) != layers:
        raise ValueError(
            f"the profile holds {len(begins)} layers of prefill, one of a model with {layers} was expected"
        )
    ends = [*begins[1:], max(event.end for event in events if event.lane == ATTENTION)]
    numbered = [Event(f"layer {i}", LAYERS, *span, 0, i) for i, span in enumerate(zip(begins, ends, strict=True))]
    for event in events:
        layer = sum(begin <= event.start for begin in begins) - 1
        numbered.append(dataclasses.replace(event, step=0, layer=layer))
    return sorted(numbered, key=lambda event: event.start)


def _event(span: dict[str, Any]) -> Event:
    start, end = span["ts"], span["ts"] + span["dur"]
    if "HtoD" in span["name"] and span.get("args", {}).get("bytes", 0) >= LANDS:
        return Event("land", FROM_HOST, start, end)
    ours = KERNEL.search(span["name"])
    if ours and ours[1] in OURS:
        return Event(ours[1], OURS[ours[1]], start, end)
    return Event(span["name"], ATTENTION if ATTENTION_KERNEL.search(span["name"]) else MODEL, start, end)


def summary(events: list[Event]) -> dict[str, float]:
    """Milliseconds in each lane; from the first byte of the prefix to the last, and the share of that in which the link
    is busy; the share of all computation that lies under it.
    """
    busy = {lane: union([(e.start, e.end) for e in events if e.lane == lane]) for lane in LANES[1:]}
    figures = {lane: length(spans) / 1000 for lane, spans in busy.items()}
    link, compute = busy[FROM_HOST], union([*busy[MODEL], *busy[ATTENTION]])
    if link:
        whole = link[-1][1] - link[0][0]
        figures["from the first byte to the last"] = whole / 1000
        figures["link's share of it"] = length(link) / whole
        hidden = length(link) + length(compute) - length(union([*link, *compute]))
        figures["share of computation under it"] = hidden / length(compute)
    return {name: round(value, 3) for name, value in figures.items()}
