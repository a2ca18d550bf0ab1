"""The registered algorithm answers everything that upstream asks of one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sparse_kv import algorithm
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


@pytest.fixture(scope="module")
def registered():
    algorithm.register()
    return SpeculativeAlgorithm.from_string("dualdecoder")


def test_registering_again_changes_nothing(registered):
    algorithm.register()
    assert SpeculativeAlgorithm.from_string(algorithm.NAME) is registered


def test_it_has_every_member_of_upstreams_algorithms(registered):
    # The registry checks only names starting with is_ and supports_; a missing other one fails at its first use.
    members = [name for name in vars(SpeculativeAlgorithm) if not name.startswith("_") and not name.isupper()]
    builders = {"from_string", "register"}
    missing = [name for name in members if name not in builders and not hasattr(registered, name)]
    assert missing == []


def test_it_is_speculative_without_a_draft(registered):
    assert registered.is_some() and registered.is_speculative() and not registered.is_none()
    assert registered.supports_overlap
    assert not registered.has_draft_kv()
    assert not registered.need_topk()
    assert not registered.carries_draft_hidden_states()
    assert registered.get_num_tokens_per_req_for_target_verify(2, is_draft_worker=False) == 2


def test_it_makes_the_worker(registered):
    from sglang.srt.sparse_kv.worker import DualDecodeWorker

    assert registered.create_worker(SimpleNamespace(disable_overlap_schedule=False)) is DualDecodeWorker


def test_it_relays_tokens_between_steps(registered):
    pool = SimpleNamespace(req_to_token=torch.zeros(5, 8, dtype=torch.int32))
    relay = registered.create_future_map(torch.device("cpu"), pool, needs_cpu_seq_lens=False)
    assert relay.spec_algo is registered
    assert relay.output_tokens_buf.shape == (5,)


def test_it_refuses_to_be_chosen_by_hand(registered):
    with pytest.raises(ValueError, match="start with --sparse-kv dualdecoder"):
        registered.validate_server_args(SimpleNamespace())
    registered.validate_server_args(SimpleNamespace(_sparse_kv={}))
