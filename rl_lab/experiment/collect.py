"""A policy and its environments -> a dataset on disk; behind `rl-lab collect` and `rl_lab.collect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl_lab.buffers.dataset import DESCRIPTION_FILE, Arrays, spec_description, write_dataset
from rl_lab.buffers.minari_format import PREFIX, dataset_folder, write_minari
from rl_lab.collection.collector import Collector
from rl_lab.collection.recorder import EpisodeRecorder
from rl_lab.config.compose import compose
from rl_lab.config.schema import read_settings
from rl_lab.environments.handed import is_handed
from rl_lab.environments.lookup import find
from rl_lab.experiment.build import POLICY, build_agent, build_environment, build_runtime
from rl_lab.experiment.load import load_checkpoint, open_config
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.runs.checkpoint import Checkpoint
from rl_lab.runs.files import readable_disk_errors
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import apply_state
from rl_lab.types import ConfigError, Phase, PolicyStep, Progress, RunError, TimeStep
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows.base import Workflow

Format = Literal["npz", "minari"]
FORMATS = ("npz", "minari")
_ROWS_AT_A_TIME = 16  # from each environment between two looks at what has ended
_RANDOM_ENVS = 8


@dataclass(frozen=True)
class Request:
    """What to collect, how much of it, and where to."""

    output: str
    steps: int | None = None
    episodes: int | None = None
    format: Format = "npz"
    mode: Literal["train", "eval"] = "train"
    seed: int | None = None
    num_envs: int | None = None
    checkpoint: str | Path = "latest"
    overwrite: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        for name, allowed in (("format", FORMATS), ("mode", ("train", "eval"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is '{getattr(self, name)}': write {' or '.join(allowed)}.")


@dataclass(frozen=True)
class Dataset:
    """What was written: `dataset` is how a config names it."""

    dataset: str
    path: Path
    environment: str
    source: str
    rows: int
    agent_steps: int
    episodes: int  # finished ones, whose returns follow
    cut_episodes: int
    episode_return_mean: float | None
    episode_return_min: float | None
    episode_return_max: float | None
    size_bytes: int


def collect_random(environment_id: str | None, overrides: list[str], request: Request) -> Dataset:
    """A dataset of the random policy."""
    if environment_id is None:
        raise ConfigError("The random policy needs an environment: write --env CartPole-v1.")
    config = compose(f"{environment_id}:random", overrides)
    source = {"policy": "random", "run": None, "checkpoint": None, "config_hash": None}
    return _collect(config, source, request, num_envs=request.num_envs or _RANDOM_ENVS)


def collect_run(run: RunDirectory, environment_id: str | None, request: Request, trust: Sequence[str]) -> Dataset:
    """A dataset of a run's policy, in the run's own environment."""
    config = open_config(run, trust)
    own = str(config["environment"]["id"])
    if environment_id is not None and is_handed(environment_id):
        own = config["environment"]["id"] = environment_id  # its spaces are compared with those of the policy
    if environment_id not in (None, own):
        raise ConfigError(
            f"Run {run.id} was trained on {own}, so its policy cannot act in {environment_id}: leave --env out."
        )
    found = load_checkpoint(run, request.checkpoint, "phase_state", "workflow_custom")
    manifest = run.read_manifest()
    source = {
        "policy": manifest["algorithm"],
        "run": run.id,
        "checkpoint": found.path.name,
        "config_hash": manifest["config_hash"],
    }
    num_envs = request.num_envs or int(config["environment"]["num_envs"])
    return _collect(config, source, request, num_envs=num_envs, checkpoint=found)


def _collect(
    config: dict[str, Any],
    source: Mapping[str, Any],
    request: Request,
    *,
    num_envs: int,
    checkpoint: Checkpoint | None = None,
) -> Dataset:
    path = _free_place(request)
    if request.seed is not None:
        config["seed"] = request.seed
    phases = read_settings(config).phases
    with ExitStack() as opened, readable_disk_errors(path):
        if request.episodes is not None:
            num_envs = min(num_envs, max(1, request.episodes))
        environment = build_environment(config, stream="dataset_environment", num_envs=num_envs)
        opened.callback(environment.close)
        recorder = EpisodeRecorder(environment.spec, num_envs, steps=request.steps, episodes=request.episodes)
        runtime = build_runtime(config)
        collector = Collector(environment, {"dataset": recorder}, device=runtime.device, stopwatch=Stopwatch())
        agent = build_agent(config, environment.spec, runtime=runtime, collector=collector)
        if checkpoint is not None:
            agent.restore(checkpoint, POLICY)
            custom = {"workflow_custom": checkpoint.state["workflow_custom"]}
            apply_state({"workflow_custom": agent.workflow}, custom)
        episodes = _episodes(recorder, agent.workflow, collector, _phase(phases, checkpoint), request)
        block, spec = config["environment"], environment.spec
        player = str(source["run"] or source["policy"])
        if request.format == "minari":
            write_minari(
                request.output,
                episodes,
                spec=spec,
                to_env_actions=environment.blueprint.actions.batch,
                action_space=environment.blueprint.actions.space,
                gymnasium_spec=_gymnasium_spec(block),
                algorithm=str(source["policy"]),
                description=f"{block['id']} played by {player}, collected with RL Lab",
            )
        else:
            origin = {**source, "mode": request.mode, "seed": int(config["seed"]), "num_envs": num_envs}
            own = {key: value for key, value in block.items() if key not in ("num_envs", "vectorization")}
            known = {"environment": own, **spec_description(spec), "source": origin}
            write_dataset(path, episodes, lambda: {**known, **_counts(recorder)})
    return Dataset(
        dataset=f"{PREFIX}{request.output}" if request.format == "minari" else str(path),
        path=path,
        environment=spec.id,
        source=player,
        size_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        **_counts(recorder),
    )


def _free_place(request: Request) -> Path:
    """Where the dataset will lie; whatever is there already is refused, or is a dataset that may be replaced."""
    path = dataset_folder(request.output) if request.format == "minari" else Path(request.output)
    if not path.exists():
        return path
    if not request.overwrite:
        raise RunError(f"{path} exists already: write to another --output, or replace it with --overwrite.")
    is_dataset = (path / DESCRIPTION_FILE).is_file() or (path / "data" / "metadata.json").is_file()
    if not is_dataset and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{path} is no dataset, so --overwrite does not touch it: write to another --output.")
    return path


def _phase(phases: Sequence[Phase], checkpoint: Checkpoint | None) -> Phase:
    """The phase whose schedules the policy explores by: where the run stood when the checkpoint was taken."""
    phase, progress = phases[-1], Progress()
    if checkpoint is not None:
        scheduler = PhaseScheduler(phases)
        scheduler.set_state(checkpoint.state["phase_state"])
        progress = Progress(fraction=1.0, run=scheduler.run_counts)
        if not scheduler.finished:
            phase = scheduler.current()
            progress = phase.progress
    return replace(phase, buffer="dataset", controller=None, collect_steps=_ROWS_AT_A_TIME, progress=progress)


def _episodes(
    recorder: EpisodeRecorder, workflow: Workflow, collector: Collector, phase: Phase, request: Request
) -> Iterator[Arrays]:
    """Episodes as they end, until there are enough: played as in training, or without exploration."""

    def act(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return workflow.act(time_step, state, mode="eval")

    for cycle in count():
        if recorder.is_full:
            return
        if request.mode == "train":
            workflow.collect_step(cycle, phase=phase)
        else:
            collector.collect(act, phase=phase)
        request.progress(*recorder.progress)
        yield from recorder.take()


def _counts(recorder: EpisodeRecorder) -> dict[str, Any]:
    returns = np.array([episode.episode_return for episode in recorder.finished])
    statistics: dict[str, Callable[..., Any]] = {"mean": np.mean, "min": np.min, "max": np.max}
    return {
        "rows": recorder.num_rows,
        "agent_steps": recorder.agent_steps,
        "episodes": len(returns),
        "cut_episodes": recorder.cut_episodes,
        **{f"episode_return_{name}": float(of(returns)) if len(returns) else None for name, of in statistics.items()},
    }


def _gymnasium_spec(block: Mapping[str, Any]) -> Any | None:
    """By which Minari recovers the environment; None where it would be another than the one that was played."""
    if any((block.get("wrappers"), block.get("time_limit"), block.get("action_masks"), block["action_repeat"] != 1)):
        return None
    found = find(str(block["id"]))
    return replace(found, kwargs={**found.kwargs, **(block.get("kwargs") or {})})
