"""The bandits: arms from the seed, rewards as their means say, exact snapshots."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_lab.environments import make_environment
from rl_lab.environments.checker import check_environment

IDS = ("rl_lab/BanditGaussian-v0", "rl_lab/BanditBernoulli-v0")


@pytest.mark.parametrize("env_id", IDS)
def test_the_seed_draws_the_arms(env_id: str) -> None:
    env = gym.make(env_id, num_arms=4)
    means = [env.reset(seed=seed)[0]["arm_means"].tolist() for seed in (1, 1, 2)]
    assert means[0] == means[1] != means[2]
    assert len(means[0]) == 4 == env.action_space.n  # type: ignore[attr-defined]


def test_drawn_arms_follow_their_distributions() -> None:
    gaussian = gym.make(IDS[0], num_arms=5000, mean_std=2.0).reset(seed=0)[0]["arm_means"]
    assert gaussian.mean() == pytest.approx(0.0, abs=0.1) and gaussian.std() == pytest.approx(2.0, abs=0.1)
    bernoulli = gym.make(IDS[1], num_arms=5000, low=0.2, high=0.4).reset(seed=0)[0]["arm_means"]
    assert bernoulli.min() >= 0.2 and bernoulli.max() <= 0.4 and bernoulli.mean() == pytest.approx(0.3, abs=0.005)


@pytest.mark.parametrize(
    ("env_id", "deviation"), [(IDS[0], 1.0), (IDS[1], (0.25 * 0.75) ** 0.5)], ids=["gaussian", "bernoulli"]
)
def test_an_arm_pays_what_it_is_worth(env_id: str, deviation: float) -> None:
    env = gym.make(env_id, arm_means=[0.9, 0.25], steps=4000)
    env.reset(seed=0)
    rewards = np.array([float(env.step(1)[1]) for _ in range(4000)])
    assert rewards.mean() == pytest.approx(0.25, abs=0.05)
    assert rewards.std() == pytest.approx(deviation, abs=0.05)
    if "Bernoulli" in env_id:
        assert set(rewards.tolist()) == {0.0, 1.0}


def test_an_episode_is_one_bandit_of_so_many_pulls() -> None:
    environment = make_environment(id=IDS[0], num_envs=2, kwargs={"num_arms": 3, "steps": 2})
    rows = [environment.reset()] + [environment.step(np.array([0, 1])) for _ in range(4)]
    assert [row.is_last.tolist() for row in rows] == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert rows[2].is_terminal.all() and rows[3].is_first.all()
    means = [row.observation["arm_means"] for row in rows]
    assert (means[0] == means[2]).all() and (means[3] == means[4]).all()
    assert (means[2] != means[3]).all(), "a new episode has new arms"
    assert (means[0][0] != means[0][1]).all(), "each environment has arms of its own"
    environment.close()


@pytest.mark.parametrize("env_id", IDS)
def test_a_snapshot_in_mid_episode_is_exact(env_id: str) -> None:
    def make() -> Any:
        return make_environment(id=env_id, num_envs=2, kwargs={"steps": 5})

    def play(environment: Any) -> list[list[float]]:
        return [environment.step(np.array([3, 4])).reward.tolist() for _ in range(9)]

    original, other = make(), make()
    original.reset()
    for _ in range(3):
        original.step(np.array([1, 2]))
    other.reset()
    other.set_state(original.get_state())
    assert play(other) == play(original)
    original.close()
    other.close()


@pytest.mark.parametrize("env_id", IDS)
def test_the_checker_finds_nothing(env_id: str) -> None:
    assert check_environment(lambda: gym.make(env_id, steps=20)) == []


@pytest.mark.parametrize(
    ("env_id", "settings", "message"),
    [
        (IDS[0], {"num_arms": 0}, "at least one arm and one pull, not 0 and 1000"),
        (IDS[1], {"steps": 0}, "at least one arm and one pull, not 10 and 0"),
        (IDS[1], {"high": 1.5}, "probabilities lie in \\[0, 1\\], low first: low=0.0, high=1.5"),
        (IDS[1], {"low": 0.6, "high": 0.5}, "low first: low=0.6, high=0.5"),
        (IDS[1], {"arm_means": [0.5, 2.0]}, r"arm_means=\[0.5, 2.0\]"),
    ],
)
def test_bandits_that_make_no_sense_are_refused(env_id: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gym.make(env_id, **settings)
