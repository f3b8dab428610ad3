"""The only caller of environment.step while training: ask the policy, store the row, step, repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from math import isfinite
from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.collection.episodes import EpisodeTracker
from rl_lab.environments.base import Environment
from rl_lab.types import (
    Batch,
    CollectResult,
    Counts,
    EnvRows,
    Episode,
    NonFiniteRow,
    Phase,
    PolicyStep,
    RunError,
    StateTree,
    TimeStep,
)
from rl_lab.utils.timing import Stopwatch
from rl_lab.utils.tree import map_leaves, tensors_to_numpy

Policy = Callable[..., PolicyStep]


class RowStore(Protocol):
    def add(self, row: Batch) -> None: ...
    def set_pending(self, row: Batch) -> None: ...


@dataclass(eq=False)
class Collector:
    """Holds the environments, the pending time step (no action yet), and the policy's state."""

    environment: Environment
    buffers: Mapping[str, RowStore]
    _: KW_ONLY
    device: torch.device
    stopwatch: Stopwatch
    report: Callable[[str], None] = lambda sentence: None

    def __post_init__(self) -> None:
        self.stage = 0  # which environment of a curriculum this is
        self.episodes = EpisodeTracker(self.environment.num_envs)
        self.restarts = 0
        self.steps_under_way = 0  # agent steps of the collection that is not over yet, for whoever shows the run
        self._pending: EnvRows | None = None
        self._time_step: TimeStep | None = None  # the pending row as tensors: a buffer recognises it by its memory
        self._policy_state: Any = None
        self._controller: str | None = None
        self._without_graph = torch.inference_mode()  # entered again for every action: making one takes longer

    def collect(self, policy: Policy, *, phase: Phase) -> CollectResult:
        """Answer `phase.collect_steps` rows of every environment and store them in the phase's buffer."""
        buffer = self.buffers[phase.buffer]
        if self._controller != phase.controller:
            self._policy_state, self._controller = None, phase.controller
        if self._pending is None:
            self._pending = self._checked(self.environment.reset())
        finished: list[Episode] = []
        agent_steps = 0
        clock, environment_s, policy_s, device_s = time.perf_counter, 0.0, 0.0, 0.0
        pending = self._pending
        time_step = to_time_step(pending, self.device) if self._time_step is None else self._time_step
        for _ in range(phase.collect_steps):
            before = clock()
            with self._without_graph:
                policy_step = policy(time_step, self._policy_state, mode="train")
            between = clock()
            row = row_of(time_step)
            row["action"] = policy_step.action
            row.update(policy_step.extras)
            buffer.add(row)
            self._policy_state = policy_step.state
            agent_steps += len(pending.is_last) - int(np.count_nonzero(pending.is_last))
            self.steps_under_way = agent_steps
            waiting = clock()
            action = policy_step.action.cpu().numpy()  # a GPU first finishes the updates that are still queued on it
            start = clock()
            pending = self.environment.step(action)
            environment_s += clock() - start
            policy_s += between - before
            device_s += start - waiting
            self._checked(pending, action)
            time_step = to_time_step(pending, self.device)
            finished += self.episodes.track(pending)
        self._pending, self._time_step = pending, time_step
        buffer.set_pending(row_of(time_step))
        for section, seconds in (("environment", environment_s), ("policy", policy_s), ("device", device_s)):
            self.stopwatch.add(section, seconds)
        self._drain_events()
        self.steps_under_way = 0
        counts = Counts(agent_steps * self.environment.spec.frames_per_step, agent_steps, episodes=len(finished))
        metrics = {**self.episodes.metrics(), "collect/environment_restarts": self.restarts}
        return CollectResult(counts, metrics, tuple(finished))

    def restart(self) -> None:
        """Begin a new episode everywhere; those that were running count for nothing."""
        self._pending, self._time_step = self._checked(self.environment.reset()), None
        self._policy_state = None
        self.episodes.track(self._pending)
        self._drain_events()

    def change_environment(self, environment: Environment, *, stage: int) -> None:
        """Go on in another environment, from its first reset: nothing of the old one is kept but the restarts."""
        self.environment.close()
        self.environment, self.stage = environment, stage
        self.episodes = EpisodeTracker(environment.num_envs)
        self._pending = self._time_step = self._policy_state = None

    def _checked(self, rows: EnvRows, action: np.ndarray | None = None) -> EnvRows:
        """Refuse a reward or an observation that is not finite, naming the environment, or a policy that led there."""
        for name, values in (("reward", rows.reward), *rows.observation.items()):
            if values.dtype.kind != "f" or isfinite(np.add.reduce(values, axis=None)):
                continue
            bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
            if len(bad) and action is not None and action.dtype.kind == "f" and not np.isfinite(action).all():
                raise RunError(
                    f"The policy's action is not finite, so environment {bad[0]} sent a {name} that is not either: "
                    "learning has diverged; the last checkpoint is from before. Try a smaller learning rate or "
                    "`max_grad_norm` of the optimizers."
                )
            if len(bad):
                index = np.argwhere(~np.isfinite(values[bad[0]]))[0]
                raise NonFiniteRow(
                    f"Environment {bad[0]} of '{self.environment.spec.id}' sent a {name} that is not finite "
                    f"({values[bad[0]]!s}). Nothing was learnt from it; the last checkpoint is intact. Check the "
                    f"environment with `rl-lab envs check {self.environment.spec.id}`.",
                    name=name,
                    env_index=int(bad[0]),
                    index=tuple(index.tolist()),
                    value=str(float(values[bad[0]][tuple(index)])),
                )
        return rows

    def _drain_events(self) -> None:
        for sentence in self.environment.drain_events():
            self.restarts += 1
            self.report(sentence)

    def get_state(self) -> StateTree:
        pending = self._pending
        return {
            "environment": self.environment.get_state() if pending is not None else None,
            "pending": None if pending is None else dict(vars(pending)),
            "policy_state": map_leaves(torch.clone, self._policy_state),
            "controller": self._controller,
            "episodes": self.episodes.get_state(),
            "restarts": self.restarts,
            "stage": self.stage,
        }

    def set_state(self, state: StateTree) -> None:
        self._controller = state["controller"]
        self._policy_state = map_leaves(lambda leaf: leaf.to(self.device), state["policy_state"])
        self.episodes.set_state(state["episodes"])
        self.restarts = state["restarts"]
        self._pending = self._time_step = None
        if state["pending"] is not None:
            self._pending = EnvRows(**tensors_to_numpy(state["pending"]))
            self.environment.set_state(tensors_to_numpy(state["environment"]))
            self._drain_events()


def to_time_step(rows: EnvRows, device: torch.device) -> TimeStep:
    """Numpy rows as tensors; on a CPU they share memory."""

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    tensor = torch.from_numpy if device.type == "cpu" else on_device
    observation = {key: tensor(values) for key, values in rows.observation.items()}
    return TimeStep(observation, *map(tensor, (rows.reward, rows.is_first, rows.is_last, rows.is_terminal)))


def row_of(time_step: TimeStep) -> Batch:
    """A time step as one flat row."""
    row = vars(time_step).copy()
    return {**row.pop("observation"), **row}
