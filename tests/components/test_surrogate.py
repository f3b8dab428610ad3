"""The clipped surrogate: its value by hand, its slope as autograd finds it, the same in numpy and in torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_lab.components.surrogate import surrogate_loss


def by_autograd(log_prob: Tensor, old: Tensor, advantage: Tensor, clip_range: float, valid: Tensor | None) -> Tensor:
    ratio = (log_prob - old).exp()
    lesser = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_range, 1.0 + clip_range) * advantage)
    return -lesser.mean() if valid is None else -(lesser * valid).sum() / valid.sum()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # inside the range: move
        (1.5, 2.0, -2.4, 0.0),  # good and already likelier than 1.2: no reward for more
        (1.5, -2.0, 3.0, 3.0),  # bad and likelier: move back
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely than 0.8: enough
        (0.5, 2.0, -1.0, -1.0),  # good and less likely: move back
    ],
)
def test_loss_and_slope_are_the_papers(ratio: float, advantage: float, loss: float, slope: float) -> None:
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    found = surrogate_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), clip_range=0.2)
    found.backward()
    assert found.tolist() == pytest.approx(loss, rel=1e-6)
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([slope], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["numpy", "torch"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_node_agrees_with_autograd_on_many_samples(dtype: torch.dtype, is_masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    log_prob = (torch.randn(8, 50, generator=generator, dtype=dtype) * 0.4).requires_grad_()
    old, advantage = (torch.randn(2, 8, 50, generator=generator, dtype=dtype) * 0.4).unbind()
    valid = torch.rand(8, 50, generator=generator) > 0.3 if is_masked else None
    expected = by_autograd(log_prob, old, advantage, 0.2, valid)
    (expected_slope,) = torch.autograd.grad(3.0 * expected, log_prob)
    found = surrogate_loss(log_prob, old, advantage, clip_range=0.2, valid=valid)
    (slope,) = torch.autograd.grad(3.0 * found, log_prob)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slope, expected_slope)
