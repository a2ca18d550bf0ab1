"""What an operator sees of a running server: /metrics, and the counters of one request."""

from __future__ import annotations

import re

import requests
from kinds import DEMO
from sglang.srt.sparse_kv import prometheus
from sglang.srt.sparse_kv.request_info import AHEAD, GUIDE_HIT, KEYS, MISSED
from texts import excerpt

SAMPLE = re.compile(r"^(sglang:\w+)\{(.*)\} (\S+)$", re.M)


def scrape(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name: their labels and values."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in SAMPLE.findall(requests.get(url + "/metrics", timeout=30).text):
        found.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


def total(samples: dict, name: str) -> float:
    return sum(value for _, value in samples.get(prometheus.PREFIX + name, []))


def test_a_request_shows_at_metrics(sparse):
    sparse.policy(budget=128, cache_slots=32)
    before = scrape(sparse.url)
    sparse.ask(excerpt("code", 3000), tokens=40)  # five intervals of the log; shorter requests have no guide at first
    for values in ({"budget": 128, "cache_slots": 32}, {"skip_scores": True}):  # the second selects every page
        sparse.policy(rows=1, **values)
        sparse.ask(excerpt("code", 1500), tokens=16)
    after = scrape(sparse.url)
    for name, _ in (*prometheus.LAYER_COUNTERS.values(), *prometheus.COUNTERS.values()):
        if name == "link_busy_seconds_total":
            assert total(after, name) == 0, "the CPU engine has no link"
        elif name != "prefetched_wasted_units_total":
            assert total(after, name) > total(before, name), name
    layers = {labels["layer"] for labels, _ in after[prometheus.PREFIX + "hit_units_total"]}
    assert layers == {str(layer) for layer in range(30)}
    own, theirs = after[prometheus.PREFIX + "cache_occupancy"][0][0], after["sglang:token_usage"][0][0]
    assert own == theirs, "our labels are SGLang's"
    assert 0 < total(after, "cache_occupancy") <= 1 and 0 < total(after, "host_pool_usage") <= 1


def test_a_prefill_is_stored_once(sparse):
    text = excerpt("code", 2000)
    sparse.flush()
    sparse.policy()
    cold, again = sparse.ask_each([text, text], tokens=1)
    assert again.cached_tokens > 512, "of two chunks"
    tokens = cold.prompt_tokens + again.prompt_tokens - again.cached_tokens
    assert sparse.counters()["bytes_stored"] == tokens * DEMO.page_bytes // DEMO.page_size


def test_a_request_is_told_what_it_cost(sparse):
    sparse.policy(budget=128, cache_slots=32, guide="forced")
    asking, other = sparse.ask_all(
        [excerpt("code", 2500), excerpt("tale", 2000)],
        tokens=12,
        each=[{"custom_params": {"sparse_kv_info": True}, "ignore_eos": True}, {}],
    )
    figures = {key: asking.meta[key] for key in KEYS}
    assert all(len(values) == len(asking.ids) for values in figures.values())
    assert sum(figures[MISSED]) > 0 and sum(figures[AHEAD]) > 0
    assert figures[GUIDE_HIT] == [0] + [1] * (len(asking.ids) - 1), "a forced guide is right in every decode step"
    assert sum(figures[MISSED]) < sparse.totals()["missed"], "the other request's units are its own"
    assert not set(KEYS) & set(other.meta) or other.meta[MISSED] == [None] * len(other.ids)
