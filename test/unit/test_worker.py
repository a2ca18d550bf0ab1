"""The worker's step: what is said, what SGLang sees of it, and what a request is told."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.sparse_kv import sizing
from sglang.srt.sparse_kv.request_info import KEYS
from sglang.srt.sparse_kv.variants import SETTLE, Variant
from sglang.srt.sparse_kv.worker import LOOK_AHEAD_MIN_TOKENS, DualDraftInput
from worker_rig import PAGE, TOKENS, VOCAB, Rig, greedy_text, model, request, stand_in


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    stand_in(monkeypatch)


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("guide", ["chain", "random", "frozen", "forced", "greedy", "lookup", "resync", "none"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_text_does_not_depend_on_the_guide(guide, overlap):
    rig = Rig(guide, overlap)
    one, two = request(3), request(1, prompt=(8, 8, 1, 40))
    rig.prefill(one)
    for _ in range(5):
        rig.decode()
    rig.prefill(two)
    for _ in range(8):
        rig.decode()
    assert one.output_ids == greedy_text((5, 9, 2), 14)
    assert two.output_ids == greedy_text((8, 8, 1, 40), 9)


@pytest.mark.parametrize("guide", ["random", "greedy", "resync", "none"])
def test_sampled_text_does_not_depend_on_the_guide_either(guide):
    texts = []
    for kind in ("chain", guide):
        rig = Rig(kind)
        requests = [request(2, greedy=False, seed=5), request(4, greedy=False, temperature=0.6)]
        rig.prefill(*requests)
        for _ in range(12):
            rig.decode()
        texts.append([req.output_ids for req in requests])
    assert texts[0] == texts[1]
    assert texts[0][0] != greedy_text((5, 9, 2), 13)


def test_a_seed_gives_the_same_text_in_other_company():
    alone, among = Rig(), Rig()
    first = request(2, greedy=False, seed=5)
    alone.prefill(first)
    second = request(4, greedy=False, seed=5)
    among.prefill(request(1, greedy=False), second)
    for _ in range(9):
        alone.decode()
        among.decode()
    assert first.output_ids == second.output_ids


def test_requests_of_a_batch_have_noise_of_their_own():
    rig = Rig()
    rig.prefill(request(1, seed=5), request(2, seed=6), request(3), request(4, seed=5))
    one, two, three, four = rig.worker._noise_keys[[1, 2, 3, 4]].tolist()
    assert one == four != 0
    assert len({one, two, three, 0}) == 4


# ---------------------------------------------------------------- one row or two


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [1, 2, "auto"])
def test_the_text_does_not_depend_on_the_rows(rows, overlap):
    rig = Rig("resync", overlap, rows="auto")
    rig.runtime.policy.rows = rows
    one, two = request(3), request(1, prompt=(8, 8, 1, 40))
    rig.prefill(one)
    for _ in range(5):
        rig.decode()
    rig.prefill(two)
    for step in range(48):
        rig.runtime.cache.usable = 1 if step == 3 else 10_000
        rig.decode()
    assert one.output_ids == greedy_text((5, 9, 2), 54)
    assert two.output_ids == greedy_text((8, 8, 1, 40), 49)
    ran = [variant for variant in rig.runtime.ran if variant is not Variant.TWO_ROWS]
    assert len(ran) == {1: 53, 2: 0, "auto": 53 - SETTLE}[rows]


def test_sampled_text_does_not_depend_on_the_rows_either():
    texts = []
    for rows in (1, 2):
        rig = Rig(rows="auto")
        rig.runtime.policy.rows = rows
        requests = [request(2, greedy=False, seed=5), request(4, greedy=False, temperature=0.6)]
        rig.prefill(*requests)
        for _ in range(12):
            rig.decode()
        texts.append([req.output_ids for req in requests])
    assert texts[0] == texts[1]


def test_a_second_row_starts_with_right_guesses():
    """After steps of one row each request's guess is computed first, and so is that of one which has just started."""
    rig = Rig(rows="auto")
    rig.prefill(request(3), request(1, prompt=(7, 7)))
    for _ in range(4):
        rig.decode()
    assert rig.runtime.hits == [] and len(rig.target.forwards) == 1 + 4, "one row looks ahead for nobody"
    assert [len(forward.input_ids) for forward in rig.target.forwards[1:]] == [2] * 4
    rig.prefill(request(2, prompt=(4, 9)))
    rig.runtime.cache.usable = 1
    for _ in range(3):
        rig.decode()
    assert rig.runtime.hits == [[True, True, True]] * 3
    assert [len(forward.input_ids) for forward in rig.target.forwards[6:]] == [6] * 4, "one look-ahead, three steps"
    assert rig.runtime.variant is Variant.TWO_ROWS


