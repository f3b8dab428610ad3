"""Gymnasium's MuJoCo environments, each drawn in an OpenGL context of its own.

Gymnasium's renderer does not make its context the current one: of several environments in one process some get the
images of another, or black ones. It also draws shadows and smooth edges, which take nine tenths of the time without a
GPU.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import gymnasium as gym
import numpy as np


def draw_alone(env: gym.Env) -> None:
    """Give an environment of Gymnasium's MuJoCo suite, if this is one, a renderer of its own."""
    base: Any = env.unwrapped
    theirs = vars(base).get("mujoco_renderer")
    if base.render_mode == "rgb_array" and type(theirs).__module__ == "gymnasium.envs.mujoco.mujoco_rendering":
        base.mujoco_renderer = OwnRenderer(theirs)


def close_all() -> None:
    """An OpenGL context must go before the library does that made it, and which says so at exit, too: what is
    registered last comes first."""
    for renderer in list(OPEN):
        renderer.close()


class OwnRenderer:
    """Takes the place of Gymnasium's MujocoRenderer: the same camera, without shadows and reflections."""

    def __init__(self, theirs: Any) -> None:
        self._model, self._data = theirs.model, theirs.data
        self._size = (theirs.height, theirs.width)
        self._camera_id, self._camera_config = theirs.camera_id, theirs.default_cam_config or {}
        self._renderer: Any = None
        self._camera: Any = None
        OPEN.add(self)

    def render(self, render_mode: str | None) -> np.ndarray:
        import mujoco

        if self._renderer is None:
            quality, frame = self._model.vis.quality, self._model.vis.global_
            quality.offsamples = quality.shadowsize = 0  # before the first image, when the context reads them
            frame.offheight, frame.offwidth = (max(*pair) for pair in zip(self._size, self._frame_size(), strict=True))
            self._renderer, self._camera = mujoco.Renderer(self._model, *self._size), self._find_camera(mujoco)
            atexit.unregister(close_all)
            atexit.register(close_all)
        self._renderer.update_scene(self._data, self._camera)
        flags = self._renderer.scene.flags
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        return self._renderer.render()

    def _frame_size(self) -> tuple[int, int]:
        return self._model.vis.global_.offheight, self._model.vis.global_.offwidth

    def _find_camera(self, mujoco: Any) -> Any:
        if self._camera_id != -1:
            return self._camera_id
        camera = mujoco.MjvCamera()
        camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        camera.lookat[:] = np.median(self._data.geom_xpos, axis=0)
        camera.distance = self._model.stat.extent
        for name, value in self._camera_config.items():
            if isinstance(value, np.ndarray):
                getattr(camera, name)[:] = value
            else:
                setattr(camera, name, value)
        return camera

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


OPEN: weakref.WeakSet[OwnRenderer] = weakref.WeakSet()
