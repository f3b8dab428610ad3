from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.types import ConfigError, RunError
from rl_lab.utils.seeding import get_rng_state
from rl_lab.utils.tree import equal, numpy_to_tensors


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "mine" / "checkpoints", keep_recent=3)


def save(store: CheckpointStore, agent_steps: int, **options: Any) -> Path:
    state = {"progress": {"agent_steps": agent_steps}, "components": {"weight": torch.full((3,), float(agent_steps))}}
    return store.save(state, agent_steps=agent_steps, counts={"agent_steps": agent_steps}, **options)


def names(store: CheckpointStore) -> set[str]:
    return {path.name for path in store.directory.iterdir()}


def steps_of(checkpoint: Checkpoint | None) -> int:
    assert checkpoint is not None
    return checkpoint.counts["agent_steps"]


def test_a_whole_state_tree_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "components": {"model": model.state_dict()},
        "optimizers": {"model": optimizer.state_dict()},
        "collector": {"env": [np.arange(6, dtype=np.uint8).reshape(2, 3), np.float64(0.1), (1, "a", None, True)]},
        "workflow_custom": {},
        "rng": get_rng_state(),
        "odd": {"nan": float("nan"), "scalar": np.array(3), "empty": np.zeros((0, 2)), "uint32": np.uint32(7)},
    }
    store.save(state, agent_steps=5, counts={"agent_steps": 5, "updates": 1}, score=1.5)
    loaded = store.load()
    assert equal(loaded.state, {name: numpy_to_tensors(tree) for name, tree in state.items()})
    assert loaded.manifest["score"] == 1.5
    assert loaded.counts == {"agent_steps": 5, "updates": 1}
    assert loaded.path.name == "step_000000000005"


def test_a_checkpoint_holds_one_file_per_section_with_size_and_sum(store: CheckpointStore) -> None:
    path = save(store, 12)
    manifest = json.loads((path / "manifest.json").read_text())
    assert {file.name for file in path.iterdir()} == {"manifest.json", "progress.pt", "components.pt"}
    assert manifest["schema_version"] == 2
    assert manifest["sections"].keys() == {"progress.pt", "components.pt"}
    for file, entry in manifest["sections"].items():
        assert entry["bytes"] == (path / file).stat().st_size
        assert len(entry["sha256"]) == 64


def test_some_sections_may_be_loaded_alone(store: CheckpointStore) -> None:
    path = save(store, 1)
    (path / "progress.pt").unlink()  # what is not asked for is not read
    assert store.load(sections=["components"]).state.keys() == {"components"}
    with pytest.raises(RunError, match="has no section 'buffers': it has components, progress"):
        store.load(sections=["buffers"])


def test_a_view_is_saved_as_the_slice_it_is(store: CheckpointStore) -> None:
    whole = torch.zeros(100_000)
    path = store.save({"buffers": {"rows": whole[:10]}}, agent_steps=0, counts={})
    assert (path / "buffers.pt").stat().st_size < 5_000
    assert store.load().state["buffers"]["rows"].shape == (10,)


def test_parameters_are_saved_as_plain_tensors(store: CheckpointStore) -> None:
    store.save({"components": {"p": torch.nn.Parameter(torch.ones(2))}}, agent_steps=0, counts={})
    weight = store.load().state["components"]["p"]
    assert type(weight) is torch.Tensor and not weight.requires_grad


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (object(), "object"),
        (b"bytes", "bytes"),
        (torch.float32, "dtype"),
        (np.array(["a"]), "array of <U1"),
        (np.array([object()]), "array of object"),
    ],
)
def test_what_could_not_be_loaded_is_refused_at_the_save(store: CheckpointStore, leaf: Any, kind: str) -> None:
    save(store, 1)
    with pytest.raises(RunError, match=rf"State 'collector\.envs\.0' is a {kind}, which cannot be checkpointed"):
        store.save({"collector": {"envs": [leaf]}}, agent_steps=2, counts={})
    assert names(store) == {"step_000000000001", "latest"}


def test_an_ordered_dict_becomes_a_plain_one(store: CheckpointStore) -> None:
    store.save({"a": OrderedDict(x=1)}, agent_steps=0, counts={})
    assert type(store.load().state["a"]) is dict


def test_latest_and_best_are_relative_links(store: CheckpointStore) -> None:
    save(store, 1, score=5.0, is_best=True)
    save(store, 2, score=4.0)
    assert os.readlink(store.directory / "latest") == "step_000000000002"
    assert os.readlink(store.directory / "best") == "step_000000000001"
    moved = store.directory.parent.rename(store.directory.parents[1] / "moved")
    assert steps_of(CheckpointStore(moved / "checkpoints").load("best")) == 1


