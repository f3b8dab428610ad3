"""Checkpoints that need files outside their own folder: named, verified, and free to go once nobody names them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_lab.runs.checkpoint import CheckpointStore, DamagedCheckpoint, ExternalFile
from rl_lab.types import RunError
from rl_lab.utils.file_blocks import FileBlocks

FILE = "replay/replay/rows_000001.bin"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "mine" / "checkpoints", keep_recent=2)


def save(store: CheckpointStore, agent_steps: int, content: bytes, *, path: str = FILE) -> Path:
    """A checkpoint that needs what the file held when it was taken."""
    file = store.directory.parent / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    external = [ExternalFile("buffers", path, FileBlocks(row_bytes=1, block_rows=2).extended(content))]
    state = {"buffers": {"replay": agent_steps}, "components": {"weight": 1.0}}
    return store.save(state, agent_steps=agent_steps, counts={"agent_steps": agent_steps}, external=external)


def test_what_the_file_holds_beyond_the_checkpoint_does_not_matter(store: CheckpointStore) -> None:
    first = save(store, 1, b"one")
    save(store, 2, b"one, two")
    assert store.load(first).state["buffers"] == {"replay": 1}
    assert store.load().state["buffers"] == {"replay": 2}


def change(path: Path) -> None:
    path.write_bytes(b"one, tvo")


def shorten(path: Path) -> None:
    path.write_bytes(b"one, tw")


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (change, r"rows_000001.bin: block 3 \(bytes 6 to 7\) has changed since it was written"),
    (shorten, r"rows_000001.bin: it has 7 bytes where 8 are needed"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_damage_outside_is_found_and_the_one_before_is_used_loudly(
    store: CheckpointStore, damage: Callable[[Path], Any], reason: str
) -> None:
    save(store, 1, b"one")
    newest = save(store, 2, b"one, two")
    damage(store.directory.parent / FILE)
    with pytest.raises(DamagedCheckpoint, match=rf"Checkpoint {newest} is damaged: replay/replay/{reason}"):
        store.load()
    reports: list[str] = []
    survivor = store.load_newest_valid(reports.append)
    assert survivor is not None and survivor.counts == {"agent_steps": 1}
    assert FILE in reports[0] and "Going on from step_000000000001 instead" in reports[1]
    assert "Without the replay: `rl-lab resume mine --mode warm_start` begins a new run with the weights." in reports[0]


def test_blocks_that_a_checkpoint_does_not_need_are_not_read(store: CheckpointStore) -> None:
    first = save(store, 1, b"aabbcc")
    edit(first, lambda entry: entry["blocks"].update(first_block=1))
    (store.directory.parent / FILE).write_bytes(b"xxbbcc")
    assert store.load().counts == {"agent_steps": 1}


def test_when_all_need_a_damaged_block_the_error_offers_a_warm_start(store: CheckpointStore) -> None:
    save(store, 1, b"aa")
    (store.directory.parent / FILE).write_bytes(b"ab")
    with pytest.raises(
        RunError, match=r"Every checkpoint.*\n.*block 0.*`rl-lab resume mine --mode warm_start`"
    ) as caught:
        store.load_newest_valid(lambda sentence: None)
    assert "rl-lab train" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_like_a_missing_one(store: CheckpointStore) -> None:
    save(store, 1, b"aa")
    (store.directory.parent / FILE).unlink()
    (store.directory.parent / FILE).mkdir()
    with pytest.raises(DamagedCheckpoint, match=r"rows_000001.bin: it cannot be read \(Is a directory\)"):
        store.load()


def test_the_one_checksum_of_older_checkpoints_still_counts(store: CheckpointStore) -> None:
    """Schema version 1 had one checksum for the beginning of a file."""
    first = save(store, 1, b"rows")
    old = {"section": "buffers", "path": FILE, "bytes": 4, "crc32": zlib.crc32(b"rows")}
    manifest = json.loads((first / "manifest.json").read_text())
    del manifest["sha256"]
    (first / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 1, "external": [old]}))
    (store.directory.parent / FILE).write_bytes(b"rows, newer")
    assert store.load().counts == {"agent_steps": 1}
    (store.directory.parent / FILE).write_bytes(b"rowz")
    with pytest.raises(DamagedCheckpoint, match=r"rows_000001.bin: block 0 \(bytes 0 to 3\) has changed"):
        store.load()


def test_a_deleted_file_is_named(store: CheckpointStore) -> None:
    save(store, 1, b"one", path="replay/replay/rows_000007.bin")
    save(store, 2, b"two")
    (store.directory.parent / FILE).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"replay/replay/rows_000001.bin: it is missing"):
        store.load()
    survivor = store.load_newest_valid(lambda sentence: None)
    assert survivor is not None and survivor.counts == {"agent_steps": 1}


def test_a_policy_is_loaded_without_a_look_at_the_replay(store: CheckpointStore) -> None:
    save(store, 1, b"one")
    (store.directory.parent / FILE).unlink()
    assert store.load(sections=["components"]).state == {"components": {"weight": 1.0}}


def test_a_run_may_be_moved_with_its_files(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1, b"one")
    shutil.move(store.directory.parent, tmp_path / "elsewhere")
    assert CheckpointStore(tmp_path / "elsewhere" / "checkpoints").load().counts == {"agent_steps": 1}


def test_the_store_knows_which_files_are_still_needed(store: CheckpointStore) -> None:
    for agent_steps in range(1, 5):
        save(store, agent_steps, b"rows", path=f"replay/replay/rows_{agent_steps:06d}.bin")
    assert store.external_paths() == {"replay/replay/rows_000003.bin", "replay/replay/rows_000004.bin"}
    (store.resolve("latest") / "manifest.json").write_text("{")
    assert store.external_paths() == {"replay/replay/rows_000003.bin"}, "a damaged checkpoint is never loaded"


def test_while_a_checkpoint_cannot_be_read_nobody_may_remove_what_it_needs(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, b"one")
    original = os.open

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("manifest.json"):
            raise OSError(errno.EIO, "Input/output error")
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fail)
    assert store.external_paths() is None


@pytest.mark.parametrize("path", ["/etc/passwd", "replay/../../other/rows_000001.bin"])
def test_a_manifest_cannot_name_files_of_others(store: CheckpointStore, path: str) -> None:
    edit(save(store, 1, b"one"), lambda entry: entry.update(path=path))
    with pytest.raises(DamagedCheckpoint, match=rf"manifest.json names '{path}', which is no file of this run"):
        store.load()


@pytest.mark.parametrize(
    "change_entry",
    [
        lambda entry: entry.pop("path"),
        lambda entry: entry.update(path=7),
        lambda entry: entry.update(section=None),
        lambda entry: entry["blocks"].update(crc32="zz"),
        lambda entry: entry["blocks"].update(block_rows=0),
        lambda entry: entry["blocks"].update(rows="3"),
        lambda entry: entry.update(blocks=None),
    ],
)
def test_a_manifest_that_names_files_in_another_way_is_damaged(
    store: CheckpointStore, change_entry: Callable[[dict[str, Any]], Any]
) -> None:
    edit(save(store, 1, b"one"), change_entry)
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json names files outside in an unknown way \("):
        store.load()


def edit(checkpoint: Path, change_entry: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    change_entry(manifest["external"][0])
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
