"""What replay will take, said before the first row; what cannot fit is refused with the numbers and the ways out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rl_lab.buffers.ring_replay import Replay
from rl_lab.buffers.storage.compressed import frame_bytes
from rl_lab.types import ConfigError, EnvSpec

_PLACES = {"cpu": "memory", "pinned": "memory", "gpu": "GPU memory", "disk": "disk"}
_CGROUP = Path("/sys/fs/cgroup")


def predict(buffers: Mapping[str, Any], spec: EnvSpec, *, extra_bytes_per_row: int = 0) -> list[str]:
    """A sentence for each buffer that replays; a ConfigError when all of them together do not fit.

    `extra_bytes_per_row`: what the policy keeps with a row besides observation, reward, flags and action.
    """
    free_places: dict[str, int] = {}
    sentences = []
    for name, buffer in buffers.items():
        if not isinstance(buffer, Replay):
            continue
        rows, place = buffer.num_envs * buffer.slots_per_env, _PLACES[buffer.storage]
        taken = buffer.memory_bytes(spec, extra_bytes_per_row=extra_bytes_per_row)
        missing = taken - buffer.allocated_bytes  # a dataset lies in memory already
        demands = [(f"{name}", place, taken, missing)]
        if place != "memory" and buffer.priority_bytes:
            copied = 2 * buffer.priority_bytes  # once more while a checkpoint is written
            demands.append((f"{name} (priorities)", "memory", copied, copied))
        for what, where, total, missing in demands:
            free = free_places.setdefault(where, _free_bytes(where, buffer))
            each = f"{rows:,} rows of {-(-total // rows):,} bytes"
            sentences.append(f"Replay '{what}' will take {size(total)} of {where}: {each}; {size(free)} are free.")
            if missing > free:
                use = f"{size(total)} of {where} ({each})"
                if what != name:
                    use = f"{size(total)} of memory for the priorities of {rows:,} rows, wherever the rows lie"
                ways = [f"a smaller capacity_rows (at most {free * rows // total:,} fit now)"]
                ways += ["replay without priorities (replay=uniform)"] if what != name else _ways_out(buffer, spec)
                raise ConfigError(
                    f"buffers.{name} would take {use}, but {size(free)} are free. Ways out: {'; '.join(ways)}."
                )
            free_places[where] = free - missing
    return sentences


def _ways_out(buffer: Replay, spec: EnvSpec) -> list[str]:
    ways = []
    if buffer.storage != "disk":
        ways.append(f"storage: disk ({size(_free_bytes('disk', buffer))} are free there)")
    if buffer.storage == "gpu":
        ways.append("storage: cpu")
    if buffer.storage == "cpu" and frame_bytes(spec) > 0:
        ways.append("compressed frames (compress_frames: 0.5)")
    return ways


def size(byte_count: int) -> str:
    """1234567 as '1.2 MB'."""
    number = float(byte_count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.95 or unit == "GB":
            break
        number /= 1000
    return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"


# --- what is free ------------------------------------------------------------------------------


def _free_bytes(place: str, buffer: Replay) -> int:
    if place == "memory":
        return free_memory_bytes()
    return _free_disk_bytes(buffer.directory) if place == "disk" else int(torch.cuda.mem_get_info(buffer.device)[0])


def free_memory_bytes() -> int:
    """What the machine has, or less where a container may not use all of it."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with suppress(OSError):  # no container, or one without these files
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
    return free


def _free_disk_bytes(directory: str | None) -> int:
    """Free space, and what the folder's own files hold already: a resumed run uses them again."""
    place = Path(directory) if directory is not None else Path.cwd()
    own = sum(entry.stat().st_size for entry in os.scandir(place)) if directory is not None and place.is_dir() else 0
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free + own
