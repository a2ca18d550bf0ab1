"""Random layers for tests of the kernels, their copies on the CPU for the reference, and what both must agree on."""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.sparse_kv.ops import landmarks
from sglang.srt.sparse_kv.ops.landmarks import Landmarks
from sglang.srt.sparse_kv.ops.reference import COUNTERS, NEVER, NONE, LayerView


def make_layer(
    seed: int,
    device: torch.device,
    heads: int = 2,
    slots: int = 24,
    pages: int = 64,
    page_size: int = 16,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    resident: float = 0.7,
    step: int = 40,
) -> LayerView:
    """A layer whose cache is partly filled with stamps below `step`; the cache agrees with the host where filled."""
    random = torch.Generator().manual_seed(seed)
    host = torch.randn((pages, heads, 2, page_size, dim), generator=random).to(dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    kv = torch.randn((heads, slots, 2, page_size, dim), generator=random).to(dtype)
    slot_of = torch.full((heads, pages), NONE, dtype=torch.int32)
    page_of = torch.full((heads, slots), NONE, dtype=torch.int32)
    stamp = torch.full((heads, slots), NEVER, dtype=torch.int32)
    ahead = torch.zeros((heads, slots), dtype=torch.bool)
    for head in range(heads):
        used = min(int(resident * slots), pages - 1)
        where = torch.randperm(slots, generator=random)[:used]
        which = torch.randperm(pages - 1, generator=random)[:used] + 1
        slot_of[head, which] = where.to(torch.int32)
        page_of[head, where] = which.to(torch.int32)
        stamp[head, where] = torch.randint(0, step, (used,), generator=random, dtype=torch.int32)
        ahead[head, where] = torch.rand(used, generator=random) < 0.3
        kv[head, where] = host[which, head]
    marks = Landmarks(*(t.to(device) for t in landmarks.make(host[:, :, 0])))
    on_device = (t.to(device) for t in (kv, slot_of, page_of, stamp, ahead))
    counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
    stalled = torch.zeros((), dtype=torch.int64, device=device)
    return LayerView(*on_device, host, marks, counters, stalled)


def copy_of(view: LayerView) -> LayerView:
    """The same state on the CPU, sharing nothing."""
    copied = lambda t: t.detach().cpu().clone()  # noqa: E731
    tensors = {f.name: getattr(view, f.name) for f in dataclasses.fields(view)}
    marks = Landmarks(*map(copied, tensors.pop("landmarks")))
    return LayerView(**{name: copied(t) for name, t in tensors.items()}, landmarks=marks)


def same_tables(ours: LayerView, reference: LayerView, before: LayerView) -> None:
    """The same units are resident, the same slots were taken, and everything else is where it was.

    Which of the taken slots a new unit got is the engine's choice.
    """
    ours = copy_of(ours)
    head, slot = (ours.page_of >= 0).nonzero(as_tuple=True)
    page = ours.page_of[head, slot].long()
    assert torch.equal(ours.slot_of[head, page].long(), slot), "page_of and slot_of disagree"
    assert int((ours.slot_of >= 0).sum()) == slot.numel(), "an entry without a slot"
    assert torch.equal(ours.slot_of >= 0, reference.slot_of >= 0), "other units are resident"
    assert bool((ours.slot_of >= NONE).all()), "a claim was left in the table"
    assert torch.equal(ours.stamp, reference.stamp)
    assert torch.equal(ours.ahead, reference.ahead)
    assert torch.equal(ours.page_of >= 0, reference.page_of >= 0)
    stayed = reference.page_of == before.page_of
    assert torch.equal(ours.page_of[stayed], reference.page_of[stayed]), "a unit moved"
    assert dict(zip(COUNTERS, ours.counters.tolist(), strict=True)) == dict(
        zip(COUNTERS, reference.counters.tolist(), strict=True)
    )


def same_fetch(view: LayerView, fetch, expected) -> None:
    """The same units are to be fetched, each into the slot that the table names."""
    count = int(fetch.count)
    units = fetch.units[:count].cpu()
    wanted = expected.units[: int(expected.count)]
    key = lambda rows: sorted(tuple(row) for row in rows[:, [0, 1, 3]].tolist())  # noqa: E731
    assert key(units) == key(wanted)
    slot_of = view.slot_of.cpu()
    assert torch.equal(slot_of[units[:, 1].long(), units[:, 0].long()], units[:, 2])


def random_selection(seed: int, n: int, heads: int, width: int, pages: int, inactive: int = 0) -> torch.Tensor:
    """int32 [N, H, width]: distinct pages in each row, some rows shared between requests, NONE at the end of some."""
    random = torch.Generator().manual_seed(seed)
    out = torch.full((n, heads, width), NONE, dtype=torch.int32)
    for i in range(n - inactive):
        for head in range(heads):
            used = int(torch.randint(0, width + 1, (1,), generator=random))
            out[i, head, :used] = (torch.randperm(pages - 1, generator=random)[:used] + 1).to(torch.int32)
    if n > 1 and not inactive:
        out[n - 1] = out[0]
    return out


def copied(view: LayerView, fetch) -> None:
    """Asserts that every unit of the fetch lies in its slot as the host has it, up to its tokens."""
    kv, host = view.kv.cpu(), view.host
    for page, head, slot, tokens in fetch.units[: int(fetch.count)].tolist():
        assert torch.equal(kv[head, slot, :, :tokens], host[page, head, :, :tokens])


def tokens_of(seed, n, heads, dim, dtype, device):
    """Keys and values [n, heads, dim], on the CPU and on the device."""
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn((n, heads, dim), generator=random).to(dtype) for _ in range(2))
    return k, v, k.to(device), v.to(device)
