"""YAML -> one plain, complete, checked dictionary. The only file that imports Hydra and OmegaConf.

Configs are searched in `./configs` of the user's project first, then among those shipped with the package, so a
user's file replaces or joins ours without touching them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import product
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
from omegaconf.errors import OmegaConfBaseException

from rl_lab.config.files import (
    PACKAGE_CONFIGS,
    TRAIN_RATIO,
    Config,
    config_directories,
    documented_keys,
    experiment_files,
    find,
    hint_anywhere,
    leave_out_absent_parts,
    paths_of,
    read,
    readable,
    spread_train_ratio,
    value_at,
)
from rl_lab.types import ConfigError, Phase, did_you_mean

DEFAULT_EXPERIMENT = "ppo_cartpole"
PHASES = "training.phases"
LATE_GROUPS = ("memory", "decoder", "task", "preset")  # whose files may name another class for a block
PART_GROUPS = ("memory", "q_values", "replay", "decoder")  # of which an experiment may have made its own choice
HYDRA_FUNCTIONS = create_functions().functions  # choice(...), range(...), int(...), and so on


@dataclass(frozen=True)
class ExperimentInfo:
    """A named experiment, as `rl-lab experiments` shows it."""

    name: str
    algorithm: str
    environment: str
    description: str


@dataclass(frozen=True)
class KeyExplanation:
    """A setting: what it is now, what it means, where it is set, and what lies below it."""

    key: str
    value: object
    documentation: str
    type: str
    source: str
    children: list[str]


# --- composing ---------------------------------------------------------------------------------


def compose(experiment: str | None, overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> Config:
    """The resolved config of an experiment (`ppo_cartpole`, `CartPole-v1:ppo`, None: the default run)."""
    chosen, implied = _resolve_experiment(experiment, overrides, config_dir)
    parsed = _parse_values([*implied, *overrides])
    head = [f"experiment={chosen}"] if chosen else []
    groups = _groups(config_dir)
    choices = [item for item in parsed if item.key_or_group in groups]
    in_phases = [item for item in parsed if str(item.key_or_group).startswith(f"{PHASES}.")]
    values = [item for item in parsed if item not in choices and item not in in_phases]
    for item in choices:
        _check_group(item, groups)
    head += [str(item.input_line) for item in choices]
    composed = _compose(head, config_dir)
    if values:
        known = _plain(composed, resolve=False)
        for item in values:
            if not item.is_add():
                _check_key(str(item.key_or_group), known, groups)
        composed = _compose([*head, *(str(item.input_line) for item in values)], config_dir)
    _keep_chosen_environment(composed, parsed, config_dir)
    _keep_chosen_size(composed, parsed, config_dir)
    config = _plain(composed, resolve=True)
    leave_out_absent_parts(config, _named(parsed).get("preset", "none"), config_dir)
    _forget_replaced_choices(config, chosen, parsed, config_dir)
    _start_replaced_blocks_afresh(config, chosen, parsed, config_dir)
    _refuse_choices_in_vain(config, parsed, config_dir)
    spread_train_ratio(config, is_asked_for=any(item.key_or_group == TRAIN_RATIO for item in parsed))
    for item in in_phases:
        _override_phase(config, str(item.key_or_group), item.value())
    return config


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A saved config with some values changed; keys must exist."""
    result: Config = copy.deepcopy(config)
    for item in _parse_values(overrides):
        key = str(item.key_or_group)
        if key.startswith(f"{PHASES}."):
            _override_phase(result, key, item.value())
        else:
            _check_key(key, result, ())
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
    for override in _parse(overrides):
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    return [list(combination) for combination in product(*choices)]


def _named(overrides: Sequence[Override]) -> dict[str, str]:
    return {str(item.key_or_group): str(item.value()) for item in overrides}


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)


def _keep_chosen_environment(composed: Any, overrides: Sequence[Override], config_dir: Path | None) -> None:
    """An environment chosen by name, or by a task, replaces the experiment's own; how many run is up to the rest."""
    chosen = _named(overrides)
    task = chosen.get("task", "none")
    if "environment" in chosen or task != "none":
        roots = ("environment", "task", "preset")
        own = [str(item.input_line) for item in overrides if str(item.key_or_group).split(".")[0] in roots]
        num_envs = composed.environment.num_envs
        composed.environment = _compose(own, config_dir).environment
        composed.environment.num_envs = num_envs
    if {"environment", "task"} <= chosen.keys() and (file := find(f"task/{task}.yaml", config_dir)) is not None:
        offered = set(paths_of(_plain(_compose([f"environment={chosen['environment']}"], config_dir), resolve=False)))
        for path in paths_of({"environment": read(file).get("environment", {})}):
            if path not in offered:
                raise ConfigError(
                    f"task={task} does not fit environment={chosen['environment']}, which has no {path}. "
                    "Leave one of the two out, or choose an environment of the task's kind."
                )


