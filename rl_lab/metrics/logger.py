"""The window of numbers between two log rows.

Hooks hand over metrics as often as they like; nothing is read back from the device until a row is written,
and then once for everything. Sums are exactly rounded (`math.fsum`), so that neither the device nor the cut
between two checkpoints can change a bit of a row.

metrics.jsonl has every row at once. Local sinks and the monitor look at the rows of a second together: for a row alone,
between two updates, they take five times as long, because nothing of theirs is in the processor's caches any more.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rl_lab.metrics.media import Media
from rl_lab.metrics.monitor import Monitor
from rl_lab.metrics.names import check_name
from rl_lab.metrics.series import pack_series, unpack_series
from rl_lab.metrics.writers import Level, Row, Writer
from rl_lab.types import Counts, Metrics, StateTree

PACK_LENGTH = 1024  # scalar tensors a metric keeps before they become one vector, still on their device
SECONDS_BETWEEN_DELIVERIES = 1.0
STRICT_NAMES_VARIABLE = "RL_LAB_STRICT_METRIC_NAMES"


class MetricLogger:
    """Gathers metrics between rows and hands each row to every writer.

    A row holds the mean of each metric over the window; names that end in `_max`, `_min` and `_total` hold
    the largest, the smallest and the sum. A tensor handed to `add` must not be written to afterwards: what
    replays a CUDA graph clones its metrics first.

    strict_names refuses names that names.md does not list; None asks the environment variable
    RL_LAB_STRICT_METRIC_NAMES, which tests set to 1. A user's own workflow may log names of its own.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        *,
        strict_names: bool | None = None,
        monitor: Monitor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        names = [writer.name for writer in writers]
        assert len(set(names)) == len(names), f"writers need different names to be restored: {names}"
        self.writers = tuple(writers)
        self.monitor = monitor or Monitor({})  # looks at every row
        self.strict_names = os.environ.get(STRICT_NAMES_VARIABLE) == "1" if strict_names is None else strict_names
        self.last_non_finite: tuple[str, ...] = ()  # metrics of the newest row that are NaN or infinite
        self._numbers: dict[str, list[float]] = {}
        self._tensors: dict[str, list[Tensor]] = {}  # 0-d tensors, and 1-d tensors of scalars already packed
        self._mark: StateTree = None  # where the run ended
        self._pretended: StateTree = None  # while a state is saved that goes back there
        self._known_names: set[str] = set()
        self._unwatched: list[Row] = []  # that the monitor has not looked at
        self._clock, self._due_at = clock, clock()

    def add(self, metrics: Metrics) -> None:
        """Take numbers and detached scalar tensors into the window; never waits for a device."""
        for name, value in metrics.items():
            self._check_name(name)
            if isinstance(value, Tensor):
                assert value.dim() == 0, f"metric '{name}' has shape {tuple(value.shape)}, not one number"
                assert not value.requires_grad, f"metric '{name}' still holds its graph: detach it"
                tensors = self._tensors.setdefault(name, [])
                tensors.append(value)
                if len(tensors) >= PACK_LENGTH:
                    self._tensors[name] = [_joined_tensors(run) for run in _by_device(tensors)]
            else:
                self._numbers.setdefault(name, []).append(float(value))

    def write(self, counts: Counts, *, wall_s: float, values: Metrics | None = None) -> Row:
        """Form one row from the window and from `values` (taken as they are), write it, and begin a new window."""
        values = values or {}
        doubled = sorted(values.keys() & (self._numbers.keys() | self._tensors.keys()))
        assert not doubled, f"metrics {doubled} were both added to the window and given to write"
        for name in values.keys() - self._known_names:
            self._check_name(name)
        given = {name: [value.detach()] for name, value in values.items() if isinstance(value, Tensor)}
        read = _read({**self._tensors, **given})
        metrics: Row = {name: read.pop(name)[0] for name in given}
        metrics.update((name, _plain_number(value)) for name, value in values.items() if name not in given)
        metrics.update((name, _reduce(name, numbers)) for name, numbers in _joined(self._numbers, read).items())
        self._numbers, self._tensors = {}, {}
        row: Row = {**counts.as_dict(), "wall_s": float(wall_s)}
        row.update((name, metrics[name]) for name in sorted(metrics))
        self.last_non_finite = tuple(name for name in row if not math.isfinite(row[name]))
        for writer in self.writers:
            writer.write(row)
        self._unwatched.append(row.copy())
        if self.last_non_finite or self._clock() >= self._due_at:
            self.deliver()
            self._due_at = self._clock() + SECONDS_BETWEEN_DELIVERIES
        return row

    def message(self, text: str, level: Level = "info") -> None:
        """Show a sentence on the writers that show text."""
        for writer in self.writers:
            writer.message(text, level)

    def show(self, name: str, media: Media, agent_steps: int) -> None:
        """Hand a video, a picture or a histogram to the writers that show them."""
        for writer in self.writers:
            writer.show(name, media, agent_steps)

    def get_state(self) -> StateTree:
        """The unwritten window, exact to the bit, and where each writer stands."""
        self.deliver()
        # The window itself becomes numbers, so that this run and one resumed from here go on alike.
        self._numbers, self._tensors = _joined(self._numbers, _read(self._tensors)), {}
        return self._pretended or {**self._standing(), "mark": self._mark}

    def _standing(self) -> dict[str, StateTree]:
        return {
            "window": pack_series(self._numbers),
            "writers": {writer.name: writer.get_state() for writer in self.writers},
            "monitor": self.monitor.get_state(),
        }

    def mark(self) -> None:
        """Remember this place: a run that ends here may be continued after all, and then goes back to it."""
        self.get_state()
        self._mark = self._standing()

    @contextmanager
    def at_mark(self) -> Iterator[None]:
        """Inside, a state that is saved is the marked one; afterwards, this logger goes back there."""
        self._pretended = {**self._mark, "mark": None}
        try:
            yield
        finally:
            state, self._pretended = self._pretended, None
        self.set_state(state)

    def set_state(self, state: StateTree) -> None:
        """Go back to a saved window. A writer that was not there when the state was saved starts afresh."""
        self._numbers, self._tensors, self._mark = unpack_series(state["window"]), {}, state.get("mark")
        self._unwatched = []
        self.last_non_finite = ()
        if "monitor" in state:  # checkpoints of earlier versions do not have it
            self.monitor.set_state(state["monitor"])
        for writer in self.writers:
            if writer.name in state["writers"]:
                writer.set_state(state["writers"][writer.name])

    def restart(self) -> None:
        """Begin anew: rows that an earlier process wrote without ever saving a checkpoint vanish."""
        self._numbers, self._tensors, self._unwatched = {}, {}, []
        self.monitor.restart()
        for writer in self.writers:
            writer.restart()

    def deliver(self) -> None:
        """Let no row wait any longer: a second has passed, or what comes next may take a while."""
        for writer in self.writers:
            writer.deliver()
        rows, self._unwatched = self._unwatched, []
        for row in rows:
            for alert in self.monitor.check(row):
                self.message(alert.sentence, "warning")

    def flush(self) -> None:
        self.deliver()
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        """Close every writer, even where closing an earlier one fails."""
        with ExitStack() as stack:
            for writer in reversed(self.writers):
                stack.callback(writer.close)
            stack.callback(self.deliver)

    def _check_name(self, name: str) -> None:
        if name not in self._known_names:
            check_name(name, strict=self.strict_names)
            self._known_names.add(name)


