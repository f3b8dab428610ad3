"""`training.phases`: each block checked and made a Phase, and single keys of it changed from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from rl_lab.config.files import Config
from rl_lab.config.phase_settings import check_load
from rl_lab.types import ConfigError, Phase, did_you_mean

PHASES = "training.phases"
TRAIN_RATIO = "training.updates_per_step"
PHASE_KEYS = [field.name for field in fields(Phase) if field.name != "progress"]
PHASE_TYPES = ("online", "offline", "eval_only")
DURATIONS = ("duration_steps", "duration_updates", "duration_cycles")


def make_phase(settings: dict[str, Any], *, place: str) -> Phase:
    """A Phase from its YAML block; unknown keys, wrong values and phases without an end are refused."""
    for key in settings:
        if key not in PHASE_KEYS:
            hint = did_you_mean(key, PHASE_KEYS)
            raise ConfigError(f"{place}.{key} is unknown.{hint} Allowed: {', '.join(PHASE_KEYS)}.")
    if "name" not in settings:
        raise ConfigError(f"{place} has no name: write `name: train`.")
    given = {key: whole(value) for key, value in settings.items() if value is not None}  # null: the default
    for key in [name for name in ("workflow_hooks", "freeze") if name in given]:
        if not isinstance(given[key], list | tuple):
            raise ConfigError(f"{place}.{key} is {given[key]!r}: write a list, such as [{given[key]}].")
        given[key] = tuple(given[key])
    if not isinstance(given.get("set", {}), dict):
        raise ConfigError(f"{place}.set is {given['set']!r}: write settings, such as {{algorithm.discount: 0.9}}.")
    check_load(given.get("load"), place=f"{place}.load")
    phase = Phase(**given)
    _check(phase, place)
    return phase


def _check(phase: Phase, place: str) -> None:
    if phase.type not in PHASE_TYPES:
        hint = did_you_mean(phase.type, PHASE_TYPES)
        raise ConfigError(f"{place}.type is '{phase.type}'.{hint} Allowed: {', '.join(PHASE_TYPES)}.")
    chosen = [name for name in DURATIONS if getattr(phase, name) is not None]
    if not chosen:
        raise ConfigError(
            f"Phase '{phase.name}' would never end: set duration_steps, duration_updates or duration_cycles."
        )
    if len(chosen) > 1:
        raise ConfigError(f"Phase '{phase.name}' sets {' and '.join(chosen)}: keep the one that should end it.")
    for name in chosen:
        if not _is_whole(getattr(phase, name)) or getattr(phase, name) < 1:
            raise ConfigError(f"{place}.{name} is {getattr(phase, name)!r}: write a whole number of at least 1.")
    if not _is_whole(phase.collect_steps):
        raise ConfigError(f"{place}.collect_steps is {phase.collect_steps!r}: write a whole number.")
    if phase.type == "online" and phase.collect_steps < 1:
        raise ConfigError(
            f"{place}.collect_steps is {phase.collect_steps}: an online phase collects at least 1 row per "
            "environment and cycle (or write `type: offline`)."
        )
    if phase.type != "online" and phase.duration_steps is not None:
        raise ConfigError(
            f"Phase '{phase.name}' is {phase.type} and takes no agent steps, so duration_steps never ends it: "
            "set duration_updates or duration_cycles."
        )
    if phase.type != "online" and any(str(key).split(".")[0] == "environment" for key in phase.set):
        raise ConfigError(
            f"Phase '{phase.name}' is {phase.type} and collects nothing, so it sets no environment: set it in an "
            "online phase. Evaluations are always in the config's own `environment`."
        )
    _check_updates(phase, place)


def _check_updates(phase: Phase, place: str) -> None:
    if phase.duration_updates is not None and phase.type == "eval_only":
        raise ConfigError(
            f"Phase '{phase.name}' only evaluates, so duration_updates never ends it: set duration_cycles."
        )
    if phase.duration_updates is not None and not phase.workflow_hooks:
        raise ConfigError(f"Phase '{phase.name}' has no workflow_hooks, so duration_updates never ends it.")
    ratio = phase.updates_per_step
    if ratio is not None and (not isinstance(ratio, int | float) or not 0 < ratio < float("inf")):
        raise ConfigError(f"{place}.updates_per_step is {ratio!r}: write a number above 0, or null.")


def whole(value: Any) -> Any:
    """1e5, which YAML reads as a float, as the whole number it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def limited(phase: Phase, limit_cycles: int | None) -> Phase:
    """A phase cut short. One that learns ends after so many updates: its first cycles may be too few for a batch."""
    if limit_cycles is None:
        return phase
    learns = phase.type != "eval_only" and bool(phase.workflow_hooks)
    own = [phase.duration_cycles, phase.duration_updates]  # it may be shorter already
    count = min([limit_cycles, *(each for each in own if each is not None)])
    updates, cycles = (count, None) if learns else (None, count)
    return replace(phase, duration_steps=None, duration_updates=updates, duration_cycles=cycles)


def find_phase(key: str, config: Config) -> tuple[Config, str]:
    """The phase that `training.phases.NAME.KEY` names, by its name or its place, and the KEY, which may be empty."""
    phases = config["training"]["phases"]
    name, _, rest = key.removeprefix(f"{PHASES}.").partition(".")
    names = [str(phase.get("name")) for phase in phases]
    index = names.index(name) if name in names else int(name) if name.isdigit() else -1
    if not 0 <= index < len(phases):
        raise ConfigError(
            f"{key}: there is no phase '{name}'.{did_you_mean(name, names)} Phases: {', '.join(names) or 'none'}; "
            f"write {PHASES}.NAME.KEY=VALUE."
        )
    if rest and rest.split(".")[0] not in PHASE_KEYS:
        hint = did_you_mean(rest, PHASE_KEYS)
        raise ConfigError(f"{key} is not a setting.{hint} A phase has: {', '.join(PHASE_KEYS)}.")
    return phases[index], rest


def override_phase(config: Config, key: str, value: Any) -> None:
    """`training.phases.train.duration_steps=1000`."""
    node, rest = find_phase(key, config)
    if not rest:
        raise ConfigError(f"{key} is a whole phase: set one of its keys, {key}.KEY=VALUE.")
    *parents, last = rest.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = whole(value)


def is_extension(key: str) -> bool:
    """Whether a setting says how long a run goes on, and nothing else: durations of phases and stop rules."""
    if key == "training.limit_cycles" or (key.startswith("training.stop.") and key.count(".") == 2):
        return True
    return key.startswith(f"{PHASES}.") and key.rpartition(".")[2] in DURATIONS and key.count(".") == 3


def extend(config: Config, changes: Mapping[str, Any]) -> None:
    """Give a config the durations and stop rules with which its run was continued."""
    for key, value in changes.items():
        if not is_extension(str(key)):
            raise ConfigError(f"{key} is no duration and no stop rule, so no run is continued with it.")
        if key.startswith(f"{PHASES}."):
            override_phase(config, key, value)
        else:
            *parents, last = key.split(".")
            node = config
            for parent in parents:
                node = node[parent]
            node[last] = value


def spread_train_ratio(config: Config, *, is_asked_for: bool) -> None:
    """`training.updates_per_step` holds for every phase that has a train ratio, and is removed from the config then.

    A task may set it for any algorithm, also for PPO, whose phases have none; on the command line that is a mistake.
    """
    if not isinstance(config["training"], dict) or not isinstance(config["training"].get("phases"), list):
        return  # read_settings says what is wrong
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
