"""Networks: shapes, starts, and refusals that say what to write."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from rl_lab.components.networks.cnn import (
    DreamerCNN,
    ImageNetwork,
    ImpalaCNN,
    NatureCNN,
    SmallCNN,
    make_image_network,
)
from rl_lab.components.networks.encoders import MLP
from rl_lab.components.networks.layers import linear
from rl_lab.types import ConfigError


def test_mlp_by_hand() -> None:
    network = MLP(input_size=2, hidden_sizes=[2], activation="relu", output_size=1)
    with torch.no_grad():
        network.hidden[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        network.hidden[0].bias.copy_(torch.tensor([0.5, 0.0]))
        assert network.output is not None
        network.output.weight.copy_(torch.tensor([[2.0, 3.0]]))
        network.output.bias.copy_(torch.tensor([1.0]))
    # hidden = relu(1 + .5, -4) = (1.5, 0);  output = 2 * 1.5 + 1 = 4
    assert network(torch.tensor([[1.0, 4.0]])).tolist() == [[4.0]]


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu", "elu", "gelu"])
@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
def test_mlp_keeps_leading_axes(activation: str, norm: str) -> None:
    network = MLP(input_size=3, hidden_sizes=(8, 5), activation=activation, norm=norm)
    assert network(torch.randn(2, 4, 3)).shape == (2, 4, 5)
    assert network.output_size == 5


def test_mlp_without_layers_passes_features_on() -> None:
    network = MLP(input_size=3, hidden_sizes=())
    features = torch.randn(2, 3)
    assert network(features) is features
    assert network.output_size == 3


def test_layers_start_orthogonal_with_their_gain() -> None:
    torch.manual_seed(0)
    layer = linear(6, 6, gain=0.5)
    torch.testing.assert_close(layer.weight @ layer.weight.t(), 0.25 * torch.eye(6), rtol=0, atol=1e-6)
    hidden = MLP(input_size=4, hidden_sizes=(4,)).hidden[0]
    torch.testing.assert_close(torch.linalg.matrix_norm(hidden.weight, 2), torch.tensor(math.sqrt(2.0)))
    assert not hidden.bias.any()


def test_a_copied_mlp_reads_its_own_weights() -> None:
    network = MLP(input_size=2, hidden_sizes=(3,))
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(torch.ones(1, 2)).any()
    assert network(torch.ones(1, 2)).any()


def test_a_loaded_and_a_moved_mlp_read_the_new_weights() -> None:
    network, other = MLP(input_size=2, hidden_sizes=(3,)), MLP(input_size=2, hidden_sizes=(3,))
    features = torch.ones(1, 2)
    network.load_state_dict(other.state_dict())
    assert torch.equal(network(features), other(features))
    network.load_state_dict({key: value.double() for key, value in other.state_dict().items()}, assign=True)
    assert network(features.double()).dtype == torch.float64
    assert other.double()(features.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("kind", "size"),
    [(NatureCNN, 84), (NatureCNN, 36), (ImpalaCNN, 64), (ImpalaCNN, 16), (SmallCNN, 16), (SmallCNN, 7)],
)
def test_image_networks_accept_their_sizes(kind: type[ImageNetwork], size: int) -> None:
    network = kind(image_shape=(size, size, 3), image_features=10)
    features = network(torch.rand(2, 3, size, size))
    assert features.shape == (2, 10)
    features.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_impala_has_the_papers_channels() -> None:
    network = ImpalaCNN(image_shape=(64, 64, 3))
    assert [stage.entry.out_channels for stage in list(network.convolutions)[:3]] == [16, 32, 32]
    assert network.projection.in_features == 8 * 8 * 32


def test_auto_chooses_by_size() -> None:
    assert type(make_image_network("auto", image_shape=(84, 84, 4), image_features=8)) is NatureCNN
    assert type(make_image_network("auto", image_shape=(84, 20, 4), image_features=8)) is SmallCNN


def test_nature_refuses_small_images_and_names_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"at least 36x36 pixels; this one is 16x20. Write image_network: small"):
        NatureCNN(image_shape=(16, 20, 3))


def test_misspelt_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"MLP activation: 'tanhh' is not known.*Did you mean 'tanh'"):
        MLP(input_size=2, activation="tanhh")
    with pytest.raises(ConfigError, match=r"MLP norm: 'layr' is not known; allowed: none, layer, rms.*'layer'"):
        MLP(input_size=2, norm="layr")
    with pytest.raises(ConfigError, match=r"image_network: 'natur' is not known; allowed: auto, nature.*'nature'"):
        make_image_network("natur", image_shape=(84, 84, 3), image_features=8)


@pytest.mark.parametrize("sizes", [(64, 0), "64", (6.5,)])
def test_impossible_hidden_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"hidden_sizes is .*; allowed is a list of whole numbers"):
        MLP(input_size=2, hidden_sizes=sizes)


def test_the_dreamer_network_halves_four_times_and_refuses_small_images() -> None:
    network = DreamerCNN(image_shape=(64, 64, 3), image_features=10)
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 10)
    assert network.projection.in_features == 8 * 32 * 2 * 2  # 64 -> 31 -> 14 -> 6 -> 2
    DreamerCNN(image_shape=(46, 46, 1))
    with pytest.raises(ConfigError, match="image_network 'dreamer' needs images of at least 46x46 pixels"):
        DreamerCNN(image_shape=(45, 64, 3))
