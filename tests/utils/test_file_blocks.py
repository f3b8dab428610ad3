"""Checksums of blocks: the same however a file grew, and damage is found in its own block only."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from rl_lab.utils.file_blocks import DamagedFileError, FileBlocks


def grown(content: bytes, chance: random.Random, **sizes: int) -> FileBlocks:
    """Blocks of a file that was written in pieces of whole rows."""
    blocks, row_bytes = FileBlocks(**sizes), sizes["row_bytes"]
    while blocks.bytes < len(content):
        count = chance.randrange(1, 12) * row_bytes
        blocks = blocks.extended(content[blocks.bytes : blocks.bytes + count])
    return blocks


def test_blocks_do_not_depend_on_how_the_file_grew(tmp_path: Path) -> None:
    chance = random.Random(0)
    content = chance.randbytes(3 * 50)
    (tmp_path / "file").write_bytes(content + b"newer")
    first, *others = (grown(content, chance, row_bytes=3, block_rows=7, first_row=100) for _ in range(5))
    assert all(each == first for each in others)
    assert first.rows == 50 and first.crc32[:8] == f"{zlib.crc32(content[:21]):08x}"
    assert [row for row, _ in first.read(tmp_path / "file")] == list(range(0, 50, 7))
    assert b"".join(data for _, data in first.read(tmp_path / "file")) == content
    late = replace(first, first_block=6)
    assert [(row, bytes(data)) for row, data in late.read(tmp_path / "file")] == [
        (42, content[126:147]),
        (49, content[147:]),
    ]


def test_every_flipped_bit_is_found_by_who_needs_it_and_by_nobody_else(tmp_path: Path) -> None:
    chance, file = random.Random(1), tmp_path / "file"
    content = chance.randbytes(2 * 23)
    blocks = grown(content, chance, row_bytes=2, block_rows=5)
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        number = bit // 8 // 10
        first, last = 5 * number, min(5 * number + 4, 22)
        with pytest.raises(DamagedFileError, match=rf"^block {number} \(rows {first} to {last}\) has changed since"):
            list(blocks.read(file))
        later = replace(blocks, first_block=number + 1)
        assert b"".join(data for _, data in later.read(file)) == content[10 * (number + 1) :]


def test_missing_and_short_files_are_told_apart(tmp_path: Path) -> None:
    blocks = FileBlocks(row_bytes=2, block_rows=5).extended(b"123456")
    with pytest.raises(DamagedFileError, match="it is missing"):
        list(blocks.read(tmp_path / "file"))
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(DamagedFileError, match="it has 5 bytes where 6 are needed"):
        list(blocks.read(tmp_path / "file"))
    with pytest.raises(DamagedFileError, match=r"it cannot be read \(Is a directory\)"):
        list(blocks.read(tmp_path))


@pytest.mark.parametrize(
    "change", [{"row_bytes": 0}, {"block_rows": -1}, {"rows": 99}, {"crc32": "zz" * 4}, {"first_block": -1}]
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, int]) -> None:
    blocks = FileBlocks(row_bytes=2, block_rows=5).extended(b"123456")
    with pytest.raises(ValueError, match="cannot be blocks of a file"):
        replace(blocks, **change)  # type: ignore[arg-type]
