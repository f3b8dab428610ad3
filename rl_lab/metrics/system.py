"""How busy the machine is: CPU, memory and GPU, sampled rarely enough to cost nothing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_lab.types import Metrics

if TYPE_CHECKING:
    import psutil

GIB = 2**30
COST_LIMIT = 0.002  # fraction of wall-clock that sampling may take


class SystemUsage:
    """`sample` may be called for every row; it measures at most every `interval_s` and repeats itself in between."""

    def __init__(
        self,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.perf_counter,
        directory: Path | None = None,
    ) -> None:
        """`directory`: whose disk is looked at."""
        self.interval_s = interval_s
        self._directory = directory
        self._clock = clock
        self._due_at = clock()
        self._newest: Metrics = {}
        _cpu_percent()  # the first answer covers no time; the next one counts from here

    def sample(self) -> Metrics:
        """The newest `system/*` metrics. GPU figures come only once torch uses a GPU."""
        begin = self._clock()
        if begin >= self._due_at:
            self._newest = {
                "system/cpu_percent": _cpu_percent(),
                "system/ram_gib": _resident_gib(),
                "system/memory_fraction": _memory_fraction(),
                **_disk_free(self._directory),
                **_gpu_usage(),
            }
            end = self._clock()
            self._due_at = end + max(self.interval_s, (end - begin) / COST_LIMIT)
        return dict(self._newest)


def _cpu_percent() -> float:
    import psutil

    return float(psutil.cpu_percent(interval=None))


def _resident_gib() -> float:
    import psutil

    process = psutil.Process()
    resident = process.memory_info().rss
    for child in _descendants(process):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # ended since it was listed, or not ours to read
            resident += child.memory_info().rss
    return float(resident / GIB)


def _descendants(process: psutil.Process) -> Iterator[psutil.Process]:
    """As Linux lists them with each thread; psutil asks every process of the machine who its parent is."""
    import psutil

    threads = Path(f"/proc/{process.pid}/task")
    if not (threads / str(process.pid) / "children").is_file():
        yield from process.children(recursive=True)
        return
    for thread in os.listdir(threads):
        with suppress(OSError, psutil.NoSuchProcess):  # ended meanwhile
            for child in (threads / thread / "children").read_text().split():
                yield (found := psutil.Process(int(child)))
                yield from _descendants(found)


def _memory_fraction(group: Path = Path("/sys/fs/cgroup")) -> float:
    """Of the machine, or of the container's limit where that is tighter."""
    import psutil

    machine = psutil.virtual_memory()
    used = 1.0 - machine.available / machine.total
    with suppress(OSError, ValueError):  # no control group, or none with a limit ("max")
        limit = int((group / "memory.max").read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / "memory.current").read_text()) - int(facts.get("inactive_file", 0))
        used = max(used, taken / limit)
    return used


def _disk_free(directory: Path | None) -> Metrics:
    if directory is None:
        return {}
    with suppress(OSError):  # a directory that is gone says so when something is written
        return {"system/disk_free_gib": shutil.disk_usage(directory).free / GIB}
    return {}


def _gpu_usage() -> Metrics:
    """Nothing before torch itself has begun to use a GPU: asking would take memory on it."""
    if not torch.cuda.is_initialized():
        return {}
    reserved = sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
    usage: Metrics = {"system/gpu_memory_gib": reserved / GIB}
    with suppress(ImportError):  # nvidia-ml-py is optional
        import pynvml

        with suppress(pynvml.NVMLError, RuntimeError):  # no driver access, as inside some containers and MIG slices
            usage["system/gpu_percent"] = float(torch.cuda.utilization())
    return usage
