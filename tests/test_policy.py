"""A trained policy outside training: what it accepts, its memory, its environment, and its way through pickle."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_lab
from rl_lab import api
from rl_lab.policy import Policy, _unpickled
from rl_lab.types import ConfigError
from tests.tiny_dreamer import TINY_DREAMER

DEBUG = ["preset=debug", "training.phases.train.collect_steps=16", "algorithm.epochs=1", "evaluation.video=false"]
DEBUG += ["logging.tensorboard=false"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A short run that tests may read but not change."""
    runs_dir = tmp_path_factory.mktemp("runs")
    return api.train("ppo_cartpole", overrides=DEBUG, runs_dir=runs_dir, run_id="finished", seed=3, quiet=True)


@pytest.fixture(scope="module")
def recall(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A policy with memory, trained for a moment."""
    overrides = ["preset=debug", "evaluation.video=false", "logging.tensorboard=false"]
    return api.train("ppo_recall", overrides=overrides, runs_dir=tmp_path_factory.mktemp("runs"), quiet=True)


def test_a_policy_says_what_the_methods_of_other_libraries_are_called_here(finished: api.Run) -> None:
    policy: Any = rl_lab.load(finished, device="cpu")
    with pytest.raises(AttributeError, match=r"'Policy' object has no attribute 'predict': write policy\.act\(obs"):
        policy.predict(np.zeros(4))
    with pytest.raises(AttributeError, match=r"no attribute 'save': write policy\.export\(path\)"):
        policy.save("mine")
    with pytest.raises(AttributeError, match="'Policy' object has no attribute 'learn'$"):
        policy.learn(5)


def test_a_policy_acts_on_what_the_environment_gives(finished: api.Run) -> None:
    policy = rl_lab.load(finished)
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    action = policy.act(observation)
    assert env.action_space.contains(action)
    assert policy.act(observation) == action, "deterministic unless asked otherwise"
    many = policy.act(np.stack([observation, -observation, observation]))
    assert many.shape == (3,)
    assert many[0] == many[2] == action
    drawn = {int(policy.act(observation, deterministic=False)) for _ in range(50)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    ("observation", "found"),
    [
        (np.zeros(3), "has shape (3,)"),
        (np.zeros((2, 3)), "has shape (2, 3)"),
        (np.zeros((2, 2, 4)), "has shape (2, 2, 4)"),
        (np.zeros((0, 4)), "has shape (0, 4)"),
        (0.5, "has shape ()"),
        ([[0.0, 1.0], [2.0]], "is not there"),
    ],
)
def test_a_policy_refuses_what_its_environment_never_shows(finished: api.Run, observation: Any, found: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        rl_lab.load(finished).act(observation)
    assert str(refusal.value) == (
        f"policy.act: observation 'vector' {found}; those of CartPole-v1 have shape (4,), or (N, 4) for a batch."
    )


def test_a_policy_of_several_keys_wants_them_all_and_equally_many(runs_dir: Path) -> None:
    pytest.importorskip("minigrid")
    overrides = [*DEBUG, "environment.id=MiniGrid-Empty-5x5-v0"]
    policy = rl_lab.load(api.train("ppo", overrides=overrides, runs_dir=runs_dir, quiet=True))
    shown = gym.make("MiniGrid-Empty-5x5-v0").reset(seed=0)[0]
    policy.act(shown)
    with pytest.raises(ConfigError, match="observation 'direction' is not there; those of MiniGrid-Empty-5x5-v0"):
        policy.act({"image": shown["image"]})
    with pytest.raises(ConfigError, match=r"batches of different sizes: \[\(2,\), \(3,\)\]"):
        policy.act({"image": np.stack([shown["image"]] * 2), "direction": np.zeros(3, int)})


def test_a_continuous_policy_answers_in_the_environments_own_range(runs_dir: Path) -> None:
    run = api.train("ppo_pendulum", overrides=[*DEBUG], runs_dir=runs_dir, quiet=True)
    policy = rl_lab.load(run)
    env = gym.make("Pendulum-v1")
    observation, _ = env.reset(seed=0)
    action = policy.act(observation)
    assert env.action_space.contains(np.asarray(action, np.float32))
    assert policy.act(np.stack([observation] * 4)).shape == (4, 1)


def test_a_policy_without_a_model_cannot_imagine(finished: api.Run) -> None:
    policy = rl_lab.load(finished)
    with pytest.raises(ConfigError, match=r"imagine\(\) needs a model of the world, which PPO does not learn: load a"):
        policy.imagine()


def test_a_policy_with_memory_remembers_until_it_is_reset(recall: api.Run) -> None:
    policy = rl_lab.load(recall)
    cue, blank = np.array([1, 0, 0], np.float32), np.zeros(3, np.float32)
    policy.act(cue)
    remembered = policy._state.clone()
    policy.act(blank)
    assert not np.array_equal(remembered, policy._state)
    policy.reset()
    policy.act(cue)
    assert np.array_equal(remembered, policy._state), "a new episode begins as the first did"
    with pytest.raises(ConfigError, match=r"policy.act was given 2 observations after 1: .* Call policy.reset\(\)"):
        policy.act(np.stack([cue, blank]))
    policy.reset()
    assert len(policy.act(np.stack([cue, blank]))) == 2


# --- some episodes of a batch begin anew -------------------------------------------------------


@pytest.mark.parametrize("which", [[False, True, False], np.array([1]), torch.tensor([False, True, False]), 1])
def test_a_partial_reset_forgets_only_what_it_names(recall: api.Run, which: Any) -> None:
    cues = np.eye(3, dtype=np.float32)
    blank = np.zeros((3, 3), np.float32)
    policy, fresh, remembering = (rl_lab.load(recall) for _ in range(3))
    for each in (policy, remembering):
        each.act(cues)
    policy.reset(which)
    for each in (policy, fresh, remembering):
        each.act(blank)
    expected = remembering._state.clone()
    expected[1] = fresh._state[1]
    assert not torch.equal(fresh._state[1], remembering._state[1])
    torch.testing.assert_close(policy._state, expected)
    policy.act(blank)
    assert not torch.equal(policy._state[1], expected[1]), "the reset counts once"


def test_an_empty_partial_reset_changes_nothing(recall: api.Run) -> None:
    policy = rl_lab.load(recall)
    policy.act(np.eye(3, dtype=np.float32))
    for nothing in ([], np.array([], int), np.zeros(3, bool)):
        policy.reset(nothing)
    assert not policy._begins.any()


@pytest.mark.parametrize("which", [[True, False], [3], [-1], [0.5], "all", [[True], [False], [True]], True])
def test_a_reset_of_what_was_not_there_is_refused(recall: api.Run, which: Any) -> None:
    policy = rl_lab.load(recall)
    policy.act(np.eye(3, dtype=np.float32))
    with pytest.raises(
        ConfigError, match="the last batch had 3 observations, so write 3 booleans or indices from 0 to 2"
    ):
        policy.reset(which)


def test_a_partial_reset_before_any_batch_is_refused(recall: api.Run) -> None:
    with pytest.raises(ConfigError, match=r"there was no batch yet: call policy.reset\(\) before the first policy.act"):
        rl_lab.load(recall).reset([True])


# --- the environment a policy wants ------------------------------------------------------------

TRAINED = {
    "continuous": ("sac_pendulum", ["preset=debug"]),
    "wrapped": ("CartPole-v1:dqn", ["preset=debug", "environment.wrappers=[{id: frame_stack, count: 2}]"]),
    "repeated": ("ppo_pendulum", [*DEBUG, "environment.action_repeat=2", "environment.time_limit=5"]),
    "table": ("q_learning_frozenlake", ["preset=debug"]),
    "random": ("random_cartpole", ["preset=debug"]),
    "world model": ("dreamer_v3_pendulum", [*TINY_DREAMER, "preset=debug"]),
}


@pytest.mark.parametrize("kind", TRAINED)
def test_a_policy_acts_in_its_environment_alone_and_in_many_and_after_pickling(runs_dir: Path, kind: str) -> None:
    experiment, overrides = TRAINED[kind]
    quick = ["evaluation.video=false", "logging.tensorboard=false", "evaluation.final_episodes=0"]
    run = api.train(experiment, overrides=[*overrides, *quick], runs_dir=runs_dir, quiet=True)
    policy = rl_lab.load(run)
    env = policy.environment()
    observation, _ = env.reset(seed=0)
    policy.reset()
    for _ in range(3):
        action = policy.act(observation)
        assert env.action_space.contains(action)
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    again = pickle.loads(pickle.dumps(policy))
    assert repr(again) == repr(policy) and f" for {policy.spec.id}: {policy.spec.action.kind} actions, on cpu>" in repr(
        policy
    )
    state = torch.get_rng_state()
    action = policy.act(observation)
    torch.set_rng_state(state)
    assert np.array_equal(again.act(observation), action), "with its weights and its memory"
    many = again.environment(num_envs=2)
    observations, _ = many.reset(seed=0)
    again.reset()
    for _ in range(8):
        observations, _, terminated, truncated, _ = many.step(again.act(observations))
        again.reset(terminated | truncated)


def test_an_environment_of_a_policy_draws_on_request(finished: api.Run) -> None:
    env = rl_lab.load(finished).environment(render=True)
    env.reset(seed=0)
    assert env.render().dtype == np.uint8


# --- pickling ----------------------------------------------------------------------------------


def act_elsewhere(data: bytes, observation: np.ndarray) -> Any:
    return pickle.loads(data).act(observation)


def test_a_pickled_policy_acts_equally_in_another_process(recall: api.Run) -> None:
    policy = rl_lab.load(recall)
    policy.act(np.eye(3, dtype=np.float32))
    policy.reset([2])
    data, blank = pickle.dumps(policy), np.zeros((3, 3), np.float32)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert np.array_equal(pool.apply(act_elsewhere, (data, blank)), policy.act(blank))


def test_reading_a_pickle_leaves_random_generators_alone(finished: api.Run) -> None:
    data = pickle.dumps(rl_lab.load(finished))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    pickle.loads(data)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("version", "told"), [({"rl_lab_version": "0.0.1"}, "0.0.1"), ({}, "of an unknown version")])
def test_a_policy_pickled_by_another_version_is_refused(version: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=f"was pickled by RL Lab {told}, and this is {rl_lab.__version__}: use that"):
        _unpickled({**version, "content": b"anything"})


def test_a_policy_made_by_hand_says_what_it_lacks(finished: api.Run) -> None:
    loaded = rl_lab.load(finished)
    policy = Policy(loaded.workflow, loaded.blueprint, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="needs a policy that came from rl_lab.load"):
        policy.environment()
    with pytest.raises(pickle.PicklingError, match="Only a policy that came from rl_lab.load can be pickled"):
        pickle.dumps(policy)
