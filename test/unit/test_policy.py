"""Run-time policy: what may be said, one sentence for all else, and switches that leave nothing behind."""

from __future__ import annotations

import random

import pytest
import torch
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.policy import GUIDES, TRANSFERS, Policy
from sglang.srt.sparse_kv.transfer import CPU_TRANSFERS
from sparse_rig import Rig

STARTED = SparseKVConfig.from_dict({"budget": 200, "residency": [1, 2], "prefetch_cap": 0.5, "seed": 7})
PAGE = 16


def changed(**update) -> Policy:
    return Policy.from_config(STARTED).changed(update, STARTED, PAGE)


def test_the_policy_of_the_start_is_a_policy():
    """A server may start with a budget that is no multiple of the page; switching anything else must still work."""
    start = Policy.from_config(STARTED)
    assert changed() == start and changed(check=1).check
    assert (start.budget, start.residency, start.prefetch_cap, start.seed) == (200, (1, 2), 0.5, 7)
    assert changed(budget=start.budget, prefetch_cap=start.prefetch_cap, residency=list(start.residency)).budget == 200


@pytest.mark.parametrize("names", [("guide", GUIDES), ("transfer", TRANSFERS)])
def test_names_may_be_given_by_their_place(names):
    key, allowed = names
    for place, name in enumerate(allowed):
        for value in (name, place, float(place)):
            assert getattr(changed(**{key: value}), key) == name


def test_rows_by_number_are_what_they_say():
    assert [changed(rows=value).rows for value in (0.0, 1.0, 2.0, "auto", 1, 2)] == ["auto", 1, 2, "auto", 1, 2]
    one = SparseKVConfig.from_dict({"guide": "none", "rows": 2})
    assert (Policy.from_config(one).rows, Policy.from_config(one).skip_scores) == (1, False)
    with pytest.raises(ValueError, match="started for one row a request"):
        Policy.from_config(one).changed({"rows": 2}, one, PAGE)
    auto = Policy.from_config(SparseKVConfig.from_dict({"rows": "auto"}))
    assert (auto.rows, auto.skip_scores) == ("auto", True)


def test_numbers_arrive_as_floats():
    """SGLang's endpoint carries numbers, and JSON does not tell 2 from 2.0."""
    new = changed(budget=64.0, cache_slots=3.0, seed=-5, prefetch=0.0, prefetch_cap=1, residency=1)
    assert (new.budget, new.cache_slots, new.seed, new.prefetch) == (64, 3, -5, False)
    assert type(new.budget) is type(new.cache_slots) is int and new.prefetch is False


@pytest.mark.parametrize(
    "update",
    [
        {"budget": 15},
        {"budget": 201},
        {"budget": 0},
        {"budget": -16},
        {"budget": 64.5},
        {"budget": "64"},
        {"budget": None},
        {"budget": True},
        {"budget": float("nan")},
        {"budget": float("inf")},
        {"whole": 1},
        {"whole": -1},
        {"whole": 0.5},
        {"whole": "auto"},
        {"cache_slots": 1.5},
        {"seed": "x"},
        {"prefetch_cap": 1.01},
        {"prefetch_floor": 1.01},
        {"prefetch_cap": -0.1},
        {"prefetch_cap": "all"},
        {"prefetch_cap": float("nan")},
        {"prefetch_cap": True},
        {"prefetch": 2},
        {"prefetch": "yes"},
        {"check": None},
        {"guide": "oracle"},
        {"guide": 7},
        {"guide": 1.5},
        {"guide": True},
        {"guide": [1]},
        {"transfer": -1},
        {"rows": 3},
        {"rows": "two"},
        {"skip_scores": 2},
        {"transfer": "fast"},
        {"windows": 3},
        {"": 1},
    ],
    ids=str,
)
def test_bad_values_are_one_sentence(update):
    with pytest.raises(ValueError, match=r"^(unknown )?sparse_kv policy [^\n]+$"):
        changed(**update)


def test_a_budget_brings_what_is_whole_at_its_start():
    """A lower budget for an experiment is kept to, unless what is whole is said with it or was at the start."""
    started = SparseKVConfig.from_dict({})
    policy = Policy.from_config(started)
    assert policy.whole == 2048
    small = policy.changed({"budget": 96}, started, PAGE)
    assert small.whole == 0 and small.changed({"seed": 3}, started, PAGE).whole == 0
    assert small.changed({"budget": 1664.0}, started, PAGE).whole == 2048
    both = policy.changed({"budget": 96, "whole": 400.0}, started, PAGE)
    assert both.whole == 400 and type(both.whole) is int
    assert both.changed({"seed": 3}, started, PAGE).whole == 400
    with pytest.raises(ValueError, match="whole must be from 0 to the 2048 tokens of the start, got 2049"):
        policy.changed({"whole": 2049}, started, PAGE)
    named = SparseKVConfig.from_dict({"whole": 300})
    assert Policy.from_config(named).changed({"budget": 96}, named, PAGE).whole == 300


