"""Greedy answers to many prompts under many ways of choosing pages, side by side: a row is one prompt under one way.

Each prompt is read once, with exact attention, and its first token is the dense model's; from then on every layer of a
row attends its own selection, and what it writes is its own. The closed pages of a prompt are kept once for all ways;
its open page, and what is written behind it, once a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmark.models.llama_ref import Checkpoint, Llama
from benchmark.quality.sparse_rows import Dense, Selecting


class Read:
    """B prompts, read once with exact attention. Of C closed pages of P tokens and H KV heads, in float32:

    keys, values [L, B, H, C P, D], zero where a prompt is shorter; open_keys, open_values [L, B, H, P, D], of the page
    that is not closed; first int64 [B], the dense model's next token; lengths int64 [B].
    """

    def __init__(self, checkpoint: Checkpoint, prompts: Sequence[list[int]], device: str, page: int = 16):
        shape, self.page = checkpoint.shape, page
        lengths = torch.tensor([len(ids) for ids in prompts])
        size = (shape.layers, len(prompts), shape.kv_heads)
        closed = int(lengths.max()) // page * page
        self.keys, self.values = (torch.zeros((*size, closed, shape.head_dim), device=device) for _ in "kv")
        self.open_keys, self.open_values = (torch.zeros((*size, page, shape.head_dim), device=device) for _ in "kv")
        first = []
        for b, ids in enumerate(prompts):
            model = Dense(checkpoint, device)
            first.append(next(model.logits(model.last_stream(torch.tensor(ids))[-1:]))[0].argmax())
            whole = len(ids) // page * page
            for layer, pair in enumerate(model.kept):
                for shared, mine, read in zip((self.keys, self.values), (self.open_keys, self.open_values), pair):
                    shared[layer, b, :, :whole] = read[:, :whole]
                    mine[layer, b, :, : len(ids) - whole] = read[:, whole:]
        self.first, self.lengths = torch.stack(first), lengths.to(device)


class Answers(Llama):
    """Sizes as in `Read`; W ways, G query heads of a KV head, A own pages of a row.

    Args:
        checkpoint: the weights.
        read: the prompts.
        ways: with the page size of `read`, query heads agreeing by "max" among candidates; None is dense.
        tokens: that an answer has at most.

    Raises:
        ValueError: a way differs in what is the same here.
    """

    def __init__(self, checkpoint: Checkpoint, read: Read, ways: Sequence[Selecting | None], tokens: int):
        device = read.keys.device
        super().__init__(checkpoint, device=device)
        fixed = (read.page, "max", "candidates")
        if any((way.page, way.reduce, way.normalise) != fixed for way in ways if way is not None):
            raise ValueError("ways of one run have one page size, reduce by max, and compare candidates.")
        self.ways, self.tokens, self.page = list(ways), tokens, read.page
        self.keys, self.values, self.first, self.lengths = read.keys, read.values, read.first, read.lengths
        self.closed, self.rest = self.lengths // self.page, self.lengths % self.page
        own = -(-(self.page - 1 + tokens) // self.page) * self.page
        layers, many, heads, _, dim = self.keys.shape
        size = (layers, many, heads, len(ways), own, dim)
        self.own_keys, self.own_values = (torch.zeros(size, device=device) for _ in "kv")
        for mine, opened in ((self.own_keys, read.open_keys), (self.own_values, read.open_values)):
            mine[..., : self.page, :] = opened[:, :, :, None]
        # What a step needs of the ways, brought to the device once: [1, R] of each score's R ways.
        self.groups = []
        for score in dict.fromkeys(way.score for way in ways if way is not None):
            columns = [w for w, way in enumerate(ways) if way is not None and way.score is score]
            sizes = ([[getattr(ways[w], name) for w in columns]] for name in ("sinks", "window", "budget"))
            on_device = [torch.tensor(each, device=device) for each in (columns, *sizes)]
            self.groups.append((score, max(ways[w].budget for w in columns) // self.page, *on_device))
        self._step = 0

    @torch.inference_mode()
    def run(self, ends: Sequence[int] = ()) -> list[list[list[int]]]:
        """Answers of each prompt under each way, without the token of `ends` that ended them."""
        many, ways = len(self.lengths), len(self.ways)
        said = [self.first[:, None].expand(-1, ways).flatten()]
        stop = torch.tensor(list(ends), device=self.device)
        over = torch.isin(said[0], stop)
        for step in range(self.tokens - 1):
            if step % 8 == 0 and bool(over.all()):
                break
            self._step = step
            positions = (self.lengths + step)[:, None].expand(-1, ways).flatten()
            said.append(torch.cat(list(self.logits(self.last_stream(said[-1], positions)))).argmax(-1))
            over |= torch.isin(said[-1], stop)
        rows = torch.stack(said, 1).view(many, ways, -1).tolist()
        return [[_until(row, ends) for row in prompt] for prompt in rows]

    def attend(self, layer, q, k, v):
        many, ways, heads, page = len(self.lengths), len(self.ways), self.shape.kv_heads, self.page
        dim = q.shape[-1]
        q = q.view(heads, -1, many, ways, dim).permute(2, 0, 1, 3, 4) * dim**-0.5  # [B, H, G, W, D]
        batch, at = torch.arange(many, device=q.device), self.rest + self._step
        keys, values, own_keys, own_values = (
            each[layer] for each in (self.keys, self.values, self.own_keys, self.own_values)
        )
        # Both index tensors come first in what is assigned: [B, H, W, D].
        own_keys[batch, :, :, at] = k.view(heads, many, ways, dim).permute(1, 0, 2, 3)
        own_values[batch, :, :, at] = v.view(heads, many, ways, dim).permute(1, 0, 2, 3)
        chosen = self.choose(q, keys, own_keys)
        attended = chosen[..., None].expand(*chosen.shape, page).flatten(-2)  # bool [B, H, W, tokens]
        shared = keys.shape[2]
        own = torch.arange(own_keys.shape[3], device=q.device) <= at[:, None]  # tokens that are written, [B, A P]
        attended[..., shared:] &= own[:, None, None]
        # A prompt's keys serve all its rows in one product each.
        of_prompt = (q.flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, (-1, ways))
        of_row = torch.einsum("bhgwd,bhwtd->bhgwt", q, own_keys)
        logits = torch.cat([of_prompt, of_row], -1).masked_fill_(~attended[:, :, None], float("-inf"))
        weights = logits.softmax(-1)  # [B, H, G, W, tokens]
        out = (weights[..., :shared].flatten(2, 3) @ values).unflatten(2, (-1, ways))
        out += torch.einsum("bhgwt,bhwtd->bhgwd", weights[..., shared:], own_values)
        return out.permute(1, 2, 0, 3, 4).reshape(-1, many * ways, dim)

    def choose(self, q: torch.Tensor, keys: torch.Tensor, own_keys: torch.Tensor) -> torch.Tensor:
        """Pages that each row attends to, bool [B, H, W, C + A]: those of its prompt, then those of its own.

        q [B, H, G, W, D] scaled; keys [B, H, C P, D]; own_keys [B, H, W, A P, D].
        """
        page = self.page
        many, heads, group, ways, dim = q.shape
        shared, own = (torch.arange(each.shape[-2] // page, device=q.device) for each in (keys, own_keys))
        exists = torch.cat([shared < self.closed[:, None], (own * page <= self.rest[:, None] + self._step)], 1)
        place = torch.cat([shared.expand(many, -1), self.closed[:, None] + own], 1)  # of a page in its row's text
        chosen = exists[:, None, None].repeat(1, heads, ways, 1)
        for score, most, columns, sinks, window, budget in self.groups:
            position = (self.lengths + self._step)[:, None]
            recent = (position + 1 - window).clamp(min=0) // page  # the first page of each row's window, [B, R]
            forced = (place[:, None] < -(-sinks // page)[..., None]) | (place[:, None] >= recent[..., None])
            candidate = ~forced & exists[:, None]  # [B, R, C + A]
            rows = q[:, :, :, columns]
            estimate = torch.cat(
                [
                    score(rows.flatten(0, 1), keys.flatten(0, 1).unflatten(1, (-1, page))).unflatten(0, (many, heads)),
                    score(
                        rows.transpose(2, 3).reshape(-1, group, 1, dim),
                        own_keys[:, :, columns].reshape(-1, len(own), page, dim),
                    )
                    .view(many, heads, len(columns), group, -1)
                    .transpose(2, 3),
                ],
                -1,
            ).masked_fill(~candidate[:, None, None], float("-inf"))  # [B, H, G, R, C + A]
            best = (estimate - estimate.logsumexp(-1, keepdim=True)).amax(2)
            order = best.topk(min(most, best.shape[-1]), dim=-1).indices
            rank = torch.arange(order.shape[-1], device=q.device)
            kept = (rank < (budget // page)[..., None])[:, None].expand_as(order)
            picked = torch.zeros_like(best, dtype=torch.bool).scatter_(3, order, kept)
            chosen[:, :, columns] = (picked & candidate[:, None]) | (forced & exists[:, None])[:, None]
        return chosen


def _until(row: list[int], ends: Sequence[int]) -> list[int]:
    found = [i for i, token in enumerate(row) if token in ends]
    return row[: found[0]] if found else row