def test_a_request_about_to_end_starts_without_a_guess():
    rig = Rig(rows="auto")
    rig.prefill(request(3, max_new_tokens=LOOK_AHEAD_MIN_TOKENS - 1), request(1))
    rig.decode()
    rig.runtime.cache.usable = 1
    rig.decode()
    assert rig.runtime.hits == [[None, True]]


def test_guesses_from_before_are_not_believed():
    """What the worker and the gate knew of a request is old once it has run with one row."""
    rig = Rig("chain", rows="auto")
    rig.runtime.policy.rows = 2
    rig.prefill(request(3, max_new_tokens=20))
    for _ in range(3):
        rig.decode()
    assert rig.worker.guide_state.guess[3] >= 0
    rig.runtime.policy.rows = 1
    rig.decode()
    rig.runtime.policy.rows = 2
    rig.decode()
    assert rig.runtime.hits[-1] == [None]


# ---------------------------------------------------------------- what upstream sees


def test_the_start_is_measured_once_graphs_are_captured(monkeypatch):
    rig, seen = Rig(), []
    rig.target.graph_memory_usage = {"target_verify": 0.4}
    monkeypatch.setattr(sizing, "note_start", lambda runtime, *graphs: seen.append((runtime, *graphs)))
    rig.worker.init_cuda_graphs()
    ((runtime, theirs, ours),) = seen
    assert runtime is rig.runtime and theirs == {"target_verify": 0.4} and not any(ours.values())
    assert rig.target.model_runner.attn_backend.serves, "a prefill of nobody is an error from here on"


@pytest.mark.parametrize(("guide", "rows"), [("chain", 2), ("none", 1)])
def test_rows_of_a_request_lie_together(guide, rows):
    rig = Rig(guide)
    one, two = request(3, max_new_tokens=4), request(1, prompt=tuple(range(16)), max_new_tokens=4)
    rig.prefill(one, two)
    rig.decode()
    step = rig.target.forwards[-1]
    assert step.forward_mode is ForwardMode.TARGET_VERIFY
    assert step.positions.tolist() == [length + row for length in (3, 16) for row in range(rows)]
    slots = [slot for slot in (3, 1) for _ in range(rows)]
    assert step.out_cache_loc.tolist() == [PAGE + s * TOKENS + p for s, p in zip(slots, step.positions.tolist())]
    assert step.input_ids[::rows].tolist() == [one.output_ids[0], two.output_ids[0]]
    assert step.seq_lens.tolist() == [3, 16], "committed tokens, the step's own left out"
    assert all(value.dtype == torch.int64 for value in (step.input_ids, step.positions, step.out_cache_loc))
    assert step.spec_info.num_tokens_per_req == rows
    assert step.spec_info.capture_hidden_mode is CaptureHiddenMode.NULL
    assert step.spec_info.is_verify_input() and not step.spec_info.is_draft_input()


def test_lengths_are_published_once_and_before_the_forward():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.decode()
    assert rig.published == [(0, [3]), (1, [4]), (3, [5])]


def test_what_decode_alone_needs_follows_the_prefills_forward(monkeypatch):
    """The device has nothing to do until that forward's first launch."""
    rig = Rig()
    kept = rig.runtime.history.tokens, rig.worker._penalty_rates, rig.worker.guide_state.looks_up
    forward, before = rig.target.forward_batch_generation, []

    def state():
        return [tensor[3].tolist() for tensor in kept]

    def watched(batch):
        before.append(state())
        return forward(batch)

    monkeypatch.setattr(rig.target, "forward_batch_generation", watched)
    empty = state()
    rig.prefill(request(3, greedy=False))
    assert before == [empty]
    assert all(left != right for left, right in zip(state(), empty, strict=True))


def test_a_step_reports_one_token_a_request():
    rig = Rig()
    rig.prefill(request(3), request(1))
    result = rig.decode()
    assert result.accept_lens.tolist() == [1, 1] and result.accept_lens.dtype == torch.int32
    assert result.speculative_num_draft_tokens == 1
    assert result.next_token_ids.shape == (2,)
    assert result.logits_output.next_token_logits.shape == (2, VOCAB)
    hidden = result.logits_output.hidden_states.tolist()
    assert hidden == [[req.output_ids[0], 3] for req in rig.running], "row 0's alone"


def test_logprobs_are_row_0s():
    rig = Rig()
    rig.prefill(request(3), request(1))
    result = rig.decode(return_logprob=True, top_logprobs_nums=[2, 0], token_ids_logprobs=[None, [7]])
    output = result.logits_output
    tokens = torch.tensor([req.output_ids[0] for req in rig.running])
    expected = torch.log_softmax(model(tokens, torch.tensor([3, 3])), dim=-1)
    assert output.next_token_logprobs.shape == (2, 1)
    torch.testing.assert_close(output.next_token_logprobs, expected.gather(1, result.next_token_ids[:, None].long()))
    torch.testing.assert_close(output.next_token_top_logprobs_val[0], expected[0].topk(2).values)
    torch.testing.assert_close(output.next_token_token_ids_logprobs_val[1], expected[1, [7]])


