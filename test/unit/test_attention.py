"""SGLang's attention backend: what a forward begins with."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_eager_registry
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
from sglang.srt.sparse_kv.attention import SparseKVAttnBackend
from worker_rig import Rig, request, stand_in


class Prefills:
    """In place of `Prefill`: what was begun."""

    def __init__(self):
        self.begun = []

    def begin(self, table, req, prefix_lens, extend_lens, loc):
        self.begun.append((req.tolist(), prefix_lens, extend_lens, loc.tolist()))

    def forward(self, layer, q, k, v, scale, borrowed):
        self.borrowed = borrowed
        return q


@pytest.fixture
def backend():
    made = SparseKVAttnBackend.__new__(SparseKVAttnBackend)
    made.runtime = SimpleNamespace(policy=SimpleNamespace(poison=False))
    made.req_to_token_pool = SimpleNamespace(req_to_token=None)
    made.prefill, made._begun, made._blank, made.serves = Prefills(), False, False, False
    return made


def forward(loc):
    """A prefill of three tokens, in the buffers into which SGLang's runner copies every batch."""
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.arange(32, 35),
        req_pool_indices=torch.tensor([4]),
        seq_lens=torch.tensor([35]),
        seq_lens_cpu=torch.tensor([35]),
        seq_lens_sum=35,
        out_cache_loc=loc,
        extend_prefix_lens_cpu=[32],
        extend_seq_lens_cpu=[3],
    )
    buffers = build_eager_registry(device=torch.device("cpu"), max_bs=2, max_num_token=8, cache_loc_dtype=torch.int64)
    size = {"padded_bs": 1, "padded_num_tokens": 3}
    buffers.fill_from(batch, raw_bs=1, raw_num_tokens=3, pp_proxy_tensors=None, **size)
    return buffers.extract_buffer(forward_batch_template=batch, **size)


def begun(loc):
    return [4], [32], [3], loc.tolist()


def test_a_prefill_that_is_under_way_is_not_begun_again(backend):
    first, second = torch.arange(3), torch.arange(3, 6)
    for loc in (first, second):
        backend.begin_prefill(torch.tensor([4]), [32], [3], loc)
        backend.init_forward_metadata(forward(loc))
    assert backend.prefill.begun == [begun(first), begun(second)]


def test_one_whose_forward_never_came_does_not_stand_for_the_next(backend):
    lost, loc = torch.arange(3), torch.arange(3, 6)
    backend.begin_prefill(torch.tensor([4]), [32], [3], lost)
    backend.begin_prefill(torch.tensor([4]), [32], [3], loc)
    backend.init_forward_metadata(forward(loc))
    assert backend.prefill.begun == [begun(lost), begun(loc)]


def test_one_that_no_worker_announced_is_begun(backend):
    for loc in (torch.arange(3), torch.arange(3, 6)):
        backend.init_forward_metadata(forward(loc))
        assert backend.prefill.begun[-1] == begun(loc)
    assert len(backend.prefill.begun) == 2


@pytest.mark.parametrize("graph", [False, True])
def test_keys_are_lent_where_a_graph_goes_on_behind_attention(backend, graph):
    backend.begin_prefill(*begun_arguments(torch.arange(3)))
    out = attend(backend, torch.arange(3), graph)
    assert backend.prefill.borrowed is graph and len(backend.prefill.begun) == 1
    assert torch.equal(out, torch.ones(3, 32))


def test_a_graph_is_captured_around_the_attention_of_nobody(backend):
    """Which would write to the host, and take slots."""
    out = attend(backend, torch.zeros(3, dtype=torch.int64), graph=True)
    assert backend.prefill.begun == [] and not hasattr(backend.prefill, "borrowed")
    assert torch.equal(out, torch.zeros(3, 32))
    attend(backend, torch.arange(3), graph=False)
    assert len(backend.prefill.begun) == 1 and backend.prefill.borrowed is False
    backend.serves = True
    with pytest.raises(RuntimeError, match="has not begun it"):
        attend(backend, torch.arange(3), graph=True)


def begun_arguments(loc):
    return torch.tensor([4]), [32], [3], loc


def attend(backend, loc, graph):
    backend.runtime.geometry = SimpleNamespace(kv_heads=2, group=2, head_dim=8)
    with enable_breakable_cuda_graph() if graph else contextlib.nullcontext():
        batch = forward(loc)
        backend.init_forward_metadata(batch)
        layer = SimpleNamespace(layer_id=0, scaling=1.0)
        return backend.forward_extend(torch.ones(3, 32), torch.ones(3, 16), torch.ones(3, 16), layer, batch)


def test_the_worker_sends_the_prefix_on_its_way_before_anything_else(monkeypatch):
    stand_in(monkeypatch)
    rig = Rig()
    runner, seen = rig.target.model_runner, []
    key = rig.worker._key_noise
    monkeypatch.setattr(rig.worker, "_key_noise", lambda *them: (seen.append(len(runner.begun)), key(*them)))
    rig.prefill(request(3), request(1))
    assert seen == [1]
    req, prefixes, extends, loc = runner.begun[0]
    assert (req.tolist(), prefixes, extends) == ([3, 1], [0, 0], [3, 3])
    assert loc is rig.target.forwards[0].out_cache_loc
