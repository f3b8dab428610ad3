"""Environments that raise, die, hang or answer NaN: the run goes on and says so, up to a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from rl_lab.environments import cell, make_environment, worker
from rl_lab.environments.async_environment import AsyncEnvironment, Limits
from rl_lab.environments.recipe import Recipe, blueprint
from rl_lab.environments.suites.toy import Faulty
from rl_lab.types import EnvironmentFault, EnvRows
from rl_lab.utils import tree
from rl_lab.utils.processes import ASKING

from .helpers import as_tree, play

FAULTY = "rl_lab/Faulty-v0"


def column(rows: list[EnvRows], name: str, env: int = 0) -> list[int]:
    return [int(getattr(row, name)[env]) for row in rows]


def make_async(
    num_envs: int,
    *,
    num_workers: int,
    max_restarts: int = 10,
    timeout_s: float = 60.0,
    growth_mib: float | None = 1024.0,
    **kwargs: Any,
) -> Any:
    recipe = Recipe(FAULTY, kwargs=kwargs)
    return AsyncEnvironment(
        recipe,
        blueprint(recipe.build(), recipe),
        seeds=list(range(num_envs)),
        limits=Limits(max_restarts, timeout_s, growth_mib),
        num_workers=num_workers,
    )


def test_an_exception_ends_the_episode_and_the_next_row_is_first() -> None:
    environment = make_environment(id=FAULTY, num_envs=2, vectorization="sync", kwargs={"raise_at": 3})
    rows = play(environment, steps=5, seed=0)
    assert column(rows, "is_first") == [1, 0, 0, 0, 1, 0]
    assert column(rows, "is_last") == [0, 0, 0, 1, 0, 0]
    assert column(rows, "is_terminal") == [0] * 6
    assert column(rows, "reward") == [0, 1, 1, 0, 0, 1]
    np.testing.assert_array_equal(rows[3].observation["vector"], rows[2].observation["vector"])
    events = environment.drain_events()
    assert len(events) == 2 and environment.drain_events() == []
    assert events[0] == (
        "Environment 0 raised RuntimeError: requested failure in step after 2 steps of its episode; "
        "it was restarted (restart 1)."
    )


def test_faults_are_the_same_in_workers() -> None:
    settings = {"id": FAULTY, "num_envs": 3, "kwargs": {"raise_at": 4, "raise_in_reset_at": 1}, "max_restarts": 100}
    settings["kwargs"] = {"raise_at": 4}
    sync, other = (make_environment(**settings, vectorization=way) for way in ("sync", "async"))
    expected, found = play(sync, steps=20, seed=0), play(other, steps=20, seed=0)
    assert tree.equal(as_tree(expected), as_tree(found))
    assert sorted(sync.drain_events()) == sorted(other.drain_events())
    other.close()


def test_a_failing_reset_is_tried_again_with_the_next_seed() -> None:
    environment = make_environment(
        id=FAULTY, vectorization="sync", kwargs={"raise_in_reset_at": 2, "length": 2}, max_restarts=3
    )
    rows = play(environment, steps=5, seed=0)
    assert column(rows, "is_first") == [1, 0, 0, 1, 0, 0]
    assert "requested failure of reset in reset after 2 steps" in environment.drain_events()[0]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_too_many_restarts_stop_the_run(vectorization: str) -> None:
    environment = make_environment(
        id=FAULTY, num_envs=2, vectorization=vectorization, kwargs={"raise_at": 2}, max_restarts=3
    )
    with pytest.raises(
        EnvironmentFault, match=r"max_restarts=3 times.*RuntimeError: requested failure.*rl-lab envs check"
    ):
        play(environment, steps=20, seed=0)
    environment.close()


def test_one_cell_alone_exceeds_the_limit_with_the_last_error() -> None:
    environment = make_environment(id=FAULTY, vectorization="sync", kwargs={"raise_in_reset_at": 1}, max_restarts=2)
    with pytest.raises(EnvironmentFault, match=r"max_restarts=2 times altogether. Environment 0 raised Run.* in reset"):
        environment.reset()


def test_health_renews_the_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at every tenth step; eight steps in a row that go well forgive a failure."""
    monkeypatch.setattr(cell, "HEALTHY_STEPS", 8)
    kwargs = {"raise_at": 10, "length": 1000}
    environment = make_environment(id=FAULTY, vectorization="sync", kwargs=kwargs, max_restarts=1)
    play(environment, steps=107, seed=0)
    assert environment.drain_events()[-1].endswith("it was restarted (restart 9).")
    state = environment.get_state()["cells"][0]
    assert (state["restarts"], state["recent_restarts"]) == (9, 0)
    monkeypatch.setattr(cell, "HEALTHY_STEPS", 10)
    with pytest.raises(EnvironmentFault, match="max_restarts=1 times"):
        play(environment, steps=30, seed=0)


