"""Drawing without a screen, and never at the price of a run."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def prepare_headless() -> None:
    """Without a display, tell SDL (pygame) and MuJoCo to draw off-screen; what the user set is kept.
    Must come before pygame and mujoco are imported."""
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "offscreen")  # "dummy" draws nothing at all
    os.environ.setdefault("MUJOCO_GL", "egl")


class FrameTaker:
    """Renders one environment; the first failure becomes an event, later ones are silent."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._has_failed = False

    def take(self, env: Any) -> np.ndarray | None:
        """RGB uint8 [H, W, 3] or None."""
        try:
            frame = env.render()
        except Exception as error:  # drawing code of any library, and nothing depends on its success
            self._report(f"{type(error).__name__}: {error}")
            return None
        if isinstance(frame, list | tuple) and len(frame) > 0:
            frame = frame[0]  # a vector environment draws all of its members
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[-1] != 3:
            self._report("it returned no RGB array; does it have the render mode rgb_array?")
            return None
        return np.array(frame, dtype=np.uint8)

    def _report(self, why: str) -> None:
        if not self._has_failed:
            self.events.append(f"Rendering failed and is left out: {why}")
        self._has_failed = True
