"""Page scores: estimates of log Σ exp(q·k) over the keys of a page, from a summary of a few bytes.

Each takes the block's queries and the pages' keys and returns estimates up to one constant for each query:
q float32 [H, G, R, D], scaled as attention scales them; keys float32 [H, NP, P, D]. Returns float32 [H, G, R, NP].
The summary is computed from `keys` on the spot; `BYTES` says what it would take to keep, per unit and head_dim D.
"""

from __future__ import annotations

import torch


def dots(q: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """q·v for each vector of a page. vectors [H, NP, M, D]. Returns [H, G, R, NP, M]."""
    heads, pages, many, dim = vectors.shape
    flat = vectors.reshape(heads, 1, pages * many, dim)
    return (q @ flat.transpose(2, 3)).unflatten(-1, (pages, many))


def exact(q, keys):
    return dots(q, keys).logsumexp(-1)


def mean(q, keys):
    return dots(q, keys.mean(2, keepdim=True))[..., 0]


def quest(q, keys):
    low, high = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
    up, down = q.clamp(min=0), q.clamp(max=0)
    return (dots(up, high) + dots(down, low))[..., 0]


def gauss(q, keys):
    """The moment estimate of a Gaussian page: q·mean + ½ qᵀ diag(variance) q."""
    return mean(q, keys) + 0.5 * dots(q * q, keys.var(2, correction=0, keepdim=True))[..., 0]


SCORES = {score.__name__: score for score in (mean, quest, gauss, exact)}
