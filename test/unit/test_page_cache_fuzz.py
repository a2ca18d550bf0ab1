"""The page cache under random steps, prefills and flushes, against a model in plain loops.

Every buffer starts full of junk, so that whatever an operation forgets to write shows.
"""

from __future__ import annotations

import torch
from cache_rig import FULL, PAGES, clock, make_cache, rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sglang.srt.sparse_kv.ops import reference, reference_prefill
from sglang.srt.sparse_kv.ops.reference import COUNTERS, NEVER, NONE, CapacityError, Fetch, Prefetch


class Head:
    """One head's slots: page (or NONE), stamp and 'ahead' of each, and the rules of DESIGN in plain loops."""

    def __init__(self, slots: int):
        self.slots = [[NONE, NEVER, False] for _ in range(slots)]

    def find(self, page: int) -> int:
        return next((i for i, slot in enumerate(self.slots) if slot[0] == page), NONE)

    def victims(self, step: int) -> list[int]:
        return sorted((i for i, slot in enumerate(self.slots) if slot[1] < step), key=lambda i: self.slots[i][1])


class Model:
    def __init__(self, heads: int, slots: int):
        self.heads = [Head(slots) for _ in range(heads)]
        self.count = dict.fromkeys(COUNTERS, 0)
        self.entered = self.left = 0

    def enter(self, h: int, wanted: list[tuple[int, int]], step: int, ahead: bool, must: bool) -> list[tuple]:
        """wanted: (page, tokens) in order. Returns fetch rows."""
        head = self.heads[h]
        victims = head.victims(step)
        if must and len(wanted) > len(victims):
            raise CapacityError
        out = []
        for (page, tokens), slot in zip(wanted, victims):
            if head.slots[slot][0] != NONE:
                self.count["evicted"] += 1
                self.count["wasted"] += head.slots[slot][2]
            head.slots[slot] = [page, step, ahead]
            self.count["prefetched" if ahead else "missed"] += tokens > 0
            self.count["tokens_in"] += tokens
            self.entered += 1
            out.append((page, h, slot, tokens))
        return out

    def resolve(self, pages, tokens, step: int, count: bool = True) -> list[tuple]:
        """pages: [N][H] lists, tokens: {page: committed}. All hits before any victim."""
        missing: list[dict[int, int]] = [{} for _ in self.heads]
        hits: list[set[int]] = [set() for _ in self.heads]
        for request in pages:
            for h, selected in enumerate(request):
                for page in selected:
                    slot = self.heads[h].find(page)
                    if slot == NONE:
                        missing[h][page] = tokens.get(page, FULL)
                    else:
                        hits[h].add(slot)
                    if count:
                        self.count["selected"] += 1
                        self.count["hit"] += slot != NONE
        for h, used in enumerate(hits):
            for slot in used:
                self.count["useful"] += self.heads[h].slots[slot][2]
                self.heads[h].slots[slot][1:] = [step, False]
        return [row for h, m in enumerate(missing) for row in self.enter(h, sorted(m.items()), step, False, True)]

    def prefetch(self, pages, step: int, cap: int) -> list[tuple]:
        wanted: list[dict[int, tuple]] = [{} for _ in self.heads]  # page -> (rank, request)
        for n, request in enumerate(pages):
            for h, predicted in enumerate(request):
                taken = 0
                for rank, page in enumerate(predicted):
                    slot = self.heads[h].find(page)
                    if slot != NONE:
                        self.heads[h].slots[slot][1] = max(self.heads[h].slots[slot][1], step)
                    elif (taken := taken + 1) <= cap:
                        wanted[h][page] = min(wanted[h].get(page, (rank, n)), (rank, n))
        ordered = [[(page, FULL) for page in sorted(w, key=w.get)] for w in wanted]
        return [row for h, w in enumerate(ordered) for row in self.enter(h, w, step, True, False)]

    def drop(self, pages: set[int] | None) -> None:
        """Invalidates pages; all of them when None."""
        for head in self.heads:
            for slot in head.slots:
                if slot[0] != NONE and (pages is None or slot[0] in pages):
                    self.count["wasted"] += slot[2]
                    self.left += 1
                    slot[:] = [NONE, NEVER, False]

    def install(self, pages: list[tuple[int, int]], step: int) -> list[tuple]:
        before = self.count["missed"], self.count["tokens_in"]
        out = [row for h in range(len(self.heads)) for row in self.enter(h, pages[::-1], step, False, False)]
        self.count["missed"], self.count["tokens_in"] = before
        return out


