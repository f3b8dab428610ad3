"""What Hydra's order of files gets wrong when the command line chooses a group.

Hydra applies the experiment after every group, so its numbers would stay although their class, their environment or
their size was replaced by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from rl_lab.config.files import (
    Config,
    choices_of,
    config_directories,
    defaults_of,
    experiment_files,
    find,
    paths_of,
    read,
    value_at,
)
from rl_lab.config.groups import as_dict, join_groups, set_value, values_by_key
from rl_lab.types import ConfigError

LATE_GROUPS = ("memory", "decoder", "planner", "exploration", "task", "preset")  # may name another class for a block
PLANNER = "controllers.planner"
PART_GROUPS = (
    "memory",
    "q_values",
    "replay",
    "decoder",
    "planner",
    "exploration",
)  # an experiment may choose one itself


def repair_joined(joined: Any, experiment: str | None, overrides: Sequence[Override], config_dir: Path | None) -> None:
    """Before interpolations are resolved: the chosen environment and size replace the experiment's own."""
    named = values_by_key(overrides)
    files = list(experiment_files(experiment, config_dir))
    algorithm = (choices_of(files) | named).get("algorithm")
    own_wrappers = _wrappers_of_the_suite(files, named.get("environment"))
    _keep_chosen_environment(joined, overrides, algorithm, _task_of(files), config_dir)
    if own_wrappers is not None and "environment.wrappers" not in named:
        set_value(joined, "environment.wrappers", own_wrappers)
    _keep_chosen_size(joined, named, config_dir)


def repair_config(
    config: Config, experiment: str | None, overrides: Sequence[Override], config_dir: Path | None
) -> None:
    """Afterwards: keys that belong to a replaced choice or class are removed; choices without effect are refused."""
    named = values_by_key(overrides)
    files = list(experiment_files(experiment, config_dir))
    _leave_out_absent_parts(config, named.get("preset", "none"), config_dir)
    if (choices_of(files) | named).get("planner") == "none" and not any(key.startswith(PLANNER) for key in named):
        config["controllers"]["planner"] = None  # the experiment's own numbers go with it
    _forget_replaced_choices(config, files, named, config_dir)
    _start_replaced_blocks_afresh(config, files, named, config_dir)
    _refuse_choices_without_effect(config, named, config_dir)


def _task_of(files: Sequence[Path]) -> str | None:
    """The task that an experiment is made of (`- /task/atari` among its defaults)."""
    entries = [str(entry) for file in files for entry in defaults_of(file) if isinstance(entry, str)]
    return next((entry.removeprefix("/task/") for entry in entries if entry.startswith("/task/")), None)


def _wrappers_of_the_suite(files: Sequence[Path], environment: str | None) -> list[Any] | None:
    """The wrappers through which an experiment sees its suite, where another environment of that suite is chosen."""
    suite, own = (environment or "").partition("/")[0], choices_of(files).get("environment", "").partition("/")[0]
    if not suite or suite != own:
        return None
    found = [read(file).get("environment", {}).get("wrappers") for file in files]
    return next((wrappers for wrappers in reversed(found) if wrappers), None)


def _keep_chosen_environment(
    joined: Any, overrides: Sequence[Override], algorithm: str | None, own_task: str | None, config_dir: Path | None
) -> None:
    """An environment chosen by name, or by a task, replaces the experiment's own; how many run is up to the rest.

    A task may say something of its own to the algorithm (`task_for/`). Another environment of the kind that the
    experiment's own task is for, one more Atari game, is set up as that task says.
    """
    named = values_by_key(overrides)
    task, environment = named.get("task", "none"), named.get("environment")
    if environment is None and task == "none":
        return
    roots = ("environment", "task", "preset")
    words = [str(item.input_line) for item in overrides if str(item.key_or_group).split(".")[0] in roots]
    words += [f"algorithm={algorithm}"] if algorithm else []
    if environment is not None and "task" in named:
        if (path := _misfit(task, environment, algorithm, config_dir)) is not None:
            raise ConfigError(
                f"task={task} does not fit environment={environment}, which has no {path}. "
                "Leave one of the two out, or choose an environment of the task's kind."
            )
    elif environment is not None and own_task and _misfit(own_task, environment, algorithm, config_dir) is None:
        words.append(f"task={own_task}")
    num_envs = joined.environment.num_envs
    joined.environment = join_groups(words, config_dir).environment
    joined.environment.num_envs = num_envs


