"""Several tasks as one environment: padded rows, one number per task, returns of their own, refusals at the door."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_lab.collection.evaluator import Evaluator
from rl_lab.environments.factory import make_environment
from rl_lab.environments.saved import from_plain, to_plain
from rl_lab.environments.several import SeveralTasks, task_number
from rl_lab.experiment.trust import _modules
from rl_lab.types import ConfigError, EnvRows, PolicyStep, TaskSpec, TimeStep


class Wide(gym.Env):
    """Five numbers seen, three taken; the reward is the sum of those taken. Ends after four steps."""

    observation_space = gym.spaces.Box(-9.0, 9.0, (5,), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (3,), np.float32)

    def __init__(self, kind: str = "wide") -> None:
        if kind == "image":
            self.observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        if kind == "discrete":
            self.action_space = gym.spaces.Discrete(3)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observation_space.sample() * 0 + 1, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.observation_space.sample() * 0 + 1, float(np.sum(action)), self.count == 4, False, {}


gym.register("tests/Wide-v0", entry_point=Wide)
TASKS = ["rl_lab/PointMass-v0", "tests/Wide-v0"]


def make(tasks: list[Any] = TASKS, num_envs: int = 3, **settings: Any) -> SeveralTasks:
    environment = make_environment(id="both", tasks=tasks, num_envs=num_envs, vectorization="sync", **settings)
    assert isinstance(environment, SeveralTasks)
    return environment


def test_rows_are_padded_and_say_their_task() -> None:
    environment = make()
    spec = environment.spec
    assert {key: each.shape for key, each in spec.observation.items()} == {"vector": (5,), "task": ()}
    assert spec.action.sizes == (3,) and spec.observation["task"].num_values == (2,)
    sizes = make_environment(id="rl_lab/PointMass-v0").spec
    assert spec.tasks == (
        TaskSpec("rl_lab/PointMass-v0", sizes.action.sizes[0], sizes.max_episode_steps),
        TaskSpec("tests/Wide-v0", 3, None),
    )
    rows = environment.reset()
    assert rows.observation["task"].tolist() == [0, 1, 0]
    assert rows.observation["vector"][1].tolist() == [1.0] * 5
    seen = sizes.observation["vector"].shape[0]
    assert not rows.observation["vector"][0, seen:].any() and rows.observation["vector"][0, :seen].any()


def test_a_task_takes_its_own_numbers_and_every_return_has_its_name() -> None:
    environment = make()
    environment.reset()
    action = np.array([[0.1, 9.0, 9.0], [0.5, 0.5, -0.25], [0.1, -9.0, 9.0]], np.float32)
    rows: list[EnvRows] = [environment.step(action) for _ in range(4)]
    assert rows[0].reward[1] == pytest.approx(1.5)  # twice the sum: its range is -2 to 2
    assert rows[3].is_last.tolist() == [False, True, False] and rows[3].is_terminal[1]
    assert rows[3].outcome["return/tests/Wide-v0"][1] == pytest.approx(6.0)
    assert np.isnan(rows[3].outcome["return/tests/Wide-v0"][[0, 2]]).all()
    begun = environment.step(action)
    assert begun.is_first[1] and begun.reward[1] == 0.0
    assert environment.step(action).outcome["return/tests/Wide-v0"][1] == pytest.approx(1.5)


def test_it_goes_on_bit_for_bit_from_its_state() -> None:
    first, second = make(), make(seed=9)
    generator = np.random.default_rng(0)
    first.reset()
    second.reset()
    for _ in range(6):
        first.step(generator.normal(size=(3, 3)).astype(np.float32))
    second.set_state(first.get_state())
    for _ in range(60):
        action = generator.normal(size=(3, 3)).astype(np.float32)
        one, other = first.step(action), second.step(action)
        for name in ("reward", "is_first", "is_last"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        for key in one.observation:
            assert np.array_equal(one.observation[key], other.observation[key])
        for key in one.outcome:
            assert np.array_equal(one.outcome[key], other.outcome[key], equal_nan=True)


def test_what_a_run_keeps_of_it_holds_its_tasks() -> None:
    blueprint = make().blueprint
    kept = from_plain(json.loads(json.dumps(to_plain(blueprint))), place="environment.json")
    assert kept.spec.tasks == blueprint.spec.tasks and kept.spec.observation == blueprint.spec.observation


def test_one_environment_plays_the_first_task() -> None:
    environment = make(num_envs=1, stream="play_environment")
    rows = environment.reset()
    assert rows.observation["task"].tolist() == [0]
    assert environment.step(np.zeros((1, 3), np.float32)).reward.shape == (1,)


def test_a_task_may_have_settings_of_its_own_and_be_there_twice() -> None:
    environment = make([TASKS[0], {"id": TASKS[0], "time_limit": 7}])
    assert [task.name for task in environment.spec.tasks] == [f"{TASKS[0]}_0", f"{TASKS[0]}_1"]
    assert environment.spec.tasks[1].max_episode_steps == 7


@pytest.mark.parametrize(
    ("tasks", "settings", "message"),
    [
        (
            [TASKS[0], {"id": "tests/Wide-v0", "kwargs": {"kind": "image"}}],
            {},
            r"tests/Wide-v0 shows image \(uint8 \[8, 8, 3\]\), but rl_lab/PointMass-v0 shows vector \(a vector\)",
        ),
        (
            [TASKS[0], {"id": "tests/Wide-v0", "kwargs": {"kind": "discrete"}}],
            {},
            "the actions of tests/Wide-v0 are discrete, and only continuous ones can be padded. Leave it out",
        ),
        ([TASKS[0], {"id": TASKS[1], "action_repeat": 2}], {}, "an agent step is 2 frames of tests/Wide-v0, but 1 of"),
        ([TASKS[0], {"time_limit": 3}], {}, "environment.tasks.1 is {'time_limit': 3}: write an environment's id, or"),
        (
            [TASKS[0], {"id": TASKS[1], "tim_limit": 3}],
            {},
            r"environment.tasks.1.tim_limit is not a setting. Did you mean 'time_limit'\? A task has: .*time_limit, ",
        ),
        ([TASKS[0], {"id": TASKS[1], "seed": 3}], {}, "environment.tasks.1.seed is not a setting. A task has: id, "),
        (TASKS, {"num_envs": 1}, "lists 2 tasks, but environment.num_envs is 1: write at least 2"),
        (TASKS, {"num_envs": 1, "stream": "eval_environment"}, "but evaluation.num_envs is 1: write at least 2"),
    ],
)
def test_what_cannot_be_one_environment_is_refused(tasks: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tasks, **settings)


def test_packages_that_tasks_import_need_consent() -> None:
    config = {"environment": {"id": "both", "tasks": ["theirs:Env-v0", {"id": "others:Env-v0"}]}}
    assert dict(_modules(config)) == {"theirs": "environment.tasks.0", "others": "environment.tasks.1.id"}


def evaluator_of_both() -> Evaluator:
    """Task 0 is drawn as 2 x 4 pixels of 10, task 1 as 4 x 2 of 20; its episodes last 4 steps."""

    def make_rendered() -> SeveralTasks:
        environment = make([{"id": TASKS[0], "time_limit": 6}, TASKS[1]], 1, stream="play_environment")
        for number, shape in enumerate([(2, 4, 3), (4, 2, 3)]):
            frame = np.full(shape, 10 * (number + 1), np.uint8)
            environment.environments[number].render = lambda frame=frame: frame  # type: ignore[method-assign]
        return environment

    return Evaluator(make_rendered, make_render_environment=make_rendered, device=torch.device("cpu"))


def act(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
    seen.append(int(time_step.observation["task"][0]))
    return PolicyStep(torch.ones(1, 3))


seen: list[int] = []


def test_every_task_is_recorded_after_the_other_or_one_alone() -> None:
    seen.clear()
    recordings = evaluator_of_both().record_episodes(act, episodes=2)
    assert [len(recording.frames) for recording in recordings] == [7, 7, 5, 5]
    assert [recording.frames[0].max() for recording in recordings] == [10, 10, 20, 20]
    assert {frame.shape for recording in recordings for frame in recording.frames} == {(4, 4, 3)}  # black edges
    assert seen == sorted(seen) and recordings[2].episode_return == 4 * 3 * 2.0  # four steps of (2, 2, 2)
    alone = evaluator_of_both().record_episodes(act, episodes=1, task=1)
    assert [recording.frames[0].shape for recording in alone] == [(4, 2, 3)]
    whole = evaluator_of_both().record(act)
    assert whole is not None and [frame.max() for frame in whole.frames] == [10] * 7 + [20] * 5


def test_a_task_is_named_or_numbered() -> None:
    spec = make().spec
    assert [task_number(spec, wanted) for wanted in (None, 1, "0", TASKS[1])] == [None, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"both has no task 'tests/Wid-v0'. Did you mean 'tests/Wide-v0'\? Write its"):
        task_number(spec, "tests/Wid-v0")
    with pytest.raises(ConfigError, match="0 rl_lab/PointMass-v0, 1 tests/Wide-v0"):
        task_number(spec, 2)
    with pytest.raises(ConfigError, match="Counter-v0 is one task: leave out --task x"):
        task_number(make_environment(id="rl_lab/Counter-v0").spec, "x")
