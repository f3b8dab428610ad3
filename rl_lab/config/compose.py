"""YAML -> one plain, complete dictionary: groups are joined, overrides checked and applied."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from rl_lab.config.experiments import read_words
from rl_lab.config.files import Config, paths_of
from rl_lab.config.groups import as_dict, check_choice, join_groups, parse, parse_values
from rl_lab.config.phases import PHASES, TRAIN_RATIO, override_phase, spread_train_ratio
from rl_lab.config.repair import repair_config, repair_joined
from rl_lab.types import ConfigError, did_you_mean


def compose(experiment: str | None, overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> Config:
    """The resolved config of an experiment (`ppo_cartpole`, `CartPole-v1:ppo`, None: the default run)."""
    chosen, parsed, groups = read_words(experiment, overrides, config_dir)
    choices = [item for item in parsed if item.key_or_group in groups]
    in_phases = [item for item in parsed if str(item.key_or_group).startswith(f"{PHASES}.")]
    values = [item for item in parsed if item not in choices and item not in in_phases]
    for item in choices:
        check_choice(item, groups)
    words = [f"experiment={chosen}"] if chosen else []
    words += [str(item.input_line) for item in choices]
    joined = join_groups(words, config_dir)
    if values:
        known = as_dict(joined, resolve=False)
        for item in values:
            if not item.is_add():
                check_key(str(item.key_or_group), known, groups)
        joined = join_groups([*words, *(str(item.input_line) for item in values)], config_dir)
    repair_joined(joined, parsed, config_dir)
    config = as_dict(joined, resolve=True)
    repair_config(config, chosen, parsed, config_dir)
    spread_train_ratio(config, is_asked_for=any(item.key_or_group == TRAIN_RATIO for item in parsed))
    for item in in_phases:
        override_phase(config, str(item.key_or_group), item.value())
    return config


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A saved config with some values changed; keys must exist."""
    result: Config = copy.deepcopy(config)
    for item in parse_values(overrides):
        key = str(item.key_or_group)
        if key.startswith(f"{PHASES}."):
            override_phase(result, key, item.value())
        else:
            check_key(key, result)
            if "." not in key and isinstance(result[key], dict):
                raise ConfigError(f"{key} is a block: set one of its keys. {key} has: {', '.join(result[key])}.")
            *parents, last = key.split(".")
            node = result
            for parent in parents:
                node = node[parent]
            node[last] = item.value()
    return result


def split_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """`seed=0,1,2 x=1` -> one list of overrides per combination."""
    choices: list[list[str]] = []
    for override in parse(overrides):
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    return [list(combination) for combination in product(*choices)]


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)


def check_key(key: str, config: Config, groups: Iterable[str] = ()) -> None:
    """Refuse a key that the config does not have, with the nearest spelling."""
    node: Any = config
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            siblings = list(node) if isinstance(node, dict) else []
            prefix = ".".join(walked)
            names = [f"{prefix}.{name}" for name in siblings] if prefix else [*siblings, *groups]
            wanted = f"{prefix}.{part}" if prefix else part
            hint = did_you_mean(wanted, names) or _hint_anywhere(part, config)
            if isinstance(node, dict) and not node:
                hint = f" {prefix} is empty; to add to it, write +{key}=VALUE."
            allowed = f" {prefix or 'The config'} has: {', '.join(siblings)}." if siblings else ""
            raise ConfigError(f"{key} is not a setting.{hint}{allowed}")
        node = node[part]
        walked.append(part)


def _hint_anywhere(name: str, config: Config) -> str:
    """A hint for a key given without its block: `discount` -> `algorithm.discount`."""
    found = [path for path in paths_of(config) if path.rsplit(".", 1)[-1] == name]
    return f" Did you mean '{found[0]}'?" if found else ""
