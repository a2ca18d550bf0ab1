"""Who moves bytes between host and cache, and when: the interface and its engines.

A lane is a place that fetches land in (one layer's slots, one staging buffer). `submit` hands over a copy, `join`
returns when every copy of the lane has landed. No slot changes owner while a copy into it is in flight, and everything
is joined before the forward ends: that is all an engine may rely on, and the odd engines here exist to try it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Literal, TypeVar

import torch

Copy = Callable[[], None]
Plan = TypeVar("Plan")
Way = Literal["ahead", "prefix", "within", "out"]

# How a branch runs on a GPU, for measurements: "first" where it meets other kernels, "equal" to them, "none": in line.
BRANCH = os.environ.get("SPARSE_KV_BRANCH", "first")


class TransferError(RuntimeError):
    """A copy failed again and again."""


class Transfer(ABC):
    """Engine of transfers. `urgent` marks what the critical path waits for. A way tells what is moved: units "ahead" of
    their step, a prefill's "prefix", what stays "within" the device, or what leaves, "out"; the link carries both
    directions at once.
    """

    blocks = True  # the caller's thread copies, so a clock beside it tells how long a copy takes

    @abstractmethod
    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None: ...

    def edit(self, tables: Callable[[], Plan]) -> Plan:
        """Edits tables for the copy of a prefix that is submitted next, and returns what that copy needs. Edits keep
        their order, those submitted "within" included, and so do the copies, but an edit may be long over before the
        copy of the edit before it.
        """
        return tables()

    def relay(self, lane: Hashable, begin: Copy, legs: Iterable[tuple[Copy, Copy]], end: Copy) -> None:
        """Submits copies of a prefix: `begin`, then those that come in two legs, then `end`. The first leg of each may
        run beside the second of the one before it, and starts when that of the one before the last is over: two places
        to land are enough for all.
        """

        def copy() -> None:
            begin()
            for first, second in legs:
                first()
                second()
            end()

        self.submit(lane, copy, way="prefix")

    @abstractmethod
    def join(self, lane: Hashable) -> None: ...

    @abstractmethod
    def join_all(self) -> None: ...

    def in_flight(self, lane: Hashable) -> bool:
        """Whether the lane still has copies that nobody joined. For checks."""
        return False

    def branch(self, first: bool = True) -> contextlib.AbstractContextManager[None]:
        """What is issued inside may run beside what is issued after it, until `join_branch`. first: before that, where
        they meet.
        """
        return contextlib.nullcontext()

    def along(self) -> contextlib.AbstractContextManager[None]:
        """As a branch that goes first, but `join_branch` does not wait for it: only who joins the copies that were
        submitted in it.
        """
        return contextlib.nullcontext()

    def join_branch(self) -> None:  # noqa: B027 — most engines have nothing to do
        """Waits for the branch, if there is one."""


class PlainTransfer(Transfer):
    """Copies at once."""

    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None:
        copy()

    def join(self, lane: Hashable) -> None:
        pass

    def join_all(self) -> None:
        pass


class DelayedTransfer(Transfer):
    """Copies as late as the interface allows: when the lane is joined."""

    def __init__(self) -> None:
        self.pending: list[tuple[Hashable, Copy]] = []

    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None:
        self.pending.append((lane, copy))

    def join(self, lane: Hashable) -> None:
        due = [copy for owner, copy in self.pending if owner == lane]
        self.pending = [(owner, copy) for owner, copy in self.pending if owner != lane]
        for copy in due:
            copy()

    def join_all(self) -> None:
        for lane in list(dict.fromkeys(owner for owner, _ in self.pending)):
            self.join(lane)

    def in_flight(self, lane: Hashable) -> bool:
        return any(owner == lane for owner, _ in self.pending)


class ReorderedTransfer(DelayedTransfer):
    """Copies in random order at random moments between submit and join, drawn from a seed; those of prefixes keep
    theirs.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.prefixes: list[Copy] = []  # to be copied

    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None:
        if way == "prefix":
            self.prefixes.append(copy)
            copy = partial(self._copy_prefixes, copy)
        super().submit(lane, copy)
        self._run_some()

    def _copy_prefixes(self, last: Copy) -> None:
        while last in self.prefixes:
            self.prefixes.pop(0)()

    def join(self, lane: Hashable) -> None:
        self._run_some()
        self.random.shuffle(self.pending)
        super().join(lane)

    def _run_some(self) -> None:
        while self.pending and self.random.random() < 0.4:
            self.pending.pop(self.random.randrange(len(self.pending)))[1]()


