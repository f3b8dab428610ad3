"""Console games of stable-retro as `rl_lab/Retro-v0` with `game:`; Airstriker comes with the package, other ROMs do
not.

An emulator is alone in its process, so every environment gets one of its own (`is_alone_in_its_process`). A game
begins from its saved state, which is why no seed is needed; `frame_skip` and `noop_max` are as in Atari.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import stable_retro
from gymnasium import spaces

from rl_lab.environments.wrappers_observation import area_resize
from rl_lab.types import ConfigError, did_you_mean


class Retro(gym.Env):
    """`state` names a saved state of the game, None its usual beginning."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}
    is_alone_in_its_process = True

    def __init__(
        self,
        game: str = "Airstriker-Genesis-v0",
        state: str | None = None,
        size: int = 64,
        frame_skip: int = 4,
        noop_max: int = 30,
        render_mode: str | None = None,
    ) -> None:
        known = stable_retro.data.list_games()
        if game not in known:
            raise ConfigError(
                f"environment.kwargs.game is '{game}': stable-retro knows no such game.{did_you_mean(game, known)}"
            )
        if size < 1 or frame_skip < 1 or noop_max < 0:
            raise ConfigError(
                f"environment.kwargs.size is {size}, frame_skip is {frame_skip} and noop_max is {noop_max}: write at "
                "least 1, 1 and 0."
            )
        states = stable_retro.data.list_states(game)
        if state is not None and state not in states:
            raise ConfigError(
                f"environment.kwargs.state is '{state}': '{game}' has no such state.{did_you_mean(state, states)} "
                f"It has: {', '.join(states)}."
            )
        begin = stable_retro.State.DEFAULT if state is None else state
        try:
            made = stable_retro.make(
                game, begin, use_restricted_actions=stable_retro.Actions.DISCRETE, render_mode="rgb_array"
            )
        except FileNotFoundError as error:
            raise ConfigError(
                f"environment.kwargs.game is '{game}', whose ROM or state is not here ({error}). Import ROMs that you "
                "own with: python -m stable_retro.import FOLDER"
            ) from error
        self._console: Any = made
        self.size, self.frames_per_agent_step, self.noop_max, self.render_mode = size, frame_skip, noop_max, render_mode
        self.action_space = spaces.Discrete(int(made.action_space.n))
        self.action_labels = tuple(
            " ".join(made.get_action_meaning(action)).lower() or "nothing" for action in range(self.action_space.n)
        )
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        screen, _ = self._console.reset()
        for _ in range(int(self.np_random.integers(self.noop_max + 1))):
            screen = self._console.step(0)[0]
        return area_resize(screen, self.size, self.size), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.frames_per_agent_step):
            screen, reward, terminated, truncated, _ = self._console.step(int(action))
            total += float(reward)
            if terminated or truncated:
                break
        return area_resize(screen, self.size, self.size), total, bool(terminated), bool(truncated), {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.array(self._console.render())

    def close(self) -> None:
        self._console.close()
