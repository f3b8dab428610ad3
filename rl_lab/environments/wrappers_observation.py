"""Wrappers that change what is seen. Each works on a lone observation or on every entry of a Dict that it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.environments.snapshot import layers
from rl_lab.environments.spaces import is_image, lone_key, value_counts
from rl_lab.environments.wrappers import RemapActions, StepResult, can_be_flat, register_wrapper, require_positive
from rl_lab.types import ConfigError, did_you_mean

ENCODINGS = ("binary", "scaled")
Change = tuple[spaces.Space, Callable[[Any], Any]]  # the new space of an entry, and how its values become the new ones


class PerEntry(gym.wrappers.TransformObservation):
    """Base: `change` says what becomes of an entry of the observation (its key is None when it is alone)."""

    def __init__(self, env: gym.Env) -> None:
        space = env.observation_space
        entries: Mapping[Any, Any] = space.spaces if isinstance(space, spaces.Dict) else {None: space}
        changes = {key: change for key, part in entries.items() if (change := self.change(part, key)) is not None}
        if not changes:
            raise ConfigError(f"it finds nothing to change in the observation {space}.")

        def convert(observation: Any) -> Any:
            return {**observation, **{key: change(observation[key]) for key, (_, change) in changes.items()}}

        if isinstance(space, spaces.Dict):
            super().__init__(env, convert, spaces.Dict({**entries, **{key: new for key, (new, _) in changes.items()}}))
        else:
            super().__init__(env, changes[None][1], changes[None][0])

    def change(self, space: Any, key: str | None) -> Change | None:
        """None: the entry stays as it is."""
        raise NotImplementedError


@register_wrapper("frame_stack")
class FrameStack(PerEntry):
    """The last `count` observations as one: images on the channel axis, vectors one after the other, oldest first.
    At a reset the first observation fills the stack."""

    def __init__(self, env: gym.Env, count: int) -> None:
        require_positive(count=count)
        self.count = count
        self.stacks: dict[str, np.ndarray] = {}
        super().__init__(env)

    def change(self, space: Any, key: str | None) -> Change | None:
        if not isinstance(space, spaces.Box):
            return None
        shape = (*space.shape[:2], -1) if is_image(space) else (-1,)

        def stack(value: Any) -> np.ndarray:
            frame = np.reshape(value, shape)
            old = self.stacks.get(str(key))
            kept = [frame] * (self.count - 1) if old is None else [old[..., frame.shape[-1] :]]
            self.stacks[str(key)] = np.concatenate([*kept, frame], axis=-1)
            return self.stacks[str(key)].copy()

        low, high = (np.concatenate([b.reshape(shape)] * self.count, axis=-1) for b in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype), stack

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.stacks.clear()
        return super().reset(**options)


@register_wrapper("grey")
class Grey(PerEntry):
    """RGB images to one channel, with the luma weights 77, 150, 29 of 256 (ITU-R BT.601)"""

    def change(self, space: Any, key: str | None) -> Change | None:
        if not is_image(space) or space.shape[2:] != (3,):
            return None
        weights = np.array([77, 150, 29], np.uint32)

        def grey(image: Any) -> np.ndarray:
            return ((np.asarray(image).astype(np.uint32) @ weights) >> 8).astype(np.uint8)[..., None]

        return spaces.Box(0, 255, (*space.shape[:2], 1), np.uint8), grey


def area_resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, C] to [height, width, C]; each new pixel is the mean of the area it covers, rounded once per axis.
    Pillow calculates with whole numbers, so that every machine sees the same image."""
    from PIL import Image

    planes = [Image.fromarray(np.ascontiguousarray(image[..., c])) for c in range(image.shape[2])]
    return np.stack([np.asarray(p.resize((width, height), Image.Resampling.BOX)) for p in planes], axis=-1)


@register_wrapper("resize")
class Resize(PerEntry):
    """Images to height x width by area averaging"""

    def __init__(self, env: gym.Env, height: int, width: int) -> None:
        require_positive(height=height, width=width)
        self.height, self.width = height, width
        super().__init__(env)

    def change(self, space: Any, key: str | None) -> Change | None:
        if not is_image(space):
            return None
        height, width = self.height, self.width
        new = spaces.Box(0, 255, (height, width, *(space.shape[2:] or (1,))), np.uint8)
        return new, lambda image: area_resize(np.atleast_3d(image), height, width)


