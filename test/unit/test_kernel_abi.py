"""Both sides of the kernel library agree on its structs, and the sources are found and named."""

from __future__ import annotations

import ctypes
import re

import pytest
from sglang.srt.sparse_kv.ops import abi, build

HEADER = (build.source_dir() / "abi.h").read_text()
KINDS = {"SkvInts": abi.Ints, "int64_t": ctypes.c_int64, "double": ctypes.c_double}


def fields_in_header(name: str) -> list[tuple[str, object]]:
    body = re.search(rf"struct Skv{name} {{(.*?)\n}};", HEADER, re.S).group(1)
    found = []
    for line in body.splitlines():
        code = line.split("//")[0].strip().rstrip(";")
        if code:
            kind, field = re.fullmatch(r"(.*?[\s*])(\w+)", code).groups()
            kind = kind.strip()
            found.append((field, ctypes.c_void_p if kind.endswith("*") else KINDS[kind]))
    return found


@pytest.mark.parametrize("struct", [s for s in abi.STRUCTS if s is not abi.Launch], ids=lambda s: s.__name__)
def test_fields_are_the_headers(struct):
    assert list(struct._fields_) == fields_in_header(struct.__name__)
    assert ctypes.sizeof(struct) == sum(ctypes.sizeof(kind) for _, kind in struct._fields_), "a field is padded"


def test_every_struct_of_the_header_is_mirrored():
    assert set(re.findall(r"^struct Skv(\w+)", HEADER, re.M)) == {s.__name__ for s in abi.STRUCTS} - {"Launch"}


def test_every_function_is_exported_once():
    sources = "".join(path.read_text() for path in build.source_dir().glob("*.cu"))
    exported = re.findall(r"^SKV_EXPORT int skv_(\w+)\(", sources, re.M)
    assert sorted(exported) == sorted(abi.FUNCTIONS)


def test_the_hash_follows_the_sources(tmp_path):
    (tmp_path / "a.cu").write_text("one")
    first = build.source_hash(tmp_path)
    (tmp_path / "a.cu").write_text("two")
    assert build.source_hash(tmp_path) != first
    assert build.source_hash(tmp_path) == build.source_hash(tmp_path)


def test_without_a_compiler_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="install the CUDA toolkit or set CUDA_HOME"):
        build.compile_library(tmp_path / build.LIBRARY, ["90"])
