"""What every suite must do, one case each: rows as promised, the same from the same seed, the same in worker processes,
exact continuation from a checkpoint, a picture, and processes that break."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_lab.environments import make_environment
from rl_lab.environments.rendering import prepare_headless
from rl_lab.types import EnvRows, EnvSpec
from rl_lab.utils import tree

from ..helpers import as_tree, play, random_actions
from ..test_snapshot import continues_identically
from . import faults_in_turn

prepare_headless()


@dataclass(frozen=True)
class Case:
    """One suite: what to build, what it needs, and how much of it is affordable."""

    name: str
    needs: str
    snapshot: str  # own, attributes, replay or native
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 200
    cut: int = 40
    is_async_slow: bool = False
    is_slow: bool = False  # altogether
    can_draw: bool = True
    timeout_s: float = 30.0  # of a worker process: it may compile first


SMALL = {"wrappers": [{"id": "resize", "height": 64, "width": 64}], "action_repeat": 2}
CASES = [
    Case("atari", "ale_py", "own", {"id": "atari/breakout", "kwargs": {"sticky_probability": 0.25, "stack": 2}}),
    Case("atari_ram", "ale_py", "own", {"id": "atari/pong", "kwargs": {"observation": "ram"}}, steps=60),
    Case(
        "dmc",
        "dm_control",
        "own",
        {"id": "dmc/cartpole_swingup", "kwargs": {"observation": "both", "size": 32}},
        60,
        is_async_slow=True,
    ),
    Case("mujoco", "mujoco", "replay", {"id": "HalfCheetah-v5"}, is_async_slow=True),
    Case("box2d", "Box2D", "replay", {"id": "LunarLander-v3"}, is_async_slow=True),
    Case("car_racing", "Box2D", "replay", {"id": "rl_lab/CarRacing-v3", **SMALL}, steps=30, cut=6, is_async_slow=True),
    Case("minigrid", "minigrid", "replay", {"id": "MiniGrid-DoorKey-5x5-v0", "wrappers": [{"id": "minigrid_view"}]}),
    Case("crafter", "crafter", "replay", {"id": "rl_lab/Crafter-v1"}, cut=20, is_async_slow=True),
    Case("vizdoom", "vizdoom", "replay", {"id": "vizdoom/take_cover"}, is_async_slow=True),
    Case("memory_maze", "memory_maze", "replay", {"id": "memory_maze/9x9"}, steps=20, cut=5, is_slow=True),
    Case("retro", "stable_retro", "replay", {"id": "rl_lab/Retro-v0"}, steps=100, cut=20, is_async_slow=True),
    Case("bsuite", "bsuite", "replay", {"id": "bsuite/catch"}, can_draw=False, is_async_slow=True),
    Case("popgym", "popgym", "replay", {"id": "popgym-RepeatPreviousEasy-v0"}, can_draw=False, is_async_slow=True),
    # Apart from the others, see `make test-apart`.
    Case("push_t", "gym_pusht", "replay", {"id": "gym_pusht/PushT-v0", "kwargs": {"obs_type": "state"}}, steps=60),
    Case("metaworld", "metaworld", "replay", {"id": "metaworld/reach-v3"}, steps=60),
    Case("brax", "brax", "own", {"id": "brax/inverted_pendulum"}, steps=60, is_slow=True, timeout_s=150.0),
]


def marked(cases: list[Case], *, are_processes_slow: bool = False) -> list[Any]:
    """Cases as parameters, the expensive ones only with -m slow and with time to compile beside other work."""
    slow = [pytest.mark.slow, pytest.mark.timeout(600)]
    is_slow = {case.name: case.is_slow or (are_processes_slow and case.is_async_slow) for case in cases}
    return [pytest.param(case, id=case.name, marks=slow * is_slow[case.name]) for case in cases]


def make(case: Case, **changes: Any) -> Any:
    if importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"needs the module {case.needs}")
    return make_environment(**{"vectorization": "sync", **case.settings, **changes})


def check_rows(rows: list[EnvRows], spec: EnvSpec, num_envs: int) -> None:
    """Row convention, shapes and dtypes of a run from its reset on."""
    assert rows[0].is_first.all()
    for before, row in zip([None, *rows], rows, strict=False):
        for key, array in spec.observation.items():
            values = row.observation[key]
            assert values.shape == (num_envs, *array.shape) and values.dtype == array.dtype, key
            assert values.dtype.kind != "f" or np.isfinite(values).all(), key
        assert row.reward.shape == (num_envs,) and row.reward.dtype == np.float32
        assert set(row.observation) == set(spec.observation) and set(row.outcome) == set(spec.outcomes)
        assert not (row.is_terminal & ~row.is_last).any()
        assert not row.reward[row.is_first].any()
        if before is not None:
            np.testing.assert_array_equal(row.is_first, before.is_last)


@pytest.mark.parametrize("case", marked(CASES))
def test_rows_are_as_promised_and_follow_from_the_seed(case: Case) -> None:
    three, one = make(case, num_envs=3), make(case, num_envs=1)
    rows = play(three, steps=case.steps, seed=0)
    check_rows(rows, three.spec, 3)
    alone = [one.reset()]
    generator = np.random.default_rng(0)
    for _ in range(case.steps // 2):
        alone.append(one.step(random_actions(three, generator)[:1]))
    check_rows(alone, one.spec, 1)
    first_of_three = [row.map(lambda values: values[:1]) for row in rows[: len(alone)]]
    assert tree.equal(as_tree(first_of_three), as_tree(alone)), "environment 0 depends on its neighbours, or on chance"
    assert any((row.observation[key] != rows[0].observation[key]).any() for row in rows for key in row.observation)
    assert [*three.drain_events(), *one.drain_events()] == []
    three.close(), one.close()


@pytest.mark.parametrize("case", marked(CASES, are_processes_slow=True))
def test_worker_processes_send_the_same_rows(case: Case) -> None:
    apart, here = make(case, num_envs=3, vectorization="async"), make(case, num_envs=3)
    steps = min(case.steps, 30)
    assert tree.equal(as_tree(play(apart, steps=steps, seed=1)), as_tree(play(here, steps=steps, seed=1)))
    apart.close(), here.close()


@pytest.mark.parametrize("case", marked(CASES))
def test_a_checkpoint_continues_bit_for_bit(case: Case) -> None:
    first, second = make(case), make(case)
    continues_identically(first, second, cut=case.cut, steps=min(case.steps, 80))
    assert first.get_state()["cells"][0]["snapshot"]["mode"] == case.snapshot
    first.close(), second.close()


@pytest.mark.parametrize("case", marked([case for case in CASES if case.can_draw]))
def test_there_is_something_to_see(case: Case) -> None:
    environment = make(case, render=True)
    play(environment, steps=5, seed=0)
    frame, events = environment.render(), environment.drain_events()
    environment.close()
    assert frame is not None and frame.dtype == np.uint8, events
    assert frame.std() > 1, "the frame is blank"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", marked(CASES))
def test_a_worker_that_dies_hangs_or_leaks_is_noticed_replaced_and_counted(case: Case, tmp_path: Path) -> None:
    """exit, kill -9 and a hang end the episode without a terminal; a leak ends nothing."""
    wrappers = [*case.settings.get("wrappers", []), {"id": "test_faults_in_turn", "folder": str(tmp_path)}]
    limits = {"worker_timeout_s": case.timeout_s, "max_restarts": 3}
    limits["worker_growth_mib"] = 0.75 * faults_in_turn.LEAK_MIB  # Brax compiles its step into 107 MiB
    changes = {"vectorization": "async", "prefetch_resets": False, "wrappers": wrappers}
    environment = make(case, **changes, **limits)
    play(environment, steps=3, seed=0)
    silence = f"did not answer for {case.timeout_s:g} s"
    reasons = {"exit": "exit code 3", "kill": "exit code -9", "hang": silence, "leak": "grew by"}
    for count, (fault, reason) in enumerate(reasons.items(), start=1):
        (tmp_path / fault).touch()
        row, events = step_until_an_event(environment)
        assert reason in events[0] and f"(restart {count})" in events[0]
        assert (row.is_last[0], row.is_terminal[0]) == (fault != "leak", False)
        if fault != "leak":
            assert step_until_an_event(environment, limit=1)[0].is_first[0]
            environment.step(np.zeros((1, *environment.spec.action.shape), environment.spec.action.dtype))
    environment.close()


def step_until_an_event(environment: Any, limit: int = 100) -> tuple[EnvRows, list[str]]:
    action = np.zeros((1, *environment.spec.action.shape), environment.spec.action.dtype)
    for _ in range(limit):
        row, events = environment.step(action), environment.drain_events()
        if events:
            break
        time.sleep(0.02)  # memory is looked at now and then
    return row, events
