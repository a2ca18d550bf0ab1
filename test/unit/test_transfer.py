"""Engines of transfers: when a copy may happen, and that it happens exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sparse_kv.transfer import (
    CPU_TRANSFERS,
    DelayedTransfer,
    FailingTransfer,
    PlainTransfer,
    ReorderedTransfer,
    SkippedTransfer,
    StreamTransfer,
    Transfer,
    TransferError,
)

HONEST = sorted(set(CPU_TRANSFERS) - {"oracle", "broken"})
LANES = (0, 3, ("staging", 0), ("staging", 1))

WAYS = ("ahead", "prefix", "within", "out")

# A script: submit to a lane, join a lane, or join all.
SCRIPTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(LANES), st.booleans(), st.sampled_from(WAYS)),
        st.tuples(st.just("join"), st.sampled_from(LANES)),
        st.tuples(st.just("join_all")),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", HONEST)
@settings(max_examples=60)
@given(script=SCRIPTS, seed=st.integers(0, 1000))
def test_every_copy_lands_once_and_before_its_join_returns(name, script, seed):
    transfer = CPU_TRANSFERS[name](seed)
    landed: list[int] = []
    lane_of: dict[int, object] = {}
    for number, (action, *rest) in enumerate([*script, ("join_all",)]):
        if action == "submit":
            lane_of[number] = rest[0]
            transfer.submit(rest[0], lambda number=number: landed.append(number), urgent=rest[1], way=rest[2])
        else:
            lanes = rest or LANES
            getattr(transfer, action)(*rest)
            due = {n for n, lane in lane_of.items() if lane in lanes}
            assert due <= set(landed), f"{due - set(landed)} had not landed"
            assert not any(transfer.in_flight(lane) for lane in lanes)
    assert sorted(landed) == sorted(lane_of), "a copy was lost or done twice"


def run(transfer: Transfer, lanes) -> list[int]:
    order: list[int] = []
    for number, lane in enumerate(lanes):
        transfer.submit(lane, lambda number=number: order.append(number))
    transfer.join_all()
    return order


def test_plain_copies_at_once():
    order: list[int] = []
    PlainTransfer().submit(0, lambda: order.append(1))
    assert order == [1]


def test_delayed_copies_wait_for_their_own_lane():
    transfer, order = DelayedTransfer(), []
    for number, lane in enumerate([0, 1, 0]):
        transfer.submit(lane, lambda number=number: order.append(number))
    assert order == [] and transfer.in_flight(0) and transfer.in_flight(1) and not transfer.in_flight(2)
    transfer.join(1)
    assert order == [1] and transfer.in_flight(0)
    transfer.join(0)
    assert order == [1, 0, 2]


def test_reordered_is_an_order_of_its_seed():
    orders = {tuple(run(ReorderedTransfer(seed), [0] * 8)) for seed in range(20)}
    assert len(orders) > 10 and all(sorted(order) == list(range(8)) for order in orders)
    assert run(ReorderedTransfer(4), [0] * 8) == run(ReorderedTransfer(4), [0] * 8)


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_is_edited_and_copied_in_order(name, seed):
    """A block's slots may be those that the one before it is read from."""
    transfer = CPU_TRANSFERS[name](seed)
    edits: list[int] = []
    copies: list[int] = []
    for number in range(8):  # two lanes in turn, as prefill has it
        planned = transfer.edit(lambda number=number: (edits.append(number), number)[1])
        transfer.submit(("staging", number % 2), lambda planned=planned: copies.append(planned), way="prefix")
        transfer.join(("staging", 1 - number % 2))
    transfer.join_all()
    assert copies == edits == list(range(8))


def test_edits_run_ahead_of_delayed_and_of_some_reordered_copies():
    ahead = set()
    for seed in range(30):
        for transfer in (DelayedTransfer(), ReorderedTransfer(seed)):
            copies: list[int] = []
            for lane in (0, 1):
                transfer.edit(lambda: None)
                transfer.submit(lane, lambda lane=lane, copies=copies: copies.append(lane), way="prefix")
            ahead.add((type(transfer).__name__, len(copies)))
            transfer.join_all()
    assert ahead == {("DelayedTransfer", 0), *(("ReorderedTransfer", done) for done in range(3))}


def test_reordered_copies_happen_before_during_and_after():
    """Some land in their own submit, some in another lane's business, some only when they are joined."""
    moments = set()
    for seed in range(30):
        transfer, order = ReorderedTransfer(seed), []
        transfer.submit(0, lambda order=order: order.append(0))
        first = bool(order)
        transfer.submit(1, lambda: None)
        second = bool(order)
        transfer.join(1)
        moments.add("at once" if first else "meanwhile" if second or order else "at last")
        transfer.join(0)
        assert order == [0]
    assert moments == {"at once", "meanwhile", "at last"}


def test_failures_are_tried_again_and_then_loud():
    transfer = FailingTransfer(seed=1)
    assert run(transfer, [0] * 50) == list(range(50)) and transfer.failures > 0
    hopeless = FailingTransfer(seed=1, rate=1.0, attempts=3)
    with pytest.raises(TransferError, match="failed 3 times in a row"):
        hopeless.submit(0, lambda: pytest.fail("a failed copy was made"))


def test_the_oracle_copies_nothing():
    kept: list[int] = []
    assert SkippedTransfer().edit(lambda: 7) == 7, "tables say what a perfect transfer would have brought"
    SkippedTransfer().submit(0, lambda: pytest.fail("copied"))
    SkippedTransfer().submit(0, lambda: pytest.fail("copied"), way="prefix")
    SkippedTransfer().submit(0, lambda: kept.append(1), way="out")
    SkippedTransfer().submit(0, lambda: kept.append(2), way="within")
    assert kept == [1, 2], "the next policy needs the truth on the host, and tables that are true to it"
    assert isinstance(CPU_TRANSFERS["oracle"](0), SkippedTransfer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_order_copies_behind_their_plan_and_before_their_join():
    device = torch.device("cuda")
    transfer = StreamTransfer(device)
    source, target = torch.zeros(1 << 24, device=device), torch.zeros(1 << 24, device=device)
    for step in range(1, 20):
        source.fill_(step)  # planned on the current stream
        transfer.submit(0, lambda: target.copy_(source))
        assert transfer.in_flight(0)
        transfer.join(0)
        assert not transfer.in_flight(0)
        seen = target[-1].clone()
        assert int(seen) == step
