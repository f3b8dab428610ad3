"""Datasets on disk: a folder of compressed chunks with a description, or one plain npz file.

    data/cartpole/   dataset.json        what the rows are, where they come from, every chunk with its checksum
                     chunk_00000.npz     whole episodes, one after the other: observation keys, reward, is_first,
                     chunk_00001.npz     is_last, is_terminal, action, each [rows, ...]

Rows follow the one data convention (docs/time_steps.md). Every episode ends in an is_last row: where collecting
stopped in mid-episode the last row is marked as a time limit would be, so that nothing is learnt across the seam.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from rl_lab.buffers.budget import free_memory_bytes, size
from rl_lab.buffers.storage.rows import Arrays
from rl_lab.types import ROW_KEYS, ActionSpec, ConfigError, EnvSpec, did_you_mean

SCHEMA_VERSION = 1
DESCRIPTION_FILE = "dataset.json"
CHUNK_BYTES = 64 * 2**20  # before compression: what reading or writing holds in memory at a time
_BLOCK_ROWS = 65_536
_MOST_DESCRIPTION_BYTES = 2**26
_PLAIN_KEYS = ("observations", "next_observations", "actions", "rewards", "terminations", "truncations")

# What zipfile, zlib and numpy raise for bytes that are no npz file of plain arrays; anything else is a bug of ours.
_NPZ_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, TypeError),
    *(NotImplementedError, RuntimeError, SyntaxError, tokenize.TokenError),
)


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read once from the beginning to the end, in blocks."""

    name: str  # in messages
    num_rows: int
    blocks: Callable[[], Iterator[Arrays]]
    fingerprint: str  # of the content, wherever it lies


# --- writing -----------------------------------------------------------------------------------


@contextmanager
def written_beside(path: Path, partial: Path) -> Iterator[None]:
    """What is written to the folder `partial` takes the place of `path` once everything is there."""
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had our number, as in a container begun anew
    try:
        yield
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_dataset(path: Path, episodes: Iterable[Arrays], description: Callable[[], Mapping[str, Any]]) -> None:
    """Write episodes as they come, then their `description`."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with written_beside(path, partial):
        partial.mkdir(parents=True)
        chunks = list(_write_chunks(partial, iter(episodes)))
        content = {"schema_version": SCHEMA_VERSION, **description(), "chunks": chunks}
        (partial / DESCRIPTION_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_chunks(folder: Path, episodes: Iterator[Arrays]) -> Iterator[dict[str, Any]]:
    for count, group in enumerate(iter(lambda: list(_of_one_chunk(episodes)), [])):
        rows = {key: np.concatenate([episode[key] for episode in group]) for key in group[0]}
        file = folder / f"chunk_{count:05d}.npz"
        np.savez_compressed(file, **rows)  # type: ignore[arg-type]  # keys are names, not its `allow_pickle`
        sums = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
        yield {"file": file.name, "rows": len(rows["reward"]), **sums}


def _of_one_chunk(episodes: Iterator[Arrays]) -> Iterator[Arrays]:
    taken = 0
    for episode in episodes:
        yield episode
        taken += sum(value.nbytes for value in episode.values())
        if taken >= CHUNK_BYTES:
            return


def spec_description(spec: EnvSpec) -> dict[str, Any]:
    """The part of a description that training is checked against."""
    observation = {
        key: {"shape": each.shape, "dtype": each.dtype, "num_values": each.num_values}
        for key, each in spec.observation.items()
    }
    action = {key: getattr(spec.action, key) for key in ("kind", "sizes", "low", "high")}
    return {"observation": observation, "action": action}


# --- reading -----------------------------------------------------------------------------------


def open_folder(path: Path, spec: EnvSpec) -> RowSource:
    """A collected folder; its description is checked against the environment before any row is read."""
    file = path / DESCRIPTION_FILE
    try:
        if file.stat().st_size > _MOST_DESCRIPTION_BYTES:
            raise ValueError(f"it has {size(file.stat().st_size)}")
        description = json.loads(file.read_text(encoding="utf-8"))
        version, chunks = description["schema_version"], description["chunks"]
        listed = [(str(chunk["file"]), int(chunk["rows"]), str(chunk["sha256"])) for chunk in chunks]
        stored = {key: (str(each["dtype"]), tuple(each["shape"])) for key, each in description["observation"].items()}
        action = (str(description["action"]["kind"]), tuple(description["action"]["sizes"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"Dataset {path}: {file.name} is damaged ({error!r}). Collect the dataset again.") from error
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"Dataset {path} has schema version {version!r}; this RL Lab reads version {SCHEMA_VERSION}. "
            "Take a newer RL Lab (in its checkout: `git pull`), or collect it again."
        )
    _check_keys(stored, spec, name=str(path))
    expected = {**_observation_kinds(spec), "action": (spec.action.kind, spec.action.sizes)}
    for key, found in {**stored, "action": action}.items():
        if found != expected[key]:
            raise _mismatch(str(path), key, _words(*found), _words(*expected[key]), spec)
    for name, _, _ in listed:
        if not (path / name).is_file():
            raise ConfigError(
                f"Dataset {path}: {name} is missing, {DESCRIPTION_FILE} lists {len(listed)} chunks. "
                "Copy the whole folder again, or collect it again with `rl-lab collect`."
            )
    fingerprint = hashlib.sha256("".join(digest for _, _, digest in listed).encode()).hexdigest()
    read = lambda: (_read_chunk(path / name, rows, digest) for name, rows, digest in listed)  # noqa: E731
    return RowSource(str(path), sum(rows for _, rows, _ in listed), read, fingerprint)


def _read_chunk(file: Path, rows: int, digest: str) -> Arrays:
    if file_digest(file) != digest:
        raise ConfigError(
            f"Dataset {file.parent}: {file.name} is cut off or damaged: its checksum is not the one in "
            f"{DESCRIPTION_FILE}. Copy it again, or collect the dataset again with `rl-lab collect`."
        )
    chunk = _load(file)
    lengths = {key: len(value) for key, value in chunk.items()}
    if set(lengths.values()) != {rows}:
        raise ConfigError(
            f"Dataset {file.parent}: {file.name} holds {lengths} rows where {DESCRIPTION_FILE} lists {rows}. Collect "
            "the dataset again."
        )
    return chunk


def _load(file: Path) -> Arrays:
    """The arrays of an npz file; the sizes in their headers are checked before any of them is read."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            check_memory(str(file), sum(_array_bytes(archive, key, entry) for key, entry in members.items()))
            return {key: npy.read_array(archive.open(entry), allow_pickle=False) for key, entry in members.items()}
    except ConfigError:
        raise
    except _NPZ_ERRORS as error:
        raise ConfigError(
            f"Dataset {file} is no npz file that can be read ({error}): it is cut off, damaged, of another kind, or "
            "holds Python objects. Write it with numpy.savez from plain arrays."
        ) from error