@register_wrapper("crop")
class Crop(PerEntry):
    """Images without so many rows at the top and bottom and columns at the left and right"""

    def __init__(self, env: gym.Env, top: int = 0, bottom: int = 0, left: int = 0, right: int = 0) -> None:
        self.top, self.bottom, self.left, self.right = top, bottom, left, right
        super().__init__(env)

    def change(self, space: Any, key: str | None) -> Change | None:
        if not is_image(space):
            return None
        height, width = space.shape[0] - self.bottom, space.shape[1] - self.right
        if not (0 <= self.top < height <= space.shape[0] and 0 <= self.left < width <= space.shape[1]):
            raise ConfigError(
                f"crop: top {self.top}, bottom {self.bottom}, left {self.left} and right {self.right} leave nothing of "
                f"an image of {space.shape[0]}x{space.shape[1]}, or more than there is: write whole numbers from 0."
            )
        rows, columns = slice(self.top, height), slice(self.left, width)
        new = spaces.Box(0, 255, (height - self.top, width - self.left, *space.shape[2:]), np.uint8)
        return new, lambda image: np.ascontiguousarray(np.asarray(image)[rows, columns])


@register_wrapper("one_hot")
class OneHot(PerEntry):
    """Discrete and MultiDiscrete values as vectors of zeros and ones"""

    def change(self, space: Any, key: str | None) -> Change | None:
        if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            return None
        new = spaces.Box(0.0, 1.0, (spaces.flatdim(space),), np.float32)
        return new, lambda value: np.asarray(spaces.flatten(space, value), dtype=np.float32)


@register_wrapper("encode_discrete")
class EncodeDiscrete(PerEntry):
    """Discrete and MultiDiscrete values as short vectors: `binary`, the bits of each value, or `scaled`, each value
    divided by the largest"""

    def __init__(self, env: gym.Env, kind: str = "binary") -> None:
        if kind not in ENCODINGS:
            raise ConfigError(f"kind is {kind!r}.{did_you_mean(str(kind), ENCODINGS)} Allowed: {', '.join(ENCODINGS)}.")
        self.kind = kind
        super().__init__(env)

    def change(self, space: Any, key: str | None) -> Change | None:
        if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            return None
        counts = np.array(value_counts(space))
        start = np.asarray(space.start).reshape(-1)
        if self.kind == "scaled":
            largest = np.maximum(counts - 1, 1)
            new = spaces.Box(0.0, 1.0, counts.shape, np.float32)
            return new, lambda value: ((np.reshape(value, -1) - start) / largest).astype(np.float32)
        owner = np.repeat(np.arange(len(counts)), [max(1, int(count - 1).bit_length()) for count in counts])  # of a bit
        power = np.array([int(np.sum(owner[i + 1 :] == owner[i])) for i in range(len(owner))])  # highest bit first

        def bits(value: Any) -> np.ndarray:
            return (((np.reshape(value, -1) - start).astype(np.int64)[owner] >> power) & 1).astype(np.float32)

        return spaces.Box(0.0, 1.0, owner.shape, np.float32), bits


@register_wrapper("rescale_observation")
class RescaleObservation(PerEntry):
    """Dimensions with finite bounds are moved to [-1, 1]; the others stay as they are"""

    def change(self, space: Any, key: str | None) -> Change | None:
        if not isinstance(space, spaces.Box) or is_image(space):
            return None
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        is_finite = np.isfinite(low) & np.isfinite(high)
        if not is_finite.any():
            return None
        bounded = is_finite & (low < high)
        low, high = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0)

        def rescale(value: Any) -> np.ndarray:
            exact = np.asarray(value, dtype=np.float64)
            return np.where(bounded, 2.0 * (exact - low) / (high - low) - 1.0, exact).astype(np.float32)

        new_low, new_high = np.where(bounded, -1.0, space.low), np.where(bounded, 1.0, space.high)
        return spaces.Box(new_low, new_high, dtype=np.float32), rescale


