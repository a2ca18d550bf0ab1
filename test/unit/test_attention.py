"""SGLang's attention backend: what a forward begins with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sparse_kv.attention import SparseKVAttnBackend
from worker_rig import Rig, request, stand_in


class Prefills:
    """In place of `Prefill`: what was begun."""

    def __init__(self):
        self.step, self.begun = None, []

    def begin(self, table, req, prefix_lens, extend_lens, loc):
        self.step = SimpleNamespace(loc=loc)
        self.begun.append((req.tolist(), prefix_lens, extend_lens))


@pytest.fixture
def backend():
    made = SparseKVAttnBackend.__new__(SparseKVAttnBackend)
    made.runtime = SimpleNamespace(policy=SimpleNamespace(poison=False))
    made.req_to_token_pool = SimpleNamespace(req_to_token=None)
    made.prefill = Prefills()
    return made


def forward(loc):
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.tensor([4]),
        extend_prefix_lens_cpu=[32],
        extend_seq_lens_cpu=[3],
        out_cache_loc=loc,
    )


def test_a_prefill_that_is_under_way_is_not_begun_again(backend):
    loc = torch.arange(3)
    backend.begin_prefill(torch.tensor([4]), [32], [3], loc)
    backend.init_forward_metadata(forward(loc))
    assert backend.prefill.begun == [([4], [32], [3])]


def test_each_batch_is_begun_and_so_is_one_that_no_worker_announced(backend):
    for loc in (torch.arange(3), torch.arange(3)):
        backend.init_forward_metadata(forward(loc))
    assert backend.prefill.begun == 2 * [([4], [32], [3])]


def test_the_worker_sends_the_prefix_on_its_way_before_anything_else(monkeypatch):
    stand_in(monkeypatch)
    rig = Rig()
    runner, seen = rig.target.model_runner, []
    admit = rig.worker._admit
    monkeypatch.setattr(rig.worker, "_admit", lambda *them: (seen.append(len(runner.begun)), admit(*them)))
    rig.prefill(request(3), request(1))
    assert seen == [1]
    req, prefixes, extends, loc = runner.begun[0]
    assert (req.tolist(), prefixes, extends) == ([3, 1], [0, 0], [3, 3])
    assert loc is rig.target.forwards[0].out_cache_loc
