"""A model-free rig: random keys and queries driven through the decode path, and an oracle that recomputes from
history.
"""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.sparse_kv import planner
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.decode import decode_layer
from sglang.srt.sparse_kv.geometry import Geometry
from sglang.srt.sparse_kv.ops import landmarks
from sglang.srt.sparse_kv.ops.reference import COUNTERS
from sglang.srt.sparse_kv.prefill import Prefill
from sglang.srt.sparse_kv.runtime import SparseKVRuntime
from sglang.srt.sparse_kv.step import DecodeStep

SCALE = 0.5


class Rig:
    """A pool of pages with a naive allocator, some requests, and the true K/V history of each.

    history[r]: list over layers of (keys [len, H, D], values [len, H, D]). chosen[r, layer]: what the
    oracle's last step chose of more candidates than the budget, a set of logical pages for each head; None where steps
    were not verified.
    """

    def __init__(
        self, seed: int = 0, layers=3, kv_heads=2, group=2, dim=8, page=8, pages=200, context=512, requests=4, **config
    ):
        self.generator = torch.Generator().manual_seed(seed)
        config = {
            "budget": 4 * page,
            "sinks": page,
            "window": 2 * page,
            "lookahead": 1,
            "rows": 2,
            "debug": True,
            **config,
        }
        self.config = SparseKVConfig.from_dict(config)
        geometry = Geometry(layers, kv_heads, group, dim, page, 0, -(-context // page) + 1, 0, torch.float32)
        host_bytes = (pages + 1) * geometry.page_bytes
        cache = self.config.cache_memory if isinstance(self.config.cache_memory, int) else 1 << 30
        self.plan = planner.plan(self.config, geometry, cache, host_bytes, requests)
        self.geometry = dataclasses.replace(geometry, num_pages=pages + 1, max_requests=self.plan.max_running_requests)
        host = torch.full((layers, pages + 1, kv_heads, 2, page, dim), float("nan"))
        self.runtime = SparseKVRuntime(self.config, self.geometry, self.plan, host, torch.device("cpu"))
        self.runtime.policy.check = True
        self.prefill = Prefill(self.runtime)
        self.req_to_token = torch.zeros((requests + 1, context + page), dtype=torch.int32)
        order = torch.randperm(pages, generator=self.generator) + 1
        self.free = order.tolist()
        self.owned: dict[int, list[int]] = {}
        self.history: dict[int, list] = {}
        self.chosen: dict[tuple[int, int], list[set[int]] | None] = {}

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def length(self, req: int) -> int:
        return self.history[req][0][0].shape[0]

    def grow(self, req: int, length: int) -> None:
        page = self.geometry.page_size
        while len(self.owned[req]) * page < length:
            number = len(self.owned[req])
            physical = self.free.pop()
            self.owned[req].append(physical)
            self.req_to_token[req, number * page : (number + 1) * page] = physical * page + torch.arange(page)

    def start(self, req: int) -> None:
        g = self.geometry
        self.owned[req] = []
        empty = torch.zeros(0, g.kv_heads, g.head_dim)
        self.history[req] = [(empty, empty) for _ in range(g.num_layers)]

    def fork(self, req: int, parent: int, tokens: int) -> None:
        """Starts a request on the first `tokens` of another's, as a radix hit does: whole pages, shared."""
        page = self.geometry.page_size
        assert tokens % page == 0 and tokens <= self.length(parent)
        self.owned[req] = self.owned[parent][: tokens // page]
        self.req_to_token[req, :tokens] = self.req_to_token[parent, :tokens]
        self.history[req] = [(keys[:tokens], values[:tokens]) for keys, values in self.history[parent]]

    def finish(self, req: int) -> None:
        pages, shared = self.owned.pop(req), {page for owned in self.owned.values() for page in owned}
        pages = [page for page in pages if page not in shared]
        self.free = pages[::-1] + self.free if self.runtime.policy.seed % 2 else self.free + pages
        del self.history[req]

    def extend(self, extends: dict[int, int]) -> list[torch.Tensor]:
        """One prefill batch; returns the outputs of each layer and asserts that they are exact."""
        g, p = self.geometry, self.geometry.page_size
        req = torch.tensor(list(extends))
        prefixes = [self.length(r) for r in extends]
        for r, n in extends.items():
            self.grow(r, self.length(r) + n)
            self.chosen = {place: pages for place, pages in self.chosen.items() if place[0] != r}
        loc = torch.cat([self.req_to_token[r, pre : pre + n] for (r, n), pre in zip(extends.items(), prefixes)])
        self.prefill.begin(self.req_to_token, req, prefixes, list(extends.values()), loc)
        total = sum(extends.values())
        outs = []
        for layer in range(g.num_layers):
            k, v = self.rand(total, g.kv_heads, g.head_dim), self.rand(total, g.kv_heads, g.head_dim)
            q = self.rand(total, g.kv_heads * g.group, g.head_dim)
            out = self.prefill.forward(layer, q, k, v, SCALE)
            start = 0
            for (r, n), pre in zip(extends.items(), prefixes):
                rows = slice(start, start + n)
                keys, values = self.history[r][layer]
                keys, values = torch.cat([keys, k[rows]]), torch.cat([values, v[rows]])
                self.history[r][layer] = (keys, values)
                mask = torch.arange(pre + n)[None] <= pre + torch.arange(n)[:, None]
                torch.testing.assert_close(out[rows], dense(q[rows], keys, values, mask), atol=2e-5, rtol=2e-4)
                start += n
            outs.append(out)
        self.runtime.transfer.join_all()
        assert p == g.page_size
        return outs

    def decode(self, reqs: list[int], data=None, verify: bool = True, record=None) -> list[torch.Tensor]:
        """One step; row 1's inputs are random. Returns outputs per layer, [N*R, Hq, D]."""
        g, rows = self.geometry, self.runtime.rows
        for r in reqs:
            self.grow(r, self.length(r) + 2)
        lengths = torch.tensor([self.length(r) for r in reqs], dtype=torch.int64)
        req = torch.tensor(reqs, dtype=torch.int64)
        step = DecodeStep.build(g, self.runtime.shape, self.runtime.variant, self.req_to_token, req, lengths)
        self.runtime.schedule.begin_step(step)
        outs = []
        n = len(reqs)
        for layer in range(g.num_layers):
            if data is None:
                q = self.rand(n * rows, g.kv_heads * g.group, g.head_dim)
                k, v = (self.rand(n * rows, g.kv_heads, g.head_dim) for _ in range(2))
            else:
                q, k, v = data[layer]
            out = decode_layer(self.runtime, step, layer, q, k, v, SCALE)
            for i, r in enumerate(reqs):
                keys, values = self.history[r][layer]
                keys, values = torch.cat([keys, k[i * rows][None]]), torch.cat([values, v[i * rows][None]])
                self.history[r][layer] = (keys, values)
                if not verify:
                    self.chosen[r, layer] = None
                else:
                    own = slice(i * rows, (i + 1) * rows)
                    expect = self.oracle(q[own], k[own], v[own], keys, values, (r, layer))
                    torch.testing.assert_close(out[own], expect, atol=2e-5, rtol=2e-4)
            outs.append(out)
        self.runtime.end_step(n, record)
        return outs

    def oracle(self, q, k, v, keys, values, place: tuple[int, int]) -> torch.Tensor:
        """What both rows must give: from history alone, no pool, no cache. keys include row 0's token. place: request
        and layer.
        """
        g, shape = self.geometry, self.runtime.shape
        p, length = g.page_size, keys.shape[0] - 1
        queries = q.view(-1, g.kv_heads, g.group, g.head_dim)
        first_window = max(0, length + 1 - shape.window) // p
        forced = set(range(min(shape.sink_pages, first_window))) | set(range(first_window, length // p + 1))
        candidates = list(range(shape.sink_pages, first_window))
        out = torch.empty_like(queries)
        before = self.chosen.get(place, [set()] * g.kv_heads)
        assert before is not None, "the step before this one was not verified"
        budget = shape.budget_pages if length >= shape.whole else len(candidates)
        competed = len(candidates) > budget
        self.chosen[place] = []
        for h in range(g.kv_heads):
            chosen = []
            if candidates:
                logits = page_logits(queries[0, h], [keys[c * p : (c + 1) * p, h] for c in candidates])
                best = (logits - logits.logsumexp(-1, keepdim=True)).amax(0)
                best = [s + self.config.hysteresis * (c in before[h]) for s, c in zip(best.tolist(), candidates)]
                order = sorted(range(len(candidates)), key=lambda i: (-best[i], i))
                chosen = [candidates[i] for i in order[:budget]]
            self.chosen[place].append(set(chosen) if competed else set())
            pages = sorted(forced | set(chosen))
            tokens = torch.tensor([t for c in pages for t in range(c * p, min((c + 1) * p, length + 1))])
            for row in range(queries.shape[0]):
                if row == 1 and self.runtime.policy.guide_attends == "own":
                    tokens = self._own_tokens(queries[1, h], keys[:, h], length, self.chosen[place][h])
                ks, vs = keys[tokens, h], values[tokens, h]
                if row == 1:
                    ks, vs = torch.cat([ks, k[1, h][None]]), torch.cat([vs, v[1, h][None]])
                out[row, h] = torch.softmax(queries[row, h] @ ks.T * SCALE, -1) @ vs
        return out.view_as(q)

    def _own_tokens(self, queries, keys, length: int, last: set[int]) -> torch.Tensor:
        """Positions that the next step would attend to with row 1's queries; all of them must be cached."""
        p, shape = self.geometry.page_size, self.runtime.shape
        first = max(0, length + 2 - shape.window) // p
        candidates = list(range(shape.sink_pages, first))
        chosen = []
        if candidates:
            logits = page_logits(queries, [keys[c * p : (c + 1) * p] for c in candidates])
            best = (logits - logits.logsumexp(-1, keepdim=True)).amax(0).tolist()
            best = [s + self.config.hysteresis * (c in last) for s, c in zip(best, candidates)]
            order = sorted(range(len(candidates)), key=lambda i: (-best[i], i))
            chosen = [candidates[i] for i in order[: shape.budget_pages]]
        if length + 1 < shape.whole:
            chosen = candidates
        sinks = range(min(shape.sink_pages, first))
        pages = sorted({*sinks, *chosen, *range(first, length // p + 1)})
        return torch.tensor([t for c in pages for t in range(c * p, min((c + 1) * p, length + 1))])


def small_blocks(rig: Rig, pages: int) -> Rig:
    """Staging slots of so few pages that a short prefix needs several turns."""
    tokens = pages * rig.geometry.page_size
    rig.prefill.staging = rig.prefill.staging[:, :, :, :tokens].clone().fill_(float("nan"))
    return rig


def resident(rig: Rig, layer: int, page: int) -> list[bool]:
    return (rig.runtime.cache.views[layer].slot_of[:, page] >= 0).tolist()


def counters(rig: Rig) -> dict[str, int]:
    return dict(zip(COUNTERS, rig.runtime.cache.counters.sum(0).tolist()))


def page_logits(queries, pages: list[torch.Tensor]) -> torch.Tensor:
    """What pages are worth to queries [G, D], before they are normalised: [G, pages]. pages: keys [P, D] of each."""
    vectors = landmarks.vectors(landmarks.make(torch.stack(pages)))  # [pages, PARTS, D]
    return torch.stack([(queries @ page.T * SCALE).logsumexp(-1) for page in vectors], -1)


def dense(q, keys, values, mask) -> torch.Tensor:
    """q [T, Hq, D], keys [K, H, D], mask bool [T, K] -> [T, Hq, D]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = torch.einsum("thd,khd->htk", q, keys) * SCALE
    logits = logits.masked_fill(~mask[None], float("-inf"))
    return torch.einsum("htk,khd->thd", torch.softmax(logits, -1), values)
