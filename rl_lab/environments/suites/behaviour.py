"""DeepMind's behaviour suite as `bsuite/<experiment>`; `number` is one of its settings, 0 the easiest.

Its images of digits (mnist) would be downloaded and are left out. Every episode builds its environment from its seed;
what defines the task (`mapping_seed`) stays the experiment's own.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.types import ConfigError

EXPERIMENTS = (
    "bandit bandit_noise bandit_scale cartpole cartpole_noise cartpole_scale cartpole_swingup catch catch_noise "
    "catch_scale deep_sea deep_sea_stochastic discounting_chain memory_len memory_size mountain_car mountain_car_noise "
    "mountain_car_scale umbrella_distract umbrella_length"
).split()


class BSuite(gym.Env):
    """One setting of one experiment, with Gymnasium's interface; rewards and observations are untouched."""

    metadata = {"render_modes": []}

    def __init__(self, experiment: str, number: int = 0, render_mode: str | None = None) -> None:
        from bsuite import bsuite as suite
        from bsuite import sweep

        count = sum(each.split("/")[0] == experiment for each in sweep.SWEEP)
        if not 0 <= number < count:
            raise ConfigError(
                f"environment.kwargs.number of 'bsuite/{experiment}' is {number}: write one of 0 to {count - 1}."
            )
        self._make = suite.EXPERIMENT_NAME_TO_ENVIRONMENT[experiment]
        self._settings = dict(sweep.SETTINGS[f"{experiment}/{number}"])
        self._takes_seed = "seed" in inspect.signature(self._make).parameters
        self.render_mode = render_mode
        self._task: Any = self._make(**self._settings)
        seen, done = self._task.observation_spec(), self._task.action_spec()
        low, high = (np.broadcast_to(getattr(seen, name, end), seen.shape) for name, end in BOUNDS)
        self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        self.action_space = spaces.Discrete(int(done.num_values))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31 - 1))
        self._task = self._make(**{**self._settings, **({"seed": drawn} if self._takes_seed else {})})
        if not self._takes_seed and hasattr(self._task, "_rng"):
            self._task._rng = np.random.RandomState(drawn)  # deep_sea_stochastic draws from it and takes no seed
        return self._observation(self._task.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time_step = self._task.step(int(action))
        is_over = bool(time_step.last())
        is_terminal = is_over and time_step.discount == 0.0
        return self._observation(time_step), float(time_step.reward), is_terminal, is_over and not is_terminal, {}

    def _observation(self, time_step: Any) -> np.ndarray:
        return np.asarray(time_step.observation, np.float32)


BOUNDS = (("minimum", -np.inf), ("maximum", np.inf))

for _experiment in EXPERIMENTS:
    gym.register(
        f"bsuite/{_experiment}",
        entry_point="rl_lab.environments.suites.behaviour:BSuite",
        kwargs={"experiment": _experiment},
    )
