"""Closed-loop streams against a running server, and what they say about its decode speed."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

# A 120K prompt behind many others waits for minutes before its first token.
REQUEST_SECONDS = 1800
_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')


@dataclasses.dataclass
class Trace:
    """One stream: when it was sent, and how many tokens it had when a chunk arrived.

    Times in seconds of one clock; ``tokens`` is cumulative and belongs to ``times``.
    """

    sent: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.times[0] - self.sent

    def tokens_at(self, moment: float) -> float:
        """Tokens at ``moment``, on a straight line between the chunks around it."""
        after = bisect.bisect_right(self.times, moment)
        if after == 0:
            return 0.0
        if after == len(self.times):
            return float(self.tokens[-1])
        t0, t1 = self.times[after - 1], self.times[after]
        n0, n1 = self.tokens[after - 1], self.tokens[after]
        return n0 + (n1 - n0) * (moment - t0) / (t1 - t0)


@dataclasses.dataclass
class Window:
    """The time in which all streams decode: from the last to reach the warm-up to the first to finish."""

    start: float
    end: float
    traces: list[Trace]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens(self) -> float:
        return sum(trace.tokens_at(self.end) - trace.tokens_at(self.start) for trace in self.traces)

    def summary(self) -> dict[str, Any]:
        """Figures as builtins: rates in tokens per second, times in seconds or milliseconds as named."""
        per_stream = sorted(
            1e3 * self.seconds / (trace.tokens_at(self.end) - trace.tokens_at(self.start)) for trace in self.traces
        )
        ttft = sorted(trace.ttft for trace in self.traces)
        gaps = sorted(self._gaps())
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "window_seconds": self.seconds,
            "window_tokens": self.tokens,
            "tpot_ms": sum(per_stream) / len(per_stream),
            "tpot_ms_slowest": per_stream[-1],
            "chunk_tpot_ms_p50": _quantile(gaps, 0.5),
            "chunk_tpot_ms_p99": _quantile(gaps, 0.99),
            "ttft_s_p50": _quantile(ttft, 0.5),
            "ttft_s_max": ttft[-1],
            "cached_tokens": sum(trace.cached for trace in self.traces),
        }

    def _gaps(self) -> list[float]:
        """Milliseconds per token between neighbouring chunks that both lie in the window."""
        found = []
        for trace in self.traces:
            chunks = zip(trace.times, trace.tokens, strict=True)
            for (t0, n0), (t1, n1) in itertools.pairwise(chunks):
                if t0 >= self.start and t1 <= self.end and n1 > n0:
                    found.append(1e3 * (t1 - t0) / (n1 - n0))
        return found


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def window_of(traces: list[Trace], warmup: int) -> Window:
    """The common decode window of finished traces.

    Raises:
        ValueError: a stream failed, or the first had finished before the last was warm.
    """
    for trace in traces:
        if trace.error or not trace.times:
            raise ValueError(f"a stream failed: {trace.error or 'no token came'}")
    warm = []
    for trace in traces:
        index = bisect.bisect_left(trace.tokens, warmup)
        if index == len(trace.tokens):
            raise ValueError(f"a stream ended after {trace.tokens[-1]} tokens, before its warm-up of {warmup}")
        warm.append(trace.times[index])
    start, end = max(warm), min(trace.times[-1] for trace in traces)
    if end <= start:
        raise ValueError(f"the first stream finished {start - end:.2f} s before the last was warm; decode more tokens.")
    return Window(start, end, traces)


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    sampling: dict[str, Any],
    trace: Trace,
    on_chunk: Callable[[], None] = lambda: None,
) -> None:
    """Send one streaming request and fill ``trace``; errors end up in ``trace.error``."""
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    trace.sent = time.perf_counter()
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                trace.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            pending = b""
            async for data in response.content.iter_any():
                now = time.perf_counter()
                *events, pending = (pending + data).split(b"\n\n")
                for event in events:
                    count = _COUNT.search(event)
                    if count is None:
                        if b'"error"' in event:
                            trace.error = event[:300].decode(errors="replace")
                        continue
                    if not trace.times:
                        cached = _CACHED.search(event)
                        trace.cached = int(cached.group(1)) if cached else 0
                    tokens = int(count.group(1))
                    if tokens and (not trace.tokens or tokens > trace.tokens[-1]):
                        trace.times.append(now)
                        trace.tokens.append(tokens)
                on_chunk()
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        trace.error = f"{type(error).__name__}: {error}"


def session() -> aiohttp.ClientSession:
    """A client session without limits on connections or on a response's size."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=2**20,
    )


def first_tokens(url: str, prompts: list[list[int]]) -> list[Trace]:
    """Sends all prompts at once for one token each. Raises RuntimeError when one fails."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}

    async def ask() -> list[Trace]:
        traces = [Trace() for _ in prompts]
        async with session() as http:
            await asyncio.gather(*(stream(http, url, p, sampling, t) for p, t in zip(prompts, traces, strict=True)))
        return traces

    traces = asyncio.run(ask())
    for trace in traces:
        if trace.error or not trace.times:
            raise RuntimeError(f"a request failed: {trace.error or 'no token came'}")
    return traces


async def run_streams(
    url: str,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    warmup: int,
    probe: Callable[[], Awaitable[Any]],
) -> tuple[list[Trace], Any, Any]:
    """Run all prompts at once; call ``probe`` when all are warm and again when the first finishes.

    Returns:
        The traces and both results of ``probe`` (None where that moment did not come).
    """
    traces = [Trace() for _ in prompts]
    wanted = sampling["max_new_tokens"]
    probes: dict[str, asyncio.Task] = {}

    def watch() -> None:
        tokens = [trace.tokens[-1] if trace.tokens else 0 for trace in traces]
        if "before" not in probes and min(tokens) >= warmup:
            probes["before"] = asyncio.ensure_future(probe())
        if "before" in probes and "after" not in probes and max(tokens) >= wanted:
            probes["after"] = asyncio.ensure_future(probe())

    async with session() as http:
        await asyncio.gather(
            *(stream(http, url, prompt, sampling, trace, watch) for prompt, trace in zip(prompts, traces, strict=True))
        )
    results = [await probes[name] if name in probes else None for name in ("before", "after")]
    return traces, results[0], results[1]
