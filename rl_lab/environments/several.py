"""Several tasks as one environment: N environments, of which the i-th has task i mod K (docs/decisions/0019).

    observation   vectors padded with zeros to the longest of any task; images as they are; `task`, its number from 0
    action        as many numbers as the widest task takes; of the others a task sees its own, the rest is ignored
    outcome       `return/TASK` of every episode, so that each task's return is a metric of its own

Nobody else knows of tasks: rows, buffers, checkpoints and evaluations are those of one environment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.environments.actions import ActionConverter
from rl_lab.environments.base import Environment
from rl_lab.environments.recipe import Blueprint
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import ArraySpec, ConfigError, EnvRows, EnvSpec, StateTree, TaskSpec, did_you_mean

TASK = "task"
SHARED = ("num_envs", "seed", "stream", "render")  # one for all tasks


def make_several(
    tasks: Sequence[str | Mapping[str, Any]], settings: Mapping[str, Any], make: Callable[..., Environment]
) -> Environment:
    """Environments of every task, made with the block's `settings` and what a task says beside its id."""
    num_envs, blocks = settings["num_envs"], [{"id": task} if isinstance(task, str) else dict(task) for task in tasks]
    for index, block in enumerate(blocks):
        if not isinstance(block.get("id"), str) or "num_envs" in block or "tasks" in block:
            raise ConfigError(
                f"environment.tasks.{index} is {tasks[index]!r}: write an environment's id, or a block such as "
                "{id: dmc/walker_walk, time_limit: 500}, without num_envs or tasks."
            )
        for key in block:
            if key not in (allowed := [name for name in settings if name not in SHARED]):
                raise ConfigError(
                    f"environment.tasks.{index}.{key} is not a setting.{did_you_mean(str(key), allowed)} A task has: "
                    f"{', '.join(allowed)}."
                )
    if num_envs < len(blocks) and settings["stream"] != "play_environment":
        key = "evaluation.num_envs" if settings["stream"] == "eval_environment" else "environment.num_envs"
        raise ConfigError(
            f"environment.tasks lists {len(blocks)} tasks, but {key} is {num_envs}: write at least {len(blocks)}, so "
            "that each is played."
        )
    made: list[Environment] = []
    try:
        for index, block in enumerate(blocks):
            count = len(range(index, num_envs, len(blocks))) or 1
            made.append(make(**{**settings, **block, "num_envs": count, "seed": settings["seed"] + index}))
        return SeveralTasks(str(settings["id"]), made, num_envs)
    except BaseException:
        for environment in made:
            environment.close()
        raise


class SeveralTasks:
    """Environments of K tasks, stepped together as one."""

    def __init__(self, name: str, environments: Sequence[Environment], num_envs: int) -> None:
        self.num_envs, count = num_envs, len(environments)
        refuse_misfits([environment.spec for environment in environments])
        self.blueprint = join_blueprints(name, [environment.spec for environment in environments])
        self.spec = self.blueprint.spec
        self.environments = list(environments)
        self.indices = [np.arange(index, num_envs, count) for index in range(count)]  # nobody's where there are fewer
        self._returns = np.zeros(num_envs, np.float64)
        self._shown = 0

    def show_task(self, task: int) -> None:
        """Where fewer environments than tasks are played, which is to be seen: the first plays this one from its next
        reset on."""
        assert self.num_envs == 1, "more than one environment: each has its own task"
        self._shown, self.indices = task, [np.arange(number == task) for number in range(len(self.environments))]

    def reset(self) -> EnvRows:
        return self._join([environment.reset() for environment in self.environments])

    def step(self, action: np.ndarray) -> EnvRows:
        rows = []
        for task, indices in zip(self.environments, self.indices, strict=True):
            own = action[indices] if len(indices) else np.zeros((1, action.shape[1]), action.dtype)
            rows.append(task.step(np.ascontiguousarray(own[:, : task.spec.action.sizes[0]])))
        return self._join(rows)

    def _join(self, parts: Sequence[EnvRows]) -> EnvRows:
        """Rows of every task, each at its own places, padded."""
        shapes = self.spec.observation.items()
        observation = {key: np.zeros((self.num_envs, *spec.shape), spec.dtype) for key, spec in shapes}
        reward = np.zeros(self.num_envs, np.float32)
        flags = {name: np.zeros(self.num_envs, bool) for name in ("is_first", "is_last", "is_terminal")}
        outcome = {name: np.full(self.num_envs, np.nan, np.float32) for name in self.spec.outcomes}
        for number, (rows, indices) in enumerate(zip(parts, self.indices, strict=True)):
            for key, values in rows.observation.items() if len(indices) else ():
                places = (indices, slice(0, values.shape[1])) if values.ndim == 2 else (indices,)
                observation[key][places] = values
            if len(indices):
                observation[TASK][indices], reward[indices] = number, rows.reward
                for name, values in flags.items():
                    values[indices] = getattr(rows, name)
                for name, values in rows.outcome.items():
                    outcome[name][indices] = values
        self._returns = np.where(flags["is_first"], 0.0, self._returns + reward)
        for number, indices in enumerate(self.indices):
            outcome[return_of(self.spec.tasks[number])][indices] = self._returns[indices]
        return EnvRows(observation, reward, **flags, outcome=outcome)

    def get_state(self) -> StateTree:
        return {"tasks": [each.get_state() for each in self.environments], "returns": self._returns.copy()}

    def set_state(self, state: StateTree) -> None:
        for environment, own in zip(self.environments, state["tasks"], strict=True):
            environment.set_state(own)
        self._returns = np.asarray(state["returns"]).copy()

    def render(self) -> np.ndarray | None:
        return self.environments[self._shown].render()

    def drain_events(self) -> list[str]:
        return [sentence for environment in self.environments for sentence in environment.drain_events()]

    def close(self) -> None:
        for environment in self.environments:
            environment.close()


