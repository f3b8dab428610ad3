"""Rows on the disk: a checkpoint costs what is new, names exactly its rows, and is read back to the bit."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.buffers.prioritized import PrioritizedReplayBuffer
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.ring_replay import Replay
from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.buffers.storage import row_log
from rl_lab.buffers.storage.row_log import LogFolder, record_dtype, rows_per_file
from rl_lab.types import Batch, RunError
from rl_lab.utils.tree import equal, map_leaves, numpy_to_tensors

EPISODE = 5


def row(time: int, *, envs: int = 2, is_answered: bool = True, extra: bool = False) -> Batch:
    """Row `time`: its numbers show its place; with `extra` the policy keeps one more key."""
    env_index = torch.arange(envs)
    place = (time + env_index) % EPISODE
    values: Batch = {
        "vector": torch.stack([env_index.float(), torch.full((envs,), float(time))], dim=-1),
        "image": torch.full((envs, 2, 2, 3), time % 256, dtype=torch.uint8),
        "reward": env_index * 1000.0 + time,
        "is_first": place == 0,
        "is_last": place == EPISODE - 1,
        "is_terminal": (place == EPISODE - 1) & (env_index == 0),
    }
    if not is_answered:
        return values
    kept = {"latent": torch.full((envs, 3), time + 0.5)} if extra else {}
    return {**values, "action": env_index * 1000 + time + 1, **kept}


def fill(buffer: Any, times: range, *, extra: bool = False, is_pending: bool = False) -> Any:
    for time in times:
        buffer.add(row(time, extra=extra))
        if is_pending:
            buffer.set_pending(row(time + 1, is_answered=False))
    return buffer


def make(directory: Path | None, kind: type[Replay] = ReplayBuffer, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"num_envs": 2, "capacity_rows": 40, "batch_size": 32}
    return kind(**{**defaults, **settings}, directory=None if directory is None else str(directory))


def saved(buffer: Any) -> Any:
    """The state as a checkpoint gives it back."""
    return map_leaves(lambda leaf: leaf, numpy_to_tensors(buffer.get_state()))


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


def assert_same_batches(left: Any, right: Any, count: int = 5) -> None:
    for _ in range(count):
        assert equal(left.sample(), right.sample())


KINDS: dict[str, tuple[type[Replay], dict[str, Any]]] = {
    "uniform": (ReplayBuffer, {}),
    "n-step": (ReplayBuffer, {"n_step": 3}),
    "prioritised": (PrioritizedReplayBuffer, {}),
    "sequences": (SequenceReplay, {"sequence_length": 4, "priority": 0.5, "recency": 0.5, "uniform": 0.0}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("count", [3, 19, 20, 21, 47, 83])
def test_a_replay_comes_back_from_its_folder_to_the_bit(
    kind: str, is_pending: bool, count: int, tmp_path: Path
) -> None:
    cls, settings = KINDS[kind]
    settings = settings if count > 4 else {**settings, "n_step": 1} if kind == "n-step" else settings
    whole = fill(make(None, cls, **settings), range(count), is_pending=is_pending)
    logged = make(tmp_path, cls, **settings)
    for first in range(0, count, 7):  # saved now and then, as a run does
        fill(logged, range(first, min(first + 7, count)), is_pending=is_pending)
        state = saved(logged)
    again = make(tmp_path, cls, **settings, seed=5)
    again.set_state(state)
    if whole.ready():
        assert_same_batches(again, whole)
    fill(whole, range(count, count + 30), is_pending=is_pending)
    fill(again, range(count, count + 30), is_pending=is_pending)
    assert_same_batches(again, whole)


def test_a_save_writes_new_rows_only(tmp_path: Path) -> None:
    buffer = fill(make(tmp_path), range(10))
    record = record_dtype(buffer._ring.layout).itemsize * 2
    buffer.get_state()
    assert sum(sizes(tmp_path).values()) == 10 * record
    buffer.get_state()
    assert sum(sizes(tmp_path).values()) == 10 * record, "nothing new, nothing written"
    fill(buffer, range(10, 13), is_pending=True)
    state = buffer.get_state()
    assert sum(sizes(tmp_path).values()) == 13 * record, "the pending row is not final: the state itself holds it"
    assert state["pending"]["reward"].tolist() == [13.0, 1013.0]
    assert state["rows"] == {}


def test_the_state_names_live_rows_only_and_old_files_go_when_they_are_not_needed(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for first in range(0, 100, 10):
        fill(buffer, range(first, first + 10))
        named = {each["file"] for each in buffer.get_state()["log"]["segments"]}
        buffer.remove_files_but(set())
        assert set(sizes(tmp_path)) == named == {each.file for each in buffer.named_files()}
        assert len(named) <= 10
    assert buffer.get_state()["log"]["segments"][0]["blocks"]["first_row"] + 3 > 80


def test_rows_lost_between_two_saves_are_not_missed(tmp_path: Path) -> None:
    buffer = fill(make(tmp_path), range(5))
    buffer.get_state()
    fill(buffer, range(5, 100))
    state = saved(buffer)
    again = make(tmp_path)
    again.set_state(state)
    assert_same_batches(again, buffer)
    assert state["log"]["segments"][0]["blocks"]["first_row"] == 80


def test_newer_rows_in_the_files_are_not_seen_and_going_back_spoils_nothing(tmp_path: Path) -> None:
    buffer = fill(make(tmp_path), range(10))
    early = saved(buffer)
    fill(buffer, range(10, 14))
    late = saved(buffer)
    before = sizes(tmp_path)
    back = make(tmp_path)
    back.set_state(early)
    assert back.num_rows == 20
    for time in range(10, 16):  # another future
        back.add({**row(time), "reward": torch.tensor([-1.0, -2.0])})
    other = saved(back)
    assert {name: sizes(tmp_path)[name] for name in before} == before, "files of the first future were not touched"
    first_future, second_future = make(tmp_path), make(tmp_path)
    first_future.set_state(late)
    second_future.set_state(other)
    assert_same_batches(first_future, buffer)
    assert_same_batches(second_future, back)


@pytest.mark.parametrize("storage", ["cpu", "disk"])
def test_random_saves_kills_and_returns_equal_a_replay_in_memory(storage: str, tmp_path: Path) -> None:
    chance = random.Random(3)
    settings = {"sequence_length": 3, "capacity_rows": 22, "online_queue": False, "write_back": ["latent"]}
    buffer = make(tmp_path, SequenceReplay, **settings, storage=storage)
    twin = make(None, SequenceReplay, **settings)
    time, checkpoints = 0, []
    for _ in range(150):
        for _ in range(chance.randrange(1, 9)):
            for each in (buffer, twin):
                fill(each, range(time, time + 1), extra=True)
            time += 1
        if twin.ready() and chance.random() < 0.7:
            for each in (buffer, twin):
                batch = each.sample()
                each.write(batch["index"], "latent", batch["latent"] + 1)
        if chance.random() < 0.4:
            checkpoints = [*checkpoints[-2:], (time, saved(buffer), saved(twin))]
            named = {
                each["file"]
                for _, state, _ in checkpoints
                for kind in ("segments", "patches")
                for each in state["log"][kind]
            }
            buffer.remove_files_but(named)
        if checkpoints and chance.random() < 0.15:  # killed: anew from one of the checkpoints
            time, state, twin_state = chance.choice(checkpoints)
            checkpoints = [each for each in checkpoints if each[0] <= time]
            buffer = make(tmp_path, SequenceReplay, **settings, storage=storage)
            twin = make(None, SequenceReplay, **settings)
            buffer.set_state(state)
            twin.set_state(twin_state)
    assert_same_batches(buffer, twin, 20)


def test_patches_never_outgrow_the_columns_they_patch(tmp_path: Path) -> None:
    buffer = make(tmp_path, SequenceReplay, sequence_length=4, write_back=["latent"])
    fill(buffer, range(20), extra=True)
    buffer.get_state()
    for _ in range(30):
        batch = buffer.sample()
        buffer.write(batch["index"], "latent", batch["latent"] * 2)
        patches = buffer.get_state()["log"]["patches"]
        assert sum(patch["blocks"]["rows"] for patch in patches) <= 40
        buffer.remove_files_but(set())
    again = make(tmp_path, SequenceReplay, sequence_length=4, write_back=["latent"])
    again.set_state(saved(buffer))
    assert_same_batches(again, buffer)


def test_a_policy_that_keeps_more_later_is_restored_with_both_layouts(tmp_path: Path) -> None:
    buffer = fill(make(tmp_path), range(6))
    buffer.get_state()
    fill(buffer, range(6, 12), extra=True)
    state = saved(buffer)
    assert len(state["log"]["layouts"]) == 2
    again = make(tmp_path)
    again.set_state(state)
    assert_same_batches(again, buffer)
    fill(buffer, range(12, 60), extra=True)
    assert len(buffer.get_state()["log"]["layouts"]) == 1, "the first layout left with its rows"


def test_a_cleared_replay_is_restored_empty_and_keeps_its_keys(tmp_path: Path) -> None:
    buffer, twin = make(tmp_path), make(None)
    for each in (buffer, twin):
        fill(each, range(6))
        each.clear()
    again, twin_again = make(tmp_path), make(None)
    again.set_state(saved(buffer))
    twin_again.set_state(saved(twin))
    assert again.num_rows == 0 and again._ring.layout.keys() == buffer._ring.layout.keys()
    for each in (again, twin_again):
        each.set_pending(row(6, is_answered=False))
        fill(each, range(6, 12))
    assert_same_batches(again, twin_again)


def test_a_state_with_its_rows_in_full_is_taken_and_then_logged(tmp_path: Path) -> None:
    plain = fill(make(None), range(30))
    buffer = fill(make(tmp_path), range(4))
    buffer.get_state()
    buffer.set_state(saved(plain))
    again = make(tmp_path)
    again.set_state(saved(buffer))
    assert_same_batches(again, buffer)


def test_a_folder_is_needed_to_read_rows_that_lie_in_one(tmp_path: Path) -> None:
    state = saved(fill(make(tmp_path), range(10)))
    with pytest.raises(RunError, match=r"no directory, but the saved rows lie in files of one.*`directory`"):
        make(None).set_state(state)


def rows_file(directory: Path) -> Path:
    return next(path for path in sorted(directory.iterdir()) if path.name.startswith("rows"))


def test_a_missing_short_or_altered_file_is_named(tmp_path: Path) -> None:
    state = saved(fill(make(tmp_path), range(10)))
    path = rows_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        RunError, match=rf"{path.name}: it has \d+ bytes where {len(content)} are needed, but the checkpoint"
    ):
        make(tmp_path).set_state(state)
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(RunError, match=rf"{path.name}: block 0 \(rows 0 to 0\) has changed since it was written"):
        make(tmp_path).set_state(state)
    path.unlink()
    with pytest.raises(RunError, match=rf"{path.name}: it is missing, but the checkpoint needs its rows"):
        make(tmp_path).set_state(state)


def test_a_state_cannot_name_files_of_others(tmp_path: Path) -> None:
    state = saved(fill(make(tmp_path / "mine"), range(10)))
    state["log"]["segments"][0]["file"] = "../../config.yaml"
    with pytest.raises(RunError, match=r"names the file '../../config.yaml', which is none of its own"):
        make(tmp_path / "mine").set_state(state)


def test_a_failed_save_is_made_good_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fill(make(tmp_path), range(4))
    buffer.get_state()
    fill(buffer, range(4, 15))

    def fail(target: Any, block: memoryview) -> None:
        target.write(block[:7])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(row_log, "_write_fully", fail)
    with pytest.raises(OSError, match="No space left"):
        buffer.get_state()
    monkeypatch.undo()
    state = saved(buffer)
    buffer.remove_files_but(set())
    again = make(tmp_path)
    again.set_state(state)
    assert_same_batches(again, buffer)


def test_files_are_never_named_twice_and_strangers_are_left_alone(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path)
    (tmp_path / "rows_000041.bin").touch()
    (tmp_path / "notes.txt").touch()
    assert folder.new_name("rows") == "rows_000042.bin"
    assert folder.new_name("patch") == "patch_000043.bin"
    folder.remove_all_but(set())
    assert set(sizes(tmp_path)) == {"notes.txt"}
    assert folder.new_name("rows") == "rows_000044.bin", "also after a file went"
    LogFolder(tmp_path / "nowhere").remove_all_but(set())


def test_few_files_hold_a_full_ring_and_none_is_open_between_saves(tmp_path: Path) -> None:
    layout = {"image": ("uint8", (64, 64, 3))}
    assert rows_per_file(layout, num_envs=1, slots_per_env=1_000_000) == 64 * 2**20 // 12288
    assert rows_per_file(layout, num_envs=1, slots_per_env=80) == 10
    assert rows_per_file(layout, num_envs=100, slots_per_env=2) == 1
    before = set(os.listdir("/proc/self/fd"))
    fill(make(tmp_path), range(20)).get_state()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0
