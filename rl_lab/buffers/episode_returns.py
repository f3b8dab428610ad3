"""What whole episodes earned, and nothing else of them: for evolution, which learns from that alone.

    env 0   [candidate 0 ....... last][candidate 2 .. last][no candidate ...
    env 1   [candidate 1 . last][candidate 3 ....... last]|                      | all four have ended: a batch

The policy names in each row, under `candidate`, whose episode it is (-1: nobody's), and under `generation` which
population that candidate is of. Rows themselves are not kept.
"""

from __future__ import annotations

import torch

from rl_lab.types import Batch, ConfigError, Progress, StateTree


class EpisodeReturns:
    """Adds up rewards; `sample` gives the returns once every candidate has ended `rollouts` episodes."""

    def __init__(self, *, num_envs: int, population: int = 64, rollouts: int = 16) -> None:
        if population < 1 or rollouts < 1:
            raise ConfigError(
                f"population is {population} and rollouts is {rollouts}: write whole numbers from 1, such as 64 and 16."
            )
        self.num_envs, self.episodes_per_batch = num_envs, population * rollouts
        self._generation = -1
        self.clear()

    def clear(self) -> None:
        self._return = torch.zeros(self.num_envs, dtype=torch.float64)  # of the episodes under way
        self._length = torch.zeros(self.num_envs, dtype=torch.int64)
        self._finished: list[tuple[int, float, int]] = []  # candidate, return, agent steps

    def cut(self) -> None:
        """Episodes under way are another environment's: their candidates' batch begins anew."""
        self.clear()

    def add(self, row: Batch) -> None:
        if "candidate" not in row:
            raise ConfigError(
                "A buffer of returns needs the policy to say whose episodes it plays: it is for phases that evolve a "
                "controller (World Models' update_controller). Choose another buffer for this phase."
            )
        generation = int(row["generation"][0])
        if generation != self._generation:  # what was tried of another one is of no use
            self.clear()
            self._generation = generation
        is_first, is_last = row["is_first"].cpu(), row["is_last"].cpu()
        self._return = self._return.masked_fill(is_first, 0.0) + row["reward"].cpu().double() * ~is_first
        self._length = self._length.masked_fill(is_first, 0) + ~is_first
        if bool(is_last.any()):
            candidate = row["candidate"].tolist()
            for env_index in is_last.nonzero()[:, 0].tolist():
                if candidate[env_index] >= 0:
                    earned = float(self._return[env_index])
                    self._finished.append((candidate[env_index], earned, int(self._length[env_index])))

    def set_pending(self, row: Batch) -> None:
        """Its reward is counted when it is answered."""

    def ready(self) -> bool:
        return len(self._finished) >= self.episodes_per_batch

    def sample(self, progress: Progress | None = None) -> Batch:
        """`candidate`, `episode_return` and `length` of each episode, `[B]`; then nothing is kept."""
        assert self.ready(), "too few finished episodes"
        candidate, earned, length = zip(*self._finished, strict=True)
        self.clear()
        return {
            "candidate": torch.tensor(candidate),
            "episode_return": torch.tensor(earned, dtype=torch.float64),
            "length": torch.tensor(length),
        }

    def learned(self, batch: Batch) -> None:
        """Each episode is used once."""

    def get_state(self) -> StateTree:
        finished = [list(each) for each in self._finished]
        under_way = {"return": self._return.clone(), "length": self._length.clone(), "generation": self._generation}
        return {**under_way, "finished": finished}

    def set_state(self, state: StateTree) -> None:
        self._return, self._length = state["return"].clone(), state["length"].clone()
        self._generation = state["generation"]
        self._finished = [(int(each[0]), float(each[1]), int(each[2])) for each in state["finished"]]
