"""The files that configs are made of: where they lie, what is in them, which builds on which."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rl_lab.types import ConfigError

Config = dict[str, Any]
PACKAGE_CONFIGS = Path(__file__).parents[1] / "configs"
USER_CONFIGS = Path("configs")


def config_directories(config_dir: Path | None) -> list[Path]:
    """Where configs are looked for: the user's own folder first, then the package's."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder.")
    user = (config_dir or USER_CONFIGS).resolve()
    return [user, PACKAGE_CONFIGS] if user.is_dir() and user != PACKAGE_CONFIGS else [PACKAGE_CONFIGS]


def experiment_files(
    experiment: str | None, config_dir: Path | None, builders: tuple[Path, ...] = ()
) -> Iterator[Path]:
    """The file of an experiment and of the experiments it builds on (`builders`: those that build on this one)."""
    file = find(f"experiment/{experiment}.yaml", config_dir) if experiment else None
    if file is None:
        return
    if file in builders:
        raise ConfigError(f"{file} builds on itself: leave its name out of `defaults`.")
    yield file
    for entry in defaults_of(file):
        if isinstance(entry, str) and entry != "_self_":
            yield from experiment_files(entry, config_dir, (*builders, file))


def check_package(file: Path) -> None:
    """Refuse an experiment whose blocks Hydra would put into one block of its folder's name."""
    lines = file.read_text(encoding="utf-8").splitlines()
    if lines and not re.match(r"#\s*@package\s+_global_", lines[0]) and read(file):
        raise ConfigError(
            f"{file} lacks the line `# @package _global_`, so its blocks would not be those of a config: "
            "write it there as the very first line."
        )


def defaults_of(file: Path) -> list[Any]:
    """The `defaults:` of a file: names of files it builds on, and choices of groups."""
    defaults = read(file).get("defaults") or []
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}: defaults is {defaults!r}: write a list, such as `- override /algorithm: ppo`.")
    return defaults


def choices_of(files: Iterable[Path]) -> dict[str, str]:
    """The options that files, each followed by those it builds on, choose of config groups: {'replay': 'uniform'}."""
    entries = [entry for file in reversed([*files]) for entry in defaults_of(file) if isinstance(entry, dict)]
    pairs = [(str(group), str(option)) for entry in entries for group, option in entry.items()]
    return {group.removeprefix("override ").strip().lstrip("/"): option for group, option in pairs}


def find(name: str, config_dir: Path | None) -> Path | None:
    """The first file of this name, such as `size/1m.yaml`."""
    return next((d / name for d in config_directories(config_dir) if (d / name).is_file()), None)


def read(file: Path) -> Config:
    try:
        return from_yaml(file.read_text(encoding="utf-8"), place=str(file))
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file} is not UTF-8 text (byte {byte:#x} in line {line}): save it as UTF-8.") from error


def state_of_files(directories: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Changes when a config is written, replaced, added or removed."""
    found = [(f"{file}", file.stat()) for directory in directories for file in sorted(directory.rglob("*.yaml"))]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in found)


@lru_cache(maxsize=512)  # by their text: finding an experiment reads every file several times
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def from_yaml(text: str, *, place: str) -> Config:
    """A saved config.yaml; anything but a mapping of plain data is refused."""
    try:
        config = copy.deepcopy(_parsed(text))
    except yaml.MarkedYAMLError as error:
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ConfigError(f"{place} is not valid YAML{where}: {error.problem}.") from error
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise ConfigError(f"{place} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{place} does not hold a config (a mapping of blocks).")
    return config


def paths_of(config: Any, prefix: str = "") -> Iterator[str]:
    """Every key as its path: `components`, `components.encoder`, and so on."""
    if isinstance(config, dict):
        for key, value in config.items():
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path
            yield from paths_of(value, path)


def value_at(config: Any, path: str) -> Any:
    """What lies at a path; None where there is nothing."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
