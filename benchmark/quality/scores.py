"""Page scores: estimates of log Σ exp(q·k) over the keys of a page, from a summary of a few bytes.

Each takes the block's queries and the pages' keys and returns estimates up to one constant for each query:
q float32 [H, G, R, D], scaled as attention scales them; keys float32 [H, NP, P, D]. Returns float32 [H, G, R, NP].
The summary is computed on the spot; each function says what it would take to keep it, in values of a head_dim D per
page and kv head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def dots(q: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """q·v for each of M vectors of a page. q [H, G, R, D], vectors [H, NP, M, D]. Returns [H, G, R, NP, M]."""
    heads, pages, many, dim = vectors.shape
    flat = vectors.reshape(heads, pages * many, dim)  # one product for all query heads of a KV head
    return (q.flatten(1, 2) @ flat.transpose(1, 2)).view(*q.shape[:3], pages, many)


def exact(q, keys):
    """The bound: every key (P·D)."""
    return dots(q, keys).logsumexp(-1)


def mean(q, keys):
    """The mean key, the product's landmark (D)."""
    return dots(q, keys.mean(2, keepdim=True))[..., 0]


def quest(q, keys):
    """Quest's bound: the largest and the smallest value of each dimension (2 D)."""
    low, high = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
    return (dots(q.clamp(min=0), high) + dots(q.clamp(max=0), low))[..., 0]


def gauss(q, keys):
    """The moment estimate of a Gaussian page: q·mean + ½ qᵀ diag(variance) q (2 D)."""
    return mean(q, keys) + 0.5 * dots(q * q, keys.var(2, correction=0, keepdim=True))[..., 0]


OUTLIER_WEIGHT = 0.7  # flat between 0.5 and 1


def weighted_mean(keys: torch.Tensor) -> torch.Tensor:
    """A mean of a page's keys in which those that stand out weigh more.

    Attention to a page is the sum of exponentials over its keys, which the few that stand out decide; in a plain mean
    they drown. Weights are a softmax over 0.7 times a key's squared distance from the mean key, in units of the page's
    average, so that a page of like keys keeps its plain mean. Distance counts only the half of the dimensions that
    rotary embeddings turn slowest: the others say where a key stands in its page.

    keys [..., P, D] with rotary embeddings applied, value d turned together with d + D/2. Returns [..., D].
    """
    quarter, half = keys.shape[-1] // 4, keys.shape[-1] // 2
    offset = keys - keys.mean(-2, keepdim=True)
    slow = torch.cat([offset[..., quarter:half], offset[..., half + quarter :]], -1)
    distance = slow.square().sum(-1)  # [..., P]
    average = distance.mean(-1, keepdim=True).clamp(min=1e-30)
    weights = torch.softmax(OUTLIER_WEIGHT * distance / average, -1)
    return (weights[..., None] * keys).sum(-2)


def outliers(q, keys):
    """The mean key weighted towards the keys that stand out (D)."""
    return dots(q, weighted_mean(keys)[:, :, None])[..., 0]


def parts(many: int, bits: int | None = None) -> Score:
    """`many` landmarks a page, each of neighbouring tokens (many·D values, of `bits` bits with one scale a vector)."""

    def score(q, keys):
        vectors = weighted_mean(keys.unflatten(2, (many, -1)))
        if bits is not None:
            most = 2 ** (bits - 1) - 1
            scale = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
            vectors = (vectors / scale).round() * scale
        return dots(q, vectors).logsumexp(-1)

    return score


def quarters(q, keys):
    """A candidate for the product: a weighted mean of each quarter's keys, 4 bits a value and a bfloat16 scale (D + 4).

    A key weighs the eighth power of 1 + r/10, about exp(0.7 r), where r is its squared distance as in `weighted_mean`:
    no exponential, so that every engine can compute the same bits.
    """
    parts = keys.unflatten(2, (4, -1))  # [H, NP, 4, P/4, D]
    slow = torch.arange(keys.shape[-1], device=keys.device) % (keys.shape[-1] // 2) >= keys.shape[-1] // 4
    distance = torch.where(slow, (parts - parts.mean(-2, keepdim=True)).square(), 0.0).sum(-1)
    average = distance.mean(-1, keepdim=True).clamp(min=1e-30)
    weights = (1 + distance / average / 10) ** 8
    vectors = (weights[..., None] * parts).sum(-2) / weights.sum(-1, keepdim=True)
    scale = (vectors.abs().amax(-1, keepdim=True) / 7).bfloat16().float().clamp(min=1e-30)
    return dots(q, (vectors / scale).round().clamp(-7, 7) * scale).logsumexp(-1)


SCORES: dict[str, Score] = {
    "exact": exact,
    "mean": mean,
    "quest": quest,
    "gauss": gauss,
    "outliers": outliers,
    "two": parts(2),
    "two-8bit": parts(2, 8),
    "four": parts(4),
    "four-4bit": parts(4, 4),
    "quarters": quarters,
    "eight": parts(8),
    "eight-4bit": parts(8, 4),
}
