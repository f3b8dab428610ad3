"""Bringing configs and checkpoints of old runs to today's schema, one version and one named step at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rl_lab.runs.manifest import CHECKPOINT_SCHEMA_VERSION, CONFIG_SCHEMA_VERSION, check_schema_version
from rl_lab.types import RunError
from rl_lab.utils.file_blocks import FileBlocks

MigrationStep = Callable[[dict[str, Any]], dict[str, Any]]

_MOVED = {  # since version 1, inside rl_lab.components: folder -> the modules that moved there under their own names
    "heads": ("bandits", "distributions", "q_values", "soft_actor_critic", "tables"),
    "networks": ("augmentation", "encoders", "memory", "normalizers"),
    "returns": ("transitions",),
    "world_model": ("decoder_free", "latents", "layers", "rssm", "strided_images", "two_hot"),
}
_MOVED_AND_RENAMED = {
    "controllers": "heads.actor_critic",
    "decoders": "world_model.decoder",
    "ensembles": "networks.ensemble",
    "networks": "networks.encoders",
    "networks.mlp": "networks.encoders",  # until version 2
    "planners": "planners.cem",
    **dict.fromkeys(("return_computers", "return_scale", "statistics"), "returns.returns"),
    **{f"world_model_{name}": f"world_model.{name}" for name in ("encoder", "heads")},
}
_HOMES = {module: f"{folder}.{module}" for folder, modules in _MOVED.items() for module in modules} | _MOVED_AND_RENAMED
MOVED_MODULES = {f"rl_lab.components.{old}": f"rl_lab.components.{new}" for old, new in _HOMES.items()}
"""Old home of a class that a `_target_` may name -> its home in version 2."""

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
    return _upgraded(config, version, target, steps, what="config")


def _checksum_in_blocks(manifest: dict[str, Any]) -> dict[str, Any]:
    """Of version 1, which has one checksum for the beginning of a file outside: that is one block."""
    for entry in manifest.get("external", []):
        entry["blocks"] = asdict(FileBlocks.single(byte_count=entry.pop("bytes"), crc32=entry.pop("crc32")))
    return manifest


CHECKPOINT_STEPS: dict[int, MigrationStep] = {1: _checksum_in_blocks}
"""Version n -> the function that turns a checkpoint's manifest of version n into one of version n + 1."""


def migrate_checkpoint(
    manifest: Mapping[str, Any],
    *,
    steps: Mapping[int, MigrationStep] = CHECKPOINT_STEPS,
    target: int = CHECKPOINT_SCHEMA_VERSION,
) -> dict[str, Any]:
    """A copy of a checkpoint's manifest as schema `target` wants it; the files stay as they are."""
    version = manifest["schema_version"]
    check_schema_version(version, supported=target, what="checkpoint", place="The checkpoint")
    return _upgraded(manifest, version, target, steps, what="checkpoint") | {"schema_version": target}


def _upgraded(
    content: Mapping[str, Any], version: int, target: int, steps: Mapping[int, MigrationStep], *, what: str
) -> dict[str, Any]:
    migrated = copy.deepcopy(dict(content))
    for known in range(version, target):
        if known not in steps:
            raise RunError(
                f"The run's {what} has schema version {version} and this RL Lab no longer upgrades version {known} "
                f"to {known + 1}: continue the run with the RL Lab version named in its manifest.json."
            )
        migrated = steps[known](migrated)
    return migrated
