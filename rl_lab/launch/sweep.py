"""The loop of a sweep: asks for trials, gives their runs to warm workers, tells the search what came of them.

What trial n may know is `plan.known_before(n)`, however the trials overtake each other; so a sweep that was killed and
resumed, or ran on more workers, tries the same parameters and finds the same best.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Protocol

from rl_lab.launch.local import Forwarding
from rl_lab.launch.pool import Event, Pool
from rl_lab.launch.search import FAILED, FINISHED, PRUNED, RUNNING, Pruning, Search, Trial, make_search
from rl_lab.launch.sweep_plan import SweepPlan
from rl_lab.types import ConfigError, RunError, did_you_mean
from rl_lab.utils.processes import handled_by

POLL_SECONDS = 0.25
DEATHS = 2  # of a worker with the same run before the trial counts as failed
FAILURES = 3  # trials that all failed before the sweep gives up


class Result(Protocol):
    """What a worker returns for one run; see `rl_lab.experiment.trial`."""

    state: str
    score: float | None
    values: tuple[float, ...]
    logged: tuple[str, ...]
    message: str
    seconds: float
    task_seconds: float


@dataclass(eq=False)
class Task:
    """One run of a trial, on its way through a worker."""

    trial: Trial
    seed: int
    deaths: int = 0


@dataclass
class Sweep:
    """A sweep under way. `payload` makes what a worker gets of a task; `record` appends to the sweep's file."""

    plan: SweepPlan
    pool: Pool
    payload: Callable[[Task, bool], Any]
    record: Callable[[Mapping[str, Any]], None]
    show: Callable[[list[Trial]], None]
    on_signal: Callable[[], None] = lambda: None
    recorded: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_retried: Callable[[Trial], bool] = lambda trial: False  # whether a failed trial on record is tried again

    def __post_init__(self) -> None:
        self.trials: list[Trial] = []
        self._forward = Forwarding(self._interrupt, self.on_signal)
        self.is_out_of_time = False
        self._search: Search = make_search(self.plan)
        self._told = 0
        self._queue: list[Task] = []
        self._tasks: dict[Any, Task] = {}
        self._prunings: dict[int, Pruning] = {}

    def run(self) -> int | None:
        """Until every trial has ended; the number of the signal that cut the sweep short, if one did."""
        end = time.monotonic() + 60.0 * self.plan.minutes if self.plan.minutes else None
        with handled_by(self._forward):
            while self._tasks or not self._is_stopping():
                if not self._is_stopping():
                    self._submit()
                    if not self._tasks:
                        break
                for event in self.pool.events(POLL_SECONDS):
                    self._take(event)
                if end is not None and time.monotonic() > end and not self.is_out_of_time:
                    self.is_out_of_time = True
                    self.pool.interrupt()
                self.show(self.trials)
        return self._forward.first()

    def _is_stopping(self) -> bool:
        return bool(self._forward.seen) or self.is_out_of_time

    # --- what runs next ---

    def _submit(self) -> None:
        """Give every idle worker a run. As many more are asked for and recorded while the workers are busy, so that
        none of them waits for that."""
        self._ask_ahead(1)
        while self.pool.idle and self._queue:
            self._start(self._queue.pop(0))
            self._ask_ahead(1)
        self._ask_ahead(self.plan.jobs)

    def _ask_ahead(self, count: int) -> None:
        while len(self._queue) < count and self._may_ask():
            self._ask()

    def _start(self, task: Task) -> None:
        is_reporting = self.plan.pruner != "none" and task.seed == self.plan.seeds[0]
        if is_reporting:
            number = task.trial.number
            self._prunings[number] = Pruning(self.plan, number, self.trials[: self.plan.known_before(number)])
        if not task.trial.has_ended:  # another seed's run may have failed
            task.trial.state = RUNNING
        payload = self.payload(task, is_reporting)
        self._tasks[payload] = task
        self.pool.submit(payload)

    def _may_ask(self) -> bool:
        number = len(self.trials)
        known = self.trials[: self.plan.known_before(number)]
        return number < self.plan.trials and all(trial.has_ended for trial in known)

    def _ask(self) -> None:
        number = len(self.trials)
        while self._told < self.plan.known_before(number):
            self._search.tell(self.trials[self._told])
            self._told += 1
        row = self.recorded.get(number)
        if row is None:
            trial = Trial(number, self._search.ask(number))
            self.record(asdict(trial))
        else:
            trial = trial_from(row)
            self._search.ask(number, trial.parameters)
            if trial.state == FAILED and self.is_retried(trial):
                trial = Trial(number, trial.parameters)
        self.trials.append(trial)
        if not trial.has_ended:  # with a pruner one seed after the other: a pruned trial spares the rest
            seeds = self.plan.seeds if self.plan.pruner == "none" else self.plan.seeds[:1]
            self._queue += [Task(trial, seed) for seed in seeds]

    # --- what came of it ---

    def _take(self, event: Event) -> None:
        task = self._tasks[event.task]
        if event.kind == "report":
            self.pool.answer(event.task, self._should_prune(task.trial, event.value))
            return
        del self._tasks[event.task]
        if event.kind == "died":
            self._bury(task, event.value)
            return
        if self._queue and not self._is_stopping():  # its worker goes on while this is put on record
            self._start(self._queue.pop(0))
        self._finish_run(task, event.value)

    def _should_prune(self, trial: Trial, values: list[float]) -> bool:
        """Values come with those before them: a resumed run tells again what its pruner must have seen."""
        pruning, is_pruned = self._prunings[trial.number], False
        for value in values[len(pruning.values) :]:
            is_pruned = pruning.report(value)
        trial.values = list(pruning.values)
        return is_pruned

    def _bury(self, task: Task, exit_code: int) -> None:
        task.deaths += 1
        if self._is_stopping():
            return
        if task.deaths < DEATHS:
            self._queue.insert(0, task)
        else:
            self._end(task.trial, FAILED, f"the worker died {task.deaths} times (exit code {exit_code})")

    def _finish_run(self, task: Task, result: Result) -> None:
        trial = task.trial
        trial.seconds += result.seconds
        trial.task_seconds += result.task_seconds
        if result.state == "interrupted":
            if not self._is_stopping():  # somebody stopped this run alone: it goes on
                self._queue.insert(0, task)
            return
        if result.state == "refused":
            raise RunError(result.message)
        if trial.has_ended:
            return  # another seed's run has failed meanwhile
        if task.seed == self.plan.seeds[0]:
            trial.values = list(result.values)
        if result.state in (PRUNED, FAILED):
            self._end(trial, result.state, result.message)
            return
        if result.score is None:
            metric = self.plan.metric
            raise ConfigError(
                f"Trial {trial.number} never logged {metric}, so it has no score.{did_you_mean(metric, result.logged)} "
                f"It logged: {', '.join(result.logged) or 'nothing'}."
            )
        trial.seed_scores[task.seed] = result.score
        if len(trial.seed_scores) == len(self.plan.seeds):
            trial.score = fmean(trial.seed_scores[seed] for seed in self.plan.seeds)
            self._end(trial, FINISHED)
        elif self.plan.pruner != "none":
            self._queue.insert(0, Task(trial, self.plan.seeds[len(trial.seed_scores)]))

    def _end(self, trial: Trial, state: str, message: str = "") -> None:
        trial.state, trial.message = state, message
        self._queue = [task for task in self._queue if task.trial is not trial]
        if self.plan.pruner != "none":
            pruning = self._prunings.pop(trial.number)
            for value in trial.values[len(pruning.values) :]:  # those of a run that was only read, and the last one
                pruning.report(value)
            trial.rungs = pruning.rungs()
        self.record(asdict(trial))
        ended = [each for each in self.trials if each.has_ended]
        if state == FAILED and all(each.state == FAILED for each in ended):
            if len(ended) >= min(FAILURES, self.plan.trials):
                raise RunError(
                    f"The first {len(ended)} trials failed, so the sweep stops. Trial {trial.number}: {message}"
                )

    def _interrupt(self, number: int) -> None:
        self.pool.interrupt(signal.SIGKILL if number == signal.SIGKILL else signal.SIGTERM)  # whoever asks: save, leave


def trial_from(row: Mapping[str, Any]) -> Trial:
    """A trial as it stands on record."""
    known = {name: row[name] for name in Trial.__dataclass_fields__ if name in row}
    seeds = {int(seed): float(score) for seed, score in dict(known.get("seed_scores") or {}).items()}
    trial = Trial(**{**known, "seed_scores": seeds})
    if not trial.has_ended:
        return Trial(trial.number, trial.parameters)  # its runs are read again
    return trial
