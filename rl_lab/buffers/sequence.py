"""Sequence replay: every new sequence is learnt from once, then a mixture of old and new.

    batch of B     [fresh fresh | uniform ... | priority ... | recency ... ]
                    the online    each further sequence is drawn by one of three rules,
                    queue         as often as its fraction says

The online queue holds every sequence of T rows once, in the order of collection; sequences in it do not overlap.
Training that keeps pace with collection then sees each row soon, whatever the mixture.

    time        7   8   9 | 10  11  12  13      | a cut: the environments are others from here on
    starts      7              10               T = 3, numbered 0, 1: none leads over the cut
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from rl_lab.buffers.priorities import StartPriorities, split
from rl_lab.buffers.ring_replay import Replay
from rl_lab.types import Batch, ConfigError, Progress, StateTree, did_you_mean


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceReplay(Replay):
    """Batches `[B, T, ...]` with `batch["index"]` `[B]`, by which priorities and latents come back.

    write_back      extras of the rows, such as latents, that learning computes anew: what a hook notes in the batch
                    under such a name, `[B, T, ...]`, takes the place of what the rows held
    recency_power   a drawn sequence's age is the fraction u ** recency_power of the whole replay, u uniform in 0 to 1:
                    with 4, half of the draws are among the newest sixteenth
    """

    batch_size: int = 16
    sequence_length: int = 64
    uniform: float = 1.0
    priority: float = 0.0
    recency: float = 0.0
    recency_power: float = 4.0
    online_queue: bool = True
    write_back: Sequence[str] = ()
    alpha: float = 0.8
    epsilon: float = 1e-6

    starts_at_ends: ClassVar[bool] = True  # a sequence may begin anywhere: its model is reset where is_first says so

    def __post_init__(self) -> None:
        super().__post_init__()
        fractions = (self.uniform, self.priority, self.recency)
        if min(fractions) < 0 or abs(sum(fractions) - 1.0) > 1e-6:
            raise ConfigError(
                "Replay: uniform, priority and recency are {}, {} and {}; they are fractions that add up to 1. "
                "Write for example uniform: 0.5, priority: 0.0, recency: 0.5.".format(*fractions)
            )
        if self.recency_power < 1.0:
            raise ConfigError(f"Replay: recency_power is {self.recency_power}; write 1 (uniform) or more, such as 4.")
        self.fractions = [fraction / sum(fractions) for fraction in fractions]
        self._cuts: list[int] = []  # times from which on the environments are others, oldest first
        self._fresh: deque[int] = deque()  # indices of sequences that no batch has held yet, oldest first
        if self.priority > 0:
            self._priorities = StartPriorities(
                num_envs=self.num_envs, slots_per_env=self.slots_per_env, alpha=self.alpha, epsilon=self.epsilon
            )

    def _rows_stored(self, begin: int, end: int) -> None:
        super()._rows_stored(begin, end)
        completed = self._completed_by(begin, end)
        over_a_cut = [start for start in completed if self._leads_over_a_cut(start)] if self._cuts else []
        if over_a_cut and self._priorities is not None:
            self._priorities.close(over_a_cut)
        if self.online_queue:
            for start in completed:
                if start % self.sequence_length == 0 and start not in over_a_cut:
                    self._fresh.extend(range(start * self.num_envs, (start + 1) * self.num_envs))
            self._forget_overwritten()

    # --- where the environments change -----------------------------------------------------------

    def cut(self) -> None:
        """Episodes under way end, and no sequence leads from the rows so far into those to come."""
        super().cut()
        self._cuts = [cut for cut in self._cuts if cut > self._begin] + [self._answered]

    def _leads_over_a_cut(self, start: int) -> bool:
        return any(start < cut < start + self.sequence_length for cut in self._cuts)

    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        """The first start of each stretch between two cuts, and how many starts it has."""
        edges = [self._begin, *(cut for cut in self._cuts if self._begin < cut < self._end), self._end]
        counts = np.diff(edges) - self.sequence_length + 1
        return np.array(edges[:-1])[counts > 0], counts[counts > 0]

    @property
    def _num_starts(self) -> int:
        return int(self._stretches()[1].sum()) if self._cuts else super()._num_starts

    def _time_of(self, number: np.ndarray) -> np.ndarray:
        """The times of starts, which are numbered from the oldest on."""
        if not self._cuts:
            return number + self._begin
        firsts, counts = self._stretches()
        ends = counts.cumsum()
        stretch = ends.searchsorted(number, side="right")
        return firsts[stretch] + number - (ends - counts)[stretch]

    # --- batches out -----------------------------------------------------------------------------

    def sample(self, progress: Progress | None = None) -> Batch:
        """Fresh sequences first, then the mixture."""
        self._store_waiting()
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
        batch = self._read(env_index, time % self.slots_per_env, self.sequence_length)
        batch["index"] = self._index_of(env_index, time)
        return batch

    def _take_fresh(self) -> np.ndarray:
        self._forget_overwritten()
        count = min(len(self._fresh), self.batch_size)
        return np.array([self._fresh.popleft() for _ in range(count)], np.int64)

    def _forget_overwritten(self) -> None:
        while self._fresh and self._fresh[0] // self.num_envs < self._begin:
            self._fresh.popleft()

    def _draw_uniform(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        env_index, number = self._draw_any(count)
        return env_index, self._time_of(number)

    def _draw_by_priority(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        if self._priorities is None or not count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        env_index, slot = split(self._priorities.tree.find(self._random.random(count)), self.slots_per_env)
        return env_index, self._time_at(slot)

    def _draw_recent(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        age = (self._random.random(count) ** self.recency_power * self._num_starts).astype(np.int64)
        time = self._time_of(self._num_starts - 1 - age)
        return self._random.integers(0, self.num_envs, count), time

    # --- what learning gives back --------------------------------------------------------------

    def learned(self, batch: Batch) -> None:
        """Take over the priorities and the latents that learning noted in the batch."""
        super().learned(batch)
        for key in self.write_back:
            self._check_key(key)
            self.write(batch["index"], key, batch[key])

    def clear(self) -> None:
        super().clear()
        self._fresh.clear()
        self._cuts.clear()

    def write(self, index: torch.Tensor, key: str, values: torch.Tensor) -> None:
        """Replace what the rows of a batch hold under `key` by `values [B, T, ...]`, a fresher latent for instance."""
        self._store_waiting()
        self._check_key(key)
        env_index, slot, is_there = self._places_of(index)
        slots = (slot[is_there, None] + np.arange(values.shape[1])) % self.slots_per_env
        environments = np.broadcast_to(env_index[is_there, None], slots.shape)
        bits = values.detach()
        if not is_there.all():
            bits = bits[torch.from_numpy(is_there.nonzero()[0]).to(bits.device)]
        if key in self._bfloat16_keys:
            bits = bits.bfloat16().view(torch.int16)
        self._ring.set_values(key, environments, slots, bits)
        if self._archive is not None:
            self._archive.written(key, environments, slots)

    def _check_key(self, key: str) -> None:
        if key not in self._ring.layout:
            raise ConfigError(
                f"Replay: '{key}' cannot be written back, no row has it.{did_you_mean(key, self._ring.layout)} "
                f"Let the policy keep it as an extra; rows have {', '.join(self._ring.layout)}."
            )

    def get_state(self) -> StateTree:
        self._store_waiting()
        return {**super().get_state(), "fresh": list(self._fresh), "cuts": list(self._cuts)}

    def set_state(self, state: StateTree) -> None:
        super().set_state(state)
        self._fresh, self._cuts = deque(state["fresh"]), list(state.get("cuts", ()))  # earlier versions have no cuts
