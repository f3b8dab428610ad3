"""Named experiments: which there are, and which one a word on the command line means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_lab.config.files import PACKAGE_CONFIGS, Config, config_directories, experiment_files, find, read
from rl_lab.config.groups import Groups, list_groups
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
    environment, separator, variant = experiment.rpartition(":")
    groups = list_groups(config_dir)
    if separator and "=" not in experiment:
        return _resolve_variant(environment, variant, infos, groups, config_dir)
    if experiment in groups["algorithm"]:
        return None, [f"algorithm={experiment}", f"experiment.name={experiment}"]
    raise ConfigError(
        f"There is no experiment '{experiment}'.{did_you_mean(experiment, [*names, *groups['algorithm']])} "
        "`rl-lab experiments` lists them; ENVIRONMENT:ALGORITHM, such as CartPole-v1:ppo, names any other."
    )


def _resolve_variant(
    environment: str, variant: str, infos: Sequence[ExperimentInfo], groups: Groups, config_dir: Path | None
) -> tuple[str | None, list[str]]:
    """`Pendulum-v1:dreamer`: an experiment for that environment, or an algorithm or experiment made for any."""
    here = [info for info in infos if info.environment == environment]
    found = [info.name for info in here if _name_without_environment(info) == variant]
    found = found or [info.name for info in here if info.name == variant]
    if not found:  # by its algorithm: one of ours; a user's own is meant only by its name
        fitting = [info for info in here if info.algorithm == variant and _is_shipped(info.name, config_dir)]
        found = [info.name for info in fitting if _name_without_environment(info)] or [info.name for info in fitting]
    if len(found) > 1:
        raise ConfigError(f"'{environment}:{variant}' means several experiments: {', '.join(found)}. Name one of them.")
    if found:
        return found[0], []
    is_group = environment in groups["environment"]  # such as dmc/walker_walk
    slug = re.sub(r"[^A-Za-z0-9]+", "_", environment).strip("_").lower()
    implied = [f"environment={environment}" if is_group else f"environment.id='{environment}'"]
    implied += [f"experiment.name={variant}_{slug}"]
    if variant in groups["algorithm"]:
        return None, [f"algorithm={variant}", *implied]
    elsewhere = next((info for info in infos if info.name == variant), None)
    if elsewhere is None:
        algorithms, names = groups["algorithm"], [info.name for info in here]
        raise ConfigError(
            f"'{environment}:{variant}': '{variant}' is neither an algorithm nor an experiment for {environment}."
            f"{did_you_mean(variant, [*algorithms, *names])} Algorithms: {', '.join(algorithms)}."
            + (f" Experiments: {', '.join(names)}." if names else "")
        )
    if _name_without_environment(elsewhere):
        raise ConfigError(
            f"{variant} is made for {elsewhere.environment}. To try its settings elsewhere, write: "
            f"rl-lab train {variant} {implied[0]}".replace("'", "")
        )
    return variant, implied


def _name_without_environment(info: ExperimentInfo) -> str:
    """`ppo_cartpole_efficient` on CartPole-v1: `ppo_efficient`; empty where the name says no environment."""
    environment = re.sub(r"-v\d+$", "", info.environment.rpartition("/")[2]).lower()
    before, found, after = info.name.partition(f"_{environment}")
    return before + after if found else ""


def _is_shipped(name: str, config_dir: Path | None) -> bool:
    file = find(f"experiment/{name}.yaml", config_dir)
    return file is not None and file.is_relative_to(PACKAGE_CONFIGS)
