"""The settings of runs as flat names, `algorithm.discount`, as the command line writes them. Without Hydra or torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError

Settings = dict[str, Any]
# What differs between two runs without making them two methods: seeds, names, places, and what only looks.
INCIDENTAL = ("seed", "experiment.name", "experiment.description", "experiment.tags", "runs.", "logging.")


def settings_of(run: RunDirectory, manifest: Mapping[str, Any] | None = None) -> Settings:
    """Every setting of a run, with the durations it was continued with."""
    import yaml  # here: most questions about runs need no settings, and start without it

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there
    try:
        config = yaml.load(run.read_config_text(), Loader=loader)
    except yaml.YAMLError as error:
        raise RunError(f"{run.config_path} is not valid YAML: {' '.join(str(error).split())}.") from error
    manifest = run.read_manifest() if manifest is None else manifest
    settings = dict(_flat(config))
    for changes in manifest.get("continuations") or ():
        settings |= changes if isinstance(changes, dict) else {}
    return settings


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Blocks become dotted names, phases are named by their name; other lists stay values."""
    if isinstance(node, list) and node and all(isinstance(each, dict) and "name" in each for each in node):
        node = {each["name"]: {key: value for key, value in each.items() if key != "name"} for each in node}
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def is_incidental(key: str) -> bool:
    """Whether a setting says nothing about the method: a seed, a name, a place."""
    return any(key == each or (each.endswith(".") and key.startswith(each)) for each in INCIDENTAL)


def method_of(settings: Mapping[str, Any], *, ignore: Sequence[str] = ()) -> str:
    """The same text for runs that differ in nothing but their seed, name and place."""
    kept = {key: value for key, value in settings.items() if not is_incidental(key) and key not in ignore}
    return json.dumps(kept, sort_keys=True, default=str)


def differing(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which groups differ, in the order of the first config that has them."""
    keys = dict.fromkeys(key for settings in groups for key in settings if not is_incidental(key))
    return [key for key in keys if len({json.dumps(each.get(key), default=str) for each in groups}) > 1]
