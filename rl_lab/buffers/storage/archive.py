"""The rows of a ring on the disk: appended as they come, patched where they were written back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from rl_lab.buffers.storage.row_log import (
    COPY_BYTES,
    LogFolder,
    NamedFile,
    Patch,
    Segment,
    appending,
    new_blocks,
    record_dtype,
    rows_per_file,
    sync,
)
from rl_lab.buffers.storage.rows import Layout, RowRing
from rl_lab.types import StateTree
from rl_lab.utils.file_blocks import FileBlocks


class RingArchive:
    """Keeps a ring's folder in step with it; times are the buffer's, slot = time % C."""

    def __init__(self, ring: RowRing, directory: Path) -> None:
        self.folder = LogFolder(directory)
        self._ring = ring
        self._is_dirty = np.zeros((ring.num_envs, 0), bool)  # [N, C] once something is written back
        self.restart(begin=0)

    def restart(self, *, begin: int) -> None:
        """Nothing that the folder holds is in the ring."""
        self._layouts: list[Layout] = []
        self._segments: list[Segment] = []
        self._patches: list[Patch] = []
        self._saved_until = begin  # rows of earlier times are on the disk, or were overwritten before a save
        self._has_tail = False  # whether the last segment's file may grow: written by this process, and whole
        self._mutable_keys: list[str] = []  # what has been written back so far
        self._is_dirty[...] = False

    def written(self, key: str, env_index: np.ndarray, slot: np.ndarray) -> None:
        """Note that rows hold other values under `key` than they did when they were answered."""
        if key not in self._mutable_keys:
            self._mutable_keys.append(key)
        if not self._is_dirty.size:
            self._is_dirty = np.zeros((self._ring.num_envs, self._ring.slots_per_env), bool)
        self._is_dirty[env_index, slot] = True

    def save(self, *, begin: int, end: int) -> StateTree:
        """Bring the rows of times `begin` to `end` to the disk as far as they are not there yet; the log's state."""
        if self._is_dirty.any():
            self._save_written(begin)
        self._drop_before(begin)
        self._append(begin=begin, end=end)
        self._saved_until = end
        self._is_dirty[...] = False
        return {
            "layouts": [
                [{"key": key, "dtype": dtype, "shape": list(shape)} for key, (dtype, shape) in layout.items()]
                for layout in self._layouts
            ],
            "segments": [asdict(segment) for segment in self._segments],
            "patches": [asdict(patch) for patch in self._patches],
        }

    def _drop_before(self, begin: int) -> None:
        """Forget blocks whose rows are all of earlier times, and what only they needed."""
        begin_index = begin * self._ring.num_envs
        patches = [each for each in self._patches if each.last_indices[-1] >= begin_index]
        self._patches = [each.since(int(np.searchsorted(each.last_indices, begin_index))) for each in patches]
        segments = [each for each in self._segments if each.stop_time > begin]
        segments = [each.since(max(begin - each.first_time, 0) // each.blocks.block_rows) for each in segments]
        used = sorted({segment.layout for segment in segments} | {len(self._layouts) - 1} - {-1})
        self._layouts = [self._layouts[index] for index in used]
        self._segments = [replace(segment, layout=used.index(segment.layout)) for segment in segments]

    # --- new rows ------------------------------------------------------------------------------

    def _append(self, *, begin: int, end: int) -> None:
        start, layout = max(self._saved_until, begin), self._ring.layout
        if start > self._saved_until or not self._segments:
            self._has_tail = False  # times in between were overwritten: a segment has no holes
        if layout and self._layouts[-1:] != [layout]:
            self._layouts.append(dict(layout))
            self._has_tail = False
        if start < end:
            has_tail, self._has_tail = self._has_tail, False  # a file that a failure left half-written is not continued
            self._write_rows(start, end, has_tail)
            self._has_tail = True
            sync(self.folder.directory)

    def _write_rows(self, start: int, end: int, has_tail: bool) -> None:
        ring, layout, segments = self._ring, self._layouts[-1], list(self._segments)
        limit = rows_per_file(layout, num_envs=ring.num_envs, slots_per_env=ring.slots_per_env)
        row_bytes = record_dtype(layout).itemsize * ring.num_envs
        with appending() as append:
            while start < end:
                if not has_tail or segments[-1].blocks.rows >= limit:
                    blocks = new_blocks(row_bytes, first_row=start, most_rows=limit)
                    segments.append(Segment(self.folder.new_name("rows"), blocks, len(self._layouts) - 1))
                    has_tail = True
                last = segments[-1]
                stop = min(end, start + limit - last.blocks.rows)
                blocks = append(self.folder.path(last.file), self._records(layout, start, stop), last.blocks)
                segments[-1], start = replace(last, blocks=blocks), stop
        self._segments = segments

    def _records(self, layout: Layout, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows as they lie in a file, `[times, N]`, a few megabytes at a time."""
        record = record_dtype(layout)
        times = max(1, COPY_BYTES // max(record.itemsize * self._ring.num_envs, 1))
        buffer = np.empty((min(times, stop - start), self._ring.num_envs), record)
        for first in range(start, stop, times):
            records = buffer[: min(times, stop - first)]
            for slot, part in self._around(first, records):
                for key, values in self._ring.get_slots(slot, slot + len(part)).items():
                    part[key] = values.swapaxes(0, 1)
            yield records

    def _around(self, time: int, records: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The records of consecutive times in at most two pieces, each with the slot of its first one."""
        slot = time % self._ring.slots_per_env
        ahead = self._ring.slots_per_env - slot
        return [each for each in ((slot, records[:ahead]), (0, records[ahead:])) if len(each[1])]

    # --- rows that changed after they were answered --------------------------------------------

    def _save_written(self, begin: int) -> None:
        count = self._ring.num_envs
        saved = np.arange(begin, self._saved_until)
        env_index, place = self._is_dirty[:, saved % self._ring.slots_per_env].nonzero()
        if not len(place):
            return
        index = np.sort(saved[place] * count + env_index)
        # Patches that outgrow the columns they patch are replaced by the columns themselves.
        is_whole = sum(patch.blocks.rows for patch in self._patches) + len(index) > len(saved) * count
        if is_whole:
            index = np.arange(begin * count, self._saved_until * count)
        self._patches = [*([] if is_whole else self._patches), self._write_patch(index)]

    def _write_patch(self, index: np.ndarray) -> Patch:
        """Bring the values of single rows, named by their sorted index, to the disk."""
        record = self._patch_record(self._ring.layout, self._mutable_keys)
        name, blocks = self.folder.new_name("patch"), new_blocks(record.itemsize, first_row=0, most_rows=len(index))
        rows = max(1, COPY_BYTES // record.itemsize)

        def parts() -> Iterator[np.ndarray]:
            for first in range(0, len(index), rows):
                part = index[first : first + rows]
                time, env_index = np.divmod(part, self._ring.num_envs)
                records = np.empty(len(part), record)
                records["index"] = part
                for key in self._mutable_keys:
                    records[key] = self._ring.get_values(key, env_index, time % self._ring.slots_per_env)
                yield records

        with appending() as append:
            blocks = append(self.folder.path(name), parts(), blocks)
        sync(self.folder.directory)
        ends = np.minimum(np.arange(blocks.block_rows, len(index) + blocks.block_rows, blocks.block_rows), len(index))
        return Patch(name, blocks, tuple(self._mutable_keys), tuple(index[ends - 1].tolist()))

    @staticmethod
    def _patch_record(layout: Layout, keys: Iterable[str]) -> np.dtype:
        return record_dtype({"index": ("int64", ()), **{key: layout[key] for key in keys}})

    # --- back from the disk --------------------------------------------------------------------

    def load(self, state: StateTree, *, begin: int, end: int) -> None:
        """Fill the ring with the rows that a state names; rows to come go to new files."""
        state, slots, num_envs = _of_today(state), self._ring.slots_per_env, self._ring.num_envs
        self.restart(begin=end)
        self._layouts = [
            {column["key"]: (column["dtype"], tuple(column["shape"])) for column in layout}
            for layout in state["layouts"]
        ]
        self._segments = [Segment(**{**each, "blocks": FileBlocks(**each["blocks"])}) for each in state["segments"]]
        self._patches = [Patch(**{**each, "blocks": FileBlocks(**each["blocks"])}) for each in state["patches"]]
        self._mutable_keys = list(dict.fromkeys(key for patch in self._patches for key in patch.keys))
        self._fill_ring(begin=begin, end=end)
        for patch in self._patches:
            record = self._patch_record(self._layouts[-1], patch.keys)
            for _, block in self.folder.read(patch):
                rows = np.frombuffer(block, record)
                rows = rows[rows["index"] >= begin * num_envs]
                time, env_index = np.divmod(rows["index"], num_envs)
                for key in patch.keys:
                    self._ring.set_values(key, env_index, time % slots, rows[key])

    def _fill_ring(self, *, begin: int, end: int) -> None:
        self._ring.lay_out(self._layouts[-1] if self._layouts else {})
        for segment in self._segments:
            record = record_dtype(self._layouts[segment.layout])
            for first, block in self.folder.read(segment):
                time = segment.first_time + first
                lost = max(begin - time, 0)
                records = np.frombuffer(block, record).reshape(-1, self._ring.num_envs)[lost:]
                for slot, part in self._around(time + lost, records):
                    self._ring.set_slots(slot, {key: part[key].swapaxes(0, 1) for key in record.names or ()})

    def named_files(self) -> list[NamedFile]:
        """Every file that the last saved state needs."""
        return [*self._segments, *self._patches]

    def remove_all_but(self, named: set[str]) -> None:
        """Remove the files that neither the ring nor a checkpoint (`named`) needs."""
        self.folder.remove_all_but(named | {each.file for each in self.named_files()})


def _of_today(state: StateTree) -> StateTree:
    """The state of a log as it is now; before there were blocks, each file had one checksum (`stretches`)."""
    if "segments" in state:
        return state

    def named(each: StateTree) -> StateTree:
        sums = {"rows": each["rows"], "byte_count": each["bytes"], "crc32": each["crc32"]}
        return {"file": each["file"], "blocks": asdict(FileBlocks.single(**sums, first_row=each.get("first_time", 0)))}

    segments = [{**named(each), "layout": each["layout"]} for each in state["stretches"]]
    no_end = (2**63 - 1,)
    patches = [{**named(each), "keys": tuple(each["keys"]), "last_indices": no_end} for each in state["patches"]]
    return {"layouts": state["layouts"], "segments": segments, "patches": patches}
