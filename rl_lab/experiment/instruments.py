"""What `debug:` adds to a run: the watch over every tensor, and instruments that only look.

Histograms, a profile of some updates and gradient checks wrap methods of the workflow and its optimizers, so that a run
without them has nothing to ask. None draws a random number, and none changes what is learnt; while gradients are
checked, modules go without their fast paths, whose last bits may differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.config.compose import to_yaml
from rl_lab.config.schema import DebugBlock
from rl_lab.experiment.watch import CRASH, Watch
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.media import Distribution
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.training.gradient_check import GradientCheck
from rl_lab.types import Batch, Metrics, Phase
from rl_lab.workflows.base import Workflow

SKIPPED = 3  # updates before a profile: their first kernels and allocations are not typical
TABLE_ROWS, SHOWN_ROWS = 30, 8
PROFILE = "profile"  # the folder of a run


@dataclass(frozen=True)
class Debugging:
    """Of one experiment; in a normal run there is nothing of it."""

    watch: Watch | None
    end: Callable[[], None]  # when the run ends


def attach_debugging(
    block: DebugBlock,
    orchestrator: Orchestrator,
    targets: Mapping[str, Any],
    config: Mapping[str, Any],
    run: RunDirectory | None,
) -> Debugging:
    """Wrap the workflow in what the block asks for; `targets` are the sections of a checkpoint."""
    workflow, logger = orchestrator.workflow, orchestrator.housekeeping.logger
    if block.histograms_every_updates is not None:
        Histograms(workflow, logger, every_updates=block.histograms_every_updates)
    if block.check_gradients:
        GradientReport(workflow, logger)
    end, watch = lambda: None, None
    if block.profile_updates is not None and run is not None:
        end = Profile(workflow, logger, updates=block.profile_updates, directory=run.path / PROFILE).end
    if block.check_finite:
        directory, text = None if run is None else run.path / CRASH, to_yaml(dict(config))
        watch = Watch(targets, workflow, orchestrator.scheduler, config_text=text, directory=directory)
    return Debugging(watch, end)


class Histograms:
    """Weights and gradients of every parameter, every so many updates, for TensorBoard."""

    def __init__(self, workflow: Workflow, logger: MetricLogger, *, every_updates: int) -> None:
        self._logger, self._every = logger, every_updates
        self._is_due, self._agent_steps = False, 0
        _wrap_hooks(workflow, self._update)
        for optimizer in workflow.context.optimizers.values():
            optimizer._change_parameters = partial(self._change, optimizer, optimizer._change_parameters)

    def _update(self, update: Callable[..., Metrics], batch: Batch, *, phase: Phase) -> Metrics:
        self._is_due = phase.progress.run.updates % self._every == 0
        self._agent_steps = phase.progress.run.agent_steps
        return update(batch, phase=phase)

    def _change(self, optimizer: Any, change: Callable[..., Metrics], everyone: Any, *joined: Any) -> Metrics:
        if self._is_due:  # of the first gradient step of the update
            for name, parameter, gradient in zip(optimizer.rule.names, optimizer.parameters, everyone, strict=True):
                self._show("weights", name, parameter)
                self._show("gradients", name, gradient)
            self._is_due = len(optimizer.parameters) == 0
        return change(everyone, *joined)

    def _show(self, kind: str, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            values = tensor.detach().float().cpu().numpy().copy().ravel()
            self._logger.show(f"{kind}/{name.replace('.', '/')}", Distribution(values), self._agent_steps)


class Profile:
    """torch.profiler around so many updates and what lies between them: a trace for chrome://tracing, and a table."""

    def __init__(self, workflow: Workflow, logger: MetricLogger, *, updates: int, directory: Path) -> None:
        self._logger, self._updates, self._directory = logger, updates, directory
        self._seen = 0
        self._profiler: Any = None
        self._last_hook: object = None
        _wrap_hooks(workflow, self._update)

    def _update(self, update: Callable[..., Metrics], batch: Batch, *, phase: Phase) -> Metrics:
        if self._last_hook is None or update is self._last_hook:  # several hooks of a phase are one update
            self._last_hook = update
            if self._seen == SKIPPED:
                self._begin()
            elif self._seen == SKIPPED + self._updates:
                self.end()
            self._seen += 1
        return update(batch, phase=phase)

    def _begin(self) -> None:
        cuda = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *cuda])
        self._profiler.start()

    def end(self) -> None:
        """Write what was seen; once."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        trace, file = self._directory / "trace.json", self._directory / "table.txt"
        profiler.export_chrome_trace(str(trace))
        table = profiler.key_averages().table(
            sort_by="self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total",
            row_limit=TABLE_ROWS,
            max_name_column_width=50,
        )
        file.write_text(table, encoding="utf-8")
        done = min(self._seen - SKIPPED, self._updates)
        self._logger.message(
            f"Profiled {done} updates: {trace} (open in chrome://tracing), {file}.\n{_short(profiler)}"
        )


class GradientReport:
    """At the first update: which parameters get no gradient, and which modules' gradients finite differences deny."""

    def __init__(self, workflow: Workflow, logger: MetricLogger) -> None:
        self._logger = logger
        parts: Mapping[str, Any] = {**workflow.context.components, **workflow.context.controllers}
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self._check: GradientCheck | None = GradientCheck(modules)
        self._idle: dict[str, str] = {}
        _wrap_hooks(workflow, self._update)
        for optimizer in workflow.context.optimizers.values():
            optimizer._change_parameters = partial(self._change, optimizer, optimizer._change_parameters)

    def _update(self, update: Callable[..., Metrics], batch: Batch, *, phase: Phase) -> Metrics:
        if self._check is None:
            return update(batch, phase=phase)
        with self._check.recording():
            metrics = update(batch, phase=phase)
        check, self._check = self._check, None
        for name, what in self._idle.items():
            self._logger.message(f"Gradient check: {name} {what} in the first update.", "warning")
        results = check.results()
        wrong = [each for each in results if not each.is_right]
        for each in wrong:
            sentence = f"{each.module}: autograd says {each.analytic:.6g}, finite differences {each.numeric:.6g}"
            self._logger.message(f"Gradient check: {sentence}. Its backward is wrong, or it is not smooth.", "warning")
        names = ", ".join(each.module for each in results if each.is_right) or "none"
        self._logger.message(
            f"Gradient check: {len(results) - len(wrong)} modules agree with finite differences: {names}."
        )
        if check.skipped:
            self._logger.message(
                f"Gradient check: takes or gives more than tensors, so not checked: {', '.join(check.skipped)}."
            )
        return metrics

    def _change(self, optimizer: Any, change: Callable[..., Metrics], everyone: Any, *joined: Any) -> Metrics:
        if self._check is not None:
            for name, gradient in zip(optimizer.rule.names, everyone, strict=True):
                if gradient is None:
                    self._idle.setdefault(name, "gets no gradient")
                elif not bool(gradient.any()):
                    self._idle.setdefault(name, "has a gradient of zeros")
                else:
                    self._idle.pop(name, None)
        return change(everyone, *joined)


def _wrap_hooks(workflow: Any, around: Callable[..., Metrics]) -> None:
    for hook in workflow.hooks():
        setattr(workflow, hook, partial(around, getattr(workflow, hook)))


def _short(profiler: Any) -> str:
    """The operations that take most of the time of the CPU, or of the GPU where there is one."""
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in events) or 1.0
    rows = [
        f"  {getattr(e, key) / total:6.1%}  {getattr(e, key) / 1000:9.2f} ms  {e.count:7,} x  {_name(e.key)}"
        for e in events
    ]
    return "\n".join(rows[:SHOWN_ROWS])


def _name(key: str) -> str:
    return re.sub(r"\s+", " ", key)[:60]
