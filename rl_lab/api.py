"""RL Lab from Python, for notebooks and scripts; the command line calls these same functions.

run = rl_lab.train("ppo_cartpole", seed=1)
rl_lab.evaluate(run, episodes=100)
policy = rl_lab.load(run)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.compose import apply_overrides, compose
from rl_lab.environments.base import Environment
from rl_lab.environments.catalog import EnvInfo
from rl_lab.environments.checker import Finding
from rl_lab.environments.factory import make_environment
from rl_lab.experiment import session
from rl_lab.experiment.agent import Agent
from rl_lab.experiment.build import Experiment
from rl_lab.experiment.collect import Dataset, Format, Request, collect_random, collect_run
from rl_lab.experiment.film import can_dream, film_dreams, record_video
from rl_lab.experiment.load import CHANGEABLE, differences, load_agent, load_config, open_config
from rl_lab.experiment.trust import foreign_packages, remember_consent
from rl_lab.policy import Policy
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.film import FilmFiles
from rl_lab.runs.index import resolve_run
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.video import check_name, write_video
from rl_lab.types import ConfigError, EnvSpec, RunError

ResumeMode = Literal["exact", "warm_start", "warm_start_optimizer"]
Progress = Callable[[int, int], None]  # called with how much is done, and of how much
MODES = ("exact", "warm_start", "warm_start_optimizer")


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    directory: RunDirectory

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
        return _resume_as_asked(RunDirectory.open(runs_dir / run_id), config, [*overrides, *spelled], quiet=quiet)
    return train_config(config, overrides=[*overrides, *spelled], run_id=run_id, runs_dir=runs_dir, quiet=quiet)


def _resume_as_asked(directory: RunDirectory, config: dict[str, Any], overrides: Sequence[str], *, quiet: bool) -> Run:
    """Continue a run that exists, if the settings asked for are its own; a finished one is returned as it is."""
    if found := differences(load_config(directory), config, overrides):
        more = [f"... and {len(found) - 8} more"] if len(found) > 8 else []
        raise ConfigError(
            "\n  ".join([f"Run {directory.id} has other settings than those asked for:", *found[:8], *more])
            + f"\n  To go on with its own, write `rl-lab resume {directory.id}`; for others choose another --run-id."
        )
    if directory.read_status()["state"] in session.DONE:
        return Run(directory)
    changed = {key: config["environment"].get(key.partition(".")[2]) for key in CHANGEABLE}
    words = [f"{key}={value}" for key, value in changed.items() if value is not None]
    return resume(directory.path, overrides=words, trust=[*foreign_packages(config)], quiet=quiet)


def train_config(
    config: dict[str, Any],
    *,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    runs_dir: Path,
    quiet: bool = False,
) -> Run:
    """Train a composed config in a new run directory."""
    remember_consent(config)
    return Run(session.start_run(config, overrides=overrides, run_id=run_id, runs_dir=runs_dir, quiet=quiet))


def resume(
    run: RunReference,
    *,
    runs_dir: str | Path | None = None,
    mode: ResumeMode = "exact",
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    quiet: bool = False,
) -> Run:
    """Continue a run. exact: bit for bit, in its own directory; warm_start: a new run that begins with its weights."""
    if mode not in MODES:
        raise ConfigError(f"mode is '{mode}': write {', '.join(MODES)}.")
    directory = _directory(run, runs_dir)
    config = open_config(directory, trust)
    if mode == "exact":
        for word in overrides:
            key = word.lstrip("+").partition("=")[0]
            if key not in CHANGEABLE:
                raise ConfigError(
                    f"{word}: an exact resume continues bit for bit, so it changes only {' and '.join(CHANGEABLE)}. To "
                    "go on with other settings, use --mode warm_start_optimizer, which starts a new run from these "
                    "weights."
                )
            config["environment"].setdefault(key.partition(".")[2], None)  # a run of an earlier version may lack it
        session.continue_run(directory, apply_overrides(config, overrides), quiet=quiet)
        return Run(directory)
    store = CheckpointStore(directory.checkpoints_dir)
    found = store.load_newest_valid(logging.getLogger("rl_lab").warning, Experiment.WARM_SECTIONS)
    if found is None:
        raise RunError(f"Run {directory.id} has no checkpoint to start from.")
    started = session.start_run(
        apply_overrides(config, overrides),
        overrides=[*overrides, f"# {mode} from {directory.id}"],
        runs_dir=directory.path.parent,
        quiet=quiet,
        warm_start=(found, mode == "warm_start_optimizer"),
    )
    return Run(started)


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


@contextmanager
def _acting(
    run: RunReference,
    runs_dir: str | Path | None,
    checkpoint: str | Path,
    seed: int | None,
    trust: Sequence[str],
    num_envs: int | None = None,
) -> Iterator[tuple[RunDirectory, Agent, Evaluator]]:
    """A run's trained agent with environments to act in, which are closed at the end."""
    directory = _directory(run, runs_dir)
    config = open_config(directory, trust)
    if seed is not None:
        config["seed"] = seed
    if num_envs is not None:
        config["evaluation"]["num_envs"] = num_envs
    agent, evaluator = load_agent(directory, config, checkpoint)
    try:
        yield directory, agent, evaluator
    finally:
        evaluator.close()


