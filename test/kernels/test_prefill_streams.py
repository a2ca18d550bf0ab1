"""Prefills whose tables are edited ahead of what moves, against the same in line: equal outputs and caches.

On a GPU with streams that are disturbed at random, and on the CPU with copies at random moments.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang.srt.sparse_kv import planner
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.landing import Landing
from sglang.srt.sparse_kv.prefill import Prefill
from sglang.srt.sparse_kv.runtime import LONG_UNUSED, SparseKVRuntime
from sglang.srt.sparse_kv.transfer import PlainTransfer, ReorderedTransfer, StreamTransfer

LAYERS, HEADS, GROUP, DIM, PAGE, PAGES = 3, 8, 4, 128, 16, 160
SLOTS = 48  # of each layer and head that may be used
BLOCK = 20  # pages of a staging slot
# (prefix, tokens) of each request in a batch; None empties the cache, a number lets so many steps pass. Both requests
# have the same first 40 pages.
STORY = [
    [(0, 40 * PAGE)],
    None,
    [(40 * PAGE, 60), (40 * PAGE, 1)],
    LONG_UNUSED + 8,
    [(30 * PAGE, 10 * PAGE), (0, 0)],
    None,
    [(40 * PAGE, 9 * PAGE), (40 * PAGE, 2 * PAGE)],
    LONG_UNUSED + 8,
    [(49 * PAGE, 200), (40 * PAGE, 7)],
]


class Disturbed(StreamTransfer):
    """Streams that are late at random."""

    def __init__(self, device: torch.device, seed: int):
        super().__init__(device)
        self.random = torch.Generator().manual_seed(seed)

    def _beside(self, side, work, ready=None, done=None):
        def late():
            if torch.rand((), generator=self.random) < 0.5:
                torch.cuda._sleep(int(torch.randint(400_000, (), generator=self.random)))
            return work()

        return super()._beside(side, late, ready, done)


def live(
    device: torch.device, transfer, lands: bool = False
) -> tuple[list[torch.Tensor], SparseKVRuntime, torch.Tensor]:
    """The outputs of STORY, the runtime after it, and the pages of the first request that are full then. lands: pages
    that are missing come by the copy engine, six at a time.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    geometry = Geometry(LAYERS, HEADS, GROUP, DIM, PAGE, 0, 70, 0, dtype, BLOCK * PAGE)
    config = SparseKVConfig.from_dict({"debug": True, "budget": 8 * PAGE, "sinks": PAGE, "window": PAGE})
    host_bytes = (PAGES + 1) * geometry.page_bytes
    plan = planner.plan(config, geometry, 1 << 29, host_bytes, 2, cuda=device.type == "cuda")
    geometry = dataclasses.replace(geometry, num_pages=PAGES + 1, max_requests=plan.max_running_requests)
    host = torch.zeros((LAYERS, PAGES + 1, HEADS, 2, PAGE, DIM), dtype=dtype)
    runtime = SparseKVRuntime(config, geometry, plan, host.pin_memory() if device.type == "cuda" else host, device)
    runtime.cache.limit_slots(SLOTS)
    prefill = Prefill(runtime)
    prefill.staging = prefill.staging[:, :, :, : BLOCK * PAGE].clone()
    prefill.landing = Landing(runtime) if lands else None
    if lands:
        prefill.landing.places = prefill.landing.places[:, :6].clone()
    runtime.transfer = transfer
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(PAGES, generator=random) + 1
    tables = torch.stack([order[:70], torch.cat([order[:40], order[70:100]])])
    tokens = (tables[:, :, None] * PAGE + torch.arange(PAGE)).reshape(2, -1).to(torch.int32)
    req_to_token = torch.cat([torch.zeros_like(tokens[:1]), tokens]).to(device)
    outs = []
    for batch in STORY:
        if not isinstance(batch, list):
            if batch is None:
                runtime.flush()
                for buffer in runtime.cache.buffers():
                    buffer.kv.fill_(float("nan"))
            for _ in range(batch or 0):
                runtime.tick()
            continue
        batch = {req: part for req, part in enumerate(batch, 1) if part[1]}
        loc = torch.cat([req_to_token[req, start : start + count] for req, (start, count) in batch.items()]).long()
        req = torch.tensor(list(batch), device=device)
        prefill.begin(req_to_token, req, *([*column] for column in zip(*batch.values(), strict=True)), loc)
        for layer in range(LAYERS):
            shape = (len(loc), HEADS * (GROUP + 2), DIM)
            qkv = torch.randn(shape, generator=random).to(device, dtype)
            q, k, v = qkv.split([HEADS * GROUP, HEADS, HEADS], dim=1)
            outs.append(prefill.forward(layer, q.contiguous(), k.contiguous(), v.contiguous(), DIM**-0.5).cpu())
    return outs, runtime, tables[0, : (49 * PAGE + 200) // PAGE]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lands", [False, True])
def test_edits_ahead_and_landings_change_no_bit(device, seed, lands):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    ahead = Disturbed(device, seed) if device.type == "cuda" else ReorderedTransfer(seed)
    expected, reference, _ = live(device, PlainTransfer())
    found, runtime, full = live(device, ahead, lands)
    assert all(bool(out.isfinite().all()) for out in expected)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(runtime.cache.counters, reference.cache.counters)
    assert bool((runtime.cache.counters[:, -2:] > 0).all()), "units came from slots and from the host"
    runtime.cache.check()
    for mine, theirs in zip(runtime.cache.views, reference.cache.views, strict=True):
        assert torch.equal(mine.slot_of >= 0, theirs.slot_of >= 0) and torch.equal(mine.stamp, theirs.stamp)
        head, place = (mine.slot_of[:, full.to(device)] >= 0).nonzero(as_tuple=True)
        page = full.to(device)[place]
        held = mine.kv[head, mine.slot_of[head, page].long()].cpu()
        assert len(held) > HEADS * SLOTS // 2 and torch.equal(held, mine.host[page.cpu(), head.cpu()])


def test_a_place_is_not_landed_on_before_it_is_left(gpu):
    """Two places, five pieces, second legs that take long: each finds its own piece."""
    transfer = StreamTransfer(gpu)
    places, seen = torch.zeros(2, 1, device=gpu), torch.zeros(5, device=gpu)
    source = torch.arange(1.0, 6.0).pin_memory()

    def leg(number):
        def first():
            places[number % 2].copy_(source[number : number + 1], non_blocking=True)

        def second():
            torch.cuda._sleep(2_000_000)
            seen[number : number + 1].copy_(places[number % 2])

        return first, second

    for _ in range(2):
        seen.zero_()
        transfer.relay("prefix", lambda: None, [leg(number) for number in range(3)], lambda: None)
        transfer.relay("more", lambda: None, [leg(number) for number in (3, 4)], lambda: None)
        transfer.join_all()
        assert seen.tolist() == [1, 2, 3, 4, 5]


def test_tables_are_edited_while_a_prefix_is_under_way(gpu):
    transfer = StreamTransfer(gpu)
    table, seen = torch.zeros(1, device=gpu), torch.zeros(3, device=gpu)
    seen[:1].copy_(table.clone().add_(1))  # loading a kernel would wait for all that runs
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    plans = []  # kept, as a prefill keeps its own: a plan's memory is the next edit's once nobody holds it
    for number in range(3):
        plans.append(transfer.edit(lambda: table.add_(1).clone()))

        def copy(number=number, planned=plans[-1]):
            torch.cuda._sleep(100_000_000)
            seen[number : number + 1].copy_(planned)

        transfer.submit(("staging", number), copy, way="prefix")
    transfer.streams["within"].synchronize()
    assert not transfer.landed["staging", 0].query(), "edits waited for a move"
    transfer.join_all()
    assert seen.tolist() == [1, 2, 3]
