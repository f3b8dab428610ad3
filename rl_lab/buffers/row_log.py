"""Rows on the disk: files that only ever grow, so that a checkpoint pays for what is new and for nothing else.

    replay/<name>/rows_000001.bin    rows of times 0 .. 4095        a file holds records [rows, N], one per environment,
                  rows_000002.bin    rows of times 4096 .. 6143     each with all keys of a row side by side
                  patch_000003.bin   rows written back since: where they are and their new values

An answered row never changes, so a checkpoint names a beginning of each file (a `Stretch`) and its checksum. What the
file holds beyond is newer than the checkpoint and not read. After a restore new rows go to a new file: going back to an
earlier checkpoint spoils no later one, and a process killed while it writes leaves bytes that nobody names.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from rl_lab.types import RunError, StateTree

Arrays = dict[str, np.ndarray]
Layout = dict[str, tuple[str, tuple[int, ...]]]  # key -> dtype and shape of one row of one environment

_FILE = re.compile(r"(rows|patch|mutable)_(\d{6,})\.bin")
_FILE_BYTES = 64 * 2**20  # of rows: a file that outlives its rows in the ring costs little
_BLOCK_BYTES = 4 * 2**20  # what is copied, checked and written at once: it stays in the processor's cache
_LEAST_FILES = 8  # that a full ring is spread over, so that old rows free their space early


@dataclass(frozen=True)
class Stretch:
    """The beginning of a file that holds the rows of consecutive times."""

    file: str
    layout: int  # which of the log's layouts its records have
    first_time: int
    rows: int  # times; each is a row of every environment
    bytes: int
    crc32: int

    @property
    def stop_time(self) -> int:
        return self.first_time + self.rows


@dataclass(frozen=True)
class Patch:
    """A file of newer values of `rows` single rows, named by time * N + environment."""

    file: str
    keys: tuple[str, ...]
    rows: int
    bytes: int
    crc32: int


@dataclass(frozen=True)
class NamedFile:
    """What a checkpoint needs outside its own folder: the beginning of a file, and the checksum of that."""

    file: str
    bytes: int
    crc32: int


@runtime_checkable
class KeepsFiles(Protocol):
    """A buffer whose state needs files of its own folder."""

    def named_files(self) -> list[NamedFile]: ...

    def remove_files_but(self, named: set[str]) -> None: ...


def record_dtype(layout: Mapping[str, tuple[str, Sequence[int]]]) -> np.dtype:
    """One row of one environment as one item: the keys side by side, nothing between them."""
    return np.dtype([(key, dtype, tuple(shape)) for key, (dtype, shape) in layout.items()])


def rows_per_file(layout: Layout, *, num_envs: int, slots_per_env: int) -> int:
    """Times that a file holds: about 64 MiB, and no more than an eighth of the ring."""
    time_bytes = max(record_dtype(layout).itemsize * num_envs, 1)
    return max(1, min(_FILE_BYTES // time_bytes, -(-slots_per_env // _LEAST_FILES)))


# --- the folder --------------------------------------------------------------------------------


class LogFolder:
    """The files of one buffer: names that were never used before, and the removal of those nobody needs."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._last_number = 0

    def new_name(self, kind: str) -> str:
        """A name that no checkpoint can mean, whatever earlier processes left here."""
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
        """Wait until the disk knows the names of new files."""
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def blocks(self, file: str, byte_count: int, crc32: int, *, item_bytes: int) -> Iterator[bytearray]:
        """The first bytes of a file, some whole items at a time; refused when they are not those that were written."""
        path = self.path(file)
        seen, checksum = 0, 0
        try:
            with open(path, "rb", buffering=0) as source:
                while seen < byte_count:
                    size = min(max(_BLOCK_BYTES // item_bytes, 1) * item_bytes, byte_count - seen)
                    block = bytearray(size)
                    count = _read_fully(source, block)
                    if count < size:
                        raise RunError(f"{path} has {seen + count} bytes where the checkpoint needs {byte_count}.")
                    checksum, seen = zlib.crc32(block, checksum), seen + size
                    yield block
        except FileNotFoundError:
            raise RunError(f"{path} is missing: the checkpoint needs its rows.") from None
        if checksum != crc32:
            raise RunError(f"{path} has changed since it was written (crc32 differs).")


def _read_fully(source: BinaryIO, block: bytearray) -> int:
    view, count = memoryview(block), 0
    while count < len(block):
        got = source.readinto(view[count:])  # type: ignore[attr-defined]
        if not got:
            break
        count += got
    return count


def _write_fully(target: BinaryIO, block: memoryview) -> None:
    while block:
        block = block[target.write(block) :]


def _sync_and_close(file: BinaryIO) -> None:
    with file:
        os.fsync(file.fileno())


class _Writer:
    """Writes blocks while their checksum is computed, and lets one file reach the disk while the next is written."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="row_log")
        self._closing: Future[None] | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True)

    def write(self, file: BinaryIO, block: np.ndarray, checksum: int) -> int:
        """The checksum with this block."""
        data = memoryview(block.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        written = self._threads.submit(_write_fully, file, data)
        checksum = zlib.crc32(data, checksum)
        written.result()
        return checksum

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
        self.stretches: list[Stretch] = []
        self.patches: list[Patch] = []
        self._tail: str | None = None  # the file that may still grow: written by this process, and whole

    def append(self, rows_between: Callable[[int, int], Arrays], layout: Layout, *, begin: int, end: int) -> None:
        """Bring the rows up to time `end` to the disk and forget those before `begin`, which the ring has lost.

        `rows_between(start, stop)` gives the rows of these times, `[N, stop - start, ...]` per key.
        """
        self.drop_before(begin)
        start = max(self.saved_until, begin)
        if start > self.saved_until or not self.stretches:
            self._tail = None  # times in between were overwritten: a stretch has no holes
        if layout and (not self.layouts or list(self.layouts[-1].items()) != list(layout.items())):
            self.layouts.append(dict(layout))
            self._tail = None
        if start < end:
            tail, self._tail = self._tail, None  # a failure half-way leaves a file that is not continued
            self._tail = self._write_rows(rows_between, start, end, tail)
            self.folder.sync()
        self.saved_until = end

    def _write_rows(self, rows_between: Callable[[int, int], Arrays], start: int, end: int, tail: str | None) -> str:
        layout = self.layouts[-1]
        limit = rows_per_file(layout, num_envs=self.num_envs, slots_per_env=self.slots_per_env)
        stretches = list(self.stretches)
        with _Writer() as writer:
            while start < end:
                if tail is None or stretches[-1].rows >= limit:
                    tail = self.folder.new_name("rows")
                    stretches.append(Stretch(tail, len(self.layouts) - 1, start, 0, 0, 0))
                stop = min(end, start + limit - stretches[-1].rows)
                file = open(self.folder.path(tail), "ab", buffering=0)  # noqa: SIM115 - closed once it is on the disk
                for block in self._records(rows_between, layout, start, stop):
                    last = stretches[-1]
                    checksum = writer.write(file, block, last.crc32)
                    stretches[-1] = replace(
                        last, rows=last.rows + len(block), bytes=last.bytes + block.nbytes, crc32=checksum
                    )
                writer.close(file)
                start = stop
            writer.finish()
        self.stretches = stretches
        assert tail is not None
        return tail

    def _records(
        self, rows_between: Callable[[int, int], Arrays], layout: Layout, start: int, stop: int
    ) -> Iterator[np.ndarray]:
        """Rows as they lie in a file, `[times, N]`, a few megabytes at a time."""
        record = record_dtype(layout)
        times = max(1, _BLOCK_BYTES // max(record.itemsize * self.num_envs, 1))
        buffer = np.empty((min(times, stop - start), self.num_envs), record)
        for first in range(start, stop, times):
            block = buffer[: min(times, stop - first)]
            for key, values in rows_between(first, first + len(block)).items():
                block[key] = values.swapaxes(0, 1)
            yield block

    def drop_before(self, begin: int) -> None:
        """Forget stretches whose rows are all gone, and what only they needed."""
        kept = [stretch for stretch in self.stretches if stretch.stop_time > begin]
        if len(kept) < len(self.stretches):
            self.stretches = kept
            self._renumber_layouts()

    def _renumber_layouts(self) -> None:
        used = sorted({stretch.layout for stretch in self.stretches} | {len(self.layouts) - 1})
        self.layouts = [self.layouts[index] for index in used]
        self.stretches = [replace(stretch, layout=used.index(stretch.layout)) for stretch in self.stretches]

    # --- rows that changed after they were answered --------------------------------------------

    def patch(
        self, index: np.ndarray, values_of: Callable[[np.ndarray], Arrays], layout: Layout, *, replaces_all: bool
    ) -> None:
        """Bring newer values of single rows to the disk; `replaces_all` says that earlier patches are not needed.

        `values_of(index)` gives `[K, ...]` for each key of `layout`; rows are named by time * N + environment.
        """
        record = record_dtype({"index": ("int64", ()), **layout})
        name = self.folder.new_name("patch")
        checksum, times = 0, max(1, _BLOCK_BYTES // record.itemsize)
        with _Writer() as writer:
            file = open(self.folder.path(name), "xb", buffering=0)  # noqa: SIM115 - closed once it is on the disk
            for first in range(0, len(index), times):
                part = index[first : first + times]
                block = np.empty(len(part), record)
                block["index"] = part
                for key, values in values_of(part).items():
                    block[key] = values
                checksum = writer.write(file, block, checksum)
            writer.close(file)
            writer.finish()
        self.folder.sync()
        patch = Patch(name, tuple(layout), len(index), len(index) * record.itemsize, checksum)
        self.patches = [patch] if replaces_all else [*self.patches, patch]

    @property
    def patched_rows(self) -> int:
        return sum(patch.rows for patch in self.patches)

    # --- state ---------------------------------------------------------------------------------

    def named_files(self) -> list[NamedFile]:
        """Every file that the state of this instant needs."""
        return named_files(self.stretches, self.patches)

    def remove_all_but(self, named: set[str]) -> None:
        """Remove the files that neither this log nor a checkpoint (`named`) needs."""
        self.folder.remove_all_but(named | {each.file for each in self.named_files()})

    def get_state(self) -> StateTree:
        return log_state(self.layouts, self.stretches, self.patches)

    def set_state(self, state: StateTree, *, saved_until: int) -> None:
        """Take over what a checkpoint names; rows to come go to new files."""
        self.layouts, self.stretches, self.patches = parse_log_state(state)
        self.saved_until, self._tail = saved_until, None

    def read_rows(self, *, begin: int) -> Iterator[tuple[int, Arrays]]:
        """Every stretch from time `begin` on, in blocks: their first time and their rows `[N, times, ...]`."""
        yield from read_rows(self.folder, self.layouts, self.stretches, num_envs=self.num_envs, begin=begin)

    def read_patches(self, *, begin: int) -> Iterator[tuple[np.ndarray, np.ndarray, Arrays]]:
        """Written-back values, oldest first: times, environments and values `[K, ...]` per key."""
        yield from read_patches(self.folder, self.layouts[-1], self.patches, num_envs=self.num_envs, begin=begin)


def named_files(stretches: Sequence[Stretch], patches: Sequence[Patch]) -> list[NamedFile]:
    rows = [NamedFile(each.file, each.bytes, each.crc32) for each in stretches]
    return rows + [NamedFile(each.file, each.bytes, each.crc32) for each in patches]


def log_state(layouts: Sequence[Layout], stretches: Sequence[Stretch], patches: Sequence[Patch]) -> StateTree:
    """The log as plain data."""
    return {
        "layouts": [
            [{"key": key, "dtype": dtype, "shape": list(shape)} for key, (dtype, shape) in layout.items()]
            for layout in layouts
        ],
        "stretches": [asdict(stretch) for stretch in stretches],
        "patches": [{**asdict(patch), "keys": list(patch.keys)} for patch in patches],
    }


def parse_log_state(state: StateTree) -> tuple[list[Layout], list[Stretch], list[Patch]]:
    layouts: list[Layout] = [
        {column["key"]: (column["dtype"], tuple(column["shape"])) for column in layout} for layout in state["layouts"]
    ]
    stretches = [Stretch(**each) for each in state["stretches"]]
    return layouts, stretches, [Patch(**{**each, "keys": tuple(each["keys"])}) for each in state["patches"]]


def read_rows(
    folder: LogFolder, layouts: Sequence[Layout], stretches: Sequence[Stretch], *, num_envs: int, begin: int
) -> Iterator[tuple[int, Arrays]]:
    for stretch in stretches:
        record = record_dtype(layouts[stretch.layout])
        time = stretch.first_time
        for block in folder.blocks(
            stretch.file, stretch.bytes, stretch.crc32, item_bytes=max(record.itemsize * num_envs, 1)
        ):
            rows = np.frombuffer(block, record).reshape(-1, num_envs)
            lost = min(max(begin - time, 0), len(rows))
            if lost < len(rows):
                yield time + lost, {key: rows[key][lost:].swapaxes(0, 1) for key in layouts[stretch.layout]}
            time += len(rows)


def read_patches(
    folder: LogFolder, layout: Layout, patches: Sequence[Patch], *, num_envs: int, begin: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Arrays]]:
    for patch in patches:
        record = record_dtype({"index": ("int64", ()), **{key: layout[key] for key in patch.keys}})
        for block in folder.blocks(patch.file, patch.bytes, patch.crc32, item_bytes=record.itemsize):
            rows = np.frombuffer(block, record)
            rows = rows[rows["index"] >= begin * num_envs]
            time, env_index = np.divmod(rows["index"], num_envs)
            yield time, env_index, {key: rows[key] for key in patch.keys}


def missing_log(state: Mapping[str, Any]) -> RunError:
    """A buffer without a folder cannot read a state whose rows lie in one."""
    count = len(state["stretches"])
    return RunError(
        f"This replay has no directory, but the saved rows lie in {count} files of one: build it with `directory`, the "
        "folder replay/<name> of the run."
    )
