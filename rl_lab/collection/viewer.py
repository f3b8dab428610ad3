"""A window that shows frames, where the machine has a display."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import numpy as np


def can_show() -> bool:
    """Whether a window can be opened here."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def show(frames: Sequence[np.ndarray], *, fps: int, title: str) -> None:
    """Play frames in a window until the last one or until it is closed."""
    import pygame

    os.environ.pop("SDL_VIDEODRIVER", None)  # a headless driver set for rendering would hide the window
    pygame.display.init()
    try:
        height, width = frames[0].shape[:2]
        screen = pygame.display.set_mode((width, height))
        pygame.display.set_caption(title)
        for frame in frames:
            if any(event.type == pygame.QUIT for event in pygame.event.get()):
                return
            pygame.surfarray.blit_array(screen, frame.swapaxes(0, 1))
            pygame.display.flip()
            time.sleep(1.0 / fps)
    finally:
        pygame.display.quit()
