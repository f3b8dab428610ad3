"""N environments in this process: one by one (Sync), or as Gymnasium's own vector environment (Native)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from rl_lab.environments.cell import MAX_EPISODE_SEED, Cell, Restarts, too_many_restarts
from rl_lab.environments.plain import from_text, to_text
from rl_lab.environments.recipe import Blueprint, close
from rl_lab.environments.rendering import FrameTaker
from rl_lab.environments.snapshot import capture, restore
from rl_lab.types import EnvRows, EnvSpec, RLLabError, RunError, StateTree


def empty_rows(observation: dict[str, np.ndarray], outcomes: Sequence[str] = ()) -> EnvRows:
    """Rows with these observations; rewards and flags are zero, outcomes NaN."""
    num_envs = len(next(iter(observation.values())))
    outcome = {name: np.full(num_envs, np.nan, np.float32) for name in outcomes}
    is_first, is_last, is_terminal = (np.zeros(num_envs, bool) for _ in range(3))
    return EnvRows(observation, np.zeros(num_envs, np.float32), is_first, is_last, is_terminal, outcome)


def saved_rows(observation: Mapping[str, Any], is_last: Any) -> EnvRows | None:
    """The last rows of a saved state, as far as the next ones depend on them; None: there were none yet."""
    if not observation:
        return None
    rows = empty_rows({key: np.asarray(values).copy() for key, values in observation.items()})
    rows.is_last[:] = np.asarray(is_last)
    return rows


class VectorBase:
    """What the ways of running N environments share: their spec, the rows they returned last, events, saved states."""

    kind = "cells"  # in saved states: sync and async environments can continue each other's

    def __init__(self, blueprint: Blueprint, *, num_envs: int, max_restarts: int) -> None:
        self.num_envs = num_envs
        self.spec: EnvSpec = blueprint.spec
        self.blueprint = blueprint
        self._max_restarts = max_restarts
        self._events: list[str] = []
        self._rows: EnvRows | None = None

    def drain_events(self) -> list[str]:
        events = self._events[:]
        self._events.clear()  # not a new list: cells write into this one
        return events

    def _check_restarts(self, recent: int) -> None:
        if recent > self._max_restarts:
            raise too_many_restarts(self._max_restarts, self._events[-1] if self._events else "")

    def get_cells(self) -> list[Any]:
        """The states of all cells."""
        raise NotImplementedError

    def set_cells(self, states: Sequence[Any], observation: dict[str, np.ndarray]) -> None:
        """Cells continue from their states and the arrays of the last rows."""
        raise NotImplementedError

    def get_state(self) -> StateTree:
        observation = {} if self._rows is None else {k: v.copy() for k, v in self._rows.observation.items()}
        return {"kind": self.kind, "num_envs": self.num_envs, "cells": self.get_cells(), "observation": observation}

    def set_state(self, state: StateTree) -> None:
        self._check_state(state)
        observation = {key: np.asarray(values) for key, values in state["observation"].items()}
        self.set_cells(state["cells"], observation)
        self._rows = saved_rows(observation, [cell["needs_reset"] for cell in state["cells"]])

    def _check_state(self, state: StateTree) -> None:
        """A saved state fits the same way of running and the same number of environments."""
        if state["kind"] != self.kind:
            wanted = "native" if state["kind"] == "native" else "sync"
            raise RunError(
                f"the checkpoint's environments were {state['kind']}, these are {self.kind}: "
                f"resume with environment.vectorization={wanted}."
            )
        if state["num_envs"] != self.num_envs:
            raise RunError(
                f"the checkpoint holds {state['num_envs']} environments, this run has {self.num_envs}: "
                f"resume with environment.num_envs={state['num_envs']}."
            )


class SyncEnvironment(VectorBase):
    """Cells stepped one after the other: the fastest way for environments that cost microseconds.

    In a worker process it is some of N environments, those from `first` on, perhaps after earlier ones were lost.
    """

    def __init__(
        self,
        build: Callable[[], gym.Env],
        blueprint: Blueprint,
        *,
        seeds: Sequence[int],
        max_restarts: int,
        first: int = 0,
        is_lost: Sequence[bool] | None = None,
        restarts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(blueprint, num_envs=len(seeds), max_restarts=max_restarts)
        self._frames = FrameTaker(self._events)
        self.cells = [
            Cell(
                build=build,
                converter=blueprint.observations,
                outcomes=blueprint.spec.outcomes,
                index=first + i,
                seed=seed,
                max_restarts=max_restarts,
                events=self._events,
                is_lost=is_lost is not None and is_lost[i],
                restarts=Restarts(*restarts[i]) if restarts else Restarts(),
            )
            for i, seed in enumerate(seeds)
        ]

    def reset(self) -> EnvRows:
        return self._next_rows(None)

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        return self._next_rows(np.asarray(action))

    def fill(self, rows: EnvRows, action: np.ndarray | None) -> list[int]:
        """Write what follows the action (None: a reset) into `rows`, whose rewards and flags are zero; the places of
        those that failed, whose last observation is to be repeated."""
        if action is None:
            for i, cell in enumerate(self.cells):
                cell.begin(rows, i)
            return []
        pairs = zip(self.cells, self.blueprint.actions.rows(action), strict=True)
        return [i for i, (cell, one) in enumerate(pairs) if not cell.step(one, rows, i)]

    def _next_rows(self, action: np.ndarray | None) -> EnvRows:
        rows = empty_rows(self.blueprint.observations.allocate(self.num_envs), self.spec.outcomes)
        for i in self.fill(rows, action):
            for key, values in self._rows.observation.items():  # type: ignore[union-attr]
                rows.observation[key][i] = values[i]
        self._rows = rows
        if self._events:
            self._check_restarts(sum(cell.restarts.recent for cell in self.cells))
        return rows

    def get_cells(self) -> list[Any]:
        return [cell.get_state() for cell in self.cells]

    def set_cells(self, states: Sequence[Any], observation: dict[str, np.ndarray]) -> None:
        for cell, state in zip(self.cells, states, strict=True):
            cell.set_state(state, observation)
        if self._events:
            self._check_restarts(sum(cell.restarts.recent for cell in self.cells))

    def render(self) -> np.ndarray | None:
        return self._frames.take(self.cells[0].env)

    def close(self) -> None:
        for cell in self.cells:
            cell.close()


class NativeEnvironment(VectorBase):
    """A Gymnasium vector environment that moves N environments with array operations."""

    kind = "native"

    def __init__(
        self, make: Callable[[], VectorEnv], blueprint: Blueprint, *, num_envs: int, seed: int, max_restarts: int
    ) -> None:
        super().__init__(blueprint, num_envs=num_envs, max_restarts=max_restarts)
        self._make, self._env = make, make()
        self._restarts = Restarts()
        self._seeds = np.random.default_rng(seed)
        self._frames = FrameTaker(self._events)
        self._needs_reset = True
        self._is_lost = False  # the episodes under way cannot go on: the next rows end them

    @property
    def is_one_array(self) -> bool:
        """Gymnasium's own: all environments move in the same NumPy operations, so that more of them cost little."""
        return type(self._env.unwrapped).__module__.startswith("gymnasium.envs.")

    def reset(self) -> EnvRows:
        while True:
            try:
                observation, _ = self._env.reset(seed=int(self._seeds.integers(MAX_EPISODE_SEED)))
                break
            except Exception as error:  # noqa: BLE001 (see Cell._restart)
                self._restart(error, "reset")
        self._rows = empty_rows(self._batch(observation), self.spec.outcomes)
        self._rows.is_first[:] = True
        self._needs_reset = False
        return self._rows

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        if self._needs_reset:
            return self.reset()
        if self._is_lost:
            self._is_lost = False
            return self._end_all(self._rows)
        try:
            actions = self.blueprint.actions.batch(np.asarray(action))
            observation, reward, terminated, truncated, info = self._env.step(actions)
        except RLLabError:
            raise
        except Exception as error:  # noqa: BLE001 (see Cell._restart)
            self._restart(error, "step")
            return self._end_all(self._rows)
        self._restarts.step()
        self._rows = EnvRows(
            self._batch(observation),
            np.array(reward, np.float32),
            self._rows.is_last.copy(),
            np.logical_or(terminated, truncated),
            np.array(terminated, bool),
            {name: np.array(info["outcome"][name], np.float32) for name in self.spec.outcomes},
        )
        return self._rows

    def _batch(self, observation: Any) -> dict[str, np.ndarray]:
        is_new = getattr(self._env.unwrapped, "shows_new_arrays", False)
        return self.blueprint.observations.batch(observation, self.num_envs, is_new=is_new)

    def _end_all(self, last: EnvRows) -> EnvRows:
        """Every episode ends, those that had just ended excepted: they begin and end at once."""
        self._rows = empty_rows({key: values.copy() for key, values in last.observation.items()}, self.spec.outcomes)
        self._rows.is_first[:] = last.is_last
        self._rows.is_last[:] = True
        self._needs_reset = True
        return self._rows

    def _restart(self, error: Exception, call: str) -> None:
        self._restarts.add()
        self._events.append(
            f"The vector environment raised {type(error).__name__}: {error} in {call}; "
            f"all {self.num_envs} environments were restarted (restart {self._restarts.total})."
        )
        self._check_restarts(self._restarts.recent)
        self._env = self._make()

    def get_state(self) -> StateTree:
        rows, snapshot = None, None
        if self._rows is not None:
            rows = {"observation": dict(self._rows.observation), "is_last": self._rows.is_last}
            snapshot = capture(self._env)
        progress = {"seeds": to_text(self._seeds), **self._restarts.get_state(), "needs_reset": self._needs_reset}
        return {"kind": self.kind, "num_envs": self.num_envs, **progress, "rows": rows, "snapshot": snapshot}

    def set_state(self, state: StateTree) -> None:
        self._check_state(state)
        self._seeds = from_text(state["seeds"])
        self._restarts.set_state(state)
        self._needs_reset = state["needs_reset"]
        self._rows = None
        if state["rows"] is not None:
            is_exact, _ = restore(self._env, state["snapshot"], episode_seed=None)
            self._rows = saved_rows(**state["rows"])
            if not is_exact:
                self._is_lost = True
                self._events.append(
                    "The vector environment could not be restored exactly: its state could not be saved. New episodes "
                    "were started instead."
                )

    def render(self) -> np.ndarray | None:
        return self._frames.take(self._env)

    def close(self) -> None:
        if why := close(self._env):
            self._events.append(f"The vector environment {why}.")