def insist(once: Callable[[], bool], attempts: int) -> None:
    """Calls `once` until it says that all is copied. Raises TransferError after so many attempts."""
    for _ in range(attempts):
        if once():
            return
    raise TransferError(f"a copy from host memory failed {attempts} times in a row")


class FailingTransfer(Transfer):
    """Copies fail at random from a seed and are tried again; TransferError after `attempts` failures of one copy."""

    def __init__(self, seed: int, rate: float = 0.3, attempts: int = 16) -> None:
        self.random, self.rate, self.attempts = random.Random(seed), rate, attempts
        self.failures = 0

    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None:
        insist(lambda: self._once(copy), self.attempts)

    def _once(self, copy: Copy) -> bool:
        if self.random.random() < self.rate:
            self.failures += 1
            return False
        copy()
        return True

    def join(self, lane: Hashable) -> None:
        pass

    def join_all(self) -> None:
        pass


class FaultyTransfer(ReorderedTransfer):
    """All of it at once, from a seed: copies are late and out of order, and some fail or fall short. What is not whole
    is tried again; TransferError after `attempts`. notices=False takes a short copy for a whole one: for tests that
    must fail.
    """

    def __init__(self, seed: int, rate: float = 0.3, attempts: int = 16, notices: bool = True) -> None:
        super().__init__(seed)
        self.rate, self.attempts, self.notices = rate, attempts, notices
        self.failures = self.short = 0

    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None:
        super().submit(lane, lambda: insist(lambda: self._once(copy), self.attempts), way=way)

    def _once(self, copy: Copy) -> bool:
        if self.random.random() >= self.rate:
            copy()
            return True
        part = a_part(copy, self.random.random())
        if part is None or self.random.random() < 0.5:
            self.failures += 1
            return False
        part()
        self.short += 1
        return not self.notices


def a_part(copy: Copy, share: float) -> Copy | None:
    """A copy of the first units, or tokens, of what `copy` moves; None where it cannot be divided."""
    if not isinstance(copy, partial):
        return None
    what = copy.func.__name__
    if what == "gather":
        view, fetch = copy.args
        return partial(copy.func, view, dataclasses.replace(fetch, count=(fetch.count * share).int()))
    if what == "store_chunk":
        view, k, v, loc, through = copy.args
        tokens = int(len(loc) * share)
        return partial(copy.func, view, k[:tokens], v[:tokens], loc[:tokens], through)
    return None


class SkippedTransfer(PlainTransfer):
    """The no-IO oracle: brings nothing. The text is wrong; the time is what a perfect transfer would leave. The host
    still gets what is new, so that the next policy finds the truth there, and what crosses no link is done.
    """

    blocks = False

    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None:
        if way in ("within", "out"):
            copy()


