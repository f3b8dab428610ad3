"""Named experiments: which there are, and which one a word on the command line means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rl_lab.config.files import Config, config_directories, experiment_files, find, read
from rl_lab.config.groups import list_groups
from rl_lab.types import ConfigError, did_you_mean

DEFAULT_EXPERIMENT = "ppo_cartpole"


@dataclass(frozen=True)
class ExperimentInfo:
    """A named experiment, as `rl-lab experiments` shows it."""

    name: str
    algorithm: str
    environment: str
    description: str


def list_experiments(config_dir: Path | None = None) -> list[ExperimentInfo]:
    """Every named experiment, read from the files without composing them."""
    found: dict[str, ExperimentInfo] = {}
    for directory in config_directories(config_dir):
        for file in sorted((directory / "experiment").rglob("*.yaml")):
            name = file.relative_to(directory / "experiment").with_suffix("").as_posix()
            found.setdefault(name, _read_info(name, directory))
    return [found[name] for name in sorted(found)]


def _read_info(name: str, directory: Path) -> ExperimentInfo:
    chosen = {"algorithm": "ppo", "environment": "gymnasium"}
    content: Config = {}
    environment = None
    for part in reversed(list(experiment_files(name, directory))):  # what it builds on first
        content = read(part)
        for entry in content.get("defaults", []):
            if isinstance(entry, dict):
                for group, option in entry.items():
                    chosen[group.removeprefix("override ").strip().lstrip("/")] = str(option)
        environment = content.get("environment", {}).get("id", environment)
    if environment is None:
        group_file = find(f"environment/{chosen['environment']}.yaml", directory)
        environment = None if group_file is None else read(group_file).get("id")
    description = content.get("experiment", {}).get("description", "")
    return ExperimentInfo(name, chosen["algorithm"], str(environment or "?"), str(description))


def resolve_experiment(experiment: str | None, config_dir: Path | None) -> tuple[str | None, list[str]]:
    """The named experiment to compose and the overrides that its spelling implies."""
    if experiment is None:
        return DEFAULT_EXPERIMENT, []
    infos = list_experiments(config_dir)
    names = [info.name for info in infos]
    if experiment in names:
        return experiment, []
    environment, separator, algorithm = experiment.rpartition(":")
    groups = list_groups(config_dir)
    algorithms = groups.get("algorithm", [])
    if not separator or "=" in experiment:
        if experiment in algorithms:
            return None, [f"algorithm={experiment}", f"experiment.name={experiment}"]
        raise ConfigError(
            f"There is no experiment '{experiment}'.{did_you_mean(experiment, [*names, *algorithms])} "
            "`rl-lab experiments` lists them; ENVIRONMENT:ALGORITHM, such as CartPole-v1:ppo, names any other."
        )
    fitting = [info.name for info in infos if (info.environment, info.algorithm) == (environment, algorithm)]
    if fitting:
        return min(fitting, key=len), []
    if algorithm not in algorithms:
        raise ConfigError(
            f"'{experiment}' asks for the algorithm '{algorithm}', which there is not."
            f"{did_you_mean(algorithm, algorithms)} Algorithms: {', '.join(algorithms)}."
        )
    name = re.sub(r"[^A-Za-z0-9]+", "_", environment).strip("_").lower()
    is_group = environment in groups.get("environment", [])  # such as dmc/walker_walk
    choice = f"environment={environment}" if is_group else f"environment.id='{environment}'"
    return None, [f"algorithm={algorithm}", choice, f"experiment.name={algorithm}_{name}"]
