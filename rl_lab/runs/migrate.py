"""Bringing the config of an old run to today's schema, one version at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from rl_lab.runs.manifest import CONFIG_SCHEMA_VERSION, check_schema_version
from rl_lab.types import RunError

MigrationStep = Callable[[dict[str, Any]], dict[str, Any]]

CONFIG_STEPS: dict[int, MigrationStep] = {}
"""Version n -> the function that turns a config of version n into one of version n + 1."""


def migrate_config(
    config: Mapping[str, Any],
    version: int,
    *,
    steps: Mapping[int, MigrationStep] = CONFIG_STEPS,
    target: int = CONFIG_SCHEMA_VERSION,
) -> dict[str, Any]:
    """A copy of `config`, written at schema `version`, as schema `target` wants it. The original stays as it is."""
    check_schema_version(version, supported=target, what="config", place="The run's config")
    migrated = copy.deepcopy(dict(config))
    for known in range(version, target):
        if known not in steps:
            raise RunError(
                f"The run's config has schema version {version} and this RL Lab no longer upgrades version {known} "
                f"to {known + 1}: continue the run with the RL Lab version named in its manifest.json."
            )
        migrated = steps[known](migrated)
    return migrated
