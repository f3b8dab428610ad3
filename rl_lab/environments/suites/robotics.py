"""Push-T and Meta-World need nothing but the wrapper `success`; their packages live in virtual environments of their
own (docs/environments.md)."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from rl_lab.environments.wrappers import StepResult, register_wrapper, with_outcome


@register_wrapper("success")
class Success(gym.Wrapper):
    """The outcome `success`: 1 if `info[key]` was true at any step of the episode"""

    outcomes = ("success",)

    def __init__(self, env: gym.Env, key: str = "success") -> None:
        super().__init__(env)
        self.key, self.has_succeeded = key, False

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.has_succeeded = False
        return self.env.reset(**options)

    def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.has_succeeded = self.has_succeeded or bool(info.get(self.key, False))
        return observation, reward, terminated, truncated, with_outcome(info, success=float(self.has_succeeded))
