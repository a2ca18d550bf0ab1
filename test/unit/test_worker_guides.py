"""The worker's guides: where a guess comes from, when there is none, and what follows from it."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers import sampler as upstream
from sglang.srt.sparse_kv import sampling
from sglang.srt.sparse_kv.gate import EARLY, LATE
from sglang.srt.sparse_kv.worker import LOOK_AHEAD_MIN_TOKENS
from worker_rig import VOCAB, Rig, greedy_text, model, request, stand_in


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    stand_in(monkeypatch)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("greedy", [True, False])
def test_the_chain_is_right_from_the_first_step_and_stays_so(overlap, greedy):
    rig = Rig(overlap=overlap)
    rig.prefill(request(3, greedy=greedy), request(1, prompt=(7, 7), greedy=greedy, temperature=0.7))
    for _ in range(10):
        rig.decode()
    assert rig.runtime.hits == [[True, True]] * 10


def upstreams_sampler():
    plain = upstream.Sampler.__new__(upstream.Sampler)
    torch.nn.Module.__init__(plain)
    return plain


@pytest.mark.parametrize("coupled", [True, False])
def test_upstreams_sampler_is_replaced_where_noise_is_shared(monkeypatch, coupled):
    monkeypatch.setattr(sampling.CoupledSampler, "__init__", torch.nn.Module.__init__)
    rig = Rig(coupled_sampling=coupled)
    rig.target.model_runner.sampler = plain = upstreams_sampler()
    rig.worker._couple_sampler()
    assert (rig.target.model_runner.sampler is plain) is not coupled
    assert rig.worker._coupled is coupled


def test_a_sampler_of_somebody_else_stays(caplog):
    rig = Rig()
    rig.target.model_runner.sampler = plain = torch.nn.Identity()
    rig.worker._couple_sampler()
    assert rig.target.model_runner.sampler is plain
    assert "Identity is not SGLang's own" in caplog.text


def test_the_look_ahead_runs_for_started_requests_alone():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.decode()
    rig.prefill(request(1), request(2))
    rig.decode()
    rig.decode()
    sizes = [len(forward.req_pool_indices) for forward in rig.target.forwards]
    assert sizes == [1, 1, 1, 1, 2, 2, 3, 3], "prefill, look-ahead, two steps, prefill, look-ahead, two steps"
    ahead, step = rig.target.forwards[5], rig.target.forwards[6]
    assert ahead.batch_size == 2 and ahead.req_pool_indices.tolist() == [1, 2]
    assert ahead.input_ids[::2].tolist() == step.input_ids[2::2].tolist()
    assert ahead.positions.tolist() == step.positions[2:].tolist()
    assert ahead.out_cache_loc.tolist() == step.out_cache_loc[2:].tolist()
    assert ahead.seq_lens_sum == int(ahead.seq_lens_cpu.sum()) == int(ahead.seq_lens.sum())
    assert ahead.spec_info.positions is ahead.positions
    assert rig.runtime.hits[-2:] == [[True] * 3] * 2
    assert rig.runtime.steps == 6


@pytest.mark.parametrize("limit", [0, LOOK_AHEAD_MIN_TOKENS - 1])
def test_short_requests_start_without_a_guess(limit):
    rig = Rig()
    rig.prefill(request(3, max_new_tokens=limit))
    rig.decode()
    step = rig.target.forwards[-1]
    assert len(rig.target.forwards) == 2, "prefill and step"
    assert step.input_ids[0] == step.input_ids[1], "row 1 needs some token"
    rig.decode()
    assert [hits[0] is None for hits in rig.runtime.hits] == [True, False]


def test_a_slot_that_changes_hands_loses_its_guess():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.running.clear()
    rig.prefill(request(3, prompt=(50, 51), max_new_tokens=4))
    rig.decode()
    assert rig.runtime.hits[-1] == [None]


def test_a_slot_prefilled_but_never_decoded_is_forgotten():
    rig = Rig()
    rig.prefill(request(3))
    rig.running.clear()  # it ended with its first token
    rig.prefill(request(2))
    rig.decode()
    rig.decode()
    assert [len(forward.req_pool_indices) for forward in rig.target.forwards] == [1, 1, 1, 1, 1]
    assert rig.worker._started == set()


def test_requests_without_a_limit_start_with_a_guess():
    rig = Rig()
    rig.prefill(request(3, max_new_tokens=None))
    rig.decode()
    assert rig.runtime.hits == [[True]]


def test_a_short_request_in_a_fresh_slot_is_not_taken_for_its_last_owner():
    rig = Rig()
    rig.prefill(request(3))
    rig.running.clear()
    rig.prefill(request(3, max_new_tokens=4))
    rig.decode()
    assert [len(forward.req_pool_indices) for forward in rig.target.forwards] == [1, 1, 1], "no look-ahead"


def test_the_forced_guide_shows_row_1_right():
    rig = Rig("forced")
    rig.prefill(request(3), request(1, max_new_tokens=4))
    for _ in range(3):
        rig.decode()
    assert len(rig.target.forwards) == 1 + 2 * 3
    rig.runtime.policy.guide = "chain"
    rig.decode()
    assert rig.runtime.hits == [[True, True]] * 4


def test_guides_recover_when_the_policy_changes_back():
    rig = Rig("random")
    rig.prefill(request(3))
    for _ in range(20):
        rig.decode()
    assert sum(hits[0] for hits in rig.runtime.hits) < 5
    rig.runtime.policy.guide = "forced"
    rig.decode()
    rig.runtime.policy.guide = "chain"
    rig.decode()
    assert rig.runtime.hits[-2:] == [[True], [True]]


def test_the_history_is_the_text_so_far():
    rig = Rig("resync")
    one, two = request(3), request(1, prompt=(8, 8, 1, 40))
    rig.prefill(one)
    rig.decode()
    rig.prefill(two)
    rig.decode()
    rig.decode()
    for req in (one, two):
        kept = rig.runtime.history.tokens[req.req_pool_idx]
        assert kept[: req.length].tolist() == req.tokens[: req.length], "all that is committed"
    rig.running.clear()
    retracted = request(2, prompt=one.tokens)
    rig.prefill(retracted)
    assert rig.runtime.history.tokens[2, : len(one.tokens)].tolist() == one.tokens


def test_resync_finds_a_lost_text_in_its_repetition():
    """A chain that was thrown off continues where the text has been before."""
    loop = [5]
    while loop.count(loop[-1]) < 3:  # the model without positions runs into a circle
        loop.append(int(model(torch.tensor(loop[-1:]), torch.tensor([0])).argmax()))
    found = {}
    for guide in ("chain", "resync"):
        rig = Rig(guide)
        rig.target.model = lambda tokens, positions: model(tokens, positions * 0)
        rig.prefill(request(3, prompt=loop))
        for _ in range(3):
            rig.decode()
        rig.worker.guide_state.set(torch.tensor([3]), torch.tensor([VOCAB - 1]), False)
        for _ in range(4):
            rig.decode()
        found[guide] = [hit for (hit,) in rig.runtime.hits]
    assert found["chain"][:4] == [True, True, True, False]
    assert found["resync"] == [True] * 7


def test_short_requests_start_with_a_lookup():
    rig = Rig("resync")
    drawn = greedy_text((0, 44, 5, 9, 2), 1)[0]
    rig.prefill(request(3, prompt=(drawn, 44, 5, 9, 2), max_new_tokens=4))
    rig.decode()
    assert len(rig.target.forwards) == 2, "no look-ahead"
    assert rig.target.forwards[-1].input_ids.tolist() == [drawn, 44]


def test_fetching_ahead_follows_the_guesses():
    """Not in a look-ahead, whose row 1 is fed anything; then by the record, and late layers by the outcome, too."""
    rig = Rig("chain")
    seen = []
    forward = rig.target.forward_batch_generation

    def watch(batch, forward_batch=None, is_verify=False):
        seen.append(rig.runtime.gate.open[:, 3].tolist())
        return forward(batch, forward_batch, is_verify)

    rig.target.forward_batch_generation = watch
    rig.prefill(request(3))
    for _ in range(3):
        rig.decode()
    assert seen[1:] == [[False, False], [True, False], [True, True], [True, True]], "look-ahead and three steps"
    rig.runtime.policy.guide = "random"
    for _ in range(12):
        rig.decode()
    shut = seen.index([False, True])  # late layers fetch what was predicted while the record was still good
    assert shut > 5 and all(flags == [True, True] for flags in seen[5:shut])
    assert len(seen) > shut + 1 and all(flags == [False, False] for flags in seen[shut + 1 :])
    rig.runtime.policy.prefetch_floor = 0
    rig.decode()
    rig.decode()
    assert seen[-1] == [True, True]
    rig.worker.clear_cache_pool()
    assert rig.runtime.gate.open.all()


def test_one_row_holds_nothing_back():
    rig = Rig("none")
    rig.prefill(request(3))
    rig.decode()
    assert rig.runtime.gate.open[EARLY].all() and rig.runtime.gate.open[LATE].all()


@pytest.mark.parametrize(
    ("temperature", "greedy", "expected"), [(1.0, True, True), (0.6, False, True), (1.0, False, False)]
)
def test_hot_requests_do_not_look_up(temperature, greedy, expected):
    rig = Rig("resync")
    rig.prefill(request(1), request(3, temperature=temperature, greedy=greedy))
    assert rig.worker.guide_state.looks_up[[1, 3]].tolist() == [True, expected]


def test_a_recording_keeps_steps_and_no_look_ahead():
    rig = Rig("resync")
    rig.runtime.recorder = object()
    req = request(3, greedy=False, temperature=0.7)
    rig.prefill(req)
    rig.decode()
    ahead, step = rig.runtime.records
    assert ahead is None
    assert (step["requests"], step["guide"], step["lengths"]) == (["r3"], "resync", [3])
    assert step["tokens"] + step["next"] == req.output_ids and step["guesses"] == step["next"]


@pytest.mark.parametrize("overlap", [False, True])
def test_row_1_pays_for_the_token_that_the_next_step_will_have_counted(monkeypatch, overlap):
    """Upstream counts a drawn token in the next step, and under overlap, where it comes late, in the one after."""
    charged = []
    monkeypatch.setattr(sampling, "advance_penalties", lambda info, *charge: charged.append(charge))
    rig = Rig(overlap=overlap)
    req = request(3)
    req.sampling_params.frequency_penalty, req.sampling_params.repetition_penalty = 0.25, 1.5
    rig.prefill(request(1), req)
    rig.decode()
    assert not charged, "no penalties in this batch"
    monkeypatch.setattr(sampling, "has_penalties", lambda info: True)
    rig.decode()
    ((tokens, rates),) = charged
    assert int(tokens[1]) == req.output_ids[1 if overlap else 2]
    assert rates.tolist() == [[0.0, 0.0, 1.0], [0.25, 0.0, 1.5]]
