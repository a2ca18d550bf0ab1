"""How many layers fetch late: against a link that is played through, transfer by transfer."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sparse_kv.lookahead import BURST, NEAREST, late_layers

SITUATIONS = {
    "layers": st.integers(1, 80),
    "compute": st.floats(1e-6, 1e-2),
    "share": st.floats(0, 2),  # of a layer's time that its fetch takes
    "taken": st.floats(0, 20),  # layers' times for which the link is taken when the step begins
}


def transfers(layers: int, late: int, compute: float) -> list[tuple[float, float]]:
    """(when asked for, when waited for) of a step's transfers, in the order of the queue."""
    found = []
    for layer in range(layers):
        if layer < layers - late:
            found.append(((layer + 1) * compute, 1, (layers - 1) * compute))
        else:
            before = layer - (layers - late)
            found.append((before * compute, 0, layer * compute))
    return [(asked, wanted) for asked, _, wanted in sorted(found)]


def worst(queue: list[tuple[float, float]], sizes: list[float], busy: float) -> float:
    """Seconds by which the worst of the transfers misses its moment; negative when all are in time."""
    clock, late = busy, -math.inf
    for (asked, wanted), size in zip(queue, sizes, strict=True):
        clock = (clock if clock > asked else asked) + size
        late = max(late, clock - wanted)
    return late


def behind_a_burst(layers: int, late: int, compute: float, fetch: float, busy: float) -> float:
    """The worst transfer when one of them, whichever, is larger by the burst."""
    queue, found = transfers(layers, late, compute), -math.inf
    for place in range(layers):
        sizes = [fetch * (1 + BURST * (number == place)) for number in range(layers)]
        found = max(found, worst(queue, sizes, busy))
    return found


def check(choose, layers: int, compute: float, share: float, taken: float) -> None:
    fetch, busy = share * compute, taken * compute
    late, nothing = choose(layers, compute, fetch, busy), 1e-9 * layers * compute
    most = max(1, layers - NEAREST)
    half = min(most, math.ceil(layers / 2))
    assert half <= late <= most
    if late > half:
        assert behind_a_burst(layers, late, compute, fetch, busy) <= nothing, "a transfer is late"
    for more in range(late + 1, most + 1):
        assert behind_a_burst(layers, more, compute, fetch, busy) >= -nothing, "one more layer would be in time"


@given(**SITUATIONS)
def test_as_many_layers_as_time_allows(layers, compute, share, taken):
    check(late_layers, layers, compute, share, taken)


def ignores_the_queue(layers: int, compute: float, fetch: float, busy: float) -> int:
    """Each transfer alone on the link."""
    distance = max(NEAREST, math.ceil((busy + (1 + BURST) * fetch) / compute))
    return max(min(max(1, layers - NEAREST), math.ceil(layers / 2)), layers - distance)


def ignores_bursts(layers: int, compute: float, fetch: float, busy: float) -> int:
    return late_layers(layers, compute, fetch / (1 + BURST), busy)


@pytest.mark.parametrize(("wrong", "what"), [(ignores_the_queue, "is late"), (ignores_bursts, "is late")])
def test_a_formula_that_leaves_something_out_is_noticed(wrong, what):
    with pytest.raises(AssertionError, match=what):
        for share in range(1, 20):
            check(wrong, 32, 1e-3, share / 20, 0.0)


def test_a_careful_formula_is_noticed():
    with pytest.raises(AssertionError, match="one more layer"):
        check(lambda *where: late_layers(*where) - 1, 32, 1e-3, 0.2, 0.0)


@given(seed=st.integers(0, 2**32), layers=st.integers(4, 60), share=st.floats(0.01, 1))
def test_whatever_keeps_within_the_burst_is_in_time(seed, layers, share):
    """Any sizes of which no run of transfers takes more than the burst beyond one mean fetch each."""
    draw, late = random.Random(seed), late_layers(layers, 1.0, share)
    if late == math.ceil(layers / 2):
        return  # it may be that nothing is in time
    sizes, excess = [], 0.0
    for _ in range(layers):
        room = (1 + BURST) * share - excess
        sizes.append(draw.choice([0.0, draw.uniform(0, room), room]))
        excess = max(0.0, excess + sizes[-1] - share)
    assert worst(transfers(layers, late, 1.0), sizes, 0.0) <= 1e-9


@given(**SITUATIONS, more=st.floats(1, 10))
def test_more_bytes_never_make_more_layers_late(layers, compute, share, taken, more):
    here = late_layers(layers, compute, share * compute, taken * compute)
    assert late_layers(layers, compute, more * share * compute, taken * compute) <= here
    assert late_layers(layers, compute, share * compute, more * taken * compute) <= here


@pytest.mark.parametrize(("layers", "late"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (30, 28), (32, 30)])
def test_where_nothing_takes_time_all_but_the_first_layers_are_late(layers, late):
    assert late_layers(layers, 0.0, 0.0) == late_layers(layers, 1.0, 0.0) == late


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 31, 32])
def test_where_the_link_is_too_slow_half_of_them_are(layers):
    late = late_layers(layers, 1.0, 1.01)
    assert late == min(max(1, layers - NEAREST), math.ceil(layers / 2)) and late == late_layers(layers, 1.0, 100.0)
