"""The environment of examples/push_t, on a table of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "push_t"


class Table(gym.Env):
    """gym-pusht's attributes; the pusher is where it was sent, the T stays, and every step is the goal."""

    action_space = gym.spaces.Box(0.0, 512.0, (2,), np.float32)
    observation_space = gym.spaces.Dict({})

    def __init__(self) -> None:
        self.goal_pose = np.array([256.0, 256.0, np.pi / 4])
        self.block = SimpleNamespace(position=(256.0, 384.0), angle=np.pi / 4 + np.pi)
        self.agent = SimpleNamespace(position=(256.0, 500.0), velocity=(51.2, 0.0))

    def seen(self) -> dict[str, np.ndarray]:
        return {"environment_state": np.full(16, 384.0), "agent_pos": np.array(self.agent.position)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return self.seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.agent.position = tuple(action)
        return self.seen(), 1.0, True, False, {}


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import parking_t

    yield parking_t
    del sys.modules["parking_t"]
    gym.registry.pop("ParkingT-v0", None)


def test_parking_goes_on_and_is_paid_for_what_comes_nearer(parking: Any) -> None:
    env = parking.ParkingT(Table(), shaping=10.0)
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    np.testing.assert_allclose(observation, [*[0.5] * 16, 0.0, 500.0 / 256.0 - 1.0, 0.1, 0.0], rtol=1e-6)
    assert env.potential == pytest.approx(-2.0 * 128.0 / 512.0 - 1.0 - 0.5 * 116.0 / 512.0)
    observation, reward, terminated, truncated, _ = env.step(np.array([0.0, -1.0]))
    assert not terminated and not truncated
    assert reward == pytest.approx(1.0 + 10.0 * 0.5 * 64.0 / 512.0)  # 64 pixels nearer to the T
    observation, _, _, _, _ = env.step(np.array([0.0, 1.0]))
    observation, _, _, _, _ = env.step(np.array([0.0, 1.0]))
    assert observation[17] == 1.0  # the table's edge


def test_without_shaping_the_reward_is_what_the_table_pays(parking: Any) -> None:
    env = parking.ParkingT(Table())
    env.reset()
    assert env.step(np.array([0.0, -1.0]))[1] == 1.0
