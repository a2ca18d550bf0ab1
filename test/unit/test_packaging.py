"""The two distributions: what they install, where, and beside which installations of SGLang."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "python", "sgl-kernel")
REST = (
    *("Makefile", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "mkdocs.yml"),
    *("benchmark", "docs", "examples", "requirements", "scripts", "test"),
)
SKIP = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "build")

FAKE_SGLANG = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang"
version = "0.5.17"
[tool.setuptools.packages.find]
exclude = ["tests*"]
"""


def build(source: Path, target: Path, kind: str) -> Path:
    """Build ``source`` as pip would, with the setuptools at hand; kind is "wheel", "editable" or "sdist"."""
    target.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the sources: building leaves files behind."""
    return copy_of(tmp_path_factory.mktemp("project"), SOURCES)


def copy_of(copy: Path, names: tuple[str, ...]) -> Path:
    copy.mkdir(exist_ok=True)
    for name in names:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=SKIP)
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheels(project, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Wheels by (distribution, kind); "sglang" is a stand-in that is laid out as upstream is."""
    upstream = tmp_path_factory.mktemp("upstream")
    (upstream / "sglang" / "srt" / "utils").mkdir(parents=True)
    (upstream / "sglang" / "__init__.py").write_text("UPSTREAM = True\n")
    (upstream / "sglang" / "srt" / "utils" / "__init__.py").write_text("")
    (upstream / "pyproject.toml").write_text(FAKE_SGLANG)
    target = tmp_path_factory.mktemp("wheels")
    sources = {"sglang": upstream, "plugin": project, "platform": project / "python" / "cpu_platform"}
    return {
        (name, kind): build(source, target / name, kind)
        for name, source in sources.items()
        for kind in (("wheel",) if name == "platform" else ("wheel", "editable"))
    }


def read(wheel: Path) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Files outside ``.dist-info``, entry points by group, and requirements."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        parser = ConfigParser()
        parser.read_string(archive.read(f"{info}/entry_points.txt").decode())
    points = {group: [f"{key} = {value}" for key, value in parser[group].items()] for group in parser.sections()}
    return [name for name in names if not name.startswith(info)], points, metadata.get_all("Requires-Dist") or []


def test_the_plugin_installs_an_overlay(wheels):
    files, points, requirements = read(wheels["plugin", "wheel"])
    assert requirements == ["sglang==0.5.17"]
    assert points == {
        "sglang.srt.plugins": ["dualdecoder = sglang_dualdecoder:register"],
        "console_scripts": ["sglang-sparse-kv = sglang_dualdecoder:main"],
    }
    outside = {name for name in files if not name.startswith("sglang/srt/sparse_kv/")}
    assert outside == {"sglang_dualdecoder.py", "sglang_dualdecoder.pth"}


def test_every_source_is_installed(wheels):
    files, _, _ = read(wheels["plugin", "wheel"])
    package = REPOSITORY / "python" / "sglang" / "srt" / "sparse_kv"
    kernels = REPOSITORY / "sgl-kernel" / "csrc" / "sparse_kv"
    expected = {f"sglang/srt/sparse_kv/{path.relative_to(package)}" for path in package.rglob("*.py")}
    expected |= {
        f"sglang/srt/sparse_kv/csrc/{path.name}" for path in kernels.iterdir() if path.suffix in {".cu", ".cuh", ".h"}
    }
    installed = {name for name in files if name.startswith("sglang/")}
    assert installed == expected, "list the new folder in pyproject.toml"


