"""What stands for a closed page when queries are scored: one vector for each unit."""

from __future__ import annotations

import torch

OUTLIER_WEIGHT = 0.7  # flat between 0.5 and 1 in docs/selection.md; csrc/sparse_kv/landmark.cuh has it too


def landmark(keys: torch.Tensor) -> torch.Tensor:
    """A mean of a page's keys in which those that stand out weigh more.

    Attention to a page is the sum of exponentials over its keys, which the few that stand out decide; in a plain mean
    they drown. Weights are a softmax over 0.7 times a key's squared distance from the mean key, in units of the page's
    average, so that a page of like keys keeps its plain mean. Distance counts only the half of the dimensions that
    rotary embeddings turn slowest: the others say where a key stands in its page.

    keys [..., P, D] with rotary embeddings applied, value d turned together with d + D/2. Returns float32 [..., D].
    """
    keys = keys.float()
    quarter, half = keys.shape[-1] // 4, keys.shape[-1] // 2
    offset = keys - keys.mean(-2, keepdim=True)
    slow = torch.cat([offset[..., quarter:half], offset[..., half + quarter :]], -1)
    distance = slow.square().sum(-1)  # [..., P]
    average = distance.mean(-1, keepdim=True).clamp(min=1e-30)
    weights = torch.softmax(OUTLIER_WEIGHT * distance / average, -1)
    return (weights[..., None] * keys).sum(-2)
