"""Exact continuation from a snapshot, by each of the three ways, and the honest refusal when none is exact."""

from __future__ import annotations

import io
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_lab.environments import make_environment
from rl_lab.environments.base import Environment
from rl_lab.environments.snapshot import capture, restore, what_is_not_plain
from rl_lab.types import RunError
from rl_lab.utils import tree

from .helpers import as_tree, random_actions

PLAIN = "CartPole-v1 Pendulum-v1 Acrobot-v1 MountainCar-v0 FrozenLake-v1 Taxi-v4 CliffWalking-v1 Blackjack-v1".split()
TOYS = "Counter Recall MultiTarget Corridor PointMass PixelCatch PixelFollow Faulty".split()


def through_a_checkpoint(state: Any) -> Any:
    """What torch.save and a weights_only load make of a state."""
    file = io.BytesIO()
    torch.save(tree.numpy_to_tensors(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def continues_identically(first: Environment, second: Environment, *, cut: int, steps: int) -> None:
    generator = np.random.default_rng(cut)
    first.reset()
    for _ in range(cut):
        first.step(random_actions(first, generator))
    second.set_state(through_a_checkpoint(first.get_state()))
    actions = [random_actions(first, generator) for _ in range(steps)]
    expected = [first.step(action) for action in actions]
    found = [second.step(action) for action in actions]
    assert tree.equal(as_tree(expected), as_tree(found))
    assert second.drain_events() == []


@pytest.mark.parametrize("env_id", [*PLAIN, *(f"rl_lab/{name}-v0" for name in TOYS)])
def test_plain_environments_continue_bit_for_bit(env_id: str) -> None:
    settings = {"id": env_id, "num_envs": 2, "vectorization": "sync", "time_limit": 7}
    for cut in (0, 3, 7, 8):  # 7 is an is_last row, 8 a first one, at the latest
        first, second = make_environment(**settings), make_environment(**settings)
        continues_identically(first, second, cut=cut, steps=30)
        assert all(cell["snapshot"]["mode"] == "attributes" for cell in first.get_state()["cells"])


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "MiniGrid-DoorKey-5x5-v0"])
def test_other_environments_continue_by_replay(env_id: str) -> None:
    pytest.importorskip("Box2D" if env_id.startswith("Lunar") else "minigrid")
    settings = {"id": env_id, "num_envs": 2, "vectorization": "sync", "time_limit": 40}
    for cut in (0, 25, 40):
        first, second = make_environment(**settings), make_environment(**settings)
        continues_identically(first, second, cut=cut, steps=60)
        assert {cell["snapshot"]["mode"] for cell in first.get_state()["cells"]} == {"replay"}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "rl_lab/NativeCounter-v0"])
def test_native_environments_continue_bit_for_bit(env_id: str) -> None:
    settings = {"id": env_id, "num_envs": 5, "vectorization": "native"}
    for cut in (0, 5, 30):
        continues_identically(make_environment(**settings), make_environment(**settings), cut=cut, steps=60)


def test_async_and_sync_states_are_the_same_and_interchangeable() -> None:
    settings = {"id": "Pendulum-v1", "num_envs": 3, "time_limit": 7}
    first = make_environment(**settings, vectorization="async")
    continues_identically(first, make_environment(**settings, vectorization="sync"), cut=5, steps=20)
    second = make_environment(**settings, vectorization="async")
    continues_identically(make_environment(**settings, vectorization="sync"), second, cut=9, steps=20)
    assert tree.equal(first.get_state(), first.get_state())
    first.close(), second.close()


@pytest.mark.parametrize("env_id", PLAIN)
def test_environments_seen_as_pictures_continue_bit_for_bit(env_id: str) -> None:
    """A snapshot holds no window; the fresh environment opens its own."""
    seen = [{"id": "pixel_observation", "height": 24, "width": 24}]
    settings = {"id": env_id, "num_envs": 1, "vectorization": "sync", "time_limit": 7, "wrappers": seen}
    continues_identically(make_environment(**settings), make_environment(**settings), cut=3, steps=10)


def test_a_vector_environment_that_was_drawn_continues_bit_for_bit() -> None:
    settings = {"id": "CartPole-v1", "num_envs": 2, "vectorization": "native", "render": True}
    first, second = make_environment(**settings), make_environment(**settings)
    first.reset()
    assert first.render() is not None
    second.set_state(through_a_checkpoint(first.get_state()))
    assert second.render() is not None
    assert second.drain_events() == []


def test_state_before_the_first_reset_can_be_restored() -> None:
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        first, second = (make_environment(id=env_id, num_envs=2) for _ in range(2))
        second.reset()
        second.set_state(first.get_state())
        assert tree.equal(vars(first.reset()), vars(second.reset()))


