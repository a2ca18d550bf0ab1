"""Scores and selection against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang.srt.sparse_kv.geometry import LANDMARK_PARTS, SelectionShape
from sglang.srt.sparse_kv.ops import cuda, reference
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.landmarks import Landmarks, make
from sglang.srt.sparse_kv.ops.workspace import workspace

# float32 sums in another order, over up to 128 products and 6250 pages.
SCORE_TOLERANCE = 2e-5


def batch(seed, device, lengths, rows, heads, group, dim, dtype, page_size, budget):
    """(q, landmarks, table, length, active, shape) on the CPU. A length below 0 is a padded row."""
    random = torch.Generator().manual_seed(seed)
    length = torch.tensor(lengths).clamp(min=0)
    active = torch.tensor(lengths) >= 0
    shape = SelectionShape.from_tokens(page_size, budget, 16, 64)
    max_pages = int(length.max()) // page_size + 2
    pages = len(lengths) * max_pages + 1
    table = (torch.randperm(pages - 1, generator=random)[: len(lengths) * max_pages] + 1).view(len(lengths), max_pages)
    q = torch.randn((len(lengths), rows, heads, group, dim), generator=random).to(dtype)
    landmarks = make(torch.randn((pages, heads, LANDMARK_PARTS, dim), generator=random))
    return q, landmarks, table.to(torch.int32), length, active, shape


def both(ops, scores, table, length, active, shape, budget_pages, keep=None, last=None):
    """What row 0 selects with what row 1 predicts, of scores of one or two rows."""
    rows = scores.shape[1]
    chosen = ops.select(scores, table, length, active, shape, budget_pages, keep if rows == 1 else None, last)
    if rows == 2:
        chosen.predicted = ops.predict(scores, length, active, shape, budget_pages, keep, last)
    return chosen


def on(landmarks, engine):
    return Landmarks(*(t.to(engine.device) for t in landmarks))


def bounds(shape, length, active, rows):
    lo, hi = shape.candidate_bounds(length[:, None] + torch.arange(rows))
    return lo, torch.where(active[:, None], hi, lo)


GRID = [
    # rows, heads, group, dim, dtype, page size
    (2, 2, 4, 128, torch.bfloat16, 16),
    (2, 3, 3, 64, torch.float16, 16),
    (1, 1, 1, 64, torch.bfloat16, 8),
    (2, 8, 8, 128, torch.float16, 32),
    (1, 2, 7, 128, torch.bfloat16, 32),
    (2, 5, 2, 64, torch.float32, 16),
    (2, 1, 5, 128, torch.float16, 8),
    (2, 4, 6, 96, torch.bfloat16, 16),
]
LENGTHS = {
    "one": [1],
    "edges": [15, 16, 17, 97, 0, -1, 31, 33],
    "mixed": [2100, 17, -1, 5003, 97],
    "long": [100003, 1],
}


@pytest.mark.parametrize("lengths", list(LENGTHS))
@pytest.mark.parametrize("case", GRID, ids=lambda c: "-".join(map(str, c)).replace("torch.", ""))
def test_scores(engine, case, lengths):
    rows, heads, group, dim, dtype, page_size = case
    if engine.small and lengths == "long":
        pytest.skip("too large to emulate")
    q, landmarks, table, length, active, shape = batch(
        1, engine.device, LENGTHS[lengths], rows, heads, group, dim, dtype, page_size, 256
    )
    lo, hi = bounds(shape, length, active, rows)
    expected = reference.score(q, landmarks, table, lo, hi, dim**-0.5)
    to = lambda t: t.to(engine.device)  # noqa: E731
    scores = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi.int()), dim**-0.5)
    got = scores.dense().cpu()
    assert torch.equal(got.isinf(), expected.isinf())
    finite = ~expected.isinf()
    if finite.any():
        assert float((got[finite] - expected[finite]).abs().max()) < SCORE_TOLERANCE * 8
    dense = both(cuda, to(got), to(table), to(length), to(active), shape, shape.budget_pages)
    handle = both(cuda, scores, to(table), to(length), to(active), shape, shape.budget_pages)
    for name in ("pages", "num_pages", "predicted"):
        assert torch.equal(getattr(dense, name), getattr(handle, name)), f"{name} differ between handle and tensor"


def test_scores_of_a_request_ignore_its_neighbours(engine):
    q, landmarks, table, length, active, shape = batch(
        2, engine.device, [1900, 700, 40], 2, 2, 4, 128, torch.bfloat16, 16, 256
    )
    lo, hi = bounds(shape, length, active, 2)
    to = lambda t: t.to(engine.device)  # noqa: E731
    together = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1).dense()
    for i in range(3):
        one = slice(i, i + 1)
        alone = cuda.score(to(q[one]), on(landmarks, engine), to(table[one]), to(lo[one]), to(hi[one]), 0.1).dense()
        assert torch.equal(alone[0], together[i])


def test_queries_may_be_a_slice_of_a_fused_projection(engine):
    q, landmarks, table, length, active, shape = batch(
        3, engine.device, [700, 300], 2, 2, 4, 64, torch.bfloat16, 16, 256
    )
    lo, hi = bounds(shape, length, active, 2)
    to = lambda t: t.to(engine.device)  # noqa: E731
    fused = torch.randn((4, 512 + 256), dtype=torch.bfloat16)
    fused[:, :512] = q.view(4, 512)
    sliced = to(fused)[:, :512].view(2, 2, 2, 4, 64)
    expected = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1).dense()
    assert torch.equal(cuda.score(sliced, on(landmarks, engine), to(table), to(lo), to(hi), 0.1).dense(), expected)


def distributions(random, count):
    """Rows of scores that strain the search for the threshold."""
    plain = torch.randn(count, generator=random) * 3 - 12
    yield "random", plain
    yield "equal", torch.full((count,), -3.25)
    yield "few values", torch.randint(0, 4, (count,), generator=random).float() - 9
    outliers = plain.clone()
    outliers[:2] = torch.tensor([-1e30, 0.0])
    yield "outliers", outliers
    close = -8 - torch.rand(count, generator=random) * 1e-5
    close[3] = -7000.0
    yield "close", close
    yield "steps", -torch.exp2(torch.arange(count).float().remainder(120) - 60)
    holes = plain.clone()
    holes[torch.rand(count, generator=random) < 0.4] = float("-inf")
    yield "holes", holes
    zeros = torch.zeros(count)
    zeros[::3] = -0.0
    yield "signed zeros", zeros


@pytest.mark.parametrize("global_scores", [False, True])
@pytest.mark.parametrize(
    ("length", "budget"), [(2100, 256), (4999, 1024), (200, 512), (17, 64), (96, 16), (40003, 1024), (100003, 4096)]
)
def test_select_is_exact(engine, length, budget, global_scores, monkeypatch):
    if engine.small and length > 50000:
        pytest.skip("too large to emulate")
    if global_scores:
        monkeypatch.setattr(cuda, "scores_in_global_memory", lambda device, width: True)
    page_size, heads, rows, n = 16, 2, 2, 3
    random = torch.Generator().manual_seed(length)
    shape = SelectionShape.from_tokens(page_size, budget, 16, 64)
    lengths = torch.tensor([length, max(length - 17, 1), length])
    active = torch.tensor([True, True, False])
    width = length // page_size + 3
    table = (torch.randperm(4 * width, generator=random)[: n * width] + 1).view(n, width).to(torch.int32)
    index = torch.arange(width)
    lo, hi = shape.candidate_bounds(lengths[:, None] + torch.arange(rows))
    inside = (index >= lo[..., None]) & (index < hi[..., None])
    to = lambda t: t.to(engine.device)  # noqa: E731
    for seed, (name, values) in enumerate(distributions(random, width)):
        engine.seed(seed)
        scores = torch.stack([values[torch.randperm(width, generator=random)] for _ in range(n * rows * heads)])
        scores = scores.view(n, rows, heads, width)
        scores[..., 0, :] = values  # unshuffled: ties must go to the lower page
        scores = torch.where(inside[:, :, None, :], scores, float("-inf"))
        expected = both(reference, scores, table, lengths, active, shape, shape.budget_pages)
        got = both(cuda, to(scores), to(table), to(lengths), to(active), shape, shape.budget_pages)
        if name != "holes":  # there, heads differ in their number of pages, which the reference does not foresee
            assert torch.equal(got.num_pages.cpu(), expected.num_pages), name
            assert torch.equal(got.pages.cpu(), expected.pages), name
        assert torch.equal(got.predicted.cpu(), expected.predicted), name


def select_as_reference(engine, q, landmarks, table, length, active, shape):
    """The engine's selection, which is the reference's of the engine's own scores."""
    lo, hi = bounds(shape, length, active, q.shape[1])
    to = lambda t: t.to(engine.device)  # noqa: E731
    scores = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1)
    expected = both(reference, scores.dense().cpu(), table, length, active, shape, shape.budget_pages)
    got = both(cuda, scores, to(table), to(length), to(active), shape, shape.budget_pages)
    for name in ("pages", "num_pages", "predicted"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
    return got


@pytest.mark.parametrize("global_scores", [False, True])
@pytest.mark.parametrize(("rows", "group"), [(1, 3), (2, 4), (1, 8)])
def test_more_pages_than_registers_hold(engine, rows, group, global_scores, monkeypatch):
    if global_scores:
        monkeypatch.setattr(cuda, "scores_in_global_memory", lambda device, width: True)
    lengths = [9200, 8900][: 3 - rows]
    q, landmarks, table, length, active, shape = batch(
        7, engine.device, lengths, rows, 1, group, 64, torch.float16, 1, 128
    )
    select_as_reference(engine, q, landmarks, table, length, active, shape)


@pytest.mark.parametrize("group", [3, 4, 8])
def test_what_the_last_step_selected_counts_for_more(engine, group):
    """Step after step, from contexts that compete for nothing on; requests come, pause and go on."""
    q, landmarks, table, length, active, shape = batch(
        8, engine.device, [1900, 700, 330, 1100], 2, 2, group, 64, torch.bfloat16, 16, 256
    )
    random = torch.Generator().manual_seed(group)
    to = lambda t: t.to(engine.device)  # noqa: E731
    words, owner, bonus = -(-table.shape[1] // 32), torch.tensor([5, 2, 0, 3]), torch.tensor([1.5])
    store = torch.zeros((6, 3, 2, 2, words), dtype=torch.int32)
    expected_last = Last(store[:, 1].clone(), owner, bonus)
    store = to(store)
    last = Last(store[:, 1], to(owner), to(bonus))
    favoured = 0
    for step in range(12):
        active = torch.tensor([True, step != 4, False, True])
        lo, hi = bounds(shape, length, active, 2)
        q = q + 0.5 * torch.randn(q.shape, generator=random).to(q.dtype)
        scores = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1)
        dense = scores.dense().cpu()
        plain = both(reference, dense, table, length, active, shape, shape.budget_pages)
        expected = both(reference, dense, table, length, active, shape, shape.budget_pages, last=expected_last)
        got = both(cuda, scores, to(table), to(length), to(active), shape, shape.budget_pages, last=last)
        for name in ("pages", "num_pages", "predicted"):
            assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), f"{name} in step {step}"
        assert torch.equal(last.bits.cpu(), expected_last.bits), step
        favoured += int((plain.pages != expected.pages).sum())
        length = length + active.long()
    with pytest.raises(ValueError, match="handle alone"):
        both(cuda, to(dense), to(table), to(length), to(active), shape, shape.budget_pages, last=last)
    assert favoured > 0, "the last selection changed nothing"
    assert not store[:, ::2].any(), "another layer's was written"


