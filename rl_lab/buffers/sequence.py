"""Sequence replay: what has just been seen is learnt from once for sure, then a mixture of old and new.

    batch of B     [fresh fresh | uniform ... | priority ... | recency ... ]
                    the online    each further sequence is drawn by one of three rules,
                    queue         as often as its fraction says

The online queue holds every sequence of T rows once, in the order in which they were lived; sequences in it do not
overlap. Training that keeps pace with collection then sees each row soon, whatever the mixture.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import Tensor

from rl_lab.buffers.prioritized import StartPriorities
from rl_lab.buffers.replay import ReplayBuffer, to_batch
from rl_lab.buffers.rows import as_array
from rl_lab.types import Batch, ConfigError, EnvSpec, StateTree, did_you_mean


class SequenceReplay(ReplayBuffer):
    """Batches `[B, T, ...]` with `batch["index"]` `[B]`, by which priorities and latents come back.

    recency_power   a drawn sequence's age is the fraction u ** recency_power of the whole replay, u uniform in 0 to 1:
                    with 4, half of the draws are among the newest sixteenth
    """

    starts_at_ends = True  # a sequence may begin anywhere: its model is reset where is_first says so

    def __init__(
        self,
        *,
        num_envs: int,
        capacity_rows: int = 1_000_000,
        batch_size: int = 16,
        sequence_length: int = 64,
        minimum_rows: int = 1,
        uniform: float = 1.0,
        priority: float = 0.0,
        recency: float = 0.0,
        recency_power: float = 4.0,
        online_queue: bool = True,
        alpha: float = 0.8,
        epsilon: float = 1e-6,
        seed: int = 0,
    ) -> None:
        super().__init__(
            num_envs=num_envs,
            capacity_rows=capacity_rows,
            batch_size=batch_size,
            sequence_length=sequence_length,
            minimum_rows=minimum_rows,
            seed=seed,
        )
        fractions = (uniform, priority, recency)
        if min(fractions) < 0 or abs(sum(fractions) - 1.0) > 1e-6:
            raise ConfigError(
                f"Replay: uniform, priority and recency are {uniform}, {priority} and {recency}; they are fractions "
                "that add up to 1. Write for example uniform: 0.5, priority: 0.0, recency: 0.5."
            )
        if recency_power < 1.0:
            raise ConfigError(f"Replay: recency_power is {recency_power}; write 1 (uniform) or more, such as 4.")
        self.fractions = [fraction / sum(fractions) for fraction in fractions]
        self.recency_power = recency_power
        self.online_queue = online_queue
        self._fresh: deque[int] = deque()  # indices of sequences that no batch has held yet, oldest first
        self._priorities = (
            StartPriorities(num_envs=num_envs, slots_per_env=self.slots_per_env, alpha=alpha, epsilon=epsilon)
            if priority > 0
            else None
        )

    def _row_stored(self, time: int) -> None:
        start = time - self.sequence_length + 1
        if self.online_queue and start >= 0 and start % self.sequence_length == 0:
            self._fresh.extend(range(start * self.num_envs, (start + 1) * self.num_envs))
            self._forget_overwritten()
        if self._priorities is not None:
            self._priorities.row_stored(time, sequence_length=self.sequence_length)

    def sample(self) -> Batch:
        """Fresh sequences first, then the mixture."""
        assert self._num_starts > 0, "too few rows to sample"
        fresh = self._take_fresh()
        further = self.batch_size - len(fresh)
        uniform, priority, recency = self._random.multinomial(further, self.fractions).tolist()
        draws = [
            (fresh % self.num_envs, fresh // self.num_envs),
            self._draw_uniform(uniform),
            self._draw_by_priority(priority),
            self._draw_recent(recency),
        ]
        env_index = np.concatenate([each for each, _ in draws])
        time = np.concatenate([each for _, each in draws])
        batch = to_batch(self._read(env_index, time))
        batch["index"] = self._index_of(env_index, time)
        return batch

    def _take_fresh(self) -> np.ndarray:
        self._forget_overwritten()
        count = min(len(self._fresh), self.batch_size)
        return np.array([self._fresh.popleft() for _ in range(count)], np.int64)

    def _forget_overwritten(self) -> None:
        while self._fresh and self._fresh[0] // self.num_envs < self._begin:
            self._fresh.popleft()

    def _draw_by_priority(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        if self._priorities is None or not count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        env_index, slot = self._priorities.draw(self._random.random(count))
        return env_index, self._time_at(slot)

    def _draw_recent(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        age = (self._random.random(count) ** self.recency_power * self._num_starts).astype(np.int64)
        time = self._begin + self._num_starts - 1 - age
        return self._random.integers(0, self.num_envs, count), time

    # --- what learning gives back --------------------------------------------------------------

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of a batch's sequences; those that have been overwritten since are passed over."""
        if self._priorities is not None:
            self._priorities.update(*self._places_of(index), as_array(priority.detach().float()))

    def write_back(self, index: Tensor, key: str, values: Tensor) -> None:
        """Replace what the rows of a batch hold under `key` by `values [B, T, ...]`, a fresher latent for instance."""
        if key not in self._ring.columns:
            raise ConfigError(
                f"Replay: '{key}' cannot be written back, no row has it.{did_you_mean(key, self._ring.columns)} "
                f"Let the policy keep it as an extra; rows have {', '.join(self._ring.columns)}."
            )
        env_index, slot, is_there = self._places_of(index)
        slots = (slot[is_there, None] + np.arange(values.shape[1])) % self.slots_per_env
        self._ring.view(key)[env_index[is_there, None], slots] = as_array(values.detach())[is_there]

    # --- memory and state ----------------------------------------------------------------------

    def memory_bytes(self, spec: EnvSpec, *, extra_bytes_per_row: int = 0) -> int:
        rows = super().memory_bytes(spec, extra_bytes_per_row=extra_bytes_per_row)
        return rows + (self._priorities.tree.allocated_bytes if self._priorities is not None else 0)

    def get_state(self) -> StateTree:
        priorities = None if self._priorities is None else self._priorities.get_state()
        return {**super().get_state(), "fresh": list(self._fresh), "priorities": priorities}

    def set_state(self, state: StateTree) -> None:
        super().set_state(state)
        self._fresh = deque(state["fresh"])
        if self._priorities is not None:
            self._priorities.set_state(state["priorities"])
