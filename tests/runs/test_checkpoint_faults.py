"""What can go wrong with a checkpoint: damage, malice, a full disk, kill -9."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.runs import checkpoint as checkpoint_module
from rl_lab.runs.checkpoint import CheckpointStore, DamagedCheckpoint
from rl_lab.types import RunError

PROJECT = Path(checkpoint_module.__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "mine" / "checkpoints")


def save(store: CheckpointStore, agent_steps: int, size: int = 3) -> Path:
    state = {"components": {"weight": torch.full((size,), float(agent_steps))}, "progress": {"n": agent_steps}}
    return store.save(state, agent_steps=agent_steps, counts={"agent_steps": agent_steps})


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    del manifest["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def truncate(path: Path) -> None:
    data = (path / "components.pt").read_bytes()
    (path / "components.pt").write_bytes(data[: len(data) // 2])


def flip_byte(path: Path) -> None:
    data = bytearray((path / "components.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "components.pt").write_bytes(data)


def remove_file(path: Path) -> None:
    (path / "components.pt").unlink()


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:40])


def alter_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"agent_steps": 2', '"agent_steps": 3'))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, r"components.pt has \d+ bytes where the manifest says \d+"),
    (flip_byte, r"components.pt has changed since it was written \(sha256 differs\)"),
    (remove_file, r"components.pt is missing"),
    (remove_manifest, r"manifest.json is missing"),
    (cut_manifest, r"manifest.json is damaged: not valid JSON"),
    (lambda path: edit_manifest(path, lambda m: m.pop("schema_version")), "manifest.json has no 'schema_version'"),
    (lambda path: edit_manifest(path, lambda m: m.pop("counts")), "has no 'counts' or no 'sections'"),
    (
        lambda path: edit_manifest(path, lambda m: m.update(counts={"agent_steps": "2"})),
        r"manifest.json counts \{'agent_steps': '2'\}, which are no whole numbers",
    ),
    (alter_manifest, r"manifest.json has changed since it was written \(sha256 differs\)"),
    (lambda path: edit_manifest(path, lambda m: m.update(sections=[])), "has no 'counts' or no 'sections'"),
    (
        lambda path: edit_manifest(path, lambda m: m["sections"].update({"../x.pt": {}})),
        "lists '../x.pt', which is no section file",
    ),
    (
        lambda path: edit_manifest(path, lambda m: m["sections"]["components.pt"].pop("sha256")),
        "no size or checksum for components.pt",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_damage_is_detected_and_the_one_before_is_used_loudly(
    store: CheckpointStore, damage: Callable[[Path], None], reason: str
) -> None:
    save(store, 1)
    newest = save(store, 2)
    damage(newest)
    with pytest.raises(DamagedCheckpoint, match=reason) as caught:
        store.load()
    assert f"Checkpoint {newest} is damaged" in str(caught.value)
    reports: list[str] = []
    survivor = store.load_newest_valid(reports.append)
    assert survivor is not None and survivor.counts == {"agent_steps": 1}
    assert str(newest) in reports[0] and "is damaged" in reports[0]
    assert reports[1] == "Going on from step_000000000001 instead (1 damaged checkpoint(s) passed over)."


@pytest.mark.parametrize("file", ["components.pt", "progress.pt", "manifest.json"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_checkpoint_that_cannot_be_read_is_left_for_the_one_before(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, file: str, code: int
) -> None:
    save(store, 1)
    newest = save(store, 2)
    original = os.open

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(newest / file):
            raise OSError(code, os.strerror(code), path)
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fail)
    reports: list[str] = []
    survivor = store.load_newest_valid(reports.append)
    assert survivor is not None and survivor.counts == {"agent_steps": 1}
    assert file in reports[0] and "cannot be read" in reports[0] and os.strerror(code) in reports[0]


@pytest.mark.parametrize("blocker", [os.mkfifo, os.mkdir])
def test_what_is_no_file_does_not_block(store: CheckpointStore, blocker: Callable[[Path], None]) -> None:
    save(store, 1)
    newest = save(store, 2)
    (newest / "components.pt").unlink()
    blocker(newest / "components.pt")
    survivor = store.load_newest_valid(lambda sentence: None)
    assert survivor is not None and survivor.counts == {"agent_steps": 1}


def test_a_checkpoint_of_another_run_is_not_continued(tmp_path: Path) -> None:
    mine = CheckpointStore(tmp_path / "mine" / "checkpoints", identity="aaaa")
    other = CheckpointStore(tmp_path / "other" / "checkpoints", identity="bbbb")
    save(mine, 1)
    shutil.copytree(save(other, 5), mine.directory / "step_000000000005")
    mine._point("latest", mine.directory / "step_000000000005")
    reports: list[str] = []
    found = mine.load_newest_valid(reports.append)
    assert found is not None and found.counts == {"agent_steps": 1}
    assert "it was saved by another run (bbbb, this one is aaaa)" in reports[0]
    nameless = CheckpointStore(mine.directory).load_newest_valid(reports.append)
    assert nameless is not None and nameless.counts == {"agent_steps": 5}


def test_a_checkpoint_folder_that_cannot_be_read_is_a_sentence(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)

    def fail(path: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(RunError, match=r"checkpoints cannot be read: Input/output error"):
        store.paths()


def test_when_all_are_damaged_the_error_lists_them(store: CheckpointStore) -> None:
    truncate(save(store, 1))
    flip_byte(save(store, 2))
    reports: list[str] = []
    with pytest.raises(RunError) as caught:
        store.load_newest_valid(reports.append)
    message = str(caught.value)
    assert f"Every checkpoint in {store.directory} is damaged" in message
    assert "step_000000000001 is damaged: components.pt has" in message
    assert "step_000000000002 is damaged: components.pt has changed" in message
    assert len(reports) == 2


def test_after_a_fall_back_the_damaged_one_is_replaced(store: CheckpointStore) -> None:
    save(store, 1)
    truncate(save(store, 2))
    save(store, 2)  # the continued run reaches the same count again
    reports: list[str] = []
    survivor = store.load_newest_valid(reports.append)
    assert survivor is not None and survivor.path.name == "step_000000000002-r2"
    assert reports == []
    assert not (store.directory / "step_000000000002").exists()


def test_a_checkpoint_of_a_newer_version_is_not_called_damaged(store: CheckpointStore) -> None:
    save(store, 1)
    edit_manifest(save(store, 2), lambda manifest: manifest.update(schema_version=99))
    with pytest.raises(RunError, match=r"written by a newer RL Lab: checkpoint schema version 99.*git pull") as caught:
        store.load_newest_valid(pytest.fail)
    assert not isinstance(caught.value, DamagedCheckpoint)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_a_checkpoint_cannot_run_code(store: CheckpointStore, tmp_path: Path, container: str) -> None:
    marker, path = tmp_path / "exploded", save(store, 1)
    if container == "torch":
        torch.save({"weight": Bomb(marker)}, path / "components.pt")
    else:
        (path / "components.pt").write_bytes(pickle.dumps({"weight": Bomb(marker)}, protocol=2))
    data = (path / "components.pt").read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(path, lambda manifest: manifest["sections"].update({"components.pt": entry}))
    with pytest.raises(DamagedCheckpoint, match=r"components.pt is not plain data and was refused"):
        store.load()
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))  # the bomb is live: only the loader kept it from going off
    assert marker.exists()


@pytest.mark.parametrize("data", [b"", b"no checkpoint", b"PK\x03\x04 torn"])
def test_bytes_that_are_no_checkpoint_are_refused(store: CheckpointStore, data: bytes) -> None:
    path = save(store, 1)
    (path / "components.pt").write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(path, lambda manifest: manifest["sections"].update({"components.pt": entry}))
    with pytest.raises(DamagedCheckpoint, match=r"components.pt is not plain data and was refused"):
        store.load()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk full: cannot write"),
        (errno.EDQUOT, "disk quota used up: cannot write"),
        (errno.EROFS, "read-only file system: cannot write"),
    ],
)
@pytest.mark.parametrize("failing_file", ["components.pt", "progress.pt", "manifest.json"])
def test_a_save_that_fails_leaves_the_last_checkpoint_intact(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, code: int, words: str, failing_file: str
) -> None:
    save(store, 1)
    write_durably = checkpoint_module.write_durably

    def fail(path: Path, data: bytes) -> None:
        if path.name == failing_file:
            path.write_bytes(bytes(data)[:5])
            raise OSError(code, os.strerror(code))
        write_durably(path, data)

    monkeypatch.setattr(checkpoint_module, "write_durably", fail)
    with pytest.raises(RunError, match=rf"{words} {store.directory}.*`rl-lab resume mine`"):
        save(store, 2)
    assert {path.name for path in store.directory.iterdir()} == {"step_000000000001", "latest"}
    assert store.load().counts == {"agent_steps": 1}
    monkeypatch.undo()
    save(store, 2)
    assert store.load().counts == {"agent_steps": 2}


def test_a_really_full_disk_stops_with_a_clear_message_and_an_intact_checkpoint(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "mine" / "checkpoints")
    with pytest.raises(RunError, match=r"disk full: cannot write .*Free some space, then .*`rl-lab resume mine`"):
        for agent_steps in range(1, 20):
            save(store, agent_steps, size=80_000)  # 320 kB each: three fit and are kept, the fourth does not
    last = store.load()
    assert last.counts["agent_steps"] == 3
    assert torch.equal(last.state["components"]["weight"], torch.full((80_000,), float(last.counts["agent_steps"])))
    assert not list(store.directory.glob("*.tmp-*"))


# One import of torch for all rounds: the parent forks a saver, kills it after a random moment, and looks.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from rl_lab.runs.checkpoint import CheckpointStore

directory, rounds = Path(sys.argv[1]), int(sys.argv[2])
delays = random.Random(int(sys.argv[3]))

def save_forever():
    os.fsync = lambda descriptor: None  # a kill does not empty the disk's caches
    store = CheckpointStore(directory, keep_recent=2)
    agent_steps = store.load().counts["agent_steps"] if store.paths() else 0
    while True:
        agent_steps += 1
        weight = torch.full((20_000,), float(agent_steps))
        state = {"progress": {"agent_steps": agent_steps}, "components": {"weight": weight}, "rng": [agent_steps]}
        store.save(state, agent_steps=agent_steps, counts={"agent_steps": agent_steps}, is_best=agent_steps % 3 == 0)

seen = 0
for number in range(rounds):
    child = os.fork()
    if child == 0:
        save_forever()
    time.sleep(delays.uniform(0.02, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = CheckpointStore(directory)
    damages = []
    found = store.load_newest_valid(damages.append)
    assert damages == [], damages
    if found is None:
        continue
    latest = store.load("latest").counts["agent_steps"]
    assert latest >= seen, (latest, seen)
    seen = latest
    for path in store.paths():
        agent_steps = store.load(path).counts["agent_steps"]
        state = store.load(path).state
        assert state["components"]["weight"].unique().tolist() == [float(agent_steps)]
        assert state["progress"]["agent_steps"] == state["rng"][0] == agent_steps
print(seen)
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_minus_nine_at_any_instant_leaves_a_whole_latest(tmp_path: Path, seed: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    rounds = 15 if seed == 0 else 200
    answer = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "mine" / "checkpoints"), str(rounds), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) >= 1  # saves; every single operation is tried in test_file_faults.py