def _keep_chosen_size(composed: Any, overrides: Sequence[Override], config_dir: Path | None) -> None:
    """A size chosen by name replaces the experiment's own numbers."""
    named = _named(overrides)
    if (file := find(f"size/{named.get('size', 'none')}.yaml", config_dir)) is not None:
        numbers = read(file)
        for path in [path for path in paths_of(numbers) if path not in named]:
            if not isinstance(value := value_at(numbers, path), dict):
                OmegaConf.update(composed, path, value, force_add=True)


def _forget_replaced_choices(
    config: Config, experiment: str | None, overrides: Sequence[Override], config_dir: Path | None
) -> None:
    """The keys of a choice that the command line replaced go with it: no range of returns without a distribution."""
    named = _named(overrides)
    files = [read(file) for file in experiment_files(experiment, config_dir)]  # what it builds on comes after it
    entries = [entry for file in reversed(files) for entry in file.get("defaults", []) if isinstance(entry, dict)]
    own = {group: option for entry in entries for group, option in entry.items()}
    numbers = {path for file in files for path in paths_of(file)}
    for group in [group for group in PART_GROUPS if group in named and f"override /{group}" in own]:
        choices = own[f"override /{group}"], named[group]
        replaced, chosen = (find(f"{group}/{choice}.yaml", config_dir) for choice in choices)
        if replaced is None or chosen is None:
            continue
        for path in numbers & {*paths_of(read(replaced))} - {*paths_of(read(chosen))} - named.keys():
            parent, _, last = path.rpartition(".")
            block = value_at(config, parent)
            if isinstance(block, dict) and not isinstance(block.get(last), dict):
                block.pop(last, None)


def _start_replaced_blocks_afresh(
    config: Config, experiment: str | None, overrides: Sequence[Override], config_dir: Path | None
) -> None:
    """A block whose `_target_` is named anew holds only what was named with it, and the `input` it had.

    The keys of the old class are not those of the new one.
    """
    chosen = _named(overrides)
    files: list[Path | None] = [*experiment_files(experiment, config_dir)]
    entries = [entry for file in files if file for entry in read(file).get("defaults", []) if isinstance(entry, dict)]
    own = {key.removeprefix("override /"): str(option) for entry in reversed(entries) for key, option in entry.items()}
    chosen = own | chosen
    files += [find(f"{group}/{chosen[group]}.yaml", config_dir) for group in LATE_GROUPS if group in chosen]
    named = {path for file in files if file is not None for path in paths_of(read(file))}
    named |= {str(item.key_or_group) for item in overrides}
    for path in [path.removesuffix("._target_") for path in named if path.endswith("._target_")]:
        block = value_at(config, path)
        if isinstance(block, dict):
            for key in [key for key in block if key != "input" and f"{path}.{key}" not in named]:
                del block[key]


def _refuse_choices_in_vain(config: Config, overrides: Sequence[Override], config_dir: Path | None) -> None:
    """A part chosen by name whose class is replaced by the experiment's own, which speaks later, would not be there."""
    named = _named(overrides)
    for group in [group for group in PART_GROUPS if group in named]:
        chosen = read(Path(f"{find(f'{group}/{named[group]}.yaml', config_dir)}"))
        for path in [path for path in paths_of(chosen) if path.endswith("._target_") and path not in named]:
            if value_at(config, path) != value_at(chosen, path):
                raise ConfigError(
                    f"{group}={named[group]} would change nothing: {path.removesuffix('._target_')} is the "
                    f"{value_at(config, path)} of {config['experiment']['name']}. Leave {group} out of the command, or "
                    "train another experiment."
                )


def _compose(overrides: Sequence[str], config_dir: Path | None, *, with_hydra: bool = False) -> Any:
    UserConfigs.directories = config_directories(config_dir)[:-1]
    Plugins.instance().register(UserConfigs)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(PACKAGE_CONFIGS), version_base="1.3", job_name="rl_lab"):
            return hydra_compose("config", overrides=list(overrides), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error)) from error


