"""The implicit world model of TD-MPC2: latents that predict rewards, values and each other, and no decoder.

    "TD-MPC2: Scalable, Robust World Models for Continuous Control" (Hansen et al. 2024, arXiv:2310.16828), section 3.1

    encoder   z = h(o)            dynamics  z' = d(z, a)          every z is made of simplices (SimNorm)
    reward    r = R(z, a)         critics   q_i = Q_i(z, a)       both a softmax over bins of symlog
    actor     a ~ p(z)

Layers are linear, LayerNorm, Mish. Weights start as in nicklashansen/tdmpc2 (common/init.py): a normal of std 0.02, cut
at 2, biases 0, and the last layers of reward and critics 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.heads.distributions import SquashedGaussian
from rl_lab.components.networks.observations import make_reader, module_name, selected_observation
from rl_lab.components.world_model.two_hot import SymlogTwoHot, symlog_bins
from rl_lab.kernels.door import fast_path
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError

INITIAL_STD = 0.02
TASK = "task"  # the observation that numbers the task, where there are several
LARGEST_SYMLOG = 10.0  # nicklashansen/tdmpc2, config.yaml: vmin -10, vmax 10


@fast_path("rl_lab.kernels.cpu_normed:SIMNORM")
def simnorm(values: Tensor, simplex_size: int) -> Tensor:
    """A softmax over every `simplex_size` neighbours of the last axis (arXiv:2204.00616)."""
    return torch.softmax(values.unflatten(-1, (-1, simplex_size)), dim=-1).flatten(-2)


@fast_path("rl_lab.kernels.cpu_normed:MISH")
def mish(values: Tensor) -> Tensor:
    """x * tanh(log(1 + e^x)) (arXiv:1908.08681)."""
    return F.mish(values)


@fast_path("rl_lab.kernels.cpu_normed:PRODUCTS")
def products(rows: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """Of each member its rows `[E, R, in]`, weights `[E, in, out]` and bias `[E, 1, out]`: `[E, R, out]`."""
    return torch.baddbmm(biases, rows, weights)


class NormedMLP(nn.Module):
    """`members` networks side by side: linear, LayerNorm and Mish for each hidden size, then a linear layer.

    weight_i  [E, in, out]     dropout comes after the first linear layer, where the caller asks for it
    simplex_size: the last layer is normed as well, and SimNorm takes the place of Mish.
    """

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int],
        output_size: int,
        *,
        members: int = 1,
        simplex_size: int | None = None,
        dropout: float = 0.0,
        starts_at_zero: bool = False,
    ) -> None:
        super().__init__()
        if any(size < 1 for size in hidden_sizes):
            raise ConfigError(f"hidden layers are {list(hidden_sizes)}: write whole numbers from 1 on.")
        if simplex_size is not None and (simplex_size < 1 or output_size % simplex_size):
            raise ConfigError(
                f"simplex_size is {simplex_size}, which does not divide the latent's {output_size} numbers: write a "
                "divisor, such as 8."
            )
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout is {dropout}: write a number from 0 to below 1, such as 0.01.")
        sizes = [input_size, *hidden_sizes, output_size]
        self.simplex_size, self.dropout = simplex_size, dropout
        self.weights = nn.ParameterList(
            nn.init.trunc_normal_(torch.empty(members, *pair), std=INITIAL_STD) for pair in pairwise(sizes)
        )
        self.biases = nn.ParameterList(torch.zeros(members, 1, size) for size in sizes[1:])
        normed = sizes[1:] if simplex_size is not None else sizes[1:-1]
        self.norm_weights = nn.ParameterList(torch.ones(members, 1, size) for size in normed)
        self.norm_biases = nn.ParameterList(torch.zeros(members, 1, size) for size in normed)
        self.output_size = output_size
        if starts_at_zero:
            nn.init.zeros_(self.weights[-1])

    @fast_path("rl_lab.kernels.gpu:NORMED_MLP")
    def forward(self, inputs: Tensor, *, drop: bool = False, members: Tensor | None = None) -> Tensor:
        """`[..., input_size]` to `[E, ..., output_size]`; of all members, or of those `[E]` that are named."""
        groups = (self.weights, self.biases, self.norm_weights, self.norm_biases)
        weights, biases, norm_weights, norm_biases = (
            [each if members is None else each.index_select(0, members) for each in group] for group in groups
        )
        last = len(weights) - 1
        hidden = inputs.reshape(-1, inputs.shape[-1]).expand(len(weights[0]), -1, -1)
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            hidden = products(hidden, weight, bias)
            if index == 0 and drop and self.dropout:
                hidden = F.dropout(hidden, self.dropout)
            if index < len(norm_weights):
                normed = F.layer_norm(hidden, hidden.shape[-1:])
                hidden = torch.addcmul(norm_biases[index], normed, norm_weights[index])
                hidden = simnorm(hidden, self.simplex_size) if index == last else mish(hidden)  # type: ignore[arg-type]
        return hidden.unflatten(1, inputs.shape[:-1])


class TaskEmbedding(nn.Module):
    """A vector for each of several tasks, at most of length 1 (section 3.3): longer ones are scaled down."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.uniform_(torch.empty(count, size), -INITIAL_STD, INITIAL_STD))

    def forward(self, task: Tensor) -> Tensor:
        """Numbers of tasks `[...]` to `[..., size]`."""
        vectors = F.embedding(task, self.weight)
        return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1.0)


