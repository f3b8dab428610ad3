"""The episode buffer: whole episodes, oldest first, padded with rows that say is_last."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_lab.buffers.episodes import EpisodeBuffer
from rl_lab.types import Batch, ConfigError
from rl_lab.utils.tree import equal

LENGTHS = (3, 5)  # rows of every episode of environment 0 and 1


def row(time: int) -> Batch:
    """Row `time` of two environments whose episodes have a fixed number of rows each."""
    place = torch.tensor([time % length for length in LENGTHS])
    episode = torch.tensor([time // length for length in LENGTHS])
    is_last = place == torch.tensor(LENGTHS) - 1
    return {
        "vector": torch.stack([torch.tensor([0.0, 1.0]), episode.float(), place.float()], dim=-1),
        "reward": place.float(),
        "is_first": place == 0,
        "is_last": is_last,
        "is_terminal": is_last & (episode % 2 == 0),
        "action": place * 10 + 1,
    }


def fill(buffer: EpisodeBuffer, times: range) -> EpisodeBuffer:
    for time in times:
        buffer.add(row(time))
        buffer.set_pending(row(time + 1))
    return buffer


def heads(batch: Batch) -> list[tuple[int, int]]:
    """Environment and number of each episode of a batch."""
    return [(int(first[0]), int(first[1])) for first in batch["vector"][:, 0]]


def discarding(episodes_per_batch: int, **settings: Any) -> EpisodeBuffer:
    return EpisodeBuffer(num_envs=2, episodes_per_batch=episodes_per_batch, running_episodes="discard", **settings)


def test_every_environment_gives_the_same_number_of_episodes_the_first_it_began() -> None:
    buffer = fill(EpisodeBuffer(num_envs=2, episodes_per_batch=3), range(9))
    assert not buffer.ready(), "environment 1 has ended one of its two, environment 0 three"
    fill(buffer, range(9, 10))
    assert heads(buffer.sample()) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_fewer_episodes_than_environments_are_one_of_each() -> None:
    assert heads(fill(EpisodeBuffer(num_envs=2, episodes_per_batch=1), range(5)).sample()) == [(0, 0), (1, 0)]


def test_episodes_come_out_oldest_first_and_whole() -> None:
    batch = fill(discarding(3), range(6)).sample()
    assert heads(batch) == [(0, 0), (1, 0), (0, 1)]
    assert batch["vector"].shape == (3, 5, 3)
    assert batch["vector"][1, :, 2].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert batch["action"][0, :3].tolist() == [1, 11, 21]


def test_padding_says_is_last_and_nothing_else() -> None:
    batch = fill(discarding(3), range(6)).sample()
    short = {key: value[0] for key, value in batch.items()}
    assert short["is_last"].tolist() == [False, False, True, True, True]
    assert short["is_terminal"].tolist() == [False, False, True, True, True]
    assert short["is_first"].tolist() == [True, False, False, False, False]
    assert short["reward"].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0]
    assert short["action"].tolist() == [1, 11, 21, 0, 0]


@pytest.mark.parametrize("running_episodes", ["finish", "discard"])
def test_ready_once_enough_episodes_have_ended_and_never_before(running_episodes: Any) -> None:
    buffer = EpisodeBuffer(num_envs=2, episodes_per_batch=2, running_episodes=running_episodes)
    fill(buffer, range(4))
    assert not buffer.ready()
    with pytest.raises(AssertionError, match="too few finished episodes"):
        buffer.sample()
    fill(buffer, range(4, 5))
    assert buffer.ready()


@pytest.mark.parametrize("running_episodes", ["finish", "discard"])
def test_what_ran_at_an_update_is_never_given(running_episodes: Any) -> None:
    buffer = EpisodeBuffer(num_envs=2, episodes_per_batch=2, running_episodes=running_episodes)
    assert heads(fill(buffer, range(5)).sample()) == [(0, 0), (1, 0)]
    batch = fill(buffer, range(5, 15)).sample()
    assert (0, 1) not in heads(batch), "it had begun before the update"
    assert bool(batch["is_first"][:, 0].all())


def test_an_unknown_word_for_running_episodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="running_episodes is 'keep': write finish .* or discard"):
        EpisodeBuffer(num_envs=2, running_episodes="keep")  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity_steps", [1, 3, 4, 7])
def test_episodes_longer_than_the_memory_make_it_grow(capacity_steps: int) -> None:
    small = fill(discarding(16, capacity_steps=capacity_steps), range(30))
    large = fill(discarding(16, capacity_steps=1000), range(30))
    assert equal(small.sample(), large.sample())


def test_memory_stays_small_while_episodes_end() -> None:
    buffer = EpisodeBuffer(num_envs=2, episodes_per_batch=1, capacity_steps=16)
    for time in range(500):
        fill(buffer, range(time, time + 1))
        if buffer.ready():
            buffer.sample()
    assert buffer._storage["reward"].shape[1] == 16


def test_a_policy_that_keeps_other_extras_starts_anew() -> None:
    buffer = fill(discarding(1), range(4))
    assert buffer.ready()
    buffer.add({**row(4), "log_prob": torch.zeros(2)})
    assert not buffer.ready(), "the episode that ends here lost its first rows"


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 6, 14, 15])
def test_the_state_continues_wherever_episodes_stood(cut: int) -> None:
    buffer = fill(EpisodeBuffer(num_envs=2, episodes_per_batch=2, capacity_steps=4), range(cut))
    fresh = fill(EpisodeBuffer(num_envs=2, episodes_per_batch=2, capacity_steps=4), range(7))
    fresh.set_state(buffer.get_state())
    assert equal(fresh.get_state(), buffer.get_state())
    fill(buffer, range(cut, 40))
    fill(fresh, range(cut, 40))
    while buffer.ready():
        assert equal(fresh.sample(), buffer.sample())
    assert not fresh.ready()


@pytest.mark.parametrize("episodes_per_batch", [0, -1])
def test_a_batch_of_no_episodes_is_refused(episodes_per_batch: int) -> None:
    with pytest.raises(ConfigError, match=rf"episodes_per_batch is {episodes_per_batch}: write a whole number"):
        EpisodeBuffer(num_envs=2, episodes_per_batch=episodes_per_batch)


def test_no_finished_episode_waits_for_a_later_batch() -> None:
    buffer = fill(discarding(1), range(12))
    assert len(buffer.sample()["reward"]) > 1
    assert not buffer.ready()


def test_a_cleared_buffer_has_nothing_to_give() -> None:
    buffer = fill(discarding(1), range(12))
    buffer.clear()
    assert not buffer.ready()
