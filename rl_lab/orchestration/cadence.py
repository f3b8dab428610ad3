"""When something is due: every so many agent steps or updates (reproducible), or every so many minutes (not)."""

from __future__ import annotations

from dataclasses import dataclass

from rl_lab.types import ConfigError, Counts, StateTree


@dataclass(frozen=True)
class Cadence:
    """Due when any of its units has passed another multiple. All None: never."""

    every_steps: int | None = None  # agent steps
    every_updates: int | None = None
    every_minutes: float | None = None
    place: str = "cadence"

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_updates", "every_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{self.place}.{name} is {value}: write a number above 0, or null for never.")


class DueMarks:
    """Remembers the last time something was done. Minutes start anew with every process."""

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self._steps_mark = 0
        self._updates_mark = 0
        self._minute_mark = 0.0

    def due(self, counts: Counts, session_s: float) -> bool:
        """True once per passed multiple; asking again gives False until the next one."""
        cadence = self.cadence
        steps_mark = counts.agent_steps // cadence.every_steps if cadence.every_steps else 0
        updates_mark = counts.updates // cadence.every_updates if cadence.every_updates else 0
        late = cadence.every_minutes is not None and session_s - self._minute_mark >= 60.0 * cadence.every_minutes
        is_due = steps_mark > self._steps_mark or updates_mark > self._updates_mark or late
        if is_due:
            self._steps_mark, self._updates_mark, self._minute_mark = steps_mark, updates_mark, session_s
        return is_due

    def get_state(self) -> StateTree:
        every = {"every_steps": self.cadence.every_steps, "every_updates": self.cadence.every_updates}
        return {"steps_mark": self._steps_mark, "updates_mark": self._updates_mark, **every}

    def set_state(self, state: StateTree) -> None:
        """Marks of another cadence, as of a run that goes on for longer, are those of the same instant in this one."""
        cadence = self.cadence
        self._steps_mark = _same_instant(state["steps_mark"], state.get("every_steps"), cadence.every_steps)
        self._updates_mark = _same_instant(state["updates_mark"], state.get("every_updates"), cadence.every_updates)


def _same_instant(mark: int, before: int | None, now: int | None) -> int:
    return mark * before // now if before and now else mark