class ImplicitEncoder(nn.Module):
    """Observations to latents: vectors through an MLP, images through four convolutions, several through both.

    Of images alone whose convolutions make `latent_size` numbers, such as 64 x 64 pixels and 512, these numbers are the
    simplices, as in nicklashansen/tdmpc2 (common/layers.py `conv`); everything else passes a normed layer first.
    Where the environment has several tasks (an observation `task`), a latent ends with the embedding of its own, so
    that whatever reads it knows the task.
    """

    def __init__(
        self,
        *,
        observation: dict[str, ArraySpec],
        latent_size: int = 512,
        simplex_size: int = 8,
        layers: int = 2,
        units: int = 256,
        channels: int = 32,
        task_size: int = 96,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ConfigError(f"components.encoder.layers is {layers}: write a whole number from 1 on.")
        task_size = checked_task_size(observation, task_size)
        tasks = observation[TASK].num_values[0] if task_size else 0
        specs = selected_observation({key: each for key, each in observation.items() if key != TASK}, keys)
        self.image_keys = tuple(key for key, spec in specs.items() if spec.is_image)
        self.vector_keys = tuple(key for key in specs if key not in self.image_keys)
        self.images = nn.ModuleDict({module_name(key): ImageTower(specs[key], channels) for key in self.image_keys})
        self.vectors = nn.ModuleDict({module_name(key): make_reader(key, specs[key]) for key in self.vector_keys})
        width = sum(part.output_size for part in (*self.images.values(), *self.vectors.values()))  # type: ignore[misc]
        self.simplex_size, self.latent_size, self.output_size = simplex_size, latent_size, latent_size + task_size
        hidden = [units] * (layers - 1 if self.vector_keys else 0)
        is_whole = not self.vector_keys and not tasks and width == latent_size and latent_size % simplex_size == 0
        self.mlp = None if is_whole else NormedMLP(width + task_size, hidden, latent_size, simplex_size=simplex_size)
        self.task = TaskEmbedding(tasks, task_size) if tasks else None

    def forward(self, observation: Batch) -> Tensor:
        """Rows `[..., *shape]` per key to latents `[..., latent_size]`, with several tasks to `[..., output_size]`."""
        parts = [tower(observation[key]) for key, tower in zip(self.image_keys, self.images.values(), strict=True)]
        readers = zip(self.vector_keys, self.vectors.values(), strict=True)
        parts += [reader(observation[key]) for key, reader in readers]
        if self.mlp is None:
            return simnorm(torch.cat(parts, dim=-1), self.simplex_size)
        if self.task is None:
            return self.mlp(torch.cat(parts, dim=-1)).squeeze(0)
        task = self.task(observation[TASK])
        return torch.cat((self.mlp(torch.cat((*parts, task), dim=-1)).squeeze(0), task), dim=-1)


def checked_task_size(observation: dict[str, ArraySpec], size: int) -> int:
    """Numbers of a task's embedding: none where there is one task."""
    if size < 1:
        raise ConfigError(f"task_size is {size}: write a whole number from 1 on, such as 96.")
    return size if TASK in observation else 0


class ImageTower(nn.Module):
    """Four convolutions (nicklashansen/tdmpc2, common/layers.py `conv`), pixels scaled into [-0.5, 0.5]."""

    stages = ((7, 2), (5, 2), (3, 2), (3, 1))  # kernel and stride of each

    def __init__(self, spec: ArraySpec, channels: int) -> None:
        super().__init__()
        height, width, colours = spec.shape
        if min(height, width) < 36:  # 36 -> 15 -> 6 -> 2: a kernel of 3 no longer fits below
            raise ConfigError(
                f"components.encoder: images of {height}x{width} pixels are too small for its four convolutions; write "
                "`environment.image_size: 64`, or leave the image out with `components.encoder.keys`."
            )
        sizes = [colours, *[channels] * len(self.stages)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, kernel, stride)
            for (before, after), (kernel, stride) in zip(pairwise(sizes), self.stages, strict=True)
        )
        with torch.no_grad():
            self.output_size = self(torch.zeros(1, *spec.shape, dtype=torch.uint8)).shape[-1]

    def forward(self, image: Tensor) -> Tensor:
        """`[..., height, width, C]` uint8 to `[..., output_size]`."""
        pixels = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2).to(torch.float32) * (1.0 / 255.0) - 0.5
        for index, convolution in enumerate(self.convolutions):
            pixels = convolution(pixels)
            if index < len(self.convolutions) - 1:
                pixels = torch.relu(pixels)
        return pixels.flatten(1).unflatten(0, image.shape[:-3])


