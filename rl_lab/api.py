"""RL Lab from Python, for notebooks and scripts; the command line calls these same functions.

run = rl_lab.train("ppo_cartpole", seed=1)
rl_lab.evaluate(run, episodes=100)
policy = rl_lab.load(run)
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_lab.config.compose import apply_overrides, compose, to_yaml
from rl_lab.config.schema import read_settings, refuse_steps_that_never_come
from rl_lab.environments.base import Environment
from rl_lab.environments.catalog import EnvInfo
from rl_lab.environments.checker import Finding
from rl_lab.environments.factory import make_environment
from rl_lab.experiment.build import Experiment, build, build_environment
from rl_lab.experiment.collect import Dataset, Format, Request, collect_random, collect_run, default_output
from rl_lab.experiment.load import load_agent, load_config
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.policy import Policy
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.index import RunIndex, resolve_run
from rl_lab.runs.lock import RunLock
from rl_lab.runs.manifest import collect_manifest
from rl_lab.runs.report import write_report
from rl_lab.runs.run_directory import RunDirectory, first_files
from rl_lab.runs.video import write_video
from rl_lab.types import ConfigError, EnvSpec, Metrics, RLLabError, RunError

ResumeMode = Literal["exact", "warm_start", "warm_start_optimizer"]
MODES = ("exact", "warm_start", "warm_start_optimizer")
DONE = ("finished", "stopped")


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    directory: RunDirectory
    signal_number: int | None = None  # of the signal that asked it to leave, if one did while this process ran it

    @property
    def id(self) -> str:
        return self.directory.id

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def status(self) -> dict[str, Any]:
        return self.directory.read_status()

    @property
    def config(self) -> dict[str, Any]:
        return load_config(self.directory)


RunReference = str | Path | Run


# --- training ----------------------------------------------------------------------------------


def train(
    experiment: str | None = None,
    *,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    runs_dir: str | Path | None = None,
    config_dir: Path | None = None,
    quiet: bool = False,
    resume_existing: bool = False,
    **settings: Any,
) -> Run:
    """Train an experiment to its end. Settings are `seed=1` or, for a deeper key, `algorithm__discount=0.98`."""
    spelled = [f"{key.replace('__', '.')}={_spell(value)}" for key, value in settings.items()]
    config = compose(experiment, [*overrides, *spelled], config_dir=config_dir)
    runs_dir = Path(runs_dir if runs_dir is not None else config["runs"]["directory"])
    run_id = run_id if run_id is not None else config["runs"]["id"]
    if resume_existing and run_id is not None and (runs_dir / run_id / "config.yaml").exists():
        existing = Run(RunDirectory.open(runs_dir / run_id))
        is_done = existing.status["state"] in DONE
        return existing if is_done else resume(existing, quiet=quiet)
    return train_config(config, overrides=[*overrides, *spelled], run_id=run_id, runs_dir=runs_dir, quiet=quiet)


def train_config(
    config: dict[str, Any],
    *,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    runs_dir: Path,
    quiet: bool = False,
    warm_start: tuple[Checkpoint, bool] | None = None,
) -> Run:
    """Train a composed config in a new run directory; `warm_start` is a checkpoint and whether with optimisers."""
    checked = read_settings(config)
    refuse_steps_that_never_come(checked)
    text = to_yaml(config)
    manifest = collect_manifest(
        config_text=text,
        seed=checked.seed,
        algorithm=str(config["algorithm"]["_target_"]).rsplit(".", 1)[-1],
        environment_id=str(config["environment"]["id"]),
        name=checked.experiment.name,
    )
    files = first_files(config_text=text, overrides=overrides, manifest=manifest, tags=checked.experiment.tags)
    name, seed = checked.experiment.name, checked.seed
    run = RunDirectory.create(runs_dir, run_id=run_id, name=name, seed=seed, files=files)
    with RunLock(run), _interruptible() as interruption:
        try:
            experiment = build(
                config, run=run, quiet=quiet, interrupted=interruption.is_set, on_save=_status_writer(run)
            )
            if warm_start is not None:
                with _closed_on_error(experiment):
                    experiment.warm_start(warm_start[0], with_optimizers=warm_start[1])
        except RLLabError:  # refused at the door: no run began, so none is left behind
            run.discard()
            raise
        with _recorded(run):
            _run(experiment, run, interruption)
    return Run(run, interruption.number)


def resume(
    run: RunReference,
    *,
    runs_dir: str | Path | None = None,
    mode: ResumeMode = "exact",
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Run:
    """Continue a run. exact: bit for bit, in its own directory; warm_start: a new run that begins with its weights."""
    if mode not in MODES:
        raise ConfigError(f"mode is '{mode}': write {', '.join(MODES)}.")
    directory = _directory(run, runs_dir)
    config = load_config(directory)
    if mode != "exact":
        store = CheckpointStore(directory.checkpoints_dir)
        found = store.load_newest_valid(logging.getLogger("rl_lab").warning, Experiment.WARM_SECTIONS)
        if found is None:
            raise RunError(f"Run {directory.id} has no checkpoint to start from.")
        changed = apply_overrides(config, overrides)
        return train_config(
            changed,
            overrides=[*overrides, f"# {mode} from {directory.id}"],
            runs_dir=directory.path.parent,
            quiet=quiet,
            warm_start=(found, mode == "warm_start_optimizer"),
        )
    if overrides:
        raise ConfigError(
            "An exact resume takes no overrides, since it continues bit for bit. "
            "To go on with other settings, use --mode warm_start_optimizer, which starts a new run from these weights."
        )
    with RunLock(directory):
        if directory.read_status()["state"] in DONE:
            raise RunError(
                f"Run {directory.id} has {directory.read_status()['state']} already. Evaluate it with "
                f"`rl-lab evaluate {directory.id}`, or start anew from its weights with --mode warm_start."
            )
        with _interruptible() as interruption, _recorded(directory):
            experiment = build(
                config, run=directory, quiet=quiet, interrupted=interruption.is_set, on_save=_status_writer(directory)
            )
            with _closed_on_error(experiment):
                _restore_newest(experiment, directory)
            _run(experiment, directory, interruption)
    return Run(directory, interruption.number)


def _restore_newest(experiment: Experiment, run: RunDirectory) -> None:
    store = CheckpointStore(run.checkpoints_dir)
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
            experiment.display.summary(
                agent_steps=housekeeping.counts.agent_steps,
                seconds=housekeeping.wall_s,
                score=housekeeping.last_score,
                paths={"checkpoint": run.checkpoints_dir / "latest"},
                commands={"continue": f"rl-lab resume {_named(run)}"},
                title="Interrupted: saved, nothing is lost",
            )
            return
        seconds, split = housekeeping.wall_s, experiment.time_split.whole()
        video = _record_video(experiment, run) if experiment.settings.evaluation.video else None
        experiment.logger.flush()
        report = write_report(run, state=outcome)
        _write_status(run, housekeeping, outcome)  # last: until then a resumed run makes what is missing
        paths = {"curve": run.curve_path, "video": video, "report": report}
        _show_summary(experiment, run, paths, seconds, split)
    finally:
        experiment.close()
        RunIndex(run.path.parent).record(run)


def _record_video(experiment: Experiment, run: RunDirectory) -> Path | None:
    recording = experiment.evaluator.record(experiment.agent.workflow.act)
    if recording is None:
        experiment.logger.message("No video: this environment cannot render here.", "warning")
        return None
    steps = experiment.housekeeping.counts.agent_steps
    return write_video(run.videos_dir / f"evaluation_{steps:012d}.mp4", recording.frames, recording.fps)


def _show_summary(
    experiment: Experiment, run: RunDirectory, paths: Mapping[str, Path | None], seconds: float, split: Metrics
) -> None:
    names = ("environment", "policy", "device", "update", "evaluation", "checkpoint", "logging", "overhead")
    found = {name: split.get(f"time/{name}_fraction", 0.0) for name in names}
    if found["device"] < 0.005:
        del found["device"]  # no GPU to wait for
    shares = " · ".join(f"{name} {share:.0%}" for name, share in found.items())
    there = {label: path for label, path in paths.items() if path is not None}
    experiment.display.summary(
        agent_steps=experiment.housekeeping.counts.agent_steps,
        seconds=seconds,
        score=experiment.housekeeping.last_score,
        paths={**there, "checkpoint": run.checkpoints_dir / "latest"},
        commands={"time split": shares, "watch it": f"rl-lab play {_named(run)}", "all runs": "rl-lab list"},
    )


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


def _status_writer(run: RunDirectory) -> Any:
    return lambda housekeeping: _write_status(run, housekeeping, "running")


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


def _spell(value: Any) -> str:
    """A Python value as an override is written: texts that would read as something else are quoted."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_spell(item) for item in value) + "]"
    if not isinstance(value, str):
        return str(value)
    words = ("null", "true", "false", "inf", "nan")
    if re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in words:
        return value
    backslashes_before_the_end = "\\" * (len(value) - len(value.rstrip("\\")))
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + backslashes_before_the_end + "'"


