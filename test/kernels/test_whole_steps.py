"""Whole steps of the CUDA engine: of two rows, emulated, against the oracle; those that select every page, emulated and
in a CUDA graph, against the reference.
"""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sparse_kv import planner
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.decode import decode_layer
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.ops import attend as attend_module
from sglang.srt.sparse_kv.ops import build, cuda, cuda_prefill, launching, reference
from sglang.srt.sparse_kv.ops.engine import OPERATIONS
from sglang.srt.sparse_kv.ops.landmarks import make
from sglang.srt.sparse_kv.ops.workspace import workspace
from sglang.srt.sparse_kv.runtime import SparseKVRuntime
from sglang.srt.sparse_kv.step import DecodeStep
from sglang.srt.sparse_kv.variants import Variant
from sparse_rig import Rig, counters
from test_attend import paged_attention

LAYERS, HEADS, GROUP, DIM, PAGE = 3, 2, 4, 64, 16
SCALE = DIM**-0.5
LONGEST = 20 * PAGE  # tokens, within the budget


class Layers:
    """A rank's sparse KV state, requests whose KV the host has, and static inputs of a step.

    kernels: the CUDA engine, which the emulator runs on the CPU; otherwise the reference. Everything random is drawn on
    the CPU, so that two of one seed are equal.
    """

    def __init__(self, device: torch.device, n: int, kernels: bool):
        self.device, self.n = device, n
        config = SparseKVConfig.from_dict({"budget": LONGEST, "sinks": PAGE, "window": PAGE, "rows": "auto"})
        geometry = Geometry(LAYERS, HEADS, GROUP, DIM, PAGE, 0, LONGEST // PAGE + 1, 0, torch.float16)
        pages = n * geometry.max_pages
        plan = planner.plan(config, geometry, 1 << 30, (pages + 1) * geometry.page_bytes, n)
        assert plan.max_running_requests == n
        self.random = torch.Generator().manual_seed(n)
        shape = (LAYERS, pages + 1, HEADS, 2, PAGE, DIM)
        host = torch.randn(shape, generator=self.random).half()
        host = host.pin_memory() if device.type == "cuda" else host
        settled = Geometry(**{**vars(geometry), "num_pages": pages + 1, "max_requests": n})
        self.runtime = SparseKVRuntime(config, settled, plan, host, device)
        if kernels and device.type == "cpu":
            self.runtime.ops = kernel_engine()
        self.runtime.variant = Variant.ALL_PAGES
        order = (torch.randperm(pages, generator=self.random) + 1).view(n, -1)
        order[1:, :2] = order[0, :2]  # a prefix that all share
        tokens = order[:, :, None] * PAGE + torch.arange(PAGE)
        self.table = order
        self.req_to_token = torch.zeros((n + 1, tokens[0].numel()), dtype=torch.int32, device=device)
        self.req_to_token[1:] = tokens.flatten(1).int()
        self.req = torch.zeros(n, dtype=torch.int64, device=device)
        self.length = torch.ones(n, dtype=torch.int64, device=device)
        width = (GROUP + 2) * HEADS * DIM  # queries, keys and values of one projection
        self.rows = [torch.zeros((n, width), dtype=torch.float16, device=device) for _ in range(LAYERS)]
        for layer in range(LAYERS):
            for mine, made in zip(self.runtime.cache.views[layer].landmarks, make(host[layer, :, :, 0]), strict=True):
                mine.copy_(made)

    def set_inputs(self, req: list[int], length: list[int], gone: list[int]) -> None:
        """Requests, 0 for padding, with their committed tokens; pages that have left the cache meanwhile."""
        self.req.copy_(torch.tensor(req))
        self.length.copy_(torch.tensor(length))
        for layer in range(LAYERS):
            self.rows[layer].copy_(torch.randn(self.rows[layer].shape, generator=self.random))
        if gone:
            pages = torch.tensor(gone, device=self.device)
            for view in self.runtime.cache.views:
                (cuda if self.runtime.ops.name == "cuda" else reference).invalidate(view, pages)

    def run(self) -> torch.Tensor:
        """[LAYERS, N, Hq, D]."""
        runtime = self.runtime
        step = DecodeStep.build(
            runtime.geometry,
            runtime.shape,
            runtime.variant,
            self.req_to_token,
            self.req,
            self.length,
            runtime.ops,
        )
        runtime.schedule.begin_step(step)
        outs = []
        for layer, rows in enumerate(self.rows):
            q, k, v = rows.split([GROUP * HEADS * DIM, HEADS * DIM, HEADS * DIM], 1)
            k, v = (t.view(self.n, HEADS, DIM) for t in (k, v))
            outs.append(decode_layer(runtime, step, layer, q, k, v, SCALE))
        return torch.stack(outs)

    def state(self) -> dict[str, torch.Tensor]:
        """What both engines must agree on: which slot a unit got is the engine's choice."""
        found: dict[str, torch.Tensor] = {"host": self.runtime.host, "fetched": self.runtime.fetched}
        for layer, view in enumerate(self.runtime.cache.views):
            slot = view.slot_of.long()
            resident = slot >= 0
            found[f"resident {layer}"] = resident
            found[f"stamps {layer}"] = torch.where(resident, view.stamp.gather(1, slot.clamp(min=0)), -1)
            found[f"counters {layer}"] = view.counters
            found[f"codes {layer}"], found[f"scales {layer}"] = view.landmarks
        return {name: tensor.cpu() for name, tensor in found.items()}


def kernel_engine() -> SimpleNamespace:
    """As engine_for of a GPU, on the CPU."""
    found = {
        name: getattr(module, name) for module in (cuda, cuda_prefill) for name in OPERATIONS if hasattr(module, name)
    }
    found["resolve"] = partial(found["resolve"], move=True)
    return SimpleNamespace(name="cuda", **found)


def same(ours: Layers, expected: Layers, out: torch.Tensor, wanted: torch.Tensor) -> None:
    if ours.device.type == "cuda":
        torch.cuda.synchronize()
    workspace(ours.device).check()
    theirs = expected.state()
    for name, tensor in ours.state().items():
        assert torch.equal(tensor, theirs[name]), name
    used = expected.req > 0
    error = (out.cpu()[:, used].float() - wanted[:, used].float()).abs().max()
    assert error < 2e-2, f"outputs differ by {error:.4f}"
    assert all(int(cuda.check(view)) == 0 for view in ours.runtime.cache.views)
    assert not bool(workspace(ours.device).urgent.any())
    assert not bool(workspace(ours.device).tasks.view(-1, 8)[:, :4].any()), "helpers left their counters behind"


def script(layers: Layers, steps: int, seed: int = 0):
    """Inputs of steps: requests that grow from about a page's border, one that rests now and then, pages that leave."""
    random = torch.Generator().manual_seed(seed)
    n = layers.n
    length = [2 * PAGE + int(x) for x in torch.randint(0, LONGEST - 5 * PAGE, (n,), generator=random)]
    length[0] = 3 * PAGE - 1  # closes a page at once, then begins one
    for turn in range(steps):
        req = [i + 1 if i == 0 or (turn + i) % 4 else 0 for i in range(n)]
        gone = []
        if turn % 3 == 0:
            gone = (torch.randint(1, layers.runtime.geometry.num_pages, (6,), generator=random)).tolist()
        if turn % 4 == 1:  # the open page of one
            gone.append(int(layers.table[0, length[0] // PAGE]))
        yield req, [tokens if r else 1 for r, tokens in zip(req, length, strict=True)], gone
        length = [tokens + (r > 0) for r, tokens in zip(req, length, strict=True)]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(attend_module.AttendPlan, "run", paged_attention)


@pytest.mark.parametrize("n", [1, 3])
def test_steps_are_the_reference_s(engine, n, request):
    if engine.device.type == "cpu":
        request.getfixturevalue("stand_in")
    else:
        pytest.importorskip("flashinfer", reason="needs FlashInfer")
    ours, expected = Layers(engine.device, n, True), Layers(torch.device("cpu"), n, False)
    for turn, inputs in enumerate(script(ours, 6 if engine.small else 40)):
        engine.seed(turn)
        for layers in (ours, expected):
            layers.set_inputs(*inputs)
        same(ours, expected, ours.run(), expected.run())
    missed, selected = expected.runtime.cache.counters[:, 2].sum(), expected.runtime.cache.counters[:, 0].sum()
    assert 0 < missed < selected


@pytest.mark.parametrize("residency", ["all", [0]])
def test_steps_of_two_rows_are_the_oracle_s(engine, residency, stand_in):
    """And predictions and what is fetched of them are the reference's, in a cache that is tight."""
    if not engine.small:
        pytest.skip("the oracle's pages are on the CPU")
    rigs = [Rig(seed=6, layers=4, pages=160, context=400, requests=2, residency=residency) for _ in range(2)]
    for rig in rigs:
        rig.runtime.apply_policy({"cache_slots": 2 * rig.runtime.shape.width + 4})
        for req, length in ((1, 300), (2, 117)):
            rig.start(req)
            rig.extend({req: length})
    rigs[0].runtime.ops = kernel_engine()
    for turn in range(6):
        engine.seed(turn)
        for rig in rigs:
            rig.decode([1, 2] if turn != 3 else [2])
        ours, expected = (rig.runtime for rig in rigs)
        assert torch.equal(ours.predicted, expected.predicted) and torch.equal(ours.selected, expected.selected)
        assert torch.equal(ours.cache.counters, expected.cache.counters)
    count = counters(rigs[0])
    assert count["missed"] > 0 and count["prefetched"] > 0


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("head", [0, 1])
def test_what_overflows_spoils_no_page_that_others_share(engine, head, kernels, stand_in):
    """A request whose queries are no numbers in one head selects as many pages there, so none of a prefix is taken for
    its open page, which is brought in part.
    """
    if not engine.small:
        pytest.skip("the rig's pages are on the CPU")
    rig = Rig(seed=5, layers=2, pages=150, context=300, requests=2, dim=16)
    geometry, page = rig.geometry, rig.geometry.page_size
    rig.start(1)
    rig.extend({1: 20 * page})
    rig.start(2)
    rig.fork(2, 1, 20 * page)
    rig.extend({1: 3, 2: 5})
    rig.runtime.policy.check = False
    if kernels:
        rig.runtime.ops = kernel_engine()
    for view in rig.runtime.cache.views:
        reference.invalidate(view, torch.arange(1, geometry.num_pages))
    data = []
    for _ in range(geometry.num_layers):
        q = rig.rand(2, geometry.kv_heads, geometry.group, geometry.head_dim)
        q[0, head] = float("nan")
        data.append((q.flatten(1, 2), *(rig.rand(2, geometry.kv_heads, geometry.head_dim) for _ in range(2))))
    rig.decode([1], data, verify=False)
    shared, compared = set(rig.owned[2][:-1]), 0
    for view in rig.runtime.cache.views:
        for h, slot in (view.page_of >= 0).nonzero().tolist():
            number = int(view.page_of[h, slot])
            if number in shared:
                compared += 1
                assert torch.equal(view.kv[h, slot], view.host[number, h]), "a page of the prefix is there in part"
    assert compared > 0


@pytest.fixture
def only_gpu(gpu):
    pytest.importorskip("flashinfer", reason="needs FlashInfer")
    build.use(None)
    return gpu


def sleep(cycles: int, device: torch.device) -> None:
    launching.launch("sleep", device, ctypes.c_int64(cycles))


def delayed(layers: Layers, monkeypatch, name: str, cycles: int = 200_000) -> None:
    """An operation that runs late on whatever stream it is on."""
    operation = getattr(layers.runtime.ops, name)

    def late(*args, **more):
        sleep(cycles, layers.device)
        return operation(*args, **more)

    monkeypatch.setattr(layers.runtime.ops, name, late)


@pytest.mark.parametrize("late", [None, "resolve", "close_pages", "write_token", "attend"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_a_captured_step_is_the_reference_s(only_gpu, n, overlap, late, monkeypatch):
    """With the pages of a layer found beside the layer before it, whatever is slow."""
    monkeypatch.setattr(launching, "OVERLAP_LAUNCHES", overlap)
    ours, expected = Layers(only_gpu, n, True), Layers(torch.device("cpu"), n, False)
    if late:
        delayed(ours, monkeypatch, late)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            ours.run()  # of padding
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(2):
        expected.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.run()
    for inputs in script(ours, 40, seed=n):
        for layers in (ours, expected):
            layers.set_inputs(*inputs)
        graph.replay()
        same(ours, expected, out, expected.run())


def test_a_layer_that_does_not_wait_is_noticed(only_gpu, monkeypatch):
    """Sabotage: the token is written and attention reads while the pages are still being looked up."""
    ours, expected = Layers(only_gpu, 3, True), Layers(torch.device("cpu"), 3, False)
    for layers in (ours, expected):
        layers.set_inputs(*next(script(ours, 1)))
        layers.run()
    delayed(ours, monkeypatch, "resolve", 5_000_000)
    joins = [ours.runtime.transfer.join_branch]  # the first layer's, without which no page number would be one
    monkeypatch.setattr(ours.runtime.transfer, "join_branch", lambda: joins and joins.pop()())
    inputs = [1, 2, 3], [9 * PAGE, 15 * PAGE, 11 * PAGE], list(range(1, ours.runtime.geometry.num_pages))
    for layers in (ours, expected):
        layers.set_inputs(*inputs)
    out, wanted = ours.run(), expected.run()
    torch.cuda.synchronize()
    with pytest.raises(AssertionError):
        same(ours, expected, out, wanted)


def test_nothing_waits_for_the_device(only_gpu):
    ours = Layers(only_gpu, 3, True)
    ours.set_inputs(*next(script(ours, 1)))
    ours.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
