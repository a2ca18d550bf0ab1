"""Requests come, share pages, are aborted in every state and go, while copies are late, out of order, fail, fall short.

Every output is compared with an oracle that knows the history alone, and bit for bit with the run without faults. Freed
pages are poisoned, so that a copy that lands late or not at all shows.
"""

from __future__ import annotations

import random

import pytest
import torch
from sglang.srt.sparse_kv.runtime import LONG_UNUSED
from sglang.srt.sparse_kv.transfer import FailingTransfer, FaultyTransfer, PlainTransfer, Transfer, TransferError
from sparse_rig import Rig

REQUESTS = (1, 2, 3, 4)
BATCH = 2  # of them in one step
CONTEXT = 300
MOVES = 60


def make(seed: int) -> Rig:
    """A rig of random shape with few slots, so that units come and go."""
    draw = random.Random(seed)
    layers, page = draw.randint(2, 5), draw.choice([8, 16])
    rig = Rig(
        seed=seed,
        layers=layers,
        page=page,
        pages=160,
        context=CONTEXT,
        requests=len(REQUESTS),
        residency=draw.choice(["all", "all", "none", 0.5]),
        lookahead=draw.randint(1, layers + 1),
        window=draw.choice([1, page, 2 * page + 1]),
        budget=draw.choice([page, 3 * page]),
        guide=draw.choice(["chain", "chain", "none"]),
    )
    least = BATCH * min(rig.runtime.shape.width, rig.geometry.max_pages)
    rig.runtime.apply_policy({"check": 1, "cache_slots": least})
    rig.runtime.clock_long_ago += LONG_UNUSED - 3  # prefill takes slots of requests that are idle in this short run
    return rig


def live(seed: int, transfer: Transfer, check: bool = True) -> list[torch.Tensor]:
    """Row 0 of every output of a life drawn from the seed, which is the same whatever the transfer does."""
    rig, draw = make(seed), random.Random(seed + 1)
    runtime, page = rig.runtime, rig.geometry.page_size
    runtime.transfer, runtime.policy.check = transfer, check
    unfinished: dict[int, int] = {}  # tokens that are left of a prompt
    running: list[int] = []
    outs: list[torch.Tensor] = []

    def go(req: int) -> None:
        rig.finish(req)
        unfinished.pop(req, None)
        if req in running:
            running.remove(req)

    def come(req: int) -> None:
        parents = [r for r in running if rig.length(r) >= page]
        if parents and draw.random() < 0.5:
            parent = draw.choice(parents)
            rig.fork(req, parent, draw.randint(1, min(rig.length(parent), CONTEXT // 2) // page) * page)
        else:
            rig.start(req)
        unfinished[req] = draw.randint(1, 120)

    for _ in range(MOVES):
        runtime.poison_freed(torch.tensor(rig.free, dtype=torch.long))
        alive = [*unfinished, *running]
        free = [r for r in REQUESTS if r not in alive]
        move = draw.random()
        if not alive or (free and move < 0.2):
            come(draw.choice(free))  # aborted before it was ever scheduled, if it is the next to go
        elif move < 0.28:
            go(draw.choice(alive))  # waiting, between chunks, or decoding
        elif move < 0.31 and not running:
            for req in alive:
                go(req)
            runtime.flush()
        elif unfinished and (move < 0.5 or not running):
            chunks = {r: min(left, draw.randint(1, 60)) for r, left in unfinished.items() if draw.random() < 0.7}
            if chunks:
                outs += rig.extend(chunks)
            for req, tokens in chunks.items():
                unfinished[req] -= tokens
                if not unfinished[req]:
                    del unfinished[req]
                    running.append(req)
        elif running:
            batch = draw.sample(running, min(len(running), draw.randint(1, BATCH)))
            batch = [r for r in batch if rig.length(r) < CONTEXT - 10]
            if batch:
                outs += [out[:: runtime.rows] for out in rig.decode(batch)]
    for req in [*unfinished, *running]:
        go(req)
    assert sorted(rig.free) == list(range(1, rig.geometry.num_pages)), "a page was lost or freed twice"
    runtime.flush()
    runtime.cache.check()
    assert not any(bool((buffer.page_of >= 0).any()) for buffer in runtime.cache.buffers())
    return outs


def seeds(few: int, many: int) -> list:
    """The first ones for every run, the rest for the slow tier."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, many))]


@pytest.mark.parametrize("seed", seeds(12, 300))
def test_faults_change_no_bit(seed):
    faulty = FaultyTransfer(seed)
    expected, found = live(seed, PlainTransfer()), live(seed, faulty)
    assert faulty.failures + faulty.short > 20 and not faulty.pending
    assert len(found) == len(expected) > 0
    assert all(torch.equal(own, other) for own, other in zip(found, expected))


@pytest.mark.parametrize(
    ("lives", "least"), [(range(6), 6), pytest.param(range(6, 60), 50, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_short_copies_that_nobody_notices_are_wrong_text(lives, least):
    """The outputs alone, without a look at the tables, say so. Here and there a life reads nothing of what it lost."""
    wrong = 0
    for seed in lives:
        careless = FaultyTransfer(seed, notices=False)
        try:
            live(seed, careless, check=False)
        except AssertionError:
            wrong += 1
        assert careless.short > 0
    assert wrong >= least


@pytest.mark.parametrize("seed", seeds(3, 30))
def test_a_copy_that_never_succeeds_is_said(seed):
    """At whatever copy of the life it happens: an error with a reason, and no output after it."""
    draw = random.Random(seed)

    class Breaks(FailingTransfer):
        left = draw.randint(1, 60)

        def submit(self, *args, **kwargs):
            self.left -= 1
            self.rate = 1.0 if self.left <= 0 else 0.1
            super().submit(*args, **kwargs)

    with pytest.raises(TransferError, match="a copy from host memory failed 16 times in a row"):
        live(seed, Breaks(seed))
