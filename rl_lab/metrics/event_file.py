"""TensorBoard's event files, written without tensorboard: its import and its checksum in plain Python would cost a
short run more than all of its other logging.

    record = length (8 bytes) | checksum of length (4) | event | checksum of event (4)
    event  = protocol-buffer message: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from rl_lab.metrics.writers import AppendFile

LARGEST_FLOAT32 = 3.4028234663852886e38
CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, lowest bit first
BLOCK_BYTES = 512  # that one look into the checksum's table covers
SHORT_BYTES = 16  # for which plain Python is faster
RESTARTED = b"\x08\x01"  # SessionLog(status=START)


class EventFile:
    """One event file. Readers know from its version how to drop points."""

    def __init__(self, directory: Path) -> None:
        self._file = AppendFile(next_event_path(directory))
        self._append(time.time(), 0, b"\x1a" + _sized(b"brain.Event:2"))

    def add_scalars(self, wall_time: float, step: int, scalars: Mapping[str, float]) -> None:
        """All of them in one event."""
        values = b"".join([_tagged(tag) + _float32(value) for tag, value in scalars.items()])
        self.add_summary(wall_time, step, values)

    def add_summary(self, wall_time: float, step: int, summary: bytes) -> None:
        """An encoded `Summary` message."""
        self._append(wall_time, step, b"\x2a" + _sized(summary))

    def purge(self, wall_time: float, from_step: int) -> None:
        """Make TensorBoard drop earlier points from this step on."""
        self._append(wall_time, from_step, b"\x3a" + _sized(RESTARTED))

    def close(self) -> None:
        self._file.close()

    def _append(self, wall_time: float, step: int, what: bytes) -> None:
        event = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + varint(step) + what
        length = struct.pack("<Q", len(event))
        self._file.append(length + masked_checksum(length) + event + masked_checksum(event))


def next_event_path(directory: Path) -> Path:
    """A name that sorts after every event file there is: TensorBoard reads files in that order, clock or no clock."""
    begun = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*")]
    seconds = max([int(time.time()), *(int(text) + 1 for text in begun if text.isdecimal())])
    return directory / f"events.out.tfevents.{seconds:010d}.rl_lab"


# --- protocol buffers


def varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; every byte but the last has its highest bit set."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _sized(message: bytes) -> bytes:
    return varint(len(message)) + message


@cache
def _tagged(tag: str) -> bytes:
    """A value of a summary up to its number: `value = 1 {tag = 1, simple_value = 2}`."""
    name = b"\x0a" + _sized(tag.encode()) + b"\x15"
    return b"\x0a" + varint(len(name) + 4) + name


def _float32(value: float) -> bytes:
    """TensorBoard keeps float32; what does not fit is shown as infinite."""
    return struct.pack("<f", math.copysign(math.inf, value) if abs(value) > LARGEST_FLOAT32 else value)


# --- CRC-32C


def masked_checksum(data: bytes) -> bytes:
    """As record files keep it: rotated and shifted, so that a checksum of checksums stays one."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for start in range(0, len(data), BLOCK_BYTES):
        crc = _advanced(crc, data[start : start + BLOCK_BYTES])
    return crc ^ 0xFFFFFFFF


def _advanced(crc: int, block: bytes) -> int:
    """The checksum so far joins the block's first four bytes; then every byte contributes at its distance from the
    end, and the contributions are joined by exclusive or, in whatever order."""
    table = _table_by_distance()
    if len(block) <= SHORT_BYTES:
        for byte in block:
            crc = int(table[0, (crc ^ byte) & 0xFF]) ^ crc >> 8
        return crc
    values = np.frombuffer(block, np.uint8).copy()
    values[:4] ^= np.frombuffer(struct.pack("<I", crc), np.uint8)
    return int(np.bitwise_xor.reduce(table[np.arange(len(block) - 1, -1, -1), values]))


@cache
def _table_by_distance() -> np.ndarray:
    """[BLOCK_BYTES, 256]: what each byte does to the checksum with so many bytes behind it."""
    table = np.empty((BLOCK_BYTES, 256), np.uint32)
    table[0] = np.arange(256)
    for _ in range(8):
        table[0] = table[0] >> 1 ^ (table[0] & 1) * np.uint32(CASTAGNOLI)
    for distance in range(1, BLOCK_BYTES):
        nearer = table[distance - 1]
        table[distance] = table[0][nearer & 0xFF] ^ nearer >> 8
    return table
