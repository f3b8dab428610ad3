"""Where the rows lie changes nothing: rings in main memory and on a device give the same batches, to the bit."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers.prioritized import PrioritizedReplayBuffer
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.ring_replay import Replay
from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.buffers.storage.rows import DeviceRing, RowRing
from rl_lab.types import Batch, ConfigError
from rl_lab.utils.tree import equal, numpy_to_tensors

ENVS, EPISODE = 2, 5
CPU = torch.device("cpu")
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "uniform": (ReplayBuffer, {"n_step": 2}),
    "prioritised": (PrioritizedReplayBuffer, {"n_step": 1}),
    "sequences": (SequenceReplay, {"sequence_length": 4, "uniform": 0.5, "priority": 0.5, "write_back": ["latent"]}),
}


def row(time: int, *, is_answered: bool = True) -> Batch:
    env_index = torch.arange(ENVS)
    place = (time + env_index) % EPISODE
    values: Batch = {
        "vector": torch.stack([env_index.float(), torch.full((ENVS,), float(time))], dim=-1),
        "image": torch.full((ENVS, 2, 2, 3), time % 256, dtype=torch.uint8),
        "reward": env_index * 1000.0 + time,
        "is_first": place == 0,
        "is_last": place == EPISODE - 1,
        "is_terminal": place == EPISODE - 1,
    }
    latent = torch.full((ENVS, 3), time / 7).bfloat16()
    return {**values, "action": env_index + time, "latent": latent} if is_answered else values


def make(kind: str, *, is_on_device: bool = False, **settings: Any) -> Any:
    """A replay; `is_on_device` runs the code of `storage: gpu` on the memory that every machine has."""
    cls, own = KINDS[kind]
    buffer: Replay = cls(**{"num_envs": ENVS, "capacity_rows": 24, "batch_size": 16, **own, **settings})
    if is_on_device:
        buffer._ring = DeviceRing(num_envs=ENVS, slots_per_env=buffer.slots_per_env, device=CPU)
    return buffer


def play(buffer: Any, times: range, *, is_pending: bool = True) -> list[Batch]:
    """Collect, sample and learn as the loop does; the batches."""
    batches = []
    for time in times:
        buffer.add(row(time))
        if is_pending:
            buffer.set_pending(row(time + 1, is_answered=False))
        if buffer.ready() and time % 3 == 0:
            batch = buffer.sample()
            batches.append(dict(batch))
            batch["priority"] = batch["reward"][:, 1]
            batch["latent"] = batch["latent"] * 2
            buffer.learned(batch)
    return batches


def comparable(batches: list[Batch]) -> list[Batch]:
    """numpy has no bfloat16; float32 holds every one of its numbers."""
    return [{key: v.float() if v.dtype is torch.bfloat16 else v for key, v in batch.items()} for batch in batches]


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_gives_the_batches_that_main_memory_gives(kind: str, is_pending: bool) -> None:
    here = play(make(kind), range(60), is_pending=is_pending)
    there = play(make(kind, is_on_device=True), range(60), is_pending=is_pending)
    assert len(here) > 15
    assert equal(comparable(here), comparable(there))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [4, 11, 12, 31])
def test_a_state_goes_from_one_storage_to_the_other(kind: str, cut: int) -> None:
    here, there = make(kind), make(kind, is_on_device=True, seed=9)
    play(here, range(cut))
    there.set_state(numpy_to_tensors(here.get_state()))
    assert equal(there.get_state(), here.get_state())
    assert equal(comparable(play(here, range(cut, 50))), comparable(play(there, range(cut, 50))))


@pytest.mark.parametrize("kind", KINDS)
def test_when_rows_are_stored_makes_no_difference(kind: str) -> None:
    """Rows wait before they are stored; asking after each of them stores them one by one."""
    eager, lazy = make(kind), make(kind)
    for time in range(70):
        for buffer in (eager, lazy):
            buffer.add(row(time))
        eager.ready()
        if time % 10 == 9:
            for buffer in (eager, lazy):
                buffer.set_pending(row(time + 1, is_answered=False))
            left, right = eager.sample(), lazy.sample()
            assert equal(comparable([left]), comparable([right]))
            for buffer, batch in ((eager, left), (lazy, right)):
                buffer.learned({**batch, "priority": batch["reward"][:, 1]})
    assert equal(eager.get_state(), lazy.get_state())


def test_bfloat16_comes_back_as_it_went_in() -> None:
    buffer = make("uniform")
    for time in range(30):
        buffer.add(row(time))
    batch = buffer.sample()
    assert batch["latent"].dtype is torch.bfloat16
    expected = (batch["vector"][..., 1] / 7).bfloat16()
    assert torch.equal(batch["latent"], expected[..., None].expand(-1, -1, 3))


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_later_policy_that_keeps_more_widens_every_ring(is_on_device: bool) -> None:
    buffer = make("uniform", is_on_device=is_on_device, batch_size=200)
    for time in range(8):
        buffer.add({**row(time), "extra": torch.full((ENVS,), float(time))} if time >= 4 else row(time))
    batch = buffer.sample()
    times = batch["vector"][..., 1]
    assert torch.equal(batch["extra"], torch.where(times >= 4, times, 0.0))
    assert torch.equal(batch["reward"], batch["vector"][..., 0] * 1000 + times)


@pytest.mark.parametrize("ring", [RowRing, DeviceRing])
def test_single_values_are_read_and_replaced_by_place(ring: Any) -> None:
    rows = ring(num_envs=ENVS, slots_per_env=4, device=CPU)
    rows.write(2, row(3, is_answered=False))
    places = np.arange(ENVS), np.full(ENVS, 2)
    assert rows.get_values("reward", *places).tolist() == [3.0, 1003.0]
    rows.set_values("is_last", *places, np.array([True, True]))
    assert rows.view("is_last")[:, 2].tolist() == [True, True]
    assert rows.get_slots(2, 3)["is_last"].tolist() == [[True], [True]]
    rows.set_values("reward", *places, torch.tensor([7.0, 8.0]))
    assert rows.get_values("reward", *places).tolist() == [7.0, 8.0]
    assert rows.row_bytes == rows.allocated_bytes // (ENVS * 4) == 8 + 12 + 4 + 3


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("gpu", "storage is gpu, which needs a GPU, but this run's device is cpu. Write storage: cpu"),
        ("pinned", "storage is pinned, which needs a GPU, but this run's device is cpu"),
        ("ram", "storage is 'ram'. Allowed: cpu, pinned, gpu, disk"),
        ("dsk", "storage is 'dsk'. Did you mean 'disk'"),
    ],
)
def test_a_storage_that_is_not_there_is_refused(storage: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("uniform", storage=storage)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["cpu", "pinned", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_a_gpu_run_lie_there_and_are_the_same(kind: str, storage: str) -> None:
    gpu = torch.device("cuda:0")
    here, there = make(kind), make(kind, storage=storage, device=gpu)
    for time in range(40):
        here.add(row(time))
        there.add({key: value.to(gpu) for key, value in row(time).items()})
        if here.ready():
            left, right = here.sample(), there.sample()
            assert right["vector"].device == gpu
            assert equal(comparable([left]), comparable([{key: value.cpu() for key, value in right.items()}]))
            here.learned({**left, "priority": left["reward"][:, 1]})
            there.learned({**right, "priority": right["reward"][:, 1]})


@pytest.mark.parametrize("ring", [RowRing, DeviceRing])
def test_old_rows_are_gone_before_room_for_others_is_taken(ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the memory may be theirs: with both at once a replay could not be restored."""
    rows = ring(num_envs=ENVS, slots_per_env=4, device=CPU)
    rows.write(0, row(0, is_answered=False))
    is_there, allocate, block = [], rows._allocate, weakref.ref(next(iter(rows._blocks.values())))

    def watch(width: int, dtype: str) -> Any:
        is_there.append(block() is not None or bool(rows._views))
        return allocate(width, dtype)

    monkeypatch.setattr(rows, "_allocate", watch)
    rows.lay_out(rows.layout)
    assert is_there and not any(is_there)
