"""A run's world model at work, as a film; behind `rl-lab dream` and `rl_lab.dream`."""

from __future__ import annotations

from pathlib import Path

from rl_lab.api import Run, RunReference
from rl_lab.experiment.build import film_dreams
from rl_lab.experiment.load import load_agent, load_config
from rl_lab.runs.film import FilmFiles
from rl_lab.runs.index import resolve_run
from rl_lab.runs.video import check_name
from rl_lab.types import ConfigError
from rl_lab.workflows.film import can_dream


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
) -> FilmFiles:
    """Play `sequences` new episodes and film real, reconstruction and open loop: the model looks at `context` rows,
    then hears only the actions for `horizon` more."""
    for name, value in {"horizon": horizon, "context": context, "sequences": sequences}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}: write a whole number of at least 1.")
    if output is not None:
        check_name(Path(output))
    directory = run.directory if isinstance(run, Run) else resolve_run(run, Path(runs_dir or "runs"))
    config = load_config(directory)
    if seed is not None:
        config["seed"] = seed
    config["evaluation"]["num_envs"] = sequences
    agent, evaluator = load_agent(directory, config, checkpoint)
    try:
        if not can_dream(agent.workflow):
            raise ConfigError(
                f"Run {directory.id} cannot dream: {type(agent.workflow).__name__} has no world model. "
                f"Watch it with `rl-lab play {directory.id}`, or train one that can with `rl-lab train dreamer_v3`."
            )
        path = Path(output) if output is not None else directory.output("videos", "dream.mp4")
        return film_dreams(agent, evaluator, path, sequences=sequences, context=context, horizon=horizon)
    finally:
        evaluator.close()
