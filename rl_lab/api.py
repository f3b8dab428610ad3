"""RL Lab from Python, for notebooks and scripts; the command line has the same verbs.

run = rl_lab.train("ppo_cartpole", seed=1)
rl_lab.evaluate(run, episodes=100)
policy = rl_lab.load(run)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, Literal, overload

from gymnasium import Env
from gymnasium.vector import VectorEnv

from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.compose import apply_overrides, compose
from rl_lab.config.spelling import spell, words_of
from rl_lab.config.translate import unsaid
from rl_lab.environments.base import Environment
from rl_lab.environments.catalog import EnvDetails as EnvDetails
from rl_lab.environments.catalog import describe_environment as describe_environment
from rl_lab.environments.catalog import how_to_install as how_to_install
from rl_lab.environments.catalog import list_environments as list_environments
from rl_lab.environments.catalog import look_at_environment as look_at_environment
from rl_lab.environments.catalog import missing_suites as missing_suites
from rl_lab.environments.checker import Finding
from rl_lab.environments.factory import make_environment
from rl_lab.environments.gymnasium_form import make_gymnasium
from rl_lab.environments.handed import EnvSource, hand_over, is_handed, is_one
from rl_lab.environments.several import task_number
from rl_lab.experiment import session
from rl_lab.experiment.build import Agent, Experiment
from rl_lab.experiment.collect import Dataset, Format, Request, collect_random, collect_run
from rl_lab.experiment.export import SUFFIXES, PolicyFile, PolicyFormat, check_format
from rl_lab.experiment.film import can_be_filmed, film_dreams, record_video
from rl_lab.experiment.load import load_actor, load_agent, open_config
from rl_lab.experiment.policy_source import policy_of
from rl_lab.experiment.publish import Published, publish_run
from rl_lab.experiment.run import Run
from rl_lab.orchestration.callbacks import Callback, Callbacks
from rl_lab.policy import Policy
from rl_lab.runs import hub
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.compare import Comparison, compare_runs
from rl_lab.runs.film import FilmFiles
from rl_lab.runs.index import RunIndex, resolve_run
from rl_lab.runs.report import run_word
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.video import check_name, write_video
from rl_lab.types import ConfigError, RunError, did_you_mean

ResumeMode = Literal["exact", "warm_start", "warm_start_optimizer"]
Progress = Callable[[int, int], None]  # called with how much is done, and of how much
CALLBACKS = [each.name for each in fields(Callbacks)]
MODES = ("exact", "warm_start", "warm_start_optimizer")
RunReference = str | Path | Run


# --- training ----------------------------------------------------------------------------------


def train(
    experiment: str | None = None,
    *,
    env: EnvSource | None = None,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    runs_dir: str | Path | None = None,
    config_dir: str | Path | None = None,
    quiet: bool = False,
    on_row: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    on_episode: Callback | None = None,
    resume_existing: bool = False,
    **settings: Any,
) -> Run:
    """Train an experiment to its end. Settings are `seed=1` or, for a deeper key, `algorithm__discount=0.98`.

    `env` is an environment as an object: its class or a function that makes one, of which as many are made as
    `environment.num_envs` says, or one environment, which is copied. Callbacks get plain values by name; they stop the
    run by returning False or with `.stop()` (docs/from_python.md).
    """
    callbacks = Callbacks(on_row, on_evaluation, on_checkpoint, on_episode)
    words = words_of(overrides, settings, callbacks=CALLBACKS)
    if env is not None:
        experiment, words = experiment or "ppo", _with_environment(env, words)
    with unsaid(quiet):
        config = compose(experiment, words, config_dir=None if config_dir is None else Path(config_dir))
    trained = session.train(
        config,
        words,
        run_id=run_id,
        runs_dir=runs_dir,
        resume_existing=resume_existing,
        quiet=quiet,
        callbacks=callbacks,
    )
    return Run(trained)


def _with_environment(env: EnvSource, words: list[str]) -> list[str]:
    """The overrides that name an environment which was handed over."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    if "environment.id" in given:
        raise ConfigError(f"env and environment.id={given['environment.id']} name two environments: leave one out.")
    if is_one(env) and given.setdefault("environment.num_envs", "1") != "1":
        raise ConfigError(
            f"env is one environment, but environment.num_envs is {given['environment.num_envs']}: hand over what "
            "makes one, such as env=MyEnv or env=lambda: MyEnv(...), or leave num_envs out."
        )
    alone = ["environment.num_envs=1"] if is_one(env) else []
    return [*words, *alone, f"environment.id={spell(hand_over(env))}"]


