"""Several networks of one shape that read the same rows: the critics of SAC and their kin.

weight_i  [E, out, in]      E networks side by side
bias_i    [E, 1, out]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.layers import ACTIVATIONS, choose
from rl_lab.kernels.door import fast_path
from rl_lab.types import ConfigError


class EnsembleMLP(nn.Module):
    """`size` networks with hidden layers and one bare linear layer at the end.

    Weights and biases start uniform within 1 / sqrt(inputs), as in the reference implementations of SAC. norm: none, or
    layer, which normalises the hidden layers before their activation.
    """

    def __init__(
        self,
        *,
        size: int,
        input_size: int,
        hidden_sizes: Sequence[int],
        output_size: int,
        activation: str = "relu",
        norm: str = "none",
    ) -> None:
        super().__init__()
        if isinstance(hidden_sizes, str) or not hidden_sizes or any(width < 1 for width in hidden_sizes):
            raise ConfigError(
                f"ensemble hidden_sizes is {hidden_sizes!r}; allowed is a list of at least one whole number from 1 on. "
                "Write, say, [256, 256]."
            )
        self.size, self.output_size = size, output_size
        self.activation = choose(ACTIVATIONS, activation, place="ensemble activation")
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for before, after in pairwise([input_size, *hidden_sizes, output_size]):
            bound = 1.0 / math.sqrt(before)
            self.weights.append(nn.Parameter(torch.empty(size, after, before).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(size, 1, after).uniform_(-bound, bound)))
        self.norms: nn.ParameterList | None = None  # scale and shift of each hidden layer
        if choose({"none": False, "layer": True}, norm, place="ensemble norm"):
            widths = [width for width in hidden_sizes for _ in range(2)]
            starts = [torch.ones, torch.zeros] * len(hidden_sizes)
            self.norms = nn.ParameterList(start(size, 1, width) for start, width in zip(starts, widths, strict=True))

    @fast_path("rl_lab.kernels.gpu_ensemble:FORWARD")
    @fast_path("rl_lab.kernels.cpu_mlp:ENSEMBLE_FORWARD")
    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs `[B, F]`, `[B, A]`, ... side by side, to `[E, B, output_size]`."""
        hidden = torch.cat(inputs, dim=-1).expand(self.size, -1, -1)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.matmul(hidden, weight.transpose(1, 2)) + bias
            if index < len(self.weights) - 1:
                if self.norms is not None:
                    scale, shift = self.norms[2 * index], self.norms[2 * index + 1]
                    hidden = torch.addcmul(shift, F.layer_norm(hidden, hidden.shape[-1:]), scale)
                hidden = self.activation(hidden)
        return hidden
