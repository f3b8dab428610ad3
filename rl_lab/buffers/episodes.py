"""Whole episodes: rows wait until their episode has ended, then come out together, padded.

    env 0   [first . . . last][first . .|        | an update: every row before it is learnt or discarded
    env 1   [first . . . . . . . . last]|

A batch `[B, T, ...]` holds B finished episodes. Shorter ones are padded with is_last rows, so the convention's own
rule, "a transition is valid where ~is_last", masks the padding.

No row outlives an update, so all rows of a batch were acted by the parameters that learn from them. An episode that an
update interrupts is never given: environments better begin new ones (`Collector.restart`).
"""

from __future__ import annotations

from typing import Literal

import torch

from rl_lab.types import Batch, ConfigError, Progress, StateTree


class EpisodeBuffer:
    """Gathers finished episodes; `sample` gives them once there are `episodes_per_batch`, and forgets every row.

    running_episodes, what an update does with episodes that have not ended:
      finish    waits for them: every environment gives the same number of episodes, the first it began. Unbiased.
      discard   takes the first `episodes_per_batch` that end, and drops the rest: fewer steps, but short episodes count
                too often.
    """

    def __init__(
        self,
        *,
        num_envs: int,
        episodes_per_batch: int = 8,
        running_episodes: Literal["finish", "discard"] = "finish",
        capacity_steps: int = 256,
    ) -> None:
        if episodes_per_batch < 1:
            raise ConfigError(
                f"episodes_per_batch is {episodes_per_batch}: write a whole number of at least 1, such as 8."
            )
        if running_episodes not in ("finish", "discard"):
            raise ConfigError(
                f"running_episodes is {running_episodes!r}: write finish (wait for them) or discard (drop them)."
            )
        self.num_envs, self.episodes_per_batch = num_envs, episodes_per_batch
        self.quota = -(-episodes_per_batch // num_envs) if running_episodes == "finish" else None
        self._capacity_steps = max(capacity_steps, 2)
        self._storage: Batch = {}  # [N, capacity_steps, ...]
        self.clear()

    def clear(self) -> None:
        """Forget every row: what comes next is another policy's."""
        self._head = 0
        self._starts = [0] * self.num_envs  # where each environment's running episode begins
        self._counts = [0] * self.num_envs  # how many episodes each environment has given
        self._finished: list[Batch] = []

    def cut(self) -> None:
        """Forget the episodes under way: the environments are others from here on."""
        self._starts = [self._head] * self.num_envs

    def add(self, row: Batch) -> None:
        if self._storage.keys() != row.keys():
            self._allocate(row)
        if self._head == self._capacity_steps:
            self._free_rows()
        for key, value in row.items():
            self._storage[key][:, self._head] = value
        self._head += 1
        if bool(row["is_last"].any()):
            for env_index in row["is_last"].nonzero()[:, 0].tolist():
                start = self._starts[env_index]
                is_whole = bool(self._storage["is_first"][env_index, start])  # not begun before the buffer was emptied
                if is_whole and (self.quota is None or self._counts[env_index] < self.quota):
                    rows = slice(start, self._head)
                    self._finished.append({key: value[env_index, rows].clone() for key, value in self._storage.items()})
                    self._counts[env_index] += 1
                self._starts[env_index] = self._head

    def set_pending(self, row: Batch) -> None:
        """An unanswered row belongs to no finished episode."""

    def ready(self) -> bool:
        if self.quota is None:
            return len(self._finished) >= self.episodes_per_batch
        return min(self._counts) == self.quota

    def sample(self, progress: Progress | None = None) -> Batch:
        """The episodes, after which nothing is kept: the policy is about to change."""
        assert self.ready(), "too few finished episodes"
        episodes = self._finished
        self.clear()
        longest = max(len(episode["reward"]) for episode in episodes)
        return {key: torch.stack([_padded(episode[key], key, longest) for episode in episodes]) for key in episodes[0]}

    def learned(self, batch: Batch) -> None:
        """Each episode is used once."""

    def _allocate(self, row: Batch) -> None:
        """A phase whose policy keeps other extras starts anew: its rows do not mix with older ones."""
        self._set_storage({key: value[:, None][:, :0] for key, value in row.items()})
        self.clear()

    def _set_storage(self, rows: Batch) -> None:
        """These rows `[N, T, ...]`, at the beginning of `capacity_steps` of them."""
        self._storage = {}
        for key, value in rows.items():
            self._storage[key] = value.new_zeros((value.shape[0], self._capacity_steps, *value.shape[2:]))
            self._storage[key][:, : value.shape[1]] = value

    def _free_rows(self) -> None:
        """Forget rows of finished episodes; double the memory when the running ones fill it."""
        oldest = min(self._starts)
        kept = self._head - oldest
        if kept > self._capacity_steps // 2:
            self._capacity_steps *= 2
        self._set_storage({key: value[:, oldest : self._head] for key, value in self._storage.items()})
        self._head = kept
        self._starts = [start - oldest for start in self._starts]

    def get_state(self) -> StateTree:
        oldest = min(self._starts)
        return {
            "rows": {key: value[:, oldest : self._head].clone() for key, value in self._storage.items()},
            "starts": [start - oldest for start in self._starts],
            "counts": list(self._counts),
            "finished": [dict(episode) for episode in self._finished],
        }

    def set_state(self, state: StateTree) -> None:
        self._head = state["rows"]["reward"].shape[1] if state["rows"] else 0
        self._capacity_steps = max(self._capacity_steps, 2 * self._head)
        self._set_storage(state["rows"])
        self._starts = list(state["starts"])
        self._counts = list(state["counts"])
        self._finished = [dict(episode) for episode in state["finished"]]


def _padded(rows: torch.Tensor, key: str, length: int) -> torch.Tensor:
    padding = rows.new_zeros((length - len(rows), *rows.shape[1:]))
    if key in ("is_last", "is_terminal"):
        padding = ~padding
    return torch.cat([rows, padding])
