"""DeepMind Control: what rows hold, how time is counted, exact continuation, drawing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_lab.config.compose import compose
from rl_lab.config.explain import explain
from rl_lab.config.files import PACKAGE_CONFIGS
from rl_lab.environments import make_environment
from rl_lab.environments.catalog import describe_environment, list_environments
from rl_lab.environments.checker import check_environment
from rl_lab.environments.rendering import prepare_headless
from rl_lab.environments.suites.dmc import DOMAINS
from rl_lab.types import ConfigError
from rl_lab.utils import tree

from ..helpers import as_tree, play
from ..test_snapshot import continues_identically

prepare_headless()
suite = pytest.importorskip("dm_control.suite", reason="needs pip install 'rl-lab[dmc]'")
TASKS = [f"{domain}_{task}" for domain, tasks in DOMAINS.items() for task in tasks.split()]
# Plain ones, and those that draw targets, terrain or stiffness into their model at every reset.
SAMPLES = ["reacher_easy", "finger_turn_hard", "quadruped_fetch"]


def make(task: str, **settings: Any) -> Any:
    return make_environment(id=f"dmc/{task}", vectorization="sync", **settings)


@pytest.fixture(scope="module")
def needs_drawing() -> None:
    environment = make("cartpole_swingup", render=True)
    environment.reset()
    frame, events = environment.render(), environment.drain_events()
    environment.close()
    if frame is None:
        pytest.skip(f"this machine cannot draw without a screen: {events}")


def test_every_task_of_the_suite_is_listed_and_has_a_config() -> None:
    assert set(TASKS) == {f"{domain}_{task}" for domain, task in suite.ALL_TASKS}
    listed = {info.id: info for info in list_environments("dmc/")}
    assert set(listed) == {f"dmc/{task}" for task in TASKS} and listed["dmc/walker_walk"].is_installed
    assert {file.stem for file in (PACKAGE_CONFIGS / "environment" / "dmc").glob("*.yaml")} == set(TASKS)


def test_rows_are_those_of_dm_control_with_repeats_added_up() -> None:
    environment = make("walker_walk", action_repeat=2)
    rows = play(environment, steps=5, seed=0)
    reference = environment.cells[0].env.unwrapped  # the same task, taken back to the episode's seed
    reference.reset(seed=environment.cells[0]._episode_seed)
    from dm_control.rl.control import Environment

    original = Environment(reference.physics, reference.task, n_sub_steps=reference.frames_per_control)
    original._reset_next_step = False
    generator = np.random.default_rng(0)
    for row in rows[1:]:
        action = np.clip(generator.uniform(-1.5, 1.5, (1, 6)).astype(np.float32), -1, 1)[0]
        steps = [original.step(action) for _ in range(2)]
        expected = np.concatenate([np.ravel(value) for value in steps[-1].observation.values()])
        np.testing.assert_array_equal(row.observation["vector"][0], expected.astype(np.float32))
        assert row.reward[0] == np.float32(steps[0].reward + steps[1].reward)


def test_episodes_are_cut_at_1000_frames_and_are_not_terminal() -> None:
    environment = make("cartpole_swingup", action_repeat=2, num_envs=1)
    assert environment.spec.max_episode_steps == 500 and environment.spec.frames_per_step == 2
    rows = play(environment, steps=501, seed=1)
    assert [i for i, row in enumerate(rows) if row.is_last[0]] == [500]
    assert [i for i, row in enumerate(rows) if row.is_first[0]] == [0, 501]
    assert not any(row.is_terminal[0] for row in rows) and rows[501].reward[0] == 0


def test_lqr_ends_when_it_is_solved() -> None:
    env = gym.make("dmc/lqr_lqr_2_1").unwrapped
    env.reset(seed=0)
    with env.physics.reset_context():
        env.physics.data.qpos[:] = env.physics.data.qvel[:] = 0.0
    _, _, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
    assert terminated and not truncated


def test_the_spec_names_the_actuators_and_shows_videos_in_real_time() -> None:
    spec = describe_environment("dmc/walker_walk")
    assert spec.action.kind == "continuous" and spec.action.labels[:2] == ("right_hip", "right_knee")
    assert spec.observation["vector"].shape == (24,) and spec.max_episode_steps == 1000
    assert make("walker_walk", action_repeat=2).spec.render_fps == 20  # 40 control steps per second


@pytest.mark.parametrize("task", SAMPLES)
def test_states_are_restored_bit_for_bit(task: str) -> None:
    for cut in (0, 12) if task == "reacher_easy" else (7,):  # 12 is an is_last row
        first, second = (make(task, num_envs=2, action_repeat=2, time_limit=12) for _ in "ab")
        continues_identically(first, second, cut=cut, steps=20)
        assert {cell["snapshot"]["mode"] for cell in first.get_state()["cells"]} == {"own"}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_restored_bit_for_bit(task: str) -> None:
    first, second = (make(task, time_limit=30, action_repeat=2) for _ in "ab")
    continues_identically(first, second, cut=17, steps=40)


def test_async_rows_are_the_same() -> None:
    settings = {"id": "dmc/cartpole_swingup", "num_envs": 2, "action_repeat": 2, "time_limit": 4}
    apart, alone = (make_environment(**settings, vectorization=way) for way in ("async", "sync"))
    assert tree.equal(as_tree(play(apart, steps=10, seed=2)), as_tree(play(alone, steps=10, seed=2)))
    apart.close()


@pytest.mark.parametrize("kind", ["state", "both"])
def test_the_checker_has_nothing_to_say(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "both":
        request.getfixturevalue("needs_drawing")
    assert check_environment(lambda: gym.make("dmc/cartpole_swingup", observation=kind), steps=20) == []


# --- drawing -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_drawing")
def test_pixels_and_both() -> None:
    pixels = make("walker_walk", kwargs={"observation": "pixels"}, action_repeat=2)
    both = make("walker_walk", kwargs={"observation": "both", "size": 32})
    assert pixels.spec.observation["image"].shape == (64, 64, 3) and list(pixels.spec.observation) == ["image"]
    assert both.spec.observation["image"].shape == (32, 32, 3) and both.spec.observation["vector"].shape == (24,)
    rows = play(pixels, steps=20, seed=0)
    images = [row.observation["image"][0] for row in rows]
    assert images[0].dtype == np.uint8 and images[0].std() > 10 and (images[0] != images[-1]).any()


@pytest.mark.usefixtures("needs_drawing")
def test_pictures_of_several_environments_do_not_mix() -> None:
    two = make("reacher_easy", kwargs={"observation": "pixels"}, num_envs=2)
    first, second = two.reset().observation["image"]
    assert (first != second).any()  # targets are drawn per episode
    again = make("reacher_easy", kwargs={"observation": "pixels"}, num_envs=2)
    np.testing.assert_array_equal(again.reset().observation["image"], [first, second])


@pytest.mark.usefixtures("needs_drawing")
@pytest.mark.parametrize("task", ["reacher_easy", "quadruped_escape"])
def test_pixels_are_restored_bit_for_bit(task: str) -> None:
    first, second = (make(task, kwargs={"observation": "pixels"}, action_repeat=2, time_limit=8) for _ in "ab")
    continues_identically(first, second, cut=5, steps=6)


@pytest.mark.usefixtures("needs_drawing")
def test_a_terrain_restored_in_place_is_drawn() -> None:
    env = gym.make("dmc/quadruped_escape", observation="pixels").unwrapped
    env.reset(seed=0)
    expected, state = env.observe(), env.get_state()
    env.reset(seed=1)
    assert (env.observe() != expected).any()
    env.set_state(state)
    np.testing.assert_array_equal(env.observe(), expected)


@pytest.mark.usefixtures("needs_drawing")
def test_an_end_between_repeats_shows_the_last_frame() -> None:
    settings = {"kwargs": {"observation": "pixels", "max_episode_steps": 3}}
    single, repeated = make("walker_walk", **settings), make("walker_walk", **settings, action_repeat=2)
    action = np.zeros((1, 6), np.float32)
    single.reset(), repeated.reset()
    third_frame = [single.step(action) for _ in range(3)][-1]
    second_step = [repeated.step(action) for _ in range(2)][-1]
    assert third_frame.is_last[0] and second_step.is_last[0]
    np.testing.assert_array_equal(third_frame.observation["image"], second_step.observation["image"])


@pytest.mark.usefixtures("needs_drawing")
def test_frames_in_between_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = make("walker_walk", kwargs={"observation": "pixels"}, action_repeat=4)
    environment.reset()
    base = environment.cells[0].env.unwrapped
    drawn: list[int] = []
    real: Callable[[int], np.ndarray] = base._draw
    monkeypatch.setattr(base, "_draw", lambda size: drawn.append(size) or real(size))
    environment.step(np.zeros((1, 6), np.float32))
    assert drawn == [64]


@pytest.mark.usefixtures("needs_drawing")
def test_videos_are_larger_than_observations() -> None:
    environment = make("walker_walk", kwargs={"observation": "pixels"}, render=True)
    environment.reset()
    frame = environment.render()
    assert frame is not None and frame.shape == (256, 256, 3) and frame.std() > 10


# --- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"observation": "pixel"},
            "observation of 'dmc/walker_walk' is 'pixel'. Did you mean 'pixels'.* state, pixels",
        ),
        ({"size": 0}, "size of 'dmc/walker_walk' is 0: write a number of pixels, say 64"),
        ({"camera": "sid"}, r"camera is 'sid' but 'dmc/walker_walk' has the cameras 0 \(side\), 1 \(back\).*'side'"),
        ({"camera": 2}, "camera is 2 but"),
        ({"colour": 1}, "does not accept kwargs {'colour': 1}"),
    ],
)
def test_wrong_settings_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("walker_walk", kwargs=kwargs)


def test_the_config_group_replaces_the_environment_of_an_experiment() -> None:
    config = compose("ppo_pendulum", ["environment=dmc/cheetah_run", "environment.kwargs.size=32", "preset=debug"])
    environment = config["environment"]
    assert environment["id"] == "dmc/cheetah_run" and environment["action_repeat"] == 1
    assert environment["kwargs"] == {"observation": "state", "size": 32, "camera": None, "is_detailed": False}
    assert environment["num_envs"] == 2 and environment["vectorization"] == "sync"  # the preset still speaks
    assert compose("ppo_pendulum", ["environment=dmc/cheetah_run"])["environment"]["num_envs"] == 16
    assert compose("dmc/cheetah_run:ppo")["environment"]["action_repeat"] == 1
    told = explain("environment.kwargs.size", "ppo_pendulum", ["environment=dmc/cheetah_run"])
    assert told.source == "environment/dmc.yaml" and "height and width" in told.documentation
    told = explain("environment.id", "ppo_pendulum", ["environment=dmc/cheetah_run"])
    assert told.source == "environment/dmc/cheetah_run.yaml"
