"""Crash bundles: execute one again, and find the place in a run that went wrong without debug mode."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.config.files import from_yaml
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.load import open_config
from rl_lab.experiment.trust import check_consent
from rl_lab.experiment.verify_run import quietly
from rl_lab.experiment.watch import CRASH, SECTIONS, NonFiniteError
from rl_lab.orchestration.callbacks import Callbacks
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import apply_state
from rl_lab.training.finite import Place
from rl_lab.types import RunError


@dataclass(frozen=True)
class Replay:
    """What a bundle says, and what executing it again found."""

    recorded: Place
    found: Place | None
    during: str  # collecting, or the update hook
    sentence: str = ""  # of the error that came

    @property
    def is_same(self) -> bool:
        return self.found == self.recorded


def debugged(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config in debug mode."""
    return {**quietly(dict(config)), "debug": {**(config.get("debug") or {}), "check_finite": True}}


def replay(bundle: Path, *, trust: Sequence[str] = ()) -> Replay:
    """Execute what a bundle holds: the collecting or the update in which a number was not finite."""
    checkpoint = _read(bundle)
    about = checkpoint.state["about"]
    config = from_yaml(about["config"], place=f"{bundle}: its config")
    check_consent(config, bundle, trust)
    experiment = build(debugged(config), run=None, quiet=True)
    recorded = Place.from_dict(about["place"])
    try:
        _restore(experiment, checkpoint)
        _execute(experiment, checkpoint)
    except NonFiniteError as error:
        return Replay(recorded, error.place, about["during"], str(error))
    finally:
        experiment.close()
    return Replay(recorded, None, about["during"])


def newest_bundle(run: RunDirectory) -> Path:
    """The crash bundle that a run wrote last."""
    paths = CheckpointStore(run.path / CRASH).paths()
    if not paths:
        raise RunError(
            f"Run {run.id} has no crash bundle: `rl-lab debug find {run.id}` looks for a reason to write one."
        )
    return paths[-1]


def _read(bundle: Path) -> Checkpoint:
    if not (bundle / "manifest.json").is_file():
        others = CheckpointStore(bundle.absolute().parent).paths() if bundle.absolute().parent.name == CRASH else []
        newer = f" A later one took its place: {others[-1]}." if others else ""
        raise RunError(
            f"{bundle} is no crash bundle.{newer} Debug mode writes them: runs/RUN/{CRASH}/step_000000001024, for "
            "example."
        )
    checkpoint = CheckpointStore(bundle.absolute().parent).load(bundle.absolute())
    if "about" not in checkpoint.state:
        raise RunError(f"{bundle} is a checkpoint of a run, no crash bundle: those lie in runs/RUN/{CRASH}.")
    return checkpoint


def _restore(experiment: Experiment, checkpoint: Checkpoint) -> None:
    state, scheduler = checkpoint.state, experiment.orchestrator.scheduler
    if "collector" in state:
        experiment.curriculum.hold_environment(state["collector"].get("stage", 0))
    sections = [name for name in ("collector", *SECTIONS) if name in state]  # random generators last
    apply_state({name: experiment.targets[name] for name in sections}, {name: state[name] for name in sections})
    experiment.curriculum.set_numbers(scheduler.index)
    experiment.agent.workflow.enter_phase(scheduler.current())


def _execute(experiment: Experiment, checkpoint: Checkpoint) -> None:
    about, scheduler, workflow = checkpoint.state["about"], experiment.orchestrator.scheduler, experiment.agent.workflow
    if about["kind"] == "collect":
        workflow.collect_step(scheduler.cycles, phase=scheduler.current())
        return
    batch = experiment.agent.runtime.to_device(dict(checkpoint.state["batch"]))
    getattr(workflow, about["during"])(batch, phase=scheduler.current())


def find(
    run: RunDirectory,
    *,
    trust: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NonFiniteError | None:
    """Go on from a run's newest checkpoint in debug mode, in a copy, until a number is not finite.

    That error comes back, with its bundle in the run's folder; None where the run came to its end without one."""
    config = debugged(open_config(run, trust))
    with tempfile.TemporaryDirectory(prefix="rl_lab_debug_") as folder:
        copy = RunDirectory.open(shutil.copytree(run.path, Path(folder) / run.id, symlinks=True))

        def show(row: Mapping[str, Any]) -> None:
            progress(int(row["updates"]), 0)

        experiment = build(config, run=copy, quiet=True, callbacks=Callbacks(on_row=show))
        assert experiment.debugging.watch is not None
        experiment.debugging.watch.directory = run.output(CRASH)
        try:
            checkpoint = CheckpointStore(copy.checkpoints_dir).load_newest_valid(lambda sentence: None)
            if checkpoint is not None:
                experiment.restore(checkpoint)
            scheduler = experiment.orchestrator.scheduler
            experiment.curriculum.read_ahead(scheduler.index, is_new=scheduler.cycles == 0)
            experiment.orchestrator.run()
        except NonFiniteError as error:
            return error
        finally:
            experiment.close()
    return None
