"""Recordings hold what the selections were, in logical pages, and survive the way to a file and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sglang.srt.sparse_kv import recorder
from sglang.srt.sparse_kv.ops import reference
from sparse_rig import Rig


@pytest.fixture
def rig(tmp_path):
    rig = Rig(record=str(tmp_path / "new" / "steps"), layers=3, budget=32, page=8, sinks=8, window=16)
    for req, tokens in ((2, 150), (1, 90)):
        rig.start(req)
        rig.extend({req: tokens})
    return rig


def steps(rig):
    return list(recorder.read(rig.config.record))


def test_the_sets_are_the_reference_s(rig, monkeypatch):
    """Row 0's and row 1's best pages, as the scores of each layer rank them."""
    expected = []

    def select(scores, table, length, active, shape, budget_pages, keep, last):
        rows = [reference.top_pages(last.favoured(scores[:, 0], length, shape.sink_pages), budget_pages)]
        found = reference.select(scores, table, length, active, shape, budget_pages, keep, last)
        rows.append(reference.top_pages(last.favoured(scores[:, 1], length + 1, shape.sink_pages), budget_pages))
        expected.append(torch.stack(rows, 2))  # [N, H, R, K]
        return found

    monkeypatch.setattr(rig.runtime.ops, "select", select)
    rig.decode([2, 1], record={"lengths": [150, 90]})
    ((header, sets),) = steps(rig)
    assert header == {"lengths": [150, 90], "page_size": 8, "unit_bytes": rig.geometry.unit_bytes}
    assert sets.shape == (2, 3, 2, 2, 4) and sets.dtype == np.int32
    found, expected = torch.from_numpy(sets), torch.stack(expected, 1)
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    assert (found[:, :, :, recorder.TRUE] != found[:, :, :, recorder.PREDICTED]).any()
    assert int(found.min()) >= 1, "no sinks"


def test_short_contexts_are_padded(rig):
    rig.start(3)
    rig.extend({3: 32})
    rig.decode([3], record={})
    ((_, sets),) = steps(rig)
    assert (sets[..., :1] == 1).all() and (sets[..., 1:] == -1).all(), "one page is neither sink nor window"


def test_a_whole_context_has_more_than_the_budget(tmp_path):
    rig = Rig(record=str(tmp_path / "steps"), layers=3, budget=32, page=8, sinks=8, window=16, whole=100)
    for req, tokens in ((1, 99), (2, 100)):
        rig.start(req)
        rig.extend({req: tokens})
    rig.decode([1, 2], record={})
    ((_, sets),) = steps(rig)
    assert sets.shape == (2, 3, 2, 2, 13)
    true, predicted = (torch.from_numpy(sets[:, :, :, which]) for which in (recorder.TRUE, recorder.PREDICTED))
    assert true[0, 0, 0].tolist() == [*range(1, 10), *[-1] * 4], "one sink; a window and open page from page 10 on"
    assert ((true[1] >= 0).sum(-1) == 4).all() and ((predicted >= 0).sum(-1) == 4).all()


def test_a_step_a_header_and_no_look_aheads(rig):
    for number in range(3):
        rig.decode([2])  # a look-ahead
        rig.decode([2], record={"number": number})
    found = steps(rig)
    assert [header["number"] for header, _ in found] == [0, 1, 2]
    assert all(sets.shape[1] == 3 for _, sets in found)


def test_a_file_is_written_by_one(rig):
    with pytest.raises(FileExistsError):
        recorder.Recorder(rig.config.record, 8, 1)