def test_every_transfer_has_an_engine():
    assert set(TRANSFERS) == set(CPU_TRANSFERS)


# ---------------------------------------------------------------- on a running cache


@pytest.fixture
def rig() -> Rig:
    rig = Rig(seed=1, layers=4, pages=120, context=500, requests=2)
    for req, length in ((1, 250), (2, 90)):
        rig.start(req)
        rig.extend({req: length})
    return rig


def test_without_debug_nothing_may_be_switched():
    rig = Rig(debug=False)
    with pytest.raises(
        ValueError, match=r"fixed in this server; start it with --sparse-kv-config '\{\"debug\": true\}'"
    ):
        rig.runtime.apply_policy({"prefetch": 0})


def test_a_refused_update_changes_nothing(rig):
    runtime = rig.runtime
    rig.decode([1, 2])
    for refused in (
        {"residency": "half", "prefetch": 0},
        {"residency": [4], "transfer": "delayed"},
        {"residency": True},
        {"cache_slots": runtime.shape.width - 1, "prefetch": 0},
        {"cache_slots": runtime.plan.slots + 1},
        {"cache_slots": -1},
        {"budget": runtime.config.budget + 8, "prefetch": 0},
        {"prefetch": 0, "nonsense": 1},
    ):
        before = runtime.policy, runtime.transfer, runtime.shape, int(runtime.prefetch_cap), list(runtime.cache.scoped)
        tables = [buffer.page_of.clone() for buffer in runtime.cache.buffers()]
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            runtime.apply_policy(refused)
        after = runtime.policy, runtime.transfer, runtime.shape, int(runtime.prefetch_cap), list(runtime.cache.scoped)
        assert before == after and all(a is b for a, b in zip(before[:2], after[:2]))
        assert all(torch.equal(a, b.page_of) for a, b in zip(tables, runtime.cache.buffers()))
    rig.decode([1, 2])


@pytest.mark.parametrize("seed", range(3))
def test_switches_in_any_order_between_steps(rig, seed):
    """Residency, budget, slots and transfers change under running requests: time is lost, never correctness."""
    draw = random.Random(seed)
    width = rig.runtime.shape.width
    for _ in range(14):
        update = {
            "budget": draw.choice([8, 16, 32]),
            "residency": draw.choice(["all", "none", 0.5, [0, 3], [2], 0, 1]),
            "cache_slots": draw.choice([0, 2 * width, 3 * width]),
            "transfer": draw.choice(["plain", "delayed", "reordered", "failing"]),
            "prefetch": draw.choice([0, 1]),
            "prefetch_cap": draw.choice([0, 0.3, 1]),
            "shuffle_predictions": draw.choice([0, 1]),
            "seed": draw.randrange(100),
            "check": 1,
        }
        keys = draw.sample(sorted(update), draw.randint(1, len(update)))
        rig.runtime.apply_policy({key: update[key] for key in keys})
        rig.runtime.cache.check()
        for _ in range(2):
            rig.decode([1, 2])
        rig.extend({draw.choice([1, 2]): draw.randint(1, 9)})


def test_the_whole_context_fits_even_if_the_selection_could_be_wider():
    """A budget beyond the context: one selection is the context, and that many slots are enough."""
    rig = Rig(seed=1, budget=400, pages=60, context=100, requests=1)
    rig.runtime.apply_policy({"cache_slots": rig.geometry.max_pages})
    rig.start(1)
    rig.extend({1: 95})
    for _ in range(4):
        rig.decode([1])
    with pytest.raises(ValueError, match=f"within {rig.geometry.max_pages} "):
        rig.runtime.apply_policy({"cache_slots": rig.geometry.max_pages - 1})


def test_no_prefetch_fetches_nothing_ahead(rig):
    rig.runtime.apply_policy({"prefetch": 0, "residency": 0.5})
    for _ in range(3):
        rig.decode([1, 2])
    total = rig.runtime.summary()["total"]
    assert total["prefetched"] == total["useful"] == total["wasted"] == 0 < total["missed"]


def test_a_cap_of_nothing_still_fetches_forced_pages(rig):
    """The cap is on predictions. Scoped layers need their forced pages in every step, known without any guess."""
    rig.runtime.apply_policy({"prefetch_cap": 0, "residency": "none"})
    rig.decode([1, 2])
    rig.decode([1, 2])
    total = rig.runtime.summary()["total"]
    forced = rig.runtime.shape.forced_pages
    assert 0 < total["prefetched"] <= 2 * 2 * 4 * 2 * forced and total["missed"] > 0
