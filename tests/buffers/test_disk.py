"""Replay on the disk: the same batches as in memory, checkpoints that are never spoilt, full disks met in time."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_row_log import KINDS, assert_same_batches, fill, make, row, rows_file, saved, sizes

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.buffers.storage.row_log import record_dtype
from rl_lab.types import ConfigError, RunError
from rl_lab.utils.file_blocks import FileBlocks


def on_disk(directory: Path | None, kind: Any = ReplayBuffer, **settings: Any) -> Any:
    return make(directory, kind, storage="disk", **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_pending", [False, True])
def test_the_same_seed_gives_the_same_batches_as_memory(kind: str, is_pending: bool, tmp_path: Path) -> None:
    cls, settings = KINDS[kind]
    disk, memory = on_disk(tmp_path, cls, **settings), make(None, cls, **settings)
    for time in range(90):
        for each in (disk, memory):
            fill(each, range(time, time + 1), is_pending=is_pending)
        assert disk.ready() == memory.ready()
        if memory.ready():
            assert_same_batches(disk, memory, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("count", [3, 20, 47])
def test_a_replay_on_the_disk_is_restored_to_the_bit(kind: str, is_pending: bool, count: int, tmp_path: Path) -> None:
    cls, settings = KINDS[kind]
    memory = fill(make(None, cls, **settings), range(count), is_pending=is_pending)
    disk = on_disk(tmp_path, cls, **settings)
    for first in range(0, count, 7):
        fill(disk, range(first, min(first + 7, count)), is_pending=is_pending)
        state = saved(disk)
    again = on_disk(tmp_path, cls, **settings, seed=5)
    again.set_state(state)
    fill(memory, range(count, count + 30), is_pending=is_pending)
    fill(again, range(count, count + 30), is_pending=is_pending)
    assert_same_batches(again, memory)


def test_memory_reads_what_the_disk_saved_and_the_other_way_round(tmp_path: Path) -> None:
    disk = fill(on_disk(tmp_path), range(30), is_pending=True)
    memory = make(tmp_path)
    memory.set_state(saved(disk))
    assert_same_batches(memory, disk)
    for each in (memory, disk):
        fill(each, range(30, 45))
    disk.set_state(saved(memory))
    assert_same_batches(disk, memory)


def test_what_a_checkpoint_names_is_never_changed(tmp_path: Path) -> None:
    disk = on_disk(tmp_path, SequenceReplay, sequence_length=4, write_back=["latent"])
    fill(disk, range(20), extra=True)
    state = saved(disk)
    content = {each["file"]: (tmp_path / each["file"]).read_bytes()[: FileBlocks(**each["blocks"]).bytes]
               for each in state["log"]["segments"]}  # fmt: skip
    batch = disk.sample()
    disk.write(batch["index"], "latent", batch["latent"] + 1)
    fill(disk, range(20, 60), extra=True)
    disk.set_pending(row(60, is_answered=False))
    disk.get_state()
    for file, before in content.items():
        assert (tmp_path / file).read_bytes()[: len(before)] == before


def ring_bytes(disk: Any) -> int:
    return sum(chunk.records.nbytes for chunk in disk._ring.chunks)


def test_a_ring_that_comes_round_keeps_its_budget(tmp_path: Path) -> None:
    disk = on_disk(tmp_path)
    fill(disk, range(1))
    record = record_dtype(disk._ring.layout).itemsize * 2
    for first in range(0, 300, 50):
        fill(disk, range(first + 1, first + 51))
        assert sum(sizes(tmp_path).values()) == ring_bytes(disk) <= (20 + 2 * 3) * record, "two files of three rows"
        assert disk._ring.allocated_bytes == 40, "only one flag of each row is in memory"
    disk.get_state()
    fill(disk, range(301, 400))
    assert sum(sizes(tmp_path).values()) <= 2 * (20 + 2 * 3) * record, "what a checkpoint may need, and the ring"
    disk.get_state()
    disk.remove_files_but(set())
    assert sum(sizes(tmp_path).values()) == ring_bytes(disk)


def test_a_save_flushes_and_copies_nothing(tmp_path: Path) -> None:
    disk = fill(on_disk(tmp_path), range(10))
    before = sizes(tmp_path)
    disk.get_state()
    assert sizes(tmp_path) == before


def test_no_file_is_open_between_calls(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    disk = fill(on_disk(tmp_path), range(50))
    disk.get_state()
    disk.sample()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_policy_that_keeps_more_later_has_zeros_in_its_older_rows(tmp_path: Path) -> None:
    disk, memory = on_disk(tmp_path), make(None)
    for each in (disk, memory):
        fill(each, range(6), is_pending=True)
        fill(each, range(6, 12), extra=True)
    assert_same_batches(disk, memory)
    again = on_disk(tmp_path)
    again.set_state(saved(disk))
    assert_same_batches(again, memory)


def test_rows_that_went_elsewhere_end_the_episode_there_too(tmp_path: Path) -> None:
    disk, memory = on_disk(tmp_path), make(None)
    for each in (disk, memory):
        fill(each, range(3), is_pending=True)
        each.add(row(12))
        fill(each, range(13, 16))
    assert_same_batches(disk, memory)


def test_without_a_folder_it_can_be_built_and_checked_but_not_filled() -> None:
    disk = on_disk(None)
    assert disk.get_state()["rows"] == {}
    disk.set_state(disk.get_state())
    with pytest.raises(ConfigError, match=r"storage is disk, but there is no directory.*`directory`"):
        disk.add(row(0))


def test_rows_in_full_are_refused_with_the_way_out(tmp_path: Path) -> None:
    state = saved(fill(make(None), range(5)))
    with pytest.raises(RunError, match=r"holds its rows in full.*storage: cpu"):
        on_disk(tmp_path).set_state(state)


def test_a_deleted_short_or_altered_file_is_named(tmp_path: Path) -> None:
    state = saved(fill(on_disk(tmp_path), range(10)))
    path, needed = rows_file(tmp_path), FileBlocks(**state["log"]["segments"][0]["blocks"]).bytes
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(RunError, match=rf"{path.name}: block 0 .* has changed since it was written"):
        on_disk(tmp_path).set_state(state)
    path.write_bytes(content[: needed - 1])
    with pytest.raises(RunError, match=rf"{path.name}: it has {needed - 1} bytes where"):
        on_disk(tmp_path).set_state(state)
    path.unlink()
    with pytest.raises(RunError, match=rf"{path.name}: it is missing"):
        on_disk(tmp_path).set_state(state)


def test_a_full_disk_is_met_before_a_row_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my_run" / "replay" / "replay"
    disk = fill(on_disk(folder), range(3))
    state = saved(disk)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"disk full: the replay in .* cannot grow by .*`rl-lab resume my_run`"):
        fill(disk, range(3, 20))
    monkeypatch.undo()
    again = on_disk(folder)
    again.set_state(state)
    assert again.num_rows == 6
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        fill(again, range(3, 20))


def test_a_really_full_disk_stops_with_a_clear_message_and_intact_rows(small_disk: Path) -> None:
    disk = on_disk(small_disk / "mine" / "replay" / "replay", capacity_rows=100_000)
    fill(disk, range(5))
    state = saved(disk)
    with pytest.raises(RunError, match=r"disk full: .* cannot grow by .*Free some space.*`rl-lab resume mine`"):
        for time in range(5, 50_000):
            disk.add(row(time))
    again = on_disk(small_disk / "mine" / "replay" / "replay", capacity_rows=100_000)
    again.set_state(state)
    assert np.array_equal(again._ring.get_slots(0, 5)["vector"][0, :, 1], np.arange(5.0))
    assert torch.equal(again.sample()["is_first"].any(), torch.tensor(True))
    del disk, again  # mappings go before the disk does