def _plain_number(value: Any) -> float | int:
    """A Python number: whole numbers stay whole, numpy's scalars lose their type."""
    if type(value) is float:
        return value
    number = value.item() if hasattr(value, "item") else value
    return int(number) if isinstance(number, int) else float(number)


def _reduce(name: str, values: list[float]) -> float:
    if name.endswith(("_max", "_min")):
        if any(value != value for value in values):
            return math.nan
        return max(values) if name.endswith("_max") else min(values)
    total = _exact_sum(values)
    return total if name.endswith("_total") else total / len(values)


def _exact_sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond the largest float, or infinities of both signs
        return float(sum(values))


def _joined(first: Mapping[str, list[float]], second: Mapping[str, list[float]]) -> dict[str, list[float]]:
    names = dict.fromkeys([*first, *second])
    return {name: [*first.get(name, ()), *second.get(name, ())] for name in names}


def _by_device(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    for _, run in groupby(tensors, key=lambda tensor: tensor.device):
        yield list(run)


def _joined_tensors(tensors: list[Tensor]) -> Tensor:
    """Scalars and vectors of one device as one vector, wide enough to hold every float and counter exactly."""
    runs = [list(run) for _, run in groupby(tensors, key=lambda each: (each.dtype, each.dim()))]
    vectors = [torch.cat(run) if run[0].dim() else torch.stack(run) for run in runs]
    if len(vectors) == 1 and vectors[0].is_floating_point():
        return vectors[0]
    wide = torch.float32 if vectors[0].device.type == "mps" else torch.float64  # MPS has no float64
    return torch.cat([vector.to(wide) for vector in vectors])


def _read(tensors: Mapping[str, list[Tensor]]) -> dict[str, list[float]]:
    """Every tensor as Python floats, with one copy from each device."""
    everything = [(name, tensor) for name, column in tensors.items() for tensor in column]
    numbers: dict[str, list[float]] = {name: [] for name in tensors}
    for device in {tensor.device for _, tensor in everything}:
        here = [(name, tensor) for name, tensor in everything if tensor.device == device]
        flat: list[float] = _joined_tensors([tensor for _, tensor in here]).tolist()
        start = 0
        for name, tensor in here:
            end = start + tensor.numel()
            numbers[name] += flat[start:end]
            start = end
    return numbers
