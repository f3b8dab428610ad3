"""Demonstrations in the zarr layout (version 2) in which robot data are published, such as Diffusion Policy's Push-T.

    pusht.zarr/   data/state/          .zarray, 0.0, 1.0, ...    [T, 5]          numbers of all episodes in a row
                  data/action/         .zarray, 0.0, 1.0, ...    [T, 2]          in the environment's own units
                  data/img/            .zarray, 0.0.0.0, ...     [T, 96, 96, 3]
                  meta/episode_ends/   .zarray, 0                [episodes]      the step after each episode's last

Arrays are read chunk by chunk; nothing in such a folder is executed. Rewards are not part of the layout.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.dataset import RowSource, as_spec, file_digest, to_policy_actions
from rl_lab.buffers.storage.rows import Arrays
from rl_lab.types import ConfigError, EnvSpec, MissingExtraError, did_you_mean

ARRAYS = {"vector": "state", "image": "img", "pixels": "img", "agent_pos": "state[:2]"}
"""Which array holds an observation key, where none has its name: those of Push-T. `[:2]`: its first two numbers."""

COMPRESSORS = ("blosc", "zlib", "gzip", "zstd", "lz4", "bz2", "lzma")  # others, such as pickle, could run code
_LAYOUT = "the layout is data/NAME for every array of [steps, ...], data/action, and meta/episode_ends"
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError, RecursionError)


def is_zarr(path: Path) -> bool:
    return path.suffix == ".zarr" or (path / ".zgroup").is_file() or path.name.endswith(".zarr.zip")


def open_zarr(path: Path, spec: EnvSpec, arrays: Mapping[str, str] | None = None) -> RowSource:
    """Each episode's L steps as L + 1 rows; the last one repeats the last observation, where no action was taken."""
    name = str(path)
    if path.is_file():
        raise ConfigError(f"Dataset {name} is a packed file: unpack it with `unzip {name}` and name the .zarr folder.")
    if (path / "zarr.json").is_file():
        raise ConfigError(f"Dataset {name} has zarr's version 3: write it with zarr_format=2, which is read here.")
    chosen = {key: _Column.of(path, key, arrays or {}) for key in spec.observation}
    actions, ends = ZarrArray.open(path / "data" / "action"), ZarrArray.open(path / "meta" / "episode_ends").rows()
    for array in [actions, *(column.array for column in chosen.values())]:
        if len(ends) == 0 or ends.ndim != 1 or (np.diff(ends, prepend=0) < 1).any() or ends[-1] != array.shape[0]:
            raise ConfigError(
                f"Dataset {name}: meta/episode_ends is {_shortly(ends)}; it holds the step after each episode's last, "
                f"rising, and its last one is the {array.shape[0]} steps of data/{array.path.name}."
            )

    def blocks() -> Iterator[Arrays]:
        for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            rows = np.minimum(np.arange(end - begin + 1), end - begin - 1)
            last = np.arange(end - begin + 1) == end - begin
            answer = to_policy_actions(actions.rows(begin, end), spec.action, name=name)
            yield {
                **{key: column.read(begin, end, spec)[rows] for key, column in chosen.items()},
                "reward": np.zeros(len(rows), np.float32),
                "is_first": np.arange(len(rows)) == 0,
                "is_last": last,
                "is_terminal": np.zeros(len(rows), bool),
                "action": np.where(last.reshape(-1, *[1] * (answer.ndim - 1)), 0, answer[rows]).astype(answer.dtype),
            }

    used = [actions.path, path / "meta" / "episode_ends", *(column.array.path for column in chosen.values())]
    digest = "".join(f"{file.name}{file_digest(file)}" for folder in used for file in sorted(folder.iterdir()))
    return RowSource(name, int(ends[-1]) + len(ends), blocks, hashlib.sha256(digest.encode()).hexdigest())


@dataclass(frozen=True)
class _Column:
    """An observation key: an array, or the first numbers of one."""

    key: str
    array: ZarrArray
    numbers: int | None

    @classmethod
    def of(cls, path: Path, key: str, arrays: Mapping[str, str]) -> _Column:
        there = sorted(each.name for each in (path / "data").iterdir()) if (path / "data").is_dir() else []
        named = arrays.get(key) or (key if key in there else ARRAYS.get(key, key))
        match = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", named)
        if match is None or match[1] not in there:
            raise ConfigError(
                f"Dataset {path} has no data/{named} for the observation '{key}'.{did_you_mean(named, there)} It has: "
                f"{', '.join(there) or 'nothing'}. Write which array it is: `arrays: {{{key}: NAME}}`."
            )
        return cls(key, ZarrArray.open(path / "data" / match[1]), int(match[2]) if match[2] else None)

    def read(self, begin: int, end: int, spec: EnvSpec) -> np.ndarray:
        values = self.array.rows(begin, end)
        values = values if self.numbers is None else values[:, : self.numbers]
        if spec.observation[self.key].dtype == "uint8" and values.dtype.kind == "f":  # as Push-T's images are stored
            if not ((values == np.floor(values)) & (values >= 0) & (values <= 255)).all():
                raise ConfigError(
                    f"Dataset {self.array.path} holds {values.dtype} from {values.min():g} to {values.max():g}, but "
                    f"'{self.key}' is an image of bytes: store whole numbers from 0 to 255."
                )
            values = values.astype(np.uint8)
        return as_spec(values, self.key, spec)


