"""Memory Maze (Pasukonis et al. 2022) as `memory_maze/9x9` to `15x15`: find coloured objects again and again.

The package imports the old `gym`, which stands for gymnasium while it does. A maze is drawn when an environment is
built, so every episode builds one from its seed. Pictures are drawn without shadows and smooth edges: several times
faster where no GPU draws. An episode is cut at its time limit and never terminal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration

from rl_lab.environments.rendering import prepare_headless
from rl_lab.types import ConfigError

SIZES = {"9x9": 1000, "11x11": 2000, "13x13": 3000, "15x15": 4000}  # agent steps of an episode
LABELS = ("nothing", "forward", "left", "right", "forward left", "forward right")


@contextmanager
def gymnasium_as_gym() -> Iterator[None]:
    """Code inside that imports `gym` gets gymnasium; nobody else does."""
    names: dict[str, ModuleType] = {
        "gym": gym,
        "gym.spaces": spaces,
        "gym.envs": gym.envs,
        "gym.envs.registration": registration,
    }
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def is_worth_reading(record: logging.LogRecord) -> bool:
    """dm_control warns of every target it puts into a maze, at every reset: targets do not move."""
    return "no free joint" not in record.getMessage()


class MemoryMaze(gym.Env):
    """One maze per episode. `is_visible` lowers the walls and raises the targets, which makes it easier."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
    action_labels = LABELS

    def __init__(
        self, maze: str = "9x9", size: int = 64, is_visible: bool = False, render_mode: str | None = None
    ) -> None:
        if maze not in SIZES:
            raise ConfigError(f"environment.kwargs.maze is {maze!r}. Allowed: {', '.join(SIZES)}.")
        prepare_headless()
        with gymnasium_as_gym():
            from memory_maze import tasks

        logging.getLogger("absl").addFilter(is_worth_reading)
        self._build = getattr(tasks, f"memory_maze_{maze}")
        self.size, self.is_visible, self.render_mode = size, is_visible, render_mode
        self.max_agent_steps = SIZES[maze]
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(len(LABELS))
        self._maze: Any = None
        self._image = np.zeros((size, size, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        drawn = int(self.np_random.integers(2**31 - 1))
        self._maze = self._build(
            seed=drawn, camera_resolution=self.size, good_visibility=self.is_visible, image_only_obs=True
        )
        quality = self._maze.task.root_entity.mjcf_model.root.visual.quality
        quality.shadowsize, quality.offsamples = 0, 0
        return self._look(self._maze.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time_step = self._maze.step(int(action))
        return self._look(time_step), float(time_step.reward or 0.0), False, bool(time_step.last()), {}

    def _look(self, time_step: Any) -> np.ndarray:
        self._image = time_step.observation  # a new array at every step
        return self._image

    def render(self) -> np.ndarray:  # type: ignore[override]
        return self._image

    def close(self) -> None:
        if self._maze is not None:
            self._maze.close()
        self._maze = None