def test_restoring_onto_a_used_environment_is_exact_too() -> None:
    settings = {"id": "Taxi-v4", "num_envs": 2, "vectorization": "sync", "wrappers": [{"id": "sticky_actions"}]}
    first, second = make_environment(**settings), make_environment(**settings)
    second.reset()
    second.step(np.zeros(2, np.int64))
    continues_identically(first, second, cut=12, steps=40)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])
def test_wrappers_with_memory_are_restored(env_id: str) -> None:
    wrappers = [
        {"id": "sticky_actions", "probability": 0.5},
        {"id": "state_count_bonus", "scale": 0.5, "decimals": 0},
        {"id": "frame_stack", "count": 3},
    ]
    settings = {"id": env_id, "num_envs": 2, "vectorization": "sync", "wrappers": wrappers, "time_limit": 9}
    for cut in (4, 9, 23):
        continues_identically(make_environment(**settings), make_environment(**settings), cut=cut, steps=30)


class OwnState(gym.Env):
    """Keeps its position where attributes cannot be read, but can say and take it."""

    observation_space = spaces.Box(-100.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    is_forgetful = False

    def __init__(self) -> None:
        self.hidden = iter([0.0])  # no plain data
        self.position = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = 0.0
        return np.array([self.position], np.float32), {}

    def step(self, action: Any) -> tuple:
        self.position += float(self.np_random.normal()) + float(action)
        return np.array([self.position], np.float32), self.position, False, False, {}

    def get_state(self) -> dict:
        return {"position": self.position, 3: (1, 2)}

    def set_state(self, state: dict) -> None:
        assert state[3] == (1, 2)
        self.position = 0.0 if self.is_forgetful else state["position"]


class Forgetful(OwnState):
    is_forgetful = True


class Nondeterministic(OwnState):
    """Neither plain nor repeatable: its noise ignores the seed."""

    get_state = set_state = None  # type: ignore[assignment]
    noise = np.random.default_rng()

    def step(self, action: Any) -> tuple:
        self.position += float(self.noise.normal())
        return np.array([self.position], np.float32), 0.0, False, False, {}


for name, cls in {"OwnState": OwnState, "Forgetful": Forgetful, "Nondeterministic": Nondeterministic}.items():
    gym.register(f"snapshot_test/{name}-v0", entry_point=cls, max_episode_steps=6)


def test_an_environments_own_state_includes_its_generator_and_wrappers() -> None:
    for cut in (0, 3, 6, 9):
        first, second = (
            make_environment(id="snapshot_test/OwnState-v0", num_envs=2, vectorization="sync") for _ in "ab"
        )
        continues_identically(first, second, cut=cut, steps=20)
        assert first.get_state()["cells"][0]["snapshot"]["mode"] == "own"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Forgetful", "set_state does not restore"), ("Nondeterministic", "is not deterministic")],
)
def test_inexact_restore_ends_the_episode_and_says_so(name: str, reason: str) -> None:
    first, second = (make_environment(id=f"snapshot_test/{name}-v0", vectorization="sync") for _ in "ab")
    first.reset()
    last = [first.step(np.array([1])) for _ in range(3)][-1]
    second.set_state(first.get_state())
    (event,) = second.drain_events()
    assert reason in event and "A new episode was started instead" in event
    ended = second.step(np.array([1]))
    assert ended.is_last[0] and not ended.is_terminal[0] and ended.reward[0] == 0
    np.testing.assert_array_equal(ended.observation["vector"], last.observation["vector"])
    assert second.step(np.array([1])).is_first[0]


def test_shared_arrays_are_not_taken_for_plain_data() -> None:
    env = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    assert what_is_not_plain(env) is None
    env.same_state = env.state[1:]
    assert "shared with" in what_is_not_plain(env)


def test_snapshot_of_other_wrappers_is_refused() -> None:
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    with pytest.raises(RunError, match="TimeLimit > .*CartPoleEnv, this one of CartPoleEnv: resume with the same"):
        restore(env.unwrapped, capture(env), episode_seed=0)


def test_states_of_another_kind_or_number_are_refused() -> None:
    native, two, three = (
        make_environment(id="CartPole-v1", num_envs=n, vectorization=v)
        for n, v in ((2, "native"), (2, "sync"), (3, "sync"))
    )
    with pytest.raises(RunError, match="were native, these are cells: resume with environment.vectorization=native"):
        two.set_state(native.get_state())
    with pytest.raises(RunError, match="were cells, these are native: resume with environment.vectorization=sync"):
        native.set_state(two.get_state())
    with pytest.raises(RunError, match="holds 2 environments, this run has 3: resume with environment.num_envs=2"):
        three.set_state(two.get_state())
