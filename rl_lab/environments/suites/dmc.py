"""DeepMind Control as `dmc/<domain>_<task>`: state, pixels or both, drawn without a screen, saved exactly.

    observation: state     vector  float32, the task's own items one after the other, in its order
                 pixels    image   uint8 [size, size, 3]
                 both      vector and image

The items become one vector because every encoder would join them anyway, and one array is one copy per row. Episodes
are cut after 1000 frames and are not terminal there: a task runs on, so values are bootstrapped (only `lqr` ends).
Nothing of dm_control is imported before an environment is built.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.environments.plain import text_or_none
from rl_lab.environments.rendering import prepare_headless, require_mujoco_3
from rl_lab.types import ConfigError, did_you_mean

DOMAINS = {
    "acrobot": "swingup swingup_sparse",
    "ball_in_cup": "catch",
    "cartpole": "balance balance_sparse swingup swingup_sparse two_poles three_poles",
    "cheetah": "run",
    "dog": "stand walk trot run fetch",
    "finger": "spin turn_easy turn_hard",
    "fish": "upright swim",
    "hopper": "stand hop",
    "humanoid": "stand walk run run_pure_state",
    "humanoid_CMU": "stand walk run",
    "lqr": "lqr_2_1 lqr_6_2",
    "manipulator": "bring_ball bring_peg insert_ball insert_peg",
    "pendulum": "swingup",
    "point_mass": "easy hard",
    "quadruped": "walk run escape fetch",
    "reacher": "easy hard",
    "stacker": "stack_2 stack_4",
    "swimmer": "swimmer6 swimmer15",
    "walker": "stand walk run",
}
OBSERVATIONS = ("state", "pixels", "both")
EPISODE_FRAMES = 1000  # the suite's own limit, in seconds there
VIDEO_SIZE = 256
CAMERAS = {"quadruped": 2}  # the one that follows the body; 0 everywhere else
FAST_FLAGS = {"shadow": False, "reflection": False}
# Megabytes that no task changes: what is drawn, and what the compiler derived from it.
CONSTANT_ARRAYS = ("tex_", "mesh_", "bvh_", "skin_", "text_", "name")


class DeepMindControl(gym.Env):
    """One task of the suite. `camera` is a number or a name in its model, None: the usual one (0; 2 for quadrupeds).

    `is_detailed` draws shadows, reflections and smoothed edges: ten times slower where no GPU draws.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(
        self,
        domain: str,
        task: str,
        observation: str = "state",
        size: int = 64,
        camera: int | str | None = None,
        is_detailed: bool = False,
        render_mode: str | None = None,
    ) -> None:
        env_id = f"dmc/{domain}_{task}"
        if observation not in OBSERVATIONS:
            raise ConfigError(
                f"environment.kwargs.observation of '{env_id}' is {observation!r}."
                f"{did_you_mean(str(observation), OBSERVATIONS)} Allowed: {', '.join(OBSERVATIONS)}."
            )
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"environment.kwargs.size of '{env_id}' is {size!r}: write a number of pixels, say 64.")
        prepare_headless()
        require_mujoco_3(env_id)
        import mujoco
        from dm_control import suite

        # All that the simulator's next step depends on, its solver's starting point included.
        self._everything = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self.render_mode = render_mode
        self.observation_kind, self.size, self.is_detailed = observation, size, is_detailed
        # The seed is for what a model draws once (lqr's stiffness): every copy is the same system.
        made = suite.load(domain, task, task_kwargs={"time_limit": float("inf"), "random": 0})
        self.task, self.physics = made.task, made.physics
        self.frames_per_control = round(made.control_timestep() / self.physics.timestep())
        self.metadata = {**self.metadata, "render_fps": round(1.0 / made.control_timestep())}
        self.camera = self._find_camera(env_id, CAMERAS.get(domain, 0) if camera is None else camera)
        self._prepare_drawing()
        self._views: dict[int, Any] = {}
        self._model_as_built = {name: array.copy() for name, array in self._model_arrays().items()}
        self.is_observed = True  # ActionRepeat turns it off for frames that are not observed
        spec = self.task.action_spec(self.physics)
        low, high = (np.broadcast_to(bound, spec.shape).astype(np.float32) for bound in (spec.minimum, spec.maximum))
        self.action_space = spaces.Box(low, high, dtype=np.float32)
        self.action_labels = tuple(self.physics.model.id2name(i, "actuator") for i in range(self.physics.model.nu))
        self.observation_space = self._observation_space()

    def _find_camera(self, env_id: str, camera: int | str) -> int:
        model = self.physics.model
        names = [model.id2name(i, "camera") for i in range(model.ncam)]
        if isinstance(camera, str) and camera in names:
            return names.index(camera)
        if isinstance(camera, int) and -1 <= camera < len(names):
            return camera
        raise ConfigError(
            f"environment.kwargs.camera is {camera!r} but '{env_id}' has the cameras "
            f"{', '.join(f'{i} ({name})' for i, name in enumerate(names))}, and -1, which moves freely."
            f"{did_you_mean(str(camera), names)}"
        )

    def _prepare_drawing(self) -> None:
        """Must come before the first picture, when the drawing context reads the model."""
        visual = self.physics.model.vis
        if not self.is_detailed:
            visual.quality.offsamples = 0
            visual.quality.shadowsize = 0
        largest = max(self.size, VIDEO_SIZE)
        visual.global_.offwidth = max(visual.global_.offwidth, largest)
        visual.global_.offheight = max(visual.global_.offheight, largest)

    def _observation_space(self) -> spaces.Space:
        vector = spaces.Box(-np.inf, np.inf, self._vector().shape, np.float32)
        image = spaces.Box(0, 255, (self.size, self.size, 3), np.uint8)
        if self.observation_kind == "both":
            return spaces.Dict({"vector": vector, "image": image})
        return vector if self.observation_kind == "state" else image

    # --- playing: the calls of dm_control.rl.control.Environment, without looking at every frame ---

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.task.random.seed(int(self.np_random.integers(2**32)))
        with self.physics.reset_context():
            self.task.initialize_episode(self.physics)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.task.before_step(action, self.physics)
        self.physics.step(self.frames_per_control)
        self.task.after_step(self.physics)
        reward = float(self.task.get_reward(self.physics) or 0.0)
        # None: the episode goes on. A discount of 0 ends it for good, any other is a cut.
        discount = self.task.get_termination(self.physics)
        is_over = discount is not None
        observation = self.observe() if self.is_observed or is_over else None
        return observation, reward, is_over and discount == 0.0, is_over and discount != 0.0, {}

    def observe(self) -> Any:
        """What the task shows now."""
        if self.observation_kind == "state":
            return self._vector()
        image = self._draw(self.size)
        return image if self.observation_kind == "pixels" else {"vector": self._vector(), "image": image}

    def _vector(self) -> np.ndarray:
        items = self.task.get_observation(self.physics).values()
        return np.concatenate([np.ravel(item) for item in items]).astype(np.float32)

    # --- drawing ---

    def render(self) -> np.ndarray:  # type: ignore[override]
        return self._draw(VIDEO_SIZE)

    def _draw(self, size: int) -> np.ndarray:
        if size not in self._views:
            from dm_control.mujoco.engine import Camera

            self._views[size] = Camera(self.physics, height=size, width=size, camera_id=self.camera)
        view = self._views[size]
        view._rgb_buffer = np.empty(
            (size, size, 3), np.uint8
        )  # a new one each time: what was returned need not be copied
        return view.render(render_flag_overrides=None if self.is_detailed else FAST_FLAGS)

    def close(self) -> None:
        self._views.clear()
        self.physics.free()

    # --- exact snapshots (see snapshot.py) ---

    def get_state(self) -> dict[str, Any]:
        """The simulator's state, the task's generator and attributes, and what the episode changed in the model."""
        return {
            "physics": self.physics.get_state(self._everything),
            "random": self.task.random.get_state(legacy=False),
            "task": {name: value for name, value in vars(self.task).items() if text_or_none(value) is not None},
            "model": {
                name: array.copy()
                for name, array in self._model_arrays().items()
                if array.tobytes() != self._model_as_built[name].tobytes()
            },
        }

    def set_state(self, state: dict[str, Any]) -> None:
        import mujoco

        model, data = self.physics.model.ptr, self.physics.data.ptr
        for name, array in self._model_arrays().items():
            array[...] = state["model"].get(name, self._model_as_built[name])
        vars(self.task).update(state["task"])
        self.task.random.set_state(state["random"])
        mujoco.mj_resetData(model, data)
        self.physics.set_state(state["physics"], self._everything)
        mujoco.mj_step1(model, data)  # what depends on position and velocity; a step begins behind it
        if self._views:
            with self.physics.contexts.gl.make_current() as context:
                for field in range(self.physics.model.nhfield):
                    context.call(mujoco.mjr_uploadHField, model, self.physics.contexts.mujoco.ptr, field)

    def _model_arrays(self) -> dict[str, np.ndarray]:
        """Every array of the compiled model that a task may change: targets, terrains, lights, stiffness."""
        model = self.physics.model.ptr
        names = [name for name in dir(model) if not name.startswith(("_", *CONSTANT_ARRAYS))]
        arrays = {name: getattr(model, name) for name in names}
        return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.size}


for _domain, _tasks in DOMAINS.items():
    for _task in _tasks.split():
        gym.register(
            f"dmc/{_domain}_{_task}",
            entry_point="rl_lab.environments.suites.dmc:DeepMindControl",
            kwargs={"domain": _domain, "task": _task},
            max_episode_steps=EPISODE_FRAMES,
        )
