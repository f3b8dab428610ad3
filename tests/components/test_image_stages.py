"""Image stages as single nodes equal the operations they stand for, forward and back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.world_model.decoder import DoublingCNN
from rl_lab.components.world_model.encoder import HalvingCNN
from rl_lab.components.world_model.image_stages import (
    convolution_of_images,
    doubling_convolution,
    filled_phases,
    image_error,
    phase_weights,
    pool_norm_silu,
    spread,
    spread_norm_silu,
)
from rl_lab.components.world_model.layers import NORM_EPSILON, RMSNorm


def norm_with(weight: Tensor, image: Tensor) -> Tensor:
    scale = torch.rsqrt(image.square().mean(dim=-1, keepdim=True) + NORM_EPSILON)
    return F.silu(image * scale * weight)


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(8))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((found * direction).sum(), inputs)
    wanted = torch.autograd.grad((expected * direction).sum(), inputs)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)


@pytest.fixture
def parts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)


def test_pooling_stage(parts: tuple[Tensor, Tensor]) -> None:
    bias, weight = parts
    image = torch.randn(2, 6, 4, 5, requires_grad=True)
    pooled = F.max_pool2d(image.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    found = pool_norm_silu(image, bias, weight, epsilon=NORM_EPSILON)
    assert_same(found, norm_with(weight, pooled + bias), [image, bias, weight])


def test_spreading_stage(parts: tuple[Tensor, Tensor]) -> None:
    bias, weight = parts
    phases = torch.randn(2, 3, 4, 2, 2, 5, requires_grad=True)
    found = spread_norm_silu(phases, bias, weight, epsilon=NORM_EPSILON)
    assert_same(found, norm_with(weight, spread(phases) + bias), [phases, bias, weight])


def test_phases_go_to_their_places() -> None:
    phases = torch.arange(8.0).view(1, 1, 2, 2, 2, 1)
    assert spread(phases)[0, :, :, 0].tolist() == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]


def test_a_row_of_taps_is_summed_as_drawn() -> None:
    weight = torch.zeros(1, 1, 5, 5)
    weight[0, 0, 2] = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    phases = phase_weights(weight).view(2, 2, 3, 3)
    assert phases[0, 0, 1].tolist() == [11.0, 1100.0, 10000.0]
    assert phases[0, 1, 1].tolist() == [1.0, 110.0, 11000.0]


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_doubling_then_convolving_equals_convolving_the_small_image(kernel: int) -> None:
    torch.manual_seed(kernel)
    image, weight = torch.randn(2, 3, 4, 6, requires_grad=True), torch.randn(5, 6, kernel, kernel, requires_grad=True)
    doubled = F.interpolate(image.permute(0, 3, 1, 2), scale_factor=2, mode="nearest")
    expected = F.conv2d(doubled, weight, padding=kernel // 2).permute(0, 2, 3, 1)
    assert_same(spread(doubling_convolution(image, weight)), expected, [image, weight])


def test_the_norm_is_that_of_layers() -> None:
    norm = RMSNorm(5)
    image = torch.randn(3, 5)
    torch.testing.assert_close(F.silu(norm(image)), norm_with(norm.weight, image))


def test_encoder_and_decoder_by_stages_equal_themselves_layer_by_layer() -> None:
    torch.manual_seed(3)
    style = {"depth": 2, "multipliers": (2, 3, 4), "kernel": 5, "activation": "silu", "norm": "rms"}
    encoder = HalvingCNN((32, 32, 3), **style)  # type: ignore[arg-type]
    decoder = DoublingCNN((32, 32, 3), deter=8, stoch_size=6, units=4, blocks=2, **style)  # type: ignore[arg-type]
    for parameter in (*encoder.parameters(), *decoder.parameters()):
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    image, features = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8), torch.randn(2, 14)
    for network, inputs in ((encoder, image), (decoder, features)):
        assert network.is_standard
        found = network(inputs)
        network.is_standard = False
        assert_same(found, network(inputs), list(network.parameters()))


def test_an_image_is_measured_against_one_of_its_own_size() -> None:
    phases, bias = torch.zeros(2, 3, 4, 12), torch.zeros(3)
    seen = torch.full((2, 6, 8, 3), 255, dtype=torch.uint8)
    assert image_error(phases, bias, seen).tolist() == [0.25 * 6 * 8 * 3] * 2  # sigmoid(0) is half of 255
    for other in (seen[:1], seen[:, :4], seen[..., :1]):
        with pytest.raises(AssertionError):
            image_error(phases, bias, other)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3, 9])
def test_on_a_gpu_images_are_read_and_measured_as_on_a_cpu(channels: int) -> None:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (4, 16, 16, channels), dtype=torch.uint8)
    into, out_of = torch.randn(8, channels, 5, 5) * 0.1, torch.randn(channels, 8, 5, 5) * 0.1
    found = []
    for device in ("cpu", "cuda"):
        weights = [each.to(device).requires_grad_() for each in (into.clone(), out_of.clone())]
        seen = convolution_of_images(image.to(device), weights[0])
        small = pool_norm_silu(seen, *torch.ones(2, 8, device=device), epsilon=1e-4)
        errors = image_error(filled_phases(small, weights[1]), torch.zeros(channels, device=device), image.to(device))
        errors.sum().backward()
        found.append([errors.detach().cpu(), *(each.grad.cpu() for each in weights)])  # type: ignore[union-attr]
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-2, atol=1e-2)  # convolutions in tf32