def _array_bytes(archive: zipfile.ZipFile, key: str, entry: zipfile.ZipInfo) -> int:
    """What an array takes in memory by its header, which is read alone."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"'{key}' is compressed in a way that numpy does not write")
    with archive.open(entry) as member:
        is_first_version = npy.read_magic(member) == (1, 0)
        shape, _, dtype = (npy.read_array_header_1_0 if is_first_version else npy.read_array_header_2_0)(member)
        header_bytes = member.tell()
    if dtype.hasobject:
        raise ValueError(f"'{key}' holds Python objects")
    if not shape:
        raise ConfigError(
            f"Dataset {archive.filename}: '{key}' is a single number; an array with one entry per step is expected. "
            "Store arrays [T, ...]."
        )
    taken = prod(shape) * dtype.itemsize
    if entry.file_size != header_bytes + taken:
        raise ValueError(f"'{key}' has {entry.file_size} bytes where its header says {header_bytes + taken}")
    return taken


def check_memory(name: str, taken: int) -> None:
    """Refuse rows that do not fit in memory before they are read."""
    if taken > (free := free_memory_bytes()):
        raise ConfigError(
            f"Dataset {name} would take {size(taken)} of memory, but {size(free)} are free: use a smaller dataset, or "
            "a machine with more memory."
        )


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the plain layout: one file, one flat sequence of steps --------------------------------------


def open_plain(path: Path, spec: EnvSpec) -> RowSource:
    """observations, actions, rewards, terminations and truncations of T steps in a row, as `env.step` saw them.

    step t        o0 a0   o1 a1   o2 a2 | o3 a3 ...       an episode ends after a2
    reward          r0      r1      r2                    what `env.step(a)` returned
    our rows      o0 a0   o1 a1   o2 a2   last | o3 ...   `last` shows next_observations[2] where the file has them
    reward        0       r0      r1      r2

    Without them a terminated episode repeats o2 in its last row, whose value is never used, and a truncated one, whose
    last observation is bootstrapped from, ends a step earlier: in o2.
    """
    name, data = str(path), _load(path)
    has_named = any(key.startswith("observations.") for key in data)
    for key in _PLAIN_KEYS:
        if key not in data and key != "next_observations" and not (key == "observations" and has_named):
            others = [each for each in data if each not in _PLAIN_KEYS]
            raise ConfigError(
                f"Dataset {name} lacks '{key}'.{did_you_mean(key, others)} It has: {', '.join(data) or 'nothing'}. "
                f"A plain file holds {', '.join(_PLAIN_KEYS)} (next_observations may be left out); several observation "
                "keys are written observations.NAME."
            )
    observations = _observations(data, "observations", spec)
    following = _observations(data, "next_observations", spec)
    _check_keys(observations, spec, name=name)
    _check_steps(data, observations, following, name)
    rewards, terminated, truncated = (data[key].reshape(-1) for key in ("rewards", "terminations", "truncations"))
    terminated, truncated = terminated.astype(bool), truncated.astype(bool)
    actions = to_policy_actions(data["actions"], spec.action, name=name)
    plan = _plan_rows(terminated, terminated | truncated, has_following=bool(following))

    def blocks() -> Iterator[Arrays]:
        for begin in range(0, plan.shape[1], _BLOCK_ROWS):
            step, *flags = plan[:, begin : begin + _BLOCK_ROWS]
            is_added, is_first, is_last = (flag.astype(bool) for flag in flags)
            rows = {key: values[step] for key, values in observations.items()}
            for key, values in following.items():
                rows[key][is_added] = values[step[is_added]]
            arrived = np.where(is_added, step, np.maximum(step - 1, 0))
            reward = np.where(is_first, 0.0, rewards[arrived]).astype(np.float32)
            is_terminal = is_last & is_added & terminated[step]
            ends = {"is_first": is_first, "is_last": is_last, "is_terminal": is_terminal}
            yield {**rows, "reward": reward, **ends, "action": actions[step]}

    return RowSource(name, plan.shape[1], blocks, file_digest(path))


def _check_steps(data: Arrays, observations: Arrays, following: Arrays, name: str) -> None:
    """Refuse what numpy would broadcast or fail at: one number per step, and next observations like the others."""
    flags, steps = ("terminations", "truncations"), {key: data[key] for key in _PLAIN_KEYS[2:]}
    steps |= {**observations, **{f"next_observations.{key}": value for key, value in following.items()}}
    lengths = {key: len(value) for key, value in steps.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"Dataset {name}: arrays differ in length: {lengths}. One entry per step belongs in each.")
    for key in ("rewards", *flags):
        if data[key].size != len(data[key]) or data[key].dtype.kind not in "biuf":
            raise ConfigError(f"Dataset {name}: {key} is {_kind(data[key])} per step; one number per step is expected.")
    if not all(np.isin(data[key], (0, 1)).all() for key in flags):
        raise ConfigError(f"Dataset {name}: terminations and truncations hold true or false (or 0 and 1) per step.")
    for key in {**observations, **following} if following else ():
        pair = [_kind(each[key]) for each in (observations, following) if key in each]
        if len(pair) < 2 or pair[0] != pair[1]:
            raise ConfigError(
                f"Dataset {name}: observations and next_observations have different '{key}' ({' and '.join(pair)}). "
                "Store the same keys, shapes and dtypes in both."
            )


def _plan_rows(terminated: np.ndarray, ended: np.ndarray, *, has_following: bool) -> np.ndarray:
    """`[4, rows]`: which step a row shows, whether it is the row added after that step, is_first and is_last."""
    is_first, is_end = np.ones(len(ended), bool), ended.copy()
    is_first[1:] = ended[:-1]
    is_end[-1:] = True  # the file may stop in mid-episode
    is_extended = is_end if has_following else terminated
    step = np.repeat(np.arange(len(ended)), 1 + is_extended)
    is_added = np.zeros(len(step), bool)
    is_added[1:] = step[1:] == step[:-1]
    plan = np.array([step, is_added, is_first[step] & ~is_added, is_end[step] & (is_added | ~is_extended[step])])
    is_alone = plan[2] & plan[3]  # no step of such an episode is known whole
    return plan[:, is_alone == 0]


def _observations(data: Arrays, prefix: str, spec: EnvSpec) -> Arrays:
    named = {key.removeprefix(f"{prefix}."): value for key, value in data.items() if key.startswith(f"{prefix}.")}
    if prefix in data:
        named = {next(iter(spec.observation)) if len(spec.observation) == 1 else "observations": data[prefix]}
    return {key: as_spec(value, key, spec) for key, value in named.items()}


def as_spec(values: np.ndarray, key: str, spec: EnvSpec) -> np.ndarray:
    """Numbers as the environment's spec stores them, where that loses nothing that matters: axes flattened as our
    environments do, float64 and integers to float32, integers to int64. Anything else stays, and is refused later."""
    expected = spec.observation.get(key)
    if expected is None:
        return values
    if values.shape[1:] != expected.shape and prod(values.shape[1:]) == prod(expected.shape):
        if expected.dtype != "uint8" or values.ndim == len(expected.shape):
            values = values.reshape(len(values), *expected.shape)
    fits = {"float32": "fiub", "int64": "iu", "bool": "biu"}.get(expected.dtype, "")
    return values.astype(expected.dtype) if values.dtype.kind in fits else values


def to_policy_actions(actions: np.ndarray, spec: ActionSpec, *, name: str, start: Any = 0) -> np.ndarray:
    """Arguments of `env.step` as a policy's answers: discrete from 0, continuous in [-1, 1] where bounded."""
    if prod(actions.shape[1:]) != prod(spec.shape):
        raise ConfigError(
            f"Dataset {name}: action has shape {list(actions.shape[1:])}, the environment's has {list(spec.shape)}. "
            "Use a dataset of this environment."
        )
    actions = actions.reshape(len(actions), *spec.shape)
    is_continuous = spec.kind == "continuous"
    if actions.dtype.kind not in ("fiub" if is_continuous else "iub"):
        raise ConfigError(
            f"Dataset {name}: action has dtype {actions.dtype}, the environment takes "
            f"{_words(spec.kind, spec.sizes)}. Store {'numbers' if is_continuous else 'whole numbers'}."
        )
    if not is_continuous:
        return actions.astype(np.int64) - np.reshape(np.asarray(start, np.int64), spec.shape if np.ndim(start) else ())
    low, high = np.array(spec.low, np.float64), np.array(spec.high, np.float64)
    is_bounded = np.isfinite(low) & np.isfinite(high)
    middle, half = np.where(is_bounded, (low + high) / 2, 0.0), np.where(is_bounded, (high - low) / 2, 1.0)
    return ((actions - middle) / half).astype(np.float32)


