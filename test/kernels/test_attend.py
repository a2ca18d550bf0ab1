"""Decode attention over selected pages: our kernels around FlashInfer, which the emulator has a stand-in for."""

from __future__ import annotations

import math

import pytest
import torch
from layers import copy_of, make_layer
from sglang.srt.sparse_kv.ops import attend as attend_module
from sglang.srt.sparse_kv.ops import cuda, reference_attention

# Probabilities and results are rounded to the KV type in between.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}


def paged_attention(plan, q, units):
    """What FlashInfer computes from a plan's buffers, on the CPU."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    for i in range(q.shape[0]):
        pages = plan.indices[plan.indptr[i] : plan.indptr[i + 1]].long()
        assert pages.numel(), "padded rows must show a page"
        length = (pages.numel() - 1) * plan.page_size + int(plan.last_page[i])
        keys, values = units[pages].transpose(0, 1).reshape(2, -1, q.shape[2])[:, :length].float()
        logits = q[i].float() @ keys.T * plan.scale
        out[i] = (logits.softmax(-1) @ values).to(q.dtype)
        lse[i] = logits.logsumexp(-1) / torch.log(torch.tensor(2.0))
    return out, lse


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, engine):
    if engine.device.type == "cpu":
        monkeypatch.setattr(attend_module.AttendPlan, "run", paged_attention)
    else:
        pytest.importorskip("flashinfer", reason="needs FlashInfer")


def case(seed, engine, counts, rows, heads, group, page_size, dim, dtype, width, slots=200):
    random = torch.Generator().manual_seed(seed)
    view = make_layer(seed, engine.device, heads, slots, slots + 50, page_size, dim, dtype, resident=1.0)
    n = len(counts)
    chosen = torch.full((n, heads, width), -1, dtype=torch.int32)
    for i, count in enumerate(counts):
        for head in range(heads):
            chosen[i, head, :count] = torch.randperm(slots, generator=random)[:count].to(torch.int32)
    num_pages = torch.tensor(counts)
    last = torch.randint(1, page_size + 1, (n,), generator=random)
    q = torch.randn((n, rows, heads, group, dim), generator=random).to(dtype)
    own = [torch.randn((n, heads, dim), generator=random).to(dtype) for _ in range(2)] if rows == 2 else [None, None]
    return view, q, own, chosen, num_pages, last


def compare(engine, view, q, own, chosen, num_pages, last):
    to = lambda t: None if t is None else t.to(engine.device)  # noqa: E731
    scale = q.shape[-1] ** -0.5
    exact = copy_of(view)
    exact.kv = exact.kv.float()
    wide = [None if t is None else t.float() for t in own]
    expected = reference_attention.attend(q.float(), *wide, exact, chosen, num_pages, last, scale)
    got = cuda.attend(to(q), *map(to, own), view, to(chosen), to(num_pages.int()), to(last), scale).cpu()
    used = num_pages > 0
    assert float((got[used].float() - expected[used]).abs().max()) < TOLERANCE[q.dtype]
    if q.shape[1] == 2:
        assert bool((got[~used] == 0).all())


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize(
    ("rows", "heads", "group", "dim", "dtype"),
    [
        (2, 2, 4, 128, torch.bfloat16),
        (2, 3, 3, 64, torch.float16),
        (1, 2, 8, 128, torch.float16),
        (2, 1, 1, 64, torch.bfloat16),
        (2, 8, 8, 128, torch.bfloat16),
    ],
)
def test_attend(engine, rows, heads, group, dim, dtype, page_size):
    counts = [1, 7, 0, 20, 13]
    compare(engine, *case(page_size, engine, counts, rows, heads, group, page_size, dim, dtype, 20))


# Those of 70 and 88, with two heads each, are attended to in one piece.
@pytest.mark.parametrize("requests", [1, 4, 16, 17, 32, 70, 88])
def test_lengths_that_only_the_device_knows(engine, requests):
    """One plan per batch size, then any mixture of lengths up to the selection's width."""
    if engine.small and requests > 4:
        pytest.skip("too large to emulate")
    width = 20 if engine.small else 134
    random = torch.Generator().manual_seed(requests)
    mixtures = [[1] * requests, [width] * requests]
    mixtures += [torch.randint(0, width + 1, (requests,), generator=random).tolist() for _ in range(3)]
    for seed, counts in enumerate(mixtures):
        compare(engine, *case(seed, engine, counts, 2, 2, 4, 16, 128, torch.float16, width, slots=max(200, width)))


