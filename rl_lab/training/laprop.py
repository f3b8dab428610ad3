"""LaProp: Adam with the two halves in the other order.

Adam averages gradients and then divides by their size; LaProp divides first and averages what comes out, so that
one huge gradient cannot dominate the average for long (Ziyin, Wang, Ueda 2020). With s the running mean square:

    s    <- beta2 * s + (1 - beta2) * g^2
    unit <- g / (sqrt(s / (1 - beta2^t)) + epsilon)
    m    <- beta1 * m + (1 - beta1) * unit
    p    <- p * (1 - learning_rate * weight_decay) - learning_rate * m / (1 - beta1^t)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_lab.kernels.door import fast_path
from rl_lab.training.update_rules import Members, UpdateRule


class LaProp(UpdateRule):
    """LaProp with decoupled weight decay."""

    slots = ("mean", "mean_square")

    @fast_path("rl_lab.kernels.gpu:LAPROP")
    def change(self, members: Members, learning_rate: float | Tensor, divisor: Tensor | None) -> None:
        parameters, gradients, count = members.parameters, members.gradients, members.count
        mean, mean_square = members.state["mean"], members.state["mean_square"]
        beta1, beta2 = self.betas
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        torch._foreach_mul_(mean_square, beta2)
        torch._foreach_addcmul_(mean_square, gradients, gradients, value=1.0 - beta2)
        denominator = torch._foreach_sqrt(mean_square)
        torch._foreach_div_(denominator, _per_tensor(_unbiased(beta2, count) ** 0.5))
        torch._foreach_add_(denominator, self.epsilon)
        torch._foreach_mul_(mean, beta1)
        torch._foreach_addcdiv_(mean, gradients, denominator, value=1.0 - beta1)
        if self.weight_decay:
            torch._foreach_mul_(parameters, 1.0 - learning_rate * self.weight_decay)
        rate = _per_tensor(learning_rate / _unbiased(beta1, count))
        if isinstance(rate, float):
            torch._foreach_add_(parameters, mean, alpha=-rate)
        else:
            torch._foreach_sub_(parameters, torch._foreach_mul(mean, rate))


def _unbiased(beta: float, count: int | list[Tensor]) -> float | Tensor:
    """1 - beta^t: of all tensors, or of each where the device alone knows the counts."""
    if isinstance(count, int):
        return 1.0 - beta**count
    return 1.0 - beta ** torch.stack(count).double()  # float32 loses half the digits while counts are small


def _per_tensor(number: float | Tensor) -> float | tuple[Tensor, ...]:
    return number.float().unbind() if isinstance(number, Tensor) else number
