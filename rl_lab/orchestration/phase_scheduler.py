"""Which hook next? A finite state machine over `training.phases`: pure Python, no tensors.

It counts only what hooks report. A hook that could not run reports nothing and so counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from rl_lab.types import ConfigError, Counts, Phase, Progress, StateTree

DURATIONS = {"duration_steps": "agent_steps", "duration_updates": "updates", "duration_cycles": None}


class PhaseScheduler:
    """Walks the phases in order, adding up what is reported."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        if not phases:
            raise ConfigError("training.phases is empty: write at least one phase.")
        names = [phase.name for phase in phases]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"training.phases has two phases called '{sorted(twice)[0]}': names must differ.")
        self.phases = tuple(phases)
        self.index = 0
        self.run_counts = Counts()
        self.phase_counts = Counts()
        self.cycles = 0
        # Update passes owed at the last resume, agent steps of this phase since then, and passes paid. Exact, since 0.3
        # added ten times is not 3 in binary; apart, since whole numbers take a tenth of a Fraction's time.
        self._carried, self._steps, self._paid = Fraction(0), 0, 0
        self._is_cycle_open = False  # its rows are collected, and some of its passes are still to come
        self._ended: StateTree = {}  # where the phase before this one stood when it ended: it may be made longer
        self.on_restore: Callable[[], None] = lambda: None  # called when the counts are those of a checkpoint
        ratios = [phase.updates_per_step for phase in phases]
        self._ratios = [None if ratio is None else Fraction(str(ratio)) for ratio in ratios]  # str: 0.3 means 3/10

    @property
    def finished(self) -> bool:
        return self.index >= len(self.phases)

    @property
    def credit(self) -> Fraction:
        """Update passes owed."""
        return self._carried + self._steps * (self._ratios[self.index] or 0) - self._paid

    @property
    def _whole_credit(self) -> int:
        """`int(credit)`, asked for in every cycle."""
        ratio, carried = self._ratios[self.index], self._carried
        if ratio is None:
            return int(self.credit)
        owed = carried.numerator * ratio.denominator + self._steps * ratio.numerator * carried.denominator
        return owed // (carried.denominator * ratio.denominator) - self._paid

    def current(self) -> Phase:
        """The phase under way, with its progress."""
        progress = Progress(self.fraction(), self.run_counts, self.phase_counts, self.cycles)
        # `replace` without asking the class for its fields, in a third of the time: this is called before every update
        phase = object.__new__(Phase)
        phase.__dict__.update(self.phases[self.index].__dict__, progress=progress)
        return phase

    def fraction(self) -> float:
        """How much of the current phase is done, 0 to 1."""
        phase = self.phases[self.index]
        for name, unit in DURATIONS.items():
            duration = getattr(phase, name)
            if duration is not None:
                done = self.cycles if unit is None else getattr(self.phase_counts, unit)
                return min(1.0, done / duration)
        raise AssertionError("a phase without a duration was let through")

    def run_fraction(self) -> float:
        """How much of the whole run is done: by agent steps where every phase is as long as so many, else by phases."""
        if self.finished:
            return 1.0
        total = total_steps(self.phases)
        if total is not None:
            done = sum(phase.duration_steps or 0 for phase in self.phases[: self.index])
            return (done + self.fraction() * (self.phases[self.index].duration_steps or 0)) / total
        return (self.index + self.fraction()) / len(self.phases)

    @property
    def is_phase_new(self) -> bool:
        return self.cycles == 0 and not self._is_cycle_open

    @property
    def ended_in_mid_cycle(self) -> bool:
        """Whether the run ended with passes still owed, which a longer one makes before it collects again."""
        return self.finished and bool(self._ended.get("is_cycle_open"))

    def begin_cycle(self) -> bool:
        """Whether to collect: not in a cycle that has its rows already."""
        has_rows, self._is_cycle_open = self._is_cycle_open, False
        return not has_rows

    def report(self, counts: Counts) -> None:
        """Add what a hook did."""
        self.run_counts += counts
        self.phase_counts += counts
        self._steps += counts.agent_steps

    def passes_due(self) -> int:
        """Update passes to run now: one per cycle, or what the train ratio owes."""
        phase = self.phases[self.index]
        if phase.type == "eval_only" or not phase.workflow_hooks:
            return 0
        due = 1 if phase.updates_per_step is None or phase.type == "offline" else self._whole_credit
        if phase.duration_updates is not None:
            due = min(due, phase.duration_updates - self.phase_counts.updates)
        return due

    def pass_done(self) -> None:
        """One batch went through every update hook of the phase."""
        self.run_counts, self.phase_counts = _one_update_more(self.run_counts), _one_update_more(self.phase_counts)
        if self._ratios[self.index] is not None and self.phases[self.index].type == "online":
            self._paid += 1

    def pass_skipped(self) -> None:
        """The buffer had no batch to give: nothing is counted and nothing is owed for later."""
        self._paid += self._whole_credit

    def end_cycle(self) -> bool:
        """Close a collect-and-update round; True when that ended the phase."""
        self.cycles += 1
        if self.fraction() < 1.0:
            return False
        phase = self.phases[self.index]
        has_ratio = phase.type == "online" and phase.updates_per_step is not None and bool(phase.workflow_hooks)
        is_open = has_ratio and phase.duration_updates is not None and self._whole_credit > 0
        self._ended = {**self._standing(), "cycles": self.cycles - is_open, "is_cycle_open": is_open}
        self.index += 1
        self.phase_counts, self.cycles, self._carried, self._steps, self._paid = Counts(), 0, Fraction(0), 0, 0
        return True

    def reopen(self) -> None:
        """Go on in the last phase, which is longer now than when it ended."""
        if self.finished:
            self.index -= 1
            self._stand(self._ended)

    def _standing(self) -> StateTree:
        credit = "0" if self.finished else str(self.credit)
        counts = {"phase_counts": self.phase_counts.as_dict(), "cycles": self.cycles, "credit": credit}
        return {**counts, "is_cycle_open": self._is_cycle_open}

    def _stand(self, state: StateTree) -> None:
        self.cycles, self._carried, self._steps, self._paid = state["cycles"], Fraction(state["credit"]), 0, 0
        self.phase_counts = Counts(**state["phase_counts"])
        self._is_cycle_open = state.get("is_cycle_open", False)  # checkpoints of earlier versions do not know it

    def get_state(self) -> StateTree:
        run = {"index": self.index, "run_counts": self.run_counts.as_dict(), "ended": self._ended}
        return {**run, **self._standing()}

    def set_state(self, state: StateTree) -> None:
        self.index, self.run_counts, self._ended = (
            state["index"],
            Counts(**state["run_counts"]),
            state.get("ended") or {},
        )
        self._stand(state)
        self.on_restore()


def _one_update_more(counts: Counts) -> Counts:
    return Counts(counts.env_frames, counts.agent_steps, counts.episodes, counts.updates + 1)


def total_steps(phases: Sequence[Phase]) -> int | None:
    """Agent steps of the whole run, where every phase says its own."""
    durations = [phase.duration_steps for phase in phases]
    return None if None in durations else sum(duration or 0 for duration in durations)