@dataclass
class ZarrArray:
    """One array: a grid of chunk files, each a compressed block of the same shape, the outermost ones filled up."""

    path: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str
    separator: str
    fill_value: Any
    codec: Any
    _held: tuple[int, np.ndarray] | None = field(default=None, repr=False)  # the rows decoded last

    @classmethod
    def open(cls, path: Path) -> ZarrArray:
        """From the description in `.zarray`; what could run code or is no array of numbers is refused."""
        file = path / ".zarray"
        if not file.is_file():
            raise ConfigError(f"Dataset {path.parents[1]} has no {path.parent.name}/{path.name}/.zarray: {_LAYOUT}.")
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            shape, chunks = tuple(map(int, about["shape"])), tuple(map(int, about["chunks"]))
            dtype, order, compressor = np.dtype(about["dtype"]), str(about["order"]), about["compressor"]
            is_whole = len(shape) == len(chunks) > 0 and min(shape) >= 0 and min(chunks) >= 1 and order in ("C", "F")
            if not is_whole or dtype.kind not in "biuf" or about["filters"] or about["zarr_format"] != 2:
                raise ValueError("no plain array of numbers in zarr's version 2")
            if compressor is not None and compressor["id"] not in COMPRESSORS:
                raise ValueError(f"compressor {compressor['id']!r}, known are {', '.join(COMPRESSORS)}")
        except _DAMAGED as error:
            raise ConfigError(f"Dataset {path}: .zarray cannot be read ({error}). Write the array again.") from error
        separator = str(about.get("dimension_separator", "."))
        return cls(path, shape, chunks, dtype, order, separator, about["fill_value"], _codec(compressor))

    def rows(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Some of the entries along the first axis."""
        end, size = self.shape[0] if end is None else end, self.chunks[0]
        parts = []
        for number in range(begin // size, -(-end // size)):
            if self._held is None or self._held[0] != number:
                self._held = number, self._decode(number)
            first = number * size
            parts.append(self._held[1][max(begin - first, 0) : end - first])
        return np.concatenate(parts) if parts else np.zeros((0, *self.shape[1:]), self.dtype)

    def _decode(self, number: int) -> np.ndarray:
        """All chunks that hold the same rows, side by side."""
        first = number * self.chunks[0]
        held = np.full((min(self.chunks[0], self.shape[0] - first), *self.shape[1:]), self._missing(), self.dtype)
        grid = [range(-(-size // chunk)) for size, chunk in zip(self.shape[1:], self.chunks[1:], strict=True)]
        for place in product(*grid):
            file = self.path / self.separator.join(map(str, (number, *place)))
            if not file.is_file():
                continue  # a chunk of nothing but fill_value is not stored
            corner = [index * size for index, size in zip(place, self.chunks[1:], strict=True)]
            part = held[
                (slice(None), *(slice(at, at + size) for at, size in zip(corner, self.chunks[1:], strict=True)))
            ]
            part[...] = self._read_chunk(file)[tuple(slice(size) for size in part.shape)]
        return held

    def _missing(self) -> Any:
        if self.fill_value is None:
            return 0
        return float(self.fill_value) if isinstance(self.fill_value, str) else self.fill_value  # "NaN", "Infinity"

    def _read_chunk(self, file: Path) -> np.ndarray:
        chunk = np.empty(prod(self.chunks), self.dtype)
        try:
            stored = file.read_bytes()
            values = stored if self.codec is None else self.codec.decode(stored, out=chunk.view(np.uint8))
            return np.frombuffer(values, self.dtype).reshape(self.chunks, order=self.order)  # type: ignore[call-overload]
        except _DAMAGED as error:
            raise ConfigError(
                f"Dataset {self.path}: chunk {file.name} is cut off or damaged ({error}). Copy the folder again."
            ) from error


def _codec(compressor: Mapping[str, Any] | None) -> Any:
    if compressor is None:
        return None
    try:
        import numcodecs
    except ImportError as error:
        raise MissingExtraError(
            f"This zarr array is compressed with {compressor['id']}, which needs an extra that is not installed "
            f"({error}). Install it with: pip install 'rl-lab[offline]'"
        ) from error
    return numcodecs.get_codec(dict(compressor))


def _shortly(ends: np.ndarray) -> str:
    return f"{ends.tolist()[:3]} ... {ends.tolist()[-3:]}" if ends.size > 6 else str(ends.tolist())