def resume(
    run: RunReference,
    *,
    env: EnvSource | None = None,
    runs_dir: str | Path | None = None,
    mode: ResumeMode = "exact",
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    quiet: bool = False,
    on_row: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    on_episode: Callback | None = None,
    **settings: Any,
) -> Run:
    """Continue a run. exact: bit for bit, in its own directory, also with more steps than it had
    (`training__phases__train__duration_steps=200000`); warm_start: a new run that begins with its weights.

    A run that was trained with an environment object gets it again as `env`."""
    overrides = words_of(overrides, settings, callbacks=CALLBACKS)
    if mode not in MODES:
        raise ConfigError(f"mode is '{mode}': write {', '.join(MODES)}.")
    callbacks = Callbacks(on_row, on_evaluation, on_checkpoint, on_episode)
    directory = _directory(run, runs_dir)
    environment_id = None if env is None else hand_over(env)
    if mode == "exact":
        if environment_id is not None and not is_handed(own := str(Run(directory).config["environment"]["id"])):
            raise ConfigError(f"Run {directory.id} was trained in '{own}' and goes on there: leave env out.")
        session.continue_run(
            directory, overrides=overrides, trust=trust, quiet=quiet, environment_id=environment_id, callbacks=callbacks
        )
        return Run(directory)
    config = open_config(directory, trust)
    if environment_id is not None:
        config["environment"]["id"] = environment_id
    store = CheckpointStore(directory.checkpoints_dir)
    found = store.load_newest_valid(logging.getLogger("rl_lab").warning, Experiment.WARM_SECTIONS)
    if found is None:
        raise RunError(f"Run {directory.id} has no checkpoint to start from.")
    with unsaid(quiet):
        config = apply_overrides(config, overrides)
    started = session.start_run(
        config,
        overrides=[*overrides, f"# {mode} from {directory.id}"],
        runs_dir=directory.path.parent,
        quiet=quiet,
        warm_start=(found, mode == "warm_start_optimizer"),
        callbacks=callbacks,
    )
    return Run(started)


# --- looking -----------------------------------------------------------------------------------


@contextmanager
def _acting(
    run: RunReference,
    runs_dir: str | Path | None,
    checkpoint: str | Path,
    seed: int | None,
    trust: Sequence[str],
    env: EnvSource | None,
    num_envs: int | None = None,
) -> Iterator[tuple[RunDirectory, Agent, Evaluator]]:
    """A run's trained agent with environments to act in, which are closed at the end."""
    directory = _to_look_at(run, runs_dir)
    config = open_config(directory, trust)
    if env is not None:
        config["environment"]["id"] = hand_over(env)
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
    env: EnvSource | None = None,
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> dict[str, float]:
    """Play `episodes` deterministic episodes of a trained policy; `video` also records one of them. `trust` names
    packages that the run's config may import (docs/security.md)."""
    with _acting(run, runs_dir, checkpoint, seed, trust, env) as (_, agent, evaluator):
        evaluator.progress = progress
        metrics = agent.workflow.evaluate(episodes=episodes)
        if video is not None and record_video(agent.workflow, evaluator, Path(video)) is None:
            raise RunError(f"{evaluator.environment.spec.id} cannot render here, so there is no video.")
        return {name: float(value) for name, value in metrics.items()}