def test_sequences_that_fill_a_device_are_not_divided():
    assert [n for n in range(1, 49) if attend_module.in_one_piece(8 * n, 132)] == list(range(15, 49))
    assert not attend_module.in_one_piece(1, 2) and attend_module.in_one_piece(1, 1)


def test_row1_sees_its_own_token(engine):
    """With the own token's key far ahead of all others, row 1 returns its value, and row 0 does not notice."""
    view, q, (_, v), chosen, num_pages, last = case(0, engine, [5], 2, 2, 4, 16, 64, torch.float16, 8)
    to = lambda t: t.to(engine.device)  # noqa: E731
    key = q[:, 1, :, 0] * 50
    q[:, 1] = q[:, 1, :, :1]
    out = cuda.attend(to(q), to(key), to(v), view, to(chosen), to(num_pages), to(last), 0.125).cpu()
    assert torch.allclose(out[:, 1], v[:, :, None, :].expand_as(out[:, 1]), atol=1e-3)
    other = cuda.attend(to(q), to(-key), to(v), view, to(chosen), to(num_pages), to(last), 0.125).cpu()
    assert torch.equal(out[:, 0], other[:, 0])


@pytest.mark.parametrize(
    ("rows", "heads", "group", "dim", "scored"),
    [(2, 2, 4, 128, True), (2, 3, 5, 64, True), (1, 2, 8, 128, True), (1, 2, 4, 128, False), (1, 3, 3, 64, False)],
)
@pytest.mark.parametrize("fused", [False, True])
def test_inputs_filled_on_the_way(engine, rows, heads, group, dim, scored, fused):
    """Score and resolve leave the page table and the queries that the kernel of attention's own would make; with one
    row, so does the write of a token.
    """
    counts, width, pages = [1, 37, 0, 20, 33], 40, 150
    view = make_layer(3, engine.device, heads, 230, pages, 16, dim, torch.float16, resident=0.5)
    random = torch.Generator().manual_seed(rows)
    n, to = len(counts), lambda t: t.to(engine.device)
    chosen = torch.full((n, heads, width), -1, dtype=torch.int32)
    for i, count in enumerate(counts):
        for head in range(heads):
            chosen[i, head, :count] = (torch.randperm(pages - 1, generator=random)[:count] + 1).to(torch.int32)
    num_pages, last = torch.tensor(counts, dtype=torch.int32), torch.randint(1, 17, (n,), generator=random)
    q = torch.randn((n, rows, heads, group, dim), generator=random).half()
    if fused:  # a slice of a projection that also holds keys and values
        whole = torch.zeros((n * rows, (heads + 2) * group * dim), dtype=torch.float16, device=engine.device)
        whole[:, : heads * group * dim] = to(q).view(n * rows, -1)
        q_dev = whole[:, : heads * group * dim].unflatten(0, (n, rows)).unflatten(2, (heads, group, dim))
    else:
        q_dev = to(q)
    own = [torch.randn((n, heads, dim), generator=random).half() for _ in range(2)] if rows == 2 else [None, None]
    own = [None if t is None else to(t) for t in own]
    table = torch.zeros((n, width), dtype=torch.int32, device=engine.device)
    bound = torch.zeros((n, rows), dtype=torch.int64, device=engine.device)
    step = torch.tensor([40], dtype=torch.int32, device=engine.device)

    inputs = cuda.attend_inputs(q_dev, view, to(last), width, 0.125)
    if scored:
        cuda.score(q_dev, view.landmarks, table, bound, bound, 0.125, inputs)
    else:
        own_token, nowhere = torch.zeros((n, heads, dim), dtype=torch.float16, device=engine.device), bound[:, 0]
        cuda.write_token(view, own_token, own_token, nowhere, None, nowhere, nowhere.bool(), inputs=inputs)
    slots, _ = cuda.resolve(view, to(chosen), None, step, inputs=inputs, num_pages=to(num_pages), move=True)
    used = sum(max(count, 1) for count in counts) * heads
    plan = inputs.plan
    ours = [plan.indptr.clone(), plan.indices[:used].clone(), plan.last_page.clone()]
    ordered = inputs.ordered.clone()
    got = cuda.attend(q_dev, *own, view, slots, to(num_pages), to(last), 0.125, inputs)
    expected = cuda.attend(q_dev, *own, view, slots, to(num_pages), to(last), 0.125)
    for mine, theirs in zip(ours, (plan.indptr, plan.indices[:used], plan.last_page), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(ordered.cpu(), q.permute(0, 2, 1, 3, 4).reshape(n * heads, rows * group, dim))
    assert torch.equal(got[num_pages > 0], expected[num_pages > 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "keys", "causal"), [(97, 97, True), (97, 330, True), (97, 230, False), (1, 65, True)]
)
@pytest.mark.parametrize("heads", [2, 40])  # so many that FlashInfer may choose its kernel
def test_prefill_blocks(gpu, tokens, keys, causal, heads, dtype):
    """Queries and the chunk's own keys are slices of a projection, a prefix lies head by head."""
    pytest.importorskip("flashinfer", reason="needs FlashInfer")
    random = torch.Generator().manual_seed(0)
    group, dim = 4, 128
    q = torch.randn((tokens, heads * (group + 2) * dim), generator=random).to(dtype)[:, : heads * group * dim]
    q = q.unflatten(1, (heads * group, dim))
    k, v = (torch.randn((heads, keys, dim), generator=random).to(dtype) for _ in range(2))
    expected, expected_lse = reference_attention.attend_block(q.float(), k.float(), v.float(), dim**-0.5, causal)
    wide = torch.zeros((tokens, heads * (group + 2) * dim), dtype=dtype, device=gpu)
    queries = wide[:, : heads * group * dim].unflatten(1, (heads * group, dim)).copy_(q)
    out, lse = cuda.attend_block(queries, k.to(gpu), v.to(gpu), dim**-0.5, causal)
    assert float((out.cpu().float() - expected).abs().max()) < TOLERANCE[dtype]
    assert float((lse.cpu() - expected_lse).abs().max()) < 1e-2
    alone, nothing = cuda.attend_block(queries, k.to(gpu), v.to(gpu), dim**-0.5, causal, alone=True)
    assert nothing is None and float((alone.cpu().float() - expected).abs().max()) < TOLERANCE[dtype]
    both, both_lse = cuda.merge(out, lse, out * 2, lse + 1)
    wanted, wanted_lse = reference_attention.merge(expected, expected_lse, expected * 2, expected_lse + 1)
    assert float((both.cpu().float() - wanted).abs().max()) < 2 * TOLERANCE[dtype]
    assert float((both_lse.cpu() - wanted_lse).abs().max()) < 1e-2
    if causal and keys == tokens:  # keys and values at strides of their own
        slices = [torch.zeros((keys, n, dim), dtype=dtype, device=gpu) for n in (heads + 1, heads)]
        strided = [wide[:, :heads].copy_(x.transpose(0, 1)).transpose(0, 1) for wide, x in zip(slices, (k, v))]
        again, _ = cuda.attend_block(queries, *strided, dim**-0.5, causal)
        assert float((again.cpu().float() - expected).abs().max()) < TOLERANCE[dtype]


def single_prefill(q, k, v, causal, kv_layout, sm_scale, backend, return_lse=False):
    """What FlashInfer's function of that name computes: [T, Hq, D], [B, H, D] each; lse float32 [T, Hq] to base 2."""
    assert kv_layout == "NHD" and backend in ("auto", "fa2")
    out, lse = reference_attention.attend_block(q, k.transpose(0, 1), v.transpose(0, 1), sm_scale, causal)
    return (out, lse / math.log(2)) if return_lse else out


@pytest.mark.parametrize(("tokens", "backend"), [(1, "fa2"), (128, "fa2"), (129, "auto"), (1000, "auto")])
def test_flashinfer_is_asked_for_what_suits_the_chunk(monkeypatch, tokens, backend):
    """Its own choice where tiles of 128 tokens and a head fill the multiprocessors; results to the natural base; no
    copies of what lies in rows of its own.
    """
    flashinfer = pytest.importorskip("flashinfer", reason="needs FlashInfer")
    asked = []

    def call(q, k, v, **settings):
        asked.append((settings["backend"], q.data_ptr(), k.data_ptr(), v.data_ptr()))
        return single_prefill(q, k, v, **settings)

    monkeypatch.setattr(flashinfer, "single_prefill_with_kv_cache", call)
    monkeypatch.setattr(attend_module, "_multiprocessors", lambda index: 7)
    random = torch.Generator().manual_seed(tokens)
    wide = torch.randn((tokens, 8, 16), generator=random)
    q, k, v = wide[:, :4], wide[:, 4:6].transpose(0, 1), wide[:, 6:].transpose(0, 1)
    out, lse = cuda.attend_block(q, k, v, 0.25, True)
    expected, expected_lse = reference_attention.attend_block(q, k, v, 0.25, True)
    assert asked == [(backend, q.data_ptr(), k.data_ptr(), v.data_ptr())]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
