"""Files of rows that only grow, so that a checkpoint pays for what is new and for nothing else.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from rl_lab.buffers.storage.rows import Layout
from rl_lab.types import RunError
from rl_lab.utils.file_blocks import DamagedFileError, FileBlocks

_FILE = re.compile(r"(rows|patch|mutable)_(\d{6,})\.bin")
_FILE_BYTES = 64 * 2**20  # of rows: a file that outlives its rows in the ring costs little
_LEAST_FILES = 8  # that a full ring is spread over, so that old rows free their space early
_BLOCK_BYTES = 2**20  # under one checksum
_LEAST_BLOCKS = 8  # of a file
COPY_BYTES = 4 * 2**20  # copied, checksummed and written at once: it stays in the processor's cache


@dataclass(frozen=True)
class NamedFile:
    """What a checkpoint needs outside its own folder: some blocks of a file."""

    file: str
    blocks: FileBlocks

    def since(self, first_block: int) -> Self:
        """Without the blocks before this one."""
        return replace(self, blocks=replace(self.blocks, first_block=first_block))


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


@dataclass(frozen=True)
class Patch(NamedFile):
    """A file of newer values of single rows, sorted by their index, time * N + environment."""

    keys: tuple[str, ...]
    last_indices: tuple[int, ...]  # of each block


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
    """The files of one buffer: names that were never used before, and the removal of files that are not needed."""

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

    def read(self, named: NamedFile) -> Iterator[tuple[int, bytearray]]:
        """Every needed block of a file: its first row, counted from the file's beginning, and its bytes."""
        path = self.path(named.file)
        try:
            yield from named.blocks.read(path)
        except DamagedFileError as error:
            raise RunError(f"{path}: {error}, but the checkpoint needs its rows.") from error


def sync(path: Path) -> None:
    """Wait until the disk has what was written to a file, also through a mapping, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_fully(target: BinaryIO, block: memoryview) -> None:
    while block:
        block = block[target.write(block) :]


def _sync_and_close(file: BinaryIO) -> None:
    with file:
        os.fsync(file.fileno())


Append = Callable[[Path, Iterable[np.ndarray], FileBlocks], FileBlocks]


@contextmanager
def appending() -> Iterator[Append]:
    """What appends records to a file and returns the file's blocks with them.

    Files are written while checksums are computed, and one reaches the disk while the next is written.
    """
    closing: list[Future[None]] = []  # at most one
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="row_log") as threads:

        def append(path: Path, parts: Iterable[np.ndarray], blocks: FileBlocks) -> FileBlocks:
            file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed when the disk has it
            for records in parts:
                data = memoryview(records.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                written = threads.submit(_write_fully, file, data)
                blocks = blocks.extended(data)
                written.result()
            while closing:
                closing.pop().result()
            closing.append(threads.submit(_sync_and_close, file))
            return blocks

        yield append
    for each in closing:
        each.result()