@register_wrapper("flatten")
class Flatten(gym.wrappers.TransformObservation):
    """The whole observation as one vector; Discrete parts become one-hot"""

    def __init__(self, env: gym.Env) -> None:
        space = env.observation_space
        if not can_be_flat(space):
            raise ConfigError(f"it cannot flatten {space}: use select_keys to drop a part.")
        flat: Any = spaces.flatten_space(space)
        vector = spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)
        super().__init__(env, lambda seen: np.asarray(spaces.flatten(space, seen), dtype=np.float32), vector)


@register_wrapper("select_keys")
class SelectKeys(gym.wrappers.TransformObservation):
    """Only the named entries of a Dict observation"""

    def __init__(self, env: gym.Env, keys: Sequence[str]) -> None:
        space: Any = env.observation_space
        known = list(space.spaces) if isinstance(space, spaces.Dict) else []
        for key in keys:
            if key not in known:
                raise ConfigError(
                    f"the observation has no '{key}'.{did_you_mean(key, known)} "
                    f"It has: {', '.join(known) or 'no names, it is ' + type(space).__name__}."
                )
        kept = spaces.Dict({key: space[key] for key in keys})
        super().__init__(env, lambda observation: {key: observation[key] for key in kept}, kept)


@register_wrapper("pixel_observation")
class PixelObservation(gym.ObservationWrapper):
    """The rendered image, area-averaged to height x width; `keep_state` keeps the old observation beside it"""

    needs_render = True

    def __init__(self, env: gym.Env, height: int = 64, width: int = 64, keep_state: bool = False) -> None:
        require_positive(height=height, width=width)
        if env.render_mode != "rgb_array":
            raise ConfigError("it needs an environment with the render mode rgb_array.")
        super().__init__(env)
        self.height, self.width, self.keep_state = height, width, keep_state
        image = spaces.Box(0, 255, (height, width, 3), np.uint8)
        state = env.observation_space
        old = dict(state.spaces) if isinstance(state, spaces.Dict) else {"state": state}
        self.observation_space = spaces.Dict({**old, "image": image}) if keep_state else image

    def observation(self, observation: Any) -> Any:
        frame = np.asarray(self.env.render(), dtype=np.uint8)
        image = area_resize(frame, self.height, self.width)
        if not self.keep_state:
            return image
        return {**(observation if isinstance(observation, dict) else {"state": observation}), "image": image}


@register_wrapper("action_mask")
class ActionMask(gym.Wrapper):
    """Adds "action_mask" to the observation, from `info["action_mask"]`, or the environment's action_masks() or
    action_mask(). A lone observation is called vector, image or discrete beside it."""

    def __init__(self, env: gym.Env) -> None:
        counts = value_counts(env.action_space)
        if counts is None:
            raise ConfigError(f"it needs discrete actions, this environment has {env.action_space}.")
        super().__init__(env)
        self.mask_size = sum(counts)
        old = env.observation_space
        self.lone_key = "" if isinstance(old, spaces.Dict) else lone_key(old)
        entries = dict(old.spaces) if isinstance(old, spaces.Dict) else {self.lone_key: old}
        self.observation_space = spaces.Dict({**entries, "action_mask": spaces.MultiBinary(self.mask_size)})

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        mask = np.asarray(self._find_mask(info)).astype(np.int8).reshape(-1)
        if mask.size != self.mask_size:
            raise ConfigError(f"wrapper 'action_mask': the mask has {mask.size} entries, there are {self.mask_size}.")
        entries = {self.lone_key: observation} if self.lone_key else observation
        return {**entries, "action_mask": mask}

    def _find_mask(self, info: dict[str, Any]) -> Any:
        if "action_mask" in info:
            return info["action_mask"]
        for name in ("action_masks", "action_mask"):
            found = getattr(self.env.unwrapped, name, None)
            if found is not None:
                mask = found() if callable(found) else found
                for layer in reversed(layers(self.env)):
                    mask = layer.remap(mask) if isinstance(layer, RemapActions) else mask
                return mask
        raise ConfigError(
            "wrapper 'action_mask' found no mask: the environment must put 'action_mask' into info, or have a method "
            "action_masks() that returns one boolean per action. Write environment.action_masks: false, or take the "
            "wrapper out: every action is always allowed here."
        )
