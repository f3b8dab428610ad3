"""The door: which way is chosen, and what each wrong setting is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rl_lab.environments import factory, make_environment, timing
from rl_lab.environments.async_environment import AsyncEnvironment
from rl_lab.environments.suites.toy import NativeCounter
from rl_lab.environments.vector import NativeEnvironment, SyncEnvironment
from rl_lab.types import ConfigError, MissingExtraError

SLOW = {"id": "rl_lab/Faulty-v0", "kwargs": {"slow_s": 0.003}}


def way(**settings: Any) -> type:
    environment = make_environment(**settings)
    environment.close()
    return type(environment)


def test_the_way_is_chosen_by_what_the_environment_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "available_cores", lambda: 2)
    assert way(id="CartPole-v1", num_envs=4) is NativeEnvironment
    assert way(id="CartPole-v1", num_envs=4, time_limit=10) is SyncEnvironment
    assert way(id="CartPole-v1", num_envs=4, action_repeat=2) is SyncEnvironment
    assert way(id="CartPole-v1", num_envs=4, wrappers=[{"id": "sign_reward"}]) is SyncEnvironment
    assert way(id="CartPole-v1", num_envs=4, kwargs={"sutton_barto_reward": True}) is SyncEnvironment
    assert way(id="Pendulum-v1", num_envs=4) is SyncEnvironment
    assert way(**SLOW, num_envs=2) is AsyncEnvironment
    assert way(**SLOW, num_envs=1) is SyncEnvironment
    monkeypatch.setattr(factory, "available_cores", lambda: 1)
    assert way(**SLOW, num_envs=2) is SyncEnvironment


def test_processes_must_win_clearly() -> None:
    assert timing.is_worth_processes(3e-4, num_envs=16, num_cores=2)  # 2.7 instead of 4.8 ms
    assert timing.is_worth_processes(3e-4, num_envs=16, num_cores=16)
    assert not timing.is_worth_processes(2e-5, num_envs=16, num_cores=2)
    assert not timing.is_worth_processes(6e-5, num_envs=16, num_cores=16)  # 16 messages cost more than they save
    assert not timing.is_worth_processes(1e-3, num_envs=3, num_cores=2)  # one worker would do two thirds


def test_under_a_debugger_nothing_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "debugpy", sys)
    monkeypatch.setattr(factory, "available_cores", lambda: 2)
    assert way(**SLOW, num_envs=2) is SyncEnvironment
    assert way(**SLOW, num_envs=2, vectorization="async") is SyncEnvironment


def test_a_trace_function_of_a_debugger_counts_but_coverage_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracer:
        def __call__(self) -> None: ...

    monkeypatch.setattr(sys, "gettrace", lambda: Tracer())
    Tracer.__module__ = "bdb"
    assert factory.is_debugged()
    Tracer.__module__ = "coverage.tracer"
    assert not factory.is_debugged()


def test_a_vector_environment_that_cannot_be_saved_is_not_chosen() -> None:
    class Unsaveable(NativeCounter):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.engine = iter([])

    register_vector("Unsaveable", Unsaveable)
    assert way(id="factory_test/Unsaveable-v0", num_envs=2) is SyncEnvironment


def register_vector(name: str, cls: type) -> None:
    entry_point = "rl_lab.environments.suites.toy:Counter"
    gym.register(f"factory_test/{name}-v0", entry_point=entry_point, vector_entry_point=cls)


class SameStep(NativeCounter):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}


class OtherArguments(NativeCounter):
    """As Atari's, whose vector environment does not take what single ones are registered with."""

    def __init__(self, num_envs: int = 1) -> None:
        raise TypeError("unexpected keyword argument 'obs_type'")