def test_compiled_kernels_go_along_and_name_the_platform(wheels, tmp_path):
    assert wheels["plugin", "wheel"].name.endswith("-py3-none-any.whl")
    source = copy_of(tmp_path / "project", SOURCES)
    (source / "sgl-kernel" / "csrc" / "sparse_kv" / "libsparse_kv.so").write_bytes(b"compiled")
    wheel = build(source, tmp_path / "wheels", "wheel")
    assert re.fullmatch(r"sglang_dualdecoder-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    extra = set(read(wheel)[0]) - set(read(wheels["plugin", "wheel"])[0])
    assert extra == {"sglang/srt/sparse_kv/csrc/libsparse_kv.so"}


def test_a_source_distribution_is_complete(wheels, tmp_path):
    source = copy_of(tmp_path / "project", (*SOURCES, *REST))
    (source / "sgl-kernel" / "csrc" / "sparse_kv" / "libsparse_kv.so").write_bytes(b"compiled")
    with tarfile.open(build(source, tmp_path / "dist", "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("sglang_dualdecoder-*")
    wheel = build(unpacked, tmp_path / "wheels", "wheel")
    assert read(wheel) == read(wheels["plugin", "wheel"])
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("which files belong to the project is known in a clone only")
    expected = {name for name in tracked.stdout.split() if not name.startswith(".") and (REPOSITORY / name).is_file()}
    missing = {name for name in expected if not (unpacked / name).is_file()}
    assert not missing, "name them in MANIFEST.in"
    assert not list(unpacked.rglob("*.so")) and not list(unpacked.rglob("__pycache__"))


def test_one_version_everywhere():
    version = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[1]
    changes = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    cited = re.search(r"^version: (.+)$", (REPOSITORY / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert version == changes == cited


def test_no_file_of_ours_is_one_of_sglangs(wheels):
    upstream = {str(path) for path in importlib.metadata.files("sglang") or []}
    assert len(upstream) > 1000, "SGLang does not say which files it installed"
    for name in ("plugin", "platform"):
        files, _, _ = read(wheels[name, "wheel"])
        assert not upstream & set(files)
        # An __init__.py in a folder of upstream's would be a collision with the next release.
        assert not {"sglang/__init__.py", "sglang/srt/__init__.py"} & set(files)


def test_the_platform_is_a_distribution_of_its_own(wheels):
    # SGLang skips every plugin of a distribution whose platform was not selected.
    files, points, requirements = read(wheels["platform", "wheel"])
    assert requirements == ["sglang==0.5.17"]
    assert points == {"sglang.srt.platforms": ["torch_cpu = sglang_cpu_platform:activate"]}
    assert {name.partition("/")[0] for name in files} == {"sglang_cpu_platform"}


def run_in(site: Path, code: str) -> dict:
    """Run ``code`` in a Python whose only site-packages is ``site``; it prints JSON."""
    start = f"import site, json; site.addsitedir({str(site)!r})\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", start + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("ours", ["wheel", "editable"])
@pytest.mark.parametrize("upstream", ["wheel", "editable"])
def test_beside_each_kind_of_installation(upstream, ours, wheels, project, tmp_path):
    for name, kind in (("sglang", upstream), ("plugin", ours)):
        zipfile.ZipFile(wheels[name, kind]).extractall(tmp_path)
    answer = run_in(
        tmp_path,
        "import sglang, sglang.srt.utils, sglang.srt.sparse_kv.config as config\n"
        "from importlib.metadata import entry_points\n"
        "points = [point.value for point in entry_points(group='sglang.srt.plugins')]\n"
        "print(json.dumps([sglang.UPSTREAM, config.__file__, points]))",
    )
    home = tmp_path if ours == "wheel" else project / "python"
    file = home / "sglang" / "srt" / "sparse_kv" / "config.py"
    assert answer == [True, str(file), ["sglang_dualdecoder:register"]]


def test_from_a_source_tree_on_the_path(wheels, project, tmp_path):
    zipfile.ZipFile(wheels["sglang", "wheel"]).extractall(tmp_path)
    answer = run_in(
        tmp_path,
        f"import sys; sys.path.append({str(project / 'python')!r})\n"
        "import importlib, sglang_dualdecoder\n"
        "sglang_dualdecoder.find_overlay()\n"
        "importlib.invalidate_caches()\n"
        "import sglang.srt.utils, sglang.srt.sparse_kv.config as config\n"
        "print(json.dumps(config.__file__))",
    )
    assert answer == str(project / "python" / "sglang" / "srt" / "sparse_kv" / "config.py")


def test_the_start_up_file_touches_nothing_where_sglang_is_at_home(wheels, tmp_path):
    for name in ("sglang", "plugin"):
        zipfile.ZipFile(wheels[name, "wheel"]).extractall(tmp_path)
    code = "import sys; print(json.dumps([getattr(f, '__name__', '') for f in sys.meta_path] + sorted(sys.modules)))"
    answer = run_in(tmp_path, code)
    assert "_SGLangElsewhere" not in answer and "sglang" not in answer


@pytest.mark.parametrize("ours", ["wheel", "editable"])
def test_the_console_script_plans_beside_any_sglang(ours, wheels, tmp_path):
    """It never imports SGLang, whose files lie in the same folders in one case and elsewhere in the other."""
    for name, kind in (("sglang", "wheel"), ("plugin", ours)):
        zipfile.ZipFile(wheels[name, kind]).extractall(tmp_path)
    model = REPOSITORY / "docs" / "models" / "llama-3.1-8b.json"
    argv = ["plan", "--model-path", str(model), "--gpu", "h200", "--host-memory", "96GB", "--json"]
    answer = run_in(tmp_path, f"import sys; sys.argv[1:] = {argv!r}\nimport sglang_dualdecoder as s; s.main()")
    assert answer["gpu"] == "H200" and answer["plan"]["host_tokens"] > 700_000
