"""Page scores: estimates of log Σ exp(q·k) over the keys of a page, from a summary of a few bytes.

Each takes the block's queries, the pages' keys and the pages' closing queries, those of each page's last token, and
returns estimates up to one constant for each query: q float32 [H, G, R, D]; keys [H, NP, P, D]; closing [H, G, NP, D];
queries are scaled as attention scales them. Returns float32 [H, G, R, NP]. The summary is computed on the spot; each
function says what it would take to keep it, in values of a head_dim D per page and kv head.
"""

from __future__ import annotations

import math

import torch


def dots(q: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """q·v for each of M vectors of a page. q [H, G, R, D], vectors [H, NP, M, D]. Returns [H, G, R, NP, M]."""
    heads, pages, many, dim = vectors.shape
    flat = vectors.reshape(heads, 1, pages * many, dim)
    return (q @ flat.transpose(2, 3)).unflatten(-1, (pages, many))


def exact(q, keys, closing):
    """The bound: every key (P·D)."""
    return dots(q, keys).logsumexp(-1)


def mean(q, keys, closing):
    """The mean key (D)."""
    return dots(q, keys.mean(2, keepdim=True))[..., 0]


def quest(q, keys, closing):
    """Quest's bound: the largest and the smallest value of each dimension (2 D)."""
    low, high = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
    return (dots(q.clamp(min=0), high) + dots(q.clamp(max=0), low))[..., 0]


def gauss(q, keys, closing):
    """The moment estimate of a Gaussian page: q·mean + ½ qᵀ diag(variance) q (2 D)."""
    return mean(q, keys, closing) + 0.5 * dots(q * q, keys.var(2, correction=0, keepdim=True))[..., 0]


def halves(q, keys, closing):
    """The mean keys of the page's two halves (2 D, or D in 8 bits)."""
    return dots(q, keys.unflatten(2, (2, -1)).mean(3)).logsumexp(-1)


def weights(keys, closing) -> torch.Tensor:
    """How the closing query spreads its attention over its own page, mean of the group. [H, NP, P]."""
    logits = torch.einsum("hgpd,hptd->hgpt", closing, keys)
    return logits.softmax(-1).mean(1)


def weighted(q, keys, closing):
    """The mean key as the page's last token weighs it (D)."""
    return dots(q, (weights(keys, closing)[..., None] * keys).sum(2, keepdim=True))[..., 0]


def tangent(q, keys, closing):
    """The tangent of the exact score at the mean closing query: a weighted mean key and a height (D + 1)."""
    logits = (keys @ closing.mean(1)[..., None])[..., 0]  # [H, NP, P]
    share = logits.softmax(-1)
    height = logits.logsumexp(-1) - (share * logits).sum(-1) - math.log(keys.shape[2])
    return dots(q, (share[..., None] * keys).sum(2, keepdim=True))[..., 0] + height[:, None, None]


SCORES = {score.__name__: score for score in (exact, mean, quest, gauss, halves, weighted, tangent)}
