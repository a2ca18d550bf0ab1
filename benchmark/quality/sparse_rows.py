"""A block of tokens decoded sparsely, all at once: every row is one decode step whose layers attend its own selection.

The tokens are given (teacher-forced), so that row r can be computed beside row r - 1: in each layer, keys and values of
the block come from the rows' own sparse hidden states, as they would one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark.models.llama_ref import Checkpoint, Llama
from benchmark.quality.scores import SCORES, Score


class Dense(Llama):
    """Keeps every layer's keys and values."""

    def __init__(self, checkpoint: Checkpoint, device: str):
        super().__init__(checkpoint, device=device)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(self, layer, q, k, v):
        self.kept.append((k, v))
        return super().attend(layer, q, k, v)


@dataclass
class Prefilled:
    """A context read with exact attention, and the dense model's predictions of its tail."""

    ids: torch.Tensor  # int64 [T]
    tail: int
    keys: torch.Tensor  # float32 [L, H, T - tail, D], rotated
    values: torch.Tensor
    logits: torch.Tensor  # float32 [tail, vocabulary]

    @classmethod
    def read(cls, checkpoint: Checkpoint, ids: list[int], tail: int, device: str, file: Path | None = None):
        """file: where to keep it, or to find it from an earlier run."""
        if file is not None and file.is_file():
            found = cls(**torch.load(file, map_location=device, mmap=True))
            if found.ids.tolist() == ids and found.tail == tail:
                return found
        model = Dense(checkpoint, device)
        stream = model.last_stream(torch.tensor(ids))
        logits = torch.cat(list(model.logits(stream[-tail:])))
        keys, values = (torch.stack([pair[i][:, : len(ids) - tail] for pair in model.kept]) for i in (0, 1))
        found = cls(torch.tensor(ids), tail, keys, values, logits)
        if file is not None:
            torch.save(vars(found), file)
        return found

    def first(self, rows: int) -> Prefilled:
        """The same context with only the first rows of its tail."""
        rows = min(rows, self.tail)
        ids = self.ids[: len(self.ids) - self.tail + rows]
        return Prefilled(ids, rows, self.keys, self.values, self.logits[:rows])


@dataclass(frozen=True)
class Selecting:
    """How pages are chosen. Sizes in tokens.

    reduce: how the query heads of a kv head agree: the best of them ("max"), "sum", or one choice for all heads of a
    layer ("shared"). normalise: each query head's estimates by their own sum ("candidates"), or by the exact attention
    to everything in sight ("all": a bound, since no page summary knows it). hysteresis: what a page that the row before
    chose is better by, nats. whole: a row with fewer tokens before its own attends to all pages.
    """

    score: Score
    budget: int
    page: int = 16
    sinks: int = 16
    window: int = 64
    reduce: str = "max"
    normalise: str = "candidates"
    hysteresis: float = 0.0
    whole: int = 0


RECENT = "recent"  # no score: the budget widens the window, as in systems that keep sinks and window alone


def selecting(name: str, budget: int, page: int = 16, sinks: int = 16, window: int = 64, **more) -> Selecting:
    """The way that a page score's name, or "recent", stands for; sizes in tokens. Raises KeyError for another name."""
    if name == RECENT:
        return Selecting(SCORES["mean"], 0, page, sinks, window + budget, **more)
    return Selecting(SCORES[name], budget, page, sinks, window, **more)


