"""Rows on the disk: mapped files of consecutive times, of which the kernel keeps in memory what is used.

    rows_000001.bin   times 0 .. 340      [times, N] records, as a checkpoint names them: a save flushes what is new
    rows_000002.bin   times 341 .. 681    full: the next row goes to a new file, also after the ring wrapped around
    mutable_000003.bin                    what was written back to rows, since a checkpoint may name these already

No file is kept open: a mapping outlives its handle. A file whose rows have left the ring is removed at once, unless a
checkpoint may need it. Space is reserved when a file is made: a full disk in the middle of an assignment to mapped
memory would kill the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.storage.archive import RingArchive
from rl_lab.buffers.storage.row_log import LogFolder, Segment, new_blocks, record_dtype, rows_per_file, sync
from rl_lab.buffers.storage.rows import Arrays, Layout, RowRing, as_array
from rl_lab.types import Batch, ConfigError, RunError, StateTree
from rl_lab.utils.file_blocks import FileBlocks


@dataclass
class Chunk:
    """One mapped file: the rows of `len(records)` times from `first_time` on."""

    file: str
    layout: Layout
    records: np.ndarray  # [times, N] of plain bytes, one item per row
    blocks: FileBlocks  # of what is saved

    def __post_init__(self) -> None:
        self.rows = self.records.view(record_dtype(self.layout))  # the same with their keys

    @property
    def first_time(self) -> int:
        return self.blocks.first_row

    @property
    def stop_time(self) -> int:
        return self.first_time + len(self.records)


class DiskRing(RowRing):
    """The newest C rows of N environments in mapped files; to its owner it looks like a ring of slots in memory."""

    def __init__(self, *, num_envs: int, slots_per_env: int, directory: Path | None) -> None:
        super().__init__(num_envs=num_envs, slots_per_env=slots_per_env)
        self.folder = None if directory is None else LogFolder(directory)
        self.named: set[str] = set()  # files that some state has named
        self._is_last = np.zeros((num_envs, slots_per_env), bool)  # asked for at every draw: kept in memory
        self.newest = -1  # the time of the newest row
        self.lay_out({})

    @property
    def allocated_bytes(self) -> int:
        """Without mapped pages: the kernel takes those back when it needs them."""
        return self._is_last.nbytes + sum(is_there.nbytes for _, _, is_there in self._overlays.values())

    @property
    def row_bytes(self) -> int:
        return record_dtype(self.layout).itemsize

    def live_files(self) -> set[str]:
        return {chunk.file for chunk in self.chunks} | {file for file, _, _ in self._overlays.values()}

    # --- rows in -------------------------------------------------------------------------------

    def _pack(self, rows: Sequence[Batch]) -> None:
        """Rows are written one by one."""

    def write(self, slot: int, row: Batch) -> None:
        """The newest row or the one after it."""
        time = self.newest if self.newest >= 0 and slot == self.newest % self.slots_per_env else self.newest + 1
        assert time % self.slots_per_env == slot, "rows are written in order"
        if not row.keys() <= self.layout.keys():
            self.layout = self._layout_with(row)
        if not self.chunks or time >= self.chunks[-1].stop_time or self.chunks[-1].layout != self.layout:
            self._begin_chunk(time)
        record = self.chunks[-1].rows[time - self.chunks[-1].first_time]
        for key in self.layout:
            record[key] = as_array(row[key]) if key in row else 0
        self.newest = time
        self._is_last[:, slot] = as_array(row["is_last"]) if "is_last" in row else False
        for _, _, is_there in self._overlays.values():
            is_there[:, slot] = False
        self._drop_lost()

    def _begin_chunk(self, time: int) -> None:
        count = rows_per_file(self.layout, num_envs=self.num_envs, slots_per_env=self.slots_per_env)
        row_bytes = self.num_envs * self.row_bytes
        file, content = self._new_file("rows", count * row_bytes)
        self.add_chunk(file, self.layout, content, new_blocks(row_bytes, first_row=time, most_rows=count))

    def add_chunk(self, file: str, layout: Layout, content: np.ndarray, blocks: FileBlocks) -> Chunk:
        records = content.view(np.dtype((np.void, record_dtype(layout).itemsize))).reshape(-1, self.num_envs)
        self.chunks.append(Chunk(file, layout, records, blocks))
        self._first_times = np.array([chunk.first_time for chunk in self.chunks], np.int64)
        return self.chunks[-1]

    def _new_file(self, kind: str, byte_count: int) -> tuple[str, np.ndarray]:
        """A new file with its space reserved, mapped."""
        if self.folder is None:
            raise ConfigError("Replay: storage is disk, but there is no directory for its files. Give it `directory`.")
        name = self.folder.new_name(kind)
        path = self.folder.path(name)
        try:
            with open(path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, byte_count)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            run_id = path.absolute().parents[2].name
            raise RunError(
                f"disk full: the replay in {path.parent} cannot grow by {byte_count / 1e6:,.1f} MB. Free some space, "
                f"then continue with `rl-lab resume {run_id}`; or start anew with a smaller capacity_rows."
            ) from error
        return name, _mapped(path, byte_count)

    def _drop_lost(self) -> None:
        begin = self.newest - self.slots_per_env + 1
        while len(self.chunks) > 1 and self.chunks[1].first_time <= begin:
            lost = self.chunks.pop(0)
            self._first_times = self._first_times[1:]
            if self.folder is not None and lost.file not in self.named:
                self.folder.path(lost.file).unlink(missing_ok=True)

    # --- rows out ------------------------------------------------------------------------------

    def read(self, env_index: np.ndarray, slot: np.ndarray, length: int) -> Batch:
        times = self._time_at(slot)[:, None] + np.arange(length)
        environments = np.broadcast_to(env_index[:, None], times.shape)
        return {key: torch.from_numpy(value) for key, value in self._gather(environments, times).items()}

    def _time_at(self, slot: np.ndarray) -> np.ndarray:
        return self.newest - (self.newest - slot) % self.slots_per_env

    def _gather(self, env_index: np.ndarray, times: np.ndarray) -> Arrays:
        record = self.chunks[-1].rows.dtype
        rows = np.zeros(times.shape, np.dtype((np.void, record.itemsize)))
        place = self._first_times.searchsorted(times, side="right") - 1
        for number in np.unique(place):
            chunk, chosen = self.chunks[number], place == number
            found = chunk.records[times[chosen] - chunk.first_time, env_index[chosen]]
            if chunk.layout == self.layout:
                rows[chosen] = found
                continue
            for key in chunk.layout:  # rows from before the policy kept more
                rows.view(record)[key][chosen] = found.view(chunk.rows.dtype)[key]
        arrays = {key: np.ascontiguousarray(rows.view(record)[key]) for key in self.layout}
        for key, (_, values, is_there) in self._overlays.items():
            slots = times % self.slots_per_env
            newer = is_there[env_index, slots]
            arrays[key][newer] = values[env_index[newer], slots[newer]]
        return arrays

    def view(self, key: str) -> np.ndarray:
        assert key == "is_last", "rows on the disk are read by place"
        return self._is_last

    def get_slots(self, start: int, stop: int) -> Arrays:
        rows = self.read(np.arange(self.num_envs), np.full(self.num_envs, start), stop - start)
        return {key: value.numpy() for key, value in rows.items()}

    def lay_out(self, layout: Layout) -> None:
        self.layout = dict(layout)
        self.chunks: list[Chunk] = []
        self.newest = -1
        self._first_times = np.zeros(0, np.int64)
        self._overlays: dict[str, tuple[str, np.ndarray, np.ndarray]] = {}  # key -> file, values, which rows have one
        self._is_last[...] = False

    def set_slots(self, start: int, rows: Arrays) -> None:
        if rows:
            raise RunError(
                "The saved replay holds its rows in full, as one without a directory saves them, but this one lies on "
                "the disk. Continue with storage: cpu."
            )

    def get_values(self, key: str, env_index: np.ndarray, slot: np.ndarray) -> np.ndarray:
        return self._gather(env_index, self._time_at(slot))[key]

    def set_values(self, key: str, env_index: np.ndarray, slot: np.ndarray, values: np.ndarray | Tensor) -> None:
        """Beside the rows, which a checkpoint may name."""
        array = as_array(values)
        if key == "is_last":
            self._is_last[env_index, slot] = array
        if key not in self._overlays:
            dtype, shape = self.layout[key]
            places = (self.num_envs, self.slots_per_env)
            file, content = self._new_file("mutable", prod((*places, *shape)) * np.dtype(dtype).itemsize)
            self._overlays[key] = file, content.view(dtype).reshape(*places, *shape), np.zeros(places, bool)
        _, kept, is_there = self._overlays[key]
        kept[env_index, slot] = array
        is_there[env_index, slot] = True


class DiskArchive(RingArchive):
    """Saving rows that lie on the disk already."""

    def __init__(self, ring: DiskRing, directory: Path) -> None:
        super().__init__(ring, directory)
        self._disk = ring

    def save(self, *, begin: int, end: int) -> StateTree:
        self._saved_until = end  # every row has its place; what was written back lies beside it
        return super().save(begin=begin, end=end)

    def _append(self, *, begin: int, end: int) -> None:
        """Flush the rows before time `end`."""
        disk = self._disk
        older = [chunk.layout for chunk in disk.chunks if chunk.layout != disk.layout]
        layouts = [layout for index, layout in enumerate(older) if layout not in older[:index]]
        self._layouts, self._segments = [*layouts, *([disk.layout] if disk.layout else [])], []
        for chunk, following in zip(disk.chunks, [*disk.chunks[1:], None], strict=True):
            stop = min(end, chunk.stop_time, following.first_time if following is not None else end)
            count = stop - chunk.first_time
            if count <= 0:
                continue
            if count > chunk.blocks.rows:
                new = chunk.records[chunk.blocks.rows : count].reshape(-1).view(np.uint8)
                chunk.blocks = chunk.blocks.extended(new)
                sync(self.folder.path(chunk.file))
            disk.named.add(chunk.file)
            self._segments.append(Segment(chunk.file, chunk.blocks, self._layouts.index(chunk.layout)))
        if self._segments:
            sync(self.folder.directory)
        self._drop_before(begin)

    def _fill_ring(self, *, begin: int, end: int) -> None:
        """Map the files of a checkpoint; the next row goes to a new one."""
        disk, slots_per_env = self._disk, self._ring.slots_per_env
        disk.lay_out(self._layouts[-1] if self._layouts else {})
        for segment in self._segments:
            for _ in self.folder.read(segment):
                pass  # verified
            content = _mapped(self.folder.path(segment.file), segment.blocks.bytes)
            chunk = disk.add_chunk(segment.file, self._layouts[segment.layout], content, segment.blocks)
            disk.named.add(segment.file)
            slots = np.arange(segment.first_time, segment.stop_time)[-slots_per_env:] % slots_per_env
            disk.view("is_last")[:, slots] = chunk.rows["is_last"][-slots_per_env:].T
        disk.newest = end - 1

    def remove_all_but(self, named: set[str]) -> None:
        super().remove_all_but(named | self._disk.live_files())


def _mapped(path: Path, byte_count: int) -> np.ndarray:
    """The first bytes of a file as an array, without a handle that stays open."""
    return torch.from_file(str(path), shared=True, size=byte_count, dtype=torch.uint8).numpy()
