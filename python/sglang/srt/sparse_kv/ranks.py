"""What the ranks of a server tell one another, at start and for `/server_info`; decode steps need nothing of it.

SGLang hands every request, control requests too, to all ranks in one order. So a collective here is safe wherever each
rank reaches it by the same request, whatever its own data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """The values of all tensor parallel ranks of this replica, in their order; every rank must call it."""
    if not torch.distributed.is_initialized():
        return [value]
    from sglang.srt.distributed import get_world_group

    group = get_world_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def decided_once(decide: Callable[[], T]) -> T:
    """What `decide` gives on the first rank, on all of them.

    Raises ValueError on every rank when the first one did: a rank that went on alone would wait for the others.
    """
    if not torch.distributed.is_initialized():
        return decide()
    decided: tuple[T | None, str | None] = (None, None)
    if torch.distributed.get_rank() == 0:
        try:
            decided = decide(), None
        except ValueError as error:
            decided = None, str(error)
    value, refused = gather(decided)[0]
    if refused is not None:
        raise ValueError(refused)
    return value  # type: ignore[return-value]