def _misfit(task: str, environment: str, algorithm: str | None, config_dir: Path | None) -> str | None:
    """The first setting of a task's environment that another environment does not have; None: it fits."""
    offered = set(paths_of(as_dict(join_groups([f"environment={environment}"], config_dir), resolve=False)))
    names = (f"task/{task}.yaml", f"task_for/{task}_{algorithm}.yaml")
    files = [file for file in (find(name, config_dir) for name in names) if file is not None]
    wanted = [path for file in files for path in paths_of({"environment": read(file).get("environment", {})})]
    return next((path for path in wanted if path not in offered), None)


def _keep_chosen_size(joined: Any, named: dict[str, str], config_dir: Path | None) -> None:
    """A size chosen by name replaces the experiment's own numbers; a part that is left out (`null`) stays so."""
    if (file := find(f"size/{named.get('size', 'none')}.yaml", config_dir)) is not None:
        numbers, known = read(file), as_dict(joined, resolve=False)
        for path in [path for path in paths_of(numbers) if path not in named]:
            is_left_out = (
                path.rpartition(".")[0] in paths_of(known) and value_at(known, path.rpartition(".")[0]) is None
            )
            if not isinstance(value := value_at(numbers, path), dict) and not is_left_out:
                set_value(joined, path, value)


def _leave_out_absent_parts(config: Config, preset: str, config_dir: Path | None) -> None:
    """What a preset says of one algorithm's part does not bring it back where an experiment does without (`null`)."""
    for directory in config_directories(config_dir):
        for file in directory.glob(f"preset_for/{preset}_*.yaml"):
            content: Config = {}
            with suppress(ConfigError):  # one of another algorithm: Hydra has read the one that takes part
                content = read(file)
            for kind, part in [path.split(".") for path in paths_of(content) if path.count(".") == 1]:
                block = value_at(config, f"{kind}.{part}")
                if kind in ("controllers", "buffers") and isinstance(block, dict) and "_target_" not in block:
                    config[kind][part] = None


def _forget_replaced_choices(
    config: Config, files: Sequence[Path], named: dict[str, str], config_dir: Path | None
) -> None:
    """The keys of a choice that the command line replaced go with it: no range of returns without a distribution."""
    own = choices_of(files)
    numbers = {path for file in files for path in paths_of(read(file))}
    for group in [group for group in PART_GROUPS if group in named and group in own]:
        replaced, chosen = (find(f"{group}/{choice}.yaml", config_dir) for choice in (own[group], named[group]))
        if replaced is None or chosen is None:
            continue
        for path in numbers & {*paths_of(read(replaced))} - {*paths_of(read(chosen))} - named.keys():
            parent, _, last = path.rpartition(".")
            block = value_at(config, parent)
            if isinstance(block, dict) and not isinstance(block.get(last), dict):
                block.pop(last, None)


def _start_replaced_blocks_afresh(
    config: Config, files: Sequence[Path], named: dict[str, str], config_dir: Path | None
) -> None:
    """A block whose `_target_` is named anew holds only what was named with it, the `input` it had, and of planners
    the `horizon`: how far a model can be trusted is the algorithm's business.

    The keys of the old class are not those of the new one.
    """
    chosen = choices_of(files) | named
    late = [find(f"{group}/{chosen[group]}.yaml", config_dir) for group in LATE_GROUPS if group in chosen]
    paths = {path for file in (*files, *late) if file is not None for path in paths_of(read(file))} | named.keys()
    for path in [path.removesuffix("._target_") for path in paths if path.endswith("._target_")]:
        block = value_at(config, path)
        kept = ("input", "horizon") if path == PLANNER else ("input",)
        if isinstance(block, dict):
            for key in [key for key in block if key not in kept and f"{path}.{key}" not in paths]:
                del block[key]


def _refuse_choices_without_effect(config: Config, named: dict[str, str], config_dir: Path | None) -> None:
    """A part chosen by name whose class the experiment replaces, since it applies later, would have no effect."""
    for group in [group for group in PART_GROUPS if group in named]:
        chosen = read(Path(f"{find(f'{group}/{named[group]}.yaml', config_dir)}"))
        for path in [path for path in paths_of(chosen) if path.endswith("._target_") and path not in named]:
            if value_at(config, path) != value_at(chosen, path):
                raise ConfigError(
                    f"{group}={named[group]} would change nothing: {path.removesuffix('._target_')} is the "
                    f"{value_at(config, path)} of {config['experiment']['name']}. Leave {group} out of the command, or "
                    "train another experiment."
                )
