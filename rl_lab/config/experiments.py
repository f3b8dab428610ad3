"""Named experiments: which there are, and which one a word on the command line means."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rl_lab.config.files import (
    PACKAGE_CONFIGS,
    check_package,
    choices_of,
    config_directories,
    experiment_files,
    find,
    read,
    value_at,
)
from rl_lab.config.groups import Groups, Override, as_dict, join_groups, list_groups, parse_values, values_by_key
from rl_lab.config.translate import is_foreign, name_from_words, translate
from rl_lab.types import ConfigError, did_you_mean

DEFAULT_EXPERIMENT, DEFAULT_VARIANT = "ppo_cartpole", "CartPole-v1:ppo"  # the default run; completes a part of a name


@dataclass(frozen=True)
class ExperimentInfo:
    """A named experiment, as `rl-lab experiments` shows it."""

    name: str
    algorithm: str
    environment: str
    description: str


def experiment_names(config_dir: Path | None = None) -> list[str]:
    """Every named experiment, whether its file can be read or not."""
    folders = [directory / "experiment" for directory in config_directories(config_dir)]
    files = [file.relative_to(folder) for folder in folders for file in folder.rglob("*.yaml")]
    return sorted({file.with_suffix("").as_posix() for file in files})


def list_experiments(config_dir: Path | None = None) -> list[ExperimentInfo]:
    """Every named experiment, read from its files without composing them; one that cannot be read is left out."""
    infos = []
    for name in experiment_names(config_dir):
        try:
            infos.append(_read_info(name, config_dir))
        except ConfigError as error:
            _warn_once(f"left out: {error}")
    return infos


@cache
def _warn_once(sentence: str) -> None:
    logging.getLogger("rl_lab").warning(sentence)


def _read_info(name: str, config_dir: Path | None) -> ExperimentInfo:
    files = list(experiment_files(name, config_dir))
    chosen = {"algorithm": "ppo", "environment": "gymnasium", **choices_of(files)}
    environment = description = None
    for file in reversed(files):  # what it builds on first
        environment = value_at(read(file), "environment.id") or environment
        description = value_at(read(file), "experiment.description")
    if environment is None:
        group_file = find(f"environment/{chosen['environment']}.yaml", config_dir)
        environment = None if group_file is None else read(group_file).get("id")
    return ExperimentInfo(name, chosen["algorithm"], str(environment or "?"), str(description or ""))


def read_words(
    experiment: str | None, overrides: Sequence[str], config_dir: Path | None
) -> tuple[str | None, list[Override], Groups]:
    """The named experiment to compose, all overrides with those that its spelling implies, and the config groups."""
    groups = list_groups(config_dir)
    experiment, overrides = name_from_words(experiment, overrides, DEFAULT_VARIANT)
    chosen, implied = _resolve_experiment(experiment, values_by_key(parse_values(overrides)), groups, config_dir)
    parsed = parse_values([*implied, *overrides])
    if any(is_foreign(str(item.key_or_group).lstrip("+")) or item.value() == "gpu" for item in parsed):
        choices = [str(item.input_line) for item in parsed if item.key_or_group in groups]
        joined = as_dict(
            join_groups([*([f"experiment={chosen}"] if chosen else []), *choices], config_dir), resolve=False
        )
        parsed = parse_values(translate([str(item.input_line) for item in parsed], joined))
    return chosen, parsed, groups


def _resolve_experiment(
    experiment: str | None, overrides: Mapping[str, str], groups: Groups, config_dir: Path | None
) -> tuple[str | None, list[str]]:
    algorithm = overrides.get("algorithm")
    if experiment is None:
        if algorithm in (None, _read_info(DEFAULT_EXPERIMENT, config_dir).algorithm):
            return DEFAULT_EXPERIMENT, []
        return None, [f"experiment.name={algorithm}"]
    chosen, implied = _resolve_name(experiment, groups, config_dir)
    if algorithm in groups["algorithm"]:
        own = _read_info(chosen, config_dir) if chosen else None
        own_algorithm = own.algorithm if own else implied[0].removeprefix("algorithm=")
        if algorithm != own_algorithm:
            environment = own.environment if own else experiment.rpartition(":")[0]
            cure = f"{environment}:{algorithm}" if environment else algorithm
            raise ConfigError(
                f"algorithm={algorithm}: {experiment} is set up for {own_algorithm}, and its settings do not fit. "
                f"Write: rl-lab train {cure}"
            )
    return chosen, implied


def _resolve_name(experiment: str, groups: Groups, config_dir: Path | None) -> tuple[str | None, list[str]]:
    names = experiment_names(config_dir)
    if experiment in names:
        for file in list(experiment_files(experiment, config_dir)):  # in words of ours, if one of them cannot be read
            check_package(file)
        return experiment, []
    environment, separator, variant = experiment.rpartition(":")
    if separator and "=" not in experiment:
        return _resolve_variant(environment, variant, groups, config_dir)
    if experiment in groups["algorithm"]:
        return None, [f"algorithm={experiment}", f"experiment.name={experiment}"]
    raise ConfigError(
        f"There is no experiment '{experiment}'.{_hint_of_name(experiment, names, groups)} "
        "`rl-lab experiments` lists them; ENVIRONMENT:ALGORITHM, such as CartPole-v1:ppo, names any other."
    )


def _hint_of_name(word: str, names: Sequence[str], groups: Groups) -> str:
    """What a word that names no experiment is likely to mean: an algorithm, an environment, or a part of some names."""
    algorithms = groups["algorithm"]
    if word.lower() in (*names, *algorithms):
        return f" Did you mean '{word.lower()}'?"
    folder = next((path for path in (Path(word), Path("runs") / word) if (path / "config.yaml").is_file()), None)
    if folder is not None:
        return f" It is a run: `rl-lab resume {word}` continues it, `rl-lab train {folder}/config.yaml` repeats it."
    if re.search(r"-v\d+$", word):
        return f" An environment needs an algorithm: {word}:ppo, or one of {', '.join(algorithms)}."
    parts = [name for name in names if word.lower() in name.split("_")]
    if parts:
        first = [name for name in parts if name == DEFAULT_EXPERIMENT]
        return f" Those of that name: {', '.join([*first, *(name for name in parts if name not in first)])}."
    for environment in groups["environment"]:
        suite, _, name = environment.rpartition("/")
        if word.lower() == name:  # breakout
            made_for = f"ppo_{suite}"
            command = f"{made_for} environment={environment}" if made_for in names else f"{environment}:ppo"
            return f" An environment has that name: rl-lab train {command}."
    return did_you_mean(word, [*names, *algorithms])


def _resolve_variant(
    environment: str, variant: str, groups: Groups, config_dir: Path | None
) -> tuple[str | None, list[str]]:
    """`Pendulum-v1:dreamer`: an experiment for that environment, or an algorithm or experiment made for any."""
    infos = list_experiments(config_dir)
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
        hint = did_you_mean(variant.lower(), [*algorithms, *names])
        if environment in algorithms:
            hint = f" Did you mean '{variant}:{environment}'?"
        raise ConfigError(
            f"'{environment}:{variant}': '{variant}' is neither an algorithm nor an experiment for {environment}."
            f"{hint} Algorithms: {', '.join(algorithms)}." + (f" Experiments: {', '.join(names)}." if names else "")
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
