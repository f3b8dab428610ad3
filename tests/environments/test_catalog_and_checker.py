"""What the list says, and what the checker tells an author."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments import catalog
from rl_lab.environments.catalog import describe_environment, list_environments
from rl_lab.environments.checker import Finding, check_environment
from rl_lab.environments.timing import Timing


def test_the_list_names_newest_versions_suites_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {info.id: info for info in list_environments()}
    assert "CartPole-v1" in found and "CartPole-v0" not in found
    assert "CartPole-v0" in {info.id for info in list_environments("cartpole", all_versions=True)}
    assert found["CartPole-v1"].has_native_vector and found["CartPole-v1"].solved_return == 475
    assert found["rl_lab/Corridor-v0"].suite == "toy" and found["rl_lab/Corridor-v0"].is_installed
    monkeypatch.setattr("rl_lab.environments.catalog._is_installed", lambda suite: False)
    (ant,) = list_environments("Ant-")
    assert not ant.is_installed and ant.install == "pip install 'rl-lab[mujoco]'"


def test_the_filter_matches_ids_and_suites_in_any_case() -> None:
    assert {info.id for info in list_environments("PENDULUM")} >= {"Pendulum-v1"}
    assert {info.suite for info in list_environments("toy_text")} == {"toy_text"}
    assert list_environments("no such thing") == []


def test_describe_gives_labels_thresholds_and_overrides() -> None:
    spec = describe_environment("CartPole-v1")
    assert spec.action.labels == ("push left", "push right") and spec.max_episode_steps == 500
    assert describe_environment("Taxi-v4").action.labels[4] == "pick up"
    assert describe_environment("Pendulum-v1").action.labels == ("torque",)


class Good(gym.Env):
    """Nothing to complain about; the others change one thing each."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), 1.0, self.steps >= 10, False, {}


class OldReset(Good):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class NoSeedArgument(Good):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class NoSuperReset(Good):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.observe(), {}


class Unseeded(Good):
    chance = np.random.default_rng()

    def observe(self) -> Any:
        return self.chance.uniform(-1, 1, 2).astype(np.float32)


class UnseededStep(Good):
    chance = np.random.default_rng()

    def step(self, action: Any) -> Any:
        return super().step(action)[0], float(self.chance.random()), False, self.steps >= 10, {}


class OldStep(Good):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class WrongShape(Good):
    def observe(self) -> Any:
        return np.zeros(3, np.float32)


class WrongDtype(Good):
    def observe(self) -> Any:
        return np.zeros(2, np.float64)


class OutOfBounds(Good):
    def observe(self) -> Any:
        return np.array([0.0, 5.0], np.float32)


class NotANumber(Good):
    def observe(self) -> Any:
        return np.array([0.0, np.nan], np.float32)


class ListObservation(Good):
    def observe(self) -> Any:
        return [0.0, 0.0]


class BadReward(Good):
    reward: Any = None

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.reward, terminated, truncated, info


class NanReward(BadReward):
    reward = float("nan")


class IntFlag(Good):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, int(terminated), truncated, None


class Endless(Good):
    def step(self, action: Any) -> Any:
        return self.observe(), 1.0, False, False, {}


class SharedBuffer(Good):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(2, np.float32)

    def observe(self) -> Any:
        self.buffer[:] = self.np_random.uniform(-1, 1, 2)
        return self.buffer


class Raises(Good):
    def step(self, action: Any) -> Any:
        raise KeyError("no such joint")


class Leaves(Good):
    def step(self, action: Any) -> Any:
        raise SystemExit(3)


class Engine(Good):
    def __init__(self) -> None:
        super().__init__()
        self.engine = iter([])


class OddSpace(Good):
    observation_space = spaces.Sequence(spaces.Discrete(2))  # type: ignore[assignment]


class NoSpace(Good):
    action_space = None  # type: ignore[assignment]


class UnboundedActions(Good):
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)  # type: ignore[assignment]


class Scored(Good):
    """Ends with an outcome; what it is called and holds is for the others to say."""

    outcomes: Any = ("success",)
    outcome: Any = None

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {} if self.outcome is None else {"outcome": self.outcome}


