"""Files of rows that only grow, checksummed in blocks: a damaged block concerns only who needs its rows.

file    | block 0 | block 1 | block 2 | blo      `block_rows` rows each; the last block ends with the newest row
crc32    1c291ca3  9e0f7d51  5d3c0b1a  77..      of each block, eight hexadecimal digits one after the other
needed             from `first_block` on, up to `rows`; rows beyond are newer and not read
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

_DIGITS = 8  # of a crc32


class DamagedFileError(Exception):
    """A file lacks rows or holds other rows than were written; the message names the block and its rows."""


@dataclass(frozen=True)
class FileBlocks:
    """The first `rows` rows of a file."""

    row_bytes: int
    block_rows: int
    first_row: int = 0  # the number of the file's first row, for messages
    rows: int = 0
    crc32: str = ""
    first_block: int = 0

    def __post_init__(self) -> None:
        counts = (self.row_bytes - 1, self.block_rows - 1, self.first_row, self.rows, self.first_block)
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        if not are_counts or not re.fullmatch(rf"([0-9a-f]{{8}}){{{-(-self.rows // self.block_rows)}}}", self.crc32):
            raise ValueError(f"{self} cannot be blocks of a file")

    @classmethod
    def single(cls, *, byte_count: int, crc32: int, rows: int | None = None, first_row: int = 0) -> Self:
        """One checksum for everything, as older checkpoints have it; a row is a byte where `rows` is not known."""
        rows = byte_count if rows is None else rows
        return cls(byte_count // rows, rows, first_row, rows, f"{crc32:08x}")

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def extended(self, data: Any) -> Self:
        """With the rows in `data` (a buffer of bytes) appended."""
        view, block_bytes, position, crc32 = memoryview(data), self.block_rows * self.row_bytes, self.bytes, self.crc32
        while view:
            offset = position % block_bytes
            part = view[: block_bytes - offset]
            before, crc32 = (int(crc32[-_DIGITS:], 16), crc32[:-_DIGITS]) if offset else (0, crc32)
            crc32 += f"{zlib.crc32(part, before):08x}"
            position, view = position + len(part), view[len(part) :]
        return replace(self, rows=position // self.row_bytes, crc32=crc32)

    def read(self, path: Path) -> Iterator[tuple[int, bytearray]]:
        """Each needed block, verified: the number of its first row in the file, and its bytes."""
        try:
            # A pipe in the place of the file must not block: it has no bytes.
            with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.bytes:
                    raise DamagedFileError(f"it has {size} bytes where {self.bytes} are needed")
                file.seek(self.first_block * self.block_rows * self.row_bytes)
                for block in range(self.first_block, -(-self.rows // self.block_rows)):
                    first = block * self.block_rows
                    count = min(self.block_rows, self.rows - first)
                    data = bytearray(count * self.row_bytes)
                    view = memoryview(data)
                    while view and (got := file.readinto(view)):
                        view = view[got:]
                    if zlib.crc32(data) != int(self.crc32[block * _DIGITS : (block + 1) * _DIGITS], 16):
                        begin, unit = self.first_row + first, "rows" if self.row_bytes > 1 else "bytes"
                        rows = f"{unit} {begin} to {begin + count - 1}"
                        raise DamagedFileError(f"block {block} ({rows}) has changed since it was written")
                    yield first, data
        except FileNotFoundError:
            raise DamagedFileError("it is missing") from None
        except OSError as error:
            raise DamagedFileError(f"it cannot be read ({error.strerror})") from error
