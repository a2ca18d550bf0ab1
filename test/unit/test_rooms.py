"""Lower rooms never import upper ones, and every file has its room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "python" / "sglang" / "srt" / "sparse_kv"
PACKAGE_NAME = "sglang.srt.sparse_kv"

# From the bottom up. A room may import its own floor and those below.
FLOORS = (
    {"config", "geometry", "devices", "host_memory", "ranks", "lookahead"},
    {"ops", "csrc"},
    {"page_cache", "transfer", "policy", "step", "variants", "metrics", "prometheus", "history", "gate"},
    {"recorder"},
    {"cost"},
    {"planner", "split", "report", "dense"},
    {"schedule"},
    {"runtime"},
    {"sizing", "host_pool", "decode", "landing"},
    {"prefill"},
    {"attention"},
    {"algorithm", "worker", "graphs", "guide", "sampling", "request_info", "spec_inputs"},
    {"refusals", "model_shape"},
    {"plugin", "arguments", "launch"},
    {"command", "doctor", "doctor_gpu"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported_rooms(source: str, module: str, is_package: bool) -> set[str]:
    """Rooms of ours that ``source`` imports, wherever in the file but not for type checkers only.

    Args:
        source: Python text.
        module: its dotted name below the package, "" for the package itself.
        is_package: whether it is an ``__init__`` file, which relative imports start from.
    """
    full = f"{PACKAGE_NAME}.{module}".rstrip(".")
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = full.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base]).rstrip(".")
            # `from package import room` names the room last, `from package.room import thing` in the middle.
            found.extend(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    prefix = PACKAGE_NAME + "."
    rooms = {name[len(prefix) :].split(".")[0] for name in found if name.startswith(prefix)}
    return rooms & set(FLOOR_OF)


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_room():
    rooms = {module_name(path).split(".")[0] for path in SOURCES} - {""}
    assert rooms, f"no sources below {PACKAGE}"
    assert rooms <= set(FLOOR_OF), f"give {sorted(rooms - set(FLOOR_OF))} a floor in FLOORS"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_name(path) or "package")
def test_imports_go_down(path):
    module = module_name(path)
    room = module.split(".")[0]
    floor = FLOOR_OF.get(room, -1)
    above = {
        other
        for other in imported_rooms(path.read_text(), module, path.name == "__init__.py")
        if FLOOR_OF[other] > floor
    }
    assert not above, f"{module or PACKAGE_NAME} imports {sorted(above)} from a floor above"


def test_the_documentation_shows_the_same_floors():
    table = (REPOSITORY / "docs" / "architecture.md").read_text().split("\n## Rooms\n")[1].split("\n| ")[2:]
    shown = tuple(set(row.split(" | ")[0].replace("`", "").split()) for row in table)
    assert shown == FLOORS, "bring the table in docs/architecture.md and FLOORS together"


def test_the_platform_knows_nothing_of_the_plugin():
    for path in sorted((REPOSITORY / "python" / "cpu_platform").rglob("*.py")):
        assert "sparse_kv" not in path.read_text(), f"{path.name} of the CPU platform refers to sparse_kv"


@pytest.mark.parametrize(
    ("line", "module", "is_package", "expected"),
    [
        ("import sglang.srt.sparse_kv.worker as w", "config", False, {"worker"}),
        ("from sglang.srt.sparse_kv import attention", "config", False, {"attention"}),
        ("from sglang.srt.sparse_kv.plugin import apply", "config", False, {"plugin"}),
        ("from . import worker", "config", False, {"worker"}),
        ("from .worker import step", "config", False, {"worker"}),
        ("from ..worker import step", "ops.reference", False, {"worker"}),
        ("from .reference import gather", "ops", True, {"ops"}),
        ("from .worker import step", "", True, {"worker"}),
        ("def f():\n    from .plugin import apply", "config", False, {"plugin"}),
        (
            "if TYPE_CHECKING:\n    from .plugin import apply\nelse:\n    from .worker import x",
            "config",
            False,
            {"worker"},
        ),
        ("from sglang.srt.layers import attention", "config", False, set()),
        ("import torch", "config", False, set()),
    ],
)
def test_the_reader_sees_each_form_of_import(line, module, is_package, expected):
    assert imported_rooms(line, module, is_package) == expected