def load(
    run: RunReference,
    *,
    checkpoint: str | Path = "latest",
    device: str | None = None,
    env: EnvSource | None = None,
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
) -> Policy:
    """A trained policy that keeps its own recurrent state and normaliser: `policy.act(observation)`. The environment
    need not be installed. `device` replaces the run's own, such as "cpu". `run` may also be a model on the Hugging Face
    Hub, "user/model" or "user/model@revision"."""
    directory = _to_look_at(run, runs_dir)
    config = open_config(directory, trust)
    if env is not None:
        config["environment"]["id"] = hand_over(env)
    agent, blueprint = load_actor(directory, config, checkpoint, device=device)
    return policy_of(config, agent, blueprint)


def export_policy(
    run: RunReference,
    *,
    output: str | Path | None = None,
    format: PolicyFormat | None = None,
    checkpoint: str | Path = "latest",
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
) -> PolicyFile:
    """Write a run's policy as one file that acts without RL Lab and without the environment: a torch.export program
    (.pt2) or ONNX. It is compared with `policy.act` before it is there; see docs/export.md."""
    directory = _directory(run, runs_dir)
    path = Path(output) if output is not None else directory.output(f"policy{SUFFIXES[format or 'torch'][0]}")
    check_format(path, format)
    return load(directory.path, checkpoint=checkpoint, device="cpu", trust=trust).export(path)


def publish(
    run: RunReference,
    *,
    repo: str,
    private: bool = False,
    dry_run: bool = False,
    license: str = "mit",
    checkpoint: str = "latest",
    runs_dir: str | Path | None = None,
) -> Published:
    """Upload a run's policy, config and a model card to the Hugging Face Hub, or with `dry_run` only say what would be
    uploaded; `rl_lab.load(repo)` restores it. See docs/publish.md."""
    directory = _directory(run, runs_dir)
    return publish_run(directory, repo, private=private, dry_run=dry_run, license=license, checkpoint=checkpoint)


def play(
    run: RunReference,
    *,
    episodes: int = 1,
    task: str | int | None = None,
    output: str | Path | None = None,
    checkpoint: str | Path = "latest",
    seed: int | None = None,
    env: EnvSource | None = None,
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
) -> Path | None:
    """Watch a policy: in a window where there is a display, else (or with `output`) as an mp4. Of several tasks each is
    played, or `task` alone, by name or number."""
    from rl_lab.collection.viewer import can_show, show

    with _acting(run, runs_dir, checkpoint, seed, trust, env) as (directory, agent, evaluator):
        spec = agent.workflow.context.spec
        recordings = evaluator.record_episodes(agent.workflow.act, episodes=episodes, task=task_number(spec, task))
        frames = [frame for recording in recordings for frame in recording.frames]
        if not frames:
            raise RunError(f"{spec.id} cannot render, so there is nothing to show.")
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
    env: EnvSource | None = None,
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
    """Write a dataset from a run's policy, or from the "random" one in `environment`; see docs/datasets.md. `env` is an
    environment as an object, as in `train`."""
    if env is not None:
        if environment is not None:
            raise ConfigError(f"env and environment='{environment}' name two environments: leave one out.")
        environment = hand_over(env)
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
    seed: int | None = None,
    output: str | Path | None = None,
    checkpoint: str | Path = "latest",
    env: EnvSource | None = None,
    runs_dir: str | Path | None = None,
    trust: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> FilmFiles:
    """Play `sequences` new episodes and film real, reconstruction and open loop: the model sees `context` rows, then
    only the actions for `horizon` more. Of a Diffusion Policy: its plans, over `context + horizon` rows."""
    for name, value in {"horizon": horizon, "context": context, "sequences": sequences}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}: write a whole number of at least 1.")
    if output is not None:
        check_name(Path(output))
    with _acting(run, runs_dir, checkpoint, seed, trust, env, sequences) as (directory, agent, evaluator):
        if not can_be_filmed(workflow := agent.workflow):
            raise ConfigError(
                f"Run {directory.id} cannot dream: {type(workflow).__name__} has no world model. "
                f"Watch it with `rl-lab play {run_word(directory)}`, "
                "or train one that can with `rl-lab train dreamer_v3`."
            )
        evaluator.progress = progress
        path = Path(output) if output is not None else directory.output("videos", "dream.mp4")
        return film_dreams(agent.workflow, evaluator, path, sequences=sequences, context=context, horizon=horizon)


