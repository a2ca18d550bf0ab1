"""Every server that the tests start, in the order in which they run."""

from __future__ import annotations

import torch
from serving import Kind
from sglang.srt.sparse_kv import planner
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape

PAGE = 16
PAIR_TOKENS, PAIR_BUDGET = 1536, 96
SMALL_POOL_TOKENS = 1024


DEMO = Geometry(30, 3, 3, 64, PAGE, 0, 0, 0, torch.float32)
EIGHT = Geometry(30, 8, 3, 64, PAGE, 0, 0, 0, torch.float32)  # the demo model as tiny_models.py inflates it
TINY = Geometry(4, 2, 4, 32, PAGE, 0, 0, 0, torch.float32)  # of tiny_models.py


def smallest_cache(budget: int, requests: int, geometry: Geometry = DEMO, **config) -> int:
    """Bytes of the page cache below which so many requests may not run, on a model of that geometry."""
    settings = SparseKVConfig.from_dict({"budget": budget, **config})
    shape = SelectionShape.from_tokens(PAGE, settings.budget, settings.sinks, settings.window)
    headroom = -(-int(settings.prefetch_cap * shape.budget_pages * 1000) // 1000)
    most = -(-(8192 + 8) // PAGE) + 1  # pages of the longest request, as the planner counts them
    slots = planner.needed_slots(requests, shape, max_pages=most, headroom=headroom)
    return slots * planner.slot_bytes(geometry, settings)


def pool(tokens: int, requests: int) -> tuple[str, ...]:
    return ("--max-total-tokens", str(tokens), "--max-running-requests", str(requests))


def _sparse(budget: int, tokens: int = 16384, requests: int = 4, flags: tuple[str, ...] = (), **config) -> Kind:
    # Contexts of tests are short: they would seldom see a second row if they did not ask for it.
    config = {"budget": budget, "cache_memory": smallest_cache(budget, requests, **config), "rows": 2, **config}
    return Kind((*pool(tokens, requests), *flags), config)


def _slots(geometry: Geometry) -> int:
    return smallest_cache(2048, 4, geometry, debug=True)


_TINY = ("qwen2", "qwen3", "mistral")
_TINY_CONFIG = {"budget": 2048, "debug": True, "cache_memory": "200MB"}

_RANKS = ("--tp-size", "2")
_EIGHT = pool(16384, 4)

KINDS: dict[str, Kind] = {
    "plain": Kind(pool(16384, 8)),
    # The one server of the fast tier: policies are switched at run time. At budget 2048 every context of that tier is
    # attended whole; smaller budgets are a policy.
    "sparse": _sparse(2048, requests=8, flags=("--enable-metrics",), debug=True),
    # A host pool of two requests and not one slot more than the capacity rule asks for two of them.
    "pair": _sparse(PAIR_BUDGET, PAIR_TOKENS, requests=2, debug=True),
    # The rest belongs to the slow tier. Started as users start them: without run-time policy, each with one setting.
    "guide-none": _sparse(512, guide="none"),
    "nothing-resident": _sparse(512, residency="none", ring=2),
    "some-resident": _sparse(512, residency=[0, 1, 7, 8, 9, 20, 29], lookahead=4, ring=4, prefetch_cap=0.5),
    "page-8": _sparse(2048, flags=("--page-size", "8"), rows="auto"),
    "page-32": _sparse(2048, flags=("--page-size", "32")),
    "retracting": Kind(
        pool(16384, 4),
        {"budget": 2048, "debug": True, "cache_memory": smallest_cache(2048, 4, debug=True)},
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"},
    ),
    # A host pool of four requests of test_admission.py, and a page cache that is smaller still.
    "small-pool": Kind(
        pool(SMALL_POOL_TOKENS, 4), {"budget": 64, "cache_memory": smallest_cache(64, 4, TINY)}, model="qwen2"
    ),
    "plain-long": Kind(pool(24576, 2)),
    "long": _sparse(8192, 24576, requests=1, debug=True, prefetch_cap=0.125),
    "long-batch": _sparse(512, 32768, requests=4, debug=True),
    # One rank and two. Memory is of each rank, so that two have half the bytes and the same slots.
    "plain-eight-heads": Kind(_EIGHT, model="tp8"),
    "one-rank": Kind(_EIGHT, {"budget": 2048, "debug": True, "cache_memory": _slots(EIGHT)}, model="tp8"),
    "two-ranks": Kind(
        (*_EIGHT, *_RANKS), {"budget": 2048, "debug": True, "cache_memory": _slots(EIGHT) // 2}, model="tp8"
    ),
    "two-replicas": Kind((*pool(8192, 4), "--dp-size", "2"), {"budget": 2048, "cache_memory": "200MB"}, model="qwen2"),
    "two-ranks-retracting": Kind(
        (*pool(8192, 4), *_RANKS),
        {"budget": 2048, "debug": True, "cache_memory": "100MB"},
        model="qwen2",
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"},
    ),
    # Requests end when they have run, or waited, for too long.
    "overdue": Kind(pool(16384, 16), _TINY_CONFIG, "qwen2", {"SGLANG_REQ_RUNNING_TIMEOUT": "5"}),
    "queueing": Kind(pool(8192, 1), _TINY_CONFIG, "qwen2", {"SGLANG_REQ_WAITING_TIMEOUT": "1"}),
    **{f"plain-{name}": Kind(pool(8192, 4), model=name) for name in _TINY},
    **{name: Kind(pool(8192, 4), _TINY_CONFIG, model=name) for name in _TINY},
}
