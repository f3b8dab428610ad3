"""The losses of SAC there and back at once, beside the same losses as autograd finds them."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import Tensor

from rl_lab.components.heads.soft_actor_critic import Draw, SoftActor, Temperature, TwinCritic
from rl_lab.components.networks.ensemble import EnsembleMLP
from rl_lab.kernels.soft_losses import KnownDraw, critic_loss, decide, policy_loss, temperature_loss
from rl_lab.types import ActionSpec

ACTION = ActionSpec("continuous", (2,))
ROWS = 40


def twins(activation: str = "relu", hidden_sizes: tuple[int, ...] = (16, 8)) -> TwinCritic:
    torch.manual_seed(3)
    return TwinCritic(input_size=3, action=ACTION, hidden_sizes=hidden_sizes, activation=activation)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("hidden_sizes", [(16,), (16, 8), (8, 16, 8)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_critics_loss_and_gradients(activation: str, hidden_sizes: tuple[int, ...], is_weighted: bool) -> None:
    critic = twins(activation, hidden_sizes)
    features, action, target = torch.randn(ROWS, 3), torch.rand(ROWS, 2), torch.randn(ROWS)
    weight = torch.rand(ROWS) if is_weighted else None
    loss, values, known = critic_loss(critic, features, action, target, weight)
    assert known is not None and not loss.requires_grad
    assert all(map(operator.is_, known.parameters, critic.parameters()))

    reference = copy.deepcopy(critic).double()
    expected = reference(features.double(), action.double())
    error = (expected - target).square() * (1.0 if weight is None else weight)
    error.mean().backward()
    torch.testing.assert_close(values, expected.detach().float())
    torch.testing.assert_close(loss, error.mean().detach().float())
    for ours, theirs in zip(known.gradients, reference.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours, theirs.grad.float(), rtol=1e-4, atol=1e-6)
    assert torch.equal(known.flat, torch.cat([gradient.flatten() for gradient in known.gradients]))


def test_frozen_layers_take_no_gradient() -> None:
    critic = twins()
    batch = torch.randn(ROWS, 3), torch.rand(ROWS, 2), torch.randn(ROWS), None
    everything = critic_loss(critic, *batch).known
    assert everything is not None
    expected = [gradient.clone() for gradient in everything.gradients[1:]]
    critic.networks.weights[0].requires_grad_(False)
    found = critic_loss(critic, *batch).known
    assert found is not None and all(map(operator.is_, found.parameters, list(critic.parameters())[1:]))
    assert all(map(torch.equal, found.gradients, expected)) and len(found.gradients) == len(expected)
    critic.requires_grad_(False)
    nothing = critic_loss(critic, *batch).known
    assert nothing is not None and nothing.parameters == []


def test_features_that_learn_get_their_gradient() -> None:
    features = torch.randn(ROWS, 3, requires_grad=True)
    critic_loss(twins(), features, torch.rand(ROWS, 2), torch.randn(ROWS), None).loss.backward()
    assert features.grad is not None and float(features.grad.abs().sum()) > 0


def deciding(activation: str, hidden_sizes: tuple[int, ...]) -> tuple[SoftActor, TwinCritic, Tensor, Tensor]:
    """An actor, critics of which each is the lesser one somewhere, and rows of before and after."""
    critic, (features, later) = twins(activation, hidden_sizes), torch.randn(2, ROWS, 3)
    actor = SoftActor(input_size=3, action=ACTION, hidden_sizes=hidden_sizes, activation=activation)
    with torch.no_grad():
        action = actor.decide(features, later)[0].action  # type: ignore[union-attr]
        critic.networks.biases[-1] -= critic.networks(features, action).median(dim=1, keepdim=True).values
    return actor, critic, features, later


@pytest.mark.parametrize("hidden_sizes", [(16,), (16, 8), (8, 16, 8)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_policys_loss_goes_back_through_the_lesser_critic(activation: str, hidden_sizes: tuple[int, ...]) -> None:
    actor, critic, features, later = deciding(activation, hidden_sizes)
    temperature = torch.tensor(0.3)
    torch.manual_seed(5)
    policy, next_policy = decide(actor, critic, features, later)
    assert isinstance(policy, KnownDraw)
    loss, entropy, known = policy_loss(critic, features, policy, temperature)
    assert known is not None and all(map(operator.is_, known.parameters, actor.parameters()))

    torch.manual_seed(5)
    drawn, next_drawn = actor.decide(features, later)
    assert isinstance(drawn, Draw) and isinstance(next_drawn, Draw)
    torch.testing.assert_close(next_policy.action, next_drawn.action)
    torch.testing.assert_close(next_policy.entropy, next_drawn.entropy)
    values = critic.networks(features, drawn.action, frozen=True).squeeze(-1)
    assert 0 < int((values[0] < values[1]).sum()) < ROWS
    expected = -(values.amin(dim=0) + 0.3 * drawn.entropy).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(entropy, drawn.entropy.detach().mean())
    for ours, parameter in zip(known.gradients, actor.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in critic.parameters())


def test_a_frozen_actor_has_nothing_to_change() -> None:
    actor, critic, features, later = deciding("relu", (8,))
    actor.requires_grad_(False)
    policy, _ = decide(actor, critic, features, later)
    known = policy_loss(critic, features, policy, torch.tensor(0.3)).known
    assert known is not None and known.parameters == []
    drawn, _ = actor.decide(features, later)
    assert not policy_loss(critic, features, drawn, torch.tensor(0.3)).loss.requires_grad


def test_critics_that_are_not_plain_are_left_to_autograd() -> None:
    actor, critic, features, later = deciding("relu", (8,))
    policy, _ = decide(actor, twins("elu"), features, later)
    assert not isinstance(policy, KnownDraw)
    loss, _, known = policy_loss(critic, features, policy, torch.tensor(0.3))
    assert loss.requires_grad and known is None
    with torch.no_grad():
        assert not isinstance(decide(actor, critic, features, later)[0], KnownDraw), "nothing to learn"


def test_the_temperatures_gradient_is_its_loss() -> None:
    temperature = Temperature(action=ACTION, initial=0.5)
    loss, known = temperature_loss(temperature, torch.tensor(3.0), None)
    assert float(loss) == pytest.approx(0.5 * (3.0 + 2.0)), "minus two dimensions are asked for"
    assert known is not None and known.parameters == [temperature.log_value]
    expected = temperature.loss(torch.tensor(3.0))
    expected.backward()
    assert temperature.log_value.grad is not None
    torch.testing.assert_close(known.gradients[0], temperature.log_value.grad)
    temperature.requires_grad_(False)
    assert temperature_loss(temperature, torch.tensor(3.0), None)[1] is None


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
