"""The fused stack computes what the layers one by one compute, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.fused import can_fuse, fused_stack
from rl_lab.components.networks import MLP

PLAIN = {"tanh": torch.tanh, "relu": torch.relu}


def layers(generator: torch.Generator) -> list[torch.Tensor]:
    shapes = [(7, 5), (7,), (3, 7), (3,)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("leading", [(11,), (2, 4), ()])
def test_outputs_and_gradients_equal_those_of_single_layers(activation: str, leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = layers(generator)
    features = torch.randn((*leading, 5), generator=generator, requires_grad=True)
    expected = features
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        expected = PLAIN[activation](F.linear(expected, weight, bias))
    found = fused_stack(features, activation, parameters)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weighting = torch.randn(expected.shape, generator=generator)
    wanted = torch.autograd.grad((expected * weighting).sum(), [features, *parameters])
    got = torch.autograd.grad((found * weighting).sum(), [features, *parameters])
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_frozen_layers_get_no_gradient_and_pass_it_on() -> None:
    parameters = layers(torch.Generator().manual_seed(0))
    for tensor in parameters[:2]:
        tensor.requires_grad_(False)
    features = torch.randn(4, 5, requires_grad=True)
    fused_stack(features, "tanh", parameters).sum().backward()
    assert parameters[0].grad is None and parameters[1].grad is None
    assert parameters[2].grad is not None and features.grad is not None


def test_tanh_by_sigmoid_is_tanh_to_the_last_digits_even_far_out() -> None:
    identity, zero = torch.eye(1), torch.zeros(1)
    values = torch.linspace(-50.0, 50.0, 10_001).unsqueeze(1)
    found = fused_stack(values, "tanh", [identity, zero])
    torch.testing.assert_close(found, torch.tanh(values.double()).float(), rtol=0.0, atol=2e-7)


def test_only_plain_float32_on_a_cpu_is_fused() -> None:
    features = torch.randn(2, 5)
    assert can_fuse(features)
    assert not can_fuse(features.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_fuse(features)


def test_an_mlp_gives_the_same_in_float32_fused_and_in_float64_layer_by_layer() -> None:
    torch.manual_seed(0)
    network = MLP(input_size=5, hidden_sizes=(8, 8), activation="tanh", output_size=2)
    features = torch.randn(6, 5)
    fused = network(features)
    torch.testing.assert_close(fused, network.double()(features.double()).float(), rtol=1e-5, atol=1e-6)
