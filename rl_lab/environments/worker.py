"""The child's side of AsyncEnvironment: some cells, a pipe for commands, shared memory for rows and actions."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from rl_lab.environments.cell import Cell
from rl_lab.environments.recipe import Blueprint, Recipe
from rl_lab.environments.rendering import FrameTaker, prepare_headless
from rl_lab.types import EnvRows, EnvSpec, RLLabError

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ALIGNMENT_BYTES = 64
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Job:
    """Everything a fresh process needs to run the environments `first` to `first + len(seeds) - 1` of `num_envs`."""

    recipe: Recipe
    blueprint: Blueprint
    modules: tuple[str, ...]
    search_path: tuple[str, ...]
    registered: Mapping[str, GymnasiumSpec]
    num_envs: int
    first: int
    seeds: tuple[int, ...]
    is_lost: tuple[bool, ...]
    restarts: tuple[tuple[int, int], ...]
    max_restarts: int


class SharedRows:
    """Views of one block of shared memory: the rows, the actions that answer them, and restart counts."""

    def __init__(self, spec: EnvSpec, num_envs: int, memory: Any) -> None:
        arrays = {}
        offset = 0
        for name, (shape, dtype) in _layout(spec, num_envs).items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)
            offset += _padded(count * np.dtype(dtype).itemsize)
        self.action = arrays.pop("action")
        self.restarts = arrays.pop("restarts")
        flags = {name: arrays.pop(name) for name in ("reward", "is_first", "is_last", "is_terminal")}
        observation = {name.removeprefix("observation:"): array for name, array in arrays.items()}
        self.rows = EnvRows(observation=observation, **flags)

    @staticmethod
    def num_bytes(spec: EnvSpec, num_envs: int) -> int:
        layout = _layout(spec, num_envs).values()
        return sum(_padded(int(np.prod(shape)) * np.dtype(dtype).itemsize) for shape, dtype in layout)


def _layout(spec: EnvSpec, num_envs: int) -> dict[str, tuple[tuple[int, ...], str]]:
    layout: dict[str, tuple[tuple[int, ...], str]] = {
        f"observation:{key}": ((num_envs, *array.shape), array.dtype) for key, array in spec.observation.items()
    }
    layout["reward"] = ((num_envs,), "float32")
    layout |= dict.fromkeys(("is_first", "is_last", "is_terminal"), ((num_envs,), "bool"))
    layout["action"] = ((num_envs, *spec.action.shape), spec.action.dtype)
    layout["restarts"] = ((num_envs, 2), "int64")  # total, recent
    return layout


def _padded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def work(job: Job, connection: Connection, memory: Any) -> None:
    """The child's main: answer commands until told to stop or the parent is gone."""
    _live_and_die_with_parent()
    sys.path[:] = list(job.search_path)
    prepare_headless()
    members: Members | None = None
    answer: tuple[str, Any, Any]
    while True:
        try:
            command, argument = connection.recv()
        except (EOFError, OSError):
            return  # the parent is gone
        if command == "close":
            break
        try:
            if members is None:
                members = Members(job, memory)
            answer = ("ok", members.answer(command, argument), members.drain_events())
        except RLLabError as error:
            answer = ("raise", type(error).__name__, str(error))
        connection.send(answer)
    if members is not None:
        members.close()


def _live_and_die_with_parent() -> None:
    """Signals are the parent's business: Ctrl-C and a cluster's SIGTERM reach the whole group, and the parent still
    needs our state for its last checkpoint. But when it dies, so do we, even in the middle of an endless step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(ONE_THREAD)
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    if sys.platform == "linux":  # a started worker's parent is the fork server
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Members:
    """The cells of one worker and its slice of the shared rows."""

    def __init__(self, job: Job, memory: Any) -> None:
        for name in job.modules:
            importlib.import_module(name)
        for name, spec in job.registered.items():
            gym.registry.setdefault(name, spec)
        shared = SharedRows(job.blueprint.spec, job.num_envs, memory)
        part = slice(job.first, job.first + len(job.seeds))
        everything = shared.rows
        self._rows = EnvRows(
            {key: array[part] for key, array in everything.observation.items()},
            everything.reward[part],
            everything.is_first[part],
            everything.is_last[part],
            everything.is_terminal[part],
        )
        self._action, self._restarts, self._actions = shared.action[part], shared.restarts[part], job.blueprint.actions
        self._frames = FrameTaker()
        self._cells = [
            Cell(
                job.recipe.build,
                job.blueprint.observations,
                index=job.first + i,
                seed=seed,
                max_restarts=job.max_restarts,
                is_lost=job.is_lost[i],
                restarts=job.restarts[i],
            )
            for i, seed in enumerate(job.seeds)
        ]

    def answer(self, command: str, argument: Any) -> Any:
        if command in ("reset", "step"):
            for flags in (self._rows.reward, self._rows.is_first, self._rows.is_last, self._rows.is_terminal):
                flags[:] = 0
        result = getattr(self, f"_{command}")(argument)
        self._restarts[:] = [(cell.restarts.total, cell.restarts.recent) for cell in self._cells]
        return result

    def drain_events(self) -> list[str]:
        events = [event for cell in self._cells for event in cell.events] + self._frames.events
        for cell in self._cells:
            cell.events.clear()
        self._frames.events.clear()
        return events

    def close(self) -> None:
        for cell in self._cells:
            cell.close()

    def _reset(self, _: None) -> list[int]:
        for i, cell in enumerate(self._cells):
            cell.begin(self._rows, i)
        return []

    def _step(self, _: None) -> list[int]:
        """The environments that failed and whose last observation is to be repeated."""
        pairs = zip(self._cells, self._actions.rows(self._action), strict=True)
        return [cell.index for i, (cell, action) in enumerate(pairs) if not cell.step(action, self._rows, i)]

    def _get_state(self, _: None) -> list[Any]:
        return [cell.get_state() for cell in self._cells]

    def _set_state(self, argument: tuple[list[Any], dict[str, np.ndarray]]) -> None:
        states, observation = argument
        for cell, state in zip(self._cells, states, strict=True):
            cell.set_state(state, observation)

    def _render(self, _: None) -> np.ndarray | None:
        return self._frames.take(self._cells[0].env)
