"""CUDA's streams and events without a GPU: what is put on a stream runs later, in any order that CUDA allows.

A wait keeps what its event had recorded when the wait was called, as CUDA has it, so that events may be recorded anew.
Each stream also knows what comes before its next work in every such order: see stream_races.py.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator

import torch


class Mark:
    """One record of an event."""

    passed = False

    def __init__(self, before: dict[Stream, int]):
        self.before = before


class Streams:
    """All streams of a device, in place of torch.cuda's."""

    def __init__(self, monkeypatch):
        self.all: list[Stream] = []
        self.current = self.default = Stream(self)
        for name, fake in {
            "Stream": lambda device=None, priority=0: Stream(self),
            "Event": lambda: Event(self),
            "current_device": lambda: 0,
            "current_stream": lambda index=None: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": self.on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        raw = lambda index: self.all.index(self.current)  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, work: Callable[[], None]) -> None:
        """As a kernel, on the current stream."""
        self.current.queue.append((None, work))

    def run(self, random: random.Random, held: Collection[Stream] = ()) -> None:
        """All that was launched, or all but what `held` streams keep from running: each time a stream is ahead of the
        others for a while.
        """
        while True:
            ready = [
                s for s in self.all if s not in held and s.queue and (s.queue[0][0] is None or s.queue[0][0].passed)
            ]
            if not ready:
                break
            stream = random.choice(ready)
            for _ in range(random.choice((1, 3, 1000))):
                if not stream.queue or (stream.queue[0][0] is not None and not stream.queue[0][0].passed):
                    break
                stream.queue.popleft()[1]()
        assert held or not any(s.queue for s in self.all), "streams wait for one another"


class Stream:
    def __init__(self, streams: Streams):
        self.streams, self.queue = streams, deque[tuple[Mark | None, Callable[[], None]]]()
        self.before: dict[Stream, int] = {}  # of each stream, how much of its work comes before this one's next
        streams.all.append(self)

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.queue.append((event.mark, lambda: None))
            for stream, done in event.mark.before.items():
                self.before[stream] = max(self.before.get(stream, 0), done)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.streams)
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, streams: Streams):
        self.streams, self.mark = streams, None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.streams.current
        mark = self.mark = Mark(dict(stream.before))
        stream.queue.append((None, lambda: setattr(mark, "passed", True)))