class UserConfigs(SearchPathPlugin):
    """Puts the user's folder before ours. (`hydra.searchpath` would put it behind, and is read only after the
    primary config has been found.)"""

    directories: list[Path] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in self.directories:
            search_path.prepend(provider="user", path=f"file://{directory}")


def _groups(config_dir: Path | None) -> dict[str, list[str]]:
    """Every config group and its options: {'algorithm': ['ppo', ...], ...}."""
    groups: dict[str, list[str]] = {}
    for directory in config_directories(config_dir):
        for file in sorted(directory.rglob("*.yaml")):
            path = file.relative_to(directory)
            for depth in range(1, len(path.parts)):
                option = "/".join((*path.parts[depth:-1], path.stem))
                options = groups.setdefault("/".join(path.parts[:depth]), [])
                if option not in options:
                    options.append(option)
    return groups


def _parse_values(overrides: Sequence[str]) -> list[Override]:
    """Overrides for one run: each names one value."""
    parsed = _parse(overrides)
    for item in parsed:
        if item.is_sweep_override():
            raise ConfigError(f"'{item.input_line}' names several values: add -m (--multirun) to run each of them.")
    return parsed


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides([_quoted(override) for override in overrides])
    except HydraException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{first}. Write overrides as key=value, for example algorithm.discount=0.98.") from error


def _quoted(override: str) -> str:
    """`learning_rate=linear(1e-3, 0)` with the quotes Hydra wants around a call that is none of its own."""
    call = re.fullmatch(r"([^=]+=)((\w+)\([^()']*\))", override)
    return f"{call[1]}'{call[2]}'" if call is not None and call[3] not in HYDRA_FUNCTIONS else override


def _check_group(override: Override, groups: dict[str, list[str]]) -> None:
    option, options = override.value(), groups[str(override.key_or_group)]
    option = str(option) if isinstance(option, int | float) else option  # `size=12`: a choice's name all the same
    if not isinstance(option, str):
        if override.key_or_group != "experiment":
            raise ConfigError(f"{override.input_line}: write one of {', '.join(options)}.")
    elif option not in options:
        others = [f" Did you mean {group}={option}?" for group in groups if option in groups[group]]
        hint = did_you_mean(option, options) or "".join(others[:1])
        place = f"{override.key_or_group}={option}"
        raise ConfigError(f"{place}: there is no such choice.{hint} Choices: {', '.join(options)}.")


def _check_key(key: str, config: Config, groups: Sequence[str] | dict[str, list[str]]) -> None:
    """Refuse a key that the config does not have, with the nearest spelling."""
    node: Any = config
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            siblings = list(node) if isinstance(node, dict) else []
            prefix = ".".join(walked)
            names = [f"{prefix}.{name}" for name in siblings] if prefix else [*siblings, *groups]
            wanted = f"{prefix}.{part}" if prefix else part
            hint = did_you_mean(wanted, names) or hint_anywhere(part, config)
            if isinstance(node, dict) and not node:
                hint = f" {prefix} is empty; to add to it, write +{key}=VALUE."
            allowed = f" {prefix or 'The config'} has: {', '.join(siblings)}." if siblings else ""
            raise ConfigError(f"{key} is not a setting.{hint}{allowed}")
        node = node[part]
        walked.append(part)


def _override_phase(config: Config, key: str, value: Any) -> None:
    """`training.phases.train.duration_steps=1000`: a phase is named by its name or its place in the list."""
    node, field_name = _phase_of(key, config)
    if not field_name:
        raise ConfigError(f"{key} is a whole phase: set one of its keys, {key}.KEY=VALUE.")
    *parents, last = field_name.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value


def _phase_of(key: str, config: Config) -> tuple[Config, str]:
    """The phase a key names and the rest of the key, which is empty or begins with a key of a phase."""
    phases = config["training"]["phases"]
    name, _, field_name = key.removeprefix(f"{PHASES}.").partition(".")
    names = [str(phase.get("name")) for phase in phases]
    index = names.index(name) if name in names else int(name) if name.isdigit() else -1
    if not 0 <= index < len(phases):
        raise ConfigError(
            f"{key}: there is no phase '{name}'.{did_you_mean(name, names)} Phases: {', '.join(names) or 'none'}; "
            f"write {PHASES}.NAME.KEY=VALUE."
        )
    known = [field.name for field in fields(Phase) if field.name != "progress"]
    if field_name and field_name.split(".")[0] not in known:
        raise ConfigError(f"{key} is not a setting.{did_you_mean(field_name, known)} A phase has: {', '.join(known)}.")
    return phases[index], field_name