# Requests' selections: two heads' lists of distinct pages; a request may be padding (no pages at all).
SELECTIONS = st.lists(
    st.tuples(*[st.lists(st.integers(1, PAGES - 1), max_size=4, unique=True) for _ in range(2)]), max_size=3
)


def as_tensor(requests) -> torch.Tensor:
    out = torch.full((len(requests), 2, 5), NONE, dtype=torch.int32)
    for n, request in enumerate(requests):
        for h, pages in enumerate(request):
            out[n, h, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return out


class CacheMachine(RuleBasedStateMachine):
    """Random decode steps, prefills and flushes: tables, fetches and counters equal the model's after each."""

    @initialize(spare=st.integers(0, 2))
    def start(self, spare):
        self.slots = 12 + spare  # three selections of four pages: the capacity rule, exactly or almost
        self.cache = make_cache(self.slots, heads=2)
        self.view = self.cache.views[0]
        self.model = Model(2, self.slots)
        self.step = 100
        self.filled: dict[int, int] = {}  # committed tokens of pages that a prefill left unfilled

    def land(self, fetch: Fetch, expected: list[tuple]) -> None:
        assert rows(fetch) == expected
        fetch.units = torch.cat([fetch.units, torch.full((3, 4), 2**30, dtype=torch.int32)])  # junk beyond count
        before = self.view.kv.clone()
        reference.gather(self.view, fetch)
        for page, head, slot, tokens in expected:
            before[head, slot, :, :tokens] = self.view.host[page, head, :, :tokens]
        assert torch.equal(self.view.kv.nan_to_num(-1), before.nan_to_num(-1)), "a copy touched what it must not"

    @rule(requests=SELECTIONS)
    def select(self, requests):
        self.step += 1
        slots, fetch = reference.resolve(self.view, as_tensor(requests), None, clock(self.step))
        self.land(fetch, self.model.resolve(requests, {}, self.step))
        for n, request in enumerate(requests):
            for h, pages in enumerate(request):
                expected = [self.model.heads[h].find(page) for page in pages]
                assert slots[n, h].tolist() == expected + [NONE] * (5 - len(pages))
                for page, slot in zip(pages, expected):
                    filled = self.filled.get(page, FULL)
                    assert torch.equal(self.view.kv[h, slot, :, :filled], self.view.host[page, h, :, :filled])

    @rule(requests=SELECTIONS, back=st.integers(0, 1), cap=st.integers(0, 3))
    def predict(self, requests, back, cap):
        fetch = reference.plan_prefetch(Prefetch(self.view, as_tensor(requests), clock(self.step - back), cap))
        self.land(fetch, self.model.prefetch(requests, self.step - back, cap))

    @rule(pages=st.lists(st.integers(1, PAGES - 1), max_size=4), tokens=st.integers(1, FULL))
    def prefill(self, pages, tokens):
        """A chunk writes pages (repeats: two chunks of one page), the last one up to `tokens`."""
        reference.invalidate(self.view, torch.tensor([*pages, NONE], dtype=torch.int64))
        self.model.drop(set(pages))
        written = list(dict.fromkeys(pages))
        filled = [FULL] * (len(written) - 1) + [tokens] * bool(written)
        self.filled |= dict(zip(written, filled))
        chunk = torch.tensor(written).long(), torch.tensor(filled).long()
        fetch = reference_prefill.install(self.view, *chunk, clock(self.step - 2))
        self.land(fetch, self.model.install(list(zip(written, filled)), self.step - 2))

    @rule()
    def flush(self):
        self.cache.flush()
        self.model.drop(None)

    @invariant()
    def equal(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for h, head in enumerate(self.model.heads):
            found = list(zip(*(t[h].tolist() for t in (self.view.page_of, self.view.stamp, self.view.ahead))))
            assert found == [tuple(slot) for slot in head.slots]
        count = dict(zip(COUNTERS, self.view.counters.tolist()))
        assert count == self.model.count
        resident = sum(slot[0] != NONE for head in self.model.heads for slot in head.slots)
        waiting = sum(slot[2] for head in self.model.heads for slot in head.slots)
        assert self.model.entered == resident + count["evicted"] + self.model.left
        assert count["prefetched"] == count["useful"] + count["wasted"] + waiting
        assert count["selected"] >= count["hit"] + count["missed"]


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