# --- looking -----------------------------------------------------------------------------------


def evaluate(
    run: RunReference,
    *,
    episodes: int = 100,
    checkpoint: str | Path = "latest",
    seed: int | None = None,
    video: str | Path | None = None,
    runs_dir: str | Path | None = None,
) -> dict[str, float]:
    """Play `episodes` deterministic episodes of a trained policy; `video` also records one of them."""
    directory = _directory(run, runs_dir)
    config = load_config(directory)
    if seed is not None:
        config["seed"] = seed
    agent, evaluator = load_agent(directory, config, checkpoint)
    try:
        metrics: Metrics = agent.workflow.evaluate(episodes=episodes)
        if video is not None:
            recording = evaluator.record(agent.workflow.act)
            if recording is None:
                raise RunError(f"{config['environment']['id']} cannot render here, so there is no video.")
            write_video(Path(video), recording.frames, recording.fps)
        return {name: float(value) for name, value in metrics.items()}
    finally:
        evaluator.close()


def load(run: RunReference, *, checkpoint: str | Path = "latest", runs_dir: str | Path | None = None) -> Policy:
    """A trained policy that keeps its own recurrent state and normaliser: `policy.act(observation)`."""
    directory = _directory(run, runs_dir)
    config = load_config(directory)
    environment = build_environment(config, stream="play_environment", num_envs=1)
    try:
        agent, evaluator = load_agent(directory, config, checkpoint, environment)
        evaluator.close()
        return Policy(agent.workflow, environment.blueprint, device=agent.runtime.device)
    finally:
        environment.close()


