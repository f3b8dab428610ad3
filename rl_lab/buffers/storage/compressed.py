"""Rows in memory whose image frames are compressed: more rows in the same memory, paid for with time at every draw.

How far frames shrink is not known beforehand, so the ring counts what they take; over its budget, its owner forgets the
oldest rows. Everything but the frames lies in an ordinary ring.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.storage.rows import Arrays, Layout, RowRing, as_array
from rl_lab.types import Batch, EnvSpec

_LEVEL = 1  # zlib's fastest: the next levels take twice the time for a few percent
_LEAST_BYTES = 4096  # of a frame worth compressing: below, Python's overhead counts
_OBJECT_BYTES = 48  # Python's overhead of a frame: the bytes object's head and its place in the list


def is_frame(dtype: str, shape: Sequence[int]) -> bool:
    """Images are bytes with a height and a width; small ones stay as they are."""
    return dtype == "uint8" and len(shape) >= 2 and prod(shape) >= _LEAST_BYTES


def frame_bytes(spec: EnvSpec) -> int:
    """What the image frames of one row of one environment take uncompressed."""
    return sum(prod(each.shape) for each in spec.observation.values() if is_frame(str(each.dtype), each.shape))


class CompressedRing(RowRing):
    """A ring of slots whose frames are single compressed objects; None where there is no row (any more)."""

    def __init__(self, *, num_envs: int, slots_per_env: int, device: torch.device, budget_fraction: float) -> None:
        super().__init__(num_envs=num_envs, slots_per_env=slots_per_env, device=device)
        self.budget_fraction, self._places = budget_fraction, num_envs * slots_per_env
        self._frames: dict[str, list[bytes | None]] = {}  # key -> place env * C + slot -> frame
        self._used_bytes = 0  # by frames

    @property
    def allocated_bytes(self) -> int:
        return super().allocated_bytes + self._used_bytes

    @property
    def row_bytes(self) -> int:
        return super().row_bytes + self._raw_frame_bytes

    @property
    def _raw_frame_bytes(self) -> int:
        return sum(prod(self.layout[key][1]) for key in self._frames)

    @property
    def is_over_budget(self) -> bool:
        return self._used_bytes > int(self._places * self._raw_frame_bytes * self.budget_fraction)

    def drop(self, slot: int) -> None:
        """Forget the frames of a row of every environment."""
        self._write_frames(slot, {})

    # --- rows in -------------------------------------------------------------------------------

    def write(self, slot: int, row: Batch) -> None:
        super().write(slot, row)
        self._write_frames(slot, row)

    def _write_frames(self, slot: int, row: Batch) -> None:
        for key in self._frames:
            frames = as_array(row[key]) if key in row else [None] * self.num_envs
            self._set_frames(key, range(slot, self._places, self.slots_per_env), frames)

    def _pack(self, rows: Sequence[Batch]) -> None:
        """Frames are compressed one by one."""

    def _set_frames(self, key: str, places: Iterable[int], frames: Iterable[np.ndarray | None]) -> None:
        for place, frame in zip(places, frames, strict=True):
            before, content = self._frames[key][place], None if frame is None else _packed(frame)
            self._used_bytes += _taken(content) - _taken(before)
            self._frames[key][place] = content

    # --- rows out ------------------------------------------------------------------------------

    def read(self, env_index: np.ndarray, slot: np.ndarray, length: int) -> Batch:
        batch = super().read(env_index, slot, length)
        slots = (slot[:, None] + np.arange(length)) % self.slots_per_env
        places = env_index[:, None] * self.slots_per_env + slots
        for key in self._frames:
            batch[key] = torch.from_numpy(self._unpacked(key, places)).to(self.device)
        return {key: batch[key] for key in self.layout}

    def _unpacked(self, key: str, places: np.ndarray) -> np.ndarray:
        """The frames of these places, `[*places.shape, ...]`."""
        shape, frames = self.layout[key][1], self._frames[key]
        raw_bytes = prod(shape)
        unpacked = np.zeros((places.size, raw_bytes), np.uint8)
        for index, place in enumerate(places.ravel().tolist()):
            content = frames[place]
            if content is not None:
                raw = content if len(content) == raw_bytes else zlib.decompress(content, bufsize=raw_bytes)
                unpacked[index] = np.frombuffer(raw, np.uint8)
        return unpacked.reshape(*places.shape, *shape)

    # --- the layout, neighbouring slots and single rows ----------------------------------------

    def lay_out(self, layout: Layout) -> None:
        self._used_bytes = 0
        self._frames = {key: [None] * self._places for key, each in layout.items() if is_frame(*each)}
        super().lay_out({key: each for key, each in layout.items() if key not in self._frames})
        self.layout = dict(layout)

    def _extend_layout(self, row: Batch) -> None:
        frames, used_bytes = self._frames, self._used_bytes
        super()._extend_layout(row)
        self._frames, self._used_bytes = {**self._frames, **frames}, used_bytes

    def get_slots(self, start: int, stop: int) -> Arrays:
        rest = super().get_slots(start, stop)
        places = np.arange(self.num_envs)[:, None] * self.slots_per_env + np.arange(start, stop)
        return {key: self._unpacked(key, places) if key in self._frames else rest[key] for key in self.layout}

    def set_slots(self, start: int, rows: Arrays) -> None:
        super().set_slots(start, {key: values for key, values in rows.items() if key not in self._frames})
        for key in self._frames.keys() & rows.keys():
            for env_index, frames in enumerate(rows[key]):
                first = env_index * self.slots_per_env + start
                self._set_frames(key, range(first, first + len(frames)), frames)

    def get_values(self, key: str, env_index: np.ndarray, slot: np.ndarray) -> np.ndarray:
        if key in self._frames:
            return self._unpacked(key, env_index * self.slots_per_env + slot)
        return super().get_values(key, env_index, slot)

    def set_values(self, key: str, env_index: np.ndarray, slot: np.ndarray, values: np.ndarray | Tensor) -> None:
        if key not in self._frames:
            super().set_values(key, env_index, slot, values)
            return
        places = (env_index * self.slots_per_env + slot).ravel().tolist()
        self._set_frames(key, places, as_array(values).reshape(len(places), *self.layout[key][1]))


def _taken(content: bytes | None) -> int:
    return 0 if content is None else len(content) + _OBJECT_BYTES


def _packed(frame: np.ndarray) -> bytes:
    """The frame compressed, or as it is where that is no shorter: the length shows which."""
    raw = frame.tobytes()
    packed = zlib.compress(raw, _LEVEL)
    return packed if len(packed) < len(raw) else raw
