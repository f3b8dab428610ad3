"""Learning is the proof of an RL algorithm: each one solves a toy environment in seconds."""

from __future__ import annotations

import pytest

from rl_lab.composition import compose
from rl_lab.wiring import build

FAST_PPO = [
    "environment.num_envs=16",
    "algorithm.epochs=4",
    "algorithm.minibatch_size=0.25",
    "optimizers.controller.learning_rate=3e-3",
    "training.phases.train.collect_steps=32",
]
QUIET = ["evaluation.final_episodes=50", "evaluation.num_envs=10", "evaluation.timeout_steps=500"]


def score(experiment: str, *overrides: str) -> float:
    """The deterministic evaluation return after training."""
    trained = build(compose(experiment, [*QUIET, *overrides]), run=None, quiet=True)
    try:
        trained.orchestrator.run()
        assert trained.housekeeping.last_score is not None
        return trained.housekeeping.last_score
    finally:
        trained.close()


def steps(count: int) -> str:
    return f"training.phases.train.duration_steps={count}"


def test_ppo_learns_discrete_actions() -> None:
    assert score("rl_lab/Corridor-v0:ppo", *FAST_PPO, steps(10_000)) > 0.9


def test_ppo_learns_continuous_actions_with_normalisation() -> None:
    normalised = ["components.observation_normalizer.mode=rolling", "components.reward_normalizer.mode=return_scale"]
    untrained = score("rl_lab/PointMass-v0:ppo", *FAST_PPO, *normalised, steps(512))
    assert score("rl_lab/PointMass-v0:ppo", *FAST_PPO, *normalised, steps(30_000)) > 0.4 * untrained  # returns < 0


def test_ppo_learns_several_actions_at_once() -> None:
    assert score("rl_lab/MultiTarget-v0:ppo", *FAST_PPO, steps(15_000)) > 0.9 * score_limit("rl_lab/MultiTarget-v0")


def test_ppo_learns_under_action_masks() -> None:
    assert score("rl_lab/MaskedChain-v0:ppo", *FAST_PPO, steps(10_000)) >= score_limit("rl_lab/MaskedChain-v0")


def test_ppo_learns_from_pixels() -> None:
    small = ["controllers.actor.hidden_sizes=[]", "controllers.critic.hidden_sizes=[]", "algorithm.discount=0.9"]
    learnt = score("rl_lab/PixelCatch-v0:ppo", *FAST_PPO, *small, "components.encoder.image_features=64", steps(13_000))
    assert learnt > 0.6  # a random policy catches one ball in five: -0.6


def test_ppo_with_memory_solves_what_ppo_without_cannot() -> None:
    assert score("ppo_recall", steps(40_000)) > 0.95
    assert score("ppo_recall", "memory=none", steps(40_000)) < 0.7


@pytest.mark.parametrize("experiment", ["reinforce_cartpole", "reinforce_cartpole_no_baseline"])
def test_reinforce_learns(experiment: str) -> None:
    corridor = ["environment.id=rl_lab/Corridor-v0", "training.phases.train.collect_steps=16"]
    assert score(experiment, *corridor, steps(15_000)) > 0.9


def test_the_default_run_solves_cartpole() -> None:
    assert score("ppo_cartpole") >= 475


def score_limit(environment_id: str) -> float:
    """The return from which the environment counts as solved."""
    import gymnasium

    threshold = gymnasium.spec(environment_id).reward_threshold
    assert threshold is not None
    return float(threshold)