@pytest.mark.parametrize("global_scores", [False, True])
def test_the_last_selection_beyond_registers(engine, global_scores, monkeypatch):
    if global_scores:
        monkeypatch.setattr(cuda, "scores_in_global_memory", lambda device, width: True)
    q, landmarks, table, length, active, shape = batch(9, engine.device, [9200], 2, 1, 4, 64, torch.float16, 1, 128)
    lo, hi = bounds(shape, length, active, 2)
    random = torch.Generator().manual_seed(9)
    to = lambda t: t.to(engine.device)  # noqa: E731
    bits = torch.randint(-(2**31), 2**31, (2, 2, 1, -(-table.shape[1] // 32)), generator=random).to(torch.int32)
    expected_last = Last(bits.clone(), torch.tensor([1]), torch.tensor([0.25]))
    last = Last(to(bits), to(torch.tensor([1])), to(torch.tensor([0.25])))
    scores = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1)
    dense = scores.dense().cpu()
    expected = both(reference, dense, table, length, active, shape, shape.budget_pages, last=expected_last)
    got = both(cuda, scores, to(table), to(length), to(active), shape, shape.budget_pages, last=last)
    assert torch.equal(got.pages.cpu(), expected.pages) and torch.equal(got.predicted.cpu(), expected.predicted)
    read, words = int(length) % 2, int(hi[0, 0] - lo[0, 0]) // 32
    written, wanted = last.bits.cpu(), expected_last.bits
    assert torch.equal(written[1, 1 - read, 0, :words], wanted[1, 1 - read, 0, :words])
    assert torch.equal(written[1, read], wanted[1, read]) and torch.equal(written[0], bits[0])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("whole", [700, 704, 705])
def test_short_requests_select_all(engine, whole, rows):
    """Step after step, over the border: neighbours are longer, within the budget, and padding."""
    q, landmarks, table, length, active, shape = batch(
        10, engine.device, [whole - 4, whole - 1, 2100, 330, whole, 5, 690], rows, 2, 4, 64, torch.bfloat16, 16, 256
    )
    scored, shape = shape, dataclasses.replace(shape, whole=whole)
    active[6] = False
    random = torch.Generator().manual_seed(whole)
    to = lambda t: t.to(engine.device)  # noqa: E731
    bits = torch.zeros((8, 2, 2, -(-table.shape[1] // 32)), dtype=torch.int32)
    owner, bonus = torch.arange(1, 8), torch.tensor([1.5])
    expected_last, last = Last(bits.clone(), owner, bonus), Last(to(bits.clone()), to(owner), to(bonus))
    without_last = Last(bits.clone(), owner, bonus)
    for step in range(7):
        lo, hi = bounds(shape, length, active, rows)
        q = q + 0.5 * torch.randn(q.shape, generator=random).to(q.dtype)
        scores = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1)
        dense = scores.dense().cpu()
        plain = both(reference, dense, table, length, active, shape, shape.budget_pages)
        without = both(reference, dense, table, length, active, scored, scored.budget_pages, last=without_last)
        found = both(cuda, to(dense), to(table), to(length), to(active), shape, shape.budget_pages)
        expected = both(reference, dense, table, length, active, shape, shape.budget_pages, last=expected_last)
        got = both(cuda, scores, to(table), to(length), to(active), shape, shape.budget_pages, last=last)
        for name in ("pages", "num_pages", "predicted"):
            assert torch.equal(getattr(found, name).cpu(), getattr(plain, name)), f"{name} of a tensor in step {step}"
            assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), f"{name} in step {step}"
        assert torch.equal(last.bits.cpu(), expected_last.bits), step
        for i, tokens in enumerate(length.tolist()):
            every = tokens // 16 + 1
            if active[i] and tokens < whole:
                assert int(got.num_pages[i]) == every
                assert got.pages[i, 0, :every].tolist() == table[i, :every].tolist()
                assert not last.bits[owner[i]].any()
        for i in (2, 4):  # never short
            assert torch.equal(got.pages[i, :, : scored.width].cpu(), without.pages[i])
            assert int(got.num_pages[i]) == int(without.num_pages[i])
            assert torch.equal(got.predicted[i].cpu(), without.predicted[i])
            assert torch.equal(last.bits[owner[i]].cpu(), without_last.bits[owner[i]])
        length = length + active.long()
    assert last.bits[1].any() and last.bits[2].any()


@pytest.mark.parametrize("global_scores", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_all_of_more_pages_than_can_be_ranked(engine, rows, global_scores, monkeypatch):
    if global_scores:
        monkeypatch.setattr(cuda, "scores_in_global_memory", lambda device, width: True)
    q, landmarks, table, length, active, shape = batch(
        11, engine.device, [4300, 4099, 4098], rows, 1, 4, 64, torch.float16, 1, 128
    )
    shape = dataclasses.replace(shape, whole=4100)
    got = select_as_reference(engine, q, landmarks, table, length, active, shape)
    assert got.num_pages.tolist() == [128 + 16 + 64, 4100, 4099]


@pytest.mark.parametrize("spoiled", ["queries", "one query head", "landmark"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("rows", "group"), [(1, 4), (1, 8), (2, 3)])
def test_heads_agree_how_many_pages_there_are(engine, rows, group, value, spoiled):
    """Whatever has overflowed in the first of them, the open page is the last of each: a look-up knows it by that."""
    q, landmarks, table, length, active, shape = batch(
        5, engine.device, [1500, 90, -1, 700], rows, 2, group, 64, torch.float32, 16, 256
    )
    if spoiled == "landmark":
        landmarks.scales[table[0, 30].long(), 0, 1] = value
    else:
        q[:, :, 0, : 1 if spoiled == "one query head" else group] = value
    lo, hi = bounds(shape, length, active, rows)
    to = lambda t: t.to(engine.device)  # noqa: E731
    scores = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1)
    got = both(cuda, scores, to(table), to(length), to(active), shape, shape.budget_pages)
    scores = reference.score(q, landmarks, table, lo, hi, 0.1)
    expected = both(reference, scores, table, length, active, shape, shape.budget_pages)
    opened = table.gather(1, (length // 16)[:, None])[active].expand(-1, 2)
    for found in (got, expected):
        pages, number = found.pages.cpu(), found.num_pages.cpu()
        assert torch.equal((pages >= 0).sum(-1), number[:, None].expand(-1, 2).long())
        last = number[active].long()[:, None, None].expand(-1, 2, 1) - 1
        assert torch.equal(pages[active].gather(2, last)[..., 0], opened)
        guessed = (hi - lo)[:, -1:].clamp(max=shape.budget_pages).expand(-1, 2)
        assert torch.equal((found.predicted.cpu() >= 0).sum(-1), guessed)


def test_one_row(engine):
    """Without a guide the prediction is row 0's own choice."""
    q, landmarks, table, length, active, shape = batch(
        4, engine.device, [1500, 90], 1, 2, 4, 64, torch.bfloat16, 16, 256
    )
    lo, hi = bounds(shape, length, active, 1)
    to = lambda t: t.to(engine.device)  # noqa: E731
    dense = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1).dense().cpu()
    expected = both(reference, dense, table, length, active, shape, shape.budget_pages)
    got = both(cuda, to(dense), to(table), to(length), to(active), shape, shape.budget_pages)
    assert torch.equal(got.pages.cpu(), expected.pages)
    assert torch.equal(got.predicted.cpu(), expected.predicted)


@pytest.mark.parametrize("rows", [1, 2])
def test_predictions_go_to_rows_of_their_own(engine, rows):
    q, landmarks, table, length, active, shape = batch(
        5, engine.device, [1500, 90, 0], rows, 2, 4, 64, torch.bfloat16, 16, 256
    )
    active[2] = False
    lo, hi = bounds(shape, length, active, rows)
    to = lambda t: t.to(engine.device)  # noqa: E731
    scores = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1)
    batch_of = to(table), to(length), to(active), shape, shape.budget_pages
    alone = both(cuda, scores, *batch_of)
    store = torch.full((5, 3, 2, shape.budget_pages + 4), 7, dtype=torch.int32, device=engine.device)
    places = torch.tensor([4, 1, 0], device=engine.device)
    keep = store[:, 1], places
    kept = both(cuda, scores, *batch_of, keep)
    assert kept.predicted is None and torch.equal(kept.pages, alone.pages)
    assert torch.equal(store[places, 1, :, : shape.budget_pages], alone.predicted)
    store[places, 1, :, : shape.budget_pages] = 7
    if rows == 2:
        for ops, given in ((cuda, scores), (reference, scores.dense())):
            with pytest.raises(ValueError, match="kept by predict"):
                ops.select(given, *batch_of, keep)
    assert bool((store == 7).all()), "something else was written"


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (96, torch.float32)])
def test_more_chunks_than_warps(engine, dim, dtype, monkeypatch):
    """Chunks that nobody has taken yet go to whoever is free: the results of a launch with a warp for every chunk that
    the tables have room for.
    """
    q, landmarks, table, length, active, shape = batch(6, engine.device, [3000, 2900], 2, 2, 2, dim, dtype, 8, 256)
    lo, hi = bounds(shape, length, active, 2)
    to = lambda t: t.to(engine.device)  # noqa: E731
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 128)
    wide = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1).dense()
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 1)
    for seed in range(3):
        engine.seed(seed)
        narrow = cuda.score(to(q), on(landmarks, engine), to(table), to(lo), to(hi), 0.1).dense()
        assert torch.equal(narrow, wide)
        assert workspace(engine.device).tickets.tolist() == [0, 0]
