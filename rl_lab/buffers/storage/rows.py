"""Where rows lie: one ring of slots per environment, and what moves in and out of it.

Keys of one dtype lie side by side in one block, so that a row is one piece of memory per dtype without padding:

    float32 [N, C, 24]   slot 0: vector(17) reward(1) action(6) | slot 1: vector(17) reward(1) action(6) | ...
    bool    [N, C, 3]    slot 0: is_first is_last is_terminal   | slot 1: ...

Consecutive rows of an environment are neighbours, so a sequence is copied as one piece: at random places of a large
replay sampling costs the memory's latency, and this pays it once per sequence, not once per key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_lab.types import Batch, EnvSpec

Arrays = dict[str, np.ndarray]
Layout = dict[str, tuple[str, tuple[int, ...]]]  # key -> dtype and shape of one row of one environment
_CPU = torch.device("cpu")


class Column(NamedTuple):
    """Where one key lies in a row of the block of its dtype."""

    dtype: str
    numbers: slice
    shape: tuple[int, ...]


class RowRing:
    """Rows of N environments in main memory, C slots each; the owner knows which slot is the newest.

    Batches come out on `device`. For a GPU they are gathered in page-locked memory, so that the copy does not wait.
    """

    def __init__(
        self, *, num_envs: int, slots_per_env: int, device: torch.device = _CPU, is_pinned: bool = False
    ) -> None:
        self.num_envs, self.slots_per_env, self.device, self.is_pinned = num_envs, slots_per_env, device, is_pinned
        self.layout: Layout = {}  # in the order in which keys lie in a row
        self._columns: dict[str, Column] = {}
        self._blocks: dict[str, Tensor] = {}  # dtype -> [N, C, width]
        self._cells: Batch = {}  # key -> its part of the block, [N, C, ...]
        self._views: Arrays = {}  # the same as arrays, in main memory
        self._windows: dict[tuple[str, int], np.ndarray] = {}

    @property
    def allocated_bytes(self) -> int:
        """Memory that the rows take now."""
        return sum(block.nbytes for block in self._blocks.values())

    @property
    def row_bytes(self) -> int:
        """What one row of one environment takes."""
        return sum(block.shape[2] * block.element_size() for block in self._blocks.values())

    # --- rows in -------------------------------------------------------------------------------

    def write(self, slot: int, row: Batch) -> None:
        """One row of every environment; a missing key is zero there."""
        self._extend_layout(row)
        for key, view in self._views.items():
            view[:, slot] = as_array(row[key]) if key in row else 0

    def write_rows(self, slot: int, rows: Sequence[Batch]) -> None:
        """Consecutive rows from a slot on."""
        packed = self._pack(rows) if len(rows) > 1 else None
        if packed is None:
            for index, row in enumerate(rows):
                self.write((slot + index) % self.slots_per_env, row)
            return
        ahead = min(len(rows), self.slots_per_env - slot)
        for dtype, block in self._blocks.items():
            block[:, slot : slot + ahead].transpose(0, 1).copy_(packed[dtype][:ahead])
            if ahead < len(rows):
                block[:, : len(rows) - ahead].transpose(0, 1).copy_(packed[dtype][ahead:])

    def _pack(self, rows: Sequence[Batch]) -> Batch | None:
        """The rows as `[rows, N, width]` of each dtype, where the ring is; None unless all bring exactly its keys."""
        self._extend_layout(rows[0])
        count = len(self.layout)
        if any(len(row) != count for row in rows):
            return None
        packed: Batch = {}
        for dtype, block in self._blocks.items():
            keys = [key for key, column in self._columns.items() if column.dtype == dtype]
            try:
                stacked = [torch.stack([row[key] for row in rows]) for key in keys]
            except KeyError:
                return None
            if any(_name_of(part.dtype) != dtype for part in stacked):
                return None
            parts = [part.reshape(len(rows), self.num_envs, -1) for part in stacked]
            whole = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
            packed[dtype] = whole.to(block.device)
        return packed

    # --- rows out ------------------------------------------------------------------------------

    def read(self, env_index: np.ndarray, slot: np.ndarray, length: int) -> Batch:
        """`length` consecutive rows from each place: key -> fresh memory `[B, length, ...]`."""
        flat = env_index * self.slots_per_env + slot
        wraps = (slot > self.slots_per_env - length).nonzero()[0]
        if len(wraps):
            flat[wraps] = 0  # read somewhere, replaced below
            following = (slot[wraps, None] + np.arange(length)) % self.slots_per_env
            wrapped = env_index[wraps, None] * self.slots_per_env + following
        blocks: Arrays = {}
        for dtype, block in self._blocks.items():
            width = block.shape[2]
            blocks[dtype] = self._windows_of(dtype, length)[flat].view(dtype).reshape(len(flat), length, width)
            if len(wraps):
                blocks[dtype][wraps] = block.numpy().reshape(-1, width)[wrapped]
        if self.device.type != "cpu":
            return self._cut_all({dtype: self._upload(block) for dtype, block in blocks.items()})
        return {key: torch.from_numpy(_cut(blocks[column.dtype], column)) for key, column in self._columns.items()}

    def _upload(self, picked: np.ndarray) -> Tensor:
        """On the GPU without waiting: torch keeps page-locked memory until the copy out of it is done."""
        staging = torch.empty(picked.shape, dtype=torch.from_numpy(picked[:0]).dtype, pin_memory=True)
        staging.numpy()[...] = picked
        return staging.to(self.device, non_blocking=True)

    def _cut_all(self, blocks: Batch) -> Batch:
        """Every key as a view of the packed `[B, T, width]` of its dtype."""
        return {key: _cut(blocks[column.dtype], column) for key, column in self._columns.items()}

    def _windows_of(self, dtype: str, length: int) -> np.ndarray:
        """All overlapping runs of `length` rows as single items, so that numpy moves each run in one copy."""
        if (dtype, length) not in self._windows:
            array = self._blocks[dtype].numpy()
            row_bytes = array.shape[2] * array.itemsize
            count = self.num_envs * self.slots_per_env - length + 1
            item = np.dtype((np.void, row_bytes * length))
            self._windows[dtype, length] = np.ndarray((count,), item, buffer=array, strides=(row_bytes,))
        return self._windows[dtype, length]

    def view(self, key: str) -> np.ndarray:
        """Every slot of `is_last` (of any key, where rows lie in main memory), `[N, C, ...]`, to be read."""
        return self._views[key]

    # --- the layout ----------------------------------------------------------------------------

    def lay_out(self, layout: Layout) -> None:
        """Forget every row and let the next have these keys."""
        widths: dict[str, int] = {}
        self.layout, self._columns = dict(layout), {}
        for key, (dtype, shape) in layout.items():
            start = widths.get(dtype, 0)
            widths[dtype] = start + prod(shape)
            self._columns[key] = Column(dtype, slice(start, widths[dtype]), tuple(shape))
        self._windows, self._views, self._cells, self._blocks = {}, {}, {}, {}  # gone before: both may not fit
        self._blocks = {dtype: self._allocate(width, dtype) for dtype, width in widths.items()}
        self._cells = self._cut_all(self._blocks)
        self._views = {key: cell.numpy() for key, cell in self._cells.items() if cell.is_cpu}

    def _allocate(self, width: int, dtype: str) -> Tensor:
        array = np.zeros((self.num_envs, self.slots_per_env, width), dtype)  # pages are taken as rows come
        block = torch.from_numpy(array)
        return block.pin_memory() if self.is_pinned else block

    def _extend_layout(self, row: Batch) -> None:
        if not row.keys() <= self.layout.keys():
            kept = {key: as_array(cell) for key, cell in self._cells.items()}
            self.lay_out(self._layout_with(row))
            self.set_slots(0, kept)

    def _layout_with(self, row: Batch) -> Layout:
        """The layout with the keys that a row brings for the first time: later policies may keep more extras."""
        new = {key: (_name_of(value.dtype), tuple(value.shape[1:])) for key, value in row.items()}
        return {**self.layout, **new, **self.layout}

    # --- neighbouring slots and single rows ----------------------------------------------------

    def get_slots(self, start: int, stop: int) -> Arrays:
        """Neighbouring slots of every key, `[N, stop - start, ...]`; possibly in place."""
        return {key: as_array(cell[:, start:stop]) for key, cell in self._cells.items()}

    def set_slots(self, start: int, rows: Arrays) -> None:
        """Fill neighbouring slots from `[N, count, ...]` per key."""
        for key, values in rows.items():
            self._views[key][:, start : start + values.shape[1]] = values

    def get_values(self, key: str, env_index: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """What single rows hold under a key, `[K, ...]`."""
        return as_array(self._cells[key][torch.from_numpy(env_index), torch.from_numpy(slot)])

    def set_values(self, key: str, env_index: np.ndarray, slot: np.ndarray, values: np.ndarray | Tensor) -> None:
        """Replace what single rows hold under a key."""
        self._views[key][env_index, slot] = as_array(values)

    def get_rows(self, used: int) -> Arrays:
        """The first `used` slots, `[N, used, ...]` per key, copied."""
        return {key: values.copy() for key, values in self.get_slots(0, used).items()} if used else {}

    def set_rows(self, rows: Mapping[str, Tensor | np.ndarray]) -> None:
        """Put back what `get_rows` gave and forget everything else."""
        arrays = {key: np.asarray(value) for key, value in rows.items()}
        self.lay_out({key: (value.dtype.name, value.shape[2:]) for key, value in arrays.items()})
        self.set_slots(0, arrays)


class DeviceRing(RowRing):
    """Rows in the memory of a GPU: sampling copies to it only which rows are wanted.

    `is_last` is kept in main memory too, since every draw needs it there.
    """

    def write(self, slot: int, row: Batch) -> None:
        self._extend_layout(row)
        for key, cell in self._cells.items():
            if key in row:
                cell[:, slot].copy_(row[key], non_blocking=True)
            else:
                cell[:, slot].zero_()
        self._is_last[:, slot] = as_array(row["is_last"]) if "is_last" in row else False

    def write_rows(self, slot: int, rows: Sequence[Batch]) -> None:
        super().write_rows(slot, rows)
        slots = (slot + np.arange(len(rows))) % self.slots_per_env
        self._is_last[:, slots] = as_array(torch.stack([row["is_last"] for row in rows], dim=1))

    def read(self, env_index: np.ndarray, slot: np.ndarray, length: int) -> Batch:
        following = (slot[:, None] + np.arange(length)) % self.slots_per_env
        flat = self._there((env_index[:, None] * self.slots_per_env + following).reshape(-1))
        picked = {dtype: block.flatten(0, 1).index_select(0, flat) for dtype, block in self._blocks.items()}
        return self._cut_all({dtype: rows.view(len(slot), length, -1) for dtype, rows in picked.items()})

    def view(self, key: str) -> np.ndarray:
        assert key == "is_last", "rows on a GPU are read by place"
        return self._is_last

    def lay_out(self, layout: Layout) -> None:
        super().lay_out(layout)
        self._is_last = np.zeros((self.num_envs, self.slots_per_env), bool)

    def _allocate(self, width: int, dtype: str) -> Tensor:
        like = torch.from_numpy(np.zeros(0, dtype))
        return torch.zeros((self.num_envs, self.slots_per_env, width), dtype=like.dtype, device=self.device)

    def set_slots(self, start: int, rows: Arrays) -> None:
        for key, values in rows.items():
            stop = start + values.shape[1]
            self._cells[key][:, start:stop].copy_(torch.from_numpy(np.ascontiguousarray(values)))
            if key == "is_last":
                self._is_last[:, start:stop] = values

    def set_values(self, key: str, env_index: np.ndarray, slot: np.ndarray, values: np.ndarray | Tensor) -> None:
        """Values that a GPU is still computing are not waited for."""
        self._cells[key].index_put_((self._there(env_index), self._there(slot)), self._there(values))
        if key == "is_last":
            self._is_last[env_index, slot] = as_array(values)

    def _there(self, values: np.ndarray | Tensor) -> Tensor:
        tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        return tensor.to(self.device, non_blocking=True)


def _cut(block: Any, column: Column) -> Any:
    """One key of the packed `[B, T, width]`, in place."""
    if not column.shape:
        return block[:, :, column.numbers.start]
    part = block[:, :, column.numbers]
    return part if len(column.shape) == 1 else part.reshape(*block.shape[:2], *column.shape)


def as_array(value: np.ndarray | Tensor) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return (value if value.is_cpu else value.cpu()).numpy()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_bytes(spec: EnvSpec) -> int:
    """What one row of one environment takes without extras: observation, reward, three flags, action."""
    arrays = [(each.shape, each.dtype) for each in spec.observation.values()]
    arrays += [(spec.action.shape, spec.action.dtype), ((), "float32"), *[((), "bool")] * 3]
    return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
