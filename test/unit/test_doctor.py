"""`sglang-sparse-kv doctor`: each finding says what and what to do, and the status whether a server can start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.sparse_kv import doctor, host_memory, plugin
from sglang.srt.sparse_kv.refusals import StartRefused

load_plugins()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "_gpus", list)


def only(findings, subject):
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1, f"{subject} in {found}"
    return found[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_as_a_program_without_a_gpu(more):
    """In a process of its own: it puts all hooks in place."""
    command = [sys.executable, "-c", "import sglang_dualdecoder; sglang_dualdecoder.main()", "doctor", *more]
    environment = {**os.environ, "SGLANG_PLATFORM": "torch_cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    if more:
        said = json.loads(done.stdout)
        assert said["can_start"] is True
        subjects = {finding["subject"] for finding in said["findings"]}
        assert {"versions", "plugin", "hooks", "GPU", "host memory", "locked memory", "huge pages", "NUMA"} <= subjects
        assert all(finding["do"] for finding in said["findings"] if finding["kind"] != "ok"), "each says what to do"
        return
    lines = done.stdout.splitlines()
    assert "note   GPU: there is none; the CPU engine serves; give the server --device cpu" in lines
    assert lines[-1] == "--sparse-kv can start"
    assert all(line.split()[0] in ("ok", "note", "fault") for line in lines[:-1])


def test_a_fault_is_a_status(monkeypatch, capsys):
    monkeypatch.setattr(plugin, "start", lambda group: None)
    monkeypatch.setenv("SGLANG_PLATFORM", "elsewhere")
    assert doctor.run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "fault  GPU: there is none, and SGLANG_PLATFORM is elsewhere; set SGLANG_PLATFORM=torch_cpu" in lines
    assert lines[-1] == "--sparse-kv cannot start: 1 faults"


def test_without_a_choice_of_platform_the_cpu_engine_is_named(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    found = only(doctor.engine(), "GPU")
    assert found.kind == doctor.NOTE and "set SGLANG_PLATFORM=torch_cpu" in found.do


def test_without_a_gpu_and_without_the_cpu_engine_nothing_starts(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    found = only(doctor.engine(), "GPU")
    assert found.kind == doctor.FAULT and "install ./python/cpu_platform" in found.do
    assert only(doctor.versions(), "plugin").kind == doctor.FAULT


def test_another_sglang_is_a_fault(monkeypatch):
    monkeypatch.setattr("sglang.version.__version__", "0.5.16")
    found = only(doctor.versions(), "versions")
    assert found.kind == doctor.FAULT and "found 0.5.16" in found.what and found.do == "install sglang==0.5.17"


def test_a_hook_that_is_not_in_force_is_a_fault(monkeypatch):
    def refuse(group):
        if group == plugin.SCHEDULER:
            raise StartRefused("a.b is not hooked in this process, and then c; look for an error above.")

    monkeypatch.setattr(plugin, "start", refuse)
    found = only(doctor.hooks(), "hooks")
    assert (found.kind, found.do) == (doctor.FAULT, "look for an error above")


def test_environment_that_changes_the_arguments_is_a_fault(monkeypatch):
    monkeypatch.setattr(plugin, "start", lambda group: None)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert only(doctor.hooks(), "environment").kind == doctor.FAULT


@pytest.mark.parametrize(("gpus", "kind"), [([], doctor.OK), (["NVIDIA H200"], doctor.NOTE)])
def test_a_limit_on_locked_memory(monkeypatch, gpus, kind):
    monkeypatch.setattr(doctor, "_gpus", lambda: gpus)
    monkeypatch.setattr(host_memory, "memlock_limit", lambda: 65536)
    assert only(doctor.memory(), "locked memory").kind == kind


def test_little_host_memory_is_noted(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 10**9)
    monkeypatch.setattr(host_memory, "cgroup_limit", lambda: 2 * 10**9)
    found = only(doctor.memory(), "host memory")
    assert found.kind == doctor.NOTE and "limit of 2.0 GB" in found.what


@pytest.mark.parametrize(
    ("pages", "kind"),
    [("always [madvise] never", doctor.OK), ("always madvise [never]", doctor.NOTE), ("", doctor.NOTE)],
)
def test_huge_pages_and_nodes(tmp_path, pages, kind):
    folder = tmp_path / "kernel" / "mm" / "transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text(pages)
    for node in (0, 1):
        (tmp_path / "devices" / "system" / "node" / f"node{node}").mkdir(parents=True)
    findings = list(doctor.kernel_settings(tmp_path))
    assert only(findings, "huge pages").kind == kind
    assert only(findings, "NUMA").what.startswith("2 nodes")


def test_a_machine_without_a_compiler(monkeypatch, tmp_path):
    from sglang.srt.sparse_kv.ops import build

    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    monkeypatch.delenv("SPARSE_KV_LIBRARY", raising=False)
    if not (build.source_dir() / build.LIBRARY).is_file():
        assert only(doctor.compiler(), "kernels").kind == doctor.FAULT
    compiled = tmp_path / f"{build.source_hash(build.source_dir())}-sm90" / build.LIBRARY
    compiled.parent.mkdir()
    compiled.touch()
    assert only(doctor.compiler(), "kernels").kind == doctor.OK


def test_a_check_that_fails_is_a_finding_and_the_rest_runs(monkeypatch):
    monkeypatch.setattr(plugin, "start", lambda group: None)
    monkeypatch.setattr(host_memory, "available", lambda: 1 / 0)
    findings = doctor.examine()
    assert only(findings, "memory").kind == doctor.FAULT
    assert only(findings, "NUMA").kind == doctor.OK


def test_a_slow_link_and_a_slow_host_are_noted(monkeypatch):
    from sglang.srt.sparse_kv import doctor_gpu

    class Region:
        registered = ()
        where = "NUMA node 0"

        def __init__(self, *given):
            pass

        def register(self, *given):
            pass

        def tensor(self, shape, dtype):
            return torch.zeros(1)

    cuda = SimpleNamespace(
        device=lambda number: contextlib.nullcontext(),
        mem_get_info=lambda: (140e9, 150e9),
        get_device_name=lambda number: "NVIDIA H200",
        synchronize=lambda: None,
        device_count=lambda: 1,
    )
    monkeypatch.setattr(doctor_gpu, "torch", SimpleNamespace(cuda=cuda, uint8=torch.uint8))
    monkeypatch.setattr(doctor_gpu.pinned, "Region", Region)
    monkeypatch.setattr(doctor_gpu.pinned, "unregister_all", lambda *given: None)
    monkeypatch.setattr(doctor_gpu.pinned, "numa_node", lambda number: 0)
    for speed, launch, kind in ((50e9, 7e-6, doctor.OK), (12e9, 126e-6, doctor.NOTE)):
        monkeypatch.setattr(doctor_gpu, "rate", lambda host, busy, speed=speed: speed)
        monkeypatch.setattr(doctor_gpu, "launch_seconds", lambda launch=launch: launch)
        findings = list(doctor_gpu.examine())
        assert only(findings, "GPU 0 link").kind == kind and only(findings, "orders").kind == kind
    assert "takes 126 us of the host; from 20 us on" in only(findings, "orders").what


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_link():
    from sglang.srt.sparse_kv import doctor_gpu

    findings = list(doctor_gpu.examine())
    assert findings and all(finding.kind != doctor.FAULT for finding in findings), findings
