"""`rl_lab/CarRacing-v3`: Gymnasium's CarRacing, drawn several times faster, to the same pixels.

Its time goes into drawing: every frame moves some 800 polygons of grass and road one by one, of which a tenth is on
the screen, opens a font, and paints the background as one more polygon. Here arrays find that tenth first, numbers are
written once, the background is a fill, and frames that an action repeat skips are not drawn at all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pygame
from gymnasium.envs.box2d import car_racing as original

from rl_lab.types import ConfigError

EDGE = original.MAX_SHAPE_DIM + 1.0  # pixels; wider than the original's own test, which still decides
GRASS = [
    [(x + dx, y + dy) for dx, dy in ((1, 0), (0, 0), (0, 1), (1, 1))]
    for x in range(-20, 20, 2)
    for y in range(-20, 20, 2)
]
WINDOW = np.array([original.WINDOW_W, original.WINDOW_H])
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]) * WINDOW


@lru_cache(maxsize=512)
def written(score: str) -> pygame.Surface:
    """The number in the corner of the window, as the original writes it."""
    pygame.font.init()
    font = pygame.font.Font(pygame.font.get_default_font(), 42)
    return font.render(score, True, (255, 255, 255), (0, 0, 0))


class CarRacing(original.CarRacing):
    """The original's physics, rewards and pictures. `patience`: an episode is cut after so many frames without a new
    tile of the track, for training: who has left the road learns little there."""

    surf: Any  # what is drawn on

    def __init__(self, patience: int | None = None, **settings: Any) -> None:
        if patience is not None and patience < 1:
            raise ConfigError(f"environment.kwargs.patience is {patience!r}: write a number of at least 1, or null.")
        super().__init__(**settings)
        self.patience = patience
        self._visited, self._waited = 0, 0  # tiles, and frames since the last new one
        self.is_observed = True  # ActionRepeat turns it off for frames that are not observed
        dim = original.GRASS_DIM
        self._grass = [[(dim * x, dim * y) for x, y in corners] for corners in GRASS]
        self._corners = np.zeros((0, 4, 2))
        self._road: Any = None  # the road that `_corners` describes

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._visited, self._waited = 0, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self._waited = 0 if self.tile_visited_count > self._visited else self._waited + 1
        self._visited = self.tile_visited_count
        is_over = self.patience is not None and self._waited >= self.patience
        return observation, reward, terminated, truncated or (is_over and not terminated), info

    def observe(self) -> np.ndarray:
        """What the driver sees now."""
        self.state = self._draw()
        return self.state

    def _render(self, mode: str) -> Any:
        if mode != "state_pixels":
            return super()._render(mode)
        return self._draw() if self.is_observed else self.state

    def _draw(self) -> np.ndarray:
        """uint8 [96, 96, 3]"""
        assert self.car is not None, "reset() comes first"
        width, height = original.WINDOW_W, original.WINDOW_H
        self.surf = pygame.Surface((width, height))
        angle = -self.car.hull.angle
        # From above in the first second; the order of operations is the original's, to the last bit.
        zoom = 0.1 * original.SCALE * max(1 - self.t, 0) + original.ZOOM * original.SCALE * min(self.t, 1)
        x, y = pygame.math.Vector2([-zoom * place for place in self.car.hull.position]).rotate_rad(angle)
        place = (zoom, (width / 2 + x, height / 4 + y), angle)
        self._render_road(*place)
        self.car.draw(self.surf, *place, False)
        self.surf = pygame.transform.flip(self.surf, False, True)
        self._render_indicators(width, height)
        score = written(f"{self.reward:04.0f}")
        self.surf.blit(score, score.get_rect(center=(60, height - height * 2.5 / 40)))
        return self._create_image_array(self.surf, (original.STATE_W, original.STATE_H))

    def _render_road(self, zoom: float, translation: Any, angle: float) -> None:
        bounds = original.PLAYFIELD
        place = (zoom, translation, angle)
        if (np.abs(self._in_the_world(CORNERS, *place)) < bounds - 1.0).all():
            self.surf.fill([int(c) for c in self.bg_color])
        else:
            field = [(bounds, bounds), (bounds, -bounds), (-bounds, -bounds), (-bounds, bounds)]
            self._draw_colored_polygon(self.surf, field, self.bg_color, *place, clip=False)
        if self._road is not self.road_poly:
            self._road = self.road_poly
            self._corners = np.array([*self._grass, *([tuple(c[:2]) for c in poly] for poly, _ in self._road)])
        for i in self._near_the_screen(*place):
            if i < len(self._grass):
                self._draw_colored_polygon(self.surf, self._grass[i], self.grass_color, *place)
            else:
                poly, color = self._road[i - len(self._grass)]
                corners = [(corner[0], corner[1]) for corner in poly]
                self._draw_colored_polygon(self.surf, corners, [int(c) for c in color], *place)

    @staticmethod
    def _in_the_world(pixels: np.ndarray, zoom: float, translation: Any, angle: float) -> np.ndarray:
        """Places on the screen as places on the map, [..., 2]."""
        cos, sin = np.cos(angle), np.sin(angle)
        return (pixels - np.asarray(translation)) / zoom @ np.array([[cos, -sin], [sin, cos]])

    def _near_the_screen(self, zoom: float, translation: Any, angle: float) -> list[int]:
        """Polygons with a corner on the screen or close to it, in the order of drawing."""
        cos, sin = np.cos(angle), np.sin(angle)
        turned = self._corners @ np.array([[cos, sin], [-sin, cos]])
        pixels = turned * zoom + np.asarray(translation)
        is_near = ((pixels >= -EDGE) & (pixels <= WINDOW + EDGE)).all(axis=-1).any(axis=-1)
        return np.flatnonzero(is_near).tolist()