class StreamTransfer(Transfer):
    """Copies on side streams, of decode's and of prefill's for each direction, that fork from the current stream at
    `submit` and rejoin it at `join`.

    Urgent copies run on the current stream itself: whoever submits one waits for it anyway. Works inside a graph
    capture, where every fork must be joined before the capture ends.
    """

    blocks = False

    def __init__(self, device: torch.device):
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        # A prefill's side kernels are small and its own are not: they go first, or each would wait for one of those.
        # What edits tables shares scratch and so one stream, "within"; a block of a prefix is on its way meanwhile.
        ways: tuple[Way, ...] = ("prefix", "within", "out")
        self.streams: dict[Way, torch.cuda.Stream] = {"ahead": torch.cuda.Stream(device)}
        self.streams |= {way: torch.cuda.Stream(device, priority=-1) for way in ways}
        self.edited: torch.cuda.Event | None = None  # by an edit whose copy comes next
        # First legs, by the copy engine, which need nothing of the current stream but what was there before a forward.
        self.link = torch.cuda.Stream(device)
        self.seconds: deque[torch.cuda.Event] = deque(maxlen=2)  # ends of the last second legs of this forward
        # Its few large blocks need whole multiprocessors: it goes first where it meets the scores.
        self.beside = torch.cuda.Stream(device, priority=-1 if BRANCH == "first" else 0)
        self.under = torch.cuda.Stream(device)
        self.branched: torch.cuda.Event | None = None
        self.landed: dict[Hashable, torch.cuda.Event] = {}
        # Of prefills, which no graph captures: a wait keeps what was recorded until then, so events serve again.
        self._events: dict[Hashable, torch.cuda.Event] = {}
        self._ends = itertools.cycle([torch.cuda.Event(), torch.cuda.Event()])  # of the second legs of all lanes
        self._known: dict[int, torch.cuda.Stream] = {}  # streams by their handles

    def submit(self, lane: Hashable, copy: Copy, urgent: bool = False, way: Way = "ahead") -> None:
        if urgent:
            copy()
            return
        ready, done = None, None if way == "ahead" else self._event(lane)
        if way == "prefix":
            ready, self.edited = self.edited, None
        _, self.landed[lane] = self._beside(self.streams[way], copy, ready, done)

    def relay(self, lane: Hashable, begin: Copy, legs: Iterable[tuple[Copy, Copy]], end: Copy) -> None:
        side, ready, self.edited = self.streams["prefix"], self.edited, None
        here = self._here()
        _, done = self._beside(side, begin, ready, self._event("begun"))
        for first, second in legs:
            if len(self.seconds) == 2:
                self.link.wait_event(self.seconds[0])
            elif not self.seconds:
                self.link.wait_stream(here)
            torch.cuda.set_stream(self.link)
            try:
                first()
            finally:
                torch.cuda.set_stream(here)
            landed = self._event("landed")
            landed.record(self.link)
            _, done = self._beside(side, second, landed, next(self._ends))
            self.seconds.append(done)
        _, self.landed[lane] = self._beside(side, end, done, self._event(lane))

    def edit(self, tables: Callable[[], Plan]) -> Plan:
        plan, self.edited = self._beside(self.streams["within"], tables, done=self._event("edited"))
        return plan

    def _here(self) -> torch.cuda.Stream:
        """The current stream: asked for four times a layer in a prefill, and torch makes a new object each time."""
        raw = torch._C._cuda_getCurrentRawStream(self.index)
        found = self._known.get(raw)
        if found is None:
            found = self._known[raw] = torch.cuda.current_stream(self.index)
        return found

    def _event(self, what: Hashable) -> torch.cuda.Event:
        found = self._events.get(what)
        if found is None:
            found = self._events[what] = torch.cuda.Event()
        return found

    def _beside(
        self,
        side: torch.cuda.Stream,
        work: Callable[[], Plan],
        ready: torch.cuda.Event | None = None,
        done: torch.cuda.Event | None = None,
    ) -> tuple[Plan, torch.cuda.Event]:
        """Runs work on another stream once it is ready, by default when the current one has come here. Returns its
        result and its end. done: an event for that, which nobody waits for any more; else a new one.
        """
        here = self._here()
        if ready is None:
            ready = torch.cuda.Event() if done is None else self._event("ready")
            ready.record(here)
        if done is None:
            done = torch.cuda.Event()
        side.wait_event(ready)  # the tables and the descriptors that the work reads
        torch.cuda.set_stream(side)
        try:
            result = work()
        finally:
            torch.cuda.set_stream(here)
        done.record(side)
        return result, done

    def join(self, lane: Hashable) -> None:
        landed = self.landed.pop(lane, None)
        if landed is not None:
            self._here().wait_event(landed)

    def join_all(self) -> None:
        self.join_branch()  # of a step that broke off within one
        for lane in list(self.landed):
            self.join(lane)
        self.seconds.clear()

    def in_flight(self, lane: Hashable) -> bool:
        return lane in self.landed

    @contextlib.contextmanager
    def branch(self, first: bool = True) -> Iterator[None]:
        if BRANCH == "none":
            yield
            return
        with self._fork(self.beside if first else self.under):
            try:
                yield
            finally:
                self.branched = torch.cuda.Event()
                self.branched.record()

    def along(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if BRANCH == "none" else self._fork(self.beside)

    def _fork(self, side: torch.cuda.Stream) -> contextlib.AbstractContextManager[None]:
        forked = torch.cuda.Event()
        forked.record()
        side.wait_event(forked)
        return torch.cuda.stream(side)

    def join_branch(self) -> None:
        if self.branched is not None:
            torch.cuda.current_stream(self.device).wait_event(self.branched)
            self.branched = None


CPU_TRANSFERS: dict[str, Callable[[int], Transfer]] = {
    "plain": lambda seed: PlainTransfer(),
    "delayed": lambda seed: DelayedTransfer(),
    "reordered": lambda seed: ReorderedTransfer(seed),
    "failing": lambda seed: FailingTransfer(seed),
    "oracle": lambda seed: SkippedTransfer(),
    "faulty": lambda seed: FaultyTransfer(seed),
    "broken": lambda seed: FailingTransfer(seed, rate=1.0),
}
