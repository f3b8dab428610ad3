"""Compressed frames: the same batches, less memory, and never more than the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_row_log import KINDS, assert_same_batches, make, row, saved

from rl_lab.buffers.prioritized import PrioritizedReplayBuffer
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec
from rl_lab.utils.tree import equal

SHAPE = (40, 40, 3)
FRAME_BYTES = 4800
SPEC = EnvSpec(
    "toy", {"vector": ArraySpec((2,), "float32"), "image": ArraySpec(SHAPE, "uint8")}, ActionSpec("discrete", (10,))
)


def picture_row(time: int, *, is_noise: bool = False, is_answered: bool = True) -> Batch:
    """A row with a frame that shrinks well or, as noise, not at all."""
    plain = row(time, is_answered=is_answered)
    image = torch.full((2, *SHAPE), time % 256, dtype=torch.uint8)
    if is_noise:
        image = torch.randint(0, 256, (2, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(time))
    return {**plain, "image": image}


def fill(buffer: Any, times: range, *, is_noise: bool = False, is_pending: bool = False) -> Any:
    for time in times:
        buffer.add(picture_row(time, is_noise=is_noise))
        if is_pending:
            buffer.set_pending(picture_row(time + 1, is_noise=is_noise, is_answered=False))
    return buffer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_pending", [False, True])
def test_batches_are_those_of_plain_rows(kind: str, is_pending: bool) -> None:
    cls, settings = KINDS[kind]
    compressed, plain = make(None, cls, compress_frames=0.5, **settings), make(None, cls, **settings)
    for time in range(50):
        for each in (compressed, plain):
            fill(each, range(time, time + 1), is_pending=is_pending)
        if plain.ready():
            assert_same_batches(compressed, plain, 1)
    assert compressed.allocated_bytes < plain.allocated_bytes / 10


@pytest.mark.parametrize("kind", KINDS)
def test_frames_that_do_not_shrink_make_the_oldest_rows_go_early(kind: str) -> None:
    cls, settings = KINDS[kind]
    buffer = make(None, cls, compress_frames=0.5, **settings)
    predicted = buffer.memory_bytes(SPEC)
    assert predicted < make(None, cls, **settings).memory_bytes(SPEC) * 0.52
    for time in range(100):
        fill(buffer, range(time, time + 1), is_noise=True)
        if buffer.ready():
            assert buffer.allocated_bytes <= predicted
            times = buffer.sample()["vector"][..., 1]
            assert int(times.min()) >= time - 8, "nine rows of each environment fit"
            assert int(times.max()) <= time
    assert buffer.num_rows == 18


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_logged", [False, True])
def test_a_shrunken_replay_is_restored_to_the_bit(kind: str, is_logged: bool, tmp_path: Path) -> None:
    cls, settings = KINDS[kind]
    settings = {**settings, "compress_frames": 0.5}
    folder = tmp_path if is_logged else None
    whole, cut = make(None, cls, **settings), make(folder, cls, **settings)
    for first in range(0, 60, 12):
        for each in (whole, cut):
            fill(each, range(first, first + 12), is_noise=first % 24 == 0, is_pending=True)
        state = saved(cut)
        cut = make(folder, cls, **settings, seed=9)
        cut.set_state(state)
    assert_same_batches(cut, whole)
    assert cut.num_rows == whole.num_rows


def test_small_frames_and_vectors_stay_as_they_are() -> None:
    buffer = make(None, compress_frames=0.5)
    for time in range(20):
        buffer.add(row(time))
    assert buffer.ready()
    assert buffer.num_rows == 40
    assert buffer.memory_bytes(SPEC) == 40 * (FRAME_BYTES // 2 + 8 + 4 + 3 + 8)
    small = EnvSpec("toy", {"image": ArraySpec((2, 2, 3), "uint8")}, ActionSpec("discrete", (10,)))
    assert buffer.memory_bytes(small) == 40 * (12 + 4 + 3 + 8)


def test_frames_can_be_written_back_and_missing_ones_are_black() -> None:
    buffer = make(None, SequenceReplay, sequence_length=2, compress_frames=1.0, write_back=["image"])
    twin = make(None, SequenceReplay, sequence_length=2, write_back=["image"])
    for each in (buffer, twin):
        fill(each, range(6))
        batch = each.sample()
        each.write(batch["index"], "image", batch["image"] + 100)
        without = {key: value for key, value in picture_row(6).items() if key != "image"}
        each.add(without)
    for _ in range(5):
        assert equal(buffer.sample(), twin.sample())


def test_a_policy_that_keeps_more_later_widens_the_rows() -> None:
    buffer, twin = make(None, compress_frames=1.0), make(None)
    for each in (buffer, twin):
        fill(each, range(4))
        for time in range(4, 9):
            each.add({**picture_row(time), "mask": torch.full((2, 64, 64), time, dtype=torch.uint8)})
    assert_same_batches(buffer, twin)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"compress_frames is .*; write the fraction of their raw size"):
        ReplayBuffer(num_envs=2, compress_frames=fraction)


@pytest.mark.parametrize("storage", ["pinned", "disk"])
def test_frames_are_compressed_in_main_memory_only(storage: str) -> None:
    with pytest.raises(ConfigError, match=rf"compress_frames is for storage: cpu, but storage is {storage}"):
        ReplayBuffer(num_envs=2, storage=storage, compress_frames=0.5)


def test_a_budget_under_which_nothing_could_be_learnt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"if frames do not shrink, 18 rows stay, too few for minimum_rows \(30\)"):
        PrioritizedReplayBuffer(num_envs=2, capacity_rows=40, minimum_rows=30, compress_frames=0.48)
