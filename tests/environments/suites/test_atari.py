"""Atari: ALE's pixels, lives, sticky actions, no-op starts, objects in memory; its vector environment with our rows."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_lab.config.files import PACKAGE_CONFIGS
from rl_lab.environments import make_environment
from rl_lab.environments.catalog import describe_environment, list_environments
from rl_lab.environments.suites import atari, atari_vector
from rl_lab.environments.suites.atari import GAMES_57, OTHER_GAMES
from rl_lab.environments.vector import NativeEnvironment
from rl_lab.types import ConfigError
from rl_lab.utils import tree

from ..helpers import as_tree, play
from ..test_snapshot import continues_identically

ale_py = pytest.importorskip("ale_py", reason="needs pip install 'rl-lab[atari]'")
BARE = {"noop_max": 0, "fire_reset": False}


def single(game: str, **settings: Any) -> Any:
    return gym.make(f"atari/{game}", **settings).unwrapped


def native(game: str, num_envs: int = 3, **kwargs: Any) -> Any:
    return make_environment(id=f"atari/{game}", num_envs=num_envs, vectorization="native", kwargs=kwargs)


def test_every_game_of_ale_is_listed() -> None:
    from ale_py import roms

    needs_two_players = {"combat", "maze_craze", "warlords"}  # nothing to play against
    assert {*GAMES_57, *OTHER_GAMES} | needs_two_players >= set(roms.get_all_rom_ids())
    listed = {info.id for info in list_environments("atari/")}
    assert listed == {f"atari/{game}" for game in (*GAMES_57, *OTHER_GAMES)}
    assert {file.stem for file in (PACKAGE_CONFIGS / "environment" / "atari").glob("*.yaml")} == set(GAMES_57)


def test_the_vector_environment_takes_the_arguments_of_one_game() -> None:
    assert atari.arguments_of_one({"game": "pong", "size": 16})["noop_max"] == 30
    with pytest.raises(TypeError, match="unexpected keyword argument 'sizes'"):
        atari.arguments_of_one({"game": "pong", "sizes": 16})


def test_the_spec_tells_labels_and_time() -> None:
    spec = describe_environment("atari/pong")
    assert spec.action.labels == ("noop", "fire", "right", "left", "right fire", "left fire")
    assert spec.frames_per_step == 4 and spec.max_episode_steps == 27_000 and spec.outcomes == ("game_score",)
    assert spec.observation["image"].shape == (84, 84, 4)
    assert describe_environment("ALE/Pong-v5").action.labels[2] == "right"


@pytest.mark.parametrize("observation", ["grey", "rgb"])
def test_pixels_and_rewards_are_those_of_ales_vector_environment(observation: str) -> None:
    ours, theirs = (
        single("breakout", observation=observation, **BARE),
        native("breakout", 1, observation=observation, **BARE),
    )
    image, _ = ours.reset(seed=0)
    np.testing.assert_array_equal(image, theirs.reset().observation["image"][0])
    for action in np.random.default_rng(0).integers(4, size=300).tolist():
        image, reward, terminated, _, _ = ours.step(action)
        row = theirs.step(np.array([action]))
        assert (reward, terminated) == (row.reward[0], row.is_terminal[0])
        if terminated:  # ALE shows the frame before the last one there
            break
        np.testing.assert_array_equal(image, row.observation["image"][0])
    assert terminated


def test_auto_takes_ales_vector_environment_where_it_shows_what_is_wanted() -> None:
    pixels, ram = (
        make_environment(id="atari/pong", num_envs=2, kwargs={"observation": kind}) for kind in ("grey", "ram")
    )
    assert isinstance(pixels, NativeEnvironment) and not isinstance(ram, NativeEnvironment)
    pixels.close(), ram.close()
    with pytest.raises(ConfigError, match="ALE's vector environment shows grey or rgb, not 'ram'"):
        native("pong", observation="ram")


@pytest.mark.parametrize("episodic_life", [False, True])
def test_the_vector_environment_continues_bit_for_bit(episodic_life: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atari_vector, "NEW_SEED_AFTER", 30)  # seeds are given while it plays
    settings = {"sticky_probability": 0.25, "episodic_life": episodic_life, "size": 32, "stack": 2}
    first, second = native("breakout", 2, **settings), native("breakout", 2, **settings)
    continues_identically(first, second, cut=230, steps=60)
    first.close(), second.close()


def play_lives(environment: Any, steps: int) -> tuple[list[Any], list[int]]:
    """Rows of play without actions, and the rows that are last."""
    rows = [environment.reset()] + [environment.step(np.zeros(environment.num_envs, np.int64)) for _ in range(steps)]
    return rows, [i for i, row in enumerate(rows) if row.is_last[0]]


@pytest.mark.parametrize("way", ["sync", "native"])
def test_a_lost_life_ends_the_episode_and_the_game_goes_on(way: str) -> None:
    settings = {"id": "atari/breakout", "vectorization": way}
    lives = make_environment(**settings, kwargs={"episodic_life": True, "noop_max": 0, "size": 16})
    rows, ends = play_lives(lives, 260)
    assert len(ends) >= 6 and all(rows[i].is_terminal[0] and rows[i + 1].is_first[0] for i in ends[:-1])
    scored = [i for i in ends if not np.isnan(rows[i].outcome["game_score"][0])]
    assert scored == ends[4::5], "five lives are one game"
    whole = make_environment(**settings, kwargs={"noop_max": 0, "size": 16})
    assert len(play_lives(whole, 120)[1]) == 0, "without FIRE nothing happens after the first life"
    lives.close(), whole.close()


@pytest.mark.parametrize("way", ["sync", "native"])
def test_clipped_rewards_leave_the_score_alone(way: str) -> None:
    settings = {"id": "atari/space_invaders", "vectorization": way}
    clipped = make_environment(**settings, kwargs={"clip_reward": True, "size": 16})
    plain = make_environment(**settings, kwargs={"size": 16})
    rows, raw = play(clipped, steps=800, seed=3), play(plain, steps=800, seed=3)
    np.testing.assert_array_equal([row.reward for row in rows], np.clip([row.reward for row in raw], -1, 1))
    end = next(i for i, row in enumerate(rows) if row.is_last[0])
    assert rows[end].outcome["game_score"][0] == sum(row.reward[0] for row in raw[: end + 1]) > 0
    assert np.isnan(rows[end - 1].outcome["game_score"][0])
    clipped.close(), plain.close()


def test_noop_starts_and_sticky_actions_follow_from_the_seed() -> None:
    env = single("pong", sticky_probability=0.5)
    frames = {seed: env.reset(seed=seed) and env._emulator.getEpisodeFrameNumber() for seed in range(8)}
    assert len(set(frames.values())) > 3 and max(frames.values()) <= 32
    assert frames[3] == (env.reset(seed=3) and env._emulator.getEpisodeFrameNumber())
    held = single("pong", sticky_probability=1.0, **BARE)
    held.reset(seed=0)
    images = [held.step(action)[0][..., -1] for action in (2, 3, 2, 3)]
    free = single("pong", **BARE)
    free.reset(seed=0)
    expected = [free.step(0)[0][..., -1] for _ in range(4)]
    np.testing.assert_array_equal(images, expected)  # the first action, doing nothing, is kept for ever


def test_a_game_is_cut_at_its_frame_limit() -> None:
    for way in ("sync", "native"):
        kwargs = {"max_frames": 100, "size": 16, "stack": 1, **BARE}
        environment = make_environment(id="atari/pong", vectorization=way, kwargs=kwargs)
        assert environment.spec.max_episode_steps == 25
        rows = play(environment, steps=30, seed=0)
        assert [i for i, row in enumerate(rows) if row.is_last[0]] == [25] and not rows[25].is_terminal[0]
        environment.close()


# --- objects -----------------------------------------------------------------------------------


def column_and_row(
    screen: np.ndarray, colour: tuple[int, int, int], rows: slice, columns: slice
) -> tuple[float, float]:
    """The middle of the pixels of one colour within a part of the screen, NaN without any."""
    ys, xs = np.nonzero((screen[rows, columns] == colour).all(axis=-1))
    return (float(np.mean(xs)), float(np.mean(ys))) if len(xs) else (np.nan, np.nan)


@pytest.mark.parametrize(
    ("game", "name", "axis", "colour", "rows", "columns"),
    [
        ("pong", "player_y", 1, (92, 186, 92), slice(34, 194), slice(0, 160)),
        ("pong", "enemy_y", 1, (213, 130, 74), slice(34, 194), slice(0, 80)),
        ("pong", "ball_x", 0, (236, 236, 236), slice(34, 193), slice(0, 160)),
        ("breakout", "player_x", 0, (200, 72, 72), slice(189, 193), slice(8, 152)),
        ("breakout", "ball_y", 1, (200, 72, 72), slice(94, 188), slice(8, 152)),
        ("freeway", "player_y", 1, (252, 252, 84), slice(0, 210), slice(40, 60)),
        ("boxing", "player_x", 0, (214, 214, 214), slice(36, 180), slice(30, 130)),
        ("space_invaders", "player_x", 0, (50, 132, 50), slice(180, 195), slice(0, 160)),
    ],
)
def test_objects_move_with_what_is_on_the_screen(
    game: str, name: str, axis: int, colour: tuple[int, int, int], rows: slice, columns: slice
) -> None:
    env = single(game, observation="objects", stack=1, max_pool=False)
    place = list(atari.object_table(game).names).index(name)
    env.reset(seed=0)
    generator = np.random.default_rng(1)
    read, seen = [], []
    for _ in range(60):
        action = int(generator.integers(env.action_space.n))
        for _ in range(5):
            vector, _, terminated, truncated, _ = env.step(action)
            read.append(vector[place])
            seen.append(column_and_row(env.render(), colour, rows, columns)[axis])
            if terminated or truncated:
                env.reset()
    is_there = ~np.isnan(seen) & (np.array(read) > 0)
    assert is_there.sum() > 30
    assert abs(np.corrcoef(np.array(read)[is_there], np.array(seen)[is_there])[0, 1]) > 0.9


@pytest.mark.parametrize("game", ["breakout", "space_invaders", "pong", "boxing"])
def test_lives_and_scores_in_memory_are_those_of_ale(game: str) -> None:
    env = single(game, observation="objects", stack=1)
    names = atari.object_table(game).names
    env.reset(seed=0)
    seen = set()
    for action in np.random.default_rng(0).integers(env.action_space.n, size=400).tolist():
        vector, _, terminated, _, info = env.step(action)
        read = dict(zip(names, (vector * 255).round().astype(int).tolist(), strict=True))
        if "lives" in read:
            values = (read["lives"], info["lives"])
        else:
            points = [
                int(f"{read[name]:x}") if game == "boxing" else read[name] for name in ("player_score", "enemy_score")
            ]
            values = (points[0] - points[1], env._score)
        seen.add(values)
        if terminated:
            break
    assert len(seen) > 2 and all(memory == told for memory, told in seen)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observation": "gray"}, "observation of 'atari/pitfall' is 'gray'. Did you mean 'grey'"),
        ({"observation": "objects"}, "nobody wrote down where this game keeps them. Games with a table: boxing, "),
        (
            {"sticky_probability": 2.0},
            "sticky_probability of 'atari/pitfall' is 2.0: write a number of between 0 and 1",
        ),
        ({"stack": 0}, "stack of 'atari/pitfall' is 0: write a number of at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(id="atari/pitfall", kwargs=settings)


def test_native_rows_follow_from_the_seed() -> None:
    first, second = native("pong", size=16), native("pong", size=16)
    rows = play(first, steps=60, seed=0)
    assert tree.equal(as_tree(rows), as_tree(play(second, steps=60, seed=0)))
    assert (rows[-1].observation["image"][0] != rows[-1].observation["image"][1]).any()
    first.close(), second.close()
