"""C of "World Models" (Ha and Schmidhuber 2018, arXiv:1803.10122): one linear layer, small enough to be evolved."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.types import ActionSpec


class LinearController(nn.Module):
    """a = W x + b. Several controllers answer at once, each with parameters `[n]` of its own: W by rows, then b.

    Numbers are squashed by tanh; of choices the largest output wins. There is no gradient: `evolved` is what evolution
    has found so far.
    """

    def __init__(self, *, input_size: int, action: ActionSpec) -> None:
        super().__init__()
        self.action, self.input_size, self.outputs = action, input_size, sum(action.sizes)
        self.register_buffer("evolved", torch.zeros(self.outputs * (input_size + 1)))

    def forward(self, inputs: Tensor, parameters: Tensor) -> Tensor:
        """What controllers with parameters `[P, n]` answer to R inputs each, `[P, R, F]`: actions `[P, R, ...]`."""
        weight, bias = parameters.split((self.outputs * self.input_size, self.outputs), dim=-1)
        weight = weight.view(-1, self.outputs, self.input_size)
        output = torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2)).float()
        if self.action.kind == "continuous":
            return torch.tanh(output)
        choices = [part.argmax(dim=-1) for part in output.split(self.action.sizes, dim=-1)]
        return choices[0] if self.action.kind == "discrete" else torch.stack(choices, dim=-1)
