"""Bringing the config of an old run to today's schema, one version at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from rl_lab.runs.manifest import CONFIG_SCHEMA_VERSION, check_schema_version
from rl_lab.types import RunError

MigrationStep = Callable[[dict[str, Any]], dict[str, Any]]

MOVED_MODULES = {  # old home of a class that a `_target_` may name -> its home today
    "rl_lab.components.augmentation": "rl_lab.components.networks.augmentation",
    "rl_lab.components.bandits": "rl_lab.components.heads.bandits",
    "rl_lab.components.controllers": "rl_lab.components.heads.actor_critic",
    "rl_lab.components.decoder_free": "rl_lab.components.world_model.decoder_free",
    "rl_lab.components.decoders": "rl_lab.components.world_model.decoder",
    "rl_lab.components.distributions": "rl_lab.components.heads.distributions",
    "rl_lab.components.encoders": "rl_lab.components.networks.encoders",
    "rl_lab.components.ensembles": "rl_lab.components.networks.ensemble",
    "rl_lab.components.latents": "rl_lab.components.world_model.latents",
    "rl_lab.components.layers": "rl_lab.components.world_model.layers",
    "rl_lab.components.memory": "rl_lab.components.networks.memory",
    "rl_lab.components.networks": "rl_lab.components.networks.encoders",
    "rl_lab.components.networks.mlp": "rl_lab.components.networks.encoders",  # until version 2
    "rl_lab.components.normalizers": "rl_lab.components.networks.normalizers",
    "rl_lab.components.planners": "rl_lab.components.planners.cem",
    "rl_lab.components.q_values": "rl_lab.components.heads.q_values",
    "rl_lab.components.return_computers": "rl_lab.components.returns.returns",
    "rl_lab.components.return_scale": "rl_lab.components.returns.returns",
    "rl_lab.components.rssm": "rl_lab.components.world_model.rssm",
    "rl_lab.components.soft_actor_critic": "rl_lab.components.heads.soft_actor_critic",
    "rl_lab.components.statistics": "rl_lab.components.returns.returns",
    "rl_lab.components.strided_images": "rl_lab.components.world_model.strided_images",
    "rl_lab.components.tables": "rl_lab.components.heads.tables",
    "rl_lab.components.transitions": "rl_lab.components.returns.transitions",
    "rl_lab.components.two_hot": "rl_lab.components.world_model.two_hot",
    "rl_lab.components.world_model_encoder": "rl_lab.components.world_model.encoder",
    "rl_lab.components.world_model_heads": "rl_lab.components.world_model.heads",
}


RENAMED_KEYS = {  # of version 1: keys of our own classes -> their names in version 2
    "dynamics_share": "dynamics_fraction",
    "minimum_deviation": "minimum_std",
    "maximum_deviation": "maximum_std",
    "target_share": "target_fraction",
}


def _name_new_homes(value: Any) -> Any:
    """Of versions 1 and 2: every `_target_` names the module in which its class lies today; keys have today's names."""
    if isinstance(value, Mapping):
        renamed = RENAMED_KEYS if str(value.get("_target_")).startswith("rl_lab.") else {}
        return {
            renamed.get(key, key): _new_home(each) if key == "_target_" else _name_new_homes(each)
            for key, each in value.items()
        }
    return [_name_new_homes(each) for each in value] if isinstance(value, list | tuple) else value


def _new_home(target: Any) -> Any:
    module, _, name = str(target).rpartition(".")
    if module == "rl_lab.components.networks" and name.endswith("CNN"):
        return f"rl_lab.components.networks.cnn.{name}"
    return f"{MOVED_MODULES[module]}.{name}" if module in MOVED_MODULES else target


CONFIG_STEPS: dict[int, MigrationStep] = {1: _name_new_homes, 2: _name_new_homes}
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
