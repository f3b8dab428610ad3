"""C of "World Models" (Ha and Schmidhuber 2018, arXiv:1803.10122): one linear layer, small enough to be evolved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_lab.types import ActionSpec, ConfigError


class LinearController(nn.Module):
    """a = W x + b. Several controllers answer at once, each with parameters `[n]` of its own: W by rows, then b.

    Numbers are squashed by tanh; of choices the largest output wins. There is no gradient: `evolved` is what evolution
    has found so far.

    choices_in_order   one number from -1 to 1, cut into equal parts, chooses among the actions in this order, as the
                       paper's does for Doom (left, nothing, right); a third of the parameters where there are three
    """

    order: Tensor

    def __init__(self, *, input_size: int, action: ActionSpec, choices_in_order: Sequence[int] | None = None) -> None:
        super().__init__()
        self.action, self.input_size, self.outputs = action, input_size, sum(action.sizes)
        if choices_in_order is not None:
            if action.kind != "discrete" or sorted(choices_in_order) != list(range(self.outputs)):
                raise ConfigError(
                    f"controllers.controller.choices_in_order is {list(choices_in_order)}: it takes a discrete action "
                    f"and each of its numbers once; the action is {action.kind} with {self.outputs}. Write null for "
                    "a linear output for each."
                )
            self.register_buffer("order", torch.tensor(choices_in_order), persistent=False)
            self.outputs = 1
        self.is_one_number = choices_in_order is not None
        self.register_buffer("evolved", torch.zeros(self.outputs * (input_size + 1)))

    def forward(self, inputs: Tensor, parameters: Tensor) -> Tensor:
        """What controllers with parameters `[P, n]` answer to R inputs each, `[P, R, F]`: actions `[P, R, ...]`."""
        weight, bias = parameters.split((self.outputs * self.input_size, self.outputs), dim=-1)
        weight = weight.view(-1, self.outputs, self.input_size)
        output = torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2)).float()
        if self.is_one_number:
            part = (torch.tanh(output.squeeze(-1)) + 1.0) * (0.5 * len(self.order))
            return self.order[part.long().clamp(max=len(self.order) - 1)]
        if self.action.kind == "continuous":
            return torch.tanh(output)
        choices = [part.argmax(dim=-1) for part in output.split(self.action.sizes, dim=-1)]
        return choices[0] if self.action.kind == "discrete" else torch.stack(choices, dim=-1)
