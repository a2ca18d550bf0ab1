"""Decode steps on CUDA's streams: whatever two operations share, one of them writing, is ordered by events, and every
fork is joined at the end of a step, in all policies that decide what is launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from fake_streams import Streams
from sglang.srt.sparse_kv import decode
from sglang.srt.sparse_kv import transfer as transfer_module
from sglang.srt.sparse_kv.ops import reference
from sglang.srt.sparse_kv.schedule import Schedule
from sglang.srt.sparse_kv.transfer import StreamTransfer
from sglang.srt.sparse_kv.variants import Variant
from sparse_rig import Rig, counters
from stream_races import Race, Races

PAGE, LAYERS = 8, 5
# What kernels of the CUDA engine share beside the reference's tensors. The first job's scratch of tables, and that of
# the others; a score's; the queries and the page table of attention.
SCRATCH: dict[str, dict[str, str]] = {
    "append": {"job 0": "write"},
    "resolve": {"job 0": "write", "page table": "write"},
    "plan_prefetch": {"job 0": "write"},
    "plan_prefetches": {"jobs 1, 2": "write"},
    "score": {"scores": "write", "queries": "write"},
    "select": {"scores": "read"},
    "predict": {"scores": "read"},
    "write_token": {"queries": "write"},
    "attend": {"queries": "read", "page table": "read"},
}


class Steps:
    """A rig whose steps run on fake streams, with everything that they share watched."""

    def __init__(self, monkeypatch, lengths=(150, 61, 90), variant: Variant | None = None, **config):
        self.rig = rig = Rig(seed=3, layers=LAYERS, page=PAGE, pages=150, context=300, requests=4, **config)
        for req, length in enumerate(lengths, 1):
            rig.start(req)
            rig.extend({req: length})
        self.runtime = runtime = rig.runtime
        self.reqs = list(range(1, len(lengths) + 1))
        if variant is not None:
            runtime.variant = variant
        runtime.policy.check = False
        runtime.cache.limit_slots(min(3 * runtime.shape.width + 4, rig.plan.slots))  # so that units leave
        self.streams = Streams(monkeypatch)
        runtime.transfer = StreamTransfer(torch.device("cpu"))
        self.races = Races(self.streams, pieces=("codes", "scales"), sums=("counters", "fetched", "stalled"))
        self.scratch = {name: torch.zeros(1) for use in SCRATCH.values() for name in use}
        for name, tensor in self.scratch.items():
            self.races.watch(name, tensor)
        for number, buffer in enumerate(runtime.cache.buffers()):
            for name, tensor in vars(buffer).items():
                self.races.watch(f"{name} of buffer {number}", tensor)
        for name in ("predicted", "selected", "fetched", "_clocks", "prefetch_cap", "forced_cap", "hysteresis", "host"):
            self.races.watch(name, getattr(runtime, name))
        for name in ("codes", "scales"):
            self.races.watch(name, getattr(runtime.landmarks, name))
        for name in ("counters", "stalled"):
            self.races.watch(name, getattr(runtime.cache, name))
        self.races.watch("gate", runtime.gate.open)
        operations = {n: self._watched(n, f) for n, f in vars(runtime.ops).items() if callable(f)}
        runtime.ops = SimpleNamespace(name="cpu", **operations)

    def _watched(self, name: str, operation):
        def run(*args, **kwargs):
            self.races.at = name
            for what, kind in SCRATCH.get(name, {}).items():
                if kind == "write":
                    self.scratch[what].fill_(1)
                else:
                    self.scratch[what].clone()
            return operation(*args, **kwargs)

        return run

    def run(self, steps: int = 3) -> None:
        """Raises Race, and AssertionError if something outlives its step."""
        with self.races, torch.no_grad():
            for _ in range(steps):
                self.rig.decode(self.reqs, verify=False)
                assert self.races.joined(), "a fork was not joined"
                evict(self.runtime, self.rig, self.reqs)


def evict(runtime, rig: Rig, reqs: list[int]) -> None:
    """Some closed pages leave, so that there is something to fetch."""
    gone = torch.tensor([page for req in reqs for page in rig.owned[req][1:-2:3]])
    for view in runtime.cache.views:
        reference.invalidate(view, gone)


CASES = [
    *({"lookahead": late} for late in (1, 2, LAYERS - 1, LAYERS)),
    *({"lookahead": late, "rows": 1} for late in (1, 3, LAYERS - 1, LAYERS)),
    *({"lookahead": late, "residency": "none"} for late in (1, LAYERS)),
    *({"lookahead": late, "residency": [1, 2, 4], "ring": 3} for late in (2, LAYERS - 1)),
    {"lookahead": 3, "residency": "none", "rows": 1},
    {"lookahead": 3, "window": 1},
    {"lookahead": LAYERS - 1, "window": 1, "rows": 1},
    {"lookahead": LAYERS - 1, "prefetch": False},
    {"lookahead": 3, "guide": "none"},
    {"lookahead": 3, "guide_attends": "own"},
    {"lookahead": 3, "whole": 100},
    {"lookahead": 3, "rows": "auto", "variant": Variant.ONE_ROW},
    {"lookahead": 3, "rows": "auto", "variant": Variant.ALL_PAGES, "lengths": (45, 39, 31)},
]


@pytest.mark.parametrize("branch", ["first", "equal", "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()))
def test_what_operations_share_is_in_order(case, branch, monkeypatch):
    monkeypatch.setattr(transfer_module, "BRANCH", branch)
    steps = Steps(monkeypatch, **case)
    steps.run()
    counted = counters(steps.rig)
    if case.get("prefetch", True) and case.get("variant") is None:
        assert counted["prefetched"] > 0
    assert counted["missed"] > 0 or case.get("variant") is Variant.ALL_PAGES


@contextlib.contextmanager
def unforked(transfer: StreamTransfer, first: bool = True) -> Iterator[None]:
    """A branch that does not wait for what comes before it."""
    with torch.cuda.stream(transfer.beside if first else transfer.under):
        yield
        transfer.branched = torch.cuda.Event()
        transfer.branched.record()


@contextlib.contextmanager
def joined_too_soon(transfer: StreamTransfer, first: bool = True) -> Iterator[None]:
    """A branch whose end is taken at its begin."""
    forked = torch.cuda.Event()
    forked.record()
    with torch.cuda.stream(transfer.beside if first else transfer.under):
        torch.cuda.current_stream().wait_event(forked)
        transfer.branched = torch.cuda.Event()
        transfer.branched.record()
        yield


def unready(transfer: StreamTransfer, side, work, ready=None, done=None):
    """A copy that does not wait for its plan."""
    done = torch.cuda.Event()
    with torch.cuda.stream(side):
        result = work()
    done.record(side)
    return result, done


def joined_by_fetches_alone(transfer: StreamTransfer, first: bool = True) -> contextlib.AbstractContextManager[None]:
    """A branch that nobody joins."""
    return transfer.along()


def written_at_any_time(runtime, *args, write=decode._write) -> None:
    """A token that does not wait until its page has been found."""
    with torch.cuda.stream(runtime.transfer.under):
        write(runtime, *args)


RACE = " on stream "
CLOSES = {"lengths": (150, 8 * PAGE - 1, 90)}  # a page, at once
RING = {**CLOSES, "residency": "none"}
ONE_ROW = {**CLOSES, "rows": "auto", "variant": Variant.ONE_ROW}  # has no other branch
SABOTAGES = {
    "branch does not wait": (StreamTransfer, "branch", unforked, {}, RACE),
    "branch is joined too soon": (StreamTransfer, "branch", joined_too_soon, RING, "clear: "),
    "branch is not joined": (StreamTransfer, "join_branch", lambda self: None, {}, RACE),
    "plans do not wait": (StreamTransfer, "along", lambda self: torch.cuda.stream(self.beside), {}, RACE),
    "copies before their plan": (StreamTransfer, "_beside", unready, {}, RACE),
    "fetches are not waited for": (Schedule, "before_layer", lambda self, layer: None, {}, RACE),
    "plans after a selection of one row": (
        *(StreamTransfer, "branch", joined_by_fetches_alone),
        *({"lookahead": 4, "rows": 1}, "of predicted on stream"),
    ),
    "a token is written before its page is found": (decode, "_write", written_at_any_time, {}, "write_token: "),
    "pages close before the token is written": (StreamTransfer, "branch", unforked, ONE_ROW, "close_pages: "),
    "a layer leaves pages that close": (
        *(StreamTransfer, "branch", joined_by_fetches_alone),
        *({**ONE_ROW, **RING}, "clear: "),
    ),
    "a step leaves pages that close": (
        *(StreamTransfer, "branch", joined_by_fetches_alone),
        *(ONE_ROW, "a fork was not joined"),
    ),
    "a step leaves its fetches": (Schedule, "end_step", lambda self: None, {}, "a fork was not joined"),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_missing_order_is_found(name, monkeypatch):
    owner, what, broken, case, message = SABOTAGES[name]
    steps = Steps(monkeypatch, **{"lookahead": 3, **case})
    monkeypatch.setattr(owner, what, broken)
    with pytest.raises(AssertionError, match=message):
        steps.run()


def test_scratch_in_common_is_found(monkeypatch):
    """Plans run beside the look-up of the layer's own pages."""
    monkeypatch.setitem(SCRATCH, "plan_prefetches", {"job 0": "write"})
    with pytest.raises(Race, match="job 0"):
        Steps(monkeypatch, lookahead=3).run()
