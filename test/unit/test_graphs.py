"""Which runner replays which kind of step, with a class in the place of SGLang's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.sparse_kv import graphs, planner
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.variants import Variant

SHAPE = SelectionShape.from_tokens(16, budget=64, sinks=16, window=16)  # 7 pages wide


class Runner:
    """Captures what the runtime stands at, in the sizes of the moment."""

    def __init__(self, model_runner, *, speculative_num_draft_tokens=2):
        self.width = speculative_num_draft_tokens
        self.variant = model_runner.runtime.variant
        self.capture_bs = list(model_runner.server_args.cuda_graph_config.decode.bs)
        assert self.variant.rows == self.width


@pytest.fixture(autouse=True)
def on_any_machine(monkeypatch):
    monkeypatch.setattr(graphs, "DecodeCudaGraphRunner", Runner)
    monkeypatch.setattr(graphs.torch.cuda, "mem_get_info", lambda: (0, 0))


def model_of(rows="auto", most_rows=2, slots=340, sizes=(1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 30), runner=Runner):
    started = Variant.TWO_ROWS if most_rows == 2 else Variant.ONE_ROW
    runtime = SimpleNamespace(
        config=SimpleNamespace(rows=rows),
        started=started,
        variant=started,
        cache=SimpleNamespace(slots=slots),
        shape=SHAPE,
        most_alone=None,
    )
    decode = SimpleNamespace(bs=list(sizes))
    model = SimpleNamespace(
        runtime=runtime,
        server_args=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=decode)),
        decode_cuda_graph_runner=None,
    )
    model.decode_cuda_graph_runner = runner(model, speculative_num_draft_tokens=most_rows) if runner else object()
    return model, runtime


def test_each_kind_of_step_has_a_runner_of_its_width():
    model, runtime = model_of()
    first = model.decode_cuda_graph_runner
    made = graphs.StepGraphs(model, runtime)
    assert runtime.variant is Variant.TWO_ROWS and runtime.most_alone == 24  # that many requests of two selections fit
    sizes = {Variant.ONE_ROW: [1, 2, 3, 4, 8, 16, 24], Variant.ALL_PAGES: [1, 2, 3, 4, 8, 16, 24, 30]}
    for variant, expected in sizes.items():
        made.select(variant)
        chosen = model.decode_cuda_graph_runner
        assert (chosen.variant, chosen.width, chosen.capture_bs) == (variant, 1, expected)
    made.select(Variant.TWO_ROWS)
    assert model.decode_cuda_graph_runner is first
    assert model.server_args.cuda_graph_config.decode.bs == first.capture_bs


def test_what_the_graphs_take_is_counted(monkeypatch):
    free = iter([100, 70, 70, 58, 58, 50, 50, 45])  # before and after each of two captures, twice
    monkeypatch.setattr(graphs.torch.cuda, "mem_get_info", lambda: (next(free), 1000))
    model, runtime = model_of()
    made = graphs.StepGraphs(model, runtime)
    assert made.nbytes == 30 + 12
    model.decode_cuda_graph_runner = Runner(model)
    made.select(Variant.TWO_ROWS)
    assert made.nbytes == 8 + 5, "captured anew"


def test_a_server_of_one_width_captures_nothing_more():
    for rows, most_rows in ((2, 2), (1, 1)):
        model, runtime = model_of(rows, most_rows)
        first = model.decode_cuda_graph_runner
        made = graphs.StepGraphs(model, runtime)
        for variant in Variant:
            made.select(variant)
            assert model.decode_cuda_graph_runner is first
        assert runtime.most_alone is None


def test_without_a_guide_scores_are_what_can_be_skipped():
    model, runtime = model_of(most_rows=1)
    first = model.decode_cuda_graph_runner
    made = graphs.StepGraphs(model, runtime)
    made.select(Variant.ONE_ROW)
    assert model.decode_cuda_graph_runner is first and runtime.most_alone is None
    made.select(Variant.ALL_PAGES)
    assert model.decode_cuda_graph_runner.variant is Variant.ALL_PAGES


def test_a_kind_without_graphs_gets_those_of_another_width():
    """SGLang's runner refuses them and the step runs without; a graph of the same width would be replayed wrongly."""
    model, runtime = model_of(slots=10)
    made = graphs.StepGraphs(model, runtime)
    assert runtime.most_alone == 0
    made.select(Variant.ALL_PAGES)
    made.select(Variant.ONE_ROW)
    assert model.decode_cuda_graph_runner.width == 2


def test_new_weights_are_captured_for_all():
    model, runtime = model_of()
    made = graphs.StepGraphs(model, runtime)
    made.select(Variant.ALL_PAGES)
    old, model.decode_cuda_graph_runner = model.decode_cuda_graph_runner, Runner(model)
    made.select(Variant.ALL_PAGES)
    assert model.decode_cuda_graph_runner is not old
    assert model.decode_cuda_graph_runner.variant is Variant.ALL_PAGES


def test_without_graphs_there_is_nothing_to_choose():
    model, runtime = model_of(runner=None)
    eager = model.decode_cuda_graph_runner
    made = graphs.StepGraphs(model, runtime)
    for variant in Variant:
        made.select(variant)
        assert model.decode_cuda_graph_runner is eager
    assert runtime.most_alone is None


def test_few_sizes_are_captured_again():
    assert planner.graph_sizes([*range(1, 9), *range(10, 33, 2), 37]) == [1, 2, 3, 4, 8, 16, 24, 32, 37]
    assert planner.graph_sizes(range(40, 130)) == [48, 64, 96, 128, 129]
