"""CarRacing drawn faster to the same pixels; MiniGrid as images and symbols; both continue exactly."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

from rl_lab.config.compose import compose
from rl_lab.config.files import PACKAGE_CONFIGS
from rl_lab.environments import make_environment
from rl_lab.environments.checker import check_environment
from rl_lab.types import ConfigError

from ..helpers import play
from ..test_snapshot import continues_identically

GRID = "MiniGrid-DoorKey-5x5-v0"


def configured(choice: str, **changes: Any) -> Any:
    """The environment of a config group, in this process."""
    settings = {**compose("random_cartpole", [f"environment={choice}"])["environment"], "num_envs": 1}
    return make_environment(**{**settings, "vectorization": "sync", **changes})


# --- car racing --------------------------------------------------------------------------------


@pytest.fixture
def box2d() -> None:
    pytest.importorskip("Box2D", reason="needs pip install 'rl-lab[box2d]'")


@pytest.mark.usefixtures("box2d")
def test_car_racing_is_the_original_pixel_for_pixel() -> None:
    ours, original = (gym.make(env_id) for env_id in ("rl_lab/CarRacing-v3", "CarRacing-v3"))
    for seed in (0, 1):
        np.testing.assert_array_equal(ours.reset(seed=seed)[0], original.reset(seed=seed)[0])
        for i in range(12):
            action = np.array([0.3 * (-1) ** i, 1.0, 0.0], np.float32)
            (image, reward, *_), (expected, expected_reward, *_) = ours.step(action), original.step(action)
            np.testing.assert_array_equal(image, expected)
            assert reward == expected_reward


@pytest.mark.usefixtures("box2d")
def test_car_racing_at_the_edge_of_the_map_and_from_near_is_the_original_pixel_for_pixel() -> None:
    ours, original = (
        gym.make(env_id, continuous=False).unwrapped for env_id in ("rl_lab/CarRacing-v3", "CarRacing-v3")
    )
    for env in (ours, original):
        env.reset(seed=3)
    for seconds, place in ((1.0, (0.0, 0.0)), (1.0, (-310.0, 20.0)), (3.0, (330.0, 300.0)), (0.4, (200.0, -250.0))):
        for env in (ours, original):
            env.t, env.reward = seconds, place[0]
            env.car.hull.position = place
        np.testing.assert_array_equal(ours._render("state_pixels"), original._render("state_pixels"))


@pytest.mark.usefixtures("box2d")
def test_patience_cuts_an_episode_that_finds_no_new_tile_and_no_evaluation() -> None:
    settings = {"continuous": False, "patience": 12}
    environment = configured("car_racing", kwargs=settings)
    rows = [environment.reset(), *(environment.step(np.array([0])) for _ in range(20))]  # nothing is pressed: 2 frames
    last = next(i for i, row in enumerate(rows) if row.is_last[0])
    assert not rows[last].is_terminal[0] and 6 <= last <= 12, "12 frames after the tiles below the car"
    assert rows[last + 1].is_first[0] and not rows[last + 2].is_last[0], "it waits anew"
    assert compose("ppo_car_racing", [])["environment"]["eval_kwargs"] == {"patience": None}
    with pytest.raises(ConfigError, match="patience is 0: write a number of at least 1, or null"):
        configured("car_racing", kwargs={"patience": 0})


@pytest.mark.usefixtures("box2d")
def test_car_racing_is_configured_at_64_pixels() -> None:
    environment = configured("car_racing", render=True)
    spec = environment.spec
    assert spec.observation["image"].shape == (64, 64, 3) and spec.action.labels == ("steer", "gas", "brake")
    assert spec.frames_per_step == 2 and spec.max_episode_steps == 500 and spec.solved_return == 900
    rows = play(environment, steps=3, seed=0)
    assert rows[0].is_first[0] and not rows[3].is_last[0]
    frame = environment.render()
    assert frame is not None and frame.shape == (400, 600, 3)
    assert configured("car_racing", kwargs={"continuous": False}).spec.action.kind == "discrete"


@pytest.mark.usefixtures("box2d")
def test_skipped_frames_do_not_change_what_is_seen() -> None:
    repeated, single = (configured("car_racing", action_repeat=count, wrappers=[]) for count in (3, 1))
    np.testing.assert_array_equal(repeated.reset().observation["image"], single.reset().observation["image"])
    action = np.array([[0.2, 1.0, -1.0]], np.float32)
    for _ in range(3):
        row, singles = repeated.step(action), [single.step(action) for _ in range(3)]
        np.testing.assert_array_equal(row.observation["image"], singles[-1].observation["image"])
        assert row.reward[0] == pytest.approx(sum(one.reward[0] for one in singles), abs=1e-5)


@pytest.mark.usefixtures("box2d")
def test_car_racing_continues_bit_for_bit_by_replay() -> None:
    first, second = (configured("car_racing", time_limit=10) for _ in "ab")
    continues_identically(first, second, cut=7, steps=5)
    assert first.get_state()["cells"][0]["snapshot"]["mode"] == "replay"


# --- minigrid ----------------------------------------------------------------------------------


@pytest.fixture
def minigrid() -> None:
    pytest.importorskip("minigrid", reason="needs pip install 'rl-lab[minigrid]'")


def view(env_id: str = GRID, **settings: Any) -> Any:
    return make_environment(id=env_id, vectorization="sync", wrappers=[{"id": "minigrid_view", **settings}])


@pytest.mark.usefixtures("minigrid")
def test_the_image_is_what_minigrid_draws_from_the_agents_place() -> None:
    for env_id in (GRID, "MiniGrid-KeyCorridorS3R3-v0", "MiniGrid-Dynamic-Obstacles-8x8-v0"):
        environment = view(env_id)
        row = play(environment, steps=60, seed=0)[-1]
        base = environment.cells[0].env.unwrapped
        expected = np.zeros((64, 64, 3), np.uint8)
        expected[:63, :63] = base.get_frame(tile_size=9, agent_pov=True)
        np.testing.assert_array_equal(row.observation["image"][0], expected)
        assert row.observation["direction"][0] == base.agent_dir


@pytest.mark.usefixtures("minigrid")
def test_the_full_view_shows_the_whole_grid_centred() -> None:
    environment = view(view="full")
    image = environment.reset().observation["image"][0]
    frame = environment.cells[0].env.unwrapped.get_frame(tile_size=12)  # 5 tiles of 12 pixels, 2 left on each side
    np.testing.assert_array_equal(image[2:62, 2:62], frame)
    assert not image[:2].any() and not image[:, 62:].any()


@pytest.mark.usefixtures("minigrid")
@pytest.mark.parametrize(("which", "tiles"), [("partial", 49), ("full", 25)])
def test_symbols_are_one_hot_per_tile(which: str, tiles: int) -> None:
    environment = view(kind="symbolic", view=which)
    rows = environment.reset().observation
    symbols = rows["vector"][0].reshape(tiles, 11 + 6 + 4)
    for part in np.split(symbols, [11, 17], axis=1):
        np.testing.assert_array_equal(part.sum(axis=1), 1)
    if which == "full":
        assert symbols[:, 10].sum() == 1  # one agent, which is object 10
        assert symbols[symbols[:, 10] == 1, 17:].argmax() == rows["direction"][0]


@pytest.mark.usefixtures("minigrid")
def test_minigrid_configs_build_and_tell_their_time_limit() -> None:
    assert configured("minigrid/doorkey_5x5").spec.observation["image"].shape == (64, 64, 3)
    assert configured("minigrid/doorkey_5x5").spec.max_episode_steps == 250
    files = sorted((PACKAGE_CONFIGS / "environment" / "minigrid").glob("*.yaml"))
    assert len(files) > 20
    for file in files:
        content = yaml.safe_load(file.read_text())
        assert gym.make(content["id"]).unwrapped.max_steps == content["spec"]["max_episode_steps"], file.stem


@pytest.mark.usefixtures("minigrid")
def test_minigrid_continues_bit_for_bit() -> None:
    for settings in ({}, {"kind": "symbolic"}):
        continues_identically(view(**settings), view(**settings), cut=9, steps=20)


@pytest.mark.usefixtures("minigrid")
def test_the_checker_only_mentions_the_replay() -> None:
    from rl_lab.environments.suites.minigrid import MiniGridView

    findings = check_environment(lambda: MiniGridView(gym.make(GRID)), steps=300)
    assert [finding.level for finding in findings] == ["warning"] and "replay" in findings[0].what


@pytest.mark.usefixtures("minigrid")
@pytest.mark.parametrize(
    ("env_id", "settings", "message"),
    [
        (GRID, {"kind": "picture"}, "kind is 'picture'. .*Allowed: image, symbolic"),
        (GRID, {"view": "ful"}, "view is 'ful'. Did you mean 'full'"),
        (GRID, {"size": 0}, "size is 0, it must be a whole number"),
        ("MiniGrid-FourRooms-v0", {"view": "full"}, "19 x 19 tiles do not fit into 64 pixels.* Write size: 76 or"),
        ("CartPole-v1", {}, "needs a MiniGrid environment, this is CartPoleEnv"),
    ],
)
def test_wrong_views_are_refused(env_id: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        view(env_id, **settings)
