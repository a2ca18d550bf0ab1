"""Target shapes, and how the heads, neurons and layers of a small model are laid out in a larger one."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-architecture model; ``head_dim`` in values, the rest are counts."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    intermediate: int

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> Shape:
        """The shape stated by a Hugging Face ``config.json`` of a Llama model."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            layers=config["num_hidden_layers"],
            intermediate=config["intermediate_size"],
        )


PRESETS = {
    "8b": Shape(4096, 32, 8, 128, 32, 14336),  # Llama-3.1-8B
    "14b": Shape(5120, 40, 8, 128, 48, 13824),  # Qwen2.5-14B
    "32b": Shape(5120, 40, 8, 128, 64, 27648),  # Qwen2.5-32B
    "70b": Shape(8192, 64, 8, 128, 80, 28672),  # Llama-3.1-70B
    "1b": Shape(2048, 32, 8, 64, 30, 8192),  # about Llama-3.2-1B
    "small": Shape(1024, 16, 4, 128, 34, 3072),  # for checks in float32 on a CPU
    "tp8": Shape(768, 24, 8, 64, 30, 2048),  # small, and divisible over 2, 4 or 8 ranks
}


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """Which source head each target head is a copy of.

    Attributes:
        kv_source: source KV head of each target KV head, [kv_heads].
        q_source: source query head of each target query head, [heads].
        q_share: factor on each target query head's output projection, [heads]. The shares of the copies of
            one source head are powers of two and add up to 1.
    """

    kv_source: list[int]
    q_source: list[int]
    q_share: list[float]


def shares(copies: int) -> list[float]:
    """``copies`` powers of two that add up to exactly 1, as even as possible: 3 gives 1/2, 1/4, 1/4.

    Powers of two scale a weight without rounding it, and no copy is silent: an error in any one of them
    shows in the output.
    """
    parts = [1.0]
    while len(parts) < copies:
        largest = parts.index(max(parts))
        half = parts.pop(largest) / 2
        parts += [half, half]
    return sorted(parts, reverse=True)


def spread(sources: list[int]) -> list[float]:
    """The share of each entry of ``sources``, so that the entries of one value share 1 among them."""
    waiting = {value: shares(sources.count(value)) for value in set(sources)}
    return [waiting[value].pop(0) for value in sources]


def plan_heads(source: Shape, target: Shape) -> HeadPlan:
    """Lay every source query head under a copy of its own KV head.

    A target KV head repeats one source KV head, together with as many of that head's query heads as its
    group holds; spare places in a group repeat the group's own query heads, which leaves the group's maximum
    over page scores, and so its page selection, as it was.

    Raises:
        ValueError: the target has too few KV heads, or its heads do not divide into groups.
    """
    if target.heads % target.kv_heads or source.heads % source.kv_heads:
        raise ValueError(
            f"{target.heads} query heads do not divide over {target.kv_heads} KV heads; choose a multiple."
        )
    group, source_group = target.heads // target.kv_heads, source.heads // source.kv_heads
    kinds = []
    for kv_head in range(source.kv_heads):
        queries = list(range(kv_head * source_group, (kv_head + 1) * source_group))
        kinds += [(kv_head, queries[i : i + group]) for i in range(0, source_group, group)]
    if len(kinds) > target.kv_heads:
        raise ValueError(
            f"{target.kv_heads} KV heads with {group} query heads each cannot hold the source's "
            f"{source.heads} query heads in {source.kv_heads} groups; use at least {len(kinds)} KV heads."
        )
    laid = [kinds[i % len(kinds)] for i in range(target.kv_heads)]
    q_source = [queries[i % len(queries)] for _, queries in laid for i in range(group)]
    return HeadPlan([kv_head for kv_head, _ in laid], q_source, spread(q_source))


def plan_layers(source: int, target: int) -> list[tuple[int, bool]]:
    """For each target layer the source layer it copies, and whether its output counts.

    Extra layers are spread evenly; each repeats the layer before it and adds nothing to the residual stream.
    """
    chosen = [i * source // target for i in range(target)]
    return [(layer, i == 0 or chosen[i - 1] != layer) for i, layer in enumerate(chosen)]


def rotary_places(source_dim: int, target_dim: int) -> list[int]:
    """Where each of a head's ``source_dim`` values goes among ``target_dim``.

    Rotary pair j of D/2 turns with base**(-2j/D), so in a head m times as wide pair m*j turns equally fast;
    the halves of a pair are half a head apart in both.
    """
    times, half = target_dim // source_dim, source_dim // 2
    low = [j * times for j in range(half)]
    return low + [place + target_dim // 2 for place in low]


def check_target(source: Shape, target: Shape) -> None:
    """Raise ValueError, in one sentence, if ``target`` cannot hold ``source`` exactly."""
    for name in ("hidden", "layers", "intermediate"):
        have, want = getattr(source, name), getattr(target, name)
        if want < have:
            raise ValueError(f"{name} {want} is less than the source's {have}; use at least {have}.")
    if target.head_dim % source.head_dim or target.head_dim < source.head_dim:
        raise ValueError(
            f"head_dim {target.head_dim} is no multiple of the source's {source.head_dim}, so its rotary "
            f"frequencies do not contain the source's; use a multiple."
        )
    plan_heads(source, target)
    if target.hidden % target.heads:
        # Not a need of the construction, but transformers refuses such a config.
        raise ValueError(f"hidden {target.hidden} is no multiple of {target.heads} query heads; choose a multiple.")
