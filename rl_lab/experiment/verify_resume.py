"""Prove that an experiment resumes exactly: train it shortly, cut it at several points, resume, compare with the run
that nobody cut.

Two kinds of cut: the run is asked to stop after a cycle, as Ctrl-C does; or its process is killed with kill -9.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_lab.config.compose import to_yaml
from rl_lab.config.files import from_yaml
from rl_lab.config.schema import read_settings
from rl_lab.environments.handed import is_handed
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.curriculum import pin_sources
from rl_lab.experiment.identical import Difference, reproducible, row_differences, state_differences
from rl_lab.experiment.session import continue_run, start_run
from rl_lab.experiment.trust import foreign_packages, remember_consent
from rl_lab.experiment.verify_run import quietly
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.manifest import collect_manifest
from rl_lab.runs.metrics_file import read_metrics
from rl_lab.runs.run_directory import RunDirectory, first_files
from rl_lab.types import ConfigError, RunError

EPISODES, TIMEOUT_STEPS = 2, 200  # of an evaluation
PATIENCE_S = 600.0  # for a process until it is killed
# Not `rl-lab train FILE`: a file that names plugins may not import them, and here the user has named the experiment.
TRAIN = """
import sys
from rl_lab.experiment.verify_resume import train_file
train_file(*sys.argv[1:])
"""


@dataclass
class Cut:
    """One interrupted run: where it was cut, where it went on from, and what differs at its end."""

    kind: str  # "stop" or "kill -9"
    agent_steps: int  # when it was cut
    updates: int
    resumed_at: int | None = None  # agent steps of the checkpoint; None: from its beginning
    rows: int = 0  # compared
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return not self.differences


def verify_resume(
    config: dict[str, Any],
    *,
    updates: int = 8,
    cuts: int = 3,
    kills: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Cut]:
    """Every phase for `updates` updates (cycles, where it does not learn), in a folder that is gone afterwards."""
    if kills and is_handed(str(config["environment"]["id"])):
        raise ConfigError("An environment that is handed over cannot be made in another process: write kills=0.")
    remember_consent(config)
    config = shortened(pin_sources(config, Path(config["runs"]["directory"])), updates)
    total = 1 + cuts + kills
    with tempfile.TemporaryDirectory(prefix="rl_lab_verify_") as folder:
        progress(0, total)
        whole = _begin(config, Path(folder), "whole")
        cycles = _train(config, whole, stop_after=None)
        rows = len(read_metrics(whole.metrics_path))
        if cycles < 2 or rows < 2:
            raise RunError(
                f"The shortened run has {cycles} cycles and {rows} rows, too few to cut it: ask for more updates."
            )
        found: list[Cut] = []
        for index in range(cuts):
            progress(len(found) + 1, total)
            run = _begin(config, Path(folder), f"cut{index}")
            _train(config, run, stop_after=_spread(index, cuts, cycles - 1))
            found.append(_resumed(run, config, whole, kind="stop"))
        for index in range(kills):
            progress(len(found) + 1, total)
            run = _kill(config, Path(folder), f"killed{index}", rows=_spread(index, kills, rows - 1))
            found.append(_resumed(run, config, whole, kind="kill -9"))
    return found


def shortened(config: dict[str, Any], updates: int) -> dict[str, Any]:
    """The config with short phases, a checkpoint and a row after each update, and quick evaluations in between."""
    config = quietly(config)
    phases = read_settings(config).phases
    learns = any(phase.workflow_hooks and phase.type != "eval_only" for phase in phases)
    due = {"every_updates": 1, "every_steps": None} if learns else {"every_updates": None, "every_steps": 1}
    look: dict[str, Any] = {"episodes": EPISODES, "final_episodes": EPISODES, "num_envs": EPISODES, "warmup_steps": 0}
    look |= {"every_steps": None, "every_updates": max(2, updates // 3) if learns else None}
    look["timeout_steps"] = min(config["evaluation"].get("timeout_steps") or TIMEOUT_STEPS, TIMEOUT_STEPS)
    saves = {"every_updates": 1 if learns else None, "every_minutes": None if learns else 0.01, "keep_recent": 2}
    return {
        **config,
        "logging": {**config["logging"], **due},
        "evaluation": {**config["evaluation"], **look},
        "training": {**config["training"], "limit_cycles": updates, "checkpoint": saves, "stop": {}},
    }


def _spread(index: int, count: int, last: int) -> int:
    """The index-th of `count` points from 1 to `last`, evenly apart."""
    return 1 + round(index * (last - 1) / max(1, count - 1)) if count > 1 else max(1, last // 2)


def _begin(config: dict[str, Any], folder: Path, run_id: str) -> RunDirectory:
    checked, text = read_settings(config), to_yaml(config)
    facts: dict[str, Any] = {"config_text": text, "seed": checked.seed, "algorithm": config["algorithm"]["_target_"]}
    manifest = collect_manifest(**facts, environment_id=str(config["environment"]["id"]))
    files = first_files(config_text=text, overrides=[], manifest=manifest, tags=[])
    return RunDirectory.create(folder, run_id=run_id, name=checked.experiment.name, seed=checked.seed, files=files)


def _train(config: dict[str, Any], run: RunDirectory, *, stop_after: int | None) -> int:
    """Train in this process, to the end or until so many cycles are done; how many were."""
    cycles = 0

    def is_enough() -> bool:
        nonlocal cycles
        cycles += 1
        return stop_after is not None and cycles >= stop_after

    experiment: Experiment = build(config, run=run, quiet=True, interrupted=is_enough)
    try:
        experiment.curriculum.read_ahead(0, is_new=True)
        outcome = experiment.orchestrator.run()
    finally:
        experiment.close()
    run.write_status(outcome, counts=experiment.housekeeping.counts.as_dict())
    return cycles


def _kill(config: dict[str, Any], folder: Path, run_id: str, *, rows: int) -> RunDirectory:
    """Train in another process, which is killed once it has written so many rows."""
    file = folder / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    command = [sys.executable, "-c", TRAIN, str(file), run_id, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + PATIENCE_S
    metrics = folder / run_id / "metrics.jsonl"
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= rows:
                break
            time.sleep(0.002)
    finally:
        process.kill()
        _, errors = process.communicate()
    if not metrics.exists():
        raise RunError(f"The process that was to be killed wrote no row:\n{errors.decode(errors='replace').strip()}")
    return RunDirectory.open(folder / run_id)


def train_file(file: str, run_id: str, folder: str) -> None:
    """What the process that will be killed does."""
    config = from_yaml(Path(file).read_text(encoding="utf-8"), place=file)
    start_run(config, overrides=[], run_id=run_id, runs_dir=Path(folder), quiet=True)


def _resumed(run: RunDirectory, config: dict[str, Any], whole: RunDirectory, *, kind: str) -> Cut:
    """Go on to the end, and compare."""
    rows = read_metrics(run.metrics_path)
    counts = run.read_status()["counts"] if kind == "stop" else rows[-1]
    cut = Cut(kind, counts["agent_steps"], counts["updates"])
    if run.read_status()["state"] != "finished":
        newest = CheckpointStore(run.checkpoints_dir).load_newest_valid(lambda sentence: None, [])
        cut.resumed_at = None if newest is None else newest.counts["agent_steps"]
        continue_run(run, quiet=True, trust=[*foreign_packages(config)])
    else:
        cut.resumed_at = cut.agent_steps  # it had come to its end before it was cut
    theirs, ours = read_metrics(whole.metrics_path), read_metrics(run.metrics_path)
    cut.rows = min(len(theirs), len(ours))
    cut.differences = list(_differences(theirs, ours))
    if not cut.differences:
        states = [reproducible(CheckpointStore(each.checkpoints_dir).load("latest")) for each in (whole, run)]
        cut.differences = list(state_differences(*states))
    return cut


def _differences(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> list[Difference]:
    """Those of the first row that differs."""
    for number, (recorded, found) in enumerate(zip(theirs, ours, strict=False), start=1):
        if differing := list(row_differences(recorded, found, number=number)):
            return differing
    return [] if len(theirs) == len(ours) else [Difference("rows", len(theirs), len(ours), float("inf"))]
