"""Prioritised replay (Schaul et al. 2016): starts are drawn in proportion to their error when last learnt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.priorities import StartPriorities, split
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.storage.rows import as_array
from rl_lab.types import Batch, ConfigError, Progress, ScheduledNumber, StateTree


@dataclass(kw_only=True, eq=False, repr=False)
class PrioritizedReplayBuffer(ReplayBuffer):
    """Adds `batch["index"]` and `batch["weight"]` `[B]`; learning notes each start's error as `batch["priority"]`.

    Weights undo the preference for large errors as far as `beta` says (1: wholly) and are at most 1 in a batch. `beta`
    may be a schedule: the paper lets it grow to 1, since the bias matters most where learning converges.
    """

    alpha: float = 0.6
    beta: float | ScheduledNumber = 0.4
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = (self.beta,) if isinstance(self.beta, float | int) else (self.beta.start, self.beta.end)
        for beta in ends:
            if beta is not None and not 0.0 <= beta <= 1.0:
                raise ConfigError(
                    f"Replay: beta is {beta}; allowed is 0 (no correction) to 1 (whole). Write beta: 0.4, or "
                    "beta: linear(0.4, 1.0) to let it grow over the phase."
                )
        self._strata = np.arange(self.batch_size, dtype=np.float64)
        self._drawn: tuple[Any, ...] = (None, None, None)  # the last batch: index, leaves, and what the rows were
        self._priorities: StartPriorities = StartPriorities(
            num_envs=self.num_envs, slots_per_env=self.slots_per_env, alpha=self.alpha, epsilon=self.epsilon
        )

    def sample(self, progress: Progress | None = None) -> Batch:
        """B starts, one from each B-th of the whole priority, and T consecutive rows from each."""
        self._store_waiting()
        assert self._num_starts > 0, "too few rows to sample"
        fraction = self._random.random(self.batch_size)
        fraction += self._strata
        fraction /= self.batch_size
        leaf = self._priorities.tree.find(fraction)
        env_index, slot = split(leaf, self.slots_per_env)
        batch = self._read(env_index, slot, self.sequence_length)
        mass = self._priorities.tree.leaves.take(leaf)
        batch["index"] = self._index_of(env_index, self._time_at(slot))
        weight = (np.minimum.reduce(mass) / mass).astype(np.float32)
        weight **= np.float32(self.beta if isinstance(self.beta, float | int) else self.beta(progress or Progress()))
        batch["weight"] = torch.from_numpy(weight)
        self._drawn = (batch["index"], leaf, (self._registered, self._forgotten))
        return batch

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        self._store_waiting()
        drawn, leaf, rows = self._drawn
        if drawn is not index or rows != (self._registered, self._forgotten):  # not the last batch, or rows went since
            super().update_priorities(index, priority)
        else:
            self._priorities.update(leaf, None, as_array(priority.detach().float()))

    def set_state(self, state: StateTree) -> None:
        super().set_state(state)
        self._drawn = (None, None, None)
