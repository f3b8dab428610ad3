"""TensorBoard's event files, written without tensorboard: its import and its checksum in plain Python would cost a
short run more than all of its other logging.

    record = length (8 bytes) | checksum of length (4) | event | checksum of event (4)
    event  = protocol-buffer message: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.writers import AppendFile

LARGEST_FLOAT32 = 3.4028234663852886e38
CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, lowest bit first
BLOCK_BYTES = 512  # that the checksum takes at once
RESTARTED = b"\x08\x01"  # SessionLog(status=START)


class EventFile:
    """One event file. Readers know from its version how to drop points."""

    def __init__(self, directory: Path) -> None:
        self._file = AppendFile(next_event_path(directory))
        self._append(time.time(), 0, b"\x1a" + _sized(b"brain.Event:2"))

    def add_scalars(self, wall_time: float, step: int, tags: tuple[str, ...], numbers: Sequence[float]) -> None:
        """All of them in one event. TensorBoard keeps float32: what does not fit is shown as infinite."""
        pack, parts = _layout(tags)
        parts = parts.copy()
        parts[1::2] = numbers
        try:
            values = pack(*parts)
        except OverflowError:
            parts[1::2] = [math.copysign(math.inf, each) if abs(each) > LARGEST_FLOAT32 else each for each in numbers]
            values = pack(*parts)
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
def _layout(tags: tuple[str, ...]) -> tuple[Callable[..., bytes], list[Any]]:
    """The values of a summary, `value = 1 {tag = 1, simple_value = 2}` each: what packs their parts, and these parts
    with places for the numbers in between."""
    names = [b"\x0a" + _sized(tag.encode()) + b"\x15" for tag in tags]
    before = [b"\x0a" + varint(len(name) + 4) + name for name in names]
    pack = struct.Struct("<" + "".join(f"{len(text)}sf" for text in before)).pack
    return pack, [part for text in before for part in (text, 0.0)]


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
    """The checksum so far joins the block's first four bytes; then every bit contributes what its distance from the
    end says, and the contributions are joined by exclusive or. Of a shorter block the rest of the checksum moves on."""
    count = min(len(block), 4)
    head = (int.from_bytes(block[:count], "little") ^ crc) & (1 << 8 * count) - 1
    joined = np.frombuffer(head.to_bytes(count, "little") + block[count:], np.uint8)
    bits = np.unpackbits(joined, bitorder="little")
    return int(np.bitwise_xor.reduce(_contributions()[-len(bits) :] * bits)) ^ crc >> 8 * count


@cache
def _contributions() -> np.ndarray:
    """[8 * BLOCK_BYTES]: what a bit does to the checksum with so many bits behind it, the farthest first."""
    contributions, crc = [], CASTAGNOLI
    for _ in range(8 * BLOCK_BYTES):
        contributions.append(crc)
        crc = crc >> 1 ^ (crc & 1) * CASTAGNOLI
    return np.array(contributions[::-1], np.uint32)
