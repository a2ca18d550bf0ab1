"""Prefill against dense attention: chunks around page borders, long prefixes, scattered pages, odd transfers.

`Rig.extend` compares every output of every layer with dense attention over the history. What a prefill leaves in the
cache is in test_prefill_cache.py.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from sglang.srt.sparse_kv.ops import reference_attention
from sglang.srt.sparse_kv.runtime import LONG_UNUSED
from sglang.srt.sparse_kv.transfer import CPU_TRANSFERS, DelayedTransfer, Transfer
from sparse_rig import SCALE, Rig, counters, dense, resident, small_blocks

PAGE = 8
BORDERS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE)


@pytest.mark.parametrize("prefix", (0, *BORDERS, 4 * PAGE - 1, 4 * PAGE + 1))
@pytest.mark.parametrize("blocks", [1, 2])
def test_chunks_around_page_borders(prefix, blocks):
    """Chunk after chunk on an arbitrary prefix; blocks: pages in a staging slot."""
    for chunk in BORDERS:
        rig = small_blocks(Rig(seed=chunk, layers=2, pages=60, context=300, requests=1), blocks)
        rig.start(1)
        if prefix:
            rig.extend({1: prefix})
        rig.extend({1: chunk})
        rig.extend({1: 1})
        rig.runtime.cache.check()
        rig.decode([1])


def test_blocks_count_the_prefixs_tokens_in_each_page():
    """One prefill after the other: full pages are counted in one tensor for all, a page that is not full in its own."""
    prefill, table = small_blocks(Rig(page=PAGE), 2).prefill, torch.arange(1, 40, dtype=torch.int32)
    for prefix in (4 * PAGE, 3 * PAGE + 1, PAGE - 1, 2 * PAGE + 5, 4 * PAGE):
        blocks = prefill._blocks(table, prefix)
        counts = torch.cat([block.page_tokens for block in blocks]).tolist()
        assert counts == [min(PAGE, prefix - start) for start in range(0, prefix, PAGE)]
        assert sum(block.tokens for block in blocks) == prefix


@pytest.mark.parametrize("transfer", sorted(set(CPU_TRANSFERS) - {"oracle", "broken"}))
def test_a_prefix_longer_than_both_staging_slots(transfer):
    """Seven blocks take turns in two slots; a slot overwritten too early, or read too early, shows."""
    rig = small_blocks(Rig(seed=2, layers=3, pages=90, context=600, requests=2), 4)
    rig.runtime.apply_policy({"transfer": transfer, "seed": 3, "check": 1})
    rig.start(1)
    for tokens in (7 * 4 * PAGE - 5, 3, 40, 1):
        rig.extend({1: tokens})
    rig.decode([1])


def test_the_real_staging_slots_with_a_prefix_beyond_them():
    rig = Rig(seed=2, layers=1, kv_heads=1, page=32, pages=80, context=2400, requests=1)
    assert rig.prefill.staging.shape[3] == 1024
    rig.start(1)
    for tokens in (1023, 2, 1060, 5):
        rig.extend({1: tokens})


@pytest.mark.parametrize("seed", range(4))
def test_several_requests_on_scattered_and_shared_pages(seed):
    draw = random.Random(seed)
    rig = small_blocks(Rig(seed=seed, layers=2, pages=150, context=300, requests=4), 2)
    rig.runtime.apply_policy({"transfer": draw.choice(["plain", "delayed", "reordered"]), "seed": seed})
    rig.start(1)
    rig.extend({1: 70})
    rig.fork(2, 1, 64)
    rig.fork(3, 1, 8)
    rig.start(4)
    for _ in range(6):
        batch = draw.sample([1, 2, 3, 4], draw.randint(1, 4))
        rig.extend({req: draw.choice((*BORDERS, 20)) for req in batch})
        rig.runtime.cache.check()
        rig.decode([r for r in (1, 2, 3, 4) if rig.length(r)])


def test_a_chunk_is_exact_with_the_cache_full_and_with_nothing_resident():
    for residency, slots in itertools.product((1.0, 0.0, 0.5), (0, 1)):
        rig = Rig(seed=3, layers=2, pages=90, context=300, requests=1)
        rig.runtime.apply_policy({"residency": residency, "cache_slots": slots * rig.runtime.shape.width})
        rig.start(1)
        for _ in range(4):
            rig.extend({1: 50})
            rig.decode([1])


@pytest.mark.parametrize("transfer", ["plain", "delayed", "reordered"])
@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_one_batch_of_many_kinds(blocks, transfer):
    """Radix hits of several lengths, a cold prompt, a chunk of one token and a long one, in one forward."""
    rig = small_blocks(Rig(seed=blocks, layers=2, pages=150, context=300, requests=6), blocks)
    rig.runtime.apply_policy({"transfer": transfer, "seed": blocks})
    rig.start(1)
    rig.extend({1: 12 * PAGE - 1})
    for req, pages in ((2, 2), (3, 5), (4, 11)):
        rig.fork(req, 1, pages * PAGE)
    rig.start(5)
    rig.extend({1: 1, 2: PAGE - 1, 3: 1, 4: 4 * PAGE + 1, 5: PAGE})
    rig.runtime.cache.check()
    rig.extend({5: 1, 4: PAGE, 2: 2})
    rig.decode([1, 2, 3, 4, 5])


def one_brings_what_the_other_reads(transfer: Transfer) -> None:
    """Two requests on one prefix, of which nothing is resident: the second finds the slots that the first was given."""
    rig = Rig(seed=14, layers=2, pages=60, context=300, requests=3)
    rig.start(1)
    rig.extend({1: 4 * PAGE})
    for req in (2, 3):
        rig.fork(req, 1, 4 * PAGE)
    rig.runtime.flush()
    for buffer in rig.runtime.cache.buffers():
        buffer.kv.fill_(float("nan"))
    rig.runtime.transfer, before = transfer, counters(rig)
    rig.extend({2: 3, 3: 5})
    units = {name: value - before[name] for name, value in counters(rig).items()}
    assert units["prefix_host"] == units["prefix_cache"] == 2 * 2 * 4
    rig.decode([2, 3])


def one_takes_the_slots_that_the_other_is_read_from(transfer: Transfer) -> None:
    """The first block is resident and old; the second is not, and slots are few."""
    rig = Rig(seed=15, layers=2, pages=90, context=400, requests=2)
    slots = rig.runtime.shape.width
    small_blocks(rig, slots).runtime.apply_policy({"cache_slots": slots})
    rig.start(1)
    rig.extend({1: 2 * slots * PAGE})
    rig.runtime.flush()
    rig.fork(2, 1, slots * PAGE)
    rig.extend({2: 1})
    for _ in range(2 * LONG_UNUSED):
        rig.runtime.tick()
    rig.runtime.transfer, before = transfer, rig.runtime.cache.views[0].page_of.clone()
    rig.extend({1: 1})
    changed = (rig.runtime.cache.views[0].page_of != before).sum()
    assert changed > 2 * (slots - 2), "the second took what the first had"
    rig.decode([1])


CROSSINGS = one_brings_what_the_other_reads, one_takes_the_slots_that_the_other_is_read_from


@pytest.mark.parametrize("transfer", sorted(set(CPU_TRANSFERS) - {"oracle", "broken"}))
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_tables_may_be_ahead_of_what_moves(crossing, transfer):
    for seed in range(8):
        crossing(CPU_TRANSFERS[transfer](seed))


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_moves_in_another_order_than_their_edits_are_wrong_text(crossing):
    """Would miss nothing: the outputs say so."""

    class Careless(DelayedTransfer):
        def submit(self, lane, copy, urgent=False, way="ahead"):
            super().submit(lane, copy, urgent, way)
            if way == "prefix" and len(staged := [owner for owner, _ in self.pending if owner[0] == "staging"]) == 2:
                self.join(staged[1])

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        crossing(Careless())


@pytest.mark.parametrize("order", ["up", "down", "far apart"])
def test_a_prefix_all_over_the_pool(order):
    rig = small_blocks(Rig(seed=5, layers=2, pages=101, context=300, requests=1), 3)
    pages = sorted(rig.free)
    free = {"up": pages[::-1], "down": pages, "far apart": [page * 37 % 101 + 1 for page in pages]}[order]
    assert sorted(free) == pages
    rig.free = free
    rig.start(1)
    rig.extend({1: 20 * PAGE - 3})
    rig.runtime.flush()
    rig.extend({1: PAGE})
    rig.extend({1: PAGE})
    rig.decode([1])


@pytest.mark.parametrize("last", [1, PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("blocks", [2, 40])
def test_up_to_the_models_longest_context(last, blocks):
    context = 15 * PAGE
    rig = small_blocks(Rig(seed=last, layers=2, pages=40, context=context, requests=1), blocks)
    rig.start(1)
    rig.extend({1: context - last})
    rig.extend({1: last})
    assert rig.length(1) == context
    for page in rig.owned[1]:
        assert [all(resident(rig, layer, page)) for layer in (0, 1)] == [True, True]


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        (6, ["stage 0", "stage 1", "own", "stage 2", "own", "own"]),  # 3 tokens go behind 5 pages: one call a layer
        (5, ["stage 0", "own", "stage 1", "prefix", "own", "stage 2", "prefix", "own", "prefix"]),
    ],
)
def test_the_next_layers_block_is_sent_before_its_layer_begins(slot, expected):
    """One block a layer: without looking over the border of a layer, none would ever be under way."""
    rig = small_blocks(Rig(seed=13, layers=3, pages=60, context=300, requests=1), slot)
    rig.start(1)
    rig.extend({1: 5 * PAGE})
    rig.runtime.flush()
    order: list[str] = []
    stage, attend = rig.runtime.ops.stage, rig.runtime.ops.attend_block

    def staging(view, *args):
        order.append(f"stage {[v is view for v in rig.runtime.cache.views].index(True)}")
        stage(view, *args)

    def attending(*args, causal, alone):
        order.append("own" if causal else "prefix")
        return attend(*args, causal=causal, alone=alone)

    rig.runtime.ops.stage, rig.runtime.ops.attend_block = staging, attending
    rig.extend({1: 3})
    assert order == expected


@pytest.mark.parametrize("chunk", [1, PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("room", [-1, 0, 1])
def test_a_chunk_that_just_fits_behind_its_prefix(chunk, room):
    """Tokens left in the staging slot when prefix and chunk are in it; with one too few, they merge."""
    rig = small_blocks(Rig(seed=chunk, layers=2, pages=60, context=300, requests=1), 4)
    rig.start(1)
    rig.extend({1: 4 * PAGE - chunk - room})
    calls: list[bool] = []
    attend = rig.runtime.ops.attend_block
    rig.runtime.ops.attend_block = lambda *args, causal, **more: (calls.append(causal), attend(*args, causal, **more))[
        1
    ]
    rig.extend({1: chunk})
    assert calls == ([True] if room >= 0 else [True, False]) * 2
    rig.decode([1])


def test_prefixes_written_by_decode():
    """A chat's second turn: its prefix was written one token at a time, its landmarks made on the way."""
    rig = small_blocks(Rig(seed=9, layers=2, pages=120, context=400, requests=3), 2)
    rig.start(1)
    rig.extend({1: 5})
    for _ in range(6 * PAGE):
        rig.decode([1])
    rig.fork(2, 1, 6 * PAGE)
    rig.finish(1)
    rig.runtime.flush()
    rig.extend({2: 11})
    for _ in range(12):
        rig.decode([2])


