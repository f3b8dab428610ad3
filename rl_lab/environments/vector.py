"""N environments in this process: one by one (Sync), or as Gymnasium's own vector environment (Native)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rl_lab.environments.cell import MAX_EPISODE_SEED, Cells, Restarts, drained, too_many_restarts
from rl_lab.environments.plain import from_text, to_text
from rl_lab.environments.recipe import Blueprint, Recipe
from rl_lab.environments.rendering import FrameTaker
from rl_lab.environments.snapshot import capture, restore
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import EnvRows, EnvSpec, RLLabError, RunError, StateTree


def empty_rows(observation: dict[str, np.ndarray], num_envs: int) -> EnvRows:
    """Rows with these observations; rewards and flags are zero."""
    return EnvRows(observation, np.zeros(num_envs, np.float32), *(np.zeros(num_envs, bool) for _ in range(3)))


def allocate_rows(converter: ObservationConverter, num_envs: int) -> EnvRows:
    """Rows to be filled: observations uninitialised, rewards and flags zero."""
    return empty_rows(converter.allocate(num_envs), num_envs)


class VectorBase:
    """What the ways of running N environments share: their spec, the rows they returned last, restart limits."""

    kind = "cells"  # in saved states: sync and async environments can continue each other's

    def __init__(self, blueprint: Blueprint, *, num_envs: int, max_restarts: int) -> None:
        self.num_envs = num_envs
        self.spec: EnvSpec = blueprint.spec
        self.blueprint = blueprint
        self._max_restarts = max_restarts
        self._rows: EnvRows | None = None

    def _check_restarts(self, recent: int, events: list[str]) -> None:
        if recent > self._max_restarts:
            raise too_many_restarts(self._max_restarts, events[-1] if events else "")

    def _state(self, **content: Any) -> StateTree:
        return {"kind": self.kind, "num_envs": self.num_envs, **content}

    def _state_of_cells(self, cells: list[Any]) -> StateTree:
        observation = {} if self._rows is None else {k: v.copy() for k, v in self._rows.observation.items()}
        return self._state(cells=cells, observation=observation)

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
    """Cells stepped one after the other: the fastest way for environments that cost microseconds."""

    def __init__(
        self, recipe: Recipe, blueprint: Blueprint, *, num_envs: int, seeds: list[int], max_restarts: int
    ) -> None:
        super().__init__(blueprint, num_envs=num_envs, max_restarts=max_restarts)
        self._cells = Cells(recipe, blueprint, seeds=seeds, max_restarts=max_restarts)

    def reset(self) -> EnvRows:
        rows = allocate_rows(self.blueprint.observations, self.num_envs)
        self._cells.reset(rows)
        return self._checked(rows)

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        rows = allocate_rows(self.blueprint.observations, self.num_envs)
        for i in self._cells.step(np.asarray(action), rows):
            for key, values in self._rows.observation.items():
                rows.observation[key][i] = values[i]
        return self._checked(rows)

    def _checked(self, rows: EnvRows | None) -> EnvRows:
        self._rows = rows
        if self._cells.events:
            self._check_restarts(sum(recent for _, recent in self._cells.restarts()), self._cells.events)
        return rows  # type: ignore[return-value]

    def get_state(self) -> StateTree:
        return self._state_of_cells(self._cells.get_state())

    def set_state(self, state: StateTree) -> None:
        self._check_state(state)
        observation = {key: np.asarray(value).copy() for key, value in state["observation"].items()}
        self._cells.set_state(state["cells"], observation)
        self._checked(empty_rows(observation, self.num_envs) if observation else None)

    def render(self) -> np.ndarray | None:
        return self._cells.render()

    def drain_events(self) -> list[str]:
        return self._cells.drain_events()

    def close(self) -> None:
        self._cells.close()


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
        self._events: list[str] = []
        self._frames = FrameTaker(self._events)
        self._needs_reset = True

    def reset(self) -> EnvRows:
        while True:
            try:
                observation, _ = self._env.reset(seed=int(self._seeds.integers(MAX_EPISODE_SEED)))
                break
            except Exception as error:  # noqa: BLE001 (see Cell._restart)
                self._restart(error, "reset")
        self._rows = empty_rows(self.blueprint.observations.batch(observation, self.num_envs), self.num_envs)
        self._rows.is_first[:] = True
        self._needs_reset = False
        return self._rows

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        if self._needs_reset:
            return self.reset()
        try:
            actions = self.blueprint.actions.batch(np.asarray(action))
            observation, reward, terminated, truncated, _ = self._env.step(actions)
        except RLLabError:
            raise
        except Exception as error:  # noqa: BLE001 (see Cell._restart)
            self._restart(error, "step")
            return self._end_all(self._rows)
        self._restarts.step()
        self._rows = EnvRows(
            self.blueprint.observations.batch(observation, self.num_envs),
            np.array(reward, np.float32),
            self._rows.is_last.copy(),
            np.logical_or(terminated, truncated),
            np.array(terminated, bool),
        )
        return self._rows

    def _end_all(self, last: EnvRows) -> EnvRows:
        """Every episode ends, those that had just ended excepted: they begin and end at once."""
        self._rows = empty_rows({key: values.copy() for key, values in last.observation.items()}, self.num_envs)
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
        self._check_restarts(self._restarts.recent, self._events)
        self._env = self._make()

    def get_state(self) -> StateTree:
        rows, snapshot = None, None
        if self._rows is not None:
            rows = {"observation": dict(self._rows.observation), "is_last": self._rows.is_last}
            snapshot = capture(self._env)
        progress = {"seeds": to_text(self._seeds), **self._restarts.get_state(), "needs_reset": self._needs_reset}
        return self._state(**progress, rows=rows, snapshot=snapshot)

    def set_state(self, state: StateTree) -> None:
        self._check_state(state)
        self._seeds = from_text(state["seeds"])
        self._restarts.set_state(state)
        self._needs_reset = state["needs_reset"]
        self._rows = None
        if state["rows"] is None:
            return
        restore(self._env, state["snapshot"], episode_seed=None)
        observation = {key: np.asarray(value).copy() for key, value in state["rows"]["observation"].items()}
        self._rows = empty_rows(observation, self.num_envs)
        self._rows.is_last[:] = np.asarray(state["rows"]["is_last"])

    def render(self) -> np.ndarray | None:
        return self._frames.take(self._env)

    def drain_events(self) -> list[str]:
        return drained(self._events)

    def close(self) -> None:
        self._env.close()
