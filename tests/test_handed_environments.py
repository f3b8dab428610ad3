"""Environments handed over as objects: what is accepted, what is copied, and how such a run goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rl_lab
from rl_lab.cli.main import main
from rl_lab.environments import handed
from rl_lab.types import ConfigError
from tests.test_resume import assert_same_run

SHORT = ["preset=debug", "training.phases.train.collect_steps=8", "algorithm.epochs=1", "evaluation.video=false"]
SHORT += ["logging.tensorboard=false", "evaluation.num_envs=2"]


class Line(gym.Env):
    """Walk to one of the ends; it draws itself, and its start is random."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, length: int = 3, render_mode: str | None = None) -> None:
        self.observation_space = gym.spaces.Box(-20.0, 20.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.render_mode, self.place, self.steps = length, render_mode, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(-1, 2)), 0
        return np.array([self.place], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = self.place + (1 if action else -1), self.steps + 1
        is_over = abs(self.place) >= self.length
        return np.array([self.place], np.float32), float(is_over), is_over, self.steps >= 12, {}

    def render(self) -> np.ndarray:
        return np.full((16, 16, 3), 100 + self.place, np.uint8)


def make_line() -> gym.Env:
    return Line(4)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test is a process in which nothing was handed over yet."""
    forget()
    yield
    forget()


def forget() -> None:
    for env_id in [env_id for env_id in gym.registry if handed.is_handed(env_id)]:
        del gym.registry[env_id]
    handed._sources.clear()
    handed._newest.clear()


def train(runs_dir: Path, env: Any, *more: str, **settings: Any) -> rl_lab.Run:
    return rl_lab.train("ppo", env=env, overrides=[*SHORT, *more], runs_dir=runs_dir, quiet=True, **settings)


def test_a_class_makes_as_many_as_are_asked_for(runs_dir: Path) -> None:
    run = train(runs_dir, Line, environment__num_envs=3, environment__kwargs={"length": 2})
    block = run.config["environment"]
    assert (block["id"], block["num_envs"], block["kwargs"]) == ("python/Line", 3, {"length": 2})
    assert run.status["state"] == "finished"
    assert rl_lab.evaluate(run, episodes=2)["eval/episodes"] == 2
    assert run.video().stat().st_size > 0
    policy = rl_lab.load(run)
    assert policy.environment().unwrapped.length == 2
    assert policy.act(np.zeros(1, np.float32)) in (0, 1)


def test_an_environment_is_copied_and_stays_as_it_was(runs_dir: Path) -> None:
    mine = Line(2)
    mine.reset(seed=5)
    before = dict(vars(mine)) | {"np_random": mine.np_random.bit_generator.state}
    run = train(runs_dir, mine)
    assert run.config["environment"]["num_envs"] == 1
    assert run.status["state"] == "finished"
    assert dict(vars(mine)) | {"np_random": mine.np_random.bit_generator.state} == before


def test_a_factory_alone_trains_ppo(runs_dir: Path) -> None:
    run = rl_lab.train(env=lambda: gym.make("CartPole-v1"), overrides=SHORT, runs_dir=runs_dir, quiet=True)
    assert run.config["environment"]["id"] == "python/environment"
    assert run.directory.read_manifest()["algorithm"] == "PPO"
    assert rl_lab.load(run).spec.max_episode_steps == 500


def test_an_id_is_an_environment_too(runs_dir: Path) -> None:
    assert train(runs_dir, "rl_lab/Counter-v0").config["environment"]["id"] == "rl_lab/Counter-v0"


@pytest.mark.parametrize("env", [make_line, Line(4)], ids=["function", "environment"])
def test_such_a_run_resumes_exactly_with_the_environment_handed_over_again(runs_dir: Path, env: Any) -> None:
    train(runs_dir, env, run_id="whole")

    def breaks(row: Any) -> None:
        if row["updates"] == 2:
            raise KeyError("broken off")

    with pytest.raises(KeyError, match="broken off"):
        train(runs_dir, env, run_id="cut", on_row=breaks)
    forget()  # another process
    with pytest.raises(ConfigError, match=r"'python/\w+' is an object .* rl_lab.resume\(run, env=...\)"):
        rl_lab.resume("cut", runs_dir=runs_dir, quiet=True)
    assert rl_lab.resume("cut", env=env, runs_dir=runs_dir, quiet=True).status["state"] == "finished"
    assert_same_run(runs_dir / "cut", runs_dir / "whole")


def test_the_command_line_says_why_it_cannot_go_on_and_changes_nothing(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):
        train(runs_dir, Line, run_id="cut", on_row=lambda row: 1 / 0)
    forget()
    before = (runs_dir / "cut" / "status.json").read_bytes()
    assert main(["resume", "cut", "--runs-dir", str(runs_dir)]) == 2
    assert "environment 'python/Line' is an object that a Python script handed over" in capsys.readouterr().err
    assert (runs_dir / "cut" / "status.json").read_bytes() == before


def test_looking_takes_the_environment_again(runs_dir: Path) -> None:
    run = train(runs_dir, Line)
    forget()
    with pytest.raises(ConfigError, match="Hand it over again in Python"):
        rl_lab.evaluate(run, episodes=1)
    assert rl_lab.evaluate(run, episodes=1, env=Line)["eval/episodes"] == 1
    forget()
    assert rl_lab.load(run, env=Line).act(np.zeros(1, np.float32)) in (0, 1)
    assert rl_lab.play(run, env=Line, output=runs_dir / "line.mp4") == runs_dir / "line.mp4"


def test_a_warm_start_may_go_into_another_environment(runs_dir: Path) -> None:
    run = rl_lab.resume(train(runs_dir, Line), mode="warm_start", env=make_line, quiet=True)
    assert run.config["environment"]["id"] == "python/make_line"


def test_a_run_of_a_registered_environment_is_not_resumed_in_an_object(runs_dir: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(runs_dir, "CartPole-v1", run_id="cut", on_row=lambda row: 1 / 0)
    with pytest.raises(ConfigError, match="Run cut was trained in 'CartPole-v1' and goes on there: leave env out"):
        rl_lab.resume("cut", env=Line, runs_dir=runs_dir)


class Uncopyable(Line):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


SHARED = Line()
BAD = {
    "a number": (3, "env is 3: write an id such as 'CartPole-v1', a gymnasium.Env, or what makes one"),
    "a vector environment": (
        gym.make_vec("CartPole-v1", num_envs=2),
        "env is a vector environment; RL Lab runs the copies itself",
    ),
    "what makes no environment": (lambda: 7, "'python/environment' returned a int, not a gymnasium.Env. Return an env"),
    "what makes one only once": (lambda: SHARED, "returned the same environment twice. Make a new one in every call"),
    "what breaks": (lambda: 1 / 0, "'python/environment' cannot be made: its constructor raised ZeroDivisionError"),
    "what cannot be copied": (Uncopyable(), r"this Uncopyable cannot be copied \(TypeError: .*env=lambda: Uncopyable"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_environments_are_refused_and_leave_no_run(runs_dir: Path, kind: str) -> None:
    env, sentence = BAD[kind]
    with pytest.raises(ConfigError, match=sentence):
        train(runs_dir, env)
    assert not runs_dir.exists() or not list(runs_dir.glob("*/config.yaml"))


def test_two_environments_and_many_of_one_are_refused(runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match="env and environment.id=CartPole-v1 name two environments: leave one out"):
        train(runs_dir, Line, environment__id="CartPole-v1")
    with pytest.raises(ConfigError, match="env is one environment, but environment.num_envs is 8: hand over what"):
        train(runs_dir, Line(), environment__num_envs=8)
    with pytest.raises(ConfigError, match=r"'python/environment' cannot run in subprocesses .*vectorization=sync"):
        train(runs_dir, lambda: Line(), environment__vectorization="async")


def test_names_stay_apart_and_a_definition_made_anew_replaces_the_old_one() -> None:
    first, second = (lambda: Line(), lambda: Line(4))
    assert [handed.hand_over(each) for each in (first, second, first)] == [
        "python/environment",
        "python/environment_2",
        "python/environment",
    ]
    assert handed.hand_over(Line) == "python/Line"
    again = type("Line", (Line,), {"__module__": Line.__module__, "__qualname__": "Line"})
    assert handed.hand_over(again) == "python/Line"
    assert gym.registry["python/Line"].entry_point is again
    assert handed.hand_over(Line(2)) == "python/Line_2"


def test_made_environments_speak_rows_or_native_units() -> None:
    environments = rl_lab.make_env("Pendulum-v1", num_envs=2)
    assert environments.reset().observation["vector"].shape == (2, 3)
    alone = rl_lab.make_env("Pendulum-v1", native=True, time_limit=3)
    observation, _ = alone.reset(seed=0)
    assert alone.action_space.high == 2.0 and observation.shape == (3,)
    assert [alone.step(np.array([2.0], np.float32))[3] for _ in range(3)] == [False, False, True]
    many = rl_lab.make_env(Line, native=True, num_envs=2)
    assert many.reset(seed=0)[0].shape == (2, 1)
    with pytest.raises(ConfigError, match="make_env has no setting 'num_env'. Did you mean 'num_envs'"):
        rl_lab.make_env("Pendulum-v1", native=True, num_env=2)
    with pytest.raises(ConfigError, match="num_envs is 0: write a whole number of at least 1, or None"):
        rl_lab.make_env("Pendulum-v1", native=True, num_envs=0)


def test_a_dataset_is_collected_in_an_environment_object(tmp_path: Path) -> None:
    written = rl_lab.collect("random", env=make_line, episodes=3, output=tmp_path / "random", num_envs=2)
    assert written.environment == "python/make_line" and written.episodes == 3
    run = rl_lab.train("ppo", env=Line, overrides=SHORT, runs_dir=tmp_path, quiet=True)
    assert rl_lab.collect(run, env=Line(), steps=20, output=tmp_path / "own").agent_steps >= 20
    forget()
    assert rl_lab.collect(run, env=make_line, steps=20, output=tmp_path / "anew").environment == "python/make_line"
    with pytest.raises(ConfigError, match="env and environment='CartPole-v1' name two environments: leave one out"):
        rl_lab.collect("random", env=Line, environment="CartPole-v1", steps=9, output=tmp_path / "two")