# ---------------------------------------------------------------- its two operations


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_blocks_merge_into_dense_attention(tokens, group):
    rand = torch.Generator().manual_seed(tokens)
    heads, dim, keys = 2, 8, (5, 1, 33)
    q = torch.randn(tokens, heads * group, dim, generator=rand) * 3
    k, v = (torch.randn(sum(keys) + tokens, heads, dim, generator=rand) * 3 for _ in range(2))
    mask = torch.arange(len(k))[None] <= sum(keys) + torch.arange(tokens)[:, None]
    expected = dense(q, k, v, mask)
    parts, start = [], 0
    for size in keys:
        block = slice(start, start := start + size)
        args = q, k[block].transpose(0, 1), v[block].transpose(0, 1)
        parts.append(reference_attention.attend_block(*args, SCALE, causal=False))
    own = q, k[start:].transpose(0, 1), v[start:].transpose(0, 1)
    parts.append(reference_attention.attend_block(*own, SCALE, causal=True))
    whole = q, k.transpose(0, 1), v.transpose(0, 1)
    torch.testing.assert_close(
        reference_attention.attend_block(*whole, SCALE, causal=True)[0], expected, atol=1e-5, rtol=1e-4
    )
    for order in itertools.permutations(parts):
        out, lse = order[0]
        for part in order[1:]:
            out, lse = reference_attention.merge(out, lse, *part)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_merging_keeps_the_side_that_matters():
    """Scores so far apart that their exponentials are beyond what float32 holds."""
    a, b = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 5.0)
    for far in (100.0, 300.0, 1e30):
        out, lse = reference_attention.merge(a, torch.tensor([[far]]), b, torch.tensor([[-far]]))
        assert torch.equal(out, a) and lse.item() == pytest.approx(far)
