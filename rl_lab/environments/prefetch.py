"""N environments in worker processes whose next episodes begin while the present ones are played.

    process A   episode 0 ─────────────► reset, of episode 2 ──────► episode 2 ─────►
    process B   reset, of episode 1 ──►  episode 1 ─────────────────► reset, of episode 3

Every environment has a process that plays and `depth` spare ones. The seed of each episode is decided in advance
(cell.py), so a spare process resets with the seed of an episode to come; when its turn comes the two change places.
Rows and saved states are those of SyncEnvironment, to the bit, for every environment whose `reset(seed=...)` leaves
nothing of earlier episodes; timing.py finds out. What was prepared is never saved: it is prepared again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_lab.environments.async_environment import AsyncEnvironment, Limits, Worker, WorkerLostError
from rl_lab.environments.recipe import Blueprint, Recipe
from rl_lab.types import EnvRows


@dataclass
class Spare:
    """A process that prepares an episode."""

    worker: Worker
    answers_due: int = 0


class PrefetchEnvironment(AsyncEnvironment):
    """One process per environment, and `depth` more that begin its next episodes."""

    def __init__(
        self, recipe: Recipe, blueprint: Blueprint, *, seeds: list[int], limits: Limits, depth: int = 1
    ) -> None:
        self._depth = depth
        self._spares: list[deque[Spare]] = []
        super().__init__(recipe, blueprint, seeds=seeds, limits=limits, num_workers=len(seeds))
        for worker in self._workers:
            self._spares.append(deque(Spare(self._start(worker.part)) for _ in range(depth)))

    def reset(self) -> EnvRows:
        if self._rows is None:
            rows = super().reset()
            self._prepare_all()
            return rows
        for index in range(self.num_envs):
            self._change_places(index)
        return super().reset()

    def step(self, action: np.ndarray) -> EnvRows:
        assert self._rows is not None, "reset() comes before step()"
        for index in np.flatnonzero(self._rows.is_last).tolist():
            self._change_places(index)
        return super().step(action)

    def set_cells(self, states: Sequence[Any], observation: dict[str, np.ndarray]) -> None:
        super().set_cells(states, observation)
        self._prepare_all()

    def _all_workers(self) -> list[Worker]:
        return [*self._workers, *(spare.worker for lane in self._spares for spare in lane)]

    # --- spare processes ---

    def _prepare_all(self) -> None:
        for index, lane in enumerate(self._spares):
            for spare, seed in zip(lane, self._ask(index, "upcoming", (self._depth,)), strict=True):
                self._prepare(spare, seed)

    def _prepare(self, spare: Spare, seed: int) -> None:
        """Ask for an episode and do not wait for it."""
        self._send(spare.worker, "prepare", (seed,))
        spare.answers_due += 1

    def _change_places(self, index: int) -> None:
        """The process whose episode has ended hands over to the one that has prepared the next."""
        handed = self._ask(index, "hand_over")
        before, spare = self._workers[index], self._spares[index].popleft()
        self._workers[index] = spare.worker
        try:
            for _ in range(spare.answers_due):  # only the newest counts: a loaded state asks anew
                self._receive(spare.worker)
        except WorkerLostError as why:
            self._replace(index, str(why))  # what it had prepared is reset when it begins
        seeds = self._ask(index, "take_over", (handed, self._depth + 1))
        behind = Spare(before)
        self._spares[index].append(behind)
        self._prepare(behind, seeds[-1])
