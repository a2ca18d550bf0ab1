"""A picture of some layers of a step, as SVG: no browser and no library is needed to make or to see it."""

from __future__ import annotations

from html import escape

from benchmark.timeline import prefill
from benchmark.timeline.lanes import AHEAD, ATTENTION, LANES, LAYERS, MODEL, SELECTION, TABLE, Event

COLOURS = {
    LAYERS: "#d8d8d8",
    MODEL: "#8da0cb",
    SELECTION: "#e5c494",
    TABLE: "#fc8d62",
    ATTENTION: "#66c2a5",
    AHEAD: "#e78ac3",
    prefill.FROM_HOST: "#e78ac3",
    prefill.PLACES: "#e5c494",
    prefill.TABLES: "#fc8d62",
    prefill.TO_HOST: "#b3b3b3",
}
LEFT, WIDTH, ROW, TOP = 165, 800, 30, 34


def svg(events: list[Event], step: int, first: int, count: int, title: str, lanes: tuple[str, ...] = LANES) -> str:
    """`count` layers of a step from `first` on, a row a lane. Raises ValueError when the step has no such layer."""
    spans = [e for e in events if e.lane == LAYERS and e.step == step and first <= e.layer < first + count]
    if not spans:
        raise ValueError(f"step {step} of the timeline has no layer {first}")
    begin, end = min(e.start for e in spans), max(e.end for e in spans)
    scale = WIDTH / (end - begin)
    height = TOP + ROW * len(lanes) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="13">{escape(title)}</text>',
    ]
    for row, lane in enumerate(lanes):
        y = TOP + row * ROW
        parts.append(f'<text x="8" y="{y + 19}">{lane}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y + 2}" width="{WIDTH}" height="{ROW - 4}" fill="#f7f7f7"/>')
    for event in events:
        if event.end <= begin or event.start >= end:
            continue
        x = LEFT + (max(event.start, begin) - begin) * scale
        width = (min(event.end, end) - max(event.start, begin)) * scale
        y = TOP + lanes.index(event.lane) * ROW
        tip = f"{event.name}, layer {event.layer}, {event.end - event.start:.0f} µs"
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 4}" width="{max(width, 0.4):.2f}" height="{ROW - 8}" '
            f'fill="{COLOURS[event.lane]}" stroke="white" stroke-width="0.3"><title>{escape(tip)}</title></rect>'
        )
        if event.lane == LAYERS:
            parts.append(f'<text x="{x + 4:.2f}" y="{y + 19}">{event.layer}</text>')
    axis = TOP + ROW * len(lanes) + 16
    for tick in range(6):
        x = LEFT + WIDTH * tick / 5
        anchor = "end" if tick == 5 else "middle"
        parts.append(f'<text x="{x:.0f}" y="{axis}" text-anchor="{anchor}">{(end - begin) * tick / 5000:.3g} ms</text>')
    return "\n".join([*parts, "</svg>", ""])
