"""N environments in worker processes, for environments whose step costs more than a message.

    parent   writes actions ─► shared memory ◄─ workers write observations, rewards, flags (their slice each)
             "step" ─► pipe ─► worker            "ok", events ─► pipe ─► parent copies fresh arrays

Rows are bit for bit those of SyncEnvironment, and so are the states. A worker that dies or hangs is replaced: its
environments end their episodes (not terminal) and begin new ones.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util  # its exit hook must be registered before ours, which then runs first
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np

from rl_lab import types
from rl_lab.environments.recipe import Blueprint, Recipe
from rl_lab.environments.vector import SyncEnvironment, VectorBase
from rl_lab.environments.worker import ONE_THREAD, Job, SharedRows, share_memory, work
from rl_lab.environments.wrappers import WRAPPERS
from rl_lab.types import ConfigError, EnvRows, RLLabError
from rl_lab.utils.processes import ASKING, available_cores

CLOSE_TIMEOUT_S = 5.0
OPEN: weakref.WeakSet[AsyncEnvironment] = weakref.WeakSet()


class WorkerLostError(Exception):
    """A worker died or did not answer; the message says which."""


@dataclass(frozen=True)
class Limits:
    """How much is borne of environments and their processes."""

    max_restarts: int = 10
    worker_timeout_s: float = 300.0  # generous: some games need a minute to start
    worker_growth_mib: float | None = 1024.0  # more than simulators add while they load levels and textures


@dataclass
class Worker:
    """One child process and the environments it runs."""

    part: slice
    process: Any
    connection: Connection
    growth_mib: float = 0.0  # of its memory since its first answer
    is_over: bool = False

    def end(self, patience_s: float = 0.0) -> None:
        """Wait a while, then kill (not terminate: workers ignore SIGTERM), and with it what it started."""
        if self.is_over:
            return
        self.is_over = True
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):  # it had started nothing
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.close()
        self.connection.close()


class AsyncEnvironment(VectorBase):
    """Cells in `num_workers` processes (default: one per core, at most one per environment)."""

    def __init__(
        self,
        recipe: Recipe,
        blueprint: Blueprint,
        *,
        seeds: list[int],
        limits: Limits,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(blueprint, num_envs=len(seeds), max_restarts=limits.max_restarts)
        self._recipe, self._seeds, self._timeout_s = recipe, seeds, limits.worker_timeout_s
        self._growth_mib = float("inf") if limits.worker_growth_mib is None else limits.worker_growth_mib
        self._is_closed = False
        self._context: Any = _context()
        self._memory = share_memory(self.spec, self.num_envs)
        self._shared = SharedRows(self._memory)
        self._workers: list[Worker] = []
        self._needs_main = b"__main__" in pickled(recipe)
        OPEN.add(self)
        for part in np.array_split(np.arange(self.num_envs), min(self.num_envs, num_workers or available_cores())):
            self._workers.append(self._start(slice(int(part[0]), int(part[-1]) + 1)))

    # --- the Environment interface ---

    def reset(self) -> EnvRows:
        return self._take_rows("reset")

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        self._shared.action[...] = action
        return self._take_rows("step")

    def get_cells(self) -> list[Any]:
        return [state for states in self._ask_all("get_cells") for state in states]

    def set_cells(self, states: Sequence[Any], observation: dict[str, np.ndarray]) -> None:
        self._ask_all("set_cells", [(states[worker.part], observation) for worker in self._workers])

    def render(self) -> np.ndarray | None:
        return self._ask(0, "render")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        workers = self._all_workers()
        for worker in workers:
            self._send(worker, "close", ())
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for worker in workers:
            worker.end(max(0.0, deadline - time.monotonic()))

    def _all_workers(self) -> list[Worker]:
        return self._workers

    # --- talking to workers ---

    def _take_rows(self, command: str) -> EnvRows:
        for worker, failed in zip(self._workers, self._ask_all(command), strict=True):
            for i in failed:  # of which half may have been overwritten
                self._repeat_last(slice(worker.part.start + i, worker.part.start + i + 1))
        self._rows = self._shared.rows.map(np.copy)
        self._check_restarts(int(self._shared.restarts[:, 1].sum()))
        for index, worker in enumerate(self._workers):
            if worker.growth_mib > self._growth_mib:
                self._renew(index)
        return self._rows

    def _repeat_last(self, part: slice) -> None:
        if self._rows is not None:
            for key, values in self._rows.observation.items():
                self._shared.rows.observation[key][part] = values[part]

    def _ask_all(self, command: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """One command to every worker, answered in parallel; a lost worker is replaced and asked again."""
        arguments = arguments or [()] * len(self._workers)
        for worker, argument in zip(self._workers, arguments, strict=True):
            self._send(worker, command, argument)
        answers, errors = [], []
        for index, argument in enumerate(arguments):
            try:
                answers.append(self._receive_or_replace(index, command, argument))
            except RLLabError as error:  # the others' answers come first, or they would be taken for the next ones
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def _ask(self, index: int, command: str, argument: tuple[Any, ...] = ()) -> Any:
        self._send(self._workers[index], command, argument)
        return self._receive_or_replace(index, command, argument)

    def _receive_or_replace(self, index: int, command: str, argument: Any) -> Any:
        while True:
            try:
                return self._receive(self._workers[index])
            except WorkerLostError as why:
                self._replace(index, str(why))
                self._send(self._workers[index], command, argument)

    def _send(self, worker: Worker, command: str, argument: Any) -> None:
        with suppress(OSError):  # it died meanwhile: waiting for its answer will tell
            worker.connection.send((command, argument))

    def _receive(self, worker: Worker) -> Any:
        try:
            if not worker.connection.poll(self._timeout_s):
                raise WorkerLostError(f"did not answer for {self._timeout_s:g} s")
            kind, content, detail, worker.growth_mib = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(CLOSE_TIMEOUT_S)
            raise WorkerLostError(f"died with exit code {worker.process.exitcode}") from None
        if kind == "raise":
            raise getattr(types, content)(detail)
        self._events += detail
        return content

    # --- starting and replacing workers ---

    def _start(self, part: slice) -> Worker:
        total = int(self._shared.restarts[:, 0].sum())
        env_id = self._recipe.id.rpartition(":")[2]
        build = partial(
            SyncEnvironment,
            self._recipe.build,
            self.blueprint,
            seeds=[_seed_after(seed, total) for seed in self._seeds[part]],
            max_restarts=self._max_restarts,
            first=part.start,
            is_lost=None if self._rows is None else (~self._rows.is_last[part]).tolist(),
            restarts=self._shared.restarts[part].tolist(),
        )
        registered = {env_id: gym.registry[env_id]} if env_id in gym.registry else {}
        job = Job(build, part, self._memory, self._recipe.modules(), tuple(sys.path), registered)
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(job, theirs), name=f"environments {part.start}+")
        with quiet_start(), main_module(is_needed=self._needs_main):
            process.start()
        theirs.close()
        return Worker(part, process, mine)

    def _replace(self, index: int, why: str) -> None:
        """A fresh process for the same environments; one restart is counted for the whole worker."""
        worker = self._workers[index]
        worker.end()
        self._shared.restarts[worker.part.start] += 1
        total, recent = self._shared.restarts.sum(axis=0).tolist()
        self._events.append(f"The process of {_names(worker.part)} {why}; it was restarted (restart {total}).")
        self._check_restarts(recent)
        self._repeat_last(worker.part)  # the dying worker may have left half a row
        self._workers[index] = self._start(worker.part)

    def _renew(self, index: int) -> None:
        """A fresh process for a worker whose memory keeps growing. Its environments go on where they stand, so it is
        counted, but not against `max_restarts`."""
        assert self._rows is not None
        growth_mib = self._workers[index].growth_mib
        states = self._ask(index, "get_cells")
        states[0]["restarts"] += 1
        worker = self._workers[index]
        self._send(worker, "close", ())
        worker.end(CLOSE_TIMEOUT_S)
        self._workers[index] = self._start(worker.part)
        self._ask(index, "set_cells", (states, self._rows.observation))
        total = int(self._shared.restarts[:, 0].sum())
        self._events.append(
            f"The process of {_names(worker.part)} grew by {growth_mib:,.0f} MiB: an environment keeps memory that it "
            f"no longer needs. It was replaced and goes on where it stood (restart {total})."
        )


def _names(part: slice) -> str:
    first, last = part.start, part.stop - 1
    return f"environment {first}" if first == last else f"environments {first} to {last}"


def pickled(recipe: Recipe) -> bytes:
    """How to build the environment, as sent to a worker; lambdas and local classes cannot travel."""
    name = recipe.id.rpartition(":")[2]
    try:
        return pickle.dumps((recipe, gym.registry.get(name), [WRAPPERS[entry["id"]] for entry in recipe.wrappers]))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"environment '{recipe.id}' cannot run in subprocesses because its registration or kwargs cannot be sent "
            f"to them ({error}). Register it with an entry point such as 'package.module:Class', or set "
            "environment.vectorization=sync."
        ) from error


def _seed_after(seed: int, restarts: int) -> int:
    """A replaced worker must not repeat the episodes it began with."""
    return int(np.random.SeedSequence([seed, restarts]).generate_state(1)[0]) if restarts else seed


def _context() -> Any:
    """forkserver: workers start from one clean process that has imported us, in milliseconds. A plain fork would
    inherit threads, GPU contexts and renderers."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_lab.environments.worker"])
    for helper in (resource_tracker, forkserver):  # in this order: the first unblocks SIGTERM when it has started
        with quiet_start():
            helper.ensure_running()
    return context


@contextmanager
def main_module(*, is_needed: bool) -> Iterator[None]:
    """Multiprocessing imports the user's script again in every child. Only an environment or wrapper defined in that
    script needs it; any other script would merely train again in each worker if it has no __main__ guard."""
    real = sys.modules["__main__"]
    if not is_needed:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


@contextmanager
def quiet_start() -> Iterator[None]:
    """What starts inside inherits one thread per process and blocked signals; ours come back after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING) if hasattr(signal, "pthread_sigmask") else None
    old = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@atexit.register
def close_all() -> None:
    """No worker outlives an interpreter that forgot to close its environments."""
    for environment in list(OPEN):
        environment.close()
