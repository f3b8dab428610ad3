"""Toy environments with a picture: rendered with numpy alone, learnt in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.toy import Result, Toy

WHITE, DARK, GREEN, RED = (255, 255, 255), (40, 40, 60), (60, 160, 80), (200, 60, 60)


def canvas(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), WHITE, np.uint8)


class Drawn(Toy):
    """Base of environments that can be drawn as RGB arrays."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        return self._draw() if self.render_mode == "rgb_array" else None

    def _draw(self) -> np.ndarray:
        raise NotImplementedError


class Corridor(Drawn):
    """Start in the middle, leave on the right: +1 there, 0 on the left, -0.01 per step on the way"""

    def __init__(self, length: int = 7, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.place = length, length // 2

    def _observe(self) -> np.ndarray:
        observation = np.zeros(self.length, np.float32)
        observation[self.place] = 1.0
        return observation

    def _begin(self) -> None:
        self.place = self.length // 2

    def step(self, action: Any) -> Result:
        self.place += 1 if int(action) == 1 else -1
        is_right, is_left = self.place == self.length - 1, self.place == 0
        reward = 1.0 if is_right else 0.0 if is_left else -0.01
        return self._observe(), reward, is_right or is_left, False, {}

    def _draw(self) -> np.ndarray:
        frame = canvas(16, 16 * self.length)
        frame[:, :16], frame[:, -16:] = RED, GREEN
        frame[4:12, 16 * self.place + 4 : 16 * self.place + 12] = DARK
        return frame


class Maze(Drawn):
    """A winding corridor in a grid: +1 at its end, 0 on the way. Four actions; row and column are seen

    rows of 5:   start . . . .      chance alone gets about as far as the square root of its steps, so the time limit
                 # # # # .          ends nearly every episode of a random policy before the goal
                 . . . . .
                 . # # # #
                 . . . . goal
    """

    moves = ((-1, 0), (0, 1), (1, 0), (0, -1))

    def __init__(self, size: int = 5, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        if size < 3 or size % 4 != 1:
            raise ValueError(f"Maze size is {size}: write 5, 9, 13, ..., so that the corridor ends in the last corner.")
        self.is_wall = np.zeros((size, size), bool)
        self.is_wall[1::4, :-1], self.is_wall[3::4, 1:] = True, True
        self.observation_space = spaces.Box(0.0, 1.0, (2 * size,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.size, self.row, self.column = size, 0, 0

    def _observe(self) -> np.ndarray:
        observation = np.zeros(2 * self.size, np.float32)
        observation[[self.row, self.size + self.column]] = 1.0
        return observation

    def _begin(self) -> None:
        self.row = self.column = 0

    def step(self, action: Any) -> Result:
        down, right = self.moves[int(action)]
        row, column = (int(np.clip(place, 0, self.size - 1)) for place in (self.row + down, self.column + right))
        if not self.is_wall[row, column]:
            self.row, self.column = row, column
        is_there = self.row == self.column == self.size - 1
        return self._observe(), float(is_there), is_there, False, {}

    def _draw(self) -> np.ndarray:
        frame = canvas(16 * self.size, 16 * self.size)
        frame[np.kron(self.is_wall, np.ones((16, 16))) > 0] = DARK
        frame[-16:, -16:] = GREEN
        frame[16 * self.row + 4 : 16 * self.row + 12, 16 * self.column + 4 : 16 * self.column + 12] = RED
        return frame


class PointMass(Drawn):
    """Push a mass to the origin and keep it there: reward -(distance squared) - 0.01 (force squared) per step"""

    step_s = 0.2
    bound = 2.0

    def __init__(self, dimensions: int = 1, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = spaces.Box(-self.bound, self.bound, (2 * dimensions,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (dimensions,), np.float32)
        self.dimensions = dimensions
        self.position, self.velocity = np.zeros(dimensions), np.zeros(dimensions)

    def _observe(self) -> np.ndarray:
        return np.concatenate([self.position, self.velocity]).astype(np.float32)

    def _begin(self) -> None:
        self.position = self.np_random.uniform(-1.0, 1.0, self.dimensions)
        self.velocity = np.zeros(self.dimensions)

    def step(self, action: Any) -> Result:
        force = np.clip(np.asarray(action, np.float64).reshape(-1), -1.0, 1.0)
        self.velocity = np.clip(self.velocity + self.step_s * force, -self.bound, self.bound)
        self.position = np.clip(self.position + self.step_s * self.velocity, -self.bound, self.bound)
        reward = -float(self.position @ self.position) - 0.01 * float(force @ force)
        return self._observe(), reward, False, False, {}

    def _draw(self) -> np.ndarray:
        frame = canvas(64, 64)
        frame[30:34, 30:34] = GREEN
        place = np.zeros(2)
        place[: min(2, self.dimensions)] = self.position[:2]
        column, row = np.clip((32 + 14 * place).astype(int), 2, 61)
        frame[row - 2 : row + 3, column - 2 : column + 3] = DARK
        return frame


class PixelCatch(Drawn):
    """A ball falls; a paddle three pixels wide at the bottom must be under it: +1 caught, -1 missed. uint8 image"""

    def __init__(self, size: int = 16, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.size, self.paddle, self.ball_row, self.ball_column = size, size // 2, 0, 0

    def _observe(self) -> np.ndarray:
        image = np.zeros((self.size, self.size, 1), np.uint8)
        image[self.ball_row, self.ball_column] = 255
        image[-1, self.paddle - 1 : self.paddle + 2] = 255
        return image

    def _begin(self) -> None:
        self.paddle, self.ball_row = self.size // 2, 0
        self.ball_column = int(self.np_random.integers(self.size))

    def step(self, action: Any) -> Result:
        self.paddle = int(np.clip(self.paddle + int(action) - 1, 1, self.size - 2))
        self.ball_row += 1
        is_down = self.ball_row == self.size - 1
        is_caught = abs(self.ball_column - self.paddle) <= 1
        reward = (1.0 if is_caught else -1.0) if is_down else 0.0
        return self._observe(), reward, is_down, False, {}

    def _draw(self) -> np.ndarray:
        return np.repeat(np.kron(self._observe()[..., 0], np.ones((4, 4), np.uint8))[..., None], 3, axis=2)


class Detour(Drawn):
    """Walk up to the far side, left or right around a block: 1 there, 0 for running into the block or out of time

    Whoever demonstrates turns late, to a side that nothing in the observation tells: the mean of both leads into the
    block. `shows`: state (place as x and y), image (uint8), or both.
    """

    stride = 0.2  # of a whole action, in each direction
    block, aside = 0.25, 0.3  # half of the block's width, around the origin, and how far demonstrators step aside
    turn, far = -0.55, 0.9  # rows where they do, and where an episode ends well
    pixels = 36

    def __init__(self, shows: str = "state", render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        known: dict[str, spaces.Space] = {
            "vector": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "image": spaces.Box(0, 255, (self.pixels, self.pixels, 3), np.uint8),
        }
        self.shows = {"state": ("vector",), "image": ("image",), "both": ("vector", "image")}[shows]
        self.observation_space = known[self.shows[0]] if len(self.shows) == 1 else spaces.Dict(known)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.place, self.side = np.zeros(2), 1.0

    def _observe(self) -> Any:
        seen: dict[str, Any] = {"vector": self.place.astype(np.float32)}
        if "image" in self.shows:
            seen["image"] = self._draw()
        return seen[self.shows[0]] if len(self.shows) == 1 else seen

    def _begin(self) -> None:
        self.place = np.array([self.np_random.uniform(-0.03, 0.03), self.np_random.uniform(-1.0, -0.8)])
        self.side = float(self.np_random.choice((-1.0, 1.0)))

    def step(self, action: Any) -> Result:
        self.place = self.place + self.stride * np.clip(np.asarray(action, np.float64).reshape(2), -1.0, 1.0)
        self.place = np.clip(self.place, -1.0, 1.0)
        has_hit = bool(np.abs(self.place).max() < self.block)
        is_far = bool(self.place[1] >= self.far)
        return self._observe(), float(is_far), has_hit or is_far, False, {}

    def demonstrate(self) -> np.ndarray:
        """What a demonstrator does now: slowly up, before the block two quick strides aside, and slowly on."""
        is_turning = self.place[1] >= self.turn and abs(self.place[0]) < self.aside
        steady = np.array([self.side, 0.75]) if is_turning else np.array([0.0, 0.25])
        noise = self.np_random.normal(0.0, 0.03, 2)
        return np.clip(steady + noise, -1.0, 1.0).astype(np.float32)

    def _draw(self) -> np.ndarray:
        frame, scale = canvas(self.pixels, self.pixels), self.pixels / 2.0

        def at(number: float) -> int:
            return int(np.clip((1.0 + number) * scale, 1, self.pixels - 2))

        frame[: at(-self.far)] = GREEN
        frame[at(-self.block) : at(self.block), at(-self.block) : at(self.block)] = RED
        column, row = at(self.place[0]), at(-self.place[1])
        frame[row - 1 : row + 2, column - 1 : column + 2] = DARK
        return frame


class PixelFollow(Drawn):
    """Stay under a bar that wanders: +1 for every step in which the two overlap by half, over once they are far apart.
    Both are five pixels wide and half an image high, and move by at most one. uint8 image"""

    def __init__(self, size: int = 16, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.size, self.bar, self.place, self.direction = size, size // 2, size // 2, 1

    def _observe(self) -> np.ndarray:
        image = np.zeros((self.size, self.size, 1), np.uint8)
        image[: self.size // 2, self.bar - 2 : self.bar + 3] = 255
        image[self.size // 2 :, self.place - 2 : self.place + 3] = 255
        return image

    def _begin(self) -> None:
        self.bar, self.place = (int(self.np_random.integers(5, self.size - 5)) for _ in range(2))
        self.direction = int(self.np_random.choice([-1, 1]))

    def step(self, action: Any) -> Result:
        self.step_in_episode += 1
        if self.np_random.random() < 0.1 or not 2 <= self.bar + self.direction <= self.size - 3:
            self.direction = -self.direction
        self.bar = int(np.clip(self.bar + self.direction, 2, self.size - 3))
        self.place = int(np.clip(self.place + int(action) - 1, 2, self.size - 3))
        distance = abs(self.bar - self.place)
        return self._observe(), float(distance <= 2), distance > self.size // 2, False, {}

    def _draw(self) -> np.ndarray:
        return np.repeat(np.kron(self._observe()[..., 0], np.ones((4, 4), np.uint8))[..., None], 3, axis=2)
