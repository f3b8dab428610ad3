"""Observations as networks read them: which keys, and each as one flat float vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_lab.types import ArraySpec, ConfigError, did_you_mean

NOT_FOR_NETWORKS = ("action_mask",)  # says which actions are allowed, for the actor alone


def selected_observation(
    observation: Mapping[str, ArraySpec], keys: Sequence[str] | None, *, place: str = "encoder keys"
) -> dict[str, ArraySpec]:
    """What `keys` name, or everything but action masks."""
    usable = {key: spec for key, spec in observation.items() if key not in NOT_FOR_NETWORKS}
    for key in keys or ():
        if key not in usable:
            raise ConfigError(
                f"{place}: this environment has no observation '{key}'; it has {', '.join(usable)}."
                f"{did_you_mean(key, usable)}"
            )
    selected = usable if keys is None else {key: usable[key] for key in keys}
    if not selected:
        raise ConfigError(f"{place}: no observation is left to look at. Name at least one, or write null for all.")
    return selected


def module_name(key: str) -> str:
    return key.replace(".", "_")  # torch allows no dots in the names of modules


class _VectorReader(nn.Module):
    """A number array as one flat float vector; bytes are scaled like pixels."""

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self.axes = len(spec.shape)
        self.scale = 1.0 / 255.0 if spec.dtype == "uint8" else None
        self.output_size = math.prod(spec.shape)

    def forward(self, array: Tensor) -> Tensor:
        flat = _flat(array, self.axes).to(torch.float32)
        return flat if self.scale is None else flat * self.scale


class _OneHotReader(nn.Module):
    """Discrete values as one-hots, side by side."""

    starts: Tensor

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self.axes = len(spec.shape)
        self.output_size = sum(spec.num_values)
        starts = torch.tensor([0, *spec.num_values[:-1]]).cumsum(0)
        self.register_buffer("starts", starts, persistent=False)  # known from the spec, so not part of a checkpoint

    def forward(self, array: Tensor) -> Tensor:
        index = _flat(array, self.axes) + self.starts
        return torch.zeros(*index.shape[:-1], self.output_size, device=index.device).scatter_(-1, index, 1.0)


def make_reader(key: str, spec: ArraySpec) -> nn.Module:
    if not spec.is_discrete:
        return _VectorReader(spec)
    if len(spec.num_values) != math.prod(spec.shape):
        raise ConfigError(
            f"observation '{key}' is discrete with shape {spec.shape} but its spec counts values for "
            f"{len(spec.num_values)} elements; give num_values one count per element."
        )
    return _OneHotReader(spec)


def _flat(array: Tensor, axes: int) -> Tensor:
    """`[..., *shape]` to `[..., elements]`."""
    if axes == 1:
        return array
    return array.unsqueeze(-1) if axes == 0 else array.flatten(-axes)
