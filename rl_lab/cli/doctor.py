"""Check Python, packages, devices, rendering and the disk. Each line is ok, warn or fail, with a cure.
Exit code 1 when something failed.

examples:
  rl-lab doctor
  rl-lab doctor --runs-dir /data/runs
  rl-lab doctor --json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rl_lab.cli.parsing import JSON, RUNS_DIR, quiet, runs_dir_of
from rl_lab.cli.printing import print_json
from rl_lab.utils.graphics import BACKENDS, why_it_fails, why_not
from rl_lab.utils.processes import available_cores

INSTALL = "pip install -c constraints.txt -e .   (or: make install)"
GIB = 2**30
DISK_FAIL_BYTES, DISK_WARN_BYTES = GIB // 4, 5 * GIB  # a few checkpoints; a few days of runs
SHARED_MEMORY_WARN_BYTES = 128 * 2**20  # Docker gives 64 MiB, which image environments outgrow
PROBE_TIMEOUT_S = 60
# A program of its own: a broken OpenGL driver ends its process, and must not end the doctor.
RENDER_PROBE = """
import rl_lab
environment = rl_lab.make_env("CartPole-v1", render=True)
environment.reset()
frame = environment.render()
environment.close()
print("frame", *frame.shape, int(frame.max()))
"""


MUJOCO_PROBE = """
import os
os.environ["MUJOCO_GL"] = "{backend}"
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    assert renderer.render().max() > 0, "a black image"
"""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    cure: str = ""


ARGUMENTS = (
    RUNS_DIR,
    JSON,
    quiet("print only what is not ok"),
)


def run(arguments: argparse.Namespace) -> int:
    runs_dir = runs_dir_of(arguments)
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_python,
        check_packages,
        check_torch,
        check_rendering,
        check_opengl,
        check_video,
        lambda: check_disk(runs_dir),
        check_shared_memory,
        check_extras,
    ]
    findings = []
    for check in checks:
        for finding in check():
            findings.append(finding)
            if not arguments.json and not (arguments.quiet and finding.state == "ok"):
                print(render(finding), flush=True)
    failed = any(finding.state == "fail" for finding in findings)
    if arguments.json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    elif not arguments.quiet:
        print("something needs mending" if failed else "ready: rl-lab train")
    return 1 if failed else 0


def render(finding: Finding) -> str:
    line = f"{finding.state:<5} {finding.name:<14} {finding.detail}"
    return f"{line}\n      {'':<14} -> {finding.cure}" if finding.cure else line


def check_python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    if sys.dont_write_bytecode:
        cure = "unset PYTHONDONTWRITEBYTECODE: without bytecode every start imports torch about twice as slowly"
        yield Finding("bytecode", "warn", "Python is set to keep no bytecode", cure)


def check_packages() -> Iterator[Finding]:
    """Every dependency our own metadata names, against what is installed."""
    version = _installed("rl-lab")
    if version is None:
        yield Finding("packages", "fail", "rl-lab is not installed in this Python", INSTALL)
        return
    good = Finding("packages", "ok", f"rl-lab {version} and everything it requires")
    yield Finding("packages", "fail", "; ".join(problems), INSTALL) if (problems := _problems()) else good
    if _installed("pygame") and _installed("pygame-ce"):
        cure = "pip uninstall -y pygame pygame-ce && pip install -c constraints.txt pygame-ce"
        yield Finding("pygame", "warn", "pygame and pygame-ce overwrite each other's files", cure)
    mujoco = _installed("mujoco")
    if mujoco is not None and int(mujoco.partition(".")[0]) >= 4:
        detail = f"mujoco {mujoco} breaks every environment of dm_control"
        yield Finding("mujoco", "warn", detail, "pip install -c constraints.txt 'mujoco<4'")


def check_torch() -> Iterator[Finding]:
    if _installed("torch") is None:
        yield Finding("torch", "fail", "not installed", "pip install -c constraints.txt torch")
        return
    start = time.perf_counter()
    import torch

    yield Finding("torch", "ok", f"{torch.__version__}, imported in {time.perf_counter() - start:.1f} s")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        yield Finding("device", "ok", f"cuda: {', '.join(names)} (device=auto takes the first)")
    elif shutil.which("nvidia-smi") and torch.version.cuda is None:
        release = torch.__version__.partition("+")[0]
        cure = f"pip install --force-reinstall torch=={release}   (see docs/troubleshooting.md)"
        yield Finding("device", "warn", "this machine has an NVIDIA driver, but torch is a CPU build", cure)
    elif shutil.which("nvidia-smi"):
        cure = "nvidia-smi must list a GPU; its driver must support CUDA " + str(torch.version.cuda)
        yield Finding("device", "warn", "torch was built for CUDA but sees no GPU", cure)
    else:
        yield Finding("device", "ok", "cpu")
    cores, threads = available_cores(), torch.get_num_threads()
    detail = f"{cores} cores, {threads} torch threads, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"
    cure = f"export OMP_NUM_THREADS={cores}: more threads than cores only wait"
    yield Finding("threads", "warn", detail, cure) if threads > cores else Finding("threads", "ok", detail)


def check_rendering() -> Iterator[Finding]:
    """Draw one frame without a screen, as evaluation videos do."""
    try:
        probe = _draw_a_frame()
    except subprocess.TimeoutExpired:
        cure = "export SDL_VIDEODRIVER=offscreen MUJOCO_GL=egl"
        yield Finding("rendering", "fail", f"no frame within {PROBE_TIMEOUT_S} s", cure)
        return
    shape = next((line.split()[1:] for line in probe.stdout.splitlines() if line.startswith("frame ")), None)
    if probe.returncode == 0 and shape and shape[-1] != "0":
        screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or sys.platform == "darwin"
        shown = "opens a window" if screen else "writes mp4 (no display here)"
        yield Finding("rendering", "ok", f"CartPole-v1 frame {' x '.join(shape[:-1])}; `rl-lab play` {shown}")
    else:
        reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        cure = "export SDL_VIDEODRIVER=offscreen; pip install -c constraints.txt pygame-ce   (docs/troubleshooting.md)"
        yield Finding("rendering", "fail", f"drawing CartPole-v1 failed: {reason}", cure)


def check_opengl() -> Iterator[Finding]:
    """3-D simulators draw with OpenGL, through the first of EGL, OSMesa and GLFW that works."""
    reasons = {name: why_not(name) for name in BACKENDS}
    if _installed("mujoco") is not None:
        tried = {name: why_it_fails(MUJOCO_PROBE.format(backend=name)) for name, why in reasons.items() if not why}
        reasons |= tried
    works = [name for name, why in reasons.items() if not why]
    missing = "; ".join(f"{name}: {why} (Debian: {BACKENDS[name].packages})" for name, why in reasons.items() if why)
    chosen = os.environ.get("MUJOCO_GL")
    if works and chosen in (None, *works):
        detail = f"{chosen or works[0]} is used" + (f"; not needed: {missing}" if missing else "")
        yield Finding("opengl", "ok", detail)
    elif works:
        yield Finding("opengl", "warn", f"MUJOCO_GL={chosen} does not work: {missing}", f"export MUJOCO_GL={works[0]}")
    else:
        detail = f"no 3-D images here; training goes on without videos of MuJoCo environments. {missing}"
        yield Finding("opengl", "warn", detail, f"apt install {BACKENDS['egl'].packages}")


def _draw_a_frame() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RENDER_PROBE]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)


def check_video() -> Iterator[Finding]:
    cure = "pip install -c constraints.txt 'imageio[ffmpeg]'"
    if _installed("imageio-ffmpeg") is None:
        yield Finding("video", "fail", "imageio-ffmpeg is not installed: no mp4 can be written", cure)
        return
    import imageio_ffmpeg

    try:
        yield Finding("video", "ok", f"ffmpeg {imageio_ffmpeg.get_ffmpeg_version()}")
    except RuntimeError as error:  # raised where the package brings no binary for this platform
        yield Finding("video", "fail", str(error), "install ffmpeg, or export IMAGEIO_FFMPEG_EXE=/path/to/ffmpeg")


def check_disk(runs_dir: Path) -> Iterator[Finding]:
    """Write and remove a file where runs would lie, without leaving a new directory behind."""
    place = runs_dir.absolute()
    while not place.exists():
        place = place.parent
    elsewhere = "choose a writable place: rl-lab train --runs-dir DIR"
    if not place.is_dir():
        yield Finding("runs directory", "fail", f"{place} is a file", elsewhere)
        return
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".rl-lab-doctor-") as file:
            file.write(b"write test")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield Finding("runs directory", "fail", f"cannot write in {place}: {error.strerror}", elsewhere)
        return
    free = shutil.disk_usage(place).free
    detail = f"{runs_dir.absolute()}: writable, {free / GIB:.1f} GiB free"
    if free < DISK_FAIL_BYTES:
        yield Finding("runs directory", "fail", detail, "free some space, or " + elsewhere)
    elif free < DISK_WARN_BYTES:
        yield Finding("runs directory", "warn", detail, "enough for short runs; free some space before long ones")
    else:
        yield Finding("runs directory", "ok", detail)


def check_shared_memory() -> Iterator[Finding]:
    """Asynchronous environments pass observations through shared memory."""
    place = Path("/dev/shm")
    if not place.is_dir():  # macOS and Windows have no such file system and no such limit
        return
    total = shutil.disk_usage(place).total
    is_small, detail = total < SHARED_MEMORY_WARN_BYTES, f"{place}: {total / GIB:.1f} GiB"
    cure = "docker run --shm-size=1g, or environment.vectorization=sync"
    yield Finding("shared memory", "warn", detail, cure) if is_small else Finding("shared memory", "ok", detail)


def check_extras() -> Iterator[Finding]:
    """Which optional families of packages are here; a missing one is no fault."""
    missing = {extra: _problems(extra) for extra in _extras()}
    present = ", ".join(extra for extra, problems in missing.items() if not problems) or "none"
    absent = ", ".join(extra for extra, problems in missing.items() if problems) or "none"
    yield Finding("extras", "ok", f"installed: {present}; not installed: {absent}")


def _extras() -> list[str]:
    if _installed("rl-lab") is None:
        return []
    return importlib.metadata.metadata("rl-lab").get_all("Provides-Extra") or []


def _problems(extra: str = "") -> list[str]:
    """What of our own requirements (those of one extra, or the core ones) is missing or of a wrong version."""
    from packaging.requirements import Requirement

    problems = []
    for requirement in map(Requirement, importlib.metadata.requires("rl-lab") or []):
        belongs = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if not belongs or (extra and requirement.marker is None):
            continue
        if requirement.name == "rl-lab":  # an extra made of extras
            problems += [problem for part in requirement.extras for problem in _problems(part)]
            continue
        version = _installed(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return problems


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