def find_runs(
    text: str | None = None,
    *,
    where: str | Sequence[str] = (),
    sort: str | None = None,
    limit: int | None = None,
    runs_dir: str | Path | None = None,
) -> list[Run]:
    """The runs that fit, newest first or by `sort`: `find_runs(where=["algorithm=ppo", "eval/return>200"])`. What may
    stand in `where`: docs/compare.md."""
    folder = _runs_dir(runs_dir)
    rows = RunIndex(folder).find(text, where=[where] if isinstance(where, str) else where, sort=sort)
    return [Run(RunDirectory.open(folder / row["id"])) for row in rows[:limit]]


def compare(
    *runs: RunReference,
    where: str | Sequence[str] = (),
    metrics: str | Sequence[str] = "eval/return",
    x: str | None = None,
    at: float | None = None,
    group_by: str | Sequence[str] = (),
    against: str | Sequence[str] = (),
    runs_dir: str | Path | None = None,
) -> Comparison:
    """Runs side by side, seeds of one method as one group: `.tables()`, `.plot()`, `.write("compare.html")`. Runs are
    named, or chosen by `where`; see docs/compare.md."""
    chosen = [_directory(run, runs_dir) for run in runs]
    if where:
        chosen += [run.directory for run in reversed(find_runs(where=where, runs_dir=runs_dir))]
    if not chosen:
        raise RunError(f"compare: no run in {_runs_dir(runs_dir)} fits; `rl_lab.find_runs()` gives them all.")
    names, keys, others = ([each] if isinstance(each, str) else list(each) for each in (metrics, group_by, against))
    unique = list({run.path: run for run in chosen}.values())
    return compare_runs(unique, metrics=names, x=x, at=at, group_by=keys, against=others)


@overload
def make_env(id: EnvSource, *, native: Literal[False] = False, **settings: Any) -> Environment: ...
@overload
def make_env(id: EnvSource, *, native: Literal[True], **settings: Any) -> Env | VectorEnv: ...


def make_env(id: EnvSource, *, native: bool = False, **settings: Any) -> Environment | Env | VectorEnv:
    """Environments as our algorithms see them, `rl_lab.make_env("CartPole-v1", num_envs=8)`: rows, actions in [-1, 1].

    `native=True` gives them in Gymnasium's form, with native observations and actions like those of `policy.act`: a
    gymnasium.Env or, with `num_envs`, a vector environment."""
    make: Callable[..., Any] = make_gymnasium if native else make_environment
    known = signature(make).parameters
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"make_env has no setting '{name}'.{hint} It takes: {', '.join(known)}.")
    return make(id=hand_over(id), **settings)


def check_environment(id: str) -> list[Finding]:
    """What an environment's author should mend, each with its cure; empty when all is well."""
    import gymnasium

    from rl_lab.environments import checker, lookup

    registered = lookup.find(id)
    return checker.check_environment(lambda: gymnasium.make(registered, disable_env_checker=True))


def _to_look_at(run: RunReference, runs_dir: str | Path | None) -> RunDirectory:
    """A run here, or one on the Hub, of which there is a copy here then."""
    if isinstance(run, str) and hub.is_hub_name(run):
        return RunDirectory.open(hub.download(run))
    return _directory(run, runs_dir)


def _directory(run: RunReference, runs_dir: str | Path | None) -> RunDirectory:
    if isinstance(run, Run):
        return run.directory
    return resolve_run(run, _runs_dir(runs_dir))


def _runs_dir(runs_dir: str | Path | None) -> Path:
    return Path(runs_dir if runs_dir is not None else "runs")