def evaluate(
    run: RunReference,
    *,
    episodes: int = 100,
    checkpoint: str | Path = "latest",
    seed: int | None = None,
    video: str | Path | None = None,
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> dict[str, float]:
    """Play `episodes` deterministic episodes of a trained policy; `video` also records one of them. `trust` names
    packages that the run's config may import (docs/security.md)."""
    with _acting(run, runs_dir, checkpoint, seed, trust) as (_, agent, evaluator):
        evaluator.progress = progress
        metrics = agent.workflow.evaluate(episodes=episodes)
        if video is not None and record_video(agent, evaluator, Path(video)) is None:
            raise RunError(f"{evaluator.environment.spec.id} cannot render here, so there is no video.")
        return {name: float(value) for name, value in metrics.items()}


def load(
    run: RunReference,
    *,
    checkpoint: str | Path = "latest",
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
) -> Policy:
    """A trained policy that keeps its own recurrent state and normaliser: `policy.act(observation)`."""
    with _acting(run, runs_dir, checkpoint, seed=None, trust=trust, num_envs=1) as (_, agent, evaluator):
        return Policy(agent.workflow, evaluator.environment.blueprint, device=agent.runtime.device)


def play(
    run: RunReference,
    *,
    episodes: int = 1,
    output: str | Path | None = None,
    checkpoint: str | Path = "latest",
    seed: int | None = None,
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
) -> Path | None:
    """Watch a policy: in a window where there is a display, else (or with `output`) as an mp4."""
    from rl_lab.collection.viewer import can_show, show

    with _acting(run, runs_dir, checkpoint, seed, trust) as (directory, agent, evaluator):
        recordings = evaluator.record_episodes(agent.workflow.act, episodes=episodes)
        frames = [frame for recording in recordings for frame in recording.frames]
        if not frames:
            raise RunError(f"{evaluator.environment.spec.id} cannot render, so there is nothing to show.")
    if output is None and can_show():
        show(frames, fps=recordings[0].fps, title=directory.id)
        return None
    path = Path(output) if output is not None else directory.output("videos", "play.mp4")
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
    trust: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Dataset:
    """Write a dataset from a run's policy, or from the "random" one in `environment`; see docs/datasets.md."""
    run = None if source == "random" else _directory(source, runs_dir)
    if output is None and (run is None or format == "minari"):
        raise ConfigError("Say where the dataset goes: --output data/cartpole, or cartpole/random-v0 for Minari.")
    place = run.output("episodes") if output is None and run is not None else output
    request = Request(str(place), steps, episodes, format, mode, seed, num_envs, checkpoint, overwrite, progress)
    if run is None:
        return collect_random(environment, list(overrides), request)
    if overrides:
        raise ConfigError(
            f"{overrides[0]}: a run's policy plays in the run's own environment; only random takes settings."
        )
    return collect_run(run, environment, request, trust)


def dream(
    run: RunReference,
    *,
    horizon: int = 45,
    context: int = 5,
    sequences: int = 4,
    output: str | Path | None = None,
    checkpoint: str | Path = "latest",
    seed: int | None = None,
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> FilmFiles:
    """Play `sequences` new episodes and film real, reconstruction and open loop: the model sees `context` rows, then
    only the actions for `horizon` more."""
    for name, value in {"horizon": horizon, "context": context, "sequences": sequences}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}: write a whole number of at least 1.")
    if output is not None:
        check_name(Path(output))
    with _acting(run, runs_dir, checkpoint, seed, trust, num_envs=sequences) as (directory, agent, evaluator):
        if not can_dream(agent.workflow):
            raise ConfigError(
                f"Run {directory.id} cannot dream: {type(agent.workflow).__name__} has no world model. "
                f"Watch it with `rl-lab play {directory.id}`, or train one that can with `rl-lab train dreamer_v3`."
            )
        evaluator.progress = progress
        path = Path(output) if output is not None else directory.output("videos", "dream.mp4")
        return film_dreams(agent, evaluator, path, sequences=sequences, context=context, horizon=horizon)


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