class MisspeltOutcome(Scored):
    outcome = {"success": 1.0, "sucess": 1.0}


class OutcomeOfWords(Scored):
    outcome = {"success": "yes"}


class OutcomeAlone(Scored):
    outcome = 1.0


class OutcomesText(Scored):
    outcomes = "success"


class ChannelsFirst(Good):
    observation_space = spaces.Box(0, 255, (3, 8, 8), np.uint8)  # type: ignore[assignment]

    def observe(self) -> Any:
        return self.np_random.integers(256, size=self.observation_space.shape, dtype=np.uint8)


class FloatImage(Good):
    observation_space = spaces.Box(0.0, 1.0, (8, 8, 3), np.float32)

    def observe(self) -> Any:
        return self.np_random.random((8, 8, 3), np.float32)


class NothingAllowed(Good):
    observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(2)})  # type: ignore[assignment]

    def observe(self) -> Any:
        return {"action_mask": np.zeros(2, np.int8)}


class StuckDoor(Good):
    def close(self) -> None:
        raise RuntimeError("stuck door")


class WrongKeys(Good):
    observation_space = spaces.Dict({"a": spaces.Discrete(2)})  # type: ignore[assignment]

    def observe(self) -> Any:
        return {"b": 1}


@pytest.mark.parametrize(
    ("cls", "level", "what", "cure"),
    [
        (OldReset, "error", "reset returned one ndarray, not (observation, info)", "return observation, {}"),
        (NoSeedArgument, "error", "reset(seed=...) raised TypeError", "def reset(self, *, seed=None"),
        (NoSuperReset, "error", "does not seed self.np_random", "super().reset(seed=seed)"),
        (Unseeded, "error", "reset(seed=7) gave two different observations", "self.np_random"),
        (UnseededStep, "error", "the same seed and actions led to different steps", "self.np_random"),
        (OldStep, "error", "step returned four values: that is the old Gym interface", "five values"),
        (WrongShape, "error", "outside observation_space: shape (3,) instead of (2,)", "Fix"),
        (WrongDtype, "error", "dtype float64 instead of float32", "Fix"),
        (OutOfBounds, "error", "element (1,) is 5.0, bounds -1.0 to 1.0", "Fix"),
        (NotANumber, "error", "it holds NaN", "Fix"),
        (ListObservation, "error", "a list instead of a numpy array", "Fix"),
        (BadReward, "error", "reward is a NoneType, not a number", "float(reward)"),
        (NanReward, "error", "reward is nan", "overflow"),
        (IntFlag, "error", "terminated is 0 (int), not a boolean", "bool(terminated)"),
        (IntFlag, "error", "info is a NoneType, not a dict", "Return {}"),
        (Endless, "warning", "no episode ended within 200 random steps", "max_episode_steps"),
        (SharedBuffer, "error", "an observation returned earlier was changed", "copy"),
        (Raises, "error", "raised KeyError: 'no such joint'", "every action"),
        (Leaves, "error", "raised SystemExit: 3", "every action"),
        (Engine, "warning", "exact resume will replay the episode's actions, because", "get_state()"),
        (OddSpace, "error", "is a Sequence space", "known spaces"),
        (NoSpace, "error", "action_space is missing", "self.action_space"),
        (UnboundedActions, "warning", "has no finite bounds", "bounds"),
        (Scored, "warning", "20 episodes ended, none with the outcome 'success'", "info = {'outcome'"),
        (MisspeltOutcome, "error", "has 'sucess', but outcomes names only success", "info = {'outcome'"),
        (OutcomeOfWords, "error", "the outcome 'success' is 'yes', not a number", "info = {'outcome'"),
        (OutcomeAlone, "error", "info['outcome'] is 1.0, not a dict", "info = {'outcome'"),
        (OutcomesText, "error", "write self.outcomes = ('success',)", "tuple"),
        (ChannelsFirst, "warning", "seems to have its channels first", "np.moveaxis"),
        (FloatImage, "warning", "becomes one long vector, no image", "np.uint8"),
        (NothingAllowed, "error", "the action mask allows no action", "at least"),
        (StuckDoor, "warning", "raised RuntimeError: stuck door in close()", "Close"),
        (WrongKeys, "error", "keys ['b'] instead of ['a']", "Fix"),
    ],
)
def test_each_mistake_is_found_and_its_cure_told(cls: type[gym.Env], level: str, what: str, cure: str) -> None:
    findings = check_environment(cls)
    found = [finding for finding in findings if what in finding.what]
    assert len(found) == 1, findings
    assert found[0].level == level and cure in found[0].cure


