"""Adapters of packages that are too large, or not to be had from the package index, against what those answer."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments import envpool_backend, make_environment
from rl_lab.types import ConfigError, MissingExtraError
from rl_lab.utils import tree

from ..helpers import as_tree, play
from ..test_snapshot import continues_identically

# --- EnvPool 1.2.5 ------------------------------------------------------------------------------


class RecordedPool:
    """`envpool.make("CoinrunHard-v0", env_type="gymnasium", ...)`: single spaces, channels first, late resets."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self.observation_space = spaces.Box(0, 255, (3, 8, 8), np.uint8)
        self.action_space = spaces.Discrete(15)
        self.spec = SimpleNamespace(config=SimpleNamespace(max_episode_steps=1000))
        self._random = np.random.default_rng(seed)
        self._num_envs, self._ages = num_envs, np.zeros(num_envs, int)

    def _see(self) -> np.ndarray:
        return self._random.integers(256, size=(self._num_envs, 3, 8, 8), dtype=np.uint8)

    def reset(self) -> tuple[np.ndarray, dict[str, Any]]:
        self._ages[:] = 0
        return self._see(), {"env_id": np.arange(self._num_envs)}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        begins = self._ages == 6
        self._ages = np.where(begins, 0, self._ages + 1)
        reward = np.where(begins, 0.0, actions).astype(np.float32)
        return self._see(), reward, self._ages == 6, np.zeros(self._num_envs, bool), {}

    def close(self) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module: Any = ModuleType("envpool")
    module.list_all_envs = lambda: ["CoinrunHard-v0", "Pong-v5"]
    module.make = lambda env_id, *, env_type, num_envs, seed: RecordedPool(num_envs, seed)
    monkeypatch.setitem(sys.modules, "envpool", module)
    registration: Any = ModuleType("envpool.registration")
    registration.registry = SimpleNamespace(specs={"CoinrunHard-v0": ("envpool.procgen", "CoinrunHardEnvSpec", {})})
    monkeypatch.setitem(sys.modules, "envpool.registration", registration)
    return {"id": "CoinrunHard-v0", "num_envs": 3, "vectorization": "envpool"}


def test_envpool_rows_follow_the_convention(pool: dict[str, Any]) -> None:
    environment = make_environment(**pool)
    assert environment.spec.observation["image"].shape == (8, 8, 3) and environment.spec.max_episode_steps == 1000
    rows = play(environment, steps=20, seed=0)
    assert [i for i, row in enumerate(rows) if row.is_last.all()] == [6, 13, 20]
    assert all((after.is_first == before.is_last).all() for before, after in pairwise(rows))
    assert tree.equal(as_tree(rows), as_tree(play(make_environment(**pool), steps=20, seed=0)))


def test_an_id_of_envpool_runs_there_whatever_is_asked_and_has_no_pictures(pool: dict[str, Any]) -> None:
    environment = make_environment(id="envpool/CoinrunHard-v0", vectorization="sync", render=True)
    assert environment.reset().observation["image"].shape == (1, 8, 8, 3) and environment.render() is None
    assert "Rendering failed and is left out" in environment.drain_events()[0]


def test_a_young_pool_continues_exactly_an_old_one_says_that_it_cannot(
    pool: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    continues_identically(make_environment(**pool), make_environment(**pool), cut=9, steps=20)
    monkeypatch.setattr(envpool_backend, "REPLAY_STEPS", 5)
    old, after = make_environment(**pool), make_environment(**pool)
    play(old, steps=9, seed=0)
    after.set_state(old.get_state())
    assert "could not be restored exactly" in after.drain_events()[0]
    ends, begins = after.step(np.zeros(3, np.int64)), after.step(np.zeros(3, np.int64))
    assert ends.is_last.all() and not ends.is_terminal.any() and begins.is_first.all()


def test_envpool_refuses_what_it_does_not_do(pool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is none of EnvPool's 2. Did you mean 'CoinrunHard-v0'"):
        make_environment(**{**pool, "id": "Coinrun-v0"})
    with pytest.raises(ConfigError, match="which takes no wrappers, action_repeat, time_limit or action_masks"):
        make_environment(**pool, action_repeat=2)

    def needs_qt(*arguments: Any, **settings: Any) -> Any:
        raise ImportError("EnvPool Procgen requires the system Qt 5 runtime on Linux.")

    monkeypatch.setattr(sys.modules["envpool"], "make", needs_qt)
    with pytest.raises(
        ConfigError, match="EnvPool cannot make 'CoinrunHard-v0': EnvPool Procgen requires the system Qt 5"
    ):
        make_environment(**pool)
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingExtraError, match="not installed .* pip install 'rl-lab.envpool.' .884 MB."):
        make_environment(**pool)


# --- MineRL 0.4 and MineDojo 0.1 ----------------------------------------------------------------


class RecordedWorld:
    """The old interface: reset returns an observation, a step four things; actions are kept for the test."""

    def __init__(self, observation: dict[str, np.ndarray], noop: dict[str, Any] | None = None) -> None:
        self.observation, self.actions, self.seeds = observation, [], []  # type: ignore[var-annotated]
        self.action_space = SimpleNamespace(noop=lambda: dict(noop or {}))

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self) -> dict[str, np.ndarray]:
        return self.observation

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        self.actions.append(action)
        return self.observation, 1.0, len(self.actions) == 12, {}

    def close(self) -> None:
        pass