def task_number(spec: EnvSpec, wanted: str | int | None) -> int | None:
    """Which of its tasks is meant, by name or number; None: all of them."""
    if wanted is None:
        return None
    names = [task.name for task in spec.tasks]
    if not names:
        raise ConfigError(f"{spec.id} is one task: leave out --task {wanted}.")
    if str(wanted) in names:
        return names.index(str(wanted))
    if str(wanted).isdecimal() and int(wanted) < len(names):
        return int(wanted)
    raise ConfigError(
        f"{spec.id} has no task '{wanted}'.{did_you_mean(str(wanted), names)} Write its name or number: "
        f"{', '.join(f'{number} {name}' for number, name in enumerate(names))}."
    )


def return_of(task: TaskSpec) -> str:
    return f"return/{task.name}"


def refuse_misfits(specs: Sequence[EnvSpec]) -> None:
    """What cannot be one environment: other kinds of observations, actions that are no numbers, other repeats."""
    first = specs[0]
    for spec in specs:
        if spec.action.kind != "continuous":
            raise ConfigError(
                f"environment.tasks: the actions of {spec.id} are {spec.action.kind}, and only continuous ones can be "
                "padded. Leave it out, or train it alone."
            )
        if (kinds := kinds_of(spec)) != kinds_of(first):
            raise ConfigError(
                f"environment.tasks: {spec.id} shows {kinds}, but {first.id} shows {kinds_of(first)}. Tasks show the "
                "same kinds of observations: write the same `kwargs.observation`, or wrappers that map them."
            )
        if spec.frames_per_step != first.frames_per_step:
            raise ConfigError(
                f"environment.tasks: an agent step is {spec.frames_per_step} frames of {spec.id}, but "
                f"{first.frames_per_step} of {first.id}. Write the same action_repeat for all."
            )


def kinds_of(spec: EnvSpec) -> str:
    """Names and kinds of observations; vectors may have any length."""
    kinds = []
    for key, array in spec.observation.items():
        is_vector = array.dtype == "float32" and len(array.shape) == 1
        kinds.append(f"{key} (a vector)" if is_vector else f"{key} ({array.dtype} {list(array.shape)})")
        if array.is_discrete or key == TASK:
            raise ConfigError(
                f"environment.tasks: {spec.id} shows {key}, which is {array.dtype}: tasks show vectors and images, and "
                f"'{TASK}' is what we call their number. Map it with a wrapper."
            )
    return " and ".join(kinds)


def join_blueprints(name: str, specs: Sequence[EnvSpec]) -> Blueprint:
    """The spaces that hold those of every task."""
    parts: OrderedDict[str, spaces.Space] = OrderedDict()
    for key in specs[0].observation:
        arrays = [spec.observation[key] for spec in specs]
        parts[key] = _space_of(arrays)
    parts[TASK] = spaces.Discrete(len(specs))
    width = max(spec.action.sizes[0] for spec in specs)
    actions = ActionConverter(spaces.Box(-1.0, 1.0, (width,), np.float32), env_id=name)
    observations = ObservationConverter(spaces.Dict(parts), env_id=name)
    limits = [spec.max_episode_steps for spec in specs]
    ids = [spec.id for spec in specs]
    names = [f"{each}_{index}" if ids.count(each) > 1 else each for index, each in enumerate(ids)]
    tasks = [TaskSpec(n, s.action.sizes[0], s.max_episode_steps) for n, s in zip(names, specs, strict=True)]
    outcomes = dict.fromkeys(each for spec in specs for each in spec.outcomes)
    joined = EnvSpec(
        id=name,
        observation=observations.specs,
        action=actions.spec,
        max_episode_steps=None if None in limits else max(limit or 0 for limit in limits),
        frames_per_step=specs[0].frames_per_step,
        render_fps=specs[0].render_fps,
        description=f"{len(specs)} tasks: {', '.join(names)}.",
        outcomes=(*outcomes, *(return_of(task) for task in tasks)),
        tasks=tuple(tasks),
    )
    return Blueprint(joined, observations, actions)


def _space_of(arrays: Sequence[ArraySpec]) -> spaces.Space:
    if arrays[0].is_image:
        return spaces.Box(0, 255, arrays[0].shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, (max(array.shape[0] for array in arrays),), np.float32)
