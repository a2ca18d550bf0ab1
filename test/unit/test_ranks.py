"""What ranks tell one another, between real processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from sglang.srt.sparse_kv import ranks

RANK = """
import sys, types
import torch.distributed as dist
import sglang.srt.distributed
from sglang.srt.sparse_kv import ranks
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
sglang.srt.distributed.get_world_group = lambda: types.SimpleNamespace(cpu_group=dist.group.WORLD, world_size=2)

def refuse():
    assert rank == 0, "only the first rank decides"
    raise ValueError("not one request fits 3 GB")

said = [ranks.gather({"rank": rank}), ranks.decided_once(lambda: f"by rank {rank}")]
try:
    ranks.decided_once(refuse)
except ValueError as error:
    said.append(str(error))
print(said)
"""


def test_both_processes_hear_the_same(tmp_path: Path):
    argv = [sys.executable, "-c", RANK]
    processes = [
        subprocess.Popen([*argv, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [ast.literal_eval(process.communicate(timeout=300)[0]) for process in processes]
    assert said == [[[{"rank": 0}, {"rank": 1}], "by rank 0", "not one request fits 3 GB"]] * 2


def test_a_process_alone():
    assert ranks.gather(3) == [3] and ranks.decided_once(lambda: 4) == 4
