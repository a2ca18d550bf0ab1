"""What cannot be reached from outside: pages beyond the pool, and code that reads objects or opens sockets."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.sparse_kv.ops.reference import NONE
from sparse_rig import Rig

SOURCES = sorted((Path(__file__).resolve().parents[2] / "python" / "sglang" / "srt" / "sparse_kv").rglob("*.py"))
FORBIDDEN_IMPORTS = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "socket",
    "zmq",
    "http",
    "asyncio",
    "ctypes.util",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "torch.load", "os.system"}


def reaches(source: str) -> set[str]:
    """Forbidden modules that are imported and functions that are called."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found |= {name for name in names if name in FORBIDDEN_IMPORTS or name.split(".")[0] in FORBIDDEN_IMPORTS}
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":  # NumPy refuses objects without it
            found.add("allow_pickle")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.add(ast.unparse(node.func))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_file_reads_objects_or_opens_sockets(path):
    assert not reaches(path.read_text())


def test_the_reader_would_notice():
    bad = "import pickle\nfrom socket import socket\ntorch.load('x')\neval('1')\nnp.load('x', allow_pickle=True)"
    assert reaches(bad) == {"pickle", "socket", "torch.load", "eval", "allow_pickle"}
    assert not reaches("import json\ntorch.compile(f)")


# ------------------------------------------------------------ pages


@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize("pages", [1, 2, 160])
def test_every_slot_that_can_be_handed_out_is_a_place_in_the_pool(page, pages):
    """By construction: a request names no page; SGLang's allocator does, and it has none but these."""
    rig = Rig(page=page, pages=160, context=160 * page, requests=1, budget=page)
    runtime = rig.runtime
    size = (rig.geometry.num_pages - 1) * page if pages == 160 else pages * page
    allocator = PagedTokenToKVPoolAllocator(size, page, torch.float32, "cpu", None, need_sort=True)
    slots = allocator.alloc(size)
    assert slots is not None and allocator.alloc(page) is None
    found = torch.unique(slots // page)
    assert found.tolist() == list(range(1, size // page + 1))
    places = (
        runtime.host.shape[1],
        runtime.landmarks.codes.shape[1],
        runtime.landmarks.scales.shape[1],
        *(b.slot_of.shape[1] for b in runtime.cache.buffers()),
    )
    assert int(found.max()) < min(places) and set(places) == {rig.geometry.num_pages}


@pytest.mark.parametrize("guide", ["chain", "none"])
def test_what_earlier_requests_left_in_a_row_of_the_table_is_not_read(guide):
    """Behind a request's last page its row of req_to_token holds anything, numbers far beyond the pool among it."""
    rig = Rig(seed=5, pages=150, context=400, requests=2, guide=guide)
    rig.req_to_token.fill_(2**31 - 1)
    for req, length in ((1, 130), (2, 7)):
        rig.start(req)
        rig.extend({req: length})
    rig.extend({1: 50})
    for _ in range(20):
        rig.decode([1, 2])


@pytest.mark.parametrize("page", [10**6, 2**31 - 1])
def test_a_page_beyond_the_pool_raises_before_anything_is_read(page):
    rig = Rig(seed=6, pages=60, context=300, requests=1)
    view = rig.runtime.cache.views[0]
    selection = torch.full((1, rig.geometry.kv_heads, 4), NONE, dtype=torch.int32)
    selection[0, 0, 0] = page
    before = view.slot_of.clone()
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        rig.runtime.ops.resolve(view, selection, None, rig.runtime.clock)
    assert torch.equal(view.slot_of, before)
