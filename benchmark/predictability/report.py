"""What a recording says: tables as text, everything as JSON, and a plot by layer where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmark.predictability import signals
from benchmark.predictability.bursts import bursts
from benchmark.predictability.caches import Outcome, replay
from benchmark.predictability.gates import opened
from benchmark.predictability.recording import Recording, Run, Trace

SIZES = (1, 2, 4)  # slots of the replayed caches, in units of k
FLOORS = (0.25, 0.5)  # of the gate; the first is the default
REQUESTS = (8, 16, 32)  # of the steps whose bursts are told


def analyse(recording: Recording, link: float) -> dict[str, Any]:
    """Everything that the tables show, as builtins. link: bytes a second of the bus to the host."""
    return {f"{t:g}": _temperature(recording, t, link) for t in recording.temperatures()}


def _temperature(recording: Recording, temperature: float, link: float) -> dict[str, Any]:
    guides = {
        guide: list(recording.traces[Run(temperature, guide)].values()) for guide in recording.guides(temperature)
    }
    reference = next(iter(guides.values()))
    _, layers, heads, k = reference[0].true.shape
    caches, uneven = {}, {}
    for multiple in SIZES:
        for name, (predicted, open_) in _policies(reference, guides).items():
            outcome = replay(reference, multiple * k, predicted, open_)
            caches[f"{name}, {multiple} k"] = _in_bytes(outcome, layers * heads * k * recording.unit_bytes, link)
            if name in {f"{guide}, floor {FLOORS[0]:g}" for guide in guides} and multiple > 1:
                for requests in REQUESTS:
                    uneven[f"{name}, {multiple} k, {requests} requests"] = bursts(outcome.ahead, requests)
    recalls = signals.recalls(reference, guides)
    return {
        "contexts": len(reference),
        "tokens": [int(trace.lengths[0]) for trace in reference],
        "steps": sum(len(trace.right) for trace in reference),
        "pages_of_budget": k,
        "same_text": _same_text(guides),
        "sync": {name: vars(signals.sync(traces)) for name, traces in guides.items()},
        "recall": {
            name: {"size": round(size, 3), "recall": round(float(by_layer.mean()), 4), "by_layer": _rounded(by_layer)}
            for name, (size, by_layer) in recalls.items()
        },
        "caches": caches,
        "bursts": uneven,
    }


def _policies(
    reference: list[Trace], guides: dict[str, list[Trace]]
) -> dict[str, tuple[list[np.ndarray] | None, list[np.ndarray] | None]]:
    """What each policy fetches ahead, and in which steps and layers."""
    from sglang.srt.sparse_kv.lookahead import late_layers

    late = late_layers(reference[0].true.shape[1], 0.0, 0.0)  # as many as a fast link allows
    policies: dict[str, tuple[list[np.ndarray] | None, list[np.ndarray] | None]] = {"LRU alone": (None, None)}
    for name, traces in guides.items():
        predicted = [trace.predicted for trace in traces]
        policies[name] = (predicted, None)
        for floor in FLOORS:
            policies[f"{name}, floor {floor:g}"] = (predicted, [opened(trace, floor, late) for trace in traces])
    nothing = np.full_like(reference[0].true[:1], -1)
    policies["oracle"] = ([np.concatenate([trace.true[1:], nothing]) for trace in reference], None)
    return policies


def _in_bytes(outcome: Outcome, selection: int, link: float) -> dict[str, Any]:
    """selection: bytes of all layers' and heads' chosen units in one step of one request."""
    return {
        "missed": round(outcome.missed, 4),
        "moved": round(outcome.moved, 4),
        "useful": round(outcome.useful, 3),
        "clean": round(outcome.clean, 3),
        "missed_kb": round(outcome.missed * selection / 1e3, 1),
        "moved_kb": round(outcome.moved * selection / 1e3, 1),
        "exposed_us": round(outcome.missed * selection / link * 1e6, 1),
        "missed_by_layer": _rounded(outcome.by_layer),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


def _same_text(guides: dict[str, list[Trace]]) -> bool:
    """Whether all guides saw one text and one sequence of true sets, as they must."""
    first, *others = guides.values()
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.true, b.true)
        for other in others
        for a, b in zip(first, other)
    )


# ------------------------------------------------------------------ for people


def text(found: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    return "\n\n".join(
        [
            "## Guides in sync\n\n" + _table(found, "sync", _sync_cell, "guide"),
            "## Recall of the next true set\n\n" + _table(found, "recall", _recall_cell, "signal"),
            "## Missed / moved per step, in shares of the budget; share of layers without a miss\n\n"
            + _table(found, "caches", _cache_cell, "policy, cache"),
            "## Bytes of one request and step: missed / moved, and the wait for what is missed\n\n"
            + _table(found, "caches", _bytes_cell, "policy, cache"),
            "## Bursts, in mean fetches ahead of a layer: the largest layer, 9 of 10 steps; beyond one each, a run of "
            "layers, in 5 and in 9 of 10 steps\n\n" + _table(found, "bursts", _burst_cell, "policy, cache"),
        ]
    )


def _sync_cell(row: dict[str, Any]) -> str:
    return f"{row['hits'] / max(row['steps'], 1):.2f} (stays {row['stay']:.2f}, returns {row['back']:.2f})"


def _recall_cell(row: dict[str, Any]) -> str:
    return (
        f"{row['recall']:.3f} ({row['size']:.2f} k; {min(row['by_layer']):.2f} to {max(row['by_layer']):.2f} by layer)"
    )


def _cache_cell(row: dict[str, Any]) -> str:
    return f"{row['missed']:.3f} / {row['moved']:.3f}; {row['clean']:.2f}"


def _bytes_cell(row: dict[str, Any]) -> str:
    return f"{row['missed_kb']:.0f} / {row['moved_kb']:.0f} kB; {row['exposed_us']:.0f} µs"


def _burst_cell(row: dict[str, Any]) -> str:
    return f"{row['layer']:.1f}, {row['step']:.2f}; {row['typical']:.1f}, {row['run']:.1f}"


def _table(found: dict[str, Any], part: str, cell, title: str) -> str:
    temperatures = list(found)
    names = list(dict.fromkeys(name for t in temperatures for name in found[t][part]))
    lines = [
        f"| {title} | " + " | ".join(f"T = {t}" for t in temperatures) + " |",
        "|---" * (len(temperatures) + 1) + "|",
    ]
    for name in names:
        cells = [cell(found[t][part][name]) if name in found[t][part] else "-" for t in temperatures]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> bool:
    """Recall and misses by layer; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(found), figsize=(5 * len(found), 7), squeeze=False, sharey="row")
    for column, (temperature, part) in enumerate(found.items()):
        for name, row in part["recall"].items():
            axes[0][column].plot(row["by_layer"], label=name)
        for name, row in part["caches"].items():
            if name.endswith(", 2 k") and "floor" not in name:
                axes[1][column].plot(row["missed_by_layer"], label=name)
        axes[0][column].set(title=f"temperature {temperature}", ylabel="recall of the next set")
        axes[1][column].set(xlabel="layer", ylabel="missed, share of the budget")
        for axis in (axes[0][column], axes[1][column]):
            axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
