"""The child's side of AsyncEnvironment: some cells, a pipe for commands, shared memory for rows and actions."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from rl_lab.environments.rendering import prepare_headless
from rl_lab.environments.vector import SyncEnvironment
from rl_lab.types import EnvRows, EnvSpec, RLLabError
from rl_lab.utils.processes import ASKING

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MEMORY_CHECK_S = 0.25  # seconds between two looks at the memory of a worker
MIB = 2**20
LONE_CELL = ("prepare", "hand_over", "take_over", "upcoming")  # commands to the one cell of a worker (prefetch.py)
SharedArray = tuple[Any, tuple[int, ...], str]  # memory, shape, dtype


@dataclass(frozen=True)
class Job:
    """Everything a fresh process needs to run its part of N environments."""

    build: Callable[[], SyncEnvironment]
    part: slice
    memory: Mapping[str, SharedArray]
    modules: tuple[str, ...]
    search_path: tuple[str, ...]
    registered: Mapping[str, GymnasiumSpec]


class SharedRows:
    """The rows, the actions that answer them, and restart counts, in memory that both sides see."""

    def __init__(self, memory: Mapping[str, SharedArray]) -> None:
        arrays = {name: np.frombuffer(raw, dtype).reshape(shape) for name, (raw, shape, dtype) in memory.items()}
        self.action = arrays.pop("action")
        self.restarts = arrays.pop("restarts")  # total, recent
        flags: dict[str, Any] = {name: arrays.pop(name) for name in ("reward", "is_first", "is_last", "is_terminal")}
        kinds: dict[str, Any] = {"observation": {}, "outcome": {}}
        for name, array in arrays.items():
            kind, _, key = name.partition(":")
            kinds[kind][key] = array
        self.rows = EnvRows(**kinds, **flags)


def share_memory(spec: EnvSpec, num_envs: int) -> dict[str, SharedArray]:
    """Memory, shape and dtype of every shared array."""
    layout: dict[str, tuple[tuple[int, ...], str]] = {
        **{f"observation:{key}": (array.shape, array.dtype) for key, array in spec.observation.items()},
        **{f"outcome:{name}": ((), "float32") for name in spec.outcomes},
        "reward": ((), "float32"),
        **dict.fromkeys(("is_first", "is_last", "is_terminal"), ((), "bool")),
        "action": (spec.action.shape, spec.action.dtype),
        "restarts": ((2,), "int64"),
    }
    sizes = {name: num_envs * int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in layout.items()}
    return {name: (RawArray("b", sizes[name]), (num_envs, *shape), dtype) for name, (shape, dtype) in layout.items()}


def work(job: Job, connection: Connection) -> None:
    """The child's main: answer commands until it is asked to close or the parent is gone."""
    _live_and_die_with_parent()
    os.set_inheritable(connection.fileno(), False)  # a simulator's own process would keep it open after our death
    sys.path[:] = list(job.search_path)
    prepare_headless(uses_mujoco=bool(job.modules))  # a user's module may import it
    mine: Part | None = None
    answer: tuple[str, Any, Any, float]
    memory = MemoryWatch()
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, OSError):
            return  # the parent is gone
        if command == "close":
            break
        try:
            if mine is None:
                mine = Part(job)
            result, events = mine.answer(command, arguments), mine.environment.drain_events()
            answer = ("ok", result, events, memory.growth_mib(is_playing=mine.is_playing))
        except RLLabError as error:
            answer = ("raise", type(error).__name__, str(error), 0.0)
        connection.send(answer)
    if mine is not None:
        mine.environment.close()


def _live_and_die_with_parent() -> None:
    """Signals are the parent's business: those of a terminal or a job queue reach the whole group, and the parent still
    needs our state for its last checkpoint. But when it dies, so do we, even in the middle of an endless step."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(ONE_THREAD)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # with the processes of simulators (VizDoom's engine), which then end with us: Worker.end
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    if sys.platform == "linux":  # a started worker's parent is the fork server
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class MemoryWatch:
    """How much the resident memory of this process has grown since all its environments first played: a simulator may
    load its world, a gigabyte, with the first episode, which in place of a dead worker begins a row later."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._first_mib: float | None = None
        self._growth_mib = 0.0
        self._next_look_s = 0.0

    def growth_mib(self, *, is_playing: bool) -> float:
        now = time.monotonic()
        if now >= self._next_look_s and (is_playing or self._first_mib is not None):
            self._next_look_s = now + MEMORY_CHECK_S
            resident_mib = self._process.memory_info().rss / MIB
            if self._first_mib is None:
                self._first_mib = resident_mib
            self._growth_mib = resident_mib - self._first_mib
        return self._growth_mib


class Part:
    """The environments of one worker and their part of the shared rows."""

    def __init__(self, job: Job) -> None:
        for name in job.modules:
            importlib.import_module(name)
        for name, spec in job.registered.items():
            gym.registry.setdefault(name, spec)
        shared = SharedRows(job.memory)
        self._rows = shared.rows.map(lambda values: values[job.part])
        self._action, self._restarts = shared.action[job.part], shared.restarts[job.part]
        self.environment = job.build()

    @property
    def is_playing(self) -> bool:
        """Every environment has begun an episode in this process."""
        return all(cell.has_begun for cell in self.environment.cells)

    def answer(self, command: str, arguments: tuple[Any, ...]) -> Any:
        if command in LONE_CELL:  # restarts of a spare process count once it is no longer one
            return getattr(self.environment.cells[0], command)(*arguments)
        if command in ("reset", "step"):
            for values in (self._rows.reward, self._rows.is_first, self._rows.is_last, self._rows.is_terminal):
                values[:] = 0
            for values in self._rows.outcome.values():
                values[:] = np.nan
            command, arguments = "fill", (self._rows, self._action if command == "step" else None)
        result = getattr(self.environment, command)(*arguments)
        self._restarts[:] = [(cell.restarts.total, cell.restarts.recent) for cell in self.environment.cells]
        return result
