"""What a setting means: the comment beside it in the YAML that sets it last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path

from rl_lab.config.compose import check_key, compose
from rl_lab.config.experiments import read_words
from rl_lab.config.files import (
    PACKAGE_CONFIGS,
    USER_CONFIGS,
    Config,
    config_directories,
    defaults_of,
    experiment_files,
    find,
    value_at,
)
from rl_lab.config.groups import join_groups, list_groups
from rl_lab.config.phases import PHASES, find_phase
from rl_lab.types import Phase
from rl_lab.utils.yaml_comments import comments_of_keys


@dataclass(frozen=True)
class KeyExplanation:
    """A setting: what it is now, what it means, where it is set, and what lies below it."""

    key: str
    value: object
    documentation: str
    type: str
    source: str
    children: list[str]


def explain(
    key: str, experiment: str | None = None, overrides: Sequence[str] = (), *, config_dir: Path | None = None
) -> KeyExplanation:
    """What a setting means: the comment beside it in the YAML that defines it, its value and where that is set."""
    config = compose(experiment, overrides, config_dir=config_dir)
    groups = list_groups(config_dir)
    choice = f"A choice of config files: {key}={'|'.join(groups[key])}." if key in groups else ""
    if key in groups and key not in config:
        return KeyExplanation(key, None, choice, "choice", "", [])
    if key.startswith(f"{PHASES}."):
        return _explain_phase(key, config)
    check_key(key, config, groups)
    value = value_at(config, key)
    documentation, source = _documentation(key, experiment, overrides, config_dir)
    children = [f"{key}.{child}" for child in value] if isinstance(value, dict) else []
    return KeyExplanation(key, value, choice or documentation, type(value).__name__, source, children)


def _explain_phase(key: str, config: Config) -> KeyExplanation:
    phase, rest = find_phase(key, config)
    if not rest:
        children = [f"{key}.{name}" for name in phase]
        return KeyExplanation(key, phase, "One stretch of the curriculum; see docs/phases.md.", "Phase", "", children)
    first, _, further = rest.partition(".")
    declared = next(field for field in fields(Phase) if field.name == first)
    value = phase.get(first, None if declared.default is MISSING else declared.default)
    value = value_at(value, further) if further else value
    return KeyExplanation(key, value, "A key of a phase; see docs/phases.md.", str(declared.type), "", [])


def _documentation(
    key: str, experiment: str | None, overrides: Sequence[str], config_dir: Path | None
) -> tuple[str, str]:
    """The comment and the file of a key; of the files that take part, the last to set it wins."""
    documentation, source = "", ""
    for file in _files_in_order(experiment, overrides, config_dir):
        comments = documented_keys(file)
        if key in comments:
            directory = next(each for each in config_directories(config_dir) if file.is_relative_to(each))
            documentation, source = comments[key] or documentation, file.relative_to(directory).as_posix()
    return documentation, source


def _files_in_order(experiment: str | None, overrides: Sequence[str], config_dir: Path | None) -> Iterator[Path]:
    """The files a config is made of, in their order: later ones win."""
    chosen, parsed, groups = read_words(experiment, overrides, config_dir)
    picked = [str(item.input_line) for item in parsed if item.key_or_group in groups]
    joined = join_groups([*([f"experiment={chosen}"] if chosen else []), *picked], config_dir, with_hydra=True)
    choices = {group: option for group, option in joined.hydra.runtime.choices.items() if "/" not in group}
    order = [("", "config"), *reversed(choices.items())]  # Hydra lists the last first
    if choices.get("task", "none") != "none":
        picked.append(f"environment={choices['environment']}")  # a task replaces the experiment's own
    for group, option in sorted(
        order, key=lambda choice: (choice[0] == "preset_for", f"{choice[0]}={choice[1]}" in picked)
    ):
        if group == "experiment":
            yield from reversed(list(experiment_files(option, config_dir)))
        elif (file := find(f"{group}/{option}.yaml".lstrip("/"), config_dir)) is not None:
            for entry in defaults_of(file):  # environment/dmc/walker_walk builds on /environment/dmc
                if isinstance(entry, str) and entry.endswith("@_here_"):
                    yield Path(f"{find(entry[1:].removesuffix('@_here_') + '.yaml', config_dir)}")
            yield file


@cache
def documented_keys(file: Path) -> dict[str, str]:
    """Every key a YAML file sets, as its path in the whole config, with the comment beside or above it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    package = next((line.split("@package", 1)[1].strip() for line in lines[:3] if "@package" in line), None)
    prefix = file.parent.name if package is None else "" if package == "_global_" else package
    if file.parent in (PACKAGE_CONFIGS, USER_CONFIGS.resolve()) or file.name == "config.yaml":
        prefix = ""
    return comments_of_keys(lines, prefix)
