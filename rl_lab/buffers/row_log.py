"""Rows on the disk: files that only grow, so that a checkpoint pays for what is new and for nothing else.

    replay/<name>/rows_000001.bin    rows of times 0 .. 4095        a file holds records [rows, N], one per environment,
                  rows_000002.bin    rows of times 4096 .. 6143     each with all keys of a row side by side
                  patch_000003.bin   rows written back since: their indices and new values

An answered row never changes, so a checkpoint names rows of each file (a `Segment`) with a checksum for each block of
them. What the file holds beyond is newer than the checkpoint and not read. After a restore new rows go to a new file:
going back to an earlier checkpoint spoils no later one, and what a killed process wrote is in no checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np

from rl_lab.types import RunError, StateTree
from rl_lab.utils.file_blocks import DamagedFileError, FileBlocks

Arrays = dict[str, np.ndarray]
Layout = dict[str, tuple[str, tuple[int, ...]]]  # key -> dtype and shape of one row of one environment

_FILE = re.compile(r"(rows|patch|mutable)_(\d{6,})\.bin")
_FILE_BYTES = 64 * 2**20  # of rows: a file that outlives its rows in the ring costs little
_LEAST_FILES = 8  # that a full ring is spread over, so that old rows free their space early
_BLOCK_BYTES = 2**20  # that share a checksum
_LEAST_BLOCKS = 8  # of a file
_COPY_BYTES = 4 * 2**20  # copied, checksummed and written at once: it stays in the processor's cache


@dataclass(frozen=True)
class NamedFile:
    """What a checkpoint needs outside its own folder: some blocks of a file."""

    file: str
    blocks: FileBlocks


@dataclass(frozen=True)
class Segment(NamedFile):
    """The beginning of a file, with the rows of consecutive times; a row of the file is one of every environment."""

    layout: int  # which of the log's layouts its records have

    @property
    def first_time(self) -> int:
        return self.blocks.first_row

    @property
    def stop_time(self) -> int:
        return self.first_time + self.blocks.rows

    def without(self, begin: int) -> Segment:
        """Without the blocks whose rows are all of times before `begin`."""
        first = max(begin - self.first_time, 0) // self.blocks.block_rows
        return replace(self, blocks=replace(self.blocks, first_block=first))


@dataclass(frozen=True)
class Patch(NamedFile):
    """A file of newer values of single rows, sorted by their index, time * N + environment."""

    keys: tuple[str, ...]
    last_indices: tuple[int, ...]  # of each block

    def without(self, begin_index: int) -> Patch:
        """Without the blocks whose indices all lie before `begin_index`."""
        first = int(np.searchsorted(self.last_indices, begin_index))
        return replace(self, blocks=replace(self.blocks, first_block=first))


@runtime_checkable
class KeepsFiles(Protocol):
    """A buffer whose state needs files of its own folder."""

    def named_files(self) -> Sequence[NamedFile]: ...

    def remove_files_but(self, named: set[str]) -> None: ...


def record_dtype(layout: Mapping[str, tuple[str, Sequence[int]]]) -> np.dtype:
    """One row of one environment as one item: the keys side by side, nothing between them."""
    return np.dtype([(key, dtype, tuple(shape)) for key, (dtype, shape) in layout.items()])


def rows_per_file(layout: Layout, *, num_envs: int, slots_per_env: int) -> int:
    """Times that a file holds: about 64 MiB, and no more than an eighth of the ring."""
    time_bytes = max(record_dtype(layout).itemsize * num_envs, 1)
    return max(1, min(_FILE_BYTES // time_bytes, -(-slots_per_env // _LEAST_FILES)))


def new_blocks(row_bytes: int, *, first_row: int, most_rows: int) -> FileBlocks:
    """The blocks of a new file that will hold up to `most_rows`: about 1 MiB each, and no more than an eighth."""
    return FileBlocks(row_bytes, max(1, min(_BLOCK_BYTES // row_bytes, most_rows // _LEAST_BLOCKS)), first_row)


# --- the folder --------------------------------------------------------------------------------


class LogFolder:
    """The files of one buffer: names that were never used before, and the removal of those nobody needs."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._last_number = 0

    def new_name(self, kind: str) -> str:
        """A name that no checkpoint has, whatever earlier processes left here."""
        self.directory.mkdir(parents=True, exist_ok=True)
        numbers = (int(match[2]) for match in map(_FILE.fullmatch, os.listdir(self.directory)) if match)
        self._last_number = max(self._last_number, *numbers, 0) + 1
        return f"{kind}_{self._last_number:06d}.bin"

    def remove_all_but(self, kept: set[str]) -> None:
        """Remove every file of ours that is not named; nothing else in the folder is touched."""
        if self.directory.is_dir():
            for name in os.listdir(self.directory):
                if _FILE.fullmatch(name) and name not in kept:
                    (self.directory / name).unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        if not _FILE.fullmatch(name):
            raise RunError(f"The saved replay names the file '{name}', which is none of its own: the state is damaged.")
        return self.directory / name

    def sync(self) -> None:
        """Wait until the disk has the names of new files."""
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, named: NamedFile) -> Iterator[tuple[int, bytearray]]:
        """Every needed block of a file: its first row, counted from the file's beginning, and its bytes."""
        path = self.path(named.file)
        try:
            yield from named.blocks.read(path)
        except DamagedFileError as error:
            raise RunError(f"{path}: {error}, but the checkpoint needs its rows.") from error