class OtherSpaces(NativeCounter):
    """As Atari's, whose vector environment shows four small grey frames."""

    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs)
        self.single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (SameStep, r"resets in mode .*SAME_STEP, rows need NEXT_STEP\. Write vectorization: auto"),
        (OtherArguments, "its vector entry point raised TypeError: unexpected keyword argument 'obs_type'"),
        (OtherSpaces, r"has the observation_space Box\(0, 255, \(4, 84, 84\), uint8\), alone it has Box\(0.0"),
    ],
)
def test_a_vector_environment_whose_rows_would_differ_is_refused_and_not_chosen(cls: type, message: str) -> None:
    register_vector(cls.__name__, cls)
    with pytest.raises(ConfigError, match=rf"native' but environment 'factory_test/{cls.__name__}-v0' .*{message}"):
        make_environment(id=f"factory_test/{cls.__name__}-v0", vectorization="native")
    assert way(id=f"factory_test/{cls.__name__}-v0", num_envs=2) is SyncEnvironment


def test_what_a_constructor_without_arguments_raises_is_said_in_a_sentence() -> None:
    class Broken(gym.Env):
        def __init__(self) -> None:
            raise ValueError("no licence found")

    class Spaceless(gym.Env):
        pass

    gym.register("factory_test/Broken-v0", entry_point=Broken)
    gym.register("factory_test/Spaceless-v0", entry_point=Spaceless)
    with pytest.raises(ConfigError, match="cannot be made: its constructor raised ValueError: no licence found."):
        make_environment(id="factory_test/Broken-v0")
    with pytest.raises(ConfigError, match="'factory_test/Spaceless-v0' has no observation_space: set self.obs"):
        make_environment(id="factory_test/Spaceless-v0")