def _plain(config: Any, *, resolve: bool) -> Config:
    try:
        plain = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        raise ConfigError(readable(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}


# --- experiments -------------------------------------------------------------------------------


def _resolve_experiment(
    experiment: str | None, overrides: Sequence[str], config_dir: Path | None
) -> tuple[str | None, list[str]]:
    """The named experiment to compose and the overrides that its spelling implies."""
    if experiment is None:
        return DEFAULT_EXPERIMENT, []
    infos = list_experiments(config_dir)
    names = [info.name for info in infos]
    if experiment in names:
        return experiment, []
    environment, separator, algorithm = experiment.rpartition(":")
    algorithms = _groups(config_dir).get("algorithm", [])
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
    is_group = environment in _groups(config_dir).get("environment", [])  # such as dmc/walker_walk
    choice = f"environment={environment}" if is_group else f"environment.id='{environment}'"
    return None, [f"algorithm={algorithm}", choice, f"experiment.name={algorithm}_{name}"]


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


# --- explaining --------------------------------------------------------------------------------


def explain(
    key: str, experiment: str | None = None, overrides: Sequence[str] = (), *, config_dir: Path | None = None
) -> KeyExplanation:
    """What a setting means: the comment beside it in the YAML that defines it, its value and where that is set."""
    config = compose(experiment, overrides, config_dir=config_dir)
    groups = _groups(config_dir)
    choice = f"A choice of config files: {key}={'|'.join(groups[key])}." if key in groups else ""
    if key in groups and key not in config:
        return KeyExplanation(key, None, choice, "choice", "", [])
    if key.startswith(f"{PHASES}."):
        return _explain_phase(key, config)
    _check_key(key, config, groups)
    value: Any = config
    for part in key.split("."):
        value = value[part]
    documentation, source = _documentation(key, experiment, overrides, config_dir)
    children = [f"{key}.{child}" for child in value] if isinstance(value, dict) else []
    return KeyExplanation(key, value, choice or documentation, type(value).__name__, source, children)


def _explain_phase(key: str, config: Config) -> KeyExplanation:
    phase, field_name = _phase_of(key, config)
    if not field_name:
        children = [f"{key}.{name}" for name in phase]
        return KeyExplanation(key, phase, "One stretch of the curriculum; see docs/phases.md.", "Phase", "", children)
    first, *further = field_name.split(".")
    declared = next(field for field in fields(Phase) if field.name == first)
    value = phase.get(first, None if declared.default is MISSING else declared.default)
    for part in further:
        value = value.get(part) if isinstance(value, dict) else None
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
    """The files a config is made of, in the order in which they speak."""
    chosen, implied = _resolve_experiment(experiment, overrides, config_dir)
    groups = _groups(config_dir)
    picked = [str(item.input_line) for item in _parse_values([*implied, *overrides]) if item.key_or_group in groups]
    composed = _compose([*([f"experiment={chosen}"] if chosen else []), *picked], config_dir, with_hydra=True)
    choices = {group: option for group, option in composed.hydra.runtime.choices.items() if "/" not in group}
    order = [("", "config"), *reversed(choices.items())]  # Hydra lists the last to speak first
    if choices.get("task", "none") != "none":
        picked.append(f"environment={choices['environment']}")  # a task replaces the experiment's own
    for group, option in sorted(
        order, key=lambda choice: (choice[0] == "preset_for", f"{choice[0]}={choice[1]}" in picked)
    ):
        if group == "experiment":
            yield from reversed(list(experiment_files(option, config_dir)))
        elif (file := find(f"{group}/{option}.yaml".lstrip("/"), config_dir)) is not None:
            for entry in read(file).get("defaults", []):  # environment/dmc/walker_walk builds on /environment/dmc
                if isinstance(entry, str) and entry.endswith("@_here_"):
                    yield Path(f"{find(entry[1:].removesuffix('@_here_') + '.yaml', config_dir)}")
            yield file
