"""Meta-World's fifty tasks as `metaworld/<task>`: a robot's arm, its goal shown, placed anew in every episode.

Meta-World's own Gymnasium ids draw goals from numpy's global generator, cannot be sent to worker processes and say
nothing of rendering; here an episode follows from its seed. Observations, rewards (0 to 10 a step) and the 500 steps of
an episode are Meta-World's. Nothing of it is imported before an environment is built.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_lab.types import ConfigError, did_you_mean

TASKS = (
    "assembly basketball bin-picking box-close button-press-topdown button-press-topdown-wall button-press "
    "button-press-wall coffee-button coffee-pull coffee-push dial-turn disassemble door-close door-lock door-open "
    "door-unlock hand-insert drawer-close drawer-open faucet-open faucet-close hammer handle-press-side handle-press "
    "handle-pull-side handle-pull lever-pull pick-place-wall pick-out-of-hole pick-place plate-slide plate-slide-side "
    "plate-slide-back plate-slide-back-side peg-insert-side peg-unplug-side soccer stick-push stick-pull push "
    "push-wall push-back reach reach-wall shelf-place sweep-into sweep window-open window-close"
).split()
CAMERAS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")


class MetaWorld(gym.Wrapper):
    """One task. `camera` is one of its model's, those in the corners turned upright; `size` the pixels of a side."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}

    def __init__(self, task: str, camera: str = "corner2", size: int = 256, render_mode: str | None = None) -> None:
        if camera not in CAMERAS:
            raise ConfigError(
                f"environment.kwargs.camera of 'metaworld/{task}' is {camera!r}.{did_you_mean(str(camera), CAMERAS)} "
                f"Allowed: {', '.join(CAMERAS)}."
            )
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        sawyer = ALL_V3_ENVIRONMENTS[task](render_mode=render_mode, camera_name=camera, width=size, height=size)
        sawyer._partially_observable = False  # the goal is seen
        del sawyer.sawyer_observation_space  # computed without it, and kept
        sawyer._set_task_called = True  # the task is what reset draws, no stored one
        sawyer._freeze_rand_vec, sawyer.seeded_rand_vec = False, True
        super().__init__(sawyer)
        self.observation_space = sawyer.sawyer_observation_space
        self.max_agent_steps = sawyer.max_path_length
        self._hangs = camera.startswith("corner")  # upside down

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.unwrapped.seed(seed)  # type: ignore[attr-defined]  # its reset ignores one
        return self.env.reset()

    def render(self) -> Any:
        frame: Any = self.env.render()
        return np.ascontiguousarray(frame[::-1, ::-1]) if self._hangs and frame is not None else frame


for _task in TASKS:
    gym.register(
        f"metaworld/{_task}-v3",
        entry_point="rl_lab.environments.suites.meta_world:MetaWorld",
        kwargs={"task": f"{_task}-v3"},
    )
