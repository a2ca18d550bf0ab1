"""Prefills on streams that run in any order that CUDA allows, with kernels that only tell what they read and write."""

from __future__ import annotations

import itertools
import random
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_streams import Streams
from sglang.srt.sparse_kv import landing
from sglang.srt.sparse_kv.landing import Landing
from sglang.srt.sparse_kv.transfer import StreamTransfer
from sparse_rig import Rig, small_blocks

PAGE, LAYERS = 8, 4


class Memory:
    """What a plan's tables say: the block that they are of."""

    block = -1


class Plan:
    """Its memory is the next plan's once nobody holds it, as the allocator of its stream has it."""

    def __init__(self, free: list[Memory]):
        self.memory = free.pop() if free else Memory()
        weakref.finalize(self, free.append, self.memory)


class Kernels:
    """The operations of prefills: each, when it runs, asserts that it finds what it was launched for."""

    def __init__(self, streams: Streams, rig: Rig, seed: int):
        self.streams, self.rig, self.random = streams, rig, torch.Generator().manual_seed(seed)
        self.free: list[Memory] = []
        self.blocks = itertools.count()  # of all prefills
        self.launched = self.ran = self.stored = 0
        self.chunks = 0  # that were launched before this prefill, of each layer
        self.block = -1  # the last that was planned
        self.moved: dict[int, tuple[int, set]] = {}  # by staging slot: a block, and what came of it
        self.parts: dict[int, set] = {}  # of each block, all that is launched
        self.order: list[int] = []  # blocks that are to be attended
        self.attended: list[int] = []  # in this layer
        self.came: dict[int, set] = {}  # of each block
        self.landed: dict[int, int] = {}  # by place: the number of what landed last
        self.lands = itertools.count()
        self.land_number = -1
        self.segment = self.written = 0  # of a graph, that was launched and that has run, where k and v are

    def replay(self) -> None:
        """A segment of a graph, which writes where k and v are."""
        self.segment += 1
        self.launch(partial(setattr, self, "written", self.segment))

    def reading(self, work):
        """work, which reads k and v of now."""
        segment = self.segment

        def running():
            assert self.written == segment, "a graph went on to write where a chunk is read"
            work()

        return running

    def launch(self, work) -> None:
        self.launched += 1

        def running():
            work()
            self.ran += 1

        self.streams.launch(running)

    def slot(self, tensor) -> int | None:
        staging = self.rig.prefill.staging
        offset = tensor.data_ptr() - staging.data_ptr()
        found, inside = divmod(offset, staging.stride(0) * staging.element_size())
        return found if found in (0, 1) and inside >= 0 else None

    def absent(self, views, pages):
        share = torch.tensor([0.0, 0.2, 1.0])[
            torch.randint(3, (len(views), -(-len(pages) // 4)), generator=self.random)
        ]
        share = share.repeat_interleave(4, 1)[:, : len(pages)]
        lacks = torch.rand(share.shape, generator=self.random) < share
        return torch.where(lacks, self.rig.geometry.kv_heads, 0).to(torch.uint8)

    def plan_stage(self, view, pages, tokens, step, due, again=None):
        plan = Plan(self.free) if again is None else again
        memory, block = plan.memory, next(self.blocks)
        self.block = plan.block = block
        self.parts[block] = set()
        self.order.append(block)
        self.launch(lambda: setattr(memory, "block", block))
        return plan

    def move(self, plan, target, part, check=lambda: None) -> None:
        memory, block, slot, chunks = plan.memory, plan.block, self.slot(target), self.chunks
        assert block == self.block
        self.parts[block].add(part)

        def moving():
            assert memory.block == block, "a plan was overwritten before its block was moved"
            assert self.stored >= chunks, "the host's pages are not written yet"
            check()
            if part in ("all", "resident"):
                self.came[block] = set()
                self.moved[slot] = block, self.came[block]
            self.moved[slot][1].add(part)
            assert self.moved[slot][0] == block

        self.launch(moving)

    def stage(self, view, plan, target, parts="all"):
        self.move(plan, target, parts)

    def stage_cached(self, view, pages, target, memo):
        """Looks up and moves in one: what may be wrong is only where it comes in the order."""
        slot, block = self.slot(target), next(self.blocks)
        self.parts[block] = {"cached"}
        self.order.append(block)

        def moving():
            self.came[block] = {"cached"}
            self.moved[slot] = block, self.came[block]

        self.launch(moving)

    def land(self, view, runs, place):
        number, where, chunks = next(self.lands), place.data_ptr(), self.chunks
        self.land_number = number

        def landing():
            assert self.stored >= chunks, "the host's pages are not written yet"
            self.landed[where] = number

        self.launch(landing)

    def stage_landed(self, view, plan, target, place, first, places):
        number, where = self.land_number, place.data_ptr()

        def check():
            assert self.landed[where] == number, "what lies there is another piece"

        self.move(plan, target, first, check)

    def attend_block(self, q, k, v, scale, causal, alone):
        slot = self.slot(k)
        if slot is not None:
            block = self.order.pop(0)
            self.attended.append(block)

            def attending():
                assert self.moved.get(slot) == (block, self.parts[block]), "a block is attended before it came"

            self.launch(attending)
        return q, None if alone else q[..., 0]

    def merge(self, out_a, lse_a, out_b, lse_b):
        assert lse_a is not None and lse_b is not None
        return out_a, lse_a

    def store_chunk(self, view, k, v, loc, through, memo):
        self.launch(self.reading(lambda: setattr(self, "stored", self.stored + 1)))

    def refresh(self, view, k, v, loc, pages, tokens, step, memo):
        blocks, self.attended = self.attended, []

        def refreshing():
            assert all(self.came[block] == self.parts[block] for block in blocks), "slots are taken that may be read"

        self.launch(self.reading(refreshing))

    def over(self) -> None:
        """What comes next on the compute stream may rely on all that was launched."""
        self.chunks += LAYERS
        launched = self.launched

        def check():
            assert self.ran >= launched, "a forward ended before its copies"

        self.streams.launch(check)


def prefills(streams: Streams, seed: int, broken=False, graph=False, borrowed=False) -> Kernels:
    """Launches several, of one to three requests, whose blocks have up to six pieces that land, or none."""
    chance = random.Random(seed)
    rig = small_blocks(Rig(seed=seed, layers=LAYERS, pages=120, context=400, requests=3), chance.choice((1, 3, 7, 12)))
    kernels = Kernels(streams, rig, seed)
    rig.runtime.ops = SimpleNamespace(**{name: getattr(kernels, name) for name in dir(kernels) if name[0] != "_"})
    rig.prefill.landing = Landing(rig.runtime) if seed % 4 else None
    if rig.prefill.landing is not None:
        rig.prefill.landing.places = rig.prefill.landing.places[:, :2].clone()
    rig.runtime.transfer = StreamTransfer(torch.device("cpu"))
    for req in (1, 2, 3):
        rig.start(req)
        rig.grow(req, 300)
    for _ in range(4):
        reqs = chance.sample((1, 2, 3), chance.choice((1, 1, 2, 3)))
        prefixes = [chance.choice((0, 5, PAGE, 60, 200)) for _ in reqs]
        tokens = [chance.randrange(1, 40) for _ in reqs]
        loc = torch.cat([rig.req_to_token[r, p : p + t] for r, p, t in zip(reqs, prefixes, tokens, strict=True)])
        kernels.order.clear()
        kernels.attended.clear()
        rig.prefill.begin(rig.req_to_token, torch.tensor(reqs), prefixes, tokens, loc)
        layers = chance.randrange(LAYERS) if broken and chance.random() < 0.5 else LAYERS
        for layer in range(layers):
            q, k, v = (torch.zeros(sum(tokens), heads, 8) for heads in (4, 2, 2))
            if graph:
                kernels.replay()
            rig.prefill.forward(layer, q, k, v, 1.0, borrowed)
        if graph:
            kernels.replay()
        if layers == LAYERS:
            kernels.over()
        if chance.random() < 0.3:
            streams.run(chance, held=chance.sample(streams.all, 2))
    return kernels


@pytest.fixture(autouse=True)
def every_page_is_worth_it(monkeypatch):
    monkeypatch.setattr(landing, "FEW", 1)
    monkeypatch.setattr(landing, "ASKED", 1)


@pytest.mark.parametrize("broken", [False, True])
def test_whatever_the_order_of_streams_each_kernel_finds_its_data(broken, monkeypatch):
    """broken: some forwards end in the middle, as those that raise."""
    landings = 0
    for seed in range(40):
        with monkeypatch.context() as patch:
            streams = Streams(patch)
            kernels = prefills(streams, seed, broken)
            streams.run(random.Random(seed))
            assert kernels.ran == kernels.launched
            landings += next(kernels.lands)
    assert landings > 1000


def test_a_graph_writes_where_a_chunk_is_when_nobody_reads_it_any_more(monkeypatch):
    for borrowed in (True, False):
        late = 0
        for seed in range(30):
            with monkeypatch.context() as patch:
                streams = Streams(patch)
                try:
                    prefills(streams, seed, graph=True, borrowed=borrowed)
                    streams.run(random.Random(seed))
                except AssertionError as error:
                    assert "a graph went on" in str(error)
                    late += 1
        assert (late == 0) == borrowed, "whoever does not say that k and v are lent must be caught"


def test_a_piece_lands_while_the_one_before_it_is_taken_away(monkeypatch):
    """Whichever blocks land: here one piece a block, and every second block, so always for the same staging slot."""
    streams = Streams(monkeypatch)
    transfer, landed = StreamTransfer(torch.device("cpu")), []
    for number in range(4):
        leg = partial(streams.launch, partial(landed.append, number)), partial(streams.launch, lambda: None)
        transfer.relay(("staging", 0), lambda: None, [leg], lambda: None)
        if number == 0:
            streams.run(random.Random(0))
    streams.run(random.Random(0), held=[transfer.streams["prefix"]])
    assert landed == [0, 1, 2], "two places: the last waits for the second leg of the second"
    streams.run(random.Random(0))
    assert landed == [0, 1, 2, 3]


def test_what_a_step_that_broke_off_left_on_its_branch_is_over_before_the_next_forward(monkeypatch):
    streams = Streams(monkeypatch)
    for seed in range(20):
        done: list[str] = []
        transfer = StreamTransfer(torch.device("cpu"))
        with pytest.raises(ValueError, match="broken"), transfer.branch():
            streams.launch(lambda done=done: done.append("append"))
            raise ValueError("broken")
        transfer.join_all()
        streams.launch(lambda done=done: done.append("next forward"))
        streams.run(random.Random(seed))
        assert done == ["append", "next forward"]
