from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.runs import manifest as manifest_module
from rl_lab.runs.manifest import (
    CHECKPOINT_SCHEMA_VERSION,
    CONFIG_SCHEMA_VERSION,
    changes_since,
    check_schema_version,
    collect_manifest,
    git_state,
)
from rl_lab.runs.migrate import MOVED_MODULES, migrate_config
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


def test_a_manifest_says_what_made_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rl-lab", "train", "ppo_cartpole", "name=a b"])
    manifest = collect_manifest(config_text="seed: 1\n", seed=1, algorithm="ppo", environment_id="CartPole-v1")
    assert json.loads(json.dumps(manifest)) == manifest
    assert (manifest["config_schema_version"], manifest["checkpoint_schema_version"]) == (3, 2)
    assert manifest["config_hash"] == hashlib.sha256(b"seed: 1\n").hexdigest()
    assert manifest["command_line"] == "rl-lab train ppo_cartpole 'name=a b'"
    assert (manifest["seed"], manifest["algorithm"], manifest["environment_id"]) == (1, "ppo", "CartPole-v1")
    assert torch.__version__.startswith(manifest["packages"]["torch"].split("+")[0])
    assert manifest["packages"].keys() == {"torch", "numpy", "gymnasium"}
    for name in ("created", "python", "platform", "hostname", "cpu", "cpu_cores"):
        assert manifest[name], name
    assert "gpu" in manifest and "rl_lab_version" in manifest and manifest["git"].keys() == {"commit", "dirty"}


def test_the_commit_and_its_changes_are_known(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": state["commit"], "dirty": True}


def test_no_repository_no_git_and_a_slow_git_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"commit": None, "dirty": None}
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == unknown
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == unknown
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(manifest_module, "_GIT_TIMEOUT_S", 0.1)
    assert git_state(tmp_path) == unknown


def test_a_future_schema_asks_for_an_upgrade(make_run: Callable[..., RunDirectory]) -> None:
    run = make_run()
    assert run.read_manifest()["algorithm"] == "ppo"
    for what, version in (("config", CONFIG_SCHEMA_VERSION), ("checkpoint", CHECKPOINT_SCHEMA_VERSION)):
        run.write_manifest(run.read_manifest() | {f"{what}_schema_version": version + 1})
        with pytest.raises(RunError) as caught:
            run.read_manifest()
        assert f"newer RL Lab: {what} schema version {version + 1}, this one reads up to {version}" in str(caught.value)
        assert "`pip install --upgrade rl-lab`" in str(caught.value)
        assert str(run.manifest_path) in str(caught.value)
        run.write_manifest({"config_schema_version": 1, "checkpoint_schema_version": 1})


@pytest.mark.parametrize("version", [None, "1", True, -1])
def test_a_schema_version_that_is_no_number_is_refused(version: Any) -> None:
    with pytest.raises(RunError, match=rf"here: the config schema version is {version!r}; a whole number belongs"):
        check_schema_version(version, supported=1, what="config", place="here")


def rename_gamma(config: dict[str, Any]) -> dict[str, Any]:
    config["algorithm"]["discount"] = config["algorithm"].pop("gamma")
    return config


def add_seed(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"seed": 0}


def test_an_old_config_climbs_every_version_and_stays_untouched() -> None:
    old = {"algorithm": {"gamma": 0.99}}
    new = migrate_config(old, 1, steps={1: rename_gamma, 2: add_seed}, target=3)
    assert new == {"algorithm": {"discount": 0.99}, "seed": 0}
    assert old == {"algorithm": {"gamma": 0.99}}
    assert migrate_config({"algorithm": {"discount": 1}}, 2, steps={1: rename_gamma, 2: add_seed}, target=3) == {
        "algorithm": {"discount": 1},
        "seed": 0,
    }


def test_a_config_of_today_is_only_copied() -> None:
    config = {"algorithm": {"discount": 0.9}}
    migrated = migrate_config(config, CONFIG_SCHEMA_VERSION)
    assert migrated == config and migrated["algorithm"] is not config["algorithm"]


def test_a_config_that_cannot_be_migrated_says_which_step_is_missing() -> None:
    with pytest.raises(RunError, match=r"has schema version 1 and .* no longer upgrades version 2 to 3.*manifest.json"):
        migrate_config({"algorithm": {"gamma": 1}}, 1, steps={1: rename_gamma}, target=3)
    with pytest.raises(RunError, match=r"The run's config was written by a newer RL Lab.*Upgrade"):
        migrate_config({}, 9)


@pytest.mark.parametrize(("old", "new"), MOVED_MODULES.items())
def test_classes_that_old_configs_name_are_found_in_their_new_homes(old: str, new: str) -> None:
    module = importlib.import_module(new)
    name = next(name for name, value in vars(module).items() if getattr(value, "__module__", None) == new)
    config = {"components": {"encoder": {"_target_": f"{old}.{name}", "inner": [{"_target_": "my_package.Part"}]}}}
    migrated = migrate_config(config, 1)["components"]["encoder"]
    assert migrated == {"_target_": f"{new}.{name}", "inner": [{"_target_": "my_package.Part"}]}


def test_image_networks_moved_to_a_file_of_their_own() -> None:
    migrated = migrate_config({"_target_": "rl_lab.components.networks.NatureCNN"}, 1)
    assert migrated == {"_target_": "rl_lab.components.networks.cnn.NatureCNN"}


def test_a_config_of_version_2_finds_the_mlp_beside_the_encoder() -> None:
    migrated = migrate_config({"_target_": "rl_lab.components.networks.mlp.MLP", "hidden_sizes": [8]}, 2)
    assert migrated == {"_target_": "rl_lab.components.networks.encoders.MLP", "hidden_sizes": [8]}


def test_what_changed_since_a_run_began_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    began = collect_manifest(config_text="", seed=0, algorithm="PPO", environment_id="CartPole-v1")
    assert changes_since(began) == []
    assert changes_since({}) == [], "an older manifest says nothing"
    other = {**began, "python": "3.9.1", "cpu": "Abacus", "packages": {**began["packages"], "torch": "1.0.0"}}
    assert changes_since(other) == [
        f"Python 3.9.1, now {began['python']}",
        f"CPU Abacus, now {began['cpu']}",
        f"torch 1.0.0, now {began['packages']['torch']}",
    ]


def test_every_run_has_an_identity_of_its_own() -> None:
    facts = {"config_text": "", "seed": 0, "algorithm": "PPO", "environment_id": "CartPole-v1"}
    assert collect_manifest(**facts)["identity"] != collect_manifest(**facts)["identity"]


def test_old_keys_of_our_own_classes_are_renamed_and_those_of_others_stay() -> None:
    actor = {"_target_": "rl_lab.components.world_model_heads.LatentActor", "minimum_deviation": 0.1}
    foreign = {"_target_": "my_package.Actor", "minimum_deviation": 0.1}
    migrated = migrate_config({"controllers": {"actor": actor, "other": foreign}}, 1)["controllers"]
    assert migrated["actor"] == {"_target_": "rl_lab.components.world_model.heads.LatentActor", "minimum_std": 0.1}
    assert migrated["other"] == foreign
    temperature = {"_target_": "rl_lab.components.soft_actor_critic.Temperature", "target_share": 0.2}
    assert migrate_config({"temperature": temperature}, 1)["temperature"] == {
        "_target_": "rl_lab.components.heads.soft_actor_critic.Temperature",
        "target_fraction": 0.2,
    }
