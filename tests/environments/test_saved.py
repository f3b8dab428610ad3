"""What a run keeps of its environment: the same spaces, in the same order, after a journey through JSON."""

from __future__ import annotations

import json
from collections import OrderedDict

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments.actions import ActionConverter, in_range
from rl_lab.environments.factory import make_environment
from rl_lab.environments.recipe import Blueprint
from rl_lab.environments.sampling import draw_observations
from rl_lab.environments.saved import from_plain, to_plain
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import EnvSpec, RunError


def make_blueprint(observation: spaces.Space, action: spaces.Space) -> Blueprint:
    actions = ActionConverter(action, env_id="Some-v0")
    observations = ObservationConverter(observation, env_id="Some-v0", num_actions=actions.num_mask_entries)
    return Blueprint(EnvSpec("Some-v0", observations.specs, actions.spec), observations, actions)


def through_json(blueprint: Blueprint) -> Blueprint:
    return from_plain(json.loads(json.dumps(to_plain(blueprint), allow_nan=False)), place="environment.json")


OBSERVATIONS = {
    "vector": spaces.Box(np.array([0, -1, -np.inf], np.float32), np.array([1, np.inf, 2], np.float32)),
    "doubles": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(4, start=-1),
    "grid": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [0, 0]]),
    "bits": spaces.MultiBinary((2, 3)),
    "several": spaces.Dict(
        OrderedDict(z=spaces.Discrete(2), a=spaces.Tuple([spaces.Box(-1, 1, (), np.float32), spaces.Text(5)]))
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=2),
    "multi": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "bits": spaces.MultiBinary(4),
    "box": spaces.Box(np.array([[0.0, -np.inf]]), np.array([[4.0, 3.0]]), dtype=np.float64),
}


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_blueprint_survives_json(observation: str, action: str) -> None:
    before = make_blueprint(OBSERVATIONS[observation], ACTIONS[action])
    after = through_json(before)
    assert after.spec == before.spec
    assert list(after.spec.observation) == list(before.spec.observation)
    assert after.observations.leaves[0].source_shape == before.observations.leaves[0].source_shape
    assert after.actions.space == before.actions.space


def test_everything_a_spec_says_is_kept() -> None:
    environment = make_environment(id="Acrobot-v1", num_envs=1, action_repeat=2)
    environment.close()
    assert through_json(environment.blueprint).spec == environment.spec
    assert environment.spec.action.labels and environment.spec.frames_per_step == 2


@pytest.mark.parametrize(
    "plain", [{}, {"action_space": {"type": "Disk"}}, {"action_space": 3}, {"observation_space": {"type": "Dict"}}]
)
def test_a_file_that_describes_no_environment_is_named(plain: dict) -> None:
    whole = to_plain(make_blueprint(OBSERVATIONS["vector"], ACTIONS["box"]))
    with pytest.raises(RunError, match="run/environment.json does not describe an environment .*Remove it"):
        from_plain({**whole, **plain} if plain else {}, place="run/environment.json")


@pytest.mark.parametrize(
    "space",
    [
        {"type": "Box", "low": 0, "high": 1, "shape": [10**6, 10**6], "dtype": "uint8"},
        {"type": "Box", "low": 0, "high": 10**400, "shape": [2], "dtype": "float32"},
        {"type": "Box", "low": 0, "high": 1, "shape": [-1, 10**9], "dtype": "float32"},
        {"type": "MultiBinary", "n": 10**13},
        {"type": "MultiBinary", "n": [10**9, 10**9]},
        {"type": "Discrete", "n": 10**18, "start": 0},
        {"type": "MultiDiscrete", "nvec": [10**12, 2], "start": [0, 0], "dtype": "int64"},
        {"type": "Dict", "spaces": [["a", {"type": "MultiBinary", "n": 10**13}]]},
    ],
    ids=str,
)
def test_a_space_of_a_size_that_no_environment_has_is_refused(space: dict) -> None:
    whole = to_plain(make_blueprint(OBSERVATIONS["vector"], ACTIONS["box"]))
    for name in ("observation_space", "action_space"):
        with pytest.raises(RunError, match="run/environment.json does not describe an environment .*Remove it"):
            from_plain({**whole, name: space}, place="run/environment.json")


def test_a_batch_of_nested_choices_counts_from_zero() -> None:
    converter = ObservationConverter(OBSERVATIONS["grid"], env_id="Some-v0")
    batch = np.array([[[1, 3], [0, 4]], [[2, 1], [3, 0]]])  # two observations, counted from [[1, 1], [0, 0]]
    assert converter.batch(batch, 2)["discrete"].tolist() == [[0, 2, 0, 4], [1, 0, 3, 0]]


def test_actions_are_mapped_alike_in_arrays_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    low, high = np.array([-2.0, 0.0, -np.inf, -np.inf]), np.array([2.0, 10.0, np.inf, 5.0])
    converter = ActionConverter(spaces.Box(low, high, dtype=np.float64), env_id="Some-v0")
    action = np.array([[0.5, -3.0, 7.0, 7.0], [-1.0, 0.0, -7.0, -7.0]])
    expected = [[1.0, 0.0, 7.0, 5.0], [-2.0, 5.0, -7.0, -7.0]]
    assert converter.batch(action).tolist() == expected
    numbers = {name: torch.from_numpy(value) for name, value in converter.range.items()}
    assert in_range(torch.from_numpy(action), **numbers).tolist() == expected


def test_drawn_observations_are_of_the_space_and_allow_an_action() -> None:
    space = spaces.Dict(
        {
            "huge": spaces.Box(-3e38, 3e38, (2,), np.float32),
            "action_mask": spaces.MultiBinary(7),
            "pair": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 255, (4, 4, 1), np.uint8)]),
        }
    )
    drawn = draw_observations(make_blueprint(space, spaces.MultiDiscrete([3, 4])), 50, seed=1)
    assert len(drawn) == 50 and all(space.contains(each) for each in drawn)
    assert max(float(np.abs(each["huge"]).max()) for each in drawn) < 10
    assert all(each["action_mask"][:3].any() and each["action_mask"][3:].any() for each in drawn)


def test_a_suites_own_class_of_texts_becomes_a_plain_text() -> None:
    class Mission(gym.Space):
        def __init__(self) -> None:
            super().__init__(dtype=str)
            self.make = lambda: "go"  # cannot be pickled

    blueprint = make_blueprint(spaces.Dict({"mission": Mission(), "place": spaces.Discrete(3)}), ACTIONS["discrete"])
    assert blueprint.observations.space["mission"] == spaces.Text(1)
    assert list(through_json(blueprint).spec.observation) == ["place"]
