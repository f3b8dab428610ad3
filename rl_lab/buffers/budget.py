"""What replay will take, said before the first row; what cannot fit is refused with the numbers and the ways out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from rl_lab.buffers.compressed import frame_bytes
from rl_lab.types import ConfigError, EnvSpec

_PLACES = {"cpu": "memory", "pinned": "memory", "gpu": "GPU memory", "disk": "disk"}
_CGROUP = Path("/sys/fs/cgroup")


@runtime_checkable
class Predictable(Protocol):
    """A buffer that knows what it will take."""

    num_envs: int
    slots_per_env: int
    storage: str
    directory: str | None
    device: torch.device

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def priority_bytes(self) -> int: ...

    def memory_bytes(self, spec: EnvSpec, *, extra_bytes_per_row: int = 0) -> int: ...


@dataclass(frozen=True)
class Prediction:
    """One buffer's demand on memory or disk, and what is free there."""

    name: str
    place: str
    storage: str
    bytes: int
    rows: int
    free_bytes: int

    def sentence(self) -> str:
        return (
            f"Replay '{self.name}' will take {size(self.bytes)} of {self.place}: {self.rows:,} rows of "
            f"{-(-self.bytes // self.rows):,} bytes; {size(self.free_bytes)} are free."
        )


def predict(buffers: Mapping[str, Any], spec: EnvSpec, *, extra_bytes_per_row: int = 0) -> list[str]:
    """A sentence for each buffer that replays; a ConfigError when all of them together do not fit.

    `extra_bytes_per_row`: what the policy keeps with a row besides observation, reward, flags and action.
    """
    free_places: dict[str, int] = {}
    predictions = []
    for name, buffer in buffers.items():
        if isinstance(buffer, Predictable):
            place = _PLACES[buffer.storage]
            free = free_places.setdefault(place, _free_bytes(place, buffer))
            rows = buffer.num_envs * buffer.slots_per_env
            taken = buffer.memory_bytes(spec, extra_bytes_per_row=extra_bytes_per_row)
            predictions.append(Prediction(name, place, buffer.storage, taken, rows, free))
            missing = taken - buffer.allocated_bytes  # a dataset lies in memory already
            if missing > free:
                raise ConfigError(_refusal(predictions[-1], buffer, has_frames=frame_bytes(spec) > 0))
            free_places[place] = free - missing
            if place != "memory" and buffer.priority_bytes:
                free = free_places.setdefault("memory", _free_bytes("memory", buffer))
                taken = 2 * buffer.priority_bytes  # once more while a checkpoint is written
                predictions.append(Prediction(f"{name} (priorities)", "memory", "", taken, rows, free))
                if taken > free:
                    raise ConfigError(_refusal_of_priorities(name, predictions[-1]))
                free_places["memory"] = free - taken
    return [prediction.sentence() for prediction in predictions]


def _refusal(prediction: Prediction, buffer: Predictable, *, has_frames: bool) -> str:
    fitting = prediction.free_bytes * prediction.rows // prediction.bytes
    ways = [f"a smaller capacity_rows (at most {fitting:,} fit now)"]
    if prediction.storage != "disk":
        ways.append(f"storage: disk ({size(_free_bytes('disk', buffer))} are free there)")
    if prediction.storage == "gpu":
        ways.append("storage: cpu")
    if prediction.storage == "cpu" and has_frames:
        ways.append("compressed frames (compress_frames: 0.5)")
    each = -(-prediction.bytes // prediction.rows)
    return (
        f"buffers.{prediction.name} would take {size(prediction.bytes)} of {prediction.place} ({prediction.rows:,} "
        f"rows of {each:,} bytes), but {size(prediction.free_bytes)} are free. Ways out: {'; '.join(ways)}."
    )


def _refusal_of_priorities(name: str, prediction: Prediction) -> str:
    fitting = prediction.free_bytes * prediction.rows // prediction.bytes
    return (
        f"buffers.{name} would take {size(prediction.bytes)} of memory for the priorities of {prediction.rows:,} rows, "
        f"which stay in memory wherever the rows lie, but {size(prediction.free_bytes)} are free. Ways out: a smaller "
        f"capacity_rows (at most {fitting:,} fit now); replay without priorities (replay=uniform)."
    )


def size(byte_count: int) -> str:
    """1234567 as '1.2 MB'."""
    number = float(byte_count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.95 or unit == "GB":
            break
        number /= 1000
    return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"


# --- what is free ------------------------------------------------------------------------------


def _free_bytes(place: str, buffer: Predictable) -> int:
    free: dict[str, Callable[[Predictable], int]] = {
        "memory": lambda _: free_memory_bytes(),
        "disk": lambda each: _free_disk_bytes(each.directory),
        "GPU memory": lambda each: int(torch.cuda.mem_get_info(each.device)[0]),
    }
    return free[place](buffer)


def free_memory_bytes() -> int:
    """What the machine has, or less where a container may not use all of it."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_container_bytes(_CGROUP)])


def _container_bytes(folder: Path) -> Iterator[int]:
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
    except OSError:  # no container, or one that does not say
        return
    if limit.strip() != "max":
        yield max(int(limit) - int(used), 0)


def _free_disk_bytes(directory: str | None) -> int:
    """Free space, and what the folder's own files hold already: a resumed run uses them again."""
    place = Path(directory) if directory is not None else Path.cwd()
    own = sum(entry.stat().st_size for entry in os.scandir(place)) if directory is not None and place.is_dir() else 0
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free + own
