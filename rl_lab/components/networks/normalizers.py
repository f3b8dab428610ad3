"""Observations and rewards on a scale networks like. Statistics are buffers: they are saved with the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_lab.components.networks.layers import choose
from rl_lab.components.returns.returns import scan_from_the_end
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError


class RunningMoments(nn.Module):
    """Mean and variance of everything seen, in float64, merged batch by batch (Chan, Golub, LeVeque 1983)."""

    count: Tensor
    mean: Tensor
    squared_deviations: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squared_deviations", torch.zeros(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, samples: Tensor, weight: Tensor | None = None) -> None:
        """Add samples `[M, *shape]`; those whose weight `[M]` is 0 do not count."""
        samples = samples.to(torch.float64)
        if weight is None:
            weight = torch.ones(samples.shape[0], dtype=torch.float64, device=samples.device)
        weight = weight.to(torch.float64).reshape(-1, *([1] * (samples.ndim - 1)))
        added = weight.sum()
        mean = (samples * weight).sum(dim=0) / added.clamp(min=1.0)
        deviations = ((samples - mean).square() * weight).sum(dim=0)
        total = (self.count + added).clamp(min=1.0)
        shift = mean - self.mean
        self.squared_deviations += deviations + shift.square() * (self.count * added / total)
        self.mean += shift * (added / total)
        self.count += added

    @property
    def variance(self) -> Tensor:
        """Population variance; 1 before anything was seen."""
        return torch.where(self.count > 0, self.squared_deviations / self.count.clamp(min=1.0), 1.0)


class ObservationNormalizer(nn.Module):
    """Float observations to about zero mean and unit size; images, discrete values and masks pass untouched.

    off: nothing. rolling: by the mean and std of everything seen so far. static: from the bounds of the observation's
    spec to [-1, 1]. auto: rolling where actions are continuous, else off.
    """

    modes: ClassVar[dict[str, str]] = {"auto": "rolling", "off": "off", "rolling": "rolling", "static": "static"}

    def __init__(
        self,
        *,
        observation: dict[str, ArraySpec],
        action: ActionSpec | None = None,
        mode: str = "off",
        clip: float = 10.0,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__()
        self.mode = mode = _mode(self.modes, mode, action, place="observation normalizer mode")
        self.clip = _above_zero("observation normalizer clip", clip)
        self.epsilon = epsilon
        specs = {key: spec for key, spec in observation.items() if spec.dtype.startswith("float")}
        self.keys = tuple(specs) if mode != "off" else ()
        self.scales = nn.ModuleList(_Scale(key, specs[key], mode) for key in self.keys)

    def forward(self, observation: Batch) -> Batch:
        """The same keys, `[..., *shape]` each; the very same dict when there is nothing to do."""
        if not self.keys:
            return observation
        normalized = dict(observation)
        for key, scale in zip(self.keys, self.scales, strict=True):
            normalized[key] = scale(observation[key]).clamp_(-self.clip, self.clip)
        return normalized

    def update(self, observation: Batch, valid: Tensor | None = None) -> None:
        """Rolling only: learn from rows `[..., *shape]`, those where `valid [...]` is True. Pass each row once."""
        if self.mode != "rolling":
            return
        weight = None if valid is None else valid.reshape(-1)
        for key, scale in zip(self.keys, self.scales, strict=True):
            assert isinstance(scale, _Scale)
            scale.learn(observation[key], weight, self.epsilon)


class _Scale(nn.Module):
    """`(x - center) * factor` in float32, ready for use: two operations per key when acting."""

    center: Tensor
    factor: Tensor

    def __init__(self, key: str, spec: ArraySpec, mode: str) -> None:
        super().__init__()
        center, factor = torch.zeros(spec.shape), torch.ones(spec.shape)
        if mode == "static":
            if spec.low is None or spec.high is None:
                raise ConfigError(
                    f"observation normalizer mode 'static': observation '{key}' has no finite bounds. "
                    "Write mode: rolling, or give the environment's spec a low and a high."
                )
            low, high = torch.tensor(spec.low).reshape(spec.shape), torch.tensor(spec.high).reshape(spec.shape)
            center = (low + high) / 2.0
            factor = 2.0 / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
            factor = torch.where(high > low, factor, 1.0)  # a constant stays near 0
        self.register_buffer("center", center)
        self.register_buffer("factor", factor)
        self.moments = RunningMoments(spec.shape) if mode == "rolling" else None

    def forward(self, array: Tensor) -> Tensor:
        return (array - self.center) * self.factor

    def learn(self, array: Tensor, weight: Tensor | None, epsilon: float) -> None:
        assert self.moments is not None
        self.moments.update(array.reshape(-1, *self.center.shape), weight)
        self.center.copy_(self.moments.mean)
        self.factor.copy_((self.moments.variance + epsilon).rsqrt())


class RewardNormalizer(nn.Module):
    """Rewards divided by the running std of the discounted return, so that values are of size one.

     row t           0      1      2      3      each row once, over all rollouts: pass rows 1..T of rows 0..T
     is_first        1      0      0      1
     running return  0      r1     r2 + discount * r1     0      continues from the last call, per environment

    Nothing is subtracted: the sign of a reward keeps its meaning. auto: return_scale where actions are continuous, else
    off.
    """

    modes: ClassVar[dict[str, str]] = {"auto": "return_scale", "off": "off", "return_scale": "return_scale"}
    running_return: Tensor
    factor: Tensor

    def __init__(
        self,
        *,
        num_envs: int,
        action: ActionSpec | None = None,
        mode: str = "off",
        discount: float = 0.99,
        clip: float = 10.0,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__()
        self.mode = _mode(self.modes, mode, action, place="reward normalizer mode")
        self.clip = _above_zero("reward normalizer clip", clip)
        self.discount = discount
        self.epsilon = epsilon
        self.moments = RunningMoments(())
        self.register_buffer("running_return", torch.zeros(num_envs, dtype=torch.float64))
        self.register_buffer("factor", torch.ones(()))

    def forward(self, reward: Tensor) -> Tensor:
        """Rewards of any shape, scaled and clipped."""
        return reward if self.mode == "off" else (reward * self.factor).clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, reward: Tensor, is_first: Tensor) -> None:
        """Learn from rows `[N, T]`; rows that begin an episode reset the return and do not count themselves."""
        if self.mode == "off":
            return
        carry = (~is_first).to(torch.float64) * self.discount
        base = torch.where(is_first, 0.0, reward.to(torch.float64))
        base[:, 0] += carry[:, 0] * self.running_return
        # The scan runs from the end, so time is turned round for it.
        returns = scan_from_the_end(base.flip(1), carry.flip(1)).flip(1)
        self.running_return.copy_(returns[:, -1])
        self.moments.update(returns.reshape(-1), (~is_first).reshape(-1))
        self.factor.copy_((self.moments.variance + self.epsilon).rsqrt())

    @torch.no_grad()
    def forget_episodes(self) -> None:
        """The environments are others from here on: no return of theirs is under way."""
        self.running_return.zero_()


def _mode(modes: Mapping[str, str], name: str, action: ActionSpec | None, *, place: str) -> str:
    """`auto`: tasks with continuous actions have observations and rewards of any scale."""
    mode = choose(modes, name, place=place)
    return "off" if name == "auto" and (action is None or action.kind != "continuous") else mode


def _above_zero(place: str, value: float) -> float:
    if not value > 0.0:
        raise ConfigError(f"{place}: {value}; allowed is a number above 0. Write for example 10.0.")
    return float(value)