class SparseRows(Llama):
    """Runs the tail of a prefilled context, once. Of each layer, in order:

    attended: share of the exact attention that the selections hold. lost: squared distance of the attention's output
    from what the same queries would read of everything, as a share of that output's square.
    """

    def __init__(self, checkpoint: Checkpoint, context: Prefilled, how: Selecting):
        super().__init__(checkpoint, device=context.keys.device)
        self.context, self.how = context, how
        self.attended: list[float] = []
        self.lost: list[float] = []

    @torch.inference_mode()
    def predictions(self) -> torch.Tensor:
        """Logits after each token of the tail, float32 [tail, vocabulary]."""
        context = self.context
        tail = context.ids[-context.tail :]
        return torch.cat(list(self.logits(self.last_stream(tail, len(context.ids) - context.tail))))

    def attend(self, layer, q, k, v):
        context, how = self.context, self.how
        keys = torch.cat([context.keys[layer], k], 1)  # [H, T, D]
        values = torch.cat([context.values[layer], v], 1)
        heads, total, dim = keys.shape
        rows, group = q.shape[1], q.shape[0] // heads
        q = q.view(heads, group, rows, dim) * dim**-0.5
        position = torch.arange(total - rows, total, device=q.device)
        logits = q @ keys.transpose(1, 2)[:, None]  # [H, G, R, T]
        logits.masked_fill_(torch.arange(total, device=q.device) > position[:, None], float("-inf"))
        chosen = select(q, keys, logits, position, how)  # bool [H, R, NP], NP counts the open page
        tokens = chosen.repeat_interleave(how.page, -1)[:, None, :, :total]
        weights = logits.softmax(-1)
        full = weights @ values[:, None]  # [H, G, R, D]
        weights.mul_(tokens)
        share = weights.sum(-1, keepdim=True)
        out = weights @ values[:, None] / share
        self.attended.append(float(share.mean()))
        self.lost.append(float((out - full).square().sum() / full.square().sum()))
        return out.view(heads * group, rows, dim)


def select(q, keys, logits, position, how: Selecting) -> torch.Tensor:
    """Pages that each row attends to, bool [H, R, NP].

    q [H, G, R, D] scaled; keys [H, T, D]; logits [H, G, R, T], -inf beyond a row's own position; position int
    [R]. A page's place in the order is its log-probability, the best (or the sum) of the query group.
    """
    heads, total, dim = keys.shape
    page = how.page
    closed = total // page
    pages = torch.arange(-(-total // page), device=q.device)
    first_window = (position + 1 - how.window).clamp(min=0) // page
    forced = (pages < -(-how.sinks // page)) | (pages >= first_window[:, None])  # [R, NP]
    estimate = how.score(q, keys[:, : closed * page].unflatten(1, (closed, page)))  # [H, G, R, closed]
    estimate = estimate.masked_fill(forced[:, :closed], float("-inf"))
    norm = (estimate if how.normalise == "candidates" else logits).logsumexp(-1, keepdim=True)
    estimate = estimate - norm
    best = estimate.logsumexp(1) if how.reduce == "sum" else estimate.amax(1)  # [H, R, closed]
    if how.reduce == "shared":
        best = best.amax(0, keepdim=True).expand(heads, -1, -1)
    chosen = torch.zeros((heads, len(position), len(pages)), dtype=torch.bool, device=q.device)
    whole = position < how.whole  # [R]
    chosen[..., :closed] = choose(best, min(how.budget // page, closed), how.hysteresis, whole)
    return ((chosen | whole[:, None]) & (pages < first_window[:, None])) | forced


def choose(best: torch.Tensor, budget: int, hysteresis: float, whole: torch.Tensor | None = None) -> torch.Tensor:
    """The `budget` best pages of each row, bool [H, R, pages]. best: float32 [H, R, pages], -inf where there is none.

    With hysteresis, row after row: the choice of the one before, had it one, counts for more. whole: bool [R], rows
    that take every page and so have none.
    """
    if not hysteresis:
        return torch.zeros_like(best, dtype=torch.bool).scatter_(2, best.topk(budget, dim=-1).indices, True)
    competed = (best > float("-inf")).sum(-1, keepdim=True) > budget  # [H, R, 1]
    if whole is not None:
        competed &= ~whole[:, None]
    before, rows = torch.zeros_like(best[:, 0], dtype=torch.bool), []
    for row, fought in zip(best.unbind(1), competed.unbind(1), strict=True):
        scores = torch.where(before, row + hysteresis, row)
        rows.append(torch.zeros_like(before).scatter_(1, scores.topk(budget, dim=-1).indices, True))
        before = rows[-1] & fought
    return torch.stack(rows, 1)