def test_health_is_saved_and_a_resumed_run_may_allow_more_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "HEALTHY_STEPS", 8)
    settings: dict[str, Any] = {"id": FAULTY, "vectorization": "sync", "kwargs": {"raise_at": 5, "length": 1000}}
    first = make_environment(**settings, max_restarts=1)
    play(first, steps=8, seed=0)
    state = first.get_state()
    assert {key: state["cells"][0][key] for key in ("restarts", "recent_restarts", "healthy_steps")} == {
        "restarts": 1,
        "recent_restarts": 1,
        "healthy_steps": 2,
    }
    strict, patient = make_environment(**settings, max_restarts=1), make_environment(**settings, max_restarts=9)
    for environment in (strict, patient):
        environment.set_state(state)
    with pytest.raises(EnvironmentFault, match="max_restarts=1 times"):
        for _ in range(9):
            strict.step(np.zeros(1, np.int64))
    for _ in range(9):
        patient.step(np.zeros(1, np.int64))
    del state["cells"][0]["recent_restarts"], state["cells"][0]["healthy_steps"]  # as earlier versions saved it
    strict = make_environment(**settings, max_restarts=1)
    strict.set_state(state)
    assert strict.get_state()["cells"][0]["recent_restarts"] == 1


def test_nan_passes_through_untouched() -> None:
    environment = make_environment(id=FAULTY, vectorization="sync", kwargs={"nan_at": 2})
    rows = play(environment, steps=3, seed=0)
    assert np.isnan(rows[2].reward[0]) and np.isnan(rows[2].observation["vector"][0, 0])
    assert not np.isnan(rows[3].reward[0])
    assert environment.drain_events() == []


def test_a_dying_worker_is_replaced_and_its_environments_begin_anew() -> None:
    environment = make_async(3, num_workers=2, exit_at=4)
    rows = play(environment, steps=7, seed=0)
    for env in range(3):
        assert column(rows, "is_last", env) == [0, 0, 0, 0, 1, 0, 0, 0]
        assert column(rows, "is_first", env) == [1, 0, 0, 0, 0, 1, 0, 0]
        assert column(rows, "is_terminal", env) == [0] * 8
    np.testing.assert_array_equal(rows[4].observation["vector"], rows[3].observation["vector"])
    assert not np.array_equal(rows[5].observation["vector"], rows[0].observation["vector"])  # not the same episode
    events = environment.drain_events()
    assert events[0] == "The process of environments 0 to 1 died with exit code 3; it was restarted (restart 1)."
    assert events[1].startswith("The process of environment 2 died")
    environment.close()


def test_a_killed_worker_between_two_calls_keeps_the_row_convention() -> None:
    environment = make_async(2, num_workers=1, length=3)
    rows = play(environment, steps=3, seed=0)
    assert rows[-1].is_last.all()
    os.kill(environment._workers[0].process.pid, signal.SIGKILL)
    row = environment.step(np.zeros(2, np.int64))
    assert row.is_first.all() and not row.is_last.any()  # those episodes had ended already
    os.kill(environment._workers[0].process.pid, signal.SIGKILL)
    state = environment.get_state()  # survives as well
    ended = environment.step(np.zeros(2, np.int64))
    assert ended.is_last.all() and not ended.is_terminal.any()
    environment.set_state(state)
    assert environment.step(np.zeros(2, np.int64)).is_last.all()
    assert len(environment.drain_events()) == 2
    environment.close()


def test_a_hanging_worker_is_replaced() -> None:
    environment = make_async(1, num_workers=1, timeout_s=1.0, hang_at=2)
    rows = play(environment, steps=3, seed=0)
    assert column(rows, "is_last") == [0, 0, 1, 0]
    assert "did not answer for 1 s" in environment.drain_events()[0]
    environment.close()


def test_a_worker_that_keeps_memory_is_replaced_in_mid_episode_and_no_row_tells() -> None:
    """16 MiB per step, 64 allowed: every row is that of an environment that leaks nothing, and no episode is cut."""
    settings: dict[str, Any] = {"num_workers": 1, "max_restarts": 0, "length": 1000}
    plain = make_async(2, **settings)
    leaking = make_async(2, **settings, slow_s=0.02, growth_mib=64.0, leak_mib=8)
    expected, found = play(plain, steps=30, seed=0), play(leaking, steps=30, seed=0)
    assert tree.equal(as_tree(expected), as_tree(found))
    events = leaking.drain_events()
    assert 1 <= len(events) <= 6
    assert "The process of environments 0 to 1 grew by" in events[0] and events[0].endswith("stood (restart 1).")
    assert plain.drain_events() == []
    assert leaking.get_state()["cells"][0]["recent_restarts"] == 0
    plain.close(), leaking.close()


