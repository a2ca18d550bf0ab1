"""What a prefill leaves in the page cache, and what it must not take from it."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sparse_kv.ops.reference import COUNTERS, NONE
from sparse_rig import Rig, counters, resident, small_blocks

PAGE = 8


def test_rewritten_pages_lose_their_entries_in_every_layer_and_head():
    rig = Rig(seed=4, layers=3, pages=60, context=300, requests=2)
    rig.start(1)
    rig.extend({1: 3 * PAGE})
    rig.decode([1])
    pages = rig.owned[1][:3]
    rig.finish(1)
    before = {page: [resident(rig, layer, page) for layer in range(3)] for page in pages}
    assert all(flags == [[True, True]] * 3 for flags in before.values())
    rig.free = [page for page in rig.free if page not in pages] + pages  # handed out first
    rig.start(2)
    rig.extend({2: 2 * PAGE + 3})  # `check_selected` compares bytes in the steps that follow
    for _ in range(2 * PAGE):
        rig.decode([2])


def test_the_latest_tokens_get_the_free_slots():
    """Whatever numbers their pages have: the next step wants the end of the text."""
    rig = Rig(seed=5, layers=1, pages=60, context=300, requests=1)
    least = rig.runtime.shape.width
    rig.runtime.apply_policy({"cache_slots": least})
    rig.start(1)
    pages = least + 5
    rig.free = sorted(rig.free)  # the last page is handed out first, so the text runs down through the pool
    rig.extend({1: pages * PAGE - 2})
    owned = rig.owned[1]
    assert owned == sorted(owned, reverse=True) and len(owned) == pages
    assert [all(resident(rig, 0, page)) for page in owned] == [False] * 5 + [True] * least


def test_prefill_spares_what_decode_selected():
    rig = Rig(seed=6, layers=1, pages=120, context=500, requests=2)
    rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width})
    rig.start(1)
    rig.extend({1: 200})
    for _ in range(3):
        rig.decode([1])
    view = rig.runtime.cache.views[0]
    newest = view.stamp == rig.runtime.clock
    chosen = view.page_of[newest].clone()
    assert len(chosen) == 2 * rig.runtime.shape.width
    rig.start(2)
    rig.extend({2: 300})
    assert torch.equal(view.page_of[newest], chosen)
    missed = counters(rig)["missed"]
    rig.decode([1])
    assert counters(rig)["missed"] >= missed


def test_a_prefill_is_no_miss_and_no_traffic():
    rig = Rig(seed=7, layers=2, pages=60, context=300, requests=1)
    rig.start(1)
    for tokens in (40, 3, 50):
        rig.extend({1: tokens})
    counted = counters(rig)
    assert counted.pop("prefix_cache") == 2 * 2 * (5 + 6), "pages of 40 and of 43 tokens, in 2 layers and 2 heads"
    assert not any(counted.values())
    rig.decode([1])
    counted = counters(rig)
    assert counted["missed"] == 0 and counted["hit"] == counted["selected"], "the chunks were kept"


def test_a_prefix_is_read_where_it_is():
    """Resident units from their slots, the rest from the host: counted, and wrong bytes in a slot show."""
    rig = Rig(seed=11, layers=2, pages=60, context=300, requests=1)
    least = rig.runtime.shape.width
    rig.runtime.apply_policy({"cache_slots": least})
    rig.start(1)
    rig.extend({1: 20 * PAGE})
    rig.extend({1: 3})
    counted = counters(rig)
    assert counted["prefix_cache"] == 4 * least and counted["prefix_host"] == 4 * (20 - least)
    rig.runtime.flush()
    rig.extend({1: 3})
    counted = counters(rig)
    assert counted["prefix_cache"] == 4 * least and counted["prefix_host"] == 4 * (20 - least + 21)
    for slots in rig.runtime.cache.buffers():
        slots.kv.add_(1.0)
    with pytest.raises(AssertionError):
        rig.extend({1: 1})


def test_what_a_radix_hit_brings_stays():
    """After the cache was emptied, a prefill of a few tokens brings the whole prefix, and decode misses nothing."""
    rig = small_blocks(Rig(seed=10, layers=3, pages=60, context=300, requests=2, residency=[0, 2]), 2)
    rig.start(1)
    rig.extend({1: 12 * PAGE})
    rig.decode([1])
    rig.fork(2, 1, 12 * PAGE)
    rig.finish(1)
    rig.runtime.flush()
    rig.runtime.reset_counters()
    rig.extend({2: 3})
    assert counters(rig)["prefix_host"] == 3 * 2 * 12 and counters(rig)["prefix_cache"] == 0
    for page in rig.owned[2]:
        assert [all(resident(rig, layer, page)) for layer in (0, 2)] == [True, True]
    for _ in range(5):
        rig.decode([2])
    assert rig.runtime.cache.counters[[0, 2], COUNTERS.index("missed")].tolist() == [0, 0]


def test_what_a_prefill_writes_goes_before_its_prefix():
    """In a cache of one selection, the page that decode goes on in is there: it is nobody's miss."""
    rig = small_blocks(Rig(seed=14, layers=2, pages=90, context=400, requests=1), 2)
    rig.start(1)
    rig.extend({1: 30 * PAGE})
    rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width})
    rig.extend({1: PAGE + 3})
    for page in rig.owned[1][-2:]:
        assert [all(resident(rig, layer, page)) for layer in (0, 1)] == [True, True]
    rig.runtime.reset_counters()
    rig.decode([1])
    counted = counters(rig)
    assert counted["selected"] == counted["hit"] + counted["missed"]