def _write_fully(target: BinaryIO, block: memoryview) -> None:
    while block:
        block = block[target.write(block) :]


def _sync_and_close(file: BinaryIO) -> None:
    with file:
        os.fsync(file.fileno())


class _Writer:
    """Writes while checksums are computed, and lets one file reach the disk while the next is written."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="row_log")
        self._closing: Future[None] | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True)

    def write(self, file: BinaryIO, records: np.ndarray, blocks: FileBlocks) -> FileBlocks:
        """The file's blocks with these records."""
        data = memoryview(records.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        written = self._threads.submit(_write_fully, file, data)
        blocks = blocks.extended(data)
        written.result()
        return blocks

    def close(self, file: BinaryIO) -> None:
        """Begin to bring a file to the disk; at most one other is on its way."""
        self.finish()
        self._closing = self._threads.submit(_sync_and_close, file)

    def finish(self) -> None:
        if self._closing is not None:
            self._closing.result()
            self._closing = None


# --- the log of a ring in memory ---------------------------------------------------------------


class RowLog:
    """What a ring in memory has on the disk. It reads the ring by time and knows nothing else about it."""

    def __init__(self, directory: Path, *, num_envs: int, slots_per_env: int) -> None:
        self.folder = LogFolder(directory)
        self.num_envs, self.slots_per_env = num_envs, slots_per_env
        self.saved_until = 0  # rows of earlier times are on the disk, or were overwritten before a save
        self.layouts: list[Layout] = []
        self.segments: list[Segment] = []
        self.patches: list[Patch] = []
        self._has_tail = False  # whether the last segment's file may grow: written by this process, and whole

    def append(self, rows_between: Callable[[int, int], Arrays], layout: Layout, *, begin: int, end: int) -> None:
        """Bring the rows up to time `end` to the disk and forget those before `begin`, which the ring has lost.

        `rows_between(start, stop)` gives the rows of these times, `[N, stop - start, ...]` per key.
        """
        self.drop_before(begin)
        start = max(self.saved_until, begin)
        if start > self.saved_until or not self.segments:
            self._has_tail = False  # times in between were overwritten: a segment has no holes
        if layout and (not self.layouts or list(self.layouts[-1].items()) != list(layout.items())):
            self.layouts.append(dict(layout))
            self._has_tail = False
        if start < end:
            has_tail, self._has_tail = self._has_tail, False  # a file that a failure left half-written is not continued
            self._write_rows(rows_between, start, end, has_tail)
            self._has_tail = True
            self.folder.sync()
        self.saved_until = end

    def _write_rows(self, rows_between: Callable[[int, int], Arrays], start: int, end: int, has_tail: bool) -> None:
        layout = self.layouts[-1]
        limit = rows_per_file(layout, num_envs=self.num_envs, slots_per_env=self.slots_per_env)
        row_bytes = record_dtype(layout).itemsize * self.num_envs
        segments = list(self.segments)
        with _Writer() as writer:
            while start < end:
                if not has_tail or segments[-1].blocks.rows >= limit:
                    blocks = new_blocks(row_bytes, first_row=start, most_rows=limit)
                    segments.append(Segment(self.folder.new_name("rows"), blocks, len(self.layouts) - 1))
                    has_tail = True
                last = segments[-1]
                stop = min(end, start + limit - last.blocks.rows)
                file = open(self.folder.path(last.file), "ab", buffering=0)  # noqa: SIM115 - closed by the writer
                for records in self._records(rows_between, layout, start, stop):
                    last = replace(last, blocks=writer.write(file, records, last.blocks))
                writer.close(file)
                segments[-1], start = last, stop
            writer.finish()
        self.segments = segments

    def _records(
        self, rows_between: Callable[[int, int], Arrays], layout: Layout, start: int, stop: int
    ) -> Iterator[np.ndarray]:
        """Rows as they lie in a file, `[times, N]`, a few megabytes at a time."""
        record = record_dtype(layout)
        times = max(1, _COPY_BYTES // max(record.itemsize * self.num_envs, 1))
        buffer = np.empty((min(times, stop - start), self.num_envs), record)
        for first in range(start, stop, times):
            records = buffer[: min(times, stop - first)]
            for key, values in rows_between(first, first + len(records)).items():
                records[key] = values.swapaxes(0, 1)
            yield records

    def drop_before(self, begin: int) -> None:
        """Forget blocks whose rows are all of earlier times, and what only they needed."""
        self.segments = [each.without(begin) for each in self.segments if each.stop_time > begin]
        begin_index = begin * self.num_envs
        self.patches = [each.without(begin_index) for each in self.patches if each.last_indices[-1] >= begin_index]
        used = sorted({segment.layout for segment in self.segments} | {len(self.layouts) - 1} - {-1})
        self.layouts = [self.layouts[index] for index in used]
        self.segments = [replace(segment, layout=used.index(segment.layout)) for segment in self.segments]

    # --- rows that changed after they were answered --------------------------------------------

    def patch(
        self, index: np.ndarray, values_of: Callable[[np.ndarray], Arrays], layout: Layout, *, replaces_all: bool
    ) -> None:
        """Bring newer values of single rows to the disk; `replaces_all` says that earlier patches are not needed.

        `values_of(index)` gives `[K, ...]` for each key of `layout`; `index` is sorted.
        """
        record = record_dtype({"index": ("int64", ()), **layout})
        name, blocks = self.folder.new_name("patch"), new_blocks(record.itemsize, first_row=0, most_rows=len(index))
        rows = max(1, _COPY_BYTES // record.itemsize)
        with _Writer() as writer:
            file = open(self.folder.path(name), "xb", buffering=0)  # noqa: SIM115 - closed by the writer
            for first in range(0, len(index), rows):
                part = index[first : first + rows]
                records = np.empty(len(part), record)
                records["index"] = part
                for key, values in values_of(part).items():
                    records[key] = values
                blocks = writer.write(file, records, blocks)
            writer.close(file)
            writer.finish()
        self.folder.sync()
        stops = range(blocks.block_rows, len(index) + blocks.block_rows, blocks.block_rows)
        last_indices = tuple(int(index[min(stop, len(index)) - 1]) for stop in stops)
        patch = Patch(name, blocks, tuple(layout), last_indices)
        self.patches = [patch] if replaces_all else [*self.patches, patch]

    @property
    def patched_rows(self) -> int:
        return sum(patch.blocks.rows for patch in self.patches)

    # --- state ---------------------------------------------------------------------------------

    def named_files(self) -> list[NamedFile]:
        """Every file that the state of this instant needs."""
        return [*self.segments, *self.patches]

    def get_state(self) -> StateTree:
        """The log as plain data."""
        return {
            "layouts": [
                [{"key": key, "dtype": dtype, "shape": list(shape)} for key, (dtype, shape) in layout.items()]
                for layout in self.layouts
            ],
            "segments": [asdict(segment) for segment in self.segments],
            "patches": [asdict(patch) for patch in self.patches],
        }

    def set_state(self, state: StateTree, *, saved_until: int) -> None:
        """Take over what a checkpoint names; rows to come go to new files."""
        state = _of_today(state)
        self.layouts = [
            {column["key"]: (column["dtype"], tuple(column["shape"])) for column in layout}
            for layout in state["layouts"]
        ]
        self.segments = [Segment(**{**each, "blocks": FileBlocks(**each["blocks"])}) for each in state["segments"]]
        self.patches = [Patch(**{**each, "blocks": FileBlocks(**each["blocks"])}) for each in state["patches"]]
        self.saved_until, self._has_tail = saved_until, False

    def read_rows(self, *, begin: int) -> Iterator[tuple[int, Arrays]]:
        """Every segment from time `begin` on, in blocks: their first time and their rows `[N, times, ...]`."""
        for segment in self.segments:
            record = record_dtype(self.layouts[segment.layout])
            for first, block in self.folder.read(segment):
                rows, time = np.frombuffer(block, record).reshape(-1, self.num_envs), segment.first_time + first
                lost = max(begin - time, 0)
                if lost < len(rows):
                    yield time + lost, {key: rows[key][lost:].swapaxes(0, 1) for key in record.names or ()}

    def read_patches(self, *, begin: int) -> Iterator[tuple[np.ndarray, np.ndarray, Arrays]]:
        """Written-back values, oldest first: times, environments and values `[K, ...]` per key."""
        for patch in self.patches:
            record = record_dtype({"index": ("int64", ()), **{key: self.layouts[-1][key] for key in patch.keys}})
            for _, block in self.folder.read(patch):
                rows = np.frombuffer(block, record)
                rows = rows[rows["index"] >= begin * self.num_envs]
                time, env_index = np.divmod(rows["index"], self.num_envs)
                yield time, env_index, {key: rows[key] for key in patch.keys}


def _of_today(state: StateTree) -> StateTree:
    """The state of a log as it is now; before blocks, each file had one checksum (`stretches`)."""
    if "segments" in state:
        return state

    def blocks_of(each: StateTree) -> StateTree:
        first_row = each.get("first_time", 0)
        blocks = FileBlocks.single(
            rows=each["rows"], byte_count=each["bytes"], crc32=each["crc32"], first_row=first_row
        )
        return {"file": each["file"], "blocks": asdict(blocks)}

    no_limit = (2**63 - 1,)
    return {
        "layouts": state["layouts"],
        "segments": [{**blocks_of(each), "layout": each["layout"]} for each in state["stretches"]],
        "patches": [
            {**blocks_of(each), "keys": tuple(each["keys"]), "last_indices": no_limit} for each in state["patches"]
        ],
    }