def resident(mib: int) -> SimpleNamespace:
    return SimpleNamespace(rss=mib * worker.MIB)


def test_memory_of_the_first_episode_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker's successor first ends the lost episode, then loads its world."""
    monkeypatch.setattr(worker, "MEMORY_CHECK_S", 0.0)
    watch, resident_mib = worker.MemoryWatch(), iter([1100, 1164])
    monkeypatch.setattr(watch, "_process", SimpleNamespace(memory_info=lambda: resident(next(resident_mib))))
    assert watch.growth_mib(is_playing=False) == 0
    assert watch.growth_mib(is_playing=True) == 0
    assert watch.growth_mib(is_playing=True) == 64
    environment = make_environment(id=FAULTY, num_envs=2, vectorization="sync")
    assert [one.has_begun for one in environment.cells] == [False, False]
    environment.reset()
    assert [one.has_begun for one in environment.cells] == [True, True]


def test_workers_that_live_long_enough_may_die_again() -> None:
    environment = make_async(2, num_workers=2, max_restarts=2, exit_at=1100, length=500)
    rows = [environment.reset()] + [environment.step(np.zeros(2, np.int64)) for _ in range(3500)]
    assert environment.drain_events()[-1].endswith("(restart 6).")
    starts = [row.observation["vector"][0, 0] for row in rows if row.is_first[0]]
    assert len(set(starts)) == len(starts), "no episode is played again"
    environment.close()


def test_workers_that_keep_dying_stop_the_run() -> None:
    environment = make_async(1, num_workers=1, max_restarts=1, exit_at=1)
    with pytest.raises(EnvironmentFault, match=r"max_restarts=1 times altogether\. The process of environment 0 died"):
        play(environment, steps=20, seed=0)
    environment.close()
    environment.close()  # twice is fine


SIGNALS_FOR_ALL = """
import numpy as np
import psutil
from rl_lab.environments import make_environment
from rl_lab.utils.processes import ASKING

environment = make_environment(id="rl_lab/Faulty-v0", vectorization="async")
environment.reset()
helpers = psutil.Process().children(recursive=True)
for helper in helpers:
    for number in ASKING:
        helper.send_signal(number)
print(len(helpers), psutil.wait_procs(helpers, timeout=1.0)[0])
environment.step(np.zeros(1, np.int64))
print(environment.drain_events())
environment.close()
"""


def test_signals_end_none_of_the_processes_that_a_fresh_interpreter_starts() -> None:
    """The worker, the fork server and multiprocessing's resource tracker."""
    done = subprocess.run([sys.executable, "-c", SIGNALS_FOR_ALL], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["3 []", "[]"], done.stderr


@pytest.mark.parametrize("number", ASKING, ids=lambda number: number.name)
def test_workers_ignore_signals_that_reach_the_whole_group(number: signal.Signals) -> None:
    environment = make_async(1, num_workers=1)
    environment.reset()
    helpers = [child.pid for child in psutil.Process().children(recursive=True)]  # the worker and the fork server
    assert environment._workers[0].process.pid in helpers
    for pid in helpers:
        os.kill(pid, number)
    environment.step(np.zeros(1, np.int64))
    assert environment.drain_events() == []
    environment.close()


ORPHANS = """
    import os, sys, time
    import numpy as np
    from rl_lab.environments import cell, make_environment, worker
    environment = make_environment(id="rl_lab/Faulty-v0", num_envs=2, vectorization="async", kwargs={"hang_at": 1})
    environment.reset()
    print(*[worker.process.pid for worker in environment._workers], flush=True)
    if sys.argv[1] == "killed":
        environment.step(np.zeros(2, np.int64))  # hangs in the workers
"""


@pytest.mark.parametrize("ending", ["killed", "forgot to close"])
def test_no_worker_outlives_the_parent(ending: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORPHANS), ending],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) >= 1
    if ending == "killed":
        parent.kill()
    parent.wait(30)
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def fail(action: np.ndarray) -> None:
    raise AssertionError("told to fail")