def play_all_actions(world: RecordedWorld, env_id: str) -> Any:
    environment = make_environment(id=env_id, vectorization="sync")
    rows = [environment.reset()] + [environment.step(np.array([action])) for action in range(12)]
    assert rows[0].observation["image"].shape == (1, 64, 64, 3) and rows[12].is_terminal[0] and world.seeds
    assert environment.spec.action.labels[6] == "attack" and rows[5].reward[0] == 1.0
    return world.actions


def test_minerl_gets_keys_and_a_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    noop = {"forward": 0, "jump": 0, "attack": 0, "camera": np.zeros(2, np.float32)}
    world = RecordedWorld({"pov": np.zeros((64, 64, 3), np.uint8)}, noop)
    old_gym: Any = ModuleType("gym")
    old_gym.make = lambda task: {"MineRLObtainDiamond-v0": world}[task]
    monkeypatch.setitem(sys.modules, "gym", old_gym)
    monkeypatch.setitem(sys.modules, "minerl", ModuleType("minerl"))
    actions = play_all_actions(world, "minecraft/minerl")
    assert actions[0]["forward"] == 0 and actions[5]["forward"] == actions[5]["jump"] == 1 == actions[6]["attack"]
    assert actions[8]["camera"].tolist() == [-15, 0] and actions[11]["camera"].tolist() == [0, 15]


def test_minedojo_gets_eight_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = RecordedWorld({"rgb": np.zeros((3, 160, 256), np.uint8)})
    module: Any = ModuleType("minedojo")
    module.make = lambda *, task_id, image_size: world
    monkeypatch.setitem(sys.modules, "minedojo", module)
    actions = [action.tolist() for action in play_all_actions(world, "minecraft/minedojo")]
    assert actions[0] == [0, 0, 0, 12, 12, 0, 0, 0] and actions[5] == [1, 0, 1, 12, 12, 0, 0, 0]
    assert actions[6][5] == 3 and actions[7][5] == 1 and actions[8][3] == 11 and actions[11][4] == 13


def test_minecraft_says_how_it_is_installed() -> None:
    with pytest.raises(MissingExtraError, match="MineRL and MineDojo download Minecraft and want Java 8"):
        make_environment(id="minecraft/minedojo")


# --- Push-T and Meta-World ----------------------------------------------------------------------


class RecordedPushT(gym.Env):
    """gym_pusht/PushT-v0 with states: success at the third step, whose info says so under `is_success`."""

    observation_space = spaces.Box(0.0, 512.0, (5,), np.float64)
    action_space = spaces.Box(0.0, 512.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.age = 0
        return self.np_random.uniform(0, 512, 5), {"is_success": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.age += 1
        return self.np_random.uniform(0, 512, 5), 0.5, False, self.age == 5, {"is_success": self.age == 3}


def test_success_at_any_step_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    gym.register("gym_pusht/PushT-v0", entry_point=RecordedPushT)
    environment = make_environment(
        id="gym_pusht/PushT-v0", vectorization="sync", wrappers=[{"id": "success", "key": "is_success"}]
    )
    rows = play(environment, steps=5, seed=0)
    assert environment.spec.outcomes == ("success",) and rows[5].outcome["success"][0] == 1.0
    assert environment.spec.observation["vector"].dtype == "float32"


@pytest.mark.parametrize(
    ("env_id", "cure"),
    [("gym_pusht/PushT-v0", "it replaces pygame-ce"), ("metaworld/reach-v3", "it wants mujoco 3.3.0")],
)
def test_what_lives_apart_says_so(env_id: str, cure: str) -> None:
    if importlib.util.find_spec("gym_pusht" if env_id.startswith("gym_pusht") else "metaworld") is not None:
        pytest.skip("it is installed here")
    with pytest.raises(MissingExtraError, match=f"in a virtual environment of its own: {cure}"):
        make_environment(id=env_id)
