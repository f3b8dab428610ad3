"""What every environment offers the collector, however it is run: N copies, moved together, row by row."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from rl_lab.environments.recipe import Blueprint
from rl_lab.types import EnvRows, EnvSpec, StateTree


class Environment(Protocol):
    """N environments that return rows (docs/time_steps.md).

    After an `is_last` row the next row of that environment is `is_first`: its action is ignored and its reward
    is 0. Arrays of one EnvRows are never written to again, so a caller may keep them.
    """

    num_envs: int
    spec: EnvSpec
    blueprint: Blueprint  # how to convert single observations and actions, for policies used outside training

    def reset(self) -> EnvRows:
        """Begin a new episode everywhere."""

    def step(self, action: np.ndarray) -> EnvRows:
        """Answer the last rows with one action per environment, leading axis N."""

    def get_state(self) -> StateTree:
        """Everything needed to continue bit for bit, in mid-episode, in another process."""

    def set_state(self, state: StateTree) -> None:
        """Continue from what `get_state` returned; the next call may be `step`."""

    def render(self) -> np.ndarray | None:
        """Environment 0 as RGB uint8 [H, W, 3], or None where it cannot be drawn."""

    def drain_events(self) -> list[str]:
        """Sentences about restarts and other surprises since the last call."""

    def close(self) -> None:
        """Release processes, windows and memory."""


@runtime_checkable
class TaskEnvironment(Protocol):
    """An environment of several tasks, of which one is to be seen."""

    def show_task(self, task: int) -> None:
        """Play this task, by its number, from the next reset on."""
