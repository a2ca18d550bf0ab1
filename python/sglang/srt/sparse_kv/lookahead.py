"""Which layers fetch early, under the step that predicts, and which late, under the step that needs the pages.

The later, the better known whether the guess was right (`gate.py`); but a transfer has to land before its layer waits
for it, and all of them before their step ends. So as many layers are late as time allows.

Transfers queue for one link. Beside layer i the late layer i + (layers - late) is asked for, which leaves
it the time of layers - late layers, and then the early layer i - 1, which has the rest of the step. Nothing here knows
SGLang or torch.
"""

from __future__ import annotations

SCOPED_AHEAD = 2  # layers without a cache of their own whose buffers are filling while one computes
# Layers that lie between the first late layer's request and the layer: it should not be waited for at once.
NEAREST = 2
# What a run of neighbouring layers may need beyond one mean fetch each, in mean fetches: in nine of ten steps 7 to 10
# on real text, or more where hardly anything is fetched (docs/predictability.md). One layer may need four times the
# mean in every step.
BURST = 10


def late_layers(layers: int, compute: float, fetch: float, busy: float = 0.0) -> int:
    """The number of late layers, counted from the last.

    It is the largest for which every transfer lands in time, behind a burst, too; and half of the layers where there is
    none: then layers are late and early for equally long, and a burst is spread over two steps.

    layers: of the model, at least 1. compute: seconds of one layer without transfers. fetch: seconds that the link
    takes for what one layer fetches ahead, a mean. busy: seconds for which it is taken when the step begins.
    """
    most = max(1, layers - NEAREST)
    half = min(most, -(-layers // 2))
    return next((late for late in range(most, half, -1) if in_time(layers, late, compute, fetch, busy)), half)


def in_time(layers: int, late: int, compute: float, fetch: float, busy: float = 0.0) -> bool:
    """Whether every transfer of a step lands before it is waited for, with so many late layers."""
    margin = BURST * fetch
    free = busy  # when the link has brought all that was asked for
    for layer in range(layers):
        now = layer * compute
        if layer < late:
            free = max(free, now) + fetch
            if free + margin > now + (layers - late) * compute:
                return False
        if 0 < layer <= layers - late:
            free = max(free, now) + fetch
            if free + margin > (layers - 1) * compute:
                return False
    return True