def test_flushing_forgets_guesses_and_empties_the_cache():
    rig = Rig()
    rig.prefill(request(3))
    rig.decode()
    rig.prefill(request(2))
    rig.worker.clear_cache_pool()
    assert rig.runtime.flushes == 1
    assert (rig.worker.guide_state.guess < 0).all() and not rig.worker._started


def test_new_weights_concern_the_target_alone():
    rig = Rig()
    assert rig.worker.update_weights_from_disk(None)[0]
    assert rig.worker.update_weights_from_ipc(None)[0]
    assert rig.worker.draft_worker is None
    assert rig.worker.enable_overlap == "asked for on the target"
    assert not hasattr(rig.worker, "nothing_has_this")


# ---------------------------------------------------------------- between steps


def draft_input(tokens, indices=None):
    made = DualDraftInput(torch.tensor(tokens))
    if indices is not None:
        made.future_indices = torch.tensor(indices)
    return made


def test_the_batch_carries_last_tokens_without_overlap():
    running, joined = draft_input([1, 2, 3]), draft_input([4])
    running.filter_batch(torch.tensor([2, 0]), [2, 0])
    running.merge_batch(joined)
    assert running.bonus_tokens.tolist() == [3, 1, 4]
    assert not running.is_draft_input() and not running.is_verify_input()


def test_the_relay_carries_last_tokens_under_overlap():
    running, joined = draft_input([1, 2, 3], [7, 8, 9]), draft_input([4], [5])
    running.filter_batch(torch.tensor([2, 0]), [2, 0])
    running.merge_batch(joined)
    assert running.future_indices.tolist() == [9, 7, 5]


# ---------------------------------------------------------------- a request's own figures


def told(rig, result):
    """What SGLang does with a result before it hands out the tokens."""
    if result.indexer_topk_output is not None:
        result.indexer_topk_output.map_device_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))
        rig.runtime.fetched += 100  # the next step is under way
        rig.runtime.fetched -= 100
        result.indexer_topk_output.finalize()


@pytest.mark.parametrize("guide, hits", [("forced", 1), ("none", 0)])
def test_a_request_that_asks_is_told_what_each_token_cost(guide, hits):
    rig = Rig(guide)
    one, two = request(3, asks=True), request(1, prompt=(8, 8, 1, 40))
    assert rig.prefill(one, two).indexer_topk_output is None
    costs = [(5, 2), (0, 0), (7, 1)]
    for missed, ahead in costs:
        rig.runtime.fetched[3] += torch.tensor([missed, ahead], dtype=torch.int32)
        rig.runtime.fetched[1] += 50
        result = rig.decode()
        one.output_ids.pop(), two.output_ids.pop()  # SGLang appends them after it was told
        told(rig, result)
        one.output_ids.append(one.tokens[-1]), two.output_ids.append(two.tokens[-1])
    # The first token came from the prefill.
    assert one.customized_info == dict(zip(KEYS, [[0, 5, 0, 7], [0, 2, 0, 1], [0, hits, hits, hits]]))
    assert all(len(values) == len(one.output_ids) for values in one.customized_info.values())
    assert two.customized_info is None


def test_nobody_asks_and_nothing_is_copied():
    rig = Rig()
    one = request(3, asks=True)
    rig.prefill(one)
    assert rig.decode().indexer_topk_output is not None
    rig.running.clear()
    rig.prefill(request(1))
    assert rig.decode().indexer_topk_output is None
    rig.running.clear()
    rig.prefill(request(3))  # the next owner of the slot
    assert not rig.worker._informed and rig.decode().indexer_topk_output is None


def test_a_finished_request_gets_no_figure_for_the_step_too_many():
    rig = Rig()
    one = request(3, asks=True)
    rig.prefill(one)
    result = rig.decode()
    one.finished = lambda: True
    told(rig, result)
    assert one.customized_info is None


def test_the_place_in_sglangs_results_is_there():
    """Copied beside the tokens, then told: by the source of SGLang's own functions."""
    import inspect

    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    assert "self.indexer_topk_output," in inspect.getsource(GenerationBatchResult.copy_to_cpu)
    source = inspect.getsource(SchedulerBatchResultProcessor.process_batch_result_decode)
    assert source.index("copy_done.synchronize()") < source.index("indexer_topk_output.finalize()")
    assert source.index("indexer_topk_output.finalize()") < source.index("req.output_ids.extend")
