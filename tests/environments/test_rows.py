"""The row convention, whichever way the environments are run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.environments import make_environment
from rl_lab.environments.base import Environment
from rl_lab.types import EnvRows
from rl_lab.utils import tree

from .helpers import as_tree, play, random_actions

TOYS = ["rl_lab/Counter-v0", "rl_lab/Recall-v0", "rl_lab/MultiTarget-v0", "rl_lab/PointMass-v0", "rl_lab/PixelCatch-v0"]


def check_convention(environment: Environment, rows: list[EnvRows]) -> None:
    assert rows[0].is_first.all() and not rows[0].is_last.any() and (rows[0].reward == 0).all()
    for before, row in itertools.pairwise(rows):
        np.testing.assert_array_equal(row.is_first, before.is_last)
        assert (row.reward[row.is_first] == 0).all()
        assert not (row.is_terminal & ~row.is_last).any()
    for row in rows:
        assert row.reward.dtype == np.float32 and row.reward.shape == (environment.num_envs,)
        assert row.observation.keys() == environment.spec.observation.keys()
        for key, spec in environment.spec.observation.items():
            assert row.observation[key].shape == (environment.num_envs, *spec.shape)
            assert row.observation[key].dtype == spec.dtype
            assert row.observation[key].flags.c_contiguous
    arrays = [array for row in rows for array in (row.reward, row.is_first, row.is_last, *row.observation.values())]
    assert len({array.__array_interface__["data"][0] for array in arrays}) == len(arrays)  # nothing is written again


def check_counter(rows: list[EnvRows], actions: list[np.ndarray], *, length: int = 5) -> None:
    """Every number of a Counter row, derived by hand from the row before."""
    episode = rows[0].observation["vector"][:, 0].copy()
    step_in_episode = np.zeros_like(episode)
    identity = rows[0].observation["vector"][:, 2].copy()
    for before, row, action in zip(rows, rows[1:], actions, strict=False):
        step_in_episode = np.where(before.is_last, 0, step_in_episode + 1)
        episode = episode + before.is_last
        expected = np.stack([episode, step_in_episode, identity], axis=1)
        np.testing.assert_array_equal(row.observation["vector"], expected)
        np.testing.assert_array_equal(row.reward, np.where(before.is_last, 0, action))
        is_even = episode % 2 == 0
        np.testing.assert_array_equal(row.is_terminal, is_even & (step_in_episode == length))
        np.testing.assert_array_equal(row.is_last, step_in_episode == np.where(is_even, length, length + 1))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(TOYS), st.integers(1, 4), st.integers(0, 2**31), st.integers(0, 1000))
def test_sync_rows_follow_the_convention(env_id: str, num_envs: int, action_seed: int, seed: int) -> None:
    environment = make_environment(id=env_id, num_envs=num_envs, vectorization="sync", seed=seed)
    check_convention(environment, play(environment, steps=60, seed=action_seed))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["CartPole-v1", "rl_lab/NativeCounter-v0"]), st.integers(1, 5), st.integers(0, 2**31))
def test_native_rows_follow_the_convention(env_id: str, num_envs: int, action_seed: int) -> None:
    environment = make_environment(id=env_id, num_envs=num_envs, vectorization="native", seed=action_seed % 100)
    check_convention(environment, play(environment, steps=60, seed=action_seed))


@pytest.mark.parametrize("vectorization", ["sync", "native", "async"])
def test_counter_rows_are_what_a_hand_would_write(vectorization: str) -> None:
    env_id = "rl_lab/NativeCounter-v0" if vectorization == "native" else "rl_lab/Counter-v0"
    environment = make_environment(id=env_id, num_envs=3, vectorization=vectorization)
    generator = np.random.default_rng(0)
    actions = [random_actions(environment, generator) for _ in range(40)]
    rows = [environment.reset()] + [environment.step(action) for action in actions]
    environment.close()
    check_counter(rows, actions)
    assert len(set(rows[0].observation["vector"][:, 2].tolist())) == 3  # each environment has its own seed


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(TOYS), st.integers(1, 4), st.integers(0, 2**31), st.integers(0, 1000))
def test_async_rows_equal_sync_rows_bit_for_bit(env_id: str, num_envs: int, action_seed: int, seed: int) -> None:
    settings_ = {"id": env_id, "num_envs": num_envs, "seed": seed}
    sync = make_environment(**settings_, vectorization="sync")
    other = make_environment(**settings_, vectorization="async")
    expected, found = (play(environment, steps=40, seed=action_seed) for environment in (sync, other))
    other.close()
    check_convention(other, found)
    assert tree.equal(as_tree(expected), as_tree(found))


def test_same_seed_same_rows_and_other_seed_other_rows() -> None:
    def start(seed: int, stream: str = "train_environment") -> np.ndarray:
        environment = make_environment(id="Pendulum-v1", num_envs=2, seed=seed, stream=stream)
        return environment.reset().observation["vector"]

    np.testing.assert_array_equal(start(3), start(3))
    assert not np.array_equal(start(3), start(4))
    assert not np.array_equal(start(3), start(3, "eval_environment"))


def test_reset_in_mid_episode_begins_everywhere() -> None:
    for vectorization, env_id in (("sync", "rl_lab/Counter-v0"), ("native", "rl_lab/NativeCounter-v0")):
        environment = make_environment(id=env_id, num_envs=2, vectorization=vectorization)
        play(environment, steps=3, seed=0)
        rows = environment.reset()
        assert rows.is_first.all() and (rows.observation["vector"][:, 1] == 0).all()


def test_time_limit_is_last_but_not_terminal() -> None:
    environment = make_environment(id="Pendulum-v1", num_envs=2, time_limit=4)
    assert environment.spec.max_episode_steps == 4
    rows = play(environment, steps=5, seed=0)
    assert rows[4].is_last.all() and not rows[4].is_terminal.any()
    assert rows[5].is_first.all()


def test_action_repeat_divides_the_limit_and_multiplies_frames() -> None:
    environment = make_environment(id="Pendulum-v1", action_repeat=3)
    assert environment.spec.frames_per_step == 3
    assert environment.spec.max_episode_steps == 67  # 200 frames, rounded up
    rows = play(environment, steps=68, seed=0)
    assert [int(np.argmax([row.is_last[0] for row in rows]))] == [67]
