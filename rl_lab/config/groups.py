"""Hydra's part: it reads the words of a command line and joins the YAML files of all groups.

Configs are searched in `./configs` of the user's project first, then among those shipped with the package, so a
user's file replaces or joins ours without touching them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from rl_lab.config.files import PACKAGE_CONFIGS, Config, config_directories, read, state_of_files
from rl_lab.types import ConfigError, did_you_mean

Groups = dict[str, list[str]]
MANY_CHOICES = 20  # are not listed in a sentence that has a suggestion
HYDRA_FUNCTIONS = create_functions().functions  # choice(...), range(...), int(...), and so on


def join_groups(overrides: Sequence[str], config_dir: Path | None, *, with_hydra: bool = False) -> Any:
    """The files that the overrides choose, joined by Hydra; not resolved yet."""
    directories = tuple(config_directories(config_dir))
    return copy.deepcopy(_join(tuple(overrides), directories, with_hydra, state_of_files(directories)))


@lru_cache(maxsize=64)  # for as long as no file changes: every value on a command line is applied to the same choices
def _join(overrides: tuple[str, ...], directories: tuple[Path, ...], with_hydra: bool, _: object) -> Any:
    UserConfigs.directories = list(directories[:-1])
    Plugins.instance().register(UserConfigs)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(PACKAGE_CONFIGS), version_base="1.3", job_name="rl_lab"):
            return hydra_compose("config", overrides=list(overrides), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_readable(error)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)  # of a YAML error: it knows its file
        for file in [Path(mark.name)] if mark else [f for d in UserConfigs.directories for f in d.rglob("*.yaml")]:
            read(file)  # refuses it in words of ours
        raise ConfigError(f"A config cannot be read: {_readable(error)}") from error


class UserConfigs(SearchPathPlugin):
    """Puts the user's folder before ours. (`hydra.searchpath` would put it behind, and is read only after the
    primary config has been found.)"""

    directories: list[Path] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in self.directories:
            search_path.prepend(provider="user", path=f"file://{directory}")


def as_dict(joined: Any, *, resolve: bool) -> Config:
    """Joined files as a plain dictionary, with or without its interpolations (`${...}`) resolved."""
    try:
        plain = OmegaConf.to_container(joined, resolve=resolve, throw_on_missing=resolve)
    except InterpolationKeyError as error:
        cure = "(Where exploration= brought it: that is for Dreamer, so leave it out with this algorithm.)"
        raise ConfigError(f"{_readable(error)}. {cure}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_readable(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}


def set_values(joined: Any, overrides: Sequence[str]) -> None:
    """Apply the values of a command line to joined files, as Hydra would: `key=` exists, `+key=` does not yet."""
    for item in parse(overrides):
        key, value = str(item.key_or_group), item.value()
        if item.package is not None:
            raise ConfigError(f"'{item.input_line}' chooses of '{key}', which is not a config group: write key=value.")
        if item.is_add() and not isinstance(value, dict | list) and OmegaConf.select(joined, key) is not None:
            raise ConfigError(f"'{item.input_line}' adds what is there already: write {key}=VALUE.")
        _refuse_other_shape(joined, key, value, str(item.input_line))
        try:
            OmegaConf.update(joined, key, value, merge=True, force_add=item.is_add() or item.is_force_add())
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"'{item.input_line}' cannot be set: {_readable(error)}. To add a key, write +{item.input_line}"
            ) from error


def _refuse_other_shape(joined: Any, key: str, value: Any, line: str) -> None:
    """A block where a list of them belongs, and the other way round: OmegaConf cannot merge the two."""
    was, written = OmegaConf.select(joined, key), line.partition("=")[2]
    if OmegaConf.is_list(was) and isinstance(value, dict):
        raise ConfigError(f"'{line}' is one of a list: write '{key}=[{written}]'.")
    if OmegaConf.is_dict(was) and isinstance(value, list):
        raise ConfigError(f"'{line}': {key} has names and values: write '{key}={{name: value}}'.")


def set_value(joined: Any, path: str, value: Any) -> None:
    """Change one key of joined files before interpolations are resolved."""
    OmegaConf.update(joined, path, value, force_add=True)


def list_groups(config_dir: Path | None) -> Groups:
    """Every config group and its options: {'algorithm': ['ppo', ...], ...}."""
    groups: Groups = {}
    for directory in config_directories(config_dir):
        for file in sorted(directory.rglob("*.yaml")):
            path = file.relative_to(directory)
            for depth in range(1, len(path.parts)):
                option = "/".join((*path.parts[depth:-1], path.stem))
                options = groups.setdefault("/".join(path.parts[:depth]), [])
                if option not in options:
                    options.append(option)
    return groups


def check_choice(override: Override, groups: Groups) -> None:
    """Refuse `GROUP=OPTION` where the group has no such file."""
    option, options = override.value(), groups[str(override.key_or_group)]
    option = str(option) if isinstance(option, int | float) else option  # `size=12`: a choice's name all the same
    if not isinstance(option, str):
        if override.key_or_group != "experiment":
            raise ConfigError(f"{override.input_line}: write one of {', '.join(options)}.")
    elif option not in options:
        others = [f" Did you mean {group}={option}?" for group in groups if option in groups[group]]
        same = [each for each in options if each.rpartition("/")[2] == option]  # 5m: tdmpc2/5m
        hint = did_you_mean(same[0], same) if same else did_you_mean(option, options) or "".join(others[:1])
        if override.key_or_group == "environment" and re.search(r"-v\d+$", option):
            hint = f" The id of an environment is written environment.id={option}."
        elif override.key_or_group == "environment" and "/" not in option:  # cartpole: also that of bsuite
            hint += " One of Gymnasium is written by its id: environment.id=CartPole-v1."
        place = f"{override.key_or_group}={option}"
        listed = f"Choices: {', '.join(options)}."
        if len(options) > MANY_CHOICES and hint:
            listed = f"`rl-lab config explain {override.key_or_group}` lists all {len(options)}."
        raise ConfigError(f"{place}: there is no such choice.{hint} {listed}")


# --- the words of a command line ---------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    parsed: list[Override] = []
    for override in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([_quoted(override)])
        except HydraException as error:
            raise ConfigError(
                f"'{override}' cannot be read: write key=value, for example algorithm.discount=0.98. A value with "
                "brackets, quotes, commas or spaces must close what it opens, with quotes around it for the shell: "
                "'key=[a, b]'."
            ) from error
    return parsed


def parse_values(overrides: Sequence[str]) -> list[Override]:
    """Overrides for one run: each names one value."""
    parsed = parse(overrides)
    for item in parsed:
        if item.is_sweep_override():
            raise ConfigError(f"'{item.input_line}' names several values: add -m (--multirun) to run each of them.")
    return parsed


def values_by_key(overrides: Sequence[Override]) -> dict[str, str]:
    return {str(item.key_or_group): str(item.value()) for item in overrides}


def _quoted(override: str) -> str:
    """`learning_rate=linear(1e-3, 0)` with the quotes Hydra wants around a call that is none of its own."""
    call = re.fullmatch(r"([^=]+=)((\w+)\([^()']*\))", override)
    return f"{call[1]}'{call[2]}'" if call is not None and call[3] not in HYDRA_FUNCTIONS else override


def _readable(error: Exception) -> str:
    """The lines of a Hydra error that tell a user something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("full_key", "object_type", "See ", "Set the environment"))]
    return " ".join(useful)
