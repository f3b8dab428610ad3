"""Normalisers against numpy, batch by batch, and through a save."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.components.networks.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.types import ActionSpec, ArraySpec, ConfigError

OBSERVATION = {
    "vector": ArraySpec((3,), "float32", low=(0.0, -1.0, 5.0), high=(10.0, 1.0, 5.0)),
    "image": ArraySpec((8, 8, 3), "uint8"),
    "room": ArraySpec((), "int64", num_values=(4,)),
}


def rolling() -> ObservationNormalizer:
    return ObservationNormalizer(observation=OBSERVATION, mode="rolling")


def test_off_returns_the_same_dict() -> None:
    rows = {"vector": torch.randn(2, 3)}
    normalizer = ObservationNormalizer(observation=OBSERVATION)
    normalizer.update(rows)
    assert normalizer(rows) is rows
    assert not list(normalizer.buffers())


def test_rolling_statistics_equal_numpy_over_all_batches() -> None:
    generator = np.random.default_rng(0)
    batches = [generator.normal(50.0, 3.0, size=(4, length, 3)).astype(np.float32) for length in (1, 7, 33)]
    normalizer = rolling()
    for batch in batches:
        normalizer.update({"vector": torch.from_numpy(batch)})
    everything = np.concatenate([batch.reshape(-1, 3) for batch in batches]).astype(np.float64)
    expected = (batches[0] - everything.mean(0)) / np.sqrt(everything.var(0) + 1e-8)
    found = normalizer({"vector": torch.from_numpy(batches[0])})["vector"].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(normalizer.scales[0].moments.variance.numpy(), everything.var(0), rtol=1e-12)


def test_rows_that_are_not_valid_do_not_count() -> None:
    rows = torch.tensor([[[1.0, 1.0, 1.0], [3.0, 5.0, 7.0]], [[9e9, 9e9, 9e9], [5.0, 9.0, 13.0]]])
    normalizer = rolling()
    normalizer.update({"vector": rows}, torch.tensor([[True, True], [False, True]]))
    assert normalizer.scales[0].moments.mean.tolist() == [3.0, 5.0, 7.0]
    assert normalizer.scales[0].moments.count.item() == 3
    normalizer.update({"vector": rows}, torch.zeros(2, 2, dtype=torch.bool))
    assert normalizer.scales[0].moments.count.item() == 3
    assert normalizer.scales[0].moments.mean.tolist() == [3.0, 5.0, 7.0]


def test_before_any_update_nothing_changes_but_the_clip() -> None:
    rows = {"vector": torch.tensor([[1.0, -2.0, 30.0]])}
    assert rolling()(rows)["vector"].tolist() == [[1.0, -2.0, 10.0]]


def test_only_float_observations_are_touched_and_the_input_is_not() -> None:
    rows = {
        "vector": torch.full((1, 3), 4.0),
        "image": torch.zeros(1, 8, 8, 3, dtype=torch.uint8),
        "room": torch.ones(1, dtype=torch.int64),
    }
    normalizer = rolling()
    normalizer.update(rows)
    normalized = normalizer(rows)
    assert normalized["image"] is rows["image"]
    assert normalized["room"] is rows["room"]
    assert rows["vector"].tolist() == [[4.0, 4.0, 4.0]]
    assert normalized["vector"].tolist() == [[0.0, 0.0, 0.0]]


def test_static_maps_bounds_to_minus_one_and_one() -> None:
    normalizer = ObservationNormalizer(observation=OBSERVATION, mode="static")
    rows = {"vector": torch.tensor([[0.0, 1.0, 5.0], [10.0, 0.0, 5.0]])}
    normalizer.update(rows)
    assert normalizer(rows)["vector"].tolist() == [[-1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_statistics_travel_in_the_state_dict() -> None:
    normalizer, restored = rolling(), rolling()
    normalizer.update({"vector": torch.randn(20, 3) * 4.0 + 2.0})
    restored.load_state_dict(normalizer.state_dict())
    rows = {"vector": torch.randn(5, 3)}
    assert torch.equal(normalizer(rows)["vector"], restored(rows)["vector"])
    for one in (normalizer, restored):
        one.update(rows)
    assert torch.equal(normalizer(rows)["vector"], restored(rows)["vector"])


def test_static_without_bounds_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"observation 'speed' has no finite bounds. Write mode: rolling"):
        ObservationNormalizer(observation={"speed": ArraySpec((1,), "float32")}, mode="static")


@pytest.mark.parametrize(("kind", "modes"), [("continuous", ("rolling", "return_scale")), ("discrete", ("off", "off"))])
def test_auto_normalises_where_actions_are_continuous(kind: Any, modes: tuple[str, str]) -> None:
    action = ActionSpec(kind, (2,))
    observations = ObservationNormalizer(observation=OBSERVATION, action=action, mode="auto")
    rewards = RewardNormalizer(num_envs=2, action=action, mode="auto")
    assert (observations.mode, rewards.mode) == modes
    assert bool(observations.keys) == (kind == "continuous")


def test_misspelt_modes_and_clips_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"observation normalizer mode: 'roling'.*Did you mean 'rolling'"):
        ObservationNormalizer(observation=OBSERVATION, mode="roling")
    with pytest.raises(ConfigError, match=r"reward normalizer mode: 'scale'.*allowed: auto, off, return_scale"):
        RewardNormalizer(num_envs=2, mode="scale")
    with pytest.raises(ConfigError, match=r"reward normalizer clip: 0; allowed is a number above 0"):
        RewardNormalizer(num_envs=2, clip=0)


# --- rewards -----------------------------------------------------------------------------------


def test_running_returns_by_hand() -> None:
    normalizer = RewardNormalizer(num_envs=1, mode="return_scale", discount=0.5)
    normalizer.update(torch.tensor([[2.0, 4.0]]), torch.tensor([[False, False]]))  # returns 2, 4 + 1 = 5
    assert normalizer.running_return.tolist() == [5.0]
    normalizer.update(torch.tensor([[1.0, 0.0, 8.0]]), torch.tensor([[False, True, False]]))  # 3.5, reset, 8
    assert normalizer.running_return.tolist() == [8.0]
    counted = np.array([2.0, 5.0, 3.5, 8.0])
    assert normalizer.moments.variance.item() == pytest.approx(counted.var())
    assert normalizer(torch.tensor([1.0])).item() == pytest.approx(1.0 / counted.std())


def test_reward_scale_equals_a_plain_loop_over_rollouts() -> None:
    generator = np.random.default_rng(1)
    normalizer = RewardNormalizer(num_envs=3, mode="return_scale", discount=0.9)
    running, seen = np.zeros(3), []
    for length in (5, 1, 32):
        reward = generator.normal(size=(3, length)).astype(np.float32)
        first = generator.random((3, length)) < 0.2
        normalizer.update(torch.from_numpy(reward), torch.from_numpy(first))
        for t in range(length):
            running = np.where(first[:, t], 0.0, 0.9 * running + reward[:, t])
            seen += list(running[~first[:, t]])
    np.testing.assert_allclose(normalizer.running_return.numpy(), running, rtol=1e-10)
    assert normalizer.factor.item() == pytest.approx(1.0 / np.sqrt(np.var(seen) + 1e-8), rel=1e-6)


def test_rewards_are_clipped_and_off_changes_nothing() -> None:
    reward = torch.tensor([100.0, -100.0, 1.0])
    assert RewardNormalizer(num_envs=1, mode="return_scale")(reward).tolist() == [10.0, -10.0, 1.0]
    off = RewardNormalizer(num_envs=1)
    off.update(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool))
    assert off(reward) is reward


def test_one_constant_return_does_not_explode() -> None:
    normalizer = RewardNormalizer(num_envs=1, mode="return_scale")
    normalizer.update(torch.tensor([[1.0]]), torch.tensor([[False]]))
    assert torch.isfinite(normalizer(torch.tensor([1.0]))).all()
