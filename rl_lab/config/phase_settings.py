"""`set:` and `load:` of a phase: which settings hold while it runs, and whose weights it begins with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from rl_lab.config.files import Config, value_at
from rl_lab.types import ConfigError, Phase, did_you_mean

SETTABLE = ("environment", "algorithm", "optimizers")
WHOLE = ("environment.kwargs", "environment.spec")  # a mapping given for these takes the place of all they held
STAYS = {  # what cannot change in mid-run, and why
    "environment.num_envs": "the buffers hold rows of so many environments",
    "algorithm._target_": "one run trains one algorithm; another can begin with its weights (`load:`)",
    "algorithm.n_step": "the buffers give sequences of that length",
}
LOAD_KEYS = ("from", "parts", "checkpoint")


def settings_of(phase: Phase, config: Mapping[str, Any]) -> dict[str, Any]:
    """`{"algorithm.clip_range": 0.1}`: what a phase sets, by the config's own keys, nested or dotted."""
    found: dict[str, Any] = {}
    for key, value in _flat(phase.set, config):
        _check_key(key, value, config, f"Phase '{phase.name}' sets {key}")
        found[key] = value
    return found


def config_of(phase: Phase, config: Mapping[str, Any]) -> Config:
    """The config as it is while the phase runs: what it does not set is as everywhere."""
    result: Config = copy.deepcopy(dict(config))
    for key, value in settings_of(phase, config).items():
        *parents, last = key.split(".")
        node = result
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[last] = copy.deepcopy(value)
    return result


def check_load(load: Any, *, place: str) -> None:
    """Refuse a `load:` block that names no run or no parts."""
    if load is None:
        return
    example = f"write `{place}: {{from: RUN, parts: [encoder]}}`"
    if not isinstance(load, Mapping):
        raise ConfigError(f"{place} is {load!r}: {example}.")
    for key in load:
        if key not in LOAD_KEYS:
            hint = did_you_mean(str(key), LOAD_KEYS)
            raise ConfigError(f"{place}.{key} is unknown.{hint} Allowed: {', '.join(LOAD_KEYS)}.")
    if not isinstance(load.get("from"), str) or not load["from"]:
        raise ConfigError(f"{place}.from is {load.get('from')!r}: it names a run (an id, a path, @last); {example}.")
    parts = load.get("parts")
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{place}.parts is {parts!r}: it lists parts of that run; {example}.")


def _flat(node: Mapping[str, Any], config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{before}.{key}" if before else str(key)
        there = value_at(config, path)
        is_block = isinstance(there, Mapping) and "start" not in there and path not in WHOLE  # start: a schedule
        if is_block and isinstance(value, Mapping):
            yield from _flat(value, config, path)
        else:
            yield path, value


def _check_key(key: str, value: Any, config: Mapping[str, Any], sentence: str) -> None:
    block, *rest = key.split(".")
    if block not in SETTABLE:
        hint = did_you_mean(block, SETTABLE)
        raise ConfigError(f"{sentence}.{hint} A phase may set keys of: {', '.join(SETTABLE)}; the rest stays.")
    if not rest:
        raise ConfigError(f"{sentence} to {value!r}: set one of its keys, such as {key}.KEY.")
    if key in STAYS:
        raise ConfigError(f"{sentence}, which stays the same over a run: {STAYS[key]}.")
    if block == "optimizers":
        names = [name for name, given in (config["optimizers"] or {}).items() if given is not None]
        if rest[0] not in names:
            hint = did_you_mean(rest[0], names)
            raise ConfigError(f"{sentence}, but there is no such optimizer.{hint} There are: {', '.join(names)}.")
        if rest[1:2] != ["learning_rate"]:
            hint = did_you_mean(rest[1], ["learning_rate"]) if rest[1:] else ""
            raise ConfigError(f"{sentence}.{hint} Of an optimizer a phase sets the learning_rate; the rest stays.")
