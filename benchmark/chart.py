"""Lines over one axis as SVG: no library is needed to draw it or to see it."""

from __future__ import annotations

import math
from html import escape

COLOURS = ("#1b6ca8", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 380, 70, 40, 190, 50

Points = list[tuple[float, float]]


def lines(title: str, x: str, y: str, series: dict[str, Points], log_x: bool = False, log_y: bool = False) -> str:
    """The picture of `series`, each a name and its points; `x` and `y` label the axes.

    Raises:
        ValueError: there is no point, or one at or below 0 on a logarithmic axis.
    """
    points = [point for each in series.values() for point in each]
    if not points:
        raise ValueError(f"{title!r} has no point to draw.")
    if log_x and min(at for at, _ in points) <= 0:
        raise ValueError(f"{title!r} has a point at x <= 0, which a logarithmic axis cannot show.")
    if log_y and min(value for _, value in points) <= 0:
        raise ValueError(f"{title!r} has a point at y <= 0, which a logarithmic axis cannot show.")
    along = math.log2 if log_x else float
    first, last = (edge(along(at) for at, _ in points) for edge in (min, max))
    marks = _decades(points) if log_y else _steps(points)
    up = math.log2 if log_y else float
    low, high = up(marks[0]), up(marks[-1])

    def place(at: float, value: float) -> tuple[float, float]:
        share = (along(at) - first) / (last - first) if last > first else 0.5
        height = (up(value) - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - height * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>',
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y)}</text>',
    ]
    for mark in marks:
        _, height = place(points[0][0], mark)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{mark:g}</text>')
    free = -math.inf  # where the last label ends; one that would touch it is left out
    for at in sorted({at for at, _ in points}):
        across, _ = place(at, marks[0])
        if across < free:
            continue
        free = across + 4 + 6 * len(f"{at:g}")
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{at:g}</text>')
    for number, (name, each) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        spots = [place(*point) for point in sorted(each)]
        path = " ".join(f"{across:.1f},{height:.1f}" for across, height in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{height:.1f}" r="3" fill="{colour}"/>' for across, height in spots]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 14}" y="{TOP + 14 + 18 * number}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _steps(points: Points) -> list[float]:
    """Round values from 0 to beyond the highest point, about five."""
    top = max(value for _, value in points) or 1.0
    step = _step(top / 5)
    return [number * step for number in range(math.ceil(top / step - 1e-9) + 1)]


def _decades(points: Points) -> list[float]:
    """1, 2 and 5 times the powers of ten around all points, at least two of them."""
    low, high = (edge(value for _, value in points) for edge in (min, max))
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    every = [float(f"{times}e{exponent}") for exponent in exponents for times in (1, 2, 5)]
    below = max(mark for mark in every if mark <= low)
    above = min(mark for mark in every if mark >= high and mark > below)
    return [mark for mark in every if below <= mark <= above]


def _step(rough: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
