"""Between the simulator and the buffer a pixel is copied once: into the row that the buffer is handed."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_lab.collection.collector import Collector
from rl_lab.environments import make_environment
from rl_lab.environments.actions import ActionConverter, in_range
from rl_lab.environments.spaces import contiguous_copy
from rl_lab.types import Batch, Phase, PolicyStep
from rl_lab.utils.timing import Stopwatch

SIDE = 512
IMAGE_BYTES = SIDE * SIDE * 3


class Still(gym.Env):
    """Shows an image that it drew before: what is allocated in a step is ours."""

    observation_space = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.images = [np.full((SIDE, SIDE, 3), shade, np.uint8) for shade in (50, 200)]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self.images[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.images[int(action)], 0.0, False, False, {}


class Kept:
    """A buffer that keeps what it is handed."""

    def __init__(self) -> None:
        self.rows: list[Batch] = []

    def add(self, row: Batch) -> None:
        self.rows.append(row)

    def set_pending(self, row: Batch) -> None:
        self.rows.append(row)


def test_a_row_of_images_is_the_only_memory_that_collecting_takes() -> None:
    gym.registry.pop("copies_test/Still-v0", None)
    gym.register("copies_test/Still-v0", entry_point=Still)
    environment = make_environment(id="copies_test/Still-v0", num_envs=2, vectorization="sync")
    buffer = Kept()
    collector = Collector(environment, {"rollout": buffer}, device=torch.device("cpu"), stopwatch=Stopwatch())

    def act(time_step: Any, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.ones(2, dtype=torch.int64))

    phase = Phase("train", collect_steps=3)
    collector.collect(act, phase=phase)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    collector.collect(act, phase=phase)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    rows = 3 * 2 * IMAGE_BYTES  # three steps of two environments
    assert rows <= peak < rows + IMAGE_BYTES // 2
    kept = buffer.rows[-1]["image"]
    assert kept.data_ptr() == environment._rows.observation["image"].ctypes.data  # type: ignore[attr-defined]
    assert int(kept.min()) == int(kept.max()) == 200


def test_pixels_of_dm_control_come_as_they_were_read() -> None:
    pytest.importorskip("dm_control")
    environment = make_environment(
        id="dmc/cartpole_balance", kwargs={"observation": "pixels"}, vectorization="sync", num_envs=1
    )
    try:
        environment.reset()
    except RuntimeError as error:
        pytest.skip(f"no OpenGL here: {error}")
    env = environment.cells[0].env.unwrapped  # type: ignore[attr-defined]
    first = env.observe()
    assert first.base is not None and first.flags.owndata is False  # a view of what OpenGL wrote
    assert not np.shares_memory(first, env.observe())  # which no later frame overwrites


@pytest.mark.parametrize("shape", [(3, 5, 6, 4), (3, 5, 6, 40), (2, 7)])
def test_a_copy_in_c_order_equals_its_source(shape: tuple[int, ...]) -> None:
    source = np.moveaxis(np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8), 1, -1)
    copy = contiguous_copy(source, "uint8")
    np.testing.assert_array_equal(copy, source)
    assert copy.flags.c_contiguous and not np.shares_memory(copy, source)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 0.5), (0.0, np.inf)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_have_the_bits_of_the_plain_formula(low: float, high: float, dtype: Any) -> None:
    space = spaces.Box(low, high, (6,), dtype)
    converter = ActionConverter(space, env_id="x")
    action = np.random.default_rng(0).normal(0, 1.5, (40, 6)).astype(np.float32)
    action[0] = [-0.0, 0.0, -1.0, 1.0, np.nan, 1e-30]
    plain = in_range(action.astype(np.float64), **converter.range).astype(dtype)
    assert converter.batch(action).tobytes() == plain.tobytes()
    assert converter.batch(action).dtype == dtype


@pytest.mark.parametrize(("observation", "stack"), [("grey", 4), ("grey", 1), ("rgb", 1), ("rgb", 2)])
def test_pixels_of_ales_threads_are_copied_once_into_rows_of_their_own(observation: str, stack: int) -> None:
    pytest.importorskip("ale_py")
    kwargs = {"observation": observation, "stack": stack, "size": 128}
    environment = make_environment(id="atari/pong", num_envs=2, vectorization="native", kwargs=kwargs)
    environment.reset()
    action = np.zeros(2, np.int64)
    first = environment.step(action).observation["image"]
    as_seen = first.copy()
    tracemalloc.start()
    second = environment.step(action).observation["image"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert second.flags.c_contiguous and second.nbytes <= peak < second.nbytes * 3 // 2
    assert not np.shares_memory(first, second) and np.array_equal(first, as_seen)
    environment.close()
