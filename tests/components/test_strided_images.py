"""The image networks of PlaNet and Dreamer V1 and V2: sizes of the papers, losses by hand, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.world_model.decoder import ObservationDecoder
from rl_lab.components.world_model.encoder import WorldModelEncoder
from rl_lab.components.world_model.strided_images import StridedCNN, TransposedCNN
from rl_lab.types import ArraySpec, ConfigError

STYLE = {"multipliers": (1, 2, 4, 8), "activation": "relu", "norm": "none"}
IMAGE = {"image": ArraySpec((64, 64, 3), "uint8")}


def encoder(shape: tuple[int, ...] = (64, 64, 3), depth: int = 32, **style: object) -> StridedCNN:
    return StridedCNN(shape, depth=depth, **{**STYLE, **style})  # type: ignore[arg-type]


def decoder(depth: int = 2, channels: int = 3, **style: object) -> TransposedCNN:
    return TransposedCNN((64, 64, channels), input_size=5, depth=depth, **{**STYLE, **style})  # type: ignore[arg-type]


def test_an_image_becomes_the_1024_numbers_of_the_papers() -> None:
    network = encoder()
    assert [tuple(layer.weight.shape) for layer in network.convolutions] == [
        (32, 3, 4, 4),
        (64, 32, 4, 4),
        (128, 64, 4, 4),
        (256, 128, 4, 4),
    ]
    assert network.output_size == 1024
    assert network(torch.zeros(2, 64, 64, 3, dtype=torch.uint8)).shape == (2, 1024)


def test_features_are_drawn_with_the_kernels_of_the_papers() -> None:
    network = decoder(depth=32)
    assert network.first.weight.shape == (1024, 5)
    assert [tuple(layer.weight.shape) for layer in network.convolutions] == [
        (1024, 128, 5, 5),
        (128, 64, 5, 5),
        (64, 32, 6, 6),
        (32, 3, 6, 6),
    ]
    assert network(torch.randn(2, 5)).shape == (2, 64, 64, 3)


def test_pixels_are_centred_and_the_activation_follows_every_layer() -> None:
    network = encoder(depth=1, activation="tanh")
    grey = torch.full((1, 64, 64, 3), 255, dtype=torch.uint8)
    with torch.no_grad():
        for layer in network.convolutions:
            layer.weight.zero_()
            layer.weight[0, 0, 0, 0] = 2.0  # looks at one pixel of the first channel
    inside = torch.tensor(0.5)
    for _ in range(4):
        inside = torch.tanh(2.0 * inside)
    found = network(grey).unflatten(1, (2, 2, 8))
    assert found[0, :, :, 0].flatten().tolist() == pytest.approx([float(inside)] * 4)
    assert found[..., 1:].abs().max() == 0.0


def test_the_loss_is_the_squared_distance_to_pixels_around_zero() -> None:
    network = decoder()
    with torch.no_grad():
        network.convolutions[-1].weight.zero_()
        network.convolutions[-1].bias.copy_(torch.tensor([0.5, -0.5, 0.75]))
    features, white = torch.randn(2, 5), torch.full((2, 64, 64, 3), 255, dtype=torch.uint8)
    expected = 64 * 64 * (0.0 + 1.0 + 0.25**2)
    assert network.error(features, white).tolist() == pytest.approx([expected] * 2)
    assert network.draw(features)[0, 0, 0].tolist() == [1.0, 0.0, 1.0]  # what lies outside is cut off


def test_activations_lie_between_the_layers_and_not_after_the_last() -> None:
    network = decoder(depth=1, channels=1, norm="layer")
    assert len(network.norms) == 3
    with torch.no_grad():
        network.convolutions[-1].bias.fill_(-3.0)
        network.convolutions[-1].weight.zero_()
    assert network(torch.randn(1, 5)).unique().tolist() == [-3.0]  # relu would have made it 0


def test_encoder_and_decoder_take_them_by_name() -> None:
    eyes = WorldModelEncoder(observation=IMAGE, images="strided", depth=2, multipliers=(1, 2, 4, 8), norm="none")
    hand = ObservationDecoder(
        input_size=12, observation=IMAGE, deter=8, images="strided", depth=2, multipliers=(1, 2, 4, 8), norm="none"
    )
    rows = {"image": torch.randint(0, 256, (2, 3, 64, 64, 3), dtype=torch.uint8)}
    assert eyes(rows).shape == (2, 3, eyes.output_size) == (2, 3, 64)
    features = torch.randn(2, 3, 12)
    assert hand.loss(features, rows).shape == (2, 3)
    shown = hand.reconstruct(features)["image"]
    assert shown.shape == (2, 3, 64, 64, 3) and shown.dtype == torch.uint8


def test_they_learn_to_draw_what_they_see() -> None:
    torch.manual_seed(0)
    eyes = encoder(depth=4, activation="elu")
    hand = TransposedCNN((64, 64, 3), input_size=128, depth=4, **{**STYLE, "activation": "elu"})  # type: ignore[arg-type]
    image = torch.zeros(4, 64, 64, 3, dtype=torch.uint8)
    for index in range(4):
        image[index, 16 * index : 16 * index + 16] = 255  # a bar at four heights
    optimizer = torch.optim.Adam([*eyes.parameters(), *hand.parameters()], lr=1e-2)
    losses = []
    for _ in range(80):
        loss = hand.error(eyes(image), image).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]


def test_other_sizes_are_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match="strided reads 64x64 pixels alone, but these have 84x84. Resize.*halving"):
        encoder((84, 84, 3))
    with pytest.raises(ConfigError, match=r"strided has four layers, but multipliers is \[1, 2\]: write four numbers"):
        encoder(multipliers=(1, 2))
