"""Drawing without a screen, and never at the price of a run."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.types import ConfigError
from rl_lab.utils.graphics import first_that_works

HEADLESS_BACKENDS = ("egl", "osmesa")
DOCTOR = "(`rl-lab doctor` says what is missing)"


def prepare_headless(*, uses_mujoco: bool = True) -> None:
    """Without a display, tell SDL (pygame) and MuJoCo to draw off-screen; what the user set is kept.
    Must come before pygame and mujoco are imported."""
    if uses_mujoco:
        load_triton_first()
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "offscreen")  # "dummy" draws nothing at all
    # Mesa's software renderer splits an image among all cores, which for 64 x 64 pixels costs more than it saves.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if uses_mujoco and "MUJOCO_GL" not in os.environ and (backend := mujoco_backend()) is not None:
        os.environ["MUJOCO_GL"] = backend


@cache
def load_triton_first() -> None:
    """Triton, which torch imports when it compiles or looks at every tensor, crashes the process if Mesa's LLVM was
    loaded before its own. The library alone is loaded, a matter of milliseconds."""
    found = importlib.util.find_spec("triton")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        for library in Path(folder).glob("_C/libtriton*.so"):
            with suppress(OSError):  # one that cannot be loaded is not in the way
                ctypes.CDLL(str(library))


@cache
def mujoco_backend() -> str | None:
    """egl or osmesa, whichever was seen to work: naming one that does not makes `import mujoco` fail. None: neither, or
    there is no MuJoCo; simulators then run, and what asks them for an image is told so."""
    if importlib.util.find_spec("mujoco") is None:
        return None
    return first_that_works(HEADLESS_BACKENDS)


def require_mujoco_3(env_id: str) -> None:
    """dm_control reads attributes that mujoco 4 took away."""
    version = importlib.metadata.version("mujoco")
    if int(version.partition(".")[0]) >= 4:
        raise ConfigError(
            f"environment '{env_id}': dm_control does not run with mujoco {version}, which is installed. "
            "Install an older one with: pip install 'mujoco<4'"
        )


class FrameTaker:
    """Renders one environment; the first failure becomes an event, later ones are silent."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._has_failed = False

    def take(self, env: Any) -> np.ndarray | None:
        """RGB uint8 [H, W, 3] or None."""
        try:
            frame = env.render()
        except NotImplementedError:  # as gymnasium.Env has it
            self._report("the environment draws nothing, it has no render() of its own.")
            return None
        except Exception as error:  # noqa: BLE001 (any library's drawing code; nothing depends on it)
            self._report(f"{type(error).__name__}: {error} {DOCTOR}")
            return None
        if isinstance(frame, list | tuple) and len(frame) > 0:
            frame = frame[0]  # a vector environment draws all of its members
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[-1] != 3:
            self._report(f"it returned no RGB array; does it have the render mode rgb_array? {DOCTOR}")
            return None
        return np.array(frame, dtype=np.uint8)

    def _report(self, why: str) -> None:
        if not self._has_failed:
            self._events.append(f"Rendering failed and is left out: {why}")
        self._has_failed = True
