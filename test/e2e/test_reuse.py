"""Host pages that change owner: a pool of two requests, everything resident, the smallest legal cache, freed pages
poisoned.

Every answer has to be that of a server that never saw another text. The sabotage at the end shows that these tests can
fail: with one protection taken away they read what an earlier owner left.
"""

from __future__ import annotations

import pytest
from checks import assert_same_tokens, ids
from serving import Answer, Server
from texts import chat, excerpt

TOKENS = 16
SELECTION = 6 + 1 + 5  # pages: budget, sink, window with the open page
# Three texts of about 700 tokens; the pool holds two of them.
TEXTS = [
    chat(excerpt("records", 1600, 1000) + "\n\nName the most expensive of these items."),
    chat(excerpt("licence", 3250, 2000) + "\n\nSum up the duties that follow from this text."),
    chat(excerpt("code", 2050, 3000) + "\n\nDescribe this program."),
]
ORDER = (0, 1, 2, 0, 2, 1)
POISONED = {"poison": True, "check": True}


@pytest.fixture(scope="module")
def cold(fleet) -> list[Answer]:
    """Each text alone after a flush."""
    server = fleet.server("pair")
    server.policy()
    answers = []
    for text in TEXTS:
        server.flush()
        answers.append(server.ask(text, TOKENS))
    pool = server.info()["max_total_num_tokens"]
    needed = [a.prompt_tokens + TOKENS for a in answers]
    assert max(sum(needed) - need for need in needed) <= pool < sum(needed), f"{needed} in a pool of {pool}"
    return answers


def in_turn(server: Server, turns: int = len(ORDER)) -> list[Answer]:
    server.flush()
    return [server.ask(TEXTS[i], TOKENS) for i in ORDER[:turns]]


def host_to_cache(server: Server) -> float:
    """Host KV in multiples of the page cache."""
    summary = server.counters()
    slots = summary["policy"]["cache_slots"] or summary["plan"]["slots"]
    return summary["plan"]["host_tokens"] / 16 / slots


def test_the_cache_is_the_smallest_legal_one(pair: Server):
    plan = pair.counters()["plan"]
    assert plan["max_running_requests"] == 2
    assert plan["slots"] == 2 * (SELECTION + 1) + plan["prefetch_headroom"]


@pytest.mark.parametrize("transfer", [pytest.param("plain", marks=pytest.mark.slow), "reordered"])
def test_pages_reused_under_poison_give_the_cold_text(pair: Server, cold: list[Answer], transfer: str):
    pair.policy(**POISONED, transfer=transfer)
    answers = in_turn(pair)
    assert_same_tokens(answers, [cold[i] for i in ORDER], "pages of other texts")
    # The pool is too small to keep a text until its next turn, except for the one that was used last but one.
    assert sum(a.cached_tokens == 0 for a in answers) >= 4
    totals = pair.totals()
    assert min(totals[name] for name in ("evicted", "useful", "missed")) > 0


def test_two_at_once_under_poison(pair: Server, cold: list[Answer]):
    pair.policy(**POISONED)
    for first, second in ((1, 2), (2, 0)):
        both = pair.ask_all([TEXTS[first], TEXTS[second]], TOKENS)
        assert_same_tokens(both, [cold[first], cold[second]], "two at once")


# ------------------------------------------------------------------ sabotage

# Few slots, so that host KV is four times the cache; enough for entries of a text to outlive it, and for prefetches
# beside one selection.
SMALL_CACHE = {"cache_slots": 2 * SELECTION}


@pytest.mark.slow
def test_skipped_invalidation_is_noticed(pair: Server, cold: list[Answer]):
    """A page's cache entry that outlives its contents: the next owner of the page reads poison."""
    pair.policy(**SMALL_CACHE, poison=True, skip_invalidation=True)
    assert host_to_cache(pair) >= 4
    answers = in_turn(pair, 3)
    assert answers[0].ids == cold[0].ids, "the first text has no earlier owner to read"
    # The second text already gets pages back: those of the first one's unfinished end.
    assert ids(answers[1:]) != ids(cold[1:])
    totals = pair.totals()
    assert min(totals[name] for name in ("evicted", "useful", "missed")) > 0
    pair.policy(**SMALL_CACHE, poison=True)
    assert_same_tokens(in_turn(pair, 3), cold, "after the sabotage")


def turns(server: Server) -> Answer:
    """A second turn on top of a first one, whose pages it finds in the radix cache."""
    server.flush()
    first = server.ask(TEXTS[0], TOKENS)
    totals = server.totals()
    assert min(totals[name] for name in ("evicted", "useful", "missed")) > 0
    server.policy(poison=True, **SMALL_CACHE)  # empties the page cache: what the second turn reads is on the host
    second = server.ask(TEXTS[0] + first.text + "<|im_end|>\n" + chat("And the cheapest one?"), TOKENS)
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16
    return second


def test_skipped_write_through_is_noticed(pair: Server):
    pair.policy(poison=True, **SMALL_CACHE)
    assert host_to_cache(pair) >= 4
    honest = turns(pair)
    pair.policy(poison=True, skip_write_through=True, **SMALL_CACHE)
    wrong = turns(pair)
    assert wrong.ids != honest.ids
    pair.policy(poison=True, **SMALL_CACHE)
    assert turns(pair).ids == honest.ids
