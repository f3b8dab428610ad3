"""The loop: collect, update, evaluate, log and save when due, until the phases end. It knows no algorithm.

cycle of a phase   online      collect -> as many update passes as are due
                   offline     one update pass
                   eval_only   one evaluation
update pass        one batch, sampled once, through every update hook of the phase in order, then back to its buffer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rl_lab.buffers.base import Buffer
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.types import ConfigError, Phase, did_you_mean
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows.base import Workflow

Outcome = Literal["finished", "stopped", "interrupted"]


@dataclass(kw_only=True, eq=False)
class Orchestrator:
    """Owns the loop. Every part is handed in, so that a test can hand in others."""

    workflow: Workflow
    scheduler: PhaseScheduler
    buffers: Mapping[str, Buffer]
    housekeeping: Housekeeping
    stopwatch: Stopwatch
    interrupted: Callable[[], bool] = lambda: False
    begin_phase: Callable[..., None] = lambda index, *, is_new: None  # what a phase sets and loads

    def __post_init__(self) -> None:
        for phase in self.scheduler.phases:
            self._check_phase(phase)

    def run(self) -> Outcome:
        """Run every phase to its end, or until a stop rule or an interruption says so."""
        if self.housekeeping.is_final:  # resumed after its last checkpoint: there is nothing left to do
            return "finished" if self.scheduler.finished else "stopped"
        if self.housekeeping.stop_reason is not None:  # resumed after a stop rule had ended it
            self.housekeeping.finish(self.housekeeping.stop_reason)
            return "stopped"
        self.housekeeping.catch_up()
        entered = -1
        while not self.scheduler.finished:
            if entered != self.scheduler.index:
                entered = self.scheduler.index
                self.begin_phase(entered, is_new=self.scheduler.is_phase_new)
                self.workflow.enter_phase(self.scheduler.current())
            self._cycle(self.scheduler.current())
            controller = self.scheduler.current().controller
            phase_ended = self.scheduler.end_cycle()
            if phase_ended:
                self._forget_foreign_rows(controller)
            reason = self.housekeeping.after_cycle(phase_ended=phase_ended)
            failure = self.housekeeping.callbacks.error
            if self.interrupted() or failure is not None:
                self.housekeeping.stop_reason = reason
                self.housekeeping.save()
                if failure is not None:
                    raise failure
                return "interrupted"
            if reason is not None:
                self.housekeeping.finish(reason)
                return "stopped"
        self.housekeeping.finish(None)
        return "finished"

    def _forget_foreign_rows(self, controller: str | None) -> None:
        """An on-policy workflow learns nothing from rows that another controller collected in the phase before."""
        is_other = not self.scheduler.finished and self.scheduler.current().controller != controller
        if is_other and self.workflow.is_on_policy:
            for buffer in self.buffers.values():
                buffer.clear()

    def _cycle(self, phase: Phase) -> None:
        if phase.type == "eval_only":
            self.housekeeping.evaluate_now()
            return
        if self.scheduler.begin_cycle() and phase.type == "online":
            result = self.workflow.collect_step(self.scheduler.cycles, phase=phase)
            self.scheduler.report(result.counts)
            self.housekeeping.collected(result)
        for _ in range(self.scheduler.passes_due()):
            if not self._update_pass(phase.buffer):
                break

    def _update_pass(self, buffer_name: str) -> bool:
        """One batch through every update hook; False when the buffer has none to give yet."""
        buffer = self.buffers[buffer_name]
        phase = self.scheduler.current()
        if not buffer.ready():
            if phase.type == "offline":
                raise ConfigError(
                    f"Phase '{phase.name}' is offline, but buffer '{buffer_name}' holds no batch: "
                    "collect into it in an earlier online phase, or load a dataset into it."
                )
            self.scheduler.pass_skipped()
            return False
        with self.stopwatch.section("update"):
            batch = buffer.sample(phase.progress)
            for hook in phase.workflow_hooks:
                self.housekeeping.updated(getattr(self.workflow, hook)(batch, phase=phase))
            buffer.learned(batch)
        self.scheduler.pass_done()
        return True

    def _check_phase(self, phase: Phase) -> None:
        if phase.type == "eval_only":
            return self.workflow.check_phase(phase)
        if phase.buffer not in self.buffers:
            raise ConfigError(
                f"Phase '{phase.name}' uses the buffer '{phase.buffer}', which is not configured."
                f"{did_you_mean(phase.buffer, self.buffers)} There are: {', '.join(self.buffers)}."
            )
        self.workflow.check_phase(phase)
        self._check_rows_come(phase)
        buffer = self.buffers[phase.buffer]
        num_rows = getattr(buffer, "sequence_length", None)  # known beforehand by some
        if num_rows is not None and phase.workflow_hooks:
            self.workflow.check_rows(num_rows, buffer=phase.buffer)
        wants_priorities = getattr(buffer, "wants_priorities", False)
        if wants_priorities and phase.workflow_hooks and not self.workflow.notes_priorities:
            raise ConfigError(
                f"buffers.{phase.buffer} draws by priority, but {type(self.workflow).__name__} notes none: draw "
                "uniformly (`replay=uniform`; for sequences `uniform: 1.0, priority: 0.0`)."
            )
        return None

    def _check_rows_come(self, phase: Phase) -> None:
        """Refuse a phase that would find no rows, or would bring rows where none are taken."""
        holds_dataset = getattr(self.buffers[phase.buffer], "is_read_only", False)
        where, workflow = f"buffer '{phase.buffer}'", type(self.workflow).__name__
        if phase.type == "online":
            if holds_dataset:
                raise ConfigError(
                    f"Phase '{phase.name}' collects into {where}, which holds a dataset and takes no new rows: "
                    "name another buffer, or write `type: offline`."
                )
            return
        if not self.workflow.is_on_policy:
            return
        if holds_dataset:
            raise ConfigError(
                f"Phase '{phase.name}' learns from the dataset in {where}, but {workflow} learns only from its own "
                "actions: use an off-policy algorithm, such as q_learning."
            )
        before = self.scheduler.phases[: self.scheduler.phases.index(phase)]
        filled = [index for index, each in enumerate(before) if each.type == "online" and each.buffer == phase.buffer]
        others = [each for each in before[filled[-1] :] if each.controller != phase.controller] if filled else []
        if others:
            raise ConfigError(
                f"Phase '{phase.name}' is offline, but {workflow} learns only from its own actions and forgets what "
                f"'{others[0].controller or 'its policy'}' collected in phase '{others[0].name}': leave `controller` "
                "out there, or learn while collecting."
            )
