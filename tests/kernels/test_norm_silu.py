"""Norm and SiLU as one node equal the same two, one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.world_model.layers import NORM_EPSILON, Layer, RMSNorm
from rl_lab.kernels.norm_silu import norm_silu


@pytest.mark.parametrize("leading", [(5,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("is_weight_frozen", [False, True])
def test_output_and_gradients_equal_those_of_norm_then_silu(leading: tuple[int, ...], is_weight_frozen: bool) -> None:
    torch.manual_seed(1)
    norm = RMSNorm(6)
    norm.weight.data.normal_()
    norm.weight.requires_grad_(not is_weight_frozen)
    total = torch.randn(*leading, 6, requires_grad=True)
    direction = torch.randn(*leading, 6)
    learned = [total] if is_weight_frozen else [total, norm.weight]
    expected = F.silu(norm(total))
    wanted = torch.autograd.grad((expected * direction).sum(), learned)
    found = norm_silu(total, None, norm.weight, epsilon=NORM_EPSILON)
    got = torch.autograd.grad((found * direction).sum(), learned)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_comes_back_as_it_came() -> None:
    total = torch.randn(4, 6, dtype=torch.bfloat16)
    norm = RMSNorm(6)
    found = norm_silu(total, None, norm.weight, epsilon=NORM_EPSILON)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, F.silu(norm(total.float())).bfloat16(), rtol=2e-2, atol=2e-2)


def test_a_layer_of_rms_norm_and_silu_uses_it_and_others_do_not() -> None:
    assert Layer(3, 4).is_one_node
    assert not Layer(3, 4, norm="layer").is_one_node
    assert not Layer(3, 4, activation="elu").is_one_node


def test_the_bias_is_added_first_and_learns() -> None:
    torch.manual_seed(2)
    norm = RMSNorm(6)
    total, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    direction = torch.randn(4, 6)
    wanted = torch.autograd.grad((F.silu(norm(total + bias)) * direction).sum(), [total, bias])
    found = norm_silu(total, bias, norm.weight, epsilon=NORM_EPSILON)
    for ours, theirs in zip(torch.autograd.grad((found * direction).sum(), [total, bias]), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
