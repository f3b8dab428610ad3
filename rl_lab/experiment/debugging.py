"""What the block `debug:` adds to a run: the watch over every tensor, and instruments that only look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_lab.config.compose import to_yaml
from rl_lab.config.schema import DebugBlock
from rl_lab.experiment.instruments import attach_instruments
from rl_lab.experiment.watch import CRASH, Watch
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.runs.run_directory import RunDirectory


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
    workflow, scheduler = orchestrator.workflow, orchestrator.scheduler
    folder = None if run is None else run.path
    end = attach_instruments(block, workflow, orchestrator.housekeeping.logger, folder)
    watch = None
    if block.check_finite:
        directory = None if folder is None else folder / CRASH
        watch = Watch(targets, workflow, scheduler, config_text=to_yaml(dict(config)), directory=directory)
    return Debugging(watch, end)
