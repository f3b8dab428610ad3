"""Episodes that begin ahead of time: the same rows, sooner."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from rl_lab.environments import factory, make_environment, timing
from rl_lab.environments.async_environment import Limits
from rl_lab.environments.prefetch import PrefetchEnvironment
from rl_lab.environments.recipe import Recipe, blueprint
from rl_lab.environments.timing import Timing, begins_anew, is_worth_prefetching, measure, prefetch_depth
from rl_lab.environments.vector import SyncEnvironment
from rl_lab.types import ConfigError
from rl_lab.utils import tree

from .helpers import as_tree, play, random_actions

SLOW_RESET = {"id": "rl_lab/Faulty-v0", "kwargs": {"slow_reset_s": 0.2, "slow_s": 0.002, "length": 10}}


def make(num_envs: int = 2, *, depth: int = 1, env_id: str = "rl_lab/Recall-v0", **kwargs: Any) -> PrefetchEnvironment:
    recipe = Recipe(env_id, kwargs=kwargs)
    return PrefetchEnvironment(
        recipe,
        blueprint(recipe.build(), recipe),
        seeds=[factory.stream_seed(0, "train_environment", i) for i in range(num_envs)],
        depth=depth,
        limits=Limits(),
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("env_id", ["rl_lab/Recall-v0", "rl_lab/PixelCatch-v0"])
def test_rows_and_states_are_those_of_one_process(env_id: str, depth: int) -> None:
    sync, other = make_environment(id=env_id, num_envs=3, vectorization="sync"), make(3, depth=depth, env_id=env_id)
    assert tree.equal(as_tree(play(sync, steps=130, seed=0)), as_tree(play(other, steps=130, seed=0)))
    assert sync.drain_events() == other.drain_events() == []
    assert tree.equal(sync.get_state(), other.get_state())
    assert tree.equal(vars(sync.reset()), vars(other.reset()))
    other.close()


def test_a_saved_state_continues_in_every_way_of_running() -> None:
    """Saved in the middle of episodes and between them, loaded into fresh environments and into used ones."""
    settings = {"id": "rl_lab/Recall-v0", "num_envs": 2, "vectorization": "sync"}
    for steps in (7, 12, 13):
        sync, other = make_environment(**settings), make(2)
        play(other, steps=steps, seed=1)
        sync.set_state(other.get_state())
        used = make(2)
        play(used, steps=29, seed=2)
        used.set_state(sync.get_state())
        generator = np.random.default_rng(3)
        actions = [random_actions(sync, generator) for _ in range(60)]
        rows = [[vars(environment.step(action)) for action in actions] for environment in (sync, other, used)]
        assert tree.equal(rows[0], rows[1]) and tree.equal(rows[0], rows[2])
        other.close(), used.close()


def test_slow_resets_are_hidden_behind_the_episodes() -> None:
    """Five episodes of 0.3 s, each with a reset of 0.2 s: 2.5 s one after the other."""
    settings = {**SLOW_RESET, "kwargs": {"slow_reset_s": 0.2, "slow_s": 0.03, "length": 10}}
    environments = [
        make_environment(**settings, vectorization=way, prefetch_resets=ahead)
        for way, ahead in (("sync", False), ("async", True))
    ]
    seconds = []
    for environment in environments:
        environment.reset()
        start = time.perf_counter()
        for _ in range(55):
            environment.step(np.zeros(1, np.int64))
        seconds.append(time.perf_counter() - start)
        environment.close()
    assert seconds[0] > 2.4 and seconds[1] < 0.85 * seconds[0]


def test_a_slow_reset_is_measured_and_prefetched_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "available_cores", lambda: 2)
    environment = make_environment(**SLOW_RESET, num_envs=1)
    assert isinstance(environment, PrefetchEnvironment)
    environment.close()
    for settings in ({"prefetch_resets": False}, {"vectorization": "sync"}, {"num_envs": 1, "time_limit": 3}):
        environment = make_environment(**{**SLOW_RESET, "num_envs": 1, **settings})
        assert isinstance(environment, PrefetchEnvironment) == ("time_limit" in settings)
        environment.close()
    remembering = [{"id": "state_count_bonus"}]
    assert isinstance(make_environment(**SLOW_RESET, wrappers=remembering), SyncEnvironment)
    monkeypatch.setattr(factory, "available_cores", lambda: 1)
    assert isinstance(make_environment(**SLOW_RESET), SyncEnvironment)


def test_what_pays_is_calculated_from_steps_resets_and_cores() -> None:
    slow = Timing(step_s=0.002, reset_s=2.0, episode_steps=200)  # 83 % of the time in resets
    assert is_worth_prefetching(slow, num_envs=1, num_cores=2) and prefetch_depth(slow, 1, 2) == 2
    assert is_worth_prefetching(slow, num_envs=8, num_cores=2) and prefetch_depth(slow, 8, 2) == 1
    assert prefetch_depth(slow, 1, 16) == 5  # five episodes of 0.4 s pass while one resets
    assert not is_worth_prefetching(slow, num_envs=1, num_cores=1)
    assert not is_worth_prefetching(slow, num_envs=64, num_cores=2)  # 128 processes
    assert not is_worth_prefetching(Timing(0.008, 0.2, 1000), num_envs=8, num_cores=2)  # CarRacing: 2 %
    assert not is_worth_prefetching(Timing(1e-5, 1e-4, 200), num_envs=1, num_cores=2)


def test_a_reset_that_leaves_something_of_earlier_episodes_is_found() -> None:
    """Counter shows the number of the episode; CartPole begins anew."""
    for env_id, expected in (("rl_lab/Counter-v0", False), ("CartPole-v1", True)):
        recipe = Recipe(env_id)
        env = recipe.build()
        plan = blueprint(env, recipe)
        assert measure(env, plan).step_s > 0
        assert begins_anew(recipe, plan, env) == expected
    recipe = Recipe("rl_lab/Faulty-v0", kwargs={"raise_at": 2})
    env = recipe.build()
    assert not begins_anew(recipe, blueprint(env, recipe), env)


def test_a_failing_environment_counts_as_cheap() -> None:
    recipe = Recipe("rl_lab/Faulty-v0")
    env = recipe.build()
    env.reset = lambda **options: 1 / 0  # type: ignore[method-assign]
    assert measure(env, blueprint(env, recipe)) == Timing(0.0, 0.0, timing.USUAL_EPISODE_STEPS)


def test_processes_that_play_and_that_prepare_may_die() -> None:
    environment = make(2)
    rows = play(environment, steps=5, seed=0)
    spare = environment._spares[0][0].worker.process
    os.kill(spare.pid, signal.SIGKILL)
    spare.join(10)
    playing = environment._workers[1].process
    os.kill(playing.pid, signal.SIGKILL)
    playing.join(10)
    rows += [environment.step(np.zeros(2, np.int64)) for _ in range(60)]
    for before, row in itertools.pairwise(rows):
        np.testing.assert_array_equal(row.is_first, before.is_last)
    died = sorted(event.partition(";")[0] for event in environment.drain_events())
    assert died == [f"The process of environment {i} died with exit code -9" for i in range(2)]
    environment.close()


def test_a_reset_that_fails_ahead_of_time_is_counted_when_its_turn_comes() -> None:
    """The second reset of a process fails: that of its first episode as a player after it was a spare."""
    environment = make(1, env_id="rl_lab/Faulty-v0", raise_in_reset_at=2, length=3)
    rows = play(environment, steps=11, seed=0)
    assert [int(row.is_first[0]) for row in rows] == [1, 0, 0, 0] * 3
    assert environment.drain_events() == []  # tried again when its turn came, and it worked
    environment.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefetch_resets": "yes"}, "prefetch_resets is 'yes': write auto, true or false"),
        ({"prefetch_resets": True, "vectorization": "sync"}, "vectorization: sync has no processes .* async or auto"),
        ({"worker_growth_mib": 0}, "worker_growth_mib is 0: write a number of MiB above 0, or null"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(id="CartPole-v1", **settings)
