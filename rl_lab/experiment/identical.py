"""Whether two runs are the same: their rows and their saved state, to the bit, or how far they are apart.

What follows the clock is left out (`wall_s`, `time/`, `system/`, when checkpoints were due), and so is where rows of a
replay lie: those of an interrupted run are the same rows in other files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.storage.archive import RingArchive
from rl_lab.buffers.storage.rows import RowRing
from rl_lab.experiment.saver import REPLAY
from rl_lab.metrics.names import is_wall_clock
from rl_lab.runs.checkpoint import Checkpoint
from rl_lab.types import StateTree
from rl_lab.utils.tree import equal, leaves_with_paths, numpy_to_tensors

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """One number that is not the same: of a row (`row` from 1 on) or of a checkpoint (None)."""

    key: str  # controller/entropy, or controllers.actor.0.weight
    recorded: Any
    found: Any
    relative: float  # infinite where the two cannot be compared
    row: int | None = None
    agent_steps: int | None = None


def row_differences(recorded: Row, found: Row, *, number: int) -> Iterator[Difference]:
    """Every key in which a row of a run differs from the same row of another."""
    for key in dict.fromkeys([*recorded, *found]):
        if is_wall_clock(key) or key == "non_finite":
            continue
        there, here = recorded.get(key), found.get(key)
        if key in recorded and key in found:
            if there is None and here is None and (kinds := _kinds(recorded, found, key)):
                there, here = kinds
            if there == here:
                continue
        yield Difference(key, there, here, _relative(there, here), number, recorded.get("agent_steps"))


def _kinds(recorded: Row, found: Row, key: str) -> tuple[Any, Any] | None:
    """What two nulls stand for: nan, inf or -inf. None where an earlier version wrote the names alone."""
    there, here = recorded.get("non_finite"), found.get("non_finite")
    return (there.get(key), here.get(key)) if isinstance(there, Mapping) and isinstance(here, Mapping) else None


def state_differences(recorded: StateTree, found: StateTree) -> Iterator[Difference]:
    """Every leaf in which two states differ; of a tensor, its largest difference."""
    there, here = (dict(leaves_with_paths(numpy_to_tensors(state))) for state in (recorded, found))
    for path in dict.fromkeys([*there, *here]):
        left, right = there.get(path), here.get(path)
        if path in there and path in here and equal(left, right):
            continue
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            yield _tensor_difference(path, left, right)
        else:
            yield Difference(path, left, right, _relative(left, right))


def reproducible(checkpoint: Checkpoint) -> dict[str, StateTree]:
    """A checkpoint's state as far as a repeated run has the same, rows of replays included."""
    return comparable(checkpoint.state, checkpoint.path.absolute().parent.parent / REPLAY)


def comparable(state: Mapping[str, StateTree], replay: Path = Path()) -> dict[str, StateTree]:
    """The sections of a state without what follows the clock and without where the writers stand; rows of its buffers
    that lie in files of the folder `replay` are read."""
    result = dict(state)
    if "buffers" in result:
        result["buffers"] = {name: rows_in_full(replay / name, each) for name, each in result["buffers"].items()}
    if "progress" in result:
        result["progress"] = _progress_without_clock(result["progress"])
    if "logger" in result:
        result["logger"] = result["logger"]["window"]
    return result


def rows_in_full(directory: Path, state: StateTree) -> StateTree:
    """A buffer's state with its rows in it, oldest first, rather than in files or round a ring."""
    if not isinstance(state, Mapping) or "log" not in state:
        return state  # no replay: its state holds its rows, or a dataset names its files
    answered, slots = state["answered"], state["slots_per_env"]
    end = answered + bool(state["pending_keys"])
    begin = max(state["forgotten"], end - slots)
    ring = RowRing(num_envs=state["num_envs"], slots_per_env=slots)
    if state["log"] is not None:
        RingArchive(ring, directory).load(state["log"], begin=begin, end=answered)
        rows, pending = ring.get_rows(min(end, slots)), state["pending"]
    else:
        rows = numpy_to_tensors(state["rows"])
        pending = {key: rows[key][:, answered % slots] for key in state["pending_keys"]}
    order = np.arange(begin, answered) % slots
    kept = {key: torch.as_tensor(values)[:, order] for key, values in rows.items()} if len(order) else {}
    return {**state, "log": None, "rows": kept, "pending": {key: pending[key] for key in state["pending_keys"]}}


def _progress_without_clock(progress: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in progress.items() if name != "wall_s"}
    kept["marks"] = {name: marks for name, marks in kept["marks"].items() if name != "checkpoint"}
    if kept.get("before_end") is not None:
        kept["before_end"] = _progress_without_clock(kept["before_end"])
    return kept


def _tensor_difference(path: str, left: torch.Tensor, right: torch.Tensor) -> Difference:
    if left.shape != right.shape or left.dtype != right.dtype or not left.dtype.is_floating_point:
        return Difference(path, _summary(left), _summary(right), math.inf)
    a, b = (each.detach().cpu().double().flatten().numpy() for each in (left, right))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float32).tiny)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.where(np.isnan(apart), np.inf, apart))
    worst = int(apart.argmax())
    return Difference(f"{path}[{worst}]", float(a[worst]), float(b[worst]), float(apart[worst]))


def _summary(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _relative(left: Any, right: Any) -> float:
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right)):
        return math.inf
    larger = max(abs(left), abs(right))
    return abs(left - right) / larger if math.isfinite(left) and math.isfinite(right) and larger else math.inf
