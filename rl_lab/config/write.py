"""A trained-for set of values as an experiment of its own: `configs/experiment/NAME.yaml`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_lab.config.compose import compose
from rl_lab.config.experiments import read_words
from rl_lab.config.files import Config, config_directories, find, read, value_at
from rl_lab.config.phases import PHASES, TRAIN_RATIO
from rl_lab.types import ConfigError


def experiment_text(
    name: str, experiment: str | None, overrides: Sequence[str], *, remarks: Sequence[str], config_dir: Path | None
) -> str:
    """YAML that builds on `experiment` and composes to the same config as `experiment` with `overrides`; a ConfigError
    where no such file can say it."""
    base, parsed, groups = read_words(experiment, overrides, config_dir)
    config = compose(experiment, overrides, config_dir=config_dir)
    chosen = [item for item in parsed if item.key_or_group in groups]
    late = [item for item in chosen if item.key_or_group in _late_groups(config_dir)]
    choices = [{f"override /{item.key_or_group}": item.value()} for item in chosen if item not in late]
    values: Config = {"experiment": {"name": name, "description": remarks[0] if remarks else ""}}
    if late:  # their values, since no experiment can choose them
        groups_of_late = {item.key_or_group for item in late}
        others = [word for word in overrides if word.partition("=")[0].lstrip("+") not in groups_of_late]
        _set_changes(values, compose(experiment, others, config_dir=config_dir), config)
    for item in parsed:
        key = str(item.key_or_group)
        if key in groups or key.startswith("experiment."):
            continue
        key = PHASES if key.startswith(f"{PHASES}.") or key == TRAIN_RATIO else key
        _set(values, key, value_at(config, key))
    content = {"defaults": [*([base] if base else []), *choices, "_self_"], **values}
    comment = "".join(f"# {remark}\n" for remark in remarks)
    text = f"# @package _global_\n{comment}" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    _check_same(text, name, config, config_dir)
    return text


def _late_groups(config_dir: Path | None) -> list[str]:
    """The groups that join after the experiment: Hydra lets a file choose only what comes before it."""
    file = find("config.yaml", config_dir)
    assert file is not None
    names = [name for entry in read(file)["defaults"] if isinstance(entry, dict) for name in entry]
    return names[names.index("experiment") + 1 :]


def _set_changes(values: Config, before: Config, after: Config, path: str = "") -> None:
    """Put what `after` has and `before` has not into `values`."""
    for key, value in after.items():
        place = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            _set_changes(values, before[key], value, place)
        elif key not in before or before[key] != value:
            _set(values, place, value)


def _set(values: Config, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[last] = value


def _check_same(text: str, name: str, config: Config, config_dir: Path | None) -> None:
    """Compose the text as the user will, and compare; only what the experiment is called may differ."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "configs"
        for directory in config_directories(config_dir)[:-1]:
            for file in directory.rglob("*.yaml"):
                place = own / file.relative_to(directory)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.read_bytes())
        file = own / "experiment" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        again = compose(name, config_dir=own)
    if {**again, "experiment": None} != {**config, "experiment": None}:
        raise ConfigError("These choices of groups cannot be written into one experiment file.")