def play(
    run: RunReference,
    *,
    episodes: int = 1,
    output: str | Path | None = None,
    checkpoint: str | Path = "latest",
    seed: int | None = None,
    runs_dir: str | Path | None = None,
) -> Path | None:
    """Watch a policy: in a window where there is a display, else (or with `output`) as an mp4."""
    from rl_lab.collection.viewer import can_show, show

    directory = _directory(run, runs_dir)
    config = load_config(directory)
    if seed is not None:
        config["seed"] = seed
    agent, evaluator = load_agent(directory, config, checkpoint)
    try:
        recordings = evaluator.record_episodes(agent.workflow.act, episodes=episodes)
    finally:
        evaluator.close()
    frames = [frame for recording in recordings for frame in recording.frames]
    if not frames:
        raise RunError(f"{config['environment']['id']} cannot render, so there is nothing to show.")
    if output is None and can_show():
        show(frames, fps=recordings[0].fps, title=directory.id)
        return None
    path = Path(output) if output is not None else directory.videos_dir / "play.mp4"
    return write_video(path, frames, recordings[0].fps)


def collect(
    source: RunReference,
    *,
    output: str | Path | None = None,
    environment: str | None = None,
    steps: int | None = None,
    episodes: int | None = None,
    format: Format = "npz",
    mode: Literal["train", "eval"] = "train",
    seed: int | None = None,
    num_envs: int | None = None,
    checkpoint: str | Path = "latest",
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    runs_dir: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Dataset:
    """Write a dataset from a run's policy, or from the "random" one in `environment`; see docs/datasets.md."""
    run = None if source == "random" else _directory(source, runs_dir)
    if output is None and (run is None or format == "minari"):
        raise ConfigError("Say where the dataset goes: --output data/cartpole, or cartpole/random-v0 for Minari.")
    place = default_output(run) if output is None and run is not None else output
    request = Request(str(place), steps, episodes, format, mode, seed, num_envs, checkpoint, overwrite, progress)
    if run is None:
        return collect_random(environment, list(overrides), request)
    if overrides:
        raise ConfigError(
            f"{overrides[0]}: a run's policy plays in the run's own environment; only random takes settings."
        )
    return collect_run(run, environment, request)


def make_env(id: str, **settings: Any) -> Environment:
    """Environments as our algorithms see them: `rl_lab.make_env("CartPole-v1", num_envs=8)`."""
    return make_environment(id=id, **settings)


def list_environments(text: str | None = None, *, all_versions: bool = False) -> list[EnvInfo]:
    """Every environment that can be named, filtered by a part of its id."""
    from rl_lab.environments import catalog

    return catalog.list_environments(text, all_versions=all_versions)


def describe_environment(id: str) -> EnvSpec:
    """Spaces, labels, limits and solved threshold of an environment."""
    from rl_lab.environments import catalog

    return catalog.describe(id)


def check_environment(id: str) -> list[Finding]:
    """What an environment's author should mend, each with its cure; empty when all is well."""
    import gymnasium

    from rl_lab.environments import checker, lookup

    registered = lookup.find(id)
    return checker.check_environment(lambda: gymnasium.make(registered, disable_env_checker=True))


def _directory(run: RunReference, runs_dir: str | Path | None) -> RunDirectory:
    if isinstance(run, Run):
        return run.directory
    return resolve_run(run, Path(runs_dir if runs_dir is not None else "runs"))
