"""One training process from its start to its end: the run directory, signals, the loop, what a finished run shows."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rl_lab.config.compose import to_yaml
from rl_lab.config.phases import is_extension
from rl_lab.config.schema import read_settings, refuse_steps_that_never_come
from rl_lab.config.translate import unsaid
from rl_lab.environments.handed import is_handed
from rl_lab.environments.lookup import find
from rl_lab.environments.saved import to_plain
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.continuing import asked_for, check_extension, note_extension, stopped_from_outside
from rl_lab.experiment.curriculum import pin_sources, pinned_as, sources_of
from rl_lab.experiment.debugger import simplified_if_debugged
from rl_lab.experiment.film import evaluation_video, record_video, reported_to
from rl_lab.experiment.load import CHANGEABLE, differences, load_config, open_config
from rl_lab.experiment.trust import foreign_packages, remember_consent
from rl_lab.metrics.stall import StallWatch
from rl_lab.metrics.writers import TextLogWriter
from rl_lab.orchestration.callbacks import Callbacks
from rl_lab.orchestration.housekeeping import Housekeeping, Prune, go_on
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.git import uncommitted_changes
from rl_lab.runs.index import RunIndex
from rl_lab.runs.lineage import add_lineage, place_of, warm_origin
from rl_lab.runs.lock import RunLock
from rl_lab.runs.manifest import changes_since, collect_manifest, continuations_of
from rl_lab.runs.report import DONE, run_word, runs_dir_words, write_report
from rl_lab.runs.run_directory import RunDirectory, first_files
from rl_lab.training.runtime import resolve_device, thread_count
from rl_lab.types import ConfigError, Metrics, RLLabError
from rl_lab.utils.processes import handled_by


def train(
    config: dict[str, Any],
    overrides: Sequence[str],
    *,
    runs_dir: str | Path | None,
    run_id: str | None,
    resume_existing: bool,
    quiet: bool,
    callbacks: Callbacks | None = None,
) -> RunDirectory:
    """Train a composed config to its end: in a new run or, with `resume_existing`, in one that exists."""
    folder = Path(runs_dir if runs_dir is not None else config["runs"]["directory"])
    run_id = run_id if run_id is not None else config["runs"]["id"]
    if resume_existing and run_id is not None and (folder / run_id / "config.yaml").exists():
        return _continue_as_asked(RunDirectory.open(folder / run_id), config, overrides, quiet, callbacks)
    remember_consent(config)
    config = simplified_if_debugged(config, overrides)
    return start_run(config, overrides=overrides, run_id=run_id, runs_dir=folder, quiet=quiet, callbacks=callbacks)


def _continue_as_asked(
    run: RunDirectory, config: dict[str, Any], overrides: Sequence[str], quiet: bool, callbacks: Callbacks | None
) -> RunDirectory:
    """Continue a run that exists, if the settings asked for are its own; a finished one is returned as it is."""
    theirs = load_config(run)
    if found := differences(theirs, pinned_as(run, theirs, config), overrides):
        more = [f"... and {len(found) - 8} more"] if len(found) > 8 else []
        if all(is_extension(line.partition(":")[0]) for line in found):
            word = f"{found[0].partition(':')[0]}={found[0].split()[-3]}"
            more.append(f"How long it goes on may be changed, with `rl-lab resume {run_word(run)} {word}`.")
        raise ConfigError(
            "\n  ".join([f"Run {run.id} has other settings than those asked for:", *found[:8], *more])
            + f"\n  To go on with its own, write `rl-lab resume {run_word(run)}`; for others choose another --run-id."
        )
    if run.read_status()["state"] not in DONE:
        changed = {key: config["environment"].get(key.partition(".")[2]) for key in CHANGEABLE}
        words = [f"{key}={value}" for key, value in changed.items() if value is not None]
        trust = [*foreign_packages(config)]
        continue_run(run, overrides=words, trust=trust, quiet=quiet, callbacks=callbacks)
    return run


def start_run(
    config: dict[str, Any],
    *,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    runs_dir: Path,
    quiet: bool = False,
    warm_start: tuple[Checkpoint, bool] | None = None,
    tags: Sequence[str] = (),
    prune: Prune = go_on,
    is_drawn: bool = True,
    callbacks: Callbacks | None = None,
) -> RunDirectory:
    """Train a composed config in a new run directory; `warm_start` is a checkpoint and whether with optimisers. The
    report has a picture if `is_drawn`."""
    checked = read_settings(config)
    refuse_steps_that_never_come(checked)
    sources, config = sources_of(config), pin_sources(config, runs_dir)
    text, name, seed = to_yaml(config), checked.experiment.name, checked.seed
    manifest = collect_manifest(
        config_text=text,
        seed=seed,
        algorithm=str(config["algorithm"]["_target_"]).rsplit(".", 1)[-1],
        environment_id=str(config["environment"]["id"]),
        name=name,
        threads=_threads(config["runtime"] or {}),
    ) | {"lineage": [] if warm_start is None else [warm_origin(*warm_start)], "sources": sources}
    files = first_files(
        config_text=text,
        overrides=overrides,
        manifest=manifest,
        tags=[*checked.experiment.tags, *tags],
        changes=uncommitted_changes(Path.cwd()) if manifest["git"]["dirty"] else None,
    )
    run = RunDirectory.create(runs_dir, run_id=run_id, name=name, seed=seed, files=files)
    interruption = _Interruption()
    with RunLock(run), handled_by(interruption.ask), _recorded(run, interruption):
        try:
            experiment = _build(config, run, interruption, quiet, callbacks, prune)
            with _closed_on_error(experiment):
                experiment.curriculum.read_ahead(0, is_new=True)
                if warm_start is not None:
                    experiment.warm_start(warm_start[0], with_optimizers=warm_start[1])
        except RLLabError:  # refused at the door: no run began, so none is left behind
            run.discard()
            raise
        _run(experiment, run, interruption, is_drawn=is_drawn)
    interruption.leave(f"Continue with `rl-lab resume {run_word(run)}`.")
    return run


def _threads(runtime: Mapping[str, Any]) -> int:
    """How many threads a run with this block is about to use."""
    return thread_count(runtime.get("threads", "auto"), resolve_device(str(runtime.get("device", "auto"))))


def continue_run(
    run: RunDirectory,
    *,
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    quiet: bool = False,
    environment_id: str | None = None,
    callbacks: Callbacks | None = None,
    prune: Prune = go_on,
    is_drawn: bool = True,
) -> None:
    """Go on exactly where the newest intact checkpoint was taken; `environment_id` names an environment that was handed
    over anew."""
    config = open_config(run, trust)
    if environment_id is not None:
        config["environment"]["id"] = environment_id
    if is_handed(str(config["environment"]["id"])):  # before anything is written: what cannot go on here stays as it is
        find(config["environment"]["id"])
    with unsaid(quiet):
        config, changes = asked_for(run, config, overrides)
    run.check_config()
    with RunLock(run):
        differing: list[str] = []
        stopped_by = ""
        is_continued = bool(changes) or run.read_status()["state"] in DONE
        if is_continued:  # nothing is written where it is refused
            if changes:
                differing, checkpoint = check_extension(run, config)
            else:
                checkpoint, stopped_by = stopped_from_outside(run, config)
            run.write_status("interrupted", message=f"Continue with `rl-lab resume {run.id}`.")
            note_extension(run, changes, checkpoint, stopped_by=stopped_by)
        interruption = _Interruption()
        with handled_by(interruption.ask), _recorded(run, interruption):
            experiment = _build(config, run, interruption, quiet, callbacks, prune)
            with _closed_on_error(experiment), experiment.housekeeping.stopwatch.section("restore"):
                experiment.display.start(experiment.probe)
                _restore_newest(experiment, run, is_noted=is_continued)
                for sentence in differing:
                    experiment.logger.message(sentence, "warning")
            _run(experiment, run, interruption, is_drawn=is_drawn)
    interruption.leave(f"Continue with `rl-lab resume {run_word(run)}`.")


def _build(
    config: dict[str, Any],
    run: RunDirectory,
    interruption: _Interruption,
    quiet: bool,
    callbacks: Callbacks | None,
    prune: Prune,
) -> Experiment:
    asked, note_progress = interruption.is_set, partial(_write_status, run, state="running")
    experiment = build(
        config, run=run, quiet=quiet, interrupted=asked, on_save=note_progress, callbacks=callbacks, prune=prune
    )
    with _closed_on_error(experiment):
        run.write_environment(to_plain(experiment.collector.environment.blueprint))
    return experiment


def _restore_newest(experiment: Experiment, run: RunDirectory, *, is_noted: bool) -> None:
    store = CheckpointStore(run.checkpoints_dir, identity=run.identity())
    if changes := changes_since(run.read_manifest()):
        sentence = f"This run began with {'; '.join(changes)}: from here on its numbers may differ in their last bits."
        experiment.logger.message(sentence, "warning")
    checkpoint = store.load_newest_valid(lambda sentence: experiment.logger.message(sentence, "warning"))
    if not is_noted:
        add_lineage(run, "resumed", source=run.id, **place_of(checkpoint))
    continuations = len(continuations_of(run.read_manifest()))
    experiment.housekeeping.continuations = continuations
    if checkpoint is None:
        experiment.logger.message("This run has no checkpoint yet: it starts from its beginning, with its own seed.")
        experiment.logger.restart()
        experiment.curriculum.read_ahead(0, is_new=True)
        return
    experiment.restore(checkpoint)
    housekeeping, scheduler = experiment.housekeeping, experiment.orchestrator.scheduler
    is_extended, housekeeping.continuations = continuations > housekeeping.continuations, continuations
    if is_extended and housekeeping.is_over:
        housekeeping.reopen(continuations)
    experiment.curriculum.read_ahead(scheduler.index, is_new=scheduler.is_phase_new)
    steps = checkpoint.counts["agent_steps"]
    experiment.logger.message(f"Resumed {run.id} at {steps:,} agent steps from {checkpoint.path.name}.")


def _run(experiment: Experiment, run: RunDirectory, interruption: _Interruption, *, is_drawn: bool) -> None:
    """The loop, then what a finished run shows; whatever happens, files and workers are closed."""
    housekeeping = experiment.housekeeping
    interruption.is_saved = lambda: housekeeping.is_ending
    probe = experiment.probe
    try:
        experiment.display.start(probe)
        run.write_status("running", counts=housekeeping.counts.as_dict(), wall_s=housekeeping.wall_s)
        RunIndex(run.path.parent).record(run)
        warn = partial(experiment.logger.message, level="warning")
        with StallWatch(probe, warn, minutes=experiment.settings.logging.stall_minutes):
            outcome = experiment.orchestrator.run()
        if outcome == "interrupted":
            _write_status(run, housekeeping, "interrupted", f"Continue with `rl-lab resume {run.id}`.")
            title, seconds, paths, facts = "Interrupted: saved, nothing is lost", housekeeping.wall_s, {}, {}
            commands = {"continue": f"rl-lab resume {run_word(run)}"}
        else:
            interruption.is_saved = lambda: True  # what follows only looks
            interruption.leave()
            title, seconds = "Finished", housekeeping.wall_s
            facts = {"time split": _time_split(experiment.time_split.whole(), experiment.display.cost)}
            commands = {"watch it": f"rl-lab play {run_word(run)}", "all runs": f"rl-lab list{runs_dir_words(run)}"}
            last = "pruned" if housekeeping.is_pruned else outcome
            paths = _make_report(experiment, run, last, seconds, is_drawn=is_drawn)
            interruption.is_saved = lambda: False  # its status says that it is done, and stays
        experiment.display.summary(
            agent_steps=housekeeping.counts.agent_steps,
            seconds=seconds,
            seconds_after=housekeeping.wall_s - seconds,
            score=housekeeping.last_score,
            facts=facts,
            paths={**paths, "checkpoint": run.checkpoints_dir / "latest"},
            commands=commands,
            title=title,
        )
    finally:
        experiment.close()
        RunIndex(run.path.parent).record(run)


def _make_report(
    experiment: Experiment, run: RunDirectory, outcome: str, seconds: float, *, is_drawn: bool
) -> dict[str, Path]:
    """Video, curve and report of a run that took `seconds`; its last status comes last, so that a resumed run makes
    what is missing."""
    _write_status(run, experiment.housekeeping, "running", wall_s=seconds)
    video = None
    if experiment.settings.evaluation.video and outcome != "pruned":
        counts = experiment.housekeeping.counts
        show = partial(experiment.logger.show, "eval/episode", agent_steps=counts.agent_steps)
        path = evaluation_video(run, counts)
        with experiment.housekeeping.stopwatch.section("video"), reported_to(experiment.evaluator):
            video = record_video(experiment.agent.workflow, experiment.evaluator, path, show=show)
        if video is None:
            experiment.logger.message("No video: this environment cannot render here.", "warning")
    reason = experiment.housekeeping.stop_reason
    message = f"{reason}." if reason is not None else ""
    with experiment.housekeeping.stopwatch.section("report"):
        experiment.logger.flush()  # a sink may still be busy with the video
        report = write_report(run, state=outcome, message=message, is_drawn=is_drawn)
        _write_status(run, experiment.housekeeping, outcome, message, wall_s=seconds)
    paths = {"curve": run.curve_path if is_drawn else None, "video": video, "report": report}
    return {label: path for label, path in paths.items() if path is not None}


def _time_split(split: Metrics, display: float | None) -> str:
    """`environment 40% · policy 20% ...`; the device only where there is one to wait for. The display has a thread of
    its own, so that its CPU time comes on top."""
    fractions = {name.removeprefix("time/").removesuffix("_fraction"): value for name, value in split.items()}
    shown = {name: value for name, value in fractions.items() if name != "device" or value >= 0.005}
    parts = [f"{name} {value:.0%}" for name, value in shown.items()]
    return " · ".join([*parts, *([] if display is None else [f"display {display:.1%}"])])


def _write_status(
    run: RunDirectory, housekeeping: Housekeeping, state: str, message: str = "", *, wall_s: float | None = None
) -> None:
    run.write_status(
        state,
        counts=housekeeping.counts.as_dict(),
        wall_s=housekeeping.wall_s if wall_s is None else wall_s,
        best_score=housekeeping.best_score,
        final_score=housekeeping.last_score,
        message=message,
    )


class _Interruption:
    """A signal asks the loop to save and leave. A second Ctrl-C leaves at once, as does any signal once everything is
    saved; other signals may come twice, as job queues and closing terminals send them, and change nothing."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal
        self.is_saved: Callable[[], bool] = lambda: False

    def is_set(self) -> bool:
        return self.number is not None

    def ask(self, number: int, frame: object) -> None:
        is_hurried = self.is_set() and number == signal.SIGINT
        self.number = number
        if is_hurried or self.is_saved():
            self.leave()

    def leave(self, note: str = "") -> None:
        """If asked to, end this process as the signal would have: a script must not go on as if training were over."""
        if self.number is not None:
            end = KeyboardInterrupt() if self.number == signal.SIGINT else SystemExit(128 + self.number)
            if note:
                end.add_note(note)
            raise end


@contextmanager
def _closed_on_error(experiment: Experiment) -> Iterator[None]:
    """Files and workers of an experiment that cannot begin are closed before the error goes on."""
    with ExitStack() as stack:
        stack.callback(experiment.close)
        yield
        stack.pop_all()


@contextmanager
def _recorded(run: RunDirectory, interruption: _Interruption) -> Iterator[None]:
    """A run that is left at once or fails says so in its status, with the reason, before the error goes on."""
    try:
        yield
    except BaseException as error:
        is_asked = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and interruption.is_set())
        with suppress(RLLabError):  # the disk may be what failed: then the error, which goes on, is all there is to say
            if is_asked:
                message = f"Left at once. Continue with `rl-lab resume {run.id}`."
                error.add_note(message)
                run.write_status("interrupted", message=message)
                raise
            message = str(error) if isinstance(error, RLLabError) else f"{type(error).__name__}: {error}"
            if isinstance(error, SystemExit):
                error.add_note(
                    f"error: the environment, or other code of yours, called sys.exit(): see {run.log_path}."
                )
            run.write_status("failed", message=message)
            log = TextLogWriter(run.log_path)
            log.message("".join(traceback.format_exception(error)).rstrip(), "error")
            log.close()
        raise
