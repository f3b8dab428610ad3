"""An ensemble is its networks side by side: the same values, the same gradients, whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.networks.ensemble import EnsembleMLP
from rl_lab.training.target_network import frozen
from rl_lab.types import ConfigError


def make(activation: str = "relu", *, size: int = 2, output_size: int = 1) -> EnsembleMLP:
    torch.manual_seed(0)
    return EnsembleMLP(
        size=size, input_size=5, hidden_sizes=(16, 8), output_size=output_size, activation=activation
    ).double()


def apart(networks: EnsembleMLP, rows: Tensor) -> Tensor:
    """Every network on its own, layer by layer, with torch's own operations."""
    outputs = []
    for index in range(networks.size):
        hidden = rows
        for layer, (weight, bias) in enumerate(zip(networks.weights, networks.biases, strict=True)):
            hidden = F.linear(hidden, weight[index], bias[index, 0])
            if layer < len(networks.weights) - 1:
                hidden = networks.activation(hidden)
        outputs.append(hidden)
    return torch.stack(outputs)


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])
@pytest.mark.parametrize(("size", "output_size"), [(2, 1), (1, 4), (3, 2)])
def test_an_ensemble_equals_separate_networks(activation: str, size: int, output_size: int) -> None:
    networks = make(activation, size=size, output_size=output_size).float()
    features, action = torch.randn(40, 3, requires_grad=True), torch.randn(40, 2, requires_grad=True)
    learning = [features, action, *networks.parameters()]
    upstream = torch.randn(size, 40, output_size)
    together, alone = networks(features, action), apart(networks, torch.cat((features, action), dim=1))
    torch.testing.assert_close(together, alone)
    for ours, theirs in zip(
        torch.autograd.grad(together, learning, upstream), torch.autograd.grad(alone, learning, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_frozen_networks_pass_gradients_on_and_take_none() -> None:
    networks = make().float()
    features, action = torch.randn(40, 3), torch.randn(40, 2, requires_grad=True)
    with frozen(networks):
        networks(features, action).sum().backward()
    assert action.grad is not None and action.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in networks.parameters())


def test_double_precision_goes_layer_by_layer_and_agrees() -> None:
    networks, rows = make(), torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(networks(rows), apart(networks, rows))


def test_weights_start_within_the_reference_bounds() -> None:
    first, *_ = make().weights
    assert first.abs().max() <= 5**-0.5
    assert first.abs().max() > 0.9 * 5**-0.5
    assert not torch.equal(first[0], first[1]), "twins that start alike would stay alike"


@pytest.mark.parametrize("hidden_sizes", [(), (0,), "64"])
def test_layers_that_cannot_be_are_refused(hidden_sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="ensemble hidden_sizes is .* a list of at least one whole number"):
        EnsembleMLP(size=2, input_size=3, hidden_sizes=hidden_sizes, output_size=1)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="ensemble activation: 'rellu' is not known.* Did you mean 'relu'"):
        EnsembleMLP(size=2, input_size=3, hidden_sizes=(4,), output_size=1, activation="rellu")


def test_layer_norm_normalises_each_member_by_itself() -> None:
    torch.manual_seed(0)
    ensemble = EnsembleMLP(size=2, input_size=3, hidden_sizes=(4,), output_size=1, norm="layer")
    rows = torch.randn(5, 3)
    for member in range(2):
        hidden = F.linear(rows, ensemble.weights[0][member], ensemble.biases[0][member, 0])
        hidden = torch.relu(F.layer_norm(hidden, (4,)))
        expected = F.linear(hidden, ensemble.weights[1][member], ensemble.biases[1][member, 0])
        assert torch.allclose(ensemble(rows)[member], expected, atol=1e-6)
