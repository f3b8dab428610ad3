"""The losses of SAC as one node each, beside the same losses as autograd finds them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from rl_lab.components.ensembles import EnsembleMLP
from rl_lab.components.soft_actor_critic import Draw, SoftActor, TwinCritic
from rl_lab.components.soft_losses import critic_loss, policy_loss
from rl_lab.types import ActionSpec

ACTION = ActionSpec("continuous", (2,))
ROWS = 40


def twins(activation: str = "relu", hidden_sizes: tuple[int, ...] = (16, 8)) -> TwinCritic:
    torch.manual_seed(3)
    return TwinCritic(input_size=3, action=ACTION, hidden_sizes=hidden_sizes, activation=activation)


def by_autograd(critic: TwinCritic, features: Tensor, action: Tensor) -> Tensor:
    """Values `[2, B]`, layer by layer: double precision is never one node."""
    return copy.deepcopy(critic).double()(features.double(), action.double())


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("hidden_sizes", [(16,), (16, 8), (8, 16, 8)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_critics_loss_and_gradients(activation: str, hidden_sizes: tuple[int, ...], is_weighted: bool) -> None:
    critic = twins(activation, hidden_sizes)
    features, action, target = torch.randn(ROWS, 3), torch.rand(ROWS, 2), torch.randn(ROWS)
    weight = torch.rand(ROWS) if is_weighted else None
    loss, values = critic_loss(critic, features, action, target, weight)
    (loss * 0.5).backward()  # as accumulation over two shares would

    reference = copy.deepcopy(critic).double()
    expected = reference(features.double(), action.double())
    error = (expected - target).square() * (1.0 if weight is None else weight)
    (error.mean() * 0.5).backward()
    torch.testing.assert_close(values, expected.detach().float())
    torch.testing.assert_close(loss.detach(), error.mean().detach().float())
    for ours, theirs in zip(critic.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-4, atol=1e-6)


def test_gradients_of_several_losses_add_up_and_frozen_layers_take_none() -> None:
    critic = twins()
    critic.networks.weights[0].requires_grad_(False)
    batch = torch.randn(ROWS, 3), torch.rand(ROWS, 2), torch.randn(ROWS), None
    critic_loss(critic, *batch)[0].backward()
    once = critic.networks.weights[1].grad
    assert once is not None
    once = once.clone()
    critic_loss(critic, *batch)[0].backward()
    torch.testing.assert_close(critic.networks.weights[1].grad, 2.0 * once)
    assert critic.networks.weights[0].grad is None


def test_frozen_critics_have_a_loss_without_gradient() -> None:
    critic = twins().requires_grad_(False)
    loss, _ = critic_loss(critic, torch.randn(ROWS, 3), torch.rand(ROWS, 2), torch.randn(ROWS), None)
    assert not loss.requires_grad


def test_features_that_learn_get_their_gradient() -> None:
    features = torch.randn(ROWS, 3, requires_grad=True)
    critic_loss(twins(), features, torch.rand(ROWS, 2), torch.randn(ROWS), None)[0].backward()
    assert features.grad is not None and float(features.grad.abs().sum()) > 0


@pytest.mark.parametrize("hidden_sizes", [(16,), (16, 8), (8, 16, 8)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_policys_loss_goes_back_through_the_lesser_critic(activation: str, hidden_sizes: tuple[int, ...]) -> None:
    critic = twins(activation, hidden_sizes)
    features, entropy = torch.randn(ROWS, 3), torch.randn(ROWS, requires_grad=True)
    action, temperature = torch.rand(ROWS, 2).requires_grad_(), torch.tensor(0.3)
    with torch.no_grad():  # each is the lesser one somewhere
        critic.networks.biases[-1] -= critic.networks(features, action).median(dim=1, keepdim=True).values
    loss, mean_entropy = policy_loss(critic, features, Draw(action, entropy), temperature)
    ours = torch.autograd.grad(loss * 0.5, (action, entropy))

    values = by_autograd(critic, features, action)
    assert 0 < int((values[0] < values[1]).sum()) < ROWS
    expected = -(values.amin(dim=0) + 0.3 * entropy.double()).mean()
    torch.testing.assert_close(loss.detach(), expected.detach().float())
    torch.testing.assert_close(mean_entropy, entropy.detach().mean())
    for mine, theirs in zip(ours, torch.autograd.grad(expected * 0.5, (action, entropy)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
    assert not mean_entropy.requires_grad and all(parameter.grad is None for parameter in critic.parameters())


def test_a_frozen_actor_has_a_loss_without_gradient() -> None:
    actor = SoftActor(input_size=3, action=ACTION, hidden_sizes=(8,)).requires_grad_(False)
    features = torch.randn(ROWS, 3)
    policy, _ = actor.decide(features, features)
    assert not policy_loss(twins(), features, policy, torch.tensor(0.3))[0].requires_grad


# --- the workbench behind them ---


def make() -> EnsembleMLP:
    return EnsembleMLP(size=2, input_size=5, hidden_sizes=(16, 8), output_size=1)


@torch.no_grad()
def test_the_workbench_is_kept_until_rows_or_parameters_lie_elsewhere() -> None:
    networks = make()
    bench = networks.workbench(ROWS)
    assert networks.workbench(ROWS) is bench
    assert networks.workbench(ROWS + 1) is not bench
    bench, rows = networks.workbench(ROWS), torch.randn(ROWS, 5)
    networks.weights[0].mul_(2.0)  # an update in place is seen
    torch.testing.assert_close(bench.run(rows), networks(rows))
    networks.weights[0].data = networks.weights[0].data.clone() * 2.0  # as loading with assign or moving would
    assert networks.workbench(ROWS) is not bench
    torch.testing.assert_close(networks.workbench(ROWS).run(rows), networks(rows))


@torch.no_grad()
def test_a_copy_of_the_networks_has_a_workbench_of_its_own() -> None:
    networks, rows = make(), torch.randn(ROWS, 5)
    before = networks.workbench(ROWS).run(rows)
    copied = copy.deepcopy(networks)
    copied.weights[0].mul_(2.0)
    torch.testing.assert_close(copied.workbench(ROWS).run(rows), copied(rows))
    torch.testing.assert_close(networks.workbench(ROWS).run(rows), before)