def test_the_recent_ones_the_best_and_the_latest_are_kept(store: CheckpointStore) -> None:
    save(store, 10, is_best=True)
    for agent_steps in (20, 30, 40, 50):
        save(store, agent_steps)
    assert names(store) == {f"step_{steps:012d}" for steps in (10, 30, 40, 50)} | {"latest", "best"}
    save(store, 60, is_best=True)
    assert names(store) == {f"step_{steps:012d}" for steps in (40, 50, 60)} | {"latest", "best"}


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.keep_recent is 0; keep at least 1"):
        CheckpointStore(tmp_path, keep_recent=0)


def test_a_second_save_at_the_same_count_replaces_the_first(store: CheckpointStore) -> None:
    save(store, 7)
    again = store.save({"progress": {"note": "second"}}, agent_steps=7, counts={"agent_steps": 7})
    assert again.name == "step_000000000007-r2"
    assert names(store) == {"step_000000000007-r2", "latest"}
    assert store.load().state == {"progress": {"note": "second"}}
    assert save(store, 7).name == "step_000000000007-r3"
    assert save(store, 8).name == "step_000000000008"
    assert [path.name for path in store.paths()] == ["step_000000000008", "step_000000000007-r3"]


def test_a_best_checkpoint_outlives_a_second_save_at_its_count(store: CheckpointStore) -> None:
    first = save(store, 7, is_best=True)
    second = save(store, 7)
    assert store.load("best").path == first
    assert store.load("latest").path == second


def test_a_run_that_went_back_keeps_its_own_recent_ones(store: CheckpointStore) -> None:
    for agent_steps in (100, 200, 300):
        save(store, agent_steps)
    reports: list[str] = []
    for agent_steps in (110, 120, 130, 140):  # continued from 100
        save(store, agent_steps)
    assert [steps for steps, _, _ in store._entries()] == [300, 200, 140, 130, 120]
    assert steps_of(store.load_newest_valid(reports.append)) == 140
    assert reports == []


def test_leftovers_of_killed_processes_are_removed_by_the_next_saver_only(store: CheckpointStore) -> None:
    save(store, 1)
    leftover = store.directory / "step_000000000002.tmp-999999"
    leftover.mkdir()
    (leftover / "components.pt").write_bytes(b"half")
    (store.directory / "latest.tmp-999999").symlink_to("step_000000000001")
    CheckpointStore(store.directory).load()
    assert leftover.exists()
    save(CheckpointStore(store.directory), 2)
    assert names(store) == {"step_000000000001", "step_000000000002", "latest"}


def test_a_checkpoint_is_named_by_link_name_or_path(store: CheckpointStore, tmp_path: Path) -> None:
    first, second = save(store, 1), save(store, 2)
    assert store.load("step_000000000001").path == first
    assert store.load(second).path == second
    copied = shutil.copytree(first, tmp_path / "copy")
    assert steps_of(store.load(copied)) == 1
    with pytest.raises(RunError, match=r"no 'best' checkpoint: no evaluation has chosen one yet, use 'latest'"):
        store.load("best")
    with pytest.raises(
        RunError, match=r"no checkpoint 'step_9' in .*: .* one of: step_000000000002, step_000000000001"
    ):
        store.load("step_9")


def test_without_any_checkpoint_there_is_nothing_to_load(store: CheckpointStore) -> None:
    assert store.load_newest_valid(pytest.fail) is None
    assert store.paths() == []
    with pytest.raises(RunError, match="has no 'latest' checkpoint: the run has saved nothing yet"):
        store.load()


def test_a_copy_without_links_still_has_a_latest(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2)
    (store.directory / "latest").unlink()
    assert steps_of(store.load("latest")) == 2
    (store.directory / "latest").symlink_to("step_000000000099")  # dangling
    assert steps_of(store.load("latest")) == 2
    assert steps_of(store.load_newest_valid(pytest.fail)) == 2


def test_a_copy_whose_links_became_directories_goes_on(store: CheckpointStore) -> None:
    save(store, 1, is_best=True)
    copy = CheckpointStore(shutil.copytree(store.directory, store.directory.parent / "copy", symlinks=False))
    assert steps_of(copy.load("latest")) == 1
    save(copy, 2)
    assert steps_of(copy.load("latest")) == 2
    assert steps_of(copy.load("best")) == 1
    assert (copy.directory / "latest").is_symlink()
