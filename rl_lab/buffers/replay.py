"""Uniform replay: the newest rows of every environment, drawn again and again.

    time       ... 17    18    19    20    21             rows an environment has given since the run began
    slot            1     2     3     0     1     = time % C; C slots for each environment
                   gone  begin             pending        the row nobody has answered yet is learnt from as well:
                                                          the newest transition ends in it
    starts               18    19                         T = 3: a sequence never crosses the write head

A batch `[B, T, ...]` holds T consecutive rows from each of B starts. One-step learners take T = 2, n-step learners
T = n + 1. A start is never an is_last row: nothing was decided there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.rows import Arrays, RowRing, as_array, row_bytes
from rl_lab.types import Batch, ConfigError, EnvSpec, StateTree

_STARTS_LOOKED_AT = 16  # by ready(): as many consecutive ends are no environment's rows


class ReplayBuffer:
    """A ring of `capacity_rows // num_envs` slots per environment, allocated at the first row and never again."""

    starts_at_ends = False  # whether an is_last row may begin a batch's sequence

    def __init__(
        self,
        *,
        num_envs: int,
        capacity_rows: int = 1_000_000,
        batch_size: int = 256,
        sequence_length: int = 2,
        minimum_rows: int = 1,
        seed: int = 0,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("sequence_length", sequence_length, 2)):
            if value < least:
                raise ConfigError(f"Replay: {name} is {value}; write a whole number of at least {least}.")
        slots = capacity_rows // num_envs
        if slots < sequence_length:
            raise ConfigError(
                f"Replay: capacity_rows is {capacity_rows}, which leaves {slots} rows to each of {num_envs} "
                f"environments, but a sequence needs {sequence_length}. Write capacity_rows of at least "
                f"{num_envs * sequence_length}."
            )
        if minimum_rows > slots * num_envs:
            raise ConfigError(
                f"Replay: minimum_rows is {minimum_rows}, more than the {slots * num_envs} rows that capacity_rows "
                f"({capacity_rows}) holds, so that nothing would ever be learnt. Write a smaller minimum_rows."
            )
        self.num_envs, self.slots_per_env = num_envs, slots
        self.batch_size, self.sequence_length, self.minimum_rows = batch_size, sequence_length, minimum_rows
        self._ring = RowRing(num_envs=num_envs, slots_per_env=slots)
        self._random = np.random.default_rng(seed)
        self._answered = 0  # the time of the next row to be answered
        self._pending_keys: tuple[str, ...] = ()  # what the pending row told; empty when there is none
        self._pending_reward: Tensor | None = None

    # --- rows in -------------------------------------------------------------------------------

    def add(self, row: Batch) -> None:
        if self._pending_keys and not self._is_pending(row):
            row = self._break_off(row)
        is_new = not self._pending_keys
        self._ring.write(self._answered % self.slots_per_env, row)
        self._answered += 1
        self._pending_keys, self._pending_reward = (), None
        if is_new:
            self._row_stored(self._answered - 1)

    def set_pending(self, row: Batch) -> None:
        if not self._ring.columns:
            return  # the first row brings every key when it is answered
        is_new = not self._pending_keys
        self._ring.write(self._answered % self.slots_per_env, row)
        self._pending_keys, self._pending_reward = tuple(row), row["reward"]
        if is_new:
            self._row_stored(self._answered)

    def _is_pending(self, row: Batch) -> bool:
        """Whether this row is the pending one, now answered. The Collector's is, down to its memory."""
        if self._pending_reward is not None and row["reward"].data_ptr() == self._pending_reward.data_ptr():
            return True
        slot = self._answered % self.slots_per_env
        stored = {key: self._ring.view(key)[:, slot] for key in self._pending_keys}
        return all(np.array_equal(value, as_array(row[key])) for key, value in stored.items())

    def _break_off(self, row: Batch) -> Batch:
        """Rows in between went to another buffer: here the episodes end as at a time limit, and new ones begin."""
        self._ring.view("is_last")[:, self._answered % self.slots_per_env] = True
        self._answered += 1
        self._pending_keys = ()
        return {**row, "is_first": torch.ones_like(row["is_first"]), "reward": torch.zeros_like(row["reward"])}

    def _row_stored(self, time: int) -> None:
        """A slot has been given to the row of this time; subclasses keep their books here."""

    # --- batches out ---------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self._answered + bool(self._pending_keys)

    @property
    def _begin(self) -> int:
        """The time of the oldest row that is still there."""
        return max(0, self._end - self.slots_per_env)

    @property
    def num_rows(self) -> int:
        return (self._end - self._begin) * self.num_envs

    @property
    def _num_starts(self) -> int:
        """Starts of each environment, is_last rows included."""
        return self._end - self._begin - self.sequence_length + 1

    def ready(self) -> bool:
        return self.num_rows >= self.minimum_rows and self._num_starts > 0 and self._has_start()

    def _has_start(self) -> bool:
        if self.starts_at_ends:
            return True
        newest = self._begin + self._num_starts
        times = np.arange(max(self._begin, newest - _STARTS_LOOKED_AT), newest)
        return not self._ring.view("is_last")[:, times % self.slots_per_env].all()

    def sample(self) -> Batch:
        """T consecutive rows from each of B starts, uniformly over all of them."""
        assert self._num_starts > 0, "too few rows to sample"
        env_index, time = self._draw_uniform(self.batch_size)
        return to_batch(self._read(env_index, time))

    def _draw_uniform(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Environments and times of `count` starts."""
        env_index, offset = self._draw_any(count)
        if not self.starts_at_ends:
            is_last = self._ring.view("is_last").reshape(-1)  # in place: environments follow each other
            slots, begin = self.slots_per_env, self._begin
            bad = is_last[env_index * slots + (offset + begin) % slots].nonzero()[0]
            assert not len(bad) or self._has_start(), "too few rows to sample"
            while len(bad):
                env_index[bad], offset[bad] = self._draw_any(len(bad))
                bad = bad[is_last[env_index[bad] * slots + (offset[bad] + begin) % slots]]
        return env_index, offset + self._begin

    def _draw_any(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        flat = self._random.integers(0, self.num_envs * self._num_starts, count)
        if self.num_envs == 1:
            return np.zeros_like(flat), flat
        env_index = flat // self._num_starts
        return env_index, flat - env_index * self._num_starts

    def _read(self, env_index: np.ndarray, time: np.ndarray) -> Arrays:
        return self._ring.read(env_index, time % self.slots_per_env, self.sequence_length)

    def _time_at(self, slot: np.ndarray) -> np.ndarray:
        return self._begin + (slot - self._begin) % self.slots_per_env

    def _index_of(self, env_index: np.ndarray, time: np.ndarray) -> Tensor:
        """One number per row, never given twice: a batch's `index [B]` still knows its rows after the ring moved on."""
        return torch.from_numpy(time * self.num_envs + env_index)

    def _places_of(self, index: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Environments and slots of starts, and whether they are still there."""
        time, env_index = np.divmod(as_array(index), self.num_envs)
        return env_index, time % self.slots_per_env, time >= self._begin

    # --- memory and state ----------------------------------------------------------------------

    def memory_bytes(self, spec: EnvSpec, *, extra_bytes_per_row: int = 0) -> int:
        """What this buffer will take once rows of `spec` arrive; nothing is allocated to find out."""
        return self.num_envs * self.slots_per_env * (row_bytes(spec) + extra_bytes_per_row)

    def get_state(self) -> StateTree:
        return {
            "num_envs": self.num_envs,
            "slots_per_env": self.slots_per_env,
            "answered": self._answered,
            "pending_keys": list(self._pending_keys),
            "rows": self._ring.get_rows(min(self._end, self.slots_per_env)),
            "random": _generator_state(self._random),
        }

    def set_state(self, state: StateTree) -> None:
        stored, here = (state["num_envs"], state["slots_per_env"]), (self.num_envs, self.slots_per_env)
        if stored != here:
            raise ConfigError(
                f"The saved replay holds {stored[0]} environments of {stored[1]} rows each, this one {here[0]} of "
                f"{here[1]}: continue with num_envs {stored[0]} and capacity_rows {stored[0] * stored[1]}."
            )
        self._ring.set_rows(state["rows"])
        self._answered, self._pending_keys = state["answered"], tuple(state["pending_keys"])
        self._pending_reward = None
        _set_generator_state(self._random, state["random"])


def to_batch(arrays: Arrays) -> Batch:
    return {key: torch.from_numpy(value) for key, value in arrays.items()}


def _generator_state(generator: np.random.Generator) -> StateTree:
    state = generator.bit_generator.state
    words = {name: str(value) for name, value in state["state"].items()}  # 128 bits: more than a tensor's number holds
    return {**words, "has_uint32": state["has_uint32"], "uinteger": state["uinteger"]}


def _set_generator_state(generator: np.random.Generator, state: StateTree) -> None:
    generator.bit_generator.state = {
        "bit_generator": generator.bit_generator.state["bit_generator"],
        "state": {"state": int(state["state"]), "inc": int(state["inc"])},
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }
