"""Machine use and the split of wall-clock."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from rl_lab.metrics import system
from rl_lab.metrics.names import NAMES
from rl_lab.metrics.system import SystemUsage
from rl_lab.metrics.time_split import SECTIONS, TimeSplit
from rl_lab.utils.timing import Stopwatch


class FixedStopwatch(Stopwatch):
    """A stopwatch whose clock is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def elapsed(self) -> float:
        return self.now


def test_fractions_cover_the_window_and_sum_to_one() -> None:
    stopwatch = FixedStopwatch()
    split = TimeSplit(stopwatch)
    stopwatch.add("environment", 1.0)
    stopwatch.add("update", 0.5)
    stopwatch.add("something_else", 0.2)
    stopwatch.now = 2.0
    first = split.window()
    assert first["time/environment_fraction"] == 0.5
    assert first["time/update_fraction"] == 0.25
    assert first["time/overhead_fraction"] == 0.25
    assert sum(first.values()) == 1.0 and set(first) <= set(NAMES)
    stopwatch.add("policy", 1.0)
    stopwatch.now = 3.0
    second = split.window()
    assert second["time/policy_fraction"] == 1.0 and second["time/environment_fraction"] == 0.0
    assert split.whole()["time/policy_fraction"] == pytest.approx(1 / 3)
    assert len(second) == len(SECTIONS) + 1


def test_an_empty_window_has_no_fractions_and_overhead_is_never_negative() -> None:
    stopwatch = FixedStopwatch()
    split = TimeSplit(stopwatch)
    assert split.window() == {}
    stopwatch.add("update", 1.5)  # a section may end after the clock was read
    stopwatch.now = 1.0
    assert split.window()["time/overhead_fraction"] == 0.0


def test_video_and_report_come_after_training_and_are_no_overhead_of_it() -> None:
    stopwatch = FixedStopwatch()
    split = TimeSplit(stopwatch)
    stopwatch.add("update", 3.0)
    stopwatch.now = 4.0
    before = split.whole()
    stopwatch.add("video", 6.0)
    stopwatch.now = 10.0
    assert split.whole() == before and before["time/overhead_fraction"] == 0.25
    stopwatch.current, stopwatch.since = "report", time.perf_counter() - 2.0  # under way for two seconds
    stopwatch.now = 12.0
    assert split.whole()["time/update_fraction"] == pytest.approx(0.75, abs=0.01)


def test_a_real_stopwatch_can_be_split() -> None:
    stopwatch = Stopwatch()
    split = TimeSplit(stopwatch)
    with stopwatch.section("update"):
        sum(range(20_000))
    assert 0.0 < split.window()["time/update_fraction"] <= 1.0


def test_the_section_under_way_counts() -> None:
    stopwatch = Stopwatch()
    split = TimeSplit(stopwatch)
    with stopwatch.section("update"):
        sum(range(20_000))
        assert 0.0 < split.whole()["time/update_fraction"] <= 1.0
        assert split.window()["time/update_fraction"] == 0.0  # a row's window has what is done


def test_usage_is_sampled_rarely_and_repeated_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    now = 50.0

    def counted() -> float:
        calls.append(now)
        return float(len(calls))

    monkeypatch.setattr(system, "_resident_gib", counted)
    usage = SystemUsage(interval_s=5.0, clock=lambda: now)
    first = usage.sample()
    assert 0.0 <= first["system/cpu_percent"] <= 100.0 and set(first) <= set(NAMES)
    now = 54.0
    assert usage.sample() == first and len(calls) == 1
    now = 55.0
    assert usage.sample()["system/ram_gib"] == 2.0


def test_memory_of_children_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = system._resident_gib()
    held = "x = bytearray(64 * 2**20); x[::4096] = b'1' * len(x[::4096]); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert system._resident_gib() > alone + 60 / 1024
    finally:
        child.communicate(b"\n")

    def gone() -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [SimpleNamespace(memory_info=gone)])
    assert system._resident_gib() > 0.0


def test_gpu_figures_come_once_torch_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert system._gpu_usage() == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 40)
    assert system._gpu_usage() == {"system/gpu_memory_gib": 2.0, "system/gpu_percent": 40.0}

    def no_driver() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "utilization", no_driver)
    assert system._gpu_usage() == {"system/gpu_memory_gib": 2.0}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert system._gpu_usage() == {"system/gpu_memory_gib": 2.0}
