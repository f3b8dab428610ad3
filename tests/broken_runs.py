"""Runs that go wrong in a chosen place, which debug mode must name: the environment `tests.broken_runs:Nan-v0` sends a
NaN, BrokenPPO computes one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_lab.types import Batch, LossOutput, Metrics, Phase
from rl_lab.workflows.ppo import PPO

BAD_STEP = 21


class NanEnv(gym.Env):
    """Counts its steps over all episodes; at one of them the reward or the observation is NaN."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, bad: str = "") -> None:
        self.bad, self.steps = bad, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._see(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation, is_bad = self._see(), self.steps == BAD_STEP
        if is_bad and self.bad == "observation":
            observation[1] = np.nan
        reward = float("nan") if is_bad and self.bad == "reward" else 1.0
        return observation, reward, self.steps % 9 == 0, False, {}

    def _see(self) -> np.ndarray:
        return self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)


class BrokenPPO(PPO):
    """PPO that makes a NaN in its third update."""

    def __init__(self, *, bad: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.bad, self._is_time = bad, False

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        self._is_time = phase.progress.run.updates == 2
        metrics = super().update_controller(batch, phase=phase)
        if self._is_time and self.bad == "parameter":
            with torch.no_grad():
                next(iter(self.actor.parameters()))[1, 2] = float("nan")  # type: ignore[attr-defined]
        return metrics

    def loss(self, sample: Batch, **options: Any) -> LossOutput:
        found = super().loss(sample, **options)
        if self._is_time and self.bad == "loss":
            found.terms["value"] = found.terms["value"] + torch.log(-sample["return"].abs().mean() - 1.0)
        if self._is_time and self.bad == "gradient":
            weight = next(iter(self.critic.parameters()))  # type: ignore[attr-defined]
            found.terms["value"] = found.terms["value"] + torch.sqrt((weight * 0.0).sum())
        return found


gym.register("Nan-v0", entry_point=NanEnv)
