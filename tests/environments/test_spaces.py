"""Spaces become flat arrays, actions become what the space wants; anything else is refused with a cure."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments import make_environment
from rl_lab.environments.actions import ActionConverter
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import ArraySpec, ConfigError


def convert(
    space: spaces.Space, observation: Any, **settings: Any
) -> tuple[dict[str, ArraySpec], dict[str, np.ndarray]]:
    converter = pickle.loads(pickle.dumps(ObservationConverter(space, env_id="Test-v0", **settings)))
    converter.check(observation)
    arrays = converter.allocate(2)
    converter.writer()(observation, arrays, 1)
    return converter.specs, {key: array[1] for key, array in arrays.items()}


def test_float_boxes_are_flat_vectors_with_their_bounds() -> None:
    specs, row = convert(spaces.Box(-1.0, 2.0, (2, 2), np.float64), np.array([[0.0, 1.0], [2.0, -1.0]]))
    assert specs == {"vector": ArraySpec((4,), "float32", low=(-1.0,) * 4, high=(2.0,) * 4)}
    assert row["vector"].dtype == np.float32 and row["vector"].tolist() == [0, 1, 2, -1]


def test_bounds_are_given_only_where_all_are_finite() -> None:
    specs, _ = convert(spaces.Box(np.array([0, -np.inf]), np.array([1, 1]), dtype=np.float32), np.zeros(2, np.float32))
    assert specs["vector"].low is None and specs["vector"].high is None


def test_uint8_with_two_or_three_axes_is_an_image() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    specs, row = convert(spaces.Box(0, 255, (2, 2, 3), np.uint8), image)
    assert specs["image"].is_image and (row["image"] == image).all()
    specs, row = convert(spaces.Box(0, 255, (2, 3), np.uint8), image[..., 0].repeat(2)[:6].reshape(2, 3))
    assert specs["image"].shape == (2, 3, 1) and row["image"].dtype == np.uint8


def test_other_integer_boxes_are_vectors() -> None:
    for dtype, shape in ((np.uint8, (3,)), (np.int32, (3,))):
        specs, row = convert(spaces.Box(0, 100, shape, dtype), np.array([1, 2, 3], dtype))
        assert specs["vector"].dtype == "float32" and row["vector"].tolist() == [1, 2, 3]


def test_discrete_values_count_from_zero() -> None:
    specs, row = convert(spaces.Discrete(5, start=3), np.int64(7))
    assert specs == {"discrete": ArraySpec((), "int64", num_values=(5,))} and row["discrete"] == 4
    specs, row = convert(spaces.MultiDiscrete([3, 4], start=[1, 2]), np.array([3, 2]))
    assert specs["discrete"].num_values == (3, 4) and row["discrete"].tolist() == [2, 0]
    specs, row = convert(spaces.MultiBinary(3), np.array([1, 0, 1], np.int8))
    assert specs["discrete"].num_values == (2, 2, 2) and row["discrete"].tolist() == [1, 0, 1]


def test_names_of_nested_spaces() -> None:
    space = spaces.Dict(
        {
            "arm": spaces.Dict({"angle": spaces.Box(-1, 1, (1,)), "reward": spaces.Discrete(2)}),
            "pair": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
            "reward": spaces.Box(0, 1, (1,)),
            "note": spaces.Text(5),
        }
    )
    observation = {
        "arm": {"angle": np.array([0.5], np.float32), "reward": 1},
        "pair": (1, np.array([0.1, 0.2], np.float32)),
        "reward": np.array([0.7], np.float32),
        "note": "hello",
    }
    specs, row = convert(space, observation)
    assert list(specs) == ["arm.angle", "arm.reward", "pair.item_0", "pair.item_1", "observation.reward"]
    assert row["arm.reward"] == 1 and row["observation.reward"].tolist() == [np.float32(0.7)]
    assert "note" in ObservationConverter(space, env_id="Test-v0").description


@pytest.mark.parametrize("name", ["action", "is_first", "previous_action", "embedding"])
def test_what_rows_hold_already_keeps_its_name(name: str) -> None:
    specs, _ = convert(spaces.Dict({name: spaces.Box(0, 1, (1,))}), {name: np.zeros(1, np.float32)})
    assert list(specs) == [f"observation.{name}"]


def test_an_action_mask_is_boolean_and_as_long_as_the_actions() -> None:
    space = spaces.Dict({"place": spaces.Box(0, 1, (1,)), "action_mask": spaces.MultiBinary(3)})
    observation = {"place": np.zeros(1, np.float32), "action_mask": np.array([1, 0, 1], np.int8)}
    specs, row = convert(space, observation, num_actions=3)
    assert specs["action_mask"] == ArraySpec((3,), "bool") and row["action_mask"].tolist() == [True, False, True]
    with pytest.raises(ConfigError, match="'action_mask' has 3 entries but needs 4 entries: one boolean per action"):
        convert(space, observation, num_actions=4)


def test_unknown_observation_spaces_are_refused_with_a_cure() -> None:
    space = spaces.Sequence(spaces.Discrete(2))
    with pytest.raises(ConfigError, match=r"'Test-v0': the observation is a Sequence space .*ObservationWrapper"):
        ObservationConverter(space, env_id="Test-v0")
    with pytest.raises(ConfigError, match="observation 'things' is a Sequence space"):
        ObservationConverter(spaces.Dict({"things": space}), env_id="Test-v0")
    with pytest.raises(ConfigError, match="nothing of the observation space .* can be given to a network"):
        ObservationConverter(spaces.Text(3), env_id="Test-v0")


def test_two_parts_of_one_name_and_parts_without_numbers_are_refused() -> None:
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    twice = spaces.Dict({"a": spaces.Dict({"b": box}), "a.b": box})
    with pytest.raises(ConfigError, match="two parts of the observation would be called 'a.b'"):
        ObservationConverter(twice, env_id="x")
    empty = spaces.Dict({"a": box, "b": spaces.Box(-1.0, 1.0, (0,), np.float32)})
    with pytest.raises(ConfigError, match=r"observation 'b' holds no numbers, its shape is \(0,\)"):
        ObservationConverter(empty, env_id="x")


def test_a_wrong_shape_is_not_broadcast() -> None:
    converter = ObservationConverter(spaces.Box(0, 1, (4,)), env_id="Test-v0")
    with pytest.raises(ValueError, match=r"observation 'vector' has shape \(1,\), its space says \(4,\)"):
        converter.check(np.zeros(1))


def test_continuous_actions_are_clipped_and_stretched() -> None:
    low, high = np.array([-2.0, 0.0, -np.inf, 0.0]), np.array([2.0, 10.0, np.inf, np.inf])
    converter = ActionConverter(spaces.Box(low, high, dtype=np.float64), env_id="Test-v0")
    assert converter.spec.kind == "continuous" and converter.spec.sizes == (4,)
    actions = np.array([[-1, -1, -7, -7], [0, 0, 0.5, 0.5], [3, 3, 7, 7], [0.5, 0.5, 1, 1]], np.float32)
    expected = [[-2, 0, -7, 0], [0, 5, 0.5, 0.5], [2, 10, 7, 7], [1, 7.5, 1, 1]]
    assert converter.batch(actions).tolist() == expected


def test_the_shape_and_dtype_of_the_space_are_met() -> None:
    converter = ActionConverter(spaces.Box(-1.0, 1.0, (2, 3), np.float32), env_id="Test-v0")
    (row,) = converter.rows(np.zeros((1, 6), np.float32))
    assert row.shape == (2, 3) and row.dtype == np.float32
    for space in (spaces.MultiDiscrete([3, 2], start=[1, 5]), spaces.MultiBinary(2), spaces.Discrete(3, start=-1)):
        converter = ActionConverter(space, env_id="Test-v0")
        for row in converter.rows(np.ones((2, *converter.spec.shape), np.int64)):
            assert space.contains(row)


def test_unknown_action_spaces_are_refused_with_a_cure() -> None:
    for space in (spaces.Box(0, 5, (2,), np.int32), spaces.Dict({"a": spaces.Discrete(2)})):
        with pytest.raises(ConfigError, match=r"actions are a (Box|Dict) space .*gymnasium.ActionWrapper"):
            ActionConverter(space, env_id="Test-v0")


def test_minigrid_and_blackjack_convert_by_themselves() -> None:
    pytest.importorskip("minigrid")
    environment = make_environment(id="MiniGrid-Empty-5x5-v0", num_envs=2)
    assert set(environment.spec.observation) == {"image", "direction"}
    assert environment.spec.description == "Left out of the observation: mission (text)."
    rows = make_environment(id="Blackjack-v1", num_envs=2).reset()
    assert set(rows.observation) == {"item_0", "item_1", "item_2"}
