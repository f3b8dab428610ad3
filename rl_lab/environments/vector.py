"""N environments in this process: one by one (Sync), or as Gymnasium's own vector environment (Native)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rl_lab.environments.cell import MAX_EPISODE_SEED, Cell, Restarts
from rl_lab.environments.plain import from_text, to_text
from rl_lab.environments.recipe import Blueprint, Recipe
from rl_lab.environments.rendering import FrameTaker
from rl_lab.environments.snapshot import capture, restore
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import EnvironmentFault, EnvRows, EnvSpec, RLLabError, RunError, StateTree


def allocate_rows(converter: ObservationConverter, num_envs: int) -> EnvRows:
    """Rows to be filled: observations uninitialised, rewards and flags zero."""
    return EnvRows(
        observation=converter.allocate(num_envs),
        reward=np.zeros(num_envs, np.float32),
        is_first=np.zeros(num_envs, bool),
        is_last=np.zeros(num_envs, bool),
        is_terminal=np.zeros(num_envs, bool),
    )


def check_state_kind(state: Any, kind: str, num_envs: int) -> None:
    """A saved state fits the same way of running and the same number of environments."""
    if state["kind"] != kind:
        wanted = "native" if state["kind"] == "native" else "sync"
        raise RunError(
            f"the checkpoint's environments were {state['kind']}, these are {kind}: "
            f"resume with environment.vectorization={wanted}."
        )
    if state["num_envs"] != num_envs:
        raise RunError(
            f"the checkpoint holds {state['num_envs']} environments, this run has {num_envs}: "
            f"resume with environment.num_envs={state['num_envs']}."
        )


def too_many_restarts(max_restarts: int, last_event: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"the environments failed more than max_restarts={max_restarts} times altogether. {last_event} "
        "`rl-lab envs check ID` examines an environment; environment.max_restarts sets the limit."
    )


class SyncEnvironment:
    """Cells stepped one after the other: the fastest way for environments that cost microseconds."""

    def __init__(
        self, recipe: Recipe, blueprint: Blueprint, *, num_envs: int, seeds: list[int], max_restarts: int
    ) -> None:
        self.num_envs = num_envs
        self.spec: EnvSpec = blueprint.spec
        self.blueprint = blueprint
        self._converter, self._actions = blueprint.observations, blueprint.actions
        self._max_restarts = max_restarts
        self._frames = FrameTaker()
        self._events: list[str] = []
        self._rows: EnvRows | None = None
        self._cells = [
            Cell(recipe.build, self._converter, index=i, seed=seeds[i], max_restarts=max_restarts)
            for i in range(num_envs)
        ]

    def reset(self) -> EnvRows:
        rows = allocate_rows(self._converter, self.num_envs)
        for i, cell in enumerate(self._cells):
            cell.begin(rows, i)
            if cell.events:
                self._note(cell)
        self._rows = rows
        return rows

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        rows = allocate_rows(self._converter, self.num_envs)
        for i, (cell, one) in enumerate(zip(self._cells, self._actions.rows(np.asarray(action)), strict=True)):
            if not cell.step(one, rows, i):
                for key, values in self._rows.observation.items():
                    rows.observation[key][i] = values[i]
            if cell.events:
                self._note(cell)
        self._rows = rows
        return rows

    def _note(self, cell: Cell) -> None:
        self._events += cell.events
        cell.events.clear()
        if sum(cell.restarts.recent for cell in self._cells) > self._max_restarts:
            raise too_many_restarts(self._max_restarts, self._events[-1])

    def get_state(self) -> StateTree:
        observation = {} if self._rows is None else {k: v.copy() for k, v in self._rows.observation.items()}
        cells = [cell.get_state() for cell in self._cells]
        return {"kind": "cells", "num_envs": self.num_envs, "cells": cells, "observation": observation}

    def set_state(self, state: StateTree) -> None:
        check_state_kind(state, "cells", self.num_envs)
        observation = {key: np.asarray(value).copy() for key, value in state["observation"].items()}
        self._rows = None
        if observation:
            rows = allocate_rows(self._converter, self.num_envs)
            rows.observation.update(observation)
            self._rows = rows
        for cell, cell_state in zip(self._cells, state["cells"], strict=True):
            cell.set_state(cell_state, observation)
            if cell.events:
                self._note(cell)

    def render(self) -> np.ndarray | None:
        return self._frames.take(self._cells[0].env)

    def drain_events(self) -> list[str]:
        events = self._events + self._frames.events
        self._events, self._frames.events = [], []
        return events

    def close(self) -> None:
        for cell in self._cells:
            cell.close()


class NativeEnvironment:
    """A Gymnasium vector environment that moves N environments with array operations."""

    def __init__(
        self,
        make: Callable[[], VectorEnv],
        blueprint: Blueprint,
        *,
        num_envs: int,
        seed: int,
        max_restarts: int,
    ) -> None:
        self.num_envs = num_envs
        self.spec: EnvSpec = blueprint.spec
        self.blueprint = blueprint
        self._converter, self._actions = blueprint.observations, blueprint.actions
        self._make, self._max_restarts, self._restarts = make, max_restarts, Restarts()
        self._seeds = np.random.default_rng(seed)
        self._frames = FrameTaker()
        self._events: list[str] = []
        self._rows: EnvRows | None = None
        self._needs_reset = True
        self._env = make()

    def reset(self) -> EnvRows:
        while True:
            try:
                observation, _ = self._env.reset(seed=int(self._seeds.integers(MAX_EPISODE_SEED)))
                break
            except Exception as error:  # noqa: BLE001 (see Cell._restart)
                self._restart(error, "reset")
        everywhere, nowhere = np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool)
        self._rows = EnvRows(
            self._converter.batch(observation, self.num_envs),
            np.zeros(self.num_envs, np.float32),
            everywhere,
            nowhere,
            nowhere.copy(),
        )
        self._needs_reset = False
        return self._rows

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        if self._needs_reset:
            return self.reset()
        try:
            observation, reward, terminated, truncated, _ = self._env.step(self._actions.batch(np.asarray(action)))
        except RLLabError:
            raise
        except Exception as error:  # noqa: BLE001 (see Cell._restart)
            self._restart(error, "step")
            return self._end_all(self._rows)
        self._restarts.step()
        self._rows = EnvRows(
            self._converter.batch(observation, self.num_envs),
            np.array(reward, np.float32),
            self._rows.is_last.copy(),
            np.logical_or(terminated, truncated),
            np.array(terminated, bool),
        )
        return self._rows

    def _end_all(self, last: EnvRows) -> EnvRows:
        """Every episode ends, those that had just ended excepted: they begin and end at once."""
        self._rows = EnvRows(
            {key: values.copy() for key, values in last.observation.items()},
            np.zeros(self.num_envs, np.float32),
            last.is_last.copy(),
            np.ones(self.num_envs, bool),
            np.zeros(self.num_envs, bool),
        )
        self._needs_reset = True
        return self._rows

    def _restart(self, error: Exception, call: str) -> None:
        self._restarts.add()
        self._events.append(
            f"The vector environment raised {type(error).__name__}: {error} in {call}; "
            f"all {self.num_envs} environments were restarted (restart {self._restarts.total})."
        )
        if self._restarts.recent > self._max_restarts:
            raise too_many_restarts(self._max_restarts, self._events[-1]) from error
        self._env = self._make()

    def get_state(self) -> StateTree:
        state: dict[str, Any] = {"kind": "native", "num_envs": self.num_envs, "seeds": to_text(self._seeds)}
        state |= {**self._restarts.get_state(), "needs_reset": self._needs_reset, "rows": None, "snapshot": None}
        if self._rows is not None:
            state["rows"] = {"observation": dict(self._rows.observation), "is_last": self._rows.is_last}
            state["snapshot"] = capture(self._env)
        return state

    def set_state(self, state: StateTree) -> None:
        check_state_kind(state, "native", self.num_envs)
        self._seeds = from_text(state["seeds"])
        self._restarts.set_state(state)
        self._needs_reset = state["needs_reset"]
        self._rows = None
        if state["rows"] is None:
            return
        restore(self._env, state["snapshot"], episode_seed=None)
        nowhere = np.zeros(self.num_envs, bool)
        self._rows = EnvRows(
            {key: np.asarray(value).copy() for key, value in state["rows"]["observation"].items()},
            np.zeros(self.num_envs, np.float32),
            nowhere,
            np.asarray(state["rows"]["is_last"]).copy(),
            nowhere,
        )

    def render(self) -> np.ndarray | None:
        return self._frames.take(self._env)

    def drain_events(self) -> list[str]:
        events = self._events + self._frames.events
        self._events, self._frames.events = [], []
        return events

    def close(self) -> None:
        self._env.close()
