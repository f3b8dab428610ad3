"""Where rows lie: one ring of slots per environment, and what moves in and out of it.

Keys of one dtype lie side by side in one array, so that a row is one stretch of memory per dtype and nothing pads it:

    float32 [N, C, 24]   slot 0: vector(17) reward(1) action(6) | slot 1: vector(17) reward(1) action(6) | ...
    bool    [N, C, 3]    slot 0: is_first is_last is_terminal   | slot 1: ...

Consecutive rows of an environment are neighbours, so a sequence is copied as one block: at random places of a large
replay the memory's latency is what sampling costs, and this asks for each place once, not once per key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from rl_lab.types import Batch, EnvSpec

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Column:
    """Where one key lies: numbers `start` to `stop` of a row in the array of its dtype."""

    dtype: str
    start: int
    stop: int
    shape: tuple[int, ...]


class RowRing:
    """Rows of N environments, C slots each, on the CPU. Which slot is the newest is the owner's affair."""

    def __init__(self, *, num_envs: int, slots_per_env: int) -> None:
        self.num_envs = num_envs
        self.slots_per_env = slots_per_env
        self.columns: dict[str, Column] = {}
        self._arrays: Arrays = {}  # dtype -> [N, C, width]
        self._staging: Arrays = {}  # dtype -> [N, width], where a row is put together
        self._cells: Batch = {}  # key -> its part of the staging, [N, ...]
        self._windows: dict[tuple[str, int], np.ndarray] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def write(self, slot: int, row: Batch) -> None:
        """One row of every environment; a key it does not bring is zero there."""
        if not row.keys() <= self.columns.keys():
            self._make_room_for({key: as_array(value) for key, value in row.items()})
        for key in self._cells.keys() - row.keys():
            self._cells[key].zero_()
        torch._foreach_copy_([self._cells[key] for key in row], list(row.values()))
        for dtype, array in self._arrays.items():
            array[:, slot] = self._staging[dtype]

    def read(self, env_index: np.ndarray, slot: np.ndarray, length: int) -> Arrays:
        """`length` consecutive rows from each place: key -> a fresh array `[B, length, ...]`."""
        flat = env_index * self.slots_per_env + slot
        wraps = slot.max() > self.slots_per_env - length
        if wraps:
            following = (slot[:, None] + np.arange(length)) % self.slots_per_env
            flat = (env_index[:, None] * self.slots_per_env + following).ravel()
        blocks: Arrays = {}
        for dtype, array in self._arrays.items():
            width = array.shape[2]
            if wraps:
                picked = array.reshape(-1, width).take(flat, axis=0)
            else:
                picked = self._windows_of(dtype, length)[flat].view(array.dtype)
            blocks[dtype] = picked.reshape(len(slot), length, width)
        return {key: self._cut(blocks[column.dtype], column) for key, column in self.columns.items()}

    def view(self, key: str) -> np.ndarray:
        """Every slot of one key, `[N, C, ...]`, in place."""
        column = self.columns[key]
        return self._cut(self._arrays[column.dtype], column)

    def _cut(self, block: np.ndarray, column: Column) -> np.ndarray:
        if not column.shape:
            return block[:, :, column.start]
        part = block[:, :, column.start : column.stop]
        return part if len(column.shape) == 1 else part.reshape(*block.shape[:2], *column.shape)

    def _windows_of(self, dtype: str, length: int) -> np.ndarray:
        """All overlapping runs of `length` rows as single items, so that numpy moves each run in one copy."""
        if (dtype, length) not in self._windows:
            array = self._arrays[dtype]
            row_bytes = array.shape[2] * array.itemsize
            count = self.num_envs * self.slots_per_env - length + 1
            self._windows[dtype, length] = np.ndarray(
                (count,), np.dtype((np.void, row_bytes * length)), buffer=array, strides=(row_bytes,)
            )
        return self._windows[dtype, length]

    def _make_room_for(self, row: Arrays) -> None:
        """Lay out the keys of a first row; a later policy that keeps more extras widens what is there."""
        shapes = {key: (column.dtype, column.shape) for key, column in self.columns.items()}
        shapes |= {key: (value.dtype.name, value.shape[1:]) for key, value in row.items() if key not in shapes}
        kept = {key: self.view(key) for key in self.columns}
        widths: dict[str, int] = {}
        self.columns = {}
        for key, (dtype, shape) in shapes.items():
            start = widths.get(dtype, 0)
            widths[dtype] = start + prod(shape)
            self.columns[key] = Column(dtype, start, widths[dtype], shape)
        places = (self.num_envs, self.slots_per_env)
        self._arrays = {dtype: np.zeros((*places, width), dtype) for dtype, width in widths.items()}
        self._windows = {}
        self._staging = {dtype: np.zeros((self.num_envs, width), dtype) for dtype, width in widths.items()}
        self._cells = {
            key: torch.from_numpy(self._cut(self._staging[column.dtype][:, None], column)[:, 0])
            for key, column in self.columns.items()
        }
        for key, values in kept.items():
            self.view(key)[...] = values

    def get_rows(self, used: int) -> Arrays:
        """The first `used` slots, `[N, used, ...]` per key, copied."""
        return {key: self.view(key)[:, :used].copy() for key in self.columns} if used else {}

    def set_rows(self, rows: Mapping[str, Tensor | np.ndarray]) -> None:
        """Put back what `get_rows` gave and forget everything else."""
        arrays = {key: np.asarray(value) for key, value in rows.items()}
        self.columns, self._arrays = {}, {}
        if arrays:
            self._make_room_for({key: value[:, 0] for key, value in arrays.items()})
            for key, value in arrays.items():
                self.view(key)[:, : value.shape[1]] = value


def as_array(value: Tensor) -> np.ndarray:
    return (value if value.is_cpu else value.cpu()).numpy()


def row_bytes(spec: EnvSpec) -> int:
    """What one row of one environment takes without extras: observation, reward, three flags, action."""
    arrays = [(each.shape, each.dtype) for each in spec.observation.values()]
    arrays += [(spec.action.shape, spec.action.dtype), ((), "float32"), *[((), "bool")] * 3]
    return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
