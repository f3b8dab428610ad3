"""Uniform replay: every start is drawn equally often (`ring_replay` says what a start is)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_lab.buffers.ring_replay import Replay, plain_random_state
from rl_lab.types import Batch, ConfigError, Progress, StateTree

_FEWEST_AHEAD, _MOST_AHEAD = 8, 16  # batches drawn at once: fewer save nothing, more would not stay in a core's cache
_MOST_AHEAD_BYTES = 2**15  # of such a batch: copying a larger one takes longer than the call


@dataclass(kw_only=True, eq=False, repr=False)
class ReplayBuffer(Replay):
    """Starts drawn uniformly, `n_step + 1` rows from each: what `n_step_transitions` makes targets from."""

    n_step: int = 1

    def __post_init__(self) -> None:
        if self.n_step < 1:
            raise ConfigError(f"Replay: n_step is {self.n_step}; write a whole number of at least 1.")
        self.sequence_length = self.n_step + 1
        super().__post_init__()
        self._ahead: list[tuple[Batch, Any]] = []  # drawn, not taken, the next one last; the generator's state after it
        self._state_taken: Any = None  # the generator's after the last batch that was taken
        self._drawn_between: tuple[int, ...] | None = None  # the times between which batches were drawn
        self._last_burst = self._burst = 0  # batches taken between the last two changes of the rows, and since then
        self._most_ahead = 0  # known from the first batch on

    def sample(self, progress: Progress | None = None) -> Batch:
        """T consecutive rows from each of B starts, uniformly over all of them.

        While no rows come, several batches are drawn at once. Those that were not taken then are taken back, with the
        generator's state: the result is the same as drawing one by one.
        """
        self._store_waiting()
        assert self._num_starts > 0, "too few rows to sample"
        between = (self._forgotten, self._answered, self._end)
        if between != self._drawn_between:
            if self._ahead:
                self._random.bit_generator.state, self._ahead = self._state_taken, []
            self._drawn_between, self._last_burst, self._burst = between, self._burst, 0
        if not self._ahead:
            self._draw_ahead(self._batches_expected())
        self._burst += 1
        batch, self._state_taken = self._ahead.pop()
        return batch

    def _batches_expected(self) -> int:
        """Before rows come again: as many as the last time, and beyond that as many again."""
        left = self._last_burst - self._burst
        expected = min(left if left > 0 else self._burst, self._most_ahead)
        return expected if expected >= _FEWEST_AHEAD else 1

    def _draw_ahead(self, count: int) -> None:
        """Read several small batches at once: a call of its own takes longer than copying such a batch."""
        if count == 1:
            rows = self._rows_from(*self._draw_uniform(self.batch_size))
            self._ahead = [(rows, None)]
            if self._most_ahead == 0:
                is_small = sum(value.nbytes for value in rows.values()) <= _MOST_AHEAD_BYTES
                self._most_ahead = _MOST_AHEAD if is_small else 1
            return
        starts, states = [], []
        for _ in range(count):
            starts.append(self._draw_uniform(self.batch_size))
            states.append(self._random.bit_generator.state)
        rows = self._rows_from(*(np.concatenate(each) for each in zip(*starts, strict=True)))
        parts = [value.split(self.batch_size) for value in rows.values()]
        batches = [dict(zip(rows, batch, strict=True)) for batch in zip(*parts, strict=True)]
        self._ahead = list(zip(batches, states, strict=True))[::-1]

    def _rows_from(self, env_index: np.ndarray, time: np.ndarray) -> Batch:
        slot = time % self.slots_per_env if self._begin else time  # until the ring is full, they are the same
        return self._read(env_index, slot, self.sequence_length)

    def get_state(self) -> StateTree:
        state = super().get_state()
        return {**state, "random": plain_random_state(self._state_taken)} if self._ahead else state

    def set_state(self, state: StateTree) -> None:
        super().set_state(state)
        self._ahead = []