def hits_beside_a_prefill(prefill: bool, spares: bool = True) -> float:
    """Share of their selection that two running requests find cached, while a third brings a long prompt, or not."""
    # Without hysteresis, so that selections change.
    rig = small_blocks(Rig(seed=20, layers=2, pages=300, context=1700, requests=3, hysteresis=0), 8)
    if not spares:
        rig.runtime.clock_long_ago = rig.runtime.clock_prefix = rig.runtime.clock
    rig.runtime.apply_policy({"cache_slots": 5 * rig.runtime.shape.width})
    for req in (1, 2, 3):
        rig.start(req)
    rig.extend({1: 240, 2: 230})
    rand = torch.Generator().manual_seed(0)
    rows, heads = 2 * rig.runtime.rows, rig.geometry.kv_heads * rig.geometry.group
    draw = lambda *shape: torch.randn(*shape, generator=rand)  # noqa: E731
    lasting = [2 * draw(rows, heads, rig.geometry.head_dim) for _ in range(2)]
    for step in range(40):
        if step == 15:
            rig.runtime.reset_counters()
        if prefill and step >= 15:
            rig.extend({3: 64})
        kv = [draw(rows, rig.geometry.kv_heads, rig.geometry.head_dim) for _ in range(2)]
        rig.decode([1, 2], data=[(q + draw(*q.shape), *kv) for q in lasting])
    counted = counters(rig)
    return counted["hit"] / counted["selected"]


def test_running_requests_keep_their_hits_beside_a_long_prefill():
    """A prompt larger than the cache, in chunks between their steps, costs them less than five points."""
    alone, beside = hits_beside_a_prefill(False), hits_beside_a_prefill(True)
    assert alone > 0.8 and abs(alone - beside) < 0.05
    assert hits_beside_a_prefill(True, spares=False) < beside - 0.05, "taking what was used lately would show"


def test_a_radix_hit_spares_what_decode_selected():
    rig = small_blocks(Rig(seed=11, layers=1, pages=120, context=500, requests=2), 2)
    for req, pages in ((1, 25), (2, 20)):
        rig.start(req)
        rig.extend({req: pages * PAGE})
    rig.runtime.apply_policy({"cache_slots": rig.runtime.shape.width + 3})
    for _ in range(3):
        rig.decode([2])
    view = rig.runtime.cache.views[0]
    newest = view.stamp == rig.runtime.clock
    kept = view.page_of[newest].clone()
    rig.extend({1: 5})
    assert torch.equal(view.page_of[newest], kept)
    assert bool((view.page_of >= 0)[view.stamp < 2**31 - 1].all()), "what was free is used"


def test_a_continued_page_keeps_its_slot():
    rig = Rig(seed=12, layers=2, pages=60, context=300, requests=1)
    rig.start(1)
    rig.extend({1: PAGE + 3})
    for tokens in (2, 1, 1, PAGE):
        rig.extend({1: tokens})
        rig.runtime.cache.check()
        pages = rig.owned[1][: -(-rig.length(1) // PAGE)]
        assert all(resident(rig, layer, page) == [True, True] for layer in range(2) for page in pages)
    rig.decode([1])
    assert counters(rig)["missed"] == 0


def test_a_new_owner_inherits_no_prediction():
    rig = Rig(seed=8, layers=3, pages=90, context=300, requests=2, residency="none")
    rig.start(1)
    rig.extend({1: 150})
    rig.start(2)
    rig.extend({2: 150})
    rig.decode([1, 2])
    assert bool((rig.runtime.predicted[1:3] != NONE).any(-1).all())
    kept = rig.runtime.predicted[2].clone()
    rig.finish(1)
    rig.start(1)
    rig.extend({1: 3})
    assert bool((rig.runtime.predicted[1] == NONE).all()) and torch.equal(rig.runtime.predicted[2], kept)
