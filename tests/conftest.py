"""What every test runs under: strict metric names, one thread, no display. Seeds are arguments of the tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Before anything imports torch, pygame or the logger, which read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RL_LAB_STRICT_METRIC_NAMES"] = "1"
os.environ["SDL_VIDEODRIVER"] = "dummy"
os.environ["SDL_AUDIODRIVER"] = "dummy"

import pytest
import torch

from rl_lab.runs import curve, figures
from rl_lab.runs.files import write_atomic

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are tested on CPUs too, where Triton is installed
with suppress(ImportError):
    import triton  # noqa: F401  # before Mesa's OpenGL: its own LLVM loaded second would crash Python

torch.set_num_threads(1)
ONE_PIXEL = bytes.fromhex(  # a whole PNG
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8ffff3f0005fe02fe0def46b80000000049454e44ae426082"
)


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's own list of trusted packages."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """A kill does not empty the caches of a disk, so tests need not wait for it; processes that they start do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_pictures() -> Iterator[None]:
    """Learning curves are laid out, but one pixel is written: drawing them takes longer than a tiny training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curve, "write_png", lambda path, figure, *, dpi: write_atomic(path, ONE_PIXEL))
        yield


@pytest.fixture
def real_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning curves as a user sees them."""
    monkeypatch.setattr(curve, "write_png", figures.write_png)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Where a test keeps its runs."""
    return tmp_path / "runs"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    mount_point = tmp_path / "small_disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here; the same case runs with an injected ENOSPC")
    if answer.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here ({answer.stderr.strip()}); the case runs with an injected ENOSPC")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)