class LatentNetwork(nn.Module):
    """What reads a latent and, for most, an action beside it: its layers, and the MLP it is made of."""

    mlp: NormedMLP

    def __init__(self, *, input_size: int, action: ActionSpec, layers: int = 2, units: int = 512) -> None:
        super().__init__()
        if layers < 0:
            raise ConfigError(f"layers is {layers}: write a whole number from 0 on.")
        self.latent_size, self.action_size = input_size, sum(action.sizes)
        self.hidden_sizes = [units] * layers

    def make_mlp(self, outputs: int, *, reads_action: bool = True, **settings: Any) -> NormedMLP:
        inputs = self.latent_size + (self.action_size if reads_action else 0)
        return NormedMLP(inputs, self.hidden_sizes, outputs, **settings)


class LatentDynamics(LatentNetwork):
    """`d(z, a)`: the latent one agent step later, of the same task."""

    def __init__(
        self,
        *,
        observation: dict[str, ArraySpec] | None = None,
        simplex_size: int = 8,
        task_size: int = 96,
        **network: Any,
    ) -> None:
        super().__init__(**network)
        self.task_size = checked_task_size(observation or {}, task_size)
        self.mlp = self.make_mlp(self.latent_size - self.task_size, simplex_size=simplex_size)
        self.output_size = self.latent_size

    def forward(self, latent: Tensor, action: Tensor) -> Tensor:
        """`[..., Z]` and `[..., A]` to `[..., Z]`."""
        after = self.mlp(torch.cat((latent, action), dim=-1)).squeeze(0)
        return torch.cat((after, latent[..., -self.task_size :]), dim=-1) if self.task_size else after


