"""What is particular to Crafter, VizDoom, Memory Maze, retro, BSuite and MuJoCo's pictures."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_lab.environments import make_environment
from rl_lab.environments.async_environment import AsyncEnvironment
from rl_lab.environments.catalog import describe_environment
from rl_lab.environments.lookup import SUITES, find, missing_extra
from rl_lab.environments.rendering import prepare_headless
from rl_lab.environments.suites.memory_maze import gymnasium_as_gym, is_worth_reading
from rl_lab.types import ConfigError, MissingExtraError

from ..helpers import play

prepare_headless()
ROOT = Path(__file__).parents[3]


def test_every_suite_has_an_extra_that_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = [suite.extra for suite in SUITES if suite.extra]
    assert len(extras) >= 12 and all(f"\n{extra} = [" in text for extra in extras)
    error = missing_extra("vizdoom/basic", next(s for s in SUITES if s.name == "vizdoom"), ImportError("no vizdoom"))
    assert "pip install 'rl-lab[vizdoom]'" in str(error)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("crafter", "rl_lab.environments.suites.crafter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "crafter", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match="rl_lab/Crafter-v1' needs an extra .* pip install 'rl-lab.crafter.'"):
        make_environment(id="rl_lab/Crafter-v1")


def test_the_warning_of_every_reset_of_a_maze_is_left_out_and_no_other() -> None:
    sentences = ("Cannot set velocity on Entity with no free joint.", "Cannot draw the maze.")
    records = [logging.LogRecord("absl", logging.WARNING, "", 0, text, None, None) for text in sentences]
    assert list(map(is_worth_reading, records)) == [False, True]


def test_crafter_reports_its_achievements_and_its_end() -> None:
    pytest.importorskip("crafter", reason="needs pip install 'rl-lab[crafter]'")
    environment = make_environment(id="rl_lab/Crafter-v1", vectorization="sync", kwargs={"length": 30})
    assert len(environment.spec.outcomes) == 22 and environment.spec.max_episode_steps == 30
    assert environment.spec.action.labels[5] == "do"
    rows = [environment.reset()] + [environment.step(np.array([i % 5])) for i in range(30)]
    assert rows[30].is_last[0] and not rows[30].is_terminal[0], "a cut, not a death"
    assert rows[30].outcome["achievement/collect_iron"][0] == 0 and np.isnan(rows[29].outcome["achievement/wake_up"][0])
    silent = make_environment(id="rl_lab/Crafter-v1", vectorization="sync", kwargs={"has_reward": False})
    assert not any(row.reward.any() for row in play(silent, steps=30, seed=0))


def test_a_dead_player_is_terminal() -> None:
    pytest.importorskip("crafter", reason="needs pip install 'rl-lab[crafter]'")
    env: Any = gym.make("rl_lab/Crafter-v1").unwrapped
    env.reset(seed=0)
    env._game._player.health = 0
    _, _, terminated, truncated, info = env.step(0)
    assert terminated and not truncated and info["outcome"]["achievement/eat_cow"] == 0.0


def test_doom_scenarios_are_found_by_name_folder_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vizdoom = pytest.importorskip("vizdoom", reason="needs pip install 'rl-lab[vizdoom]'")
    from rl_lab.environments.suites.doom import find_scenario

    shipped = Path(vizdoom.scenarios_path) / "take_cover.cfg"
    assert find_scenario("take_cover") == shipped == find_scenario(str(shipped))
    mine = tmp_path / "take_cover.cfg"
    mine.write_text(shipped.read_text())
    monkeypatch.setenv("VIZDOOM_SCENARIOS_DIR", str(tmp_path))
    assert find_scenario("take_cover") == mine and find_scenario("basic").parent == shipped.parent
    with pytest.raises(
        ConfigError, match="scenario is 'take_cove': there is no such scenario. Did you mean 'take_cover'"
    ):
        make_environment(id="rl_lab/Doom-v0", kwargs={"scenario": "take_cove"})
    with pytest.raises(ConfigError, match="frame_skip is 0 and size is 64: both must be at least 1"):
        make_environment(id="vizdoom/basic", kwargs={"frame_skip": 0})


def test_doom_tells_buttons_time_and_variables() -> None:
    pytest.importorskip("vizdoom", reason="needs pip install 'rl-lab[vizdoom]'")
    spec = describe_environment("vizdoom/basic")
    assert spec.action.labels == ("nothing", "move left", "move right", "attack")
    assert spec.frames_per_step == 4 and spec.max_episode_steps == 75 and spec.observation["variables"].shape == (1,)
    environment = make_environment(id="vizdoom/basic", vectorization="sync")
    rows = [environment.reset()] + [environment.step(np.zeros(1, np.int64)) for _ in range(75)]
    assert rows[75].is_last[0] and not rows[75].is_terminal[0], "the scenario's time-out is a cut"
    assert rows[75].observation["image"].std() > 1, "and shows the last picture"
    environment.close()


def test_gymnasium_stands_for_gym_only_while_a_package_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gym", sys)  # somebody's own
    with gymnasium_as_gym():
        import gym as alias  # type: ignore[import-not-found]

        assert alias is gym
    assert sys.modules["gym"] is sys and "gym.envs" not in sys.modules


def test_an_unknown_maze_is_refused() -> None:
    with pytest.raises(ConfigError, match="kwargs.maze is '8x8'. Allowed: 9x9, 11x11, 13x13, 15x15"):
        make_environment(id="memory_maze/9x9", kwargs={"maze": "8x8"})


def test_settings_that_the_suites_cannot_take_are_refused() -> None:
    pytest.importorskip("crafter", reason="needs pip install 'rl-lab[crafter]'")
    pytest.importorskip("stable_retro", reason="needs pip install 'rl-lab[retro]'")
    for env_id, kwargs, message in (
        ("rl_lab/Crafter-v1", {"size": 17}, "size is 17 and length is 10000: write at least 18 pixels"),
        ("rl_lab/Crafter-v1", {"length": 0}, "size is 64 and length is 0: .* at least 1 step"),
        ("rl_lab/Crafter-v1", {"has_reward": "no"}, "has_reward of 'rl_lab/Crafter-v1' is 'no': it must be true or fa"),
        ("rl_lab/Retro-v0", {"frame_skip": 0}, "frame_skip is 0 and noop_max is 30: write at least 1, 1 and 0"),
        ("rl_lab/Retro-v0", {"state": "Level9"}, "'Airstriker-Genesis-v0' has no such state. .*It has: Level1"),
        ("rl_lab/Retro-v0", {"frame_skip": 1.5}, "frame_skip of 'rl_lab/Retro-v0' is 1.5: it must be a whole number"),
        ("memory_maze/9x9", {"size": "64"}, "kwargs.size of 'memory_maze/9x9' is '64': it must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_environment(id=env_id, kwargs=kwargs)


def test_every_emulator_has_a_process_of_its_own() -> None:
    pytest.importorskip("stable_retro", reason="needs pip install 'rl-lab[retro]'")
    settings: dict[str, Any] = {"id": "rl_lab/Retro-v0", "vectorization": "sync", "kwargs": {"size": 16}}
    train, evaluation = make_environment(**settings, num_envs=3), make_environment(**settings)
    assert isinstance(train, AsyncEnvironment) and len(train._workers) == 3
    assert train.reset().observation["image"].shape == (3, 16, 16, 3) and evaluation.reset().is_first.all()
    train.close(), evaluation.close()
    with pytest.raises(
        ConfigError, match="game is 'Airstriker-Genesis': stable-retro knows no such game. Did you mean"
    ):
        make_environment(id="rl_lab/Retro-v0", kwargs={"game": "Airstriker-Genesis"})
    with pytest.raises(ConfigError, match="whose ROM or state is not here .* python -m stable_retro.import FOLDER"):
        make_environment(id="rl_lab/Retro-v0", kwargs={"game": "SonicTheHedgehog-Genesis-v0"})


def test_bsuite_settings_are_counted() -> None:
    pytest.importorskip("bsuite", reason="needs pip install 'rl-lab[bsuite]'")
    with pytest.raises(ConfigError, match="number of 'bsuite/deep_sea' is 21: write one of 0 to 20"):
        make_environment(id="bsuite/deep_sea", kwargs={"number": 21})
    assert describe_environment("bsuite/catch").observation["vector"].shape == (50,)
    rows = play(make_environment(id="bsuite/deep_sea_stochastic", num_envs=2, vectorization="sync"), steps=30, seed=0)
    assert [i for i, row in enumerate(rows) if row.is_last[0]] == [10, 21], "ten steps down"


def test_mujoco_pictures_are_each_environments_own() -> None:
    pytest.importorskip("mujoco", reason="needs pip install 'rl-lab[mujoco]'")
    settings = {"id": "HalfCheetah-v5", "vectorization": "sync", "wrappers": [{"id": "pixel_observation"}]}
    two, one = make_environment(**settings, num_envs=2), make_environment(**settings, num_envs=1)
    one.reset(), two.reset()
    action = np.tile(np.array([1.0, -1.0], np.float32)[:, None], (1, 6))
    for _ in range(5):
        images, alone = two.step(action).observation["image"], one.step(action[:1]).observation["image"]
    assert images.std() > 5 and (images[0] != images[1]).any()
    np.testing.assert_array_equal(images[0], alone[0])
    one.close(), two.close()


def test_an_emulator_that_is_alone_in_its_process_can_be_checked() -> None:
    """The checker plays two environments side by side, which a second emulator would refuse."""
    pytest.importorskip("stable_retro")
    script = "from rl_lab import api; print([each.level for each in api.check_environment('rl_lab/Retro-v0')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "error" not in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_of_brax_is_compiled_once() -> None:
    """Not once for the state of a reset and once more for that of a step, and not anew for a state that was saved."""
    pytest.importorskip("brax")
    env: Any = gym.make(find("brax/ant")).unwrapped
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.zeros(8, np.float32))
    env.set_state(env.get_state())
    env.step(np.zeros(8, np.float32))
    assert env._step._cache_size() == 1
