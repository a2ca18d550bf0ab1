"""What stands for a closed page when queries are scored: a mean of the keys of each of its quarters, four bits a value.

Attention to a page is the sum of exponentials over its keys, which the few that stand out decide, and in a plain mean
they drown: in these means, keys that stand out weigh more. docs/selection.md says what that gives.

csrc/sparse_kv/landmark.cuh makes the same bits, in the same order of the same operations, each rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.sparse_kv.geometry import LANDMARK_PARTS

MOST = 7  # of a code, either sign
LEAST_SCALE = 1e-30  # below it a vector counts as zero: its reciprocal must be finite
RUN, LANES = 8, 32  # values of a key that a lane of a warp takes, and lanes: sums over dimensions go in this order


class Landmarks(NamedTuple):
    """Landmarks of any number of units.

    codes: uint8 [..., LANDMARK_PARTS, D/2], value + 8 in four bits, that of an even dimension in the lower half of a
    byte. scales: bfloat16 [..., LANDMARK_PARTS], what a code of 1 stands for; wide enough for any key.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def empty(*units: int, dim: int, device: torch.device) -> Landmarks:
    """Zeros, for units of any shape."""
    codes = torch.zeros((*units, LANDMARK_PARTS, dim // 2), dtype=torch.uint8, device=device)
    return Landmarks(codes, torch.zeros((*units, LANDMARK_PARTS), dtype=torch.bfloat16, device=device))


def make(keys: torch.Tensor) -> Landmarks:
    """keys [..., P, D] with rotary embeddings applied, value d turned together with d + D/2; P a multiple of
    LANDMARK_PARTS, D even.
    """
    means = weighted_means(keys.float().unflatten(-2, (LANDMARK_PARTS, -1)))
    scale = (means.abs().amax(-1, keepdim=True) * (1 / MOST)).to(torch.bfloat16).float()
    scale = torch.where(scale < LEAST_SCALE, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    values = (means * inverse).round().clamp(-MOST, MOST).to(torch.int8) + 8
    codes = (values[..., 0::2] | values[..., 1::2] << 4).to(torch.uint8)
    return Landmarks(codes, scale[..., 0].to(torch.bfloat16))


def weighted_means(keys: torch.Tensor) -> torch.Tensor:
    """Means in which keys that stand out weigh more. float32 [..., N, D] -> [..., D].

    A key weighs the eighth power of 1 + r/10, about exp(0.7 r), where r is its squared distance from the plain mean in
    units of the average: like keys keep their plain mean. Distance counts only the half of the dimensions that rotary
    embeddings turn slowest: the others say where a key stands in its page.
    """
    count, dim = keys.shape[-2:]
    offset = keys - (in_order(keys, -2) * (1 / count))[..., None, :]
    place = torch.arange(dim, device=keys.device) % (dim // 2)
    distance = warp_sum(torch.where(place >= dim // 4, offset * offset, 0.0))  # [..., N]
    average = in_order(distance, -1)[..., None] * (1 / count)
    weight = torch.where(average < LEAST_SCALE, 0.0, distance) / average.clamp(min=LEAST_SCALE) * 0.1 + 1
    for _ in range(3):
        weight = weight * weight
    return in_order(weight[..., None] * keys, -2) / in_order(weight, -1)[..., None]


def in_order(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over a dimension, one value after the other."""
    first, *others = values.unbind(dim)
    for value in others:
        first = first + value
    return first


def warp_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension as a warp takes it: runs one by one, then lanes far apart in pairs."""
    lanes = torch.nn.functional.pad(values, (0, RUN * LANES - values.shape[-1])).unflatten(-1, (LANES, RUN))
    sums = in_order(lanes, -1)
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    return sums[..., 0]


def vectors(landmarks: Landmarks) -> torch.Tensor:
    """What scores are computed from, float32 [..., LANDMARK_PARTS, D]."""
    codes, scales = landmarks
    values = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return (values.float() - 8) * scales.float()[..., None]


def store(landmarks: Landmarks, pages: torch.Tensor, keys: torch.Tensor) -> None:
    """Makes the landmarks of pages, int64 [M], in landmarks of [NP, H] units. keys [M, H, P, D], on any device."""
    made = make(keys.to(landmarks.codes.device))
    landmarks.codes[pages], landmarks.scales[pages] = made