class ImplicitReward(LatentNetwork):
    """`R(z, a)`: a softmax over bins of symlog."""

    bins: Tensor

    def __init__(self, *, bins: int = 101, **network: Any) -> None:
        super().__init__(**network)
        self.mlp = self.make_mlp(bins, starts_at_zero=True)
        self.register_buffer(
            "bins", symlog_bins(bins, largest=LARGEST_SYMLOG), persistent=False
        )  # known from the count

    def forward(self, latent: Tensor, action: Tensor) -> SymlogTwoHot:
        """`[..., Z]` and `[..., A]` to a prediction of `[...]`."""
        return SymlogTwoHot(self.mlp(torch.cat((latent, action), dim=-1)).squeeze(0), self.bins)


class CriticEnsemble(LatentNetwork):
    """`Q_i(z, a)`: critics, of which two drawn at random say what an action is worth (REDQ, arXiv:2101.05982)."""

    bins: Tensor

    def __init__(self, *, bins: int = 101, members: int = 5, dropout: float = 0.01, **network: Any) -> None:
        super().__init__(**network)
        if members < 1:
            raise ConfigError(f"controllers.critic.members is {members}: write a whole number from 1 on.")
        self.mlp = self.make_mlp(bins, members=members, dropout=dropout, starts_at_zero=True)
        self.members = members
        self.register_buffer("bins", symlog_bins(bins, largest=LARGEST_SYMLOG), persistent=False)

    def forward(self, latent: Tensor, action: Tensor, *, drop: bool = False) -> SymlogTwoHot:
        """`[..., Z]` and `[..., A]` to predictions of `[E, ...]`; `drop` as while learning."""
        return SymlogTwoHot(self.mlp(torch.cat((latent, action), dim=-1), drop=drop), self.bins)

    def value(self, latent: Tensor, action: Tensor, *, of_two: Literal["least", "mean"], drop: bool = False) -> Tensor:
        """The least or the mean `[...]` of two critics drawn for this call; no other is evaluated."""
        drawn = torch.rand(self.members, device=latent.device).argsort()[:2]
        logits = self.mlp(torch.cat((latent, action), dim=-1), drop=drop, members=drawn)
        values = SymlogTwoHot(logits, self.bins).mean()
        return values.amin(dim=0) if of_two == "least" else values.mean(dim=0)


class LatentContinue(LatentNetwork):
    """The logit `[...]` that an episode goes on after a latent `[..., Z]` was reached."""

    def __init__(self, **network: Any) -> None:
        super().__init__(**network)
        self.mlp = self.make_mlp(1, reads_action=False)

    def forward(self, latent: Tensor) -> Tensor:
        return self.mlp(latent).squeeze(0).squeeze(-1)


class PolicyPrior(LatentNetwork):
    """`p(z)`: a normal pressed into (-1, 1) by tanh; it proposes plans, and acts where nothing plans."""

    def __init__(self, *, log_std_bounds: tuple[float, float] = (-10.0, 2.0), **network: Any) -> None:
        super().__init__(**network)
        if log_std_bounds[0] >= log_std_bounds[1]:
            raise ConfigError(
                f"controllers.actor.log_std_bounds is {list(log_std_bounds)}: write [lowest, highest], such as "
                "[-10.0, 2.0]."
            )
        self.mlp = self.make_mlp(2 * self.action_size, reads_action=False)
        self.log_std_bounds = log_std_bounds

    def forward(self, latent: Tensor) -> SquashedGaussian:
        """`[..., Z]` to a distribution over actions `[..., A]`."""
        mean, spread = self.mlp(latent).squeeze(0).float().chunk(2, dim=-1)
        lowest, highest = self.log_std_bounds
        return SquashedGaussian(mean, lowest + 0.5 * (highest - lowest) * (torch.tanh(spread) + 1.0))
