"""Each wrapper against numbers computed by hand, and the registry's errors."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments import make_environment, register_wrapper
from rl_lab.environments.wrappers import WRAPPERS, apply_wrappers, check_wrappers
from rl_lab.types import ConfigError


class Script(gym.Env):
    """Says what it is told: observation t, reward t - 2, ends after `length` steps; remembers the actions."""

    def __init__(self, observations: Any = None, space: Any = None, actions: Any = None, length: int = 100) -> None:
        self.observation_space = space or spaces.Box(-10.0, 10.0, (2,), np.float32)
        self.action_space = actions or spaces.Discrete(4)
        self.observations = observations
        self.length = length
        self.taken: list[Any] = []

    def _observe(self) -> Any:
        if self.observations is not None:
            return self.observations[len(self.taken)]
        return np.array([len(self.taken), 0.0], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.taken = []
        return self._observe(), {"action_mask": np.array([1, 0, 0, 1])}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.taken.append(action)
        t = len(self.taken)
        return self._observe(), float(t - 2), t >= self.length, False, {"action_mask": np.array([1, 0, 1, 0])}


def wrapped(*wrappers: dict[str, Any], **settings: Any) -> gym.Env:
    return apply_wrappers(Script(**settings), check_wrappers(wrappers))


def rewards(env: gym.Env, count: int = 4) -> list[float]:
    env.reset(seed=0)
    return [env.step(0)[1] for _ in range(count)]


@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [
        ({"id": "scale_reward", "scale": 2.0}, [-2, 0, 2, 4]),
        ({"id": "shift_reward", "shift": 0.5}, [-0.5, 0.5, 1.5, 2.5]),
        ({"id": "clip_reward", "low": -0.5, "high": 1.5}, [-0.5, 0, 1, 1.5]),
        ({"id": "sign_reward"}, [-1, 0, 1, 1]),
        ({"id": "step_penalty", "penalty": 0.25}, [-1.25, -0.25, 0.75, 1.75]),
        ({"id": "action_repeat", "count": 2}, [-1, 3, 7, 11]),
        ({"id": "frame_skip", "count": 3}, [0, 9, 18, 27]),
    ],
)
def test_rewards(wrapper: dict[str, Any], expected: list[float]) -> None:
    assert rewards(wrapped(wrapper)) == expected


def test_action_repeat_stops_at_the_end_of_the_episode() -> None:
    env = wrapped({"id": "action_repeat", "count": 4}, length=2)
    env.reset()
    observation, reward, terminated, *_ = env.step(0)
    assert terminated and reward == -1 and observation[0] == 2


def test_state_count_bonus_shrinks_with_visits() -> None:
    observations = [np.full(2, value, np.float32) for value in (0, 1, 1.04, 1, 5)]
    env = wrapped({"id": "state_count_bonus", "scale": 1.0, "decimals": 1}, observations=observations)
    found = np.array(rewards(env)) - np.array([-1, 0, 1, 2])
    np.testing.assert_allclose(found, [1, 1 / 2**0.5, 1 / 3**0.5, 1])


def test_time_limit() -> None:
    env = wrapped({"id": "time_limit", "steps": 2})
    env.reset()
    assert [env.step(0)[3] for _ in range(2)] == [False, True]


def test_frame_stack_of_vectors_and_images() -> None:
    env = wrapped({"id": "frame_stack", "count": 3})
    assert env.reset()[0].tolist() == [0] * 6
    env.step(0)
    assert env.step(0)[0].tolist() == [0, 0, 1, 0, 2, 0]
    assert env.observation_space.shape == (6,)
    frames = [np.full((2, 2, 1), value, np.uint8) for value in range(5)]
    env = wrapped({"id": "frame_stack", "count": 2}, observations=frames, space=spaces.Box(0, 255, (2, 2, 1), np.uint8))
    env.reset()
    assert env.step(0)[0][0, 0].tolist() == [0, 1]
    assert env.reset()[0][0, 0].tolist() == [0, 0]


def test_grey_and_resize() -> None:
    frame = np.zeros((4, 4, 3), np.uint8)
    frame[:2, :2] = (255, 0, 0)
    frame[2:] = 255
    space = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    settings = {"observations": [frame] * 2, "space": space}
    grey = wrapped({"id": "grey"}, **settings).reset()[0]
    assert grey.shape == (4, 4, 1) and grey[0, 0, 0] == (77 * 255) >> 8 and grey[3, 3, 0] == 255
    small = wrapped({"id": "resize", "height": 2, "width": 2}, **settings).reset()[0]
    assert small[:, :, 0].tolist() == [[255, 0], [255, 255]]
    one = wrapped({"id": "resize", "height": 1, "width": 1}, **settings).reset()[0]
    assert one[0, 0].tolist() == [192, 128, 128]  # rows 128 and 255 first, then 191.5


def test_crop_cuts_the_edges_off() -> None:
    frame = np.arange(4 * 6, dtype=np.uint8).reshape(4, 6, 1)
    settings = {"observations": [frame], "space": spaces.Box(0, 255, (4, 6, 1), np.uint8)}
    env = wrapped({"id": "crop", "top": 1, "bottom": 2, "left": 3, "right": 1}, **settings)
    assert env.observation_space.shape == (1, 2, 1) and env.reset()[0][:, :, 0].tolist() == [[9, 10]]
    assert wrapped({"id": "crop"}, **settings).reset()[0].tolist() == frame.tolist()
    for wrong in ({"top": 2, "bottom": 2}, {"left": -1}, {"right": -1}):
        with pytest.raises(ConfigError, match="leave nothing of an image of 4x6, or more than there is: write whole"):
            wrapped({"id": "crop", **wrong}, **settings)


def test_one_hot_flatten_select_and_rescale() -> None:
    space = spaces.Dict({"place": spaces.Discrete(3, start=1), "speed": spaces.Box(-2.0, 6.0, (1,), np.float32)})
    observation = {"place": 3, "speed": np.array([4.0], np.float32)}
    settings = {"observations": [observation], "space": space}
    assert wrapped({"id": "one_hot"}, **settings).reset()[0]["place"].tolist() == [0, 0, 1]
    assert wrapped({"id": "flatten"}, **settings).reset()[0].tolist() == [0, 0, 1, 4]
    assert set(wrapped({"id": "select_keys", "keys": ["speed"]}, **settings).reset()[0]) == {"speed"}
    assert wrapped({"id": "rescale_observation"}, **settings).reset()[0]["speed"].tolist() == [0.5]
    unbounded = spaces.Box(np.array([-np.inf, 0.0]), np.array([np.inf, 4.0]), dtype=np.float32)
    env = wrapped({"id": "rescale_observation"}, observations=[np.array([9.0, 1.0])], space=unbounded)
    assert env.reset()[0].tolist() == [9.0, -0.5]


def test_discrete_values_as_bits_and_as_fractions() -> None:
    space = spaces.Dict({"place": spaces.Discrete(5, start=1), "hand": spaces.MultiDiscrete([2, 9])})
    settings = {"observations": [{"place": 4, "hand": np.array([1, 6])}], "space": space}
    binary = wrapped({"id": "encode_discrete"}, **settings)
    assert binary.reset()[0]["place"].tolist() == [0, 1, 1]
    assert binary.reset()[0]["hand"].tolist() == [1, 0, 1, 1, 0]
    assert binary.observation_space["hand"].shape == (5,)  # type: ignore[index]
    scaled = wrapped({"id": "encode_discrete", "kind": "scaled"}, **settings).reset()[0]
    assert scaled["place"].tolist() == [0.75] and scaled["hand"].tolist() == [1.0, 0.75]
    one = wrapped({"id": "encode_discrete"}, observations=[0], space=spaces.Discrete(1))
    assert one.reset()[0].tolist() == [0]


def test_pixel_observation_alone_and_beside_the_state() -> None:
    for keep_state, keys in ((False, {"image"}), (True, {"image", "state"})):
        wrappers = [{"id": "pixel_observation", "height": 8, "width": 16, "keep_state": keep_state}]
        environment = make_environment(id="rl_lab/Corridor-v0", num_envs=2, wrappers=wrappers)
        rows = environment.reset()
        assert set(rows.observation) == keys and rows.observation["image"].shape == (2, 8, 16, 3)
        assert rows.observation["image"].std() > 0


def test_action_masks_come_from_info_or_a_method() -> None:
    env = wrapped({"id": "action_mask"})
    assert env.reset()[0]["action_mask"].tolist() == [1, 0, 0, 1]
    assert env.step(0)[0]["action_mask"].tolist() == [1, 0, 1, 0]
    environment = make_environment(id="Taxi-v4", num_envs=2, action_masks=True)
    rows = environment.reset()
    assert set(rows.observation) == {"discrete", "action_mask"} and rows.observation["action_mask"].shape == (2, 6)


@pytest.mark.parametrize("vectorization", ["auto", "sync", "async"])
@pytest.mark.parametrize("masked", [{"action_masks": True}, {"wrappers": [{"id": "action_mask"}]}])
def test_masks_that_are_not_there_are_refused_before_anything_runs(vectorization: str, masked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="found no mask: .* Write environment.action_masks: false, or take the wrap"):
        make_environment(id="CartPole-v1", num_envs=1, vectorization=vectorization, **masked)


def test_an_environment_that_fails_when_asked_for_its_mask_is_left_to_the_run() -> None:
    settings = {"kwargs": {"raise_in_reset_at": 1}, "vectorization": "sync"}
    make_environment(id="rl_lab/Faulty-v0", action_masks=True, **settings).close()


def test_a_mask_of_the_wrong_length_is_refused() -> None:
    env = wrapped({"id": "action_mask"}, actions=spaces.Discrete(3))
    with pytest.raises(ConfigError, match="the mask has 4 entries, there are 3"):
        env.reset()


def test_masks_of_a_method_and_of_the_observation_follow_remapped_actions() -> None:
    class Tells(Script):
        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0], {}

        def action_masks(self) -> list[bool]:
            return [True, False, False, True]

    fewer = [{"id": "remap_actions", "actions": [3, 1, 0]}, {"id": "remap_actions", "actions": [1, 0]}]
    env = apply_wrappers(Tells(), check_wrappers([*fewer, {"id": "action_mask"}]))
    assert env.reset(seed=0)[0]["action_mask"].tolist() == [0, 1]  # of 1 and 3
    chain = make_environment(id="rl_lab/MaskedChain-v0", wrappers=fewer[1:])
    assert chain.spec.observation["action_mask"].shape == (2,)
    alone = make_environment(id="rl_lab/MaskedChain-v0").reset().observation["action_mask"][0]
    assert chain.reset().observation["action_mask"][0].tolist() == alone[[1, 0]].tolist()


def test_remap_actions_also_remaps_masks_and_labels() -> None:
    env = wrapped({"id": "remap_actions", "actions": [3, 1]}, {"id": "action_mask"})
    assert env.reset()[0]["action_mask"].tolist() == [1, 0]
    env.step(0), env.step(1)
    assert env.unwrapped.taken == [3, 1]  # type: ignore[attr-defined]
    environment = make_environment(id="Taxi-v4", wrappers=[{"id": "remap_actions", "actions": [5, 0]}])
    assert environment.spec.action.labels == ("drop off", "south")


def test_discretise_and_clip_actions() -> None:
    box = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 4.0]), dtype=np.float32)
    env = wrapped({"id": "discretise_actions", "bins": 3}, actions=box)
    assert env.action_space == spaces.MultiDiscrete([3, 3])
    env.reset()
    env.step(np.array([0, 2]))
    assert env.unwrapped.taken[0].tolist() == [-1.0, 4.0]  # type: ignore[attr-defined]
    pendulum = make_environment(id="Pendulum-v1", wrappers=[{"id": "discretise_actions", "bins": 5}])
    assert pendulum.spec.action.kind == "discrete" and pendulum.spec.action.sizes == (5,)
    assert pendulum.spec.action.labels == ("torque -2", "torque -1", "torque 0", "torque 1", "torque 2")
    env = wrapped({"id": "clip_actions", "low": 0.0, "high": 2.0}, actions=box)
    assert env.action_space.low.tolist() == [0.0, 0.0] and env.action_space.high.tolist() == [1.0, 2.0]
    env.reset()
    env.step(np.array([-5.0, 5.0]))
    assert env.unwrapped.taken[0].tolist() == [0.0, 2.0]  # type: ignore[attr-defined]


def test_widened_actions_are_cut_at_the_bounds_of_the_environment() -> None:
    pedals = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 1.0]), dtype=np.float32)
    env = wrapped({"id": "widen_actions", "low": -1.0, "high": [1.0, 2.0]}, actions=pedals)
    assert env.action_space == spaces.Box(np.array([-1.0, -1.0]), np.array([1.0, 2.0]), dtype=np.float32)
    env.reset()
    env.step(np.array([0.5, -0.5])), env.step(np.array([0.5, 1.5]))
    assert [taken.tolist() for taken in env.unwrapped.taken] == [[0.5, 0.0], [0.5, 1.0]]  # type: ignore[attr-defined]


def test_normalise_actions() -> None:
    box = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 4.0]), dtype=np.float32)
    env = wrapped({"id": "normalise_actions", "low": 0.0, "high": 1.0}, actions=box)
    assert env.action_space.low.tolist() == [0, 0] and env.action_space.high.tolist() == [1, 1]
    env.reset()
    env.step(np.array([0.5, 0.25])), env.step(np.array([9.0, -9.0]))
    assert [taken.tolist() for taken in env.unwrapped.taken] == [[0.0, 1.0], [1.0, 0.0]]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="it needs finite bounds, this environment has Box"):
        wrapped({"id": "normalise_actions"}, actions=spaces.Box(-np.inf, np.inf, (1,), np.float32))


def test_sticky_actions_repeat_with_their_probability() -> None:
    env = wrapped({"id": "sticky_actions", "probability": 1.0})
    env.reset(seed=0)
    for action in (2, 1, 3):
        env.step(action)
    assert env.unwrapped.taken == [2, 2, 2]  # type: ignore[attr-defined]
    env = wrapped({"id": "sticky_actions", "probability": 0.25}, length=10_000)
    env.reset(seed=0)
    for step in range(2000):
        env.step(step % 2)
    taken = np.array(env.unwrapped.taken)  # type: ignore[attr-defined]
    assert 0.1 < np.mean(taken != np.arange(2000) % 2) < 0.3  # a stuck action is often the right one again


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        (
            [{"id": "frame_stak", "count": 2}],
            r"wrappers\[0\]: there is no wrapper 'frame_stak'. Did you mean 'frame_stack'",
        ),
        (
            [{"id": "grey"}, {"id": "resize", "hight": 2}],
            r"wrappers\[1\]: wrapper 'resize' has no argument 'hight'. Did you",
        ),
        ([{"id": "frame_stack"}], "wrapper 'frame_stack' needs count"),
        (["grey"], r"wrappers\[0\] is 'grey': write a mapping with an id"),
        ([{"id": ["grey"]}], r"there is no wrapper '\['grey'\]'"),
        (
            [{"id": "scale_reward", "scale": "1,5"}],
            "'scale_reward': scale is '1,5', it must be a number",
        ),
        ([{"id": "state_count_bonus", "decimals": 0.5}], "decimals is 0.5, it must be a whole number"),
        ([{"id": "action_repeat", "count": True}], "count is True, it must be a whole number"),
        ([{"id": "success", "key": 3}], "key is 3, it must be a text"),
        ([{"id": "pixel_observation", "keep_state": "yes"}], "keep_state is 'yes', it must be true or false"),
        ([{"id": "frame_stack", "count": 0}], "count is 0, it must be a whole number of at least 1"),
        ([{"id": "grey"}], "wrapper 'grey': it finds nothing to change"),
        ([{"id": "clip_reward", "low": 1, "high": 0}], "'clip_reward': low=1 must be below high=0"),
        ([{"id": "clip_actions"}], "'clip_actions': it needs a Box action space"),
        ([{"id": "remap_actions", "actions": [9]}], r"must name at least one of 0 to 1; wrong: \[9\]"),
        ([{"id": "sticky_actions", "probability": 2}], r"probability is 2, it must lie in \[0, 1\]"),
        ([{"id": "select_keys", "keys": ["vector"]}], "no 'vector'. It has: no names, it is Box"),
    ],
)
def test_wrong_wrappers_are_refused(wrappers: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(id="CartPole-v1", wrappers=wrappers)


@pytest.mark.parametrize(
    ("env_id", "wrapper", "message"),
    [
        ("Pendulum-v1", {"id": "discretise_actions", "bins": 1}, "bins is 1 .* at least 2"),
        ("Pendulum-v1", {"id": "clip_actions", "low": 2, "high": 1}, "low=2 must be below high=1"),
        ("Pendulum-v1", {"id": "widen_actions", "low": -1, "high": 3}, "must hold the bounds"),
        (
            "Pendulum-v1",
            {"id": "widen_actions", "low": [-2, -2], "high": 3},
            "must be a number, or 1 for the dimensions",
        ),
        ("Pendulum-v1", {"id": "normalise_actions", "low": 1}, "low=1 must be below high=1.0"),
        ("Taxi-v4", {"id": "encode_discrete", "kind": "bynary"}, "kind is 'bynary'. Did you mean 'binary'"),
        ("Pendulum-v1", {"id": "action_mask"}, "'action_mask': it needs discrete actions"),
        ("MiniGrid-Empty-5x5-v0", {"id": "flatten"}, "cannot flatten"),
        ("MiniGrid-Empty-5x5-v0", {"id": "state_count_bonus"}, "it cannot count .*: use select_keys"),
        ("rl_lab/Counter-v0", {"id": "pixel_observation"}, "needs an environment with the render mode rgb_array"),
    ],
)
def test_wrappers_that_do_not_fit_are_refused(env_id: str, wrapper: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(id=env_id, wrappers=[wrapper])


@pytest.mark.parametrize("declares", [True, False])
def test_a_wrapper_adds_its_outcome_to_those_within(declares: bool) -> None:
    class Scored(Script):
        outcomes = ("score",) if declares else ()

        def step(self, action: Any) -> Any:
            outcome = {"score": 7.0} if declares else "some word"
            return *super().step(action)[:4], {"outcome": outcome, "success": len(self.taken) == 1}

    gym.registry.pop("wrappers_test/Scored-v0", None)
    gym.register("wrappers_test/Scored-v0", entry_point=Scored, kwargs={"length": 2})
    wrappers = [{"id": "success"}, {"id": "success"}]
    environment = make_environment(id="wrappers_test/Scored-v0", wrappers=wrappers, vectorization="sync")
    assert environment.spec.outcomes == (("score", "success") if declares else ("success",))
    environment.reset()
    rows = [environment.step(np.zeros(1, np.int64)) for _ in range(2)]
    assert np.isnan(rows[0].outcome["success"][0]) and rows[1].outcome["success"][0] == 1.0
    assert not declares or rows[1].outcome["score"][0] == 7.0


def test_users_register_their_own_wrappers_once() -> None:
    @register_wrapper("test_double_reward")
    class DoubleReward(gym.RewardWrapper):
        def reward(self, reward: Any) -> float:
            return 2 * float(reward)

    assert rewards(wrapped({"id": "test_double_reward"})) == [-2, 0, 2, 4]
    with pytest.raises(ConfigError, match="wrapper 'test_double_reward' is already registered by"):
        register_wrapper("test_double_reward")(gym.Wrapper)
    del WRAPPERS["test_double_reward"]
