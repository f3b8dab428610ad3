"""A run as it is seen while it goes on: what it is doing right now, and how fast it went since the last row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from rl_lab.collection.collector import Collector
from rl_lab.collection.evaluator import Evaluator
from rl_lab.metrics.pace import Reading
from rl_lab.metrics.system import SystemUsage
from rl_lab.metrics.time_split import TimeSplit
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.training.runtime import Runtime
from rl_lab.types import Counts, Metrics, Phase
from rl_lab.utils.timing import Stopwatch

WORDS = {  # section of the stopwatch -> what is shown
    "update": "updating",
    "evaluation": "evaluating",
    "film": "filming the world model",
    "video": "writing the video",
    "report": "writing the report",
    "checkpoint": "saving",
    "logging": "writing metrics",
    "restore": "restoring",
}
COUNTED = ("evaluation", "film")  # sections whose parts the evaluator counts
TRAINING = ("", "update")
ALTERNATING_S = 0.5  # collecting and updating that change more often than this are one activity


class Probe:
    """Reads counters that the loop keeps anyway, from another thread and without a lock: each is one number or one
    object that is replaced whole, so that a look is at worst a moment old."""

    def __init__(
        self,
        housekeeping: Housekeeping,
        collector: Collector,
        evaluator: Evaluator,
        runtime: Runtime,
        time_split: TimeSplit,
    ) -> None:
        self._housekeeping, self._collector, self._runtime = housekeeping, collector, runtime
        self._time_split = time_split
        self._updates_before = housekeeping.counts.updates
        self._parts = (0, 0)  # of an evaluation: done, in all
        evaluator.progress = self._count_parts

    def _count_parts(self, done: int, total: int) -> None:
        self._parts = (done, total)

    def __call__(self) -> Reading:
        housekeeping, scheduler = self._housekeeping, self._housekeeping.scheduler
        section, since = housekeeping.stopwatch.current, housekeeping.stopwatch.since
        phases, index = scheduler.phases, scheduler.index
        is_over = index >= len(phases)
        try:
            fraction, run_fraction = (1.0, 1.0) if is_over else (scheduler.fraction(), scheduler.run_fraction())
        except IndexError:  # the last phase ended between two of these lines
            fraction, run_fraction = 1.0, 1.0
        phase = phases[min(index, len(phases) - 1)]
        counts = self._counts()
        done, total = self._parts if section in COUNTED else (0, 0)
        activity_s = perf_counter() - since
        activity, is_training = self._activity(section, phase, activity_s, is_over=is_over, updates=counts.updates)
        return Reading(
            counts=counts,
            wall_s=housekeeping.wall_s,
            run_fraction=run_fraction,
            phase_name=phase.name,
            phase_index=min(index, len(phases) - 1),
            phase_count=len(phases),
            phase_fraction=fraction,
            activity=activity,
            activity_s=activity_s,
            done=done,
            total=total,
            is_ending=housekeeping.is_ending,
            newest={**housekeeping.newest_of_episodes, **self._time_split.whole()},
            is_training=is_training,
        )

    def _counts(self) -> Counts:
        counts, steps = self._housekeeping.counts, self._collector.steps_under_way
        frames = steps * self._collector.environment.spec.frames_per_step
        return Counts(counts.env_frames + frames, counts.agent_steps + steps, counts.episodes, counts.updates)

    def _activity(
        self, section: str, phase: Phase, activity_s: float, *, is_over: bool, updates: int
    ) -> tuple[str, bool]:
        """In words, and whether it is training at its own speed."""
        if self._runtime.preparing:
            return self._runtime.preparing, False
        if section == "update" and self._runtime.compiles and updates == self._updates_before:
            return "compiling kernels", False
        if section not in TRAINING or is_over:
            return WORDS.get(section, "finishing"), False
        if phase.type == "online" and phase.workflow_hooks and activity_s < ALTERNATING_S:
            return "collecting and updating", True
        return ("updating" if section == "update" or phase.type == "offline" else "collecting"), True


def make_usage(
    time_split: TimeSplit, stopwatch: Stopwatch, scheduler: PhaseScheduler, directory: Path | None = None
) -> Callable[[float], Metrics]:
    """Speed, time left, the split of the wall clock and the machine's load since the last row; the disk is that of a
    directory."""
    system = SystemUsage(directory=directory)
    before: dict[str, float] = {}
    first: dict[str, float] = {}

    def start() -> None:
        """From here on; what a checkpoint brought with it took no time in this process."""
        counts = scheduler.run_counts
        before.update(wall=stopwatch.elapsed(), steps=counts.agent_steps, updates=counts.updates)

    scheduler.on_restore = start
    start()

    def usage(run_fraction: float) -> Metrics:
        now, counts = stopwatch.elapsed(), scheduler.run_counts
        seconds = max(now - before["wall"], 1e-9)
        if first.get("phase") != scheduler.index:  # a phase that learns says nothing of one that only collects
            first.update(phase=scheduler.index, fraction=run_fraction, wall=now)
        gained = run_fraction - first["fraction"]
        eta = (now - first["wall"]) * (1.0 - run_fraction) / gained if gained > 0 else None
        metrics: Metrics = {
            "time/agent_steps_per_second": (counts.agent_steps - before["steps"]) / seconds,
            "time/updates_per_second": (counts.updates - before["updates"]) / seconds,
            **({} if eta is None else {"time/eta_s": eta}),
            **time_split.window(),
            **system.sample(),
        }
        before.update(wall=now, steps=counts.agent_steps, updates=counts.updates)
        return metrics

    return usage
