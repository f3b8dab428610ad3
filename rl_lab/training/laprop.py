"""LaProp: Adam with the two halves in the other order.

Adam averages gradients and then divides by their size; LaProp divides first and averages what comes out, so that
one huge gradient cannot dominate the average for long (Ziyin, Wang, Ueda 2020). With s the running mean square:

    s    <- beta2 * s + (1 - beta2) * g^2
    unit <- g / (sqrt(s / (1 - beta2^t)) + epsilon)
    m    <- beta1 * m + (1 - beta1) * unit
    p    <- p * (1 - learning_rate * weight_decay) - learning_rate * m / (1 - beta1^t)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_lab.training.capture import is_capturing
from rl_lab.training.update_rules import UpdateRule


class LaProp(UpdateRule):
    """LaProp with decoupled weight decay."""

    slots = ("mean", "mean_square")
    _pieces: Any = None  # on a GPU: where the tensors of one kernel lie

    def change(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: dict[str, list[Tensor]],
        count: int | list[Tensor],
        learning_rate: float | Tensor,
        divisor: Tensor | None,
    ) -> None:
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        if self._change_at_once(parameters, gradients, state, count, learning_rate):
            return
        beta1, beta2 = self.betas
        mean, mean_square = state["mean"], state["mean_square"]
        torch._foreach_mul_(mean_square, beta2)
        torch._foreach_addcmul_(mean_square, gradients, gradients, value=1.0 - beta2)
        torch._foreach_mul_(mean, beta1)
        if self.weight_decay:
            torch._foreach_mul_(parameters, 1.0 - learning_rate * self.weight_decay)
        if isinstance(count, list) or isinstance(learning_rate, Tensor):
            assert isinstance(count, list), "counts and the learning rate are both tensors or both numbers"
            self._finish_static(parameters, gradients, state, count, learning_rate)
            return
        spread = torch._foreach_sqrt(mean_square)
        torch._foreach_div_(spread, (1.0 - beta2**count) ** 0.5)
        torch._foreach_add_(spread, self.epsilon)
        torch._foreach_addcdiv_(mean, gradients, spread, value=1.0 - beta1)
        torch._foreach_add_(parameters, mean, alpha=-learning_rate / (1.0 - beta1**count))

    def _change_at_once(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: dict[str, list[Tensor]],
        counts: int | list[Tensor],
        learning_rate: float | Tensor,
    ) -> bool:
        """On a GPU, with gradients that always lie at the same places: one kernel."""
        if not (isinstance(counts, list) and self.gradients_stay and parameters[0].is_cuda and not self.weight_decay):
            return False
        from rl_lab.kernels.triton.laprop import PiecesByAddress

        self._pieces = self._pieces or PiecesByAddress()
        lists = (parameters, gradients, state["mean"], state["mean_square"])
        pieces = self._pieces.of(*lists, may_make=not is_capturing())
        if pieces is None:
            return False
        beta1, beta2 = self.betas
        count = torch.stack(counts).double()
        rates = (learning_rate / (1.0 - beta1**count)).float()
        pieces.change((1.0 - beta2**count).sqrt_().float(), rates, betas=self.betas, epsilon=self.epsilon)
        return True

    def _finish_static(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: dict[str, list[Tensor]],
        counts: list[Tensor],
        learning_rate: float | Tensor,
    ) -> None:
        """The same, where the device alone knows the counts: each tensor's bias correction is a factor of its own."""
        beta1, beta2 = self.betas
        count = torch.stack(counts).double()  # 1 - beta**count loses half its digits in float32 while counts are small
        room = self._room.of(parameters)
        spread = room.take(state["mean_square"]).sqrt_()
        spread.div_(room.by_row((1.0 - beta2**count).sqrt_().float())).add_(self.epsilon)
        torch._foreach_addcdiv_(state["mean"], gradients, room.views, value=1.0 - beta1)
        room.take(state["mean"]).mul_(room.by_row((learning_rate / (1.0 - beta1**count)).float()))
        torch._foreach_sub_(parameters, room.views)
