"""Demonstrated numbers on a scale from -1 to 1. The ranges are buffers: they are saved with the policy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.components.networks.observations import module_name
from rl_lab.types import ActionSpec, ArraySpec, Batch

SMALLEST_RANGE = 1e-4  # less is a constant, whose noise is not to be blown up


class RangeNormalizer(nn.Module):
    """From the lowest and the highest number of a dataset to -1 and 1, each element by itself; a constant stays near 0.

    Float observations and continuous actions are scaled; images, discrete values and choices pass untouched. Until
    `learn` was called, everything does.
    """

    def __init__(self, *, observation: dict[str, ArraySpec], action: ActionSpec) -> None:
        super().__init__()
        shapes = {key: spec.shape for key, spec in observation.items() if spec.dtype.startswith("float")}
        self.keys = tuple(shapes)
        if action.kind == "continuous":
            shapes["action"] = action.shape
        self.ranges = nn.ModuleDict({module_name(key): _Range(shape) for key, shape in shapes.items()})
        self.range_keys = tuple(f"{key}_range" for key in shapes)

    @torch.no_grad()
    def learn(self, batch: Batch) -> None:
        """Take over the ranges `[2, *shape]` that come with demonstrations."""
        for key in self.range_keys:
            known, (low, high) = self._of(key.removesuffix("_range")), batch[key].unbind()
            known.center.copy_((low + high) / 2.0)
            known.reach.copy_(torch.where(high - low < SMALLEST_RANGE, 1.0, (high - low) / 2.0))

    def forward(self, observation: Batch) -> Batch:
        """The same keys, `[..., *shape]` each."""
        return observation | {key: self._of(key).scale(observation[key]) for key in self.keys}

    def scale_action(self, action: Tensor) -> Tensor:
        """A policy's actions `[..., A]` on the scale; choices as they are."""
        return self._of("action").scale(action) if "action" in self.ranges else action

    def restore_action(self, scaled: Tensor) -> Tensor:
        """The other way round."""
        return self._of("action").restore(scaled) if "action" in self.ranges else scaled

    def _of(self, key: str) -> _Range:
        found = self.ranges[module_name(key)]
        assert isinstance(found, _Range)
        return found


class _Range(nn.Module):
    center: Tensor
    reach: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(shape))
        self.register_buffer("reach", torch.ones(shape))

    def scale(self, values: Tensor) -> Tensor:
        return (values - self.center) / self.reach

    def restore(self, scaled: Tensor) -> Tensor:
        return scaled * self.reach + self.center