# --- is it this environment's? -------------------------------------------------------------------


def check_rows(rows: Arrays, spec: EnvSpec, *, name: str, first_row: int) -> None:
    """Refuse rows that this environment could not have given: other keys, shapes, dtypes or values, and NaN."""
    _check_keys({key: None for key in rows if key not in ROW_KEYS}, spec, name=name)
    flags = dict.fromkeys(("is_first", "is_last", "is_terminal"), ("bool", ()))
    expected = {**_observation_kinds(spec), "reward": ("float32", ()), **flags}
    expected["action"] = (spec.action.dtype, spec.action.shape)
    counts = {key: each.num_values for key, each in spec.observation.items()}
    counts["action"] = spec.action.sizes if spec.action.kind != "continuous" else ()
    for key, kind in expected.items():
        if key not in rows:
            raise ConfigError(
                f"Dataset {name}: rows lack '{key}'. Rows have the observation keys and {', '.join(ROW_KEYS)}: "
                "see docs/time_steps.md, or collect again with `rl-lab collect`."
            )
        if _kind(rows[key]) != _words(*kind):
            raise _mismatch(name, key, _kind(rows[key]), _words(*kind), spec)
        _check_values(rows[key], counts.get(key, ()), f"Dataset {name}: {key}", first_row)


def _check_values(values: np.ndarray, counts: tuple[int, ...], what: str, first_row: int) -> None:
    flat = values.reshape(len(values), -1)
    if values.dtype.kind == "f" and not np.isfinite(flat).all():
        bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
        raise ConfigError(
            f"{what} is not finite in {len(bad)} rows, first in row {first_row + bad[0]} ({values[bad[0]]!s}); finite "
            "numbers are expected. Leave those episodes out, or collect again."
        )
    bad = np.flatnonzero(((flat < 0) | (flat >= np.array(counts))).any(axis=1)) if counts else np.zeros(0, int)
    if len(bad):
        raise ConfigError(
            f"{what} is {values[bad[0]]!s} in row {first_row + bad[0]}; whole numbers from 0 to below {list(counts)} "
            "are expected. Use a dataset of this environment, or count from 0."
        )


def _check_keys(found: Mapping[str, Any], spec: EnvSpec, *, name: str) -> None:
    if found.keys() != spec.observation.keys():
        keys, expected = (", ".join(each) or "none" for each in (found, spec.observation))
        raise _mismatch(name, "the set of observation keys", keys, expected, spec)


def _mismatch(name: str, key: str, found: str, expected: str, spec: EnvSpec) -> ConfigError:
    return ConfigError(
        f"Dataset {name}: {key} is {found}, but environment '{spec.id}' has {expected}. Use a dataset of this "
        "environment with the same wrappers, or set environment.id (and its wrappers) to what the dataset was "
        "collected from."
    )


def _observation_kinds(spec: EnvSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (each.dtype, each.shape) for key, each in spec.observation.items()}


def _kind(values: np.ndarray) -> str:
    """Of one row."""
    return _words(values.dtype.name, values.shape[1:])


def _words(kind: str, sizes: tuple[int, ...]) -> str:
    """`float32 [4]`, `discrete [2]`."""
    return f"{kind} {list(sizes)}"
