"""What every test runs under: strict metric names, one thread, no display. Seeds are arguments of the tests."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch, pygame or the logger, which read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RL_LAB_STRICT_METRIC_NAMES"] = "1"
os.environ["SDL_VIDEODRIVER"] = "dummy"
os.environ["SDL_AUDIODRIVER"] = "dummy"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Where a test keeps its runs."""
    return tmp_path / "runs"
