"""The toys: what a perfect and what a thoughtless player get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rl_lab.environments  # noqa: F401  (registers the toys)


def mean_return(env: gym.Env, policy: Callable[[Any, int], Any], *, episodes: int = 200) -> float:
    total = 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        step_in_episode, is_over = 0, False
        while not is_over:
            observation, reward, terminated, truncated, _ = env.step(policy(observation, step_in_episode))
            total, step_in_episode, is_over = total + float(reward), step_in_episode + 1, terminated or truncated
    return total / episodes


class Rememberer:
    def __call__(self, observation: np.ndarray, step_in_episode: int) -> int:
        if step_in_episode == 0:
            self.cue = int(np.argmax(observation))
        return self.cue


def catch(observation: np.ndarray, _: int) -> int:
    ball = int(np.argwhere(observation[:-1, :, 0])[0][1]) if observation[:-1].any() else 0
    paddle = int(np.argwhere(observation[-1, :, 0])[1][0])
    return 1 + int(np.sign(ball - paddle))


def follow(observation: np.ndarray, _: int) -> int:
    bar, place = (int(np.argwhere(observation[row, :, 0])[2][0]) for row in (0, -1))
    return 1 + int(np.sign(bar - place))


SKILLED: dict[str, Callable[[Any, int], Any]] = {
    "Corridor": lambda observation, _: 1,
    "Recall": Rememberer(),
    "PointMass": lambda observation, _: np.clip(-observation[:1] * 2 - observation[1:] * 2, -1, 1),
    "MultiTarget": lambda observation, _: observation,
    "MaskedChain": lambda observation, _: int(np.argmax(observation["place"])) % 4,
    "PixelCatch": catch,
    "PixelFollow": follow,
}


@pytest.mark.parametrize("name", SKILLED)
def test_skill_reaches_the_threshold_and_chance_does_not(name: str) -> None:
    env = gym.make(f"rl_lab/{name}-v0")
    assert env.spec is not None and env.spec.reward_threshold is not None
    assert mean_return(env, SKILLED[name]) >= env.spec.reward_threshold
    env.action_space.seed(0)

    def chance(observation: Any, _: int) -> Any:
        if isinstance(observation, dict):
            return env.action_space.sample(mask=observation["action_mask"])
        return env.action_space.sample()

    assert mean_return(env, chance) < env.spec.reward_threshold - 0.3


def test_recall_without_memory_is_worth_a_coin_flip() -> None:
    env = gym.make("rl_lab/Recall-v0", delay=5)
    assert mean_return(env, lambda observation, _: 0, episodes=500) == pytest.approx(0.5, abs=0.06)
    observation, _ = env.reset(seed=0)
    shown = [observation] + [env.step(0)[0] for _ in range(6)]
    assert shown[0][:2].sum() == 1 and all(not frame.any() for frame in shown[1:6])
    assert shown[6].tolist() == [0, 0, 1]


def test_a_masked_action_raises() -> None:
    env = gym.make("rl_lab/MaskedChain-v0")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action 3 is masked at place 0; allowed: 0, 1"):
        env.step(3)
