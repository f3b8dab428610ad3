"""Repeat a run from its config and seed, and compare every row and every saved number with what it left.

The repetition writes nothing: its rows and its state are compared in memory as they come, so that it ends at the first
row that is too far apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_lab.environments.handed import is_handed
from rl_lab.environments.lookup import find
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.identical import Difference, comparable, reproducible, row_differences, state_differences
from rl_lab.experiment.load import open_config
from rl_lab.metrics.writers import encode_row
from rl_lab.orchestration.callbacks import Callbacks, Moment
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.lineage import lineage_of
from rl_lab.runs.manifest import changes_since, git_changes_since
from rl_lab.runs.metrics_file import read_metrics
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import gather_state
from rl_lab.types import RunError

ENDED = ("finished", "stopped")  # by their phases or by a rule, which ends a repetition at the same place
NOT_REPEATED = ("minutes is spent", "asked for it")  # reasons to stop that come from the clock or from a callback
OF_THE_END = ("progress", "logger", "phase_state")  # sections that the end of a run changes once more
Outcome = Literal["identical", "within_tolerance", "different"]


@dataclass
class RunVerdict:
    """How a repetition compares with a run."""

    tolerance: float
    rows_recorded: int = 0
    rows_compared: int = 0
    rows_identical: int = 0
    checkpoint: str | None = None  # the one whose state was compared
    sections: list[str] = field(default_factory=list)  # of it
    differences: list[Difference] = field(default_factory=list)  # of the first row or the checkpoint that differs
    largest: Difference | None = None  # of all that were within the tolerance
    reasons: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        if self.differences:
            return "different"
        return "identical" if self.largest is None else "within_tolerance"

    def take(self, found: Iterable[Difference]) -> bool:
        """Note the differences of a row or a state; whether all of them are within the tolerance."""
        found = sorted(found, key=lambda each: -each.relative)
        if found and found[0].relative > self.tolerance:
            self.differences = found
            return False
        if found and (self.largest is None or found[0].relative > self.largest.relative):
            self.largest = found[0]
        return True


def verify_run(
    run: RunDirectory,
    *,
    steps: int | None = None,
    tolerance: float = 1e-5,
    trust: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RunVerdict:
    """Run it again, to its end or for its first `steps` agent steps (updates, where a run takes no steps)."""
    config, manifest = open_config(run, trust), run.read_manifest()
    if is_handed(str(config["environment"]["id"])):
        find(config["environment"]["id"])
    config = quietly(config)
    config["training"] = {**config["training"], "stop": {**(config["training"]["stop"] or {}), "wall_minutes": None}}
    rows = read_metrics(run.metrics_path)
    if not rows:
        raise RunError(f"Run {run.id} has no row in metrics.jsonl, so there is nothing to compare a repetition with.")
    repetition = _Repetition(run, rows, steps, RunVerdict(tolerance, rows_recorded=len(rows)), progress)
    experiment = build(
        config,
        run=None,
        quiet=True,
        interrupted=lambda: repetition.is_over(experiment),
        callbacks=Callbacks(on_row=repetition.compare_row),
    )
    try:
        experiment.curriculum.read_ahead(0, is_new=True)
        _warm_start(experiment, run, manifest)
        if experiment.orchestrator.run() != "interrupted":
            repetition.compare_end(experiment)
    finally:
        experiment.close()
    verdict = repetition.verdict
    if verdict.outcome != "identical":
        verdict.reasons = reasons(run, manifest, environment_id=str(config["environment"]["id"]))
    return verdict


def quietly(config: dict[str, Any]) -> dict[str, Any]:
    """The same run without what only shows it."""
    silent = {"terminal": "quiet", "tensorboard": False, "writers": []}
    unseen = {"video": False, "video_every": None, "dream_every_steps": None, "dream_every_updates": None}
    return {
        **config,
        "logging": {**(config["logging"] or {}), **silent},
        "evaluation": {**(config["evaluation"] or {}), **unseen},
    }


def reasons(run: RunDirectory, manifest: dict[str, Any], *, environment_id: str) -> list[str]:
    """Why a repetition here may differ, the likeliest first."""
    edited = f"{run.config_path}, which has been changed since the run began (its hash in manifest.json differs)"
    found = [*([edited] if run.has_changed_config() else [])]
    found += [*changes_since(manifest), *git_changes_since(manifest, Path.cwd())]
    return found or [
        "nothing that is recorded differs: perhaps the environment does not follow its seed (`rl-lab envs check "
        f"{environment_id}` finds out), or files that it reads have changed"
    ]


class _Repetition:
    """What is asked after every cycle and every row of the repetition."""

    def __init__(
        self,
        run: RunDirectory,
        rows: list[dict[str, Any]],
        steps: int | None,
        verdict: RunVerdict,
        progress: Callable[[int, int], None],
    ) -> None:
        self.rows, self.verdict, self._progress = rows, verdict, progress
        self._unit = "agent_steps" if rows[-1]["agent_steps"] else "updates"
        last = rows[-1][self._unit]
        self._last = last if steps is None else min(steps, last)
        self._is_whole = self._last == last
        self._checkpoint = self._newest_within(CheckpointStore(run.checkpoints_dir, identity=run.identity()))
        reason = self._checkpoint.state["progress"].get("stop_reason") if self._checkpoint else None
        is_by_chance = str(reason).endswith(NOT_REPEATED)
        self._ends_alike = self._is_whole and run.read_status()["state"] in ENDED and not is_by_chance

    def _newest_within(self, store: CheckpointStore) -> Checkpoint | None:
        """The newest whole checkpoint that the repetition reaches."""
        if self._is_whole:
            return store.load_newest_valid(lambda sentence: None)
        for path in store.paths():
            if store.load(path, []).counts[self._unit] <= self._last:
                return store.load(path)
        return None

    def compare_row(self, row: Moment) -> None:
        verdict = self.verdict
        if verdict.rows_compared == len(self.rows) or verdict.differences:
            return
        found = json.loads(encode_row(dict(row)))
        recorded = self.rows[verdict.rows_compared]
        verdict.rows_compared += 1
        differing = list(row_differences(recorded, found, number=verdict.rows_compared))
        verdict.rows_identical += not differing
        verdict.take(differing)
        self._progress(int(row[self._unit]), self._last)

    def is_over(self, experiment: Experiment) -> bool:
        """After a cycle: whether there is nothing more to compare."""
        if self.verdict.differences:
            return True
        self._compare_state(experiment, leave_out=OF_THE_END if self._has_ended() else ())
        here = experiment.housekeeping.counts.as_dict()[self._unit]
        return here > self._last if self._ends_alike else here >= self._last

    def compare_end(self, experiment: Experiment) -> None:
        """The repetition has ended by itself."""
        verdict = self.verdict
        if verdict.differences:
            return
        if self._has_ended():
            self._compare_state(experiment, leave_out=())
        if verdict.rows_compared < len(self.rows) and self._ends_alike:
            missing = self.rows[verdict.rows_compared]
            facts = {"row": verdict.rows_compared + 1, "agent_steps": missing.get("agent_steps")}
            verdict.differences = [Difference("the whole row", "there", "missing", math.inf, **facts)]

    def _has_ended(self) -> bool:
        """Whether the checkpoint is of a run that was over, or about to be."""
        progress = {} if self._checkpoint is None else self._checkpoint.state["progress"]
        return bool(progress.get("is_final") or progress.get("stop_reason"))

    def _compare_state(self, experiment: Experiment, *, leave_out: Sequence[str]) -> None:
        """With the checkpoint, where the repetition stands at its counters."""
        if self._checkpoint is None or self._checkpoint.counts != experiment.housekeeping.counts.as_dict():
            return
        recorded, found = reproducible(self._checkpoint), comparable(gather_state(experiment.targets))
        self.verdict.checkpoint = self._checkpoint.path.name
        self.verdict.sections = [name for name in recorded if name in found and name not in leave_out]
        self.verdict.take(
            each
            for name in self.verdict.sections
            for each in state_differences(*({name: s[name]} for s in (recorded, found)))
        )


def _warm_start(experiment: Experiment, run: RunDirectory, manifest: dict[str, Any]) -> None:
    """Begin with the weights that the run began with, where it took them from another."""
    origin = next((each for each in lineage_of(manifest) if each["event"].startswith("warm_start")), None)
    if origin is None:
        return
    store = CheckpointStore(run.path.parent / str(origin.get("source")) / "checkpoints")
    path = store.directory / str(origin.get("checkpoint"))
    if not path.is_dir():
        raise RunError(
            f"Run {run.id} began with the weights in {path}, which is not there any more, so it cannot be repeated."
        )
    checkpoint = store.load(path, sections=experiment.WARM_SECTIONS)
    experiment.warm_start(checkpoint, with_optimizers=origin["event"] == "warm_start_optimizer")
