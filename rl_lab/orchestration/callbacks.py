"""A script's own functions, called as a run goes on: they look at it and may stop it, and change nothing else.

Random generators are put back after every call, so that a run with callbacks is the run without them to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rl_lab.types import ConfigError, Episode
from rl_lab.utils.seeding import get_rng_state, set_rng_state


class Moment(dict[str, Any]):
    """What a callback is handed: plain values by name. `stop()` ends the run after this cycle, like returning False."""

    is_stopping = False

    def stop(self) -> None:
        self.is_stopping = True


Callback = Callable[[Moment], Any]


@dataclass(eq=False)
class Callbacks:
    """Each is called with a Moment, or not at all while it is None."""

    on_row: Callback | None = None  # a row as in metrics.jsonl
    on_evaluation: Callback | None = None  # the counters and every eval/ metric
    on_checkpoint: Callback | None = None  # the counters, path, score and is_best
    on_episode: Callback | None = None  # env_index, episode_return, length, is_terminal of a training episode

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None and not callable(value):
                raise ConfigError(f"{each.name} is {value!r}: write a function that takes one argument, or None.")
        self.stop_reason: str | None = None
        self.error: Exception | None = None  # raised by a callback; the run saves, then raises it

    def row(self, row: Mapping[str, Any]) -> None:
        if self.on_row is not None:
            self._call("on_row", self.on_row, [row])

    def evaluation(self, counts: Mapping[str, int], metrics: Mapping[str, Any]) -> None:
        if self.on_evaluation is not None:
            numbers = {name: float(value) for name, value in metrics.items()}
            self._call("on_evaluation", self.on_evaluation, [{**counts, **numbers}])

    def checkpoint(self, counts: Mapping[str, int], *, path: object, score: float | None, is_best: bool) -> None:
        if self.on_checkpoint is not None:
            found = {**counts, "path": path, "score": score, "is_best": is_best}
            self._call("on_checkpoint", self.on_checkpoint, [found])

    def episodes(self, episodes: Iterable[Episode]) -> None:
        if self.on_episode is not None:
            found = [{name: value for name, value in vars(each).items() if name != "is_cut"} for each in episodes]
            self._call("on_episode", self.on_episode, found)

    def _call(self, name: str, callback: Callback, contents: list[Any]) -> None:
        if not contents or self.error is not None:
            return
        state = get_rng_state()
        try:
            for content in contents:
                moment = Moment(content)
                if callback(moment) is False or moment.is_stopping:
                    self.stop_reason = self.stop_reason or f"{name} asked for it"
        except Exception as error:  # noqa: BLE001 (a user's function: its error waits until the cycle is saved)
            self.error = error
        finally:
            set_rng_state(state)
