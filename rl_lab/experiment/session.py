"""One training process from its start to its end: the run directory, signals, the loop, what a finished run shows."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rl_lab.config.compose import to_yaml
from rl_lab.config.schema import read_settings, refuse_steps_that_never_come
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.film import record_video
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.index import RunIndex
from rl_lab.runs.lock import RunLock
from rl_lab.runs.manifest import changes_since, collect_manifest
from rl_lab.runs.report import write_report
from rl_lab.runs.run_directory import RunDirectory, first_files
from rl_lab.types import Metrics, RLLabError, RunError

DONE = ("finished", "stopped")


def start_run(
    config: dict[str, Any],
    *,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    runs_dir: Path,
    quiet: bool = False,
    warm_start: tuple[Checkpoint, bool] | None = None,
) -> tuple[RunDirectory, int | None]:
    """Train a composed config in a new run directory; `warm_start` is a checkpoint and whether with optimisers.

    Returns the run, and the number of the signal that asked it to leave, if one did.
    """
    checked = read_settings(config)
    refuse_steps_that_never_come(checked)
    text, name, seed = to_yaml(config), checked.experiment.name, checked.seed
    manifest = collect_manifest(
        config_text=text,
        seed=seed,
        algorithm=str(config["algorithm"]["_target_"]).rsplit(".", 1)[-1],
        environment_id=str(config["environment"]["id"]),
        name=name,
    )
    files = first_files(config_text=text, overrides=overrides, manifest=manifest, tags=checked.experiment.tags)
    run = RunDirectory.create(runs_dir, run_id=run_id, name=name, seed=seed, files=files)
    with RunLock(run), _interruptible() as interruption:
        try:
            experiment = _build(config, run, interruption, quiet=quiet)
            if warm_start is not None:
                with _closed_on_error(experiment):
                    experiment.warm_start(warm_start[0], with_optimizers=warm_start[1])
        except RLLabError:  # refused at the door: no run began, so none is left behind
            run.discard()
            raise
        with _recorded(run):
            _run(experiment, run, interruption)
    return run, interruption.number


def continue_run(run: RunDirectory, config: dict[str, Any], *, quiet: bool = False) -> int | None:
    """Go on exactly where the newest intact checkpoint was taken; the number of the signal that cut it short."""
    run.check_config()
    with RunLock(run):
        state = run.read_status()["state"]
        if state in DONE:
            raise RunError(
                f"Run {run.id} has {state} already. Evaluate it with `rl-lab evaluate {run.id}`, or start anew from "
                "its weights with --mode warm_start."
            )
        with _interruptible() as interruption, _recorded(run):
            experiment = _build(config, run, interruption, quiet=quiet)
            with _closed_on_error(experiment):
                _restore_newest(experiment, run)
            _run(experiment, run, interruption)
    return interruption.number


def _build(config: dict[str, Any], run: RunDirectory, interruption: _Interruption, *, quiet: bool) -> Experiment:
    def note_progress(housekeeping: Housekeeping) -> None:
        _write_status(run, housekeeping, "running")

    return build(config, run=run, quiet=quiet, interrupted=interruption.is_set, on_save=note_progress)


def _restore_newest(experiment: Experiment, run: RunDirectory) -> None:
    store = CheckpointStore(run.checkpoints_dir, identity=run.identity())
    if changes := changes_since(run.read_manifest()):
        sentence = f"This run began with {'; '.join(changes)}: from here on its numbers may differ in their last bits."
        experiment.logger.message(sentence, "warning")
    checkpoint = store.load_newest_valid(lambda sentence: experiment.logger.message(sentence, "warning"))
    if checkpoint is None:
        experiment.logger.message("This run has no checkpoint yet: it starts from its beginning, with its own seed.")
        experiment.logger.restart()
        return
    experiment.restore(checkpoint)
    steps = checkpoint.counts["agent_steps"]
    experiment.logger.message(f"Resumed {run.id} at {steps:,} agent steps from {checkpoint.path.name}.")


def _run(experiment: Experiment, run: RunDirectory, interruption: _Interruption) -> None:
    """The loop, then what a finished run shows; whatever happens, files and workers are closed."""
    housekeeping = experiment.housekeeping
    interruption.leaves_at_once = lambda: housekeeping.is_ending  # type: ignore[method-assign]
    try:
        run.write_status("running", counts=housekeeping.counts.as_dict(), wall_s=housekeeping.wall_s)
        RunIndex(run.path.parent).record(run)
        outcome = experiment.orchestrator.run()
        if outcome == "interrupted":
            _write_status(run, housekeeping, "interrupted", f"Continue with `rl-lab resume {run.id}`.")
            title, seconds, paths = "Interrupted: saved, nothing is lost", housekeeping.wall_s, {}
            commands = {"continue": f"rl-lab resume {_named(run)}"}
        else:
            title, seconds = "Finished", housekeeping.wall_s
            commands = {"time split": _time_split(experiment.time_split.whole())}
            commands |= {"watch it": f"rl-lab play {_named(run)}", "all runs": "rl-lab list"}
            paths = _make_report(experiment, run, outcome)
        experiment.display.summary(
            agent_steps=housekeeping.counts.agent_steps,
            seconds=seconds,
            score=housekeeping.last_score,
            paths={**paths, "checkpoint": run.checkpoints_dir / "latest"},
            commands=commands,
            title=title,
        )
    finally:
        experiment.close()
        RunIndex(run.path.parent).record(run)


def _make_report(experiment: Experiment, run: RunDirectory, outcome: str) -> dict[str, Path]:
    """Video, curve and report of a finished run; its status comes last, so that a resumed run makes what is missing."""
    video = None
    if experiment.settings.evaluation.video:
        steps = experiment.housekeeping.counts.agent_steps
        video = record_video(experiment.agent, experiment.evaluator, run.videos_dir / f"evaluation_{steps:012d}.mp4")
        if video is None:
            experiment.logger.message("No video: this environment cannot render here.", "warning")
    experiment.logger.flush()
    report = write_report(run, state=outcome)
    _write_status(run, experiment.housekeeping, outcome)
    paths = {"curve": run.curve_path, "video": video, "report": report}
    return {label: path for label, path in paths.items() if path is not None}


def _time_split(split: Metrics) -> str:
    """`environment 40% · policy 20% ...`; the device only where there is one to wait for."""
    fractions = {name.removeprefix("time/").removesuffix("_fraction"): value for name, value in split.items()}
    shown = {name: value for name, value in fractions.items() if name != "device" or value >= 0.005}
    return " · ".join(f"{name} {value:.0%}" for name, value in shown.items())


def _named(run: RunDirectory) -> str:
    """How a user names this run from here: by its id in ./runs, by its path elsewhere."""
    return run.id if run.path.parent.resolve() == Path("runs").resolve() else str(run.path)


def _write_status(run: RunDirectory, housekeeping: Housekeeping, state: str, message: str = "") -> None:
    run.write_status(
        state,
        counts=housekeeping.counts.as_dict(),
        wall_s=housekeeping.wall_s,
        best_score=housekeeping.best_score,
        final_score=housekeeping.last_score,
        message=message,
    )


class _Interruption:
    """SIGINT and SIGTERM ask the loop to save and leave; a second one leaves at once, as does the first one where the
    loop is over."""

    number: int | None = None  # of the first signal
    leaves_at_once: Callable[[], bool] = staticmethod(lambda: False)

    def is_set(self) -> bool:
        return self.number is not None

    def ask(self, number: int, frame: Any) -> None:
        if self.is_set() or self.leaves_at_once():
            raise KeyboardInterrupt(number)
        self.number = number


@contextmanager
def _interruptible() -> Iterator[_Interruption]:
    interruption = _Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _closed_on_error(experiment: Experiment) -> Iterator[None]:
    """Files and workers of an experiment that cannot begin are closed before the error goes on."""
    with ExitStack() as stack:
        stack.callback(experiment.close)
        yield
        stack.pop_all()


@contextmanager
def _recorded(run: RunDirectory) -> Iterator[None]:
    """A run that fails says so in its status, with the reason, before the error goes on."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        message = f"Left at once. Continue with `rl-lab resume {run.id}`."
        run.write_status("interrupted", message=message)
        interruption.add_note(message)
        raise
    except RLLabError as error:
        _try_status(run, str(error))
        raise
    except BaseException as error:
        _try_status(run, f"{type(error).__name__}: {error}")
        raise


def _try_status(run: RunDirectory, message: str) -> None:
    """The disk may be what failed: then the error itself, which goes on, is all there is to say."""
    try:
        run.write_status("failed", message=message)
    except RLLabError:
        return