class TestNativeFaults:
    def test_a_failing_vector_environment_is_restarted(self) -> None:
        environment: Any = make_environment(id="CartPole-v1", num_envs=2, vectorization="native")
        rows = [environment.reset(), environment.step(np.zeros(2, np.int64))]
        environment._env.step = fail
        rows.append(environment.step(np.zeros(2, np.int64)))
        rows.append(environment.step(np.zeros(2, np.int64)))
        assert column(rows, "is_last") == [0, 0, 1, 0]
        assert column(rows, "is_first") == [1, 0, 0, 1]
        assert column(rows, "is_terminal") == [0] * 4
        assert "The vector environment raised AssertionError" in environment.drain_events()[0]

    def test_health_renews_the_restarts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cell, "HEALTHY_STEPS", 3)
        environment: Any = make_environment(id="CartPole-v1", num_envs=2, vectorization="native", max_restarts=1)
        environment.reset()
        for _ in range(4):
            environment._env.step = fail
            for _ in range(5):
                environment.step(np.zeros(2, np.int64))
        state = environment.get_state()
        assert (state["restarts"], state["recent_restarts"]) == (4, 0)

    def test_too_many_restarts_stop_the_run(self) -> None:
        environment: Any = make_environment(id="CartPole-v1", num_envs=2, vectorization="native", max_restarts=0)
        environment.reset()
        environment._env.step = fail
        with pytest.raises(EnvironmentFault, match="max_restarts=0 times altogether. The vector environment raised"):
            environment.step(np.zeros(2, np.int64))


class StuckDoor(Faulty):
    def close(self) -> None:
        raise RuntimeError("stuck door")


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_an_environment_that_cannot_even_close_ends_nothing(vectorization: str) -> None:
    class Several(StuckDoor, gym.vector.VectorEnv):  # type: ignore[misc]
        metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # type: ignore[assignment]

        def __init__(self, num_envs: int) -> None:
            one = Faulty()
            self.num_envs = num_envs
            self.single_observation_space, self.single_action_space = one.observation_space, one.action_space
            self.action_space = gym.vector.utils.batch_space(one.action_space, num_envs)

    gym.registry.pop("faults_test/StuckDoor-v0", None)
    vector = Several if vectorization == "native" else None
    gym.register("faults_test/StuckDoor-v0", entry_point=f"{__name__}:StuckDoor", vector_entry_point=vector)
    environment = make_environment(id="faults_test/StuckDoor-v0", num_envs=2, vectorization=vectorization)
    environment.close()
    assert "raised RuntimeError: stuck door while closing." in environment.drain_events()[0]


def test_an_environment_that_cannot_be_built_again_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: Any = make_environment(id=FAULTY, vectorization="sync", kwargs={"raise_at": 1})
    environment.reset()
    monkeypatch.setattr(environment.cells[0], "build", lambda: 1 / 0)
    with pytest.raises(EnvironmentFault, match="environment 0 could not be built again: ZeroDivisionError"):
        environment.step(np.zeros(1, np.int64))


class OddReward(Faulty):
    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, "much", *others


def test_a_bad_reward_repeats_the_whole_observation_in_every_mode() -> None:
    gym.registry.pop("faults_test/OddReward-v0", None)
    gym.register("faults_test/OddReward-v0", entry_point=f"{__name__}:OddReward")
    wrong: dict[str, Any] = {"id": "faults_test/OddReward-v0", "num_envs": 2}
    sync, other = (make_environment(**wrong, vectorization=way, max_restarts=50) for way in ("sync", "async"))
    expected, found = play(sync, steps=4, seed=0), play(other, steps=4, seed=0)
    assert tree.equal(as_tree(expected), as_tree(found))
    np.testing.assert_array_equal(found[1].observation["vector"], found[0].observation["vector"])
    other.close()


def test_after_a_fault_the_other_workers_can_still_be_asked() -> None:
    environment = make_async(2, num_workers=2, max_restarts=0, raise_at=2)
    environment.reset()
    environment.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match="requested failure"):
        environment.step(np.zeros(2, np.int64))
    assert len(environment.get_state()["cells"]) == 2  # not an old answer
    environment.close()


class WithAnEngine(Faulty):
    """Like VizDoom, it starts a process of its own, which inherits what it is given and outlives its parent."""

    def __init__(self, pid_file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.pid_file = pid_file

    def step(self, action: Any) -> Any:
        if not Path(self.pid_file).exists():
            engine = subprocess.Popen(["sleep", "60"], close_fds=False)
            Path(self.pid_file).write_text(str(engine.pid))
        return super().step(action)


def test_the_death_of_a_worker_is_noticed_at_once_and_takes_its_own_processes_along(tmp_path: Path) -> None:
    gym.registry.pop("faults_test/Engine-v0", None)
    gym.register("faults_test/Engine-v0", entry_point="tests.environments.test_faults:WithAnEngine")
    pid_file = tmp_path / "engine"
    environment = make_environment(
        id="faults_test/Engine-v0",
        kwargs={"pid_file": str(pid_file), "exit_at": 3},
        vectorization="async",
        prefetch_resets=False,
        worker_timeout_s=50.0,
    )
    begin = time.monotonic()
    play(environment, steps=4, seed=0)
    assert time.monotonic() - begin < 40
    assert "died with exit code" in environment.drain_events()[0]
    engine = int(pid_file.read_text())
    assert not psutil.pid_exists(engine) or psutil.Process(engine).status() == psutil.STATUS_ZOMBIE
    environment.close()
