"""Multi-armed bandits, registered as `rl_lab/BanditGaussian-v0` and `rl_lab/BanditBernoulli-v0`.

An episode is one bandit: the seed of its reset draws what the arms are worth, `steps` pulls later it ends. `arm_means`
sets the arms by hand instead. The observation says nothing a policy could use but its one state; beside it lies

    arm_means    what every arm is worth, for measuring regret

A network must not read it: `components.encoder.keys=[state]`. All attributes are plain data, so snapshots are exact.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Result = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]


class ManyArms(gym.Env):
    """What both bandits share; they differ in how arms are drawn and what a pull pays."""

    metadata = {"render_modes": []}

    def __init__(self, num_arms: int, steps: int, arm_means: Sequence[float] | None, low: float, high: float) -> None:
        if arm_means is not None:
            num_arms = len(arm_means)
        if num_arms < 1 or steps < 1:
            raise ValueError(f"a bandit has at least one arm and one pull, not {num_arms} and {steps}")
        self.observation_space = spaces.Dict(
            {"state": spaces.Discrete(1), "arm_means": spaces.Box(low, high, (num_arms,), np.float32)}
        )
        self.action_space = spaces.Discrete(num_arms)
        self.num_arms, self.steps = num_arms, steps
        self.given_means = None if arm_means is None else [float(mean) for mean in arm_means]
        self.means = np.zeros(num_arms, np.float32)
        self.pulls = 0

    @abstractmethod
    def _draw_means(self) -> np.ndarray:
        """What each arm of a new bandit is worth."""

    @abstractmethod
    def _pay(self, mean: float) -> float:
        """The reward of one pull."""

    def _observe(self) -> dict[str, Any]:
        return {"state": 0, "arm_means": self.means.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        means = self._draw_means() if self.given_means is None else self.given_means
        self.means, self.pulls = np.asarray(means, np.float32), 0
        return self._observe(), {}

    def step(self, action: Any) -> Result:
        self.pulls += 1
        reward = self._pay(float(self.means[int(action)]))
        return self._observe(), reward, self.pulls >= self.steps, False, {}


class GaussianBandit(ManyArms):
    """Arms worth a normal number around 0; a pull pays the arm's worth plus normal noise."""

    def __init__(
        self,
        num_arms: int = 10,
        steps: int = 1000,
        mean_std: float = 1.0,
        reward_std: float = 1.0,
        arm_means: Sequence[float] | None = None,
    ) -> None:
        super().__init__(num_arms, steps, arm_means, -np.inf, np.inf)
        self.mean_std, self.reward_std = mean_std, reward_std

    def _draw_means(self) -> np.ndarray:
        return self.np_random.normal(0.0, self.mean_std, self.num_arms)

    def _pay(self, mean: float) -> float:
        return float(self.np_random.normal(mean, self.reward_std))


class BernoulliBandit(ManyArms):
    """Arms that pay 1 with a chance of their own, else 0; the chances are uniform between `low` and `high`."""

    def __init__(
        self,
        num_arms: int = 10,
        steps: int = 1000,
        low: float = 0.0,
        high: float = 1.0,
        arm_means: Sequence[float] | None = None,
    ) -> None:
        super().__init__(num_arms, steps, arm_means, 0.0, 1.0)
        chances = [low, high, *(self.given_means or ())]
        if not all(0.0 <= chance <= 1.0 for chance in chances) or low > high:
            raise ValueError(f"chances lie between 0 and 1, low first: low={low}, high={high}, arm_means={arm_means}")
        self.low, self.high = low, high

    def _draw_means(self) -> np.ndarray:
        return self.np_random.uniform(self.low, self.high, self.num_arms)

    def _pay(self, mean: float) -> float:
        return float(self.np_random.random() < mean)


for _name, _class in (("BanditGaussian", GaussianBandit), ("BanditBernoulli", BernoulliBandit)):
    gym.register(
        f"rl_lab/{_name}-v0",
        entry_point=f"rl_lab.environments.suites.bandits:{_class.__name__}",
        disable_env_checker=True,  # tested here; Gymnasium's checker would add warnings to every scratch run
    )
