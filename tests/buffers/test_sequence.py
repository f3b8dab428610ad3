"""Sequence replay: fresh sequences first and once, then the mixture; latents and priorities come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec
from rl_lab.utils.tree import equal, numpy_to_tensors
from tests import test_contract as contract

ENVS, LENGTH = 2, 4


def row(time: int) -> Batch:
    env_index, flag = torch.arange(ENVS), torch.zeros(ENVS, dtype=torch.bool)
    values = {"vector": torch.stack([env_index.float(), torch.full((ENVS,), float(time))], dim=-1)}
    flags = {"is_first": flag, "is_last": flag | (time % 6 == 5), "is_terminal": flag}
    return {**values, "reward": torch.zeros(ENVS), **flags, "action": env_index, "latent": torch.zeros(ENVS, 3)}


def make(**given_settings: Any) -> SequenceReplay:
    chosen = {"num_envs": ENVS, "capacity_rows": 40, "batch_size": 6, "sequence_length": LENGTH}
    return SequenceReplay(**{**chosen, **given_settings})


def fill(buffer: SequenceReplay, times: range) -> SequenceReplay:
    for time in times:
        buffer.add(row(time))
    return buffer


def starts(batch: Batch) -> list[tuple[int, int]]:
    """Environment and time of each sequence."""
    return [(int(env), int(time)) for env, time in batch["vector"][:, 0]]


@pytest.mark.parametrize("count", [10, 20, 21, 22, 23, 39, 60])
@pytest.mark.parametrize("mixture", [{}, {"uniform": 0.3, "priority": 0.3, "recency": 0.4}])
def test_sequences_are_consecutive_rows_of_one_environment(count: int, mixture: dict[str, float]) -> None:
    buffer = fill(make(**mixture), range(count))
    for _ in range(30):
        batch = buffer.sample()
        times = batch["vector"][..., 1]
        assert batch["vector"].shape == (6, LENGTH, 2)
        assert bool((times[:, 1:] - times[:, :-1] == 1).all())
        assert bool((batch["vector"][..., 0] == batch["vector"][:, :1, 0]).all())
        assert int(times.min()) >= count - 20 and int(times.max()) < count


def test_fresh_sequences_come_first_in_order_and_once() -> None:
    buffer = fill(make(batch_size=3), range(12))
    assert starts(buffer.sample()) == [(0, 0), (1, 0), (0, 4)]
    assert starts(buffer.sample()) == [(1, 4), (0, 8), (1, 8)]
    fill(buffer, range(12, 16))
    assert starts(buffer.sample())[:2] == [(0, 12), (1, 12)]


def test_a_fresh_sequence_that_was_overwritten_is_forgotten_and_the_queue_stays_bounded() -> None:
    buffer = fill(make(), range(200))
    buffer.ready()  # brings the rows into the ring
    assert len(buffer._fresh) == 10, "five sequences of each environment fit"
    assert starts(fill(buffer, range(200, 202)).sample())[0] == (0, 184)


def test_without_the_queue_every_sequence_is_drawn() -> None:
    buffer = fill(make(online_queue=False, batch_size=500), range(30))
    assert set(starts(buffer.sample())) == {(env, time) for env in range(ENVS) for time in range(10, 27)}


MIXTURES = [{"uniform": 1.0}, {"uniform": 0.0, "recency": 1.0}, {"uniform": 0.0, "priority": 1.0}]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("online_queue", [False, True])
def test_no_sequence_leads_from_one_environment_into_the_next(mixture: dict[str, float], online_queue: bool) -> None:
    """Rows 0 to 9, then those of another environment from 10 on, then of a third from 12 on."""
    settings = {"batch_size": 200, "online_queue": online_queue, **mixture}
    buffer = fill(make(**settings), range(10))
    buffer.cut()
    assert {time for _, time in starts(fill(buffer, range(10, 12)).sample())} == set(range(7))
    buffer.cut()
    again = make(**settings)
    again.set_state(numpy_to_tensors(fill(buffer, range(12, 17)).get_state()))
    for each in (buffer, again):
        assert each.ready() and {time for _, time in starts(each.sample())} == {*range(7), 12, 13}
    fill(buffer, range(17, 40))  # the oldest two environments are forgotten
    assert {time for _, time in starts(buffer.sample())} == set(range(20, 37))


def test_after_a_change_a_replay_is_ready_when_one_environment_fills_a_sequence() -> None:
    buffer = fill(make(), range(3))
    buffer.cut()
    assert [fill(buffer, range(time, time + 1)).ready() for time in range(3, 8)] == [False, False, False, True, True]
    assert {time for _, time in starts(buffer.sample())} <= {3, 4}


def test_recency_draws_new_sequences_as_its_power_says() -> None:
    settings = {"online_queue": False, "batch_size": 4000, "capacity_rows": 640}
    buffer = fill(make(uniform=0.0, recency=1.0, recency_power=4.0, **settings), range(323))
    times = buffer.sample()["vector"][:, 0, 1]
    newest = 323 - LENGTH  # 317 starts: 3 to 319
    fraction = float((times > newest - 317 / 16).float().mean())
    assert fraction == pytest.approx(0.5, abs=0.04), "half of the draws are among the newest sixteenth"


def test_priority_prefers_large_errors() -> None:
    buffer = fill(make(uniform=0.0, priority=1.0, online_queue=False, alpha=1.0, batch_size=300), range(8))
    index = torch.arange(2 * 5)  # five starts of each environment
    buffer.update_priorities(index, torch.tensor([1.0, 0, 0, 8.0, 0, 0, 0, 0, 1.0, 0]))
    drawn = torch.bincount(buffer.sample()["index"], minlength=10) / 300
    assert drawn[3] == pytest.approx(0.8, abs=0.1)
    assert drawn[[0, 3, 8]].sum() > 0.99


def test_priorities_without_a_priority_fraction_are_not_kept() -> None:
    buffer = fill(make(), range(8))
    before = buffer.get_state()
    buffer.update_priorities(torch.tensor([0]), torch.tensor([5.0]))
    assert equal(buffer.get_state(), before)


@pytest.mark.parametrize("count", [12, 22, 23])
def test_what_is_written_back_is_sampled_from_then_on(count: int) -> None:
    buffer = fill(make(), range(count))
    batch = buffer.sample()
    buffer.write(batch["index"], "latent", batch["vector"].sum(-1, keepdim=True).expand(-1, -1, 3))
    written = {(int(env), int(time)) for sequence in batch["vector"] for env, time in sequence}
    for _ in range(20):
        again = buffer.sample()
        for place, latent in zip(again["vector"].reshape(-1, 2), again["latent"].reshape(-1, 3), strict=True):
            env, time = int(place[0]), int(place[1])
            assert latent.tolist() == [float(env + time) if (env, time) in written else 0.0] * 3


def test_learning_writes_back_the_keys_it_was_told_to() -> None:
    buffer = fill(make(write_back=["latent"]), range(12))
    batch = buffer.sample()
    buffer.learned({**batch, "latent": torch.full((6, LENGTH, 3), 5.0)})
    again = buffer._read(batch["index"].numpy() % ENVS, batch["index"].numpy() // ENVS, LENGTH)
    assert bool((again["latent"] == 5.0).all())


def test_a_write_back_of_what_no_row_has_is_refused() -> None:
    buffer = fill(make(write_back=["latnet"]), range(12))
    with pytest.raises(ConfigError, match="'latnet' cannot be written back"):
        buffer.learned(buffer.sample())


def test_sequences_by_priority_want_priorities() -> None:
    buffer = fill(make(uniform=0.5, priority=0.5), range(12))
    with pytest.raises(ConfigError, match="this workflow gives no priorities.*priority: 0.0 of a sequence replay"):
        buffer.learned(buffer.sample())


def test_a_cleared_buffer_forgets_its_queue() -> None:
    buffer = fill(make(uniform=0.5, priority=0.5), range(12))
    buffer.clear()
    assert not buffer.ready()
    fill(buffer, range(12, 17))
    assert {time for _, time in starts(buffer.sample())} <= {12, 13}


def test_latents_of_overwritten_sequences_are_passed_over() -> None:
    buffer = fill(make(), range(8))
    index = buffer.sample()["index"]
    fill(buffer, range(8, 40))
    buffer.write(index, "latent", torch.ones(6, LENGTH, 3))
    assert float(buffer._ring.view("latent").sum()) == 0.0


def test_a_key_no_row_has_is_refused_with_the_nearest_one() -> None:
    buffer = fill(make(), range(8))
    with pytest.raises(ConfigError, match="'latnet' cannot be written back.*Did you mean 'latent'.*vector, reward"):
        buffer.write(torch.tensor([0]), "latnet", torch.ones(1, LENGTH, 3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"uniform": 0.5}, "are 0.5, 0.0 and 0.0; they are fractions that add up to 1"),
        ({"uniform": 1.5, "recency": -0.5}, "are 1.5, 0.0 and -0.5; they are fractions"),
        ({"recency_power": 0.5}, "recency_power is 0.5; write 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**wrong)


def test_too_few_rows_give_no_batch() -> None:
    buffer = fill(make(), range(LENGTH - 1))
    assert not buffer.ready()
    with pytest.raises(AssertionError, match="too few rows"):
        buffer.sample()


@pytest.mark.parametrize("mixture", [{}, {"uniform": 0.3, "priority": 0.3, "recency": 0.4}])
@pytest.mark.parametrize("cut", [0, 3, 9, 20, 50])
def test_the_state_continues_bit_for_bit(cut: int, mixture: dict[str, float]) -> None:
    buffer, other = fill(make(**mixture), range(cut)), fill(make(seed=5, **mixture), range(13))
    if buffer.ready():
        buffer.sample()
    other.set_state(numpy_to_tensors(buffer.get_state()))
    assert equal(other.get_state(), buffer.get_state())
    for time in range(cut, cut + 25):
        fill(buffer, range(time, time + 1))
        fill(other, range(time, time + 1))
        if buffer.ready():
            left, right = buffer.sample(), other.sample()
            assert equal(left, right)
            for each, batch in ((buffer, left), (other, right)):
                each.update_priorities(batch["index"], batch["vector"][:, 0, 1])
                each.write(batch["index"], "latent", batch["latent"] + 1)


def test_memory_counts_the_tree_only_where_there_is_one() -> None:
    spec = EnvSpec("any", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (4,)))
    plain, ranked = make(capacity_rows=2000), make(capacity_rows=2000, uniform=0.5, priority=0.5)
    fill(plain, range(1))
    assert plain.memory_bytes(spec, extra_bytes_per_row=12) == plain._ring.allocated_bytes
    assert ranked.memory_bytes(spec) == plain.memory_bytes(spec) + 2000 * 8


@pytest.mark.parametrize("mixture", [{}, {"uniform": 0.3, "priority": 0.3, "recency": 0.4}])
def test_sequence_replay_keeps_the_convention(mixture: dict[str, float]) -> None:
    class Learner(contract.Contract):
        notes_priorities = True

        def update_controller(self, batch: Batch, **given_phase: Any) -> dict[str, Any]:
            rows = {key: value for key, value in batch.items() if key != "index"}
            batch["priority"] = batch["reward"][:, 1]
            return super().update_controller(rows, **given_phase)

    workflow = Learner()
    buffer = SequenceReplay(num_envs=3, capacity_rows=90, batch_size=16, sequence_length=9, **mixture)
    contract.run(workflow, buffer, duration_cycles=15)
    assert len(workflow.batches) > 10
