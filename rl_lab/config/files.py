"""The files that configs are made of: where they lie, what is in them, which builds on which."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rl_lab.types import ConfigError
from rl_lab.utils.yaml_comments import comments_of_keys

Config = dict[str, Any]
PACKAGE_CONFIGS = Path(__file__).parents[1] / "configs"
USER_CONFIGS = Path("configs")
TRAIN_RATIO = "training.updates_per_step"


def config_directories(config_dir: Path | None) -> list[Path]:
    """Where configs are looked for: the user's own folder first, then the package's."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder.")
    user = (config_dir or USER_CONFIGS).resolve()
    return [user, PACKAGE_CONFIGS] if user.is_dir() and user != PACKAGE_CONFIGS else [PACKAGE_CONFIGS]


def experiment_files(experiment: str | None, config_dir: Path | None) -> Iterator[Path]:
    """The file of an experiment and of the experiments it builds on."""
    file = find(f"experiment/{experiment}.yaml", config_dir) if experiment else None
    if file is None:
        return
    yield file
    for entry in read(file).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            yield from experiment_files(entry, config_dir)


def find(name: str, config_dir: Path | None) -> Path | None:
    """The first file of this name, such as `size/1m.yaml`."""
    return next((d / name for d in config_directories(config_dir) if (d / name).is_file()), None)


def read(file: Path) -> Config:
    return from_yaml(file.read_text(), place=str(file))


def from_yaml(text: str, *, place: str) -> Config:
    """A saved config.yaml; anything but a mapping of plain data is refused."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is not valid YAML: {error}") from error
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


def spread_train_ratio(config: Config, *, is_asked_for: bool) -> None:
    """`training.updates_per_step` speaks for every phase that has a train ratio, and is gone from the config then.

    A task may set it for any algorithm, PPO included, whose phases have none; whoever writes it means it.
    """
    ratio = config["training"].pop("updates_per_step", None)
    phases = [phase for phase in config["training"]["phases"] if phase.get("updates_per_step") is not None]
    if is_asked_for and ratio is not None and not phases:
        names = ", ".join(str(phase.get("name")) for phase in config["training"]["phases"])
        raise ConfigError(
            f"{TRAIN_RATIO} is {ratio}, but none of the phases ({names}) has a train ratio: their updates follow from "
            f"what they collect. Leave it out, or give a phase one: training.phases.NAME.updates_per_step={ratio}."
        )
    for phase in phases if ratio is not None else ():
        phase["updates_per_step"] = ratio


def leave_out_absent_parts(config: Config, preset: str, config_dir: Path | None) -> None:
    """What a preset says of one algorithm's part does not bring it back where an experiment does without (`null`)."""
    for directory in config_directories(config_dir):
        for file in directory.glob(f"preset_for/{preset}_*.yaml"):
            for kind, part in [path.split(".") for path in paths_of(read(file)) if path.count(".") == 1]:
                block = value_at(config, f"{kind}.{part}")
                if kind in ("controllers", "buffers") and isinstance(block, dict) and "_target_" not in block:
                    config[kind][part] = None


@cache
def documented_keys(file: Path) -> dict[str, str]:
    """Every key a YAML file sets, as its path in the whole config, with the comment beside or above it."""
    lines = file.read_text().splitlines()
    package = next((line.split("@package", 1)[1].strip() for line in lines[:3] if "@package" in line), None)
    prefix = file.parent.name if package is None else "" if package == "_global_" else package
    if file.parent in (PACKAGE_CONFIGS, USER_CONFIGS.resolve()) or file.name == "config.yaml":
        prefix = ""
    return comments_of_keys(lines, prefix)


def hint_anywhere(name: str, config: Config) -> str:
    """A hint for a key given without its block: `discount` -> `algorithm.discount`."""
    found = [path for path in paths_of(config) if path.rsplit(".", 1)[-1] == name]
    return f" Did you mean '{found[0]}'?" if found else ""


def readable(error: Exception) -> str:
    """The lines of a Hydra error that tell a user something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("full_key", "object_type", "See ", "Set the environment"))]
    return " ".join(useful)