def test_the_name_of_a_config_is_answered_with_its_id_also_where_only_an_import_registers_that() -> None:
    pytest.importorskip("minigrid")
    with pytest.raises(ConfigError, match="is not registered. Did you mean 'MiniGrid-DoorKey-5x5-v0'"):
        make_environment(id="minigrid/doorkey_5x5")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "CartPol-v1"}, r"'CartPol-v1' is not registered. Did you mean 'CartPole-v1'\?.*package:Name-v0"),
        ({"id": "crafter"}, "'crafter' is not registered. Did you mean 'rl_lab/Crafter-v1'"),  # its config's name
        ({"id": "car_racing"}, "Did you mean 'CarRacing-v3'"),
        ({"id": "mujoco/halfcheetah"}, "Did you mean 'HalfCheetah-v5'"),
        ({"id": "walker_walk"}, "Did you mean 'dmc/walker_walk'"),
        ({"id": "Pong-v5"}, "Did you mean 'atari/pong'"),  # as EnvPool calls it
        ({"id": "Taxi-v3"}, "'Taxi-v3' is not registered; this environment is now called 'Taxi-v4'. Write Taxi-v4"),
        ({"id": "CartPole"}, "now called 'CartPole-v1'"),
        (
            {"id": "rl_lab.environments.suites.toy:Taxi-v3"},
            "now called 'Taxi-v4'. Write rl_lab.environments.suites.toy:Taxi-v4",
        ),
        (
            {"id": "no_such_package:Env-v0"},
            "there is no Python package 'no_such_package'. It was looked for in /.*pip install -e",
        ),
        ({"id": "Ant-v3"}, "gymnasium-robotics.* Write Ant-v5"),
        (
            {"id": "CartPole-v1", "vectorization": "asinc"},
            "vectorization is 'asinc'. Did you mean 'async'.*Allowed: auto, native",
        ),
        ({"id": "CartPole-v1", "stream": "test"}, "stream is 'test'.* Allowed: process, train_environment"),
        ({"id": "CartPole-v1", "num_envs": 0}, "num_envs is 0: it must be a whole number of at least 1"),
        ({"id": "CartPole-v1", "num_envs": 2.5}, "num_envs is 2.5: it must be a whole number"),
        ({"id": "CartPole-v1", "action_repeat": 0}, "action_repeat is 0"),
        ({"id": "CartPole-v1", "time_limit": 0}, "time_limit is 0"),
        ({"id": "CartPole-v1", "max_restarts": -1}, "max_restarts is -1: it must be a whole number of at least 0"),
        ({"id": "CartPole-v1", "worker_timeout_s": 0}, "worker_timeout_s is 0: write a number of seconds above 0"),
        (
            {"id": "FrozenLake-v1", "kwargs": {"map_nam": "4x4"}},
            r"does not accept kwargs {'map_nam': '4x4'}: TypeError: .*unexpected keyword argument 'map_nam'\. "
            r"Did you mean 'map_name'\? It takes: render_mode, desc, map_name",
        ),
        ({"id": "FrozenLake-v1", "kwargs": {"map_name": "5x5"}}, "accept kwargs {'map_name': '5x5'}: KeyError: '5x5'"),
        ({"id": "rl_lab/Corridor-v0", "kwargs": {"length": "abc"}}, "kwargs.length of .* is 'abc': it must be a wh"),
        ({"id": "FrozenLake-v1", "kwargs": {"map_name": "5x5"}}, "accept kwargs {'map_name': '5x5'}: KeyError"),
        (
            {"id": "Pendulum-v1", "wrappers": [{"id": "clip_actions", "low": 3.0, "high": 4.0}]},
            "wrapper 'clip_actions' cannot be made with {'low': 3.0, 'high': 4.0}: ValueError",
        ),
        (
            {"id": "Pendulum-v1", "vectorization": "native"},
            "cannot be: it has no vector entry point. Write vectorization: auto",
        ),
        ({"id": "CartPole-v1", "vectorization": "native", "time_limit": 5}, "cannot be: time_limit needs single"),
        ({"id": "CartPole-v1", "spec": {"lables": []}}, "environment.spec has no key 'lables'. Did you mean 'labels'"),
        ({"id": "CartPole-v1", "spec": {"labels": 3}}, "environment.spec.labels is 3: write a list of names"),
        (
            {"id": "CartPole-v1", "spec": {"max_episode_steps": "a"}},
            "max_episode_steps is 'a': write a number, or null",
        ),
        ({"id": "CartPole-v1", "spec": {"description": 3}}, "description is 3: write a text, or null"),
        ({"id": "CartPole-v1", "spec": {"labels": ["a"]}}, "labels has 1 entries, this environment has 2 actions"),
    ],
)
def test_wrong_settings_are_refused_at_the_door(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(**settings)


def test_a_later_version_than_any_is_answered_with_ours_whatever_was_imported() -> None:
    pytest.importorskip("ale_py")  # registers Pong-v0 and Pong-v4, too
    with pytest.raises(ConfigError, match="'Pong-v5' is not registered. Did you mean 'atari/pong'"):
        make_environment(id="Pong-v5")
    with pytest.raises(ConfigError, match="now called 'Pong-v4'"):
        make_environment(id="Pong-v3")


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [
        ("Ant-v5", "mujoco", "mujoco"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("dmc/walker_walk", "dm_control", "dmc"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("MiniGrid-Nowhere-v0", "minigrid", "minigrid"),
    ],
)
def test_a_missing_dependency_names_the_extra(
    env_id: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes `import module` fail
    if env_id == "ALE/Pong-v5":  # registered where an earlier test has imported ale_py
        monkeypatch.delitem(gym.registry, env_id, raising=False)
    if env_id == "LunarLander-v3":
        monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d.lunar_lander", raising=False)
        monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    if env_id == "Ant-v5":
        for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=rf"'{env_id}' needs an extra .*pip install 'rl-lab\[{extra}\]'"):
        make_environment(id=env_id)


PACKAGE = """
import gymnasium as gym
import numpy as np
from rl_lab.environments import register_wrapper

class MyEnv(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}

@register_wrapper("my_wrapper")
class MyWrapper(gym.RewardWrapper):
    def reward(self, reward):
        return 5.0

gym.register("MyEnv-v0", entry_point=MyEnv, max_episode_steps=9)
"""
SCRIPT = """
import numpy as np
from rl_lab.environments import make_environment
environment = make_environment(
    id="my_package:MyEnv-v0", num_envs=2, vectorization="async", wrappers=[{"id": "my_wrapper"}]
)
environment.reset()
print(environment.step(np.zeros(2, np.int64)).reward.tolist(), environment.spec.max_episode_steps)
"""


def test_a_users_package_is_found_in_the_working_directory_and_by_workers(tmp_path: Path) -> None:
    """Also: a script without a __main__ guard does not run again in its workers."""
    (tmp_path / "my_package.py").write_text(PACKAGE)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.py").write_text(SCRIPT)
    root = Path(factory.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "scripts/run.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "[5.0, 5.0] 9\n", done.stderr


def test_a_package_that_lacks_a_dependency_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_something.py").write_text("import something_else_entirely\n")
    (tmp_path / "is_broken.py").write_text("from math import no_such_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="it needs 'something_else_entirely'. Install that with `pip install"):
        make_environment(id="needs_something:Env-v0")
    with pytest.raises(ConfigError, match="importing 'is_broken' failed: ImportError: cannot import name"):
        make_environment(id="is_broken:Env-v0")
    (tmp_path / "has_a_typo.py").write_text("import gymnasium\ngymnasium.regster\n")
    with pytest.raises(ConfigError, match="importing 'has_a_typo' failed: AttributeError: .*regster"):
        make_environment(id="has_a_typo:Env-v0")


def test_what_cannot_be_sent_to_a_worker_is_refused() -> None:
    gym.register("factory_test/Local-v0", entry_point=lambda: gym.make("CartPole-v1").unwrapped)
    with pytest.raises(ConfigError, match="cannot run in subprocesses .*package.module:Class"):
        make_environment(id="factory_test/Local-v0", num_envs=2, vectorization="async")


def test_the_spec_block_overrides_what_is_registered() -> None:
    block = {"labels": ["west", "east"], "solved_return": 7.0, "max_episode_steps": 3, "description": "mine"}
    spec = make_environment(id="CartPole-v1", spec=block).spec
    assert (spec.action.labels, spec.solved_return) == (("west", "east"), 7.0)
    assert (spec.max_episode_steps, spec.description) == (3, "mine")


def test_rendering_returns_frames_and_never_fails_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (
        {"id": "rl_lab/Corridor-v0"},
        {"id": "rl_lab/PixelCatch-v0"},
        {"id": "rl_lab/PointMass-v0", "kwargs": {"dimensions": 2}},
        {"id": "CartPole-v1", "vectorization": "sync"},
        {"id": "CartPole-v1", "vectorization": "native"},
        {"id": "rl_lab/Corridor-v0", "vectorization": "async"},
    ):
        environment = make_environment(**settings, num_envs=2, render=True)
        environment.reset()
        frame = environment.render()
        assert frame is not None and frame.dtype == np.uint8 and frame.shape[-1] == 3 and frame.std() > 0
        environment.close()
    for env_id in ("rl_lab/Counter-v0", "factory_test/Breaks-v0"):
        gym.registry.setdefault("factory_test/Breaks-v0", gym.spec("rl_lab/Counter-v0"))
        environment = make_environment(id=env_id, render=True)
        environment.reset()
        assert environment.render() is None and environment.render() is None
        (event,) = environment.drain_events()
        assert event.startswith("Rendering failed and is left out: ")


def test_headless_settings_are_made_only_without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from rl_lab.environments import rendering
    from rl_lab.environments.rendering import prepare_headless

    monkeypatch.setattr(rendering, "mujoco_backend", lambda: "egl")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    prepare_headless()
    assert os.environ["SDL_VIDEODRIVER"] == "offscreen" and os.environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.delenv("MUJOCO_GL")
    prepare_headless()
    assert os.environ["MUJOCO_GL"] == "egl"
    monkeypatch.delenv("SDL_VIDEODRIVER")
    monkeypatch.setenv("DISPLAY", ":0")
    prepare_headless()
    assert "SDL_VIDEODRIVER" not in os.environ


def test_spaces_of_masks_and_discrete_observations_reach_the_spec() -> None:
    spec = make_environment(id="rl_lab/MaskedChain-v0").spec
    assert "action_mask" in spec.observation and spec.observation["place"].shape == (6,)
    assert isinstance(gym.make("rl_lab/MultiTarget-v0").action_space, spaces.MultiDiscrete)


def test_making_an_environment_leaves_the_processs_generators_alone() -> None:
    import random

    before = random.getstate(), np.random.get_state()[1].tolist()
    make_environment(id="Pendulum-v1", num_envs=4)
    with factory.preserved_random_state():
        random.random(), np.random.random()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