def test_an_environment_that_counts_its_steps_itself_has_a_time_limit() -> None:
    class Limited(Endless):
        def __init__(self) -> None:
            super().__init__()
            self.max_agent_steps = 27_000

    assert check_environment(Limited) == []


def test_a_class_that_is_no_environment_and_one_that_cannot_be_built() -> None:
    assert "is no gymnasium.Env" in check_environment(dict)[0].what  # type: ignore[arg-type]
    (finding,) = check_environment(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    start = f"construction raised ZeroDivisionError: division by zero ({__file__}, line "
    assert finding.what.startswith(start) and finding.what.endswith(")")  # the file and line of the environment's own


@pytest.mark.parametrize(
    "name", "Corridor Recall PointMass MultiTarget MaskedChain PixelCatch PixelFollow Counter".split()
)
def test_our_own_toys_are_praised(name: str) -> None:
    assert check_environment(lambda: gym.make(f"rl_lab/{name}-v0")) == []


def test_a_good_environment_has_no_findings() -> None:
    assert check_environment(Good) == []
    assert Finding("error", "a", "b") == Finding("error", "a", "b")


def test_an_environment_made_by_a_partial_belongs_to_no_suite() -> None:
    import functools

    from rl_lab.environments.lookup import suite_of

    made = functools.partial(gym.make, "CartPole-v1")
    made.__module__ = None  # type: ignore[assignment]
    assert suite_of(gym.envs.registration.EnvSpec("mine-v0", entry_point=made)) is None


def test_looking_at_an_environment_says_how_it_runs_is_saved_and_looks() -> None:
    details = catalog.look_at_environment("CartPole-v1")
    assert details.vectorization.startswith("native where") and "ms per reset alone" in details.vectorization
    assert details.snapshot == "its attributes, which are plain data"
    assert details.frame is not None and details.frame.std() > 1 and details.spec.solved_return == 475.0
    blind = catalog.look_at_environment("rl_lab/Counter-v0")
    assert blind.frame is None and blind.why_no_frame.startswith("Rendering failed")
    assert blind.vectorization.startswith("sync for 8 environments on")


def test_suites_that_are_not_installed_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_is_installed", lambda suite: suite.name not in ("atari", "box2d"))
    missing = catalog.missing_suites()
    assert {each.suite: each.install for each in missing} == {
        "atari": "pip install 'rl-lab[atari]'",
        "box2d": "pip install 'rl-lab[box2d]'",
    }
    assert [each.suite for each in catalog.missing_suites("ale/")] == ["atari"]


def test_a_suite_that_lives_apart_is_not_proposed_for_this_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_is_installed", lambda suite: not suite.apart)
    missing = {each.suite: each.install for each in catalog.missing_suites()}
    assert set(missing) == {"push_t", "metaworld", "minecraft"}
    ours = "in a virtual environment of its own"  # PyPI's rl-lab is another project
    assert missing["push_t"].startswith(f"pip install -c constraints.txt -e . gym-pusht {ours}")
    assert missing["metaworld"].startswith(f"pip install -e . metaworld {ours}")
    assert catalog.how_to_install("gym_pusht/PushT-v0") == missing["push_t"]


def test_a_long_time_is_told_in_seconds() -> None:
    registered = gym.spec("rl_lab/Counter-v0")
    way = catalog._way(registered, Timing(step_s=9.25, reset_s=0.00621, episode_steps=100))
    assert way.endswith("(9.25 s per step, 6.21 ms per reset)")
