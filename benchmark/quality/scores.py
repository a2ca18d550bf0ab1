"""Page scores: estimates of log Σ exp(q·k) over the keys of a page, from a summary of a few bytes.

Each takes the block's queries and the pages' keys and returns estimates up to one constant for each query:
q float32 [H, G, R, D], scaled as attention scales them; keys float32 [H, NP, P, D]. Returns float32 [H, G, R, NP].
The summary is computed on the spot; each function says what it would take to keep it, in values of a head_dim D per
page and kv head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.sparse_kv.ops import landmarks

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def dots(q: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """q·v for each of M vectors of a page. q [H, G, R, D], vectors [H, NP, M, D]. Returns [H, G, R, NP, M]."""
    heads, pages, many, dim = vectors.shape
    flat = vectors.reshape(heads, pages * many, dim)  # one product for all query heads of a KV head
    return (q.flatten(1, 2) @ flat.transpose(1, 2)).view(*q.shape[:3], pages, many)


def exact(q, keys):
    """The bound: every key (P·D)."""
    return dots(q, keys).logsumexp(-1)


def landmark(q, keys):
    """The product's: four mean keys of 4 bits a value and a scale each (D + 4)."""
    return dots(q, landmarks.vectors(landmarks.make(keys))).logsumexp(-1)


def mean(q, keys):
    """The mean key (D)."""
    return dots(q, keys.mean(2, keepdim=True))[..., 0]


def quest(q, keys):
    """Quest's bound: the largest and the smallest value of each dimension (2 D)."""
    low, high = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
    return (dots(q.clamp(min=0), high) + dots(q.clamp(max=0), low))[..., 0]


def gauss(q, keys):
    """The moment estimate of a Gaussian page: q·mean + ½ qᵀ diag(variance) q (2 D)."""
    return mean(q, keys) + 0.5 * dots(q * q, keys.var(2, correction=0, keepdim=True))[..., 0]


def outliers(q, keys):
    """The mean key weighted towards the keys that stand out (D)."""
    return dots(q, landmarks.weighted_means(keys)[:, :, None])[..., 0]


def parts(many: int, bits: int | None = None) -> Score:
    """`many` landmarks a page, each of neighbouring tokens (many·D values, of `bits` bits with one scale a vector)."""

    def score(q, keys):
        vectors = landmarks.weighted_means(keys.unflatten(2, (many, -1)))
        if bits is not None:
            most = 2 ** (bits - 1) - 1
            scale = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
            vectors = (vectors / scale).round() * scale
        return dots(q, vectors).logsumexp(-1)

    return score


SCORES: dict[str, Score] = {
    "exact": exact,
    "landmark": landmark,
    "mean": mean,
    "quest": quest,
    "gauss": gauss,
    "outliers": outliers,
    "two": parts(2),
    "two-8bit": parts(2, 8),
    "four": parts(4),
    "four-4bit": parts(4, 4),
    "eight": parts(8),
    "eight-4bit": parts(8, 4),
}
