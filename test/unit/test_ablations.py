"""What of the ablations runs without a GPU."""

from __future__ import annotations

import torch

from benchmark import ablations


def test_the_processor_gathers_the_named_units():
    host = torch.arange(5 * 3 * 2 * 4 * 8).view(5, 3, 2, 4, 8)
    page, head = torch.tensor([4, 0, 4, 2]), torch.tensor([1, 2, 0, 1])
    staging = torch.empty((4, 2, 4, 8), dtype=host.dtype)
    ablations.gather_on_host(host, page, head, staging)
    for n in range(4):
        assert torch.equal(staging[n], host[page[n], head[n]])


def test_a_machine_without_a_gpu_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ablations.main([]) == 1 and "there is no GPU here" in capsys.readouterr().err
