"""Multi-armed bandits, registered as `rl_lab/BanditGaussian-v0` and `rl_lab/BanditBernoulli-v0`.

An episode is one bandit: the seed of its reset draws the arms' mean rewards, `steps` pulls later it ends. `arm_means`
sets them by hand instead. The observation holds one state that never changes, and `arm_means`, for measuring regret; a
network must not read those: `components.encoder.keys=[state]`. All attributes are plain data, so snapshots are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.toy import Result, Toy, register_toy


class ManyArms(Toy):
    """What both bandits share; they differ in `_draw_means` and in what a pull pays."""

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

    def _draw_means(self) -> np.ndarray:
        raise NotImplementedError

    def _pay(self, mean: float) -> float:
        raise NotImplementedError

    def _observe(self) -> dict[str, Any]:
        return {"state": 0, "arm_means": self.means.copy()}

    def _begin(self) -> None:
        means = self._draw_means() if self.given_means is None else self.given_means
        self.means, self.pulls = np.asarray(means, np.float32), 0

    def step(self, action: Any) -> Result:
        self.pulls += 1
        reward = self._pay(float(self.means[int(action)]))
        return self._observe(), reward, self.pulls >= self.steps, False, {}


class GaussianBandit(ManyArms):
    """Means are normal around 0; a pull pays the arm's mean plus normal noise."""

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
    """Arms that pay 1 with a probability of their own, else 0; it is uniform between `low` and `high`."""

    def __init__(
        self,
        num_arms: int = 10,
        steps: int = 1000,
        low: float = 0.0,
        high: float = 1.0,
        arm_means: Sequence[float] | None = None,
    ) -> None:
        super().__init__(num_arms, steps, arm_means, 0.0, 1.0)
        if not all(0.0 <= each <= 1.0 for each in (low, high, *(self.given_means or ()))) or low > high:
            raise ValueError(f"probabilities lie in [0, 1], low first: low={low}, high={high}, arm_means={arm_means}")
        self.low, self.high = low, high

    def _draw_means(self) -> np.ndarray:
        return self.np_random.uniform(self.low, self.high, self.num_arms)

    def _pay(self, mean: float) -> float:
        return float(self.np_random.random() < mean)


register_toy("BanditGaussian", "bandits:GaussianBandit")
register_toy("BanditBernoulli", "bandits:BernoulliBandit")
