"""`rl_lab/CarRacing-v3`: Gymnasium's CarRacing, drawn several times faster, to the same pixels.

Its time goes into drawing: every frame moves some 800 polygons of grass and road one by one, of which a tenth is on
the screen. Here arrays find that tenth first, and frames that an action repeat skips are not drawn at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.box2d import car_racing as original

EDGE = original.MAX_SHAPE_DIM + 1.0  # pixels; wider than the original's own test, which still decides
GRASS = [
    [(x + dx, y + dy) for dx, dy in ((1, 0), (0, 0), (0, 1), (1, 1))]
    for x in range(-20, 20, 2)
    for y in range(-20, 20, 2)
]


class CarRacing(original.CarRacing):
    """The original's physics, rewards and pictures."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.is_observed = True  # ActionRepeat turns it off for frames that are not observed
        dim = original.GRASS_DIM
        self._grass = [[(dim * x, dim * y) for x, y in corners] for corners in GRASS]
        self._corners = np.zeros((0, 4, 2))
        self._road: Any = None  # the road that `_corners` describes

    def observe(self) -> np.ndarray:
        """What the driver sees now."""
        self.state = super()._render("state_pixels")
        return self.state

    def _render(self, mode: str) -> Any:
        return self.state if mode == "state_pixels" and not self.is_observed else super()._render(mode)

    def _render_road(self, zoom: float, translation: Any, angle: float) -> None:
        bounds = original.PLAYFIELD
        field = [(bounds, bounds), (bounds, -bounds), (-bounds, -bounds), (-bounds, bounds)]
        place = (zoom, translation, angle)
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

    def _near_the_screen(self, zoom: float, translation: Any, angle: float) -> list[int]:
        """Polygons with a corner on the screen or close to it, in the order of drawing."""
        cos, sin = np.cos(angle), np.sin(angle)
        turned = self._corners @ np.array([[cos, sin], [-sin, cos]])
        pixels = turned * zoom + np.asarray(translation)
        size = np.array([original.WINDOW_W, original.WINDOW_H])
        is_near = ((pixels >= -EDGE) & (pixels <= size + EDGE)).all(axis=-1).any(axis=-1)
        return np.flatnonzero(is_near).tolist()
