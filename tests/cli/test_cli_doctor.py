"""`doctor`: every finding has a state, and every fault a cure."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from rl_lab.cli import doctor
from rl_lab.cli.doctor import GIB, Finding

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def working_graphics(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws here is tried by two tests alone: each try is a process."""
    monkeypatch.setattr(doctor, "why_not", lambda name: "")
    monkeypatch.setattr(doctor, "why_it_fails", lambda probe: "")
    monkeypatch.delenv("MUJOCO_GL", raising=False)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the rendering program's answer."""

    def answer(returncode: int = 0, stdout: str = "frame 400 600 3 255\n", stderr: str = "") -> None:
        completed = subprocess.CompletedProcess([], returncode, stdout, stderr)
        monkeypatch.setattr(doctor, "_draw_a_frame", lambda: completed)

    return answer


def the(findings: Any, name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_doctor_reports_every_check_and_is_json(rl: Any, probe: Any, tmp_path: Path) -> None:
    probe()
    answer = rl("doctor", "--json", "--runs-dir", tmp_path)
    report = json.loads(answer.out)
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "packages", "torch", "device", "threads", "rendering", "video", "runs directory"} <= names
    assert answer.code == (0 if report["ok"] else 1)
    assert all(finding["cure"] for finding in report["findings"] if finding["state"] != "ok")


def test_a_failure_is_exit_1_with_its_cure(rl: Any, probe: Any, tmp_path: Path) -> None:
    probe(returncode=-11, stdout="", stderr="")
    answer = rl("doctor", "--runs-dir", tmp_path)
    assert answer.code == 1
    assert "fail  rendering" in answer.out and "-> export SDL_VIDEODRIVER=offscreen" in answer.out
    assert "something needs mending" in answer.out


def test_quiet_prints_only_what_is_not_ok(rl: Any, probe: Any, tmp_path: Path) -> None:
    probe(returncode=1, stderr="Traceback\nImportError: no pygame\n")
    out = rl("doctor", "-q", "--runs-dir", tmp_path).out
    assert "ImportError: no pygame" in out and "\nok" not in out and not out.startswith("ok")


def test_a_black_frame_is_no_frame(probe: Any) -> None:
    probe(stdout="frame 400 600 3 0\n")
    assert the(doctor.check_rendering(), "rendering").state == "fail"


def test_a_hanging_renderer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **keywords: Any) -> None:
        raise subprocess.TimeoutExpired("python", keywords["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert "no frame within" in the(doctor.check_rendering(), "rendering").detail


@pytest.mark.parametrize(("free", "state"), [(GIB // 10, "fail"), (GIB, "warn"), (50 * GIB, "ok")])
def test_disk_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(100 * GIB, 0, free))
    finding = the(doctor.check_disk(tmp_path / "runs"), "runs directory")
    assert finding.state == state and bool(finding.cure) == (state != "ok")
    assert not (tmp_path / "runs").exists() and list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert "is a file" in the(doctor.check_disk(tmp_path / "runs"), "runs directory").detail


def test_an_unwritable_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refuse)
    finding = the(doctor.check_disk(tmp_path), "runs directory")
    assert finding.state == "fail" and "Permission denied" in finding.detail and "--runs-dir" in finding.cure


def test_small_shared_memory_names_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(64 * 2**20, 0, 0))
    finding = the(doctor.check_shared_memory(), "shared memory")
    assert finding.state == "warn" and "--shm-size" in finding.cure


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: list[str]) -> None:
    monkeypatch.setattr(doctor, "_installed", versions.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)


def test_packages_missing_or_of_a_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["torch>=2.11", "omegaconf<2.4", "numpy>=2", 'box2d; extra == "box2d"']
    installed(monkeypatch, {"rl-lab": "0.1.0", "torch": "2.13.0+cpu", "omegaconf": "2.4.1"}, requires)
    finding = the(doctor.check_packages(), "packages")
    assert finding.state == "fail"
    assert finding.detail == "omegaconf 2.4.1 is not <2.4; numpy is missing"
    assert "constraints.txt" in finding.cure


def test_not_installed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {}, [])
    assert the(doctor.check_packages(), "packages").detail == "rl-lab is not installed in this Python"
    assert the(doctor.check_torch(), "torch").state == "fail"
    assert the(doctor.check_video(), "video").state == "fail"


def test_two_pygames_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"rl-lab": "0.1.0", "pygame": "2.6", "pygame-ce": "2.5"}, [])
    assert "pip uninstall -y pygame" in the(doctor.check_packages(), "pygame").cure


def test_extras_present_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ['minigrid>=3; extra == "minigrid"', 'mujoco<4; extra == "mujoco"', 'rl-lab[mujoco]; extra == "dmc"']
    installed(monkeypatch, {"rl-lab": "0.1.0", "minigrid": "3.2", "mujoco": "4.0"}, requires)
    monkeypatch.setattr(doctor, "_extras", lambda: ["minigrid", "mujoco", "dmc"])
    assert the(doctor.check_extras(), "extras").detail == "installed: minigrid; not installed: mujoco, dmc"


def test_a_cpu_build_beside_an_nvidia_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = the(doctor.check_torch(), "device")
    assert finding.state == "warn" and "CPU build" in finding.detail and "pip install" in finding.cure
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "sees no GPU" in the(doctor.check_torch(), "device").detail


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert the(doctor.check_torch(), "threads").state == "warn"


def test_missing_bytecode_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert "PYTHONDONTWRITEBYTECODE" in the(doctor.check_python(), "bytecode").cure
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert [finding.name for finding in doctor.check_python()] == ["python"]


def test_opengl_names_what_is_used_what_is_missing_and_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"egl": "no EGL device can be opened", "osmesa": "", "glfw": "GLFW finds no display"}
    monkeypatch.setattr(doctor, "why_not", reasons.__getitem__)
    (finding,) = doctor.check_opengl()
    assert finding.state == "ok" and finding.detail.startswith("osmesa is used; not needed: egl: no EGL device")
    assert "(Debian: libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri)" in finding.detail
    monkeypatch.setenv("MUJOCO_GL", "egl")
    (finding,) = doctor.check_opengl()
    assert finding.state == "warn" and finding.cure == "export MUJOCO_GL=osmesa"
    reasons["osmesa"] = "libOSMesa is not installed"
    (finding,) = doctor.check_opengl()
    assert finding.state == "warn" and "training goes on without videos" in finding.detail
    assert finding.cure.startswith("apt install libegl1") and "libosmesa6" in finding.detail


def test_a_backend_that_opens_but_cannot_draw_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"mujoco": "3.17.0"}, [])
    monkeypatch.setattr(doctor, "why_it_fails", lambda probe: "it crashed (signal 11)" if '"egl"' in probe else "")
    (finding,) = doctor.check_opengl()
    assert finding.detail.startswith("osmesa is used; not needed: egl: it crashed (signal 11)")


def test_mujoco_4_and_two_pygames_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"rl-lab": "0.1.0", "mujoco": "4.0.0", "pygame": "2.6", "pygame-ce": "2.5"}, [])
    findings = list(doctor.check_packages())
    assert "mujoco 4.0.0 breaks every environment of dm_control" in the(findings, "mujoco").detail
    assert "mujoco<4" in the(findings, "mujoco").cure
    assert "pygame-ce" in the(findings, "pygame").cure
