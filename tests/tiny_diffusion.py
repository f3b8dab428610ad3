"""Overrides that make a Diffusion Policy small enough for a test, and demonstrations for it."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

TINY_DIFFUSION = [
    "algorithm.prediction_steps=8",
    "algorithm.action_steps=4",
    "controllers.denoiser.channels=[16, 32]",
    "controllers.denoiser.groups=4",
    "controllers.denoiser.kernel_size=3",
    "controllers.denoiser.level_size=16",
    "controllers.sampler.steps=4",
    "components.schedule.levels=20",
    "buffers.demonstrations.batch_size=16",
]
EXAMPLE = Path(__file__).parents[1] / "examples" / "demonstrate_detour.py"


@cache
def detour(episodes: int = 20, shows: str = "state", seed: int = 0) -> dict[str, np.ndarray]:
    """What examples/demonstrate_detour.py writes."""
    spec = importlib.util.spec_from_file_location("demonstrate_detour", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.demonstrations(episodes, seed=seed, shows=shows)


def write_detour(path: Path, episodes: int = 20, shows: str = "state") -> str:
    """The override that names a file of demonstrations, which is written if it is not there."""
    if not path.exists():
        np.savez(path, **detour(episodes, shows))  # type: ignore[arg-type]
    return f"buffers.demonstrations.path={path}"


FOLDER = tempfile.TemporaryDirectory(prefix="rl_lab_demonstrations_")  # until this process ends


def with_detour() -> list[str]:
    """For tables of cases: demonstrations that every test of this process shares."""
    return [write_detour(Path(FOLDER.name) / "detour.npz")]
