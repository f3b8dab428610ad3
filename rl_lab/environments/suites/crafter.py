"""Crafter (Hafner 2021) as `rl_lab/Crafter-v1`: 64 x 64 pixels, 22 achievements, a world that the seed draws.

The package has Gym's oldest interface; here it has Gymnasium's. Death is terminal, 10,000 steps are a cut. The outcomes
are the achievements, each 0 or 1; their geometric mean is the metric `achievement_score`. With numba a reset takes a
tenth of a second instead of one.
"""

from __future__ import annotations

from typing import Any

import crafter
import gymnasium as gym
import numpy as np
from crafter import constants
from gymnasium import spaces

from rl_lab.types import ConfigError

VIDEO_SIZE = 256
SMALLEST = 18  # pixels; two for each of the nine columns that are seen


class Crafter(gym.Env):
    """`has_reward: false` pays nothing, for agents that explore by themselves; achievements are counted."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    outcomes = tuple(f"achievement/{name}" for name in constants.achievements)
    action_labels = tuple(name.replace("_", " ") for name in constants.actions)

    def __init__(
        self, size: int = 64, has_reward: bool = True, length: int = 10_000, render_mode: str | None = None
    ) -> None:
        if size < SMALLEST or length < 1:
            raise ConfigError(
                f"environment.kwargs.size is {size} and length is {length}: write at least {SMALLEST} pixels, below "
                "which nothing is drawn, and at least 1 step."
            )
        self._game = crafter.Env(size=(size, size), reward=has_reward, length=length, seed=0)
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(len(constants.actions))
        self.render_mode, self.max_agent_steps = render_mode, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._game._seed = int(self.np_random.integers(2**31 - 1))
        self._game._episode = 0  # the world is drawn from this pair
        return self._game.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        image, reward, is_over, info = self._game.step(int(action))
        is_dead = info["discount"] == 0.0
        outcome = {f"achievement/{name}": float(count > 0) for name, count in info["achievements"].items()}
        return image, float(reward), is_dead, bool(is_over) and not is_dead, {"outcome": outcome}

    def render(self) -> np.ndarray:  # type: ignore[override]
        return self._game.render((VIDEO_SIZE, VIDEO_SIZE))
