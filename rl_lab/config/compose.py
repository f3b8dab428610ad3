"""YAML -> one plain, complete dictionary: groups are joined, overrides checked and applied."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from rl_lab.config.experiments import read_words
from rl_lab.config.files import Config, paths_of, read, value_at
from rl_lab.config.groups import Override, as_dict, check_choice, join_groups, parse, parse_values, set_values
from rl_lab.config.phases import PHASES, TRAIN_RATIO, override_phase, spread_train_ratio
from rl_lab.config.repair import repair_config, repair_joined
from rl_lab.config.translate import hint_of_word, translate
from rl_lab.config.words import ALL_WORDS
from rl_lab.types import ConfigError, did_you_mean

RULES = "logging.rules"  # metric rules by name; a config holds only those that it changes


def compose(experiment: str | None, overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> Config:
    """The resolved config of an experiment (`ppo_cartpole`, `CartPole-v1:ppo`, None: the default run, or a saved
    config.yaml, which is complete)."""
    if experiment is not None and experiment.endswith(".yaml"):
        return _saved(Path(experiment), overrides)
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
        set_values(joined, [_checked(item, known, groups) for item in values])
    repair_joined(joined, chosen, parsed, config_dir)
    config = as_dict(joined, resolve=True)
    repair_config(config, chosen, parsed, config_dir)
    spread_train_ratio(config, is_asked_for=any(item.key_or_group == TRAIN_RATIO for item in parsed))
    for item in in_phases:
        override_phase(config, str(item.key_or_group), item.value())
    return config


def _saved(file: Path, overrides: Sequence[str]) -> Config:
    """The config.yaml that a run left behind, to be trained again."""
    if not file.is_file():
        raise ConfigError(f"{file} is not a file: name an experiment, ENVIRONMENT:ALGORITHM, or a run's config.yaml.")
    config = read(file)
    if config.get("plugins"):
        raise ConfigError(
            f"{file} names plugins ({', '.join(map(str, config['plugins']))}), and a saved config may not import "
            "packages by itself: train the experiment it came from."
        )
    for key in ("experiment", "training", "algorithm", "environment"):
        if not isinstance(config.get(key), dict):
            raise ConfigError(
                f"{file} lacks the block '{key}': only the config.yaml of a run can be trained by its path."
            )
    config["runs"] = {**(config.get("runs") or {}), "id": None}  # a run of its own
    return apply_overrides(config, overrides)


def _checked(item: Override, known: Config, groups: Iterable[str]) -> str:
    """An override of a value as Hydra wants it; refused where it cannot be meant."""
    key, line = str(item.key_or_group), str(item.input_line)
    if item.is_delete():
        raise ConfigError(
            f"{line}: a setting cannot be taken away, only changed: write {key}=VALUE, or {key}=null for a part that "
            "may be left out."
        )
    if not item.is_add() and not item.is_force_add():
        check_key(key, known, groups)
    if key.startswith(f"{RULES}."):
        return f"++{line.lstrip('+')}"
    if key not in paths_of(known):
        return line  # +key=value, a new one
    value = item.value()
    if isinstance(value, dict) and line.startswith("+"):
        return f"++{line.lstrip('+')}"  # adds keys to a block
    line = line.lstrip("+")  # of a key that exists: the same as without
    if isinstance(value, float) and value.is_integer() and type(value_at(known, key)) is int:
        return f"{key}={int(value)}"  # 1e5
    return line


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A saved config with some values changed; keys must exist."""
    result: Config = copy.deepcopy(config)
    for item in parse_values(translate(overrides, result)):
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
                node[parent] = {} if node.get(parent) is None else node[parent]
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
    if key.startswith(f"{RULES}."):
        return  # whether there is such a rule is known where rules are made
    node: Any = config
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            siblings = list(node) if isinstance(node, dict) else []
            prefix = ".".join(walked)
            names = [f"{prefix}.{name}" for name in siblings] if prefix else [*siblings, *groups]
            wanted = f"{prefix}.{part}" if prefix else part
            hint = hint_of_word(part, config) or _hint_anywhere(part, config)
            hint = hint or hint_of_word(key.rpartition(".")[2], config)  # run.steps
            hint = hint or (did_you_mean(wanted, names) if did_you_mean(part, [*siblings, *groups]) else "")
            hint = hint or ("" if prefix else did_you_mean(part, ALL_WORDS))
            if not key:
                raise ConfigError("'=VALUE' lacks a key: write key=value, for example seed=3.")
            if isinstance(node, dict) and not node:
                hint = f" {prefix} is empty; to add to it, write +{key}=VALUE."
            allowed = f" {prefix or 'The config'} has: {', '.join(siblings)}." if siblings else ""
            raise ConfigError(f"{key} is not a setting.{hint}{allowed}")
        node = node[part]
        walked.append(part)


def _hint_anywhere(name: str, config: Config) -> str:
    """A hint for a key given without its block: `discount` -> `algorithm.discount`."""
    found = [path for path in paths_of(config) if path.rsplit(".", 1)[-1] == name]
    others = f" (Also: {', '.join(found[1:6])}.)" if len(found) > 1 else ""
    return f" Did you mean '{found[0]}'?{others}" if found else ""
