from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.runs import git as git_module
from rl_lab.runs.git import git_state, uncommitted_changes
from rl_lab.runs.manifest import (
    CHECKPOINT_SCHEMA_VERSION,
    CONFIG_SCHEMA_VERSION,
    changes_since,
    check_schema_version,
    collect_manifest,
)
from rl_lab.runs.migrate import CHECKPOINT_STEPS, CONFIG_STEPS, MOVED_MODULES, migrate_checkpoint, migrate_config
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError
from rl_lab.utils.file_blocks import FileBlocks


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
    assert (
        "gpu" in manifest and "rl_lab_version" in manifest and manifest["git"].keys() == {"commit", "branch", "dirty"}
    )


def test_the_commit_and_its_changes_are_known(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    assert git_state(tmp_path) == {"commit": None, "branch": "trunk", "dirty": False}
    assert uncommitted_changes(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["dirty"] is False and state["branch"] == "trunk"
    assert uncommitted_changes(tmp_path) is None
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": state["commit"], "branch": "trunk", "dirty": True}
    git(tmp_path, "checkout", "-q", "--detach")
    assert git_state(tmp_path)["branch"] is None


def test_uncommitted_changes_are_kept_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1\n")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "file").write_text("2\n")
    changes = uncommitted_changes(tmp_path)
    assert changes is not None and changes.endswith("-1\n+2\n")
    git(tmp_path, "checkout", "-q", "file")
    (tmp_path / "again.diff").write_text(changes)
    git(tmp_path, "apply", "again.diff")
    assert (tmp_path / "file").read_text() == "2\n"
    (tmp_path / "file").write_text("many words\n" * 500)
    monkeypatch.setattr(git_module, "LARGEST_CHANGES_BYTES", 400)
    cut = uncommitted_changes(tmp_path)
    assert cut is not None and cut.endswith("\n# cut here: more than 1 MiB was changed\n") and len(cut) < 500


def test_no_repository_no_git_and_a_slow_git_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"commit": None, "branch": None, "dirty": None}
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == unknown
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == unknown
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(git_module, "_TIMEOUT_S", 0.1)
    assert git_state(tmp_path) == unknown and uncommitted_changes(tmp_path) is None


def test_a_future_schema_asks_for_an_upgrade(make_run: Callable[..., RunDirectory]) -> None:
    run = make_run()
    assert run.read_manifest()["algorithm"] == "ppo"
    for what, version in (("config", CONFIG_SCHEMA_VERSION), ("checkpoint", CHECKPOINT_SCHEMA_VERSION)):
        run.write_manifest(run.read_manifest() | {f"{what}_schema_version": version + 1})
        with pytest.raises(RunError) as caught:
            run.read_manifest()
        assert f"newer RL Lab: {what} schema version {version + 1}, this one reads up to {version}" in str(caught.value)
        assert "`git pull`" in str(caught.value)
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


def test_every_version_there_has_been_has_its_step() -> None:
    assert sorted(CONFIG_STEPS) == list(range(1, CONFIG_SCHEMA_VERSION))
    assert sorted(CHECKPOINT_STEPS) == list(range(1, CHECKPOINT_SCHEMA_VERSION))


def test_one_checksum_of_an_old_checkpoint_becomes_one_block_and_the_original_stays() -> None:
    entry = {"section": "buffers", "path": "replay/rows.bin", "bytes": 12, "crc32": 7}
    old = {"schema_version": 1, "sections": {}, "external": [entry]}
    new = migrate_checkpoint(old)
    assert new["schema_version"] == CHECKPOINT_SCHEMA_VERSION
    assert new["external"][0]["blocks"] == asdict(FileBlocks.single(byte_count=12, crc32=7))
    assert entry == {"section": "buffers", "path": "replay/rows.bin", "bytes": 12, "crc32": 7}
    assert migrate_checkpoint(new) == new


def test_a_checkpoint_of_another_time_is_refused_with_what_to_do() -> None:
    with pytest.raises(RunError, match=r"checkpoint has schema version 0 and this RL Lab no longer upgrades version 0"):
        migrate_checkpoint({"schema_version": 0})
    with pytest.raises(RunError, match=r"written by a newer RL Lab: checkpoint schema version 9.*git pull"):
        migrate_checkpoint({"schema_version": 9})


def test_a_config_that_cannot_be_migrated_says_which_step_is_missing() -> None:
    with pytest.raises(RunError, match=r"has schema version 1 and .* no longer upgrades version 2 to 3.*manifest.json"):
        migrate_config({"algorithm": {"gamma": 1}}, 1, steps={1: rename_gamma}, target=3)
    with pytest.raises(RunError, match=r"The run's config was written by a newer RL Lab.*git pull"):
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
