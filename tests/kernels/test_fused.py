"""The fused stack computes what the layers one by one compute, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.heads.actor_critic import Actor, Critic, act_and_judge
from rl_lab.components.networks.mlp import MLP
from rl_lab.kernels.fused import Stack, act_with, can_fuse, can_only_act, fused_stacks
from rl_lab.types import ActionSpec

PLAIN = {"tanh": torch.tanh, "relu": torch.relu}


def layers(generator: torch.Generator) -> list[torch.Tensor]:
    shapes = [(7, 5), (7,), (3, 7), (3,)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("leading", [(11,), (2, 4), ()])
@pytest.mark.parametrize("is_last_bare", [False, True])
def test_outputs_and_gradients_equal_those_of_single_layers(
    activation: str, leading: tuple[int, ...], is_last_bare: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = layers(generator)
    features = torch.randn((*leading, 5), generator=generator, requires_grad=True)
    expected = features
    for index in (0, 2):
        expected = F.linear(expected, parameters[index], parameters[index + 1])
        if index == 0 or not is_last_bare:
            expected = PLAIN[activation](expected)
    found = fused_stacks(features, [Stack(parameters, activation, is_last_bare)])[0]
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
    fused_stacks(features, [Stack(parameters, "tanh", True)])[0].sum().backward()
    assert parameters[0].grad is None and parameters[1].grad is None
    assert parameters[2].grad is not None and features.grad is not None


def test_tanh_is_exact_to_the_last_digits_even_far_out() -> None:
    identity, zero = torch.eye(1), torch.zeros(1)
    values = torch.linspace(-50.0, 50.0, 10_001).unsqueeze(1)
    found = fused_stacks(values, [Stack([identity, zero], "tanh", False)])[0]
    torch.testing.assert_close(found, torch.tanh(values.double()).float(), rtol=0.0, atol=2e-7)


def test_only_learning_from_plain_float32_rows_on_a_cpu_is_fused() -> None:
    features = torch.randn(64, 5)
    assert can_fuse(features)
    assert not can_fuse(features.double())
    assert not can_fuse(features[:63]), "few rows are faster layer by layer"
    with torch.no_grad():
        assert not can_fuse(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_fuse(features)


def test_an_mlp_gives_the_same_in_float32_fused_and_in_float64_layer_by_layer() -> None:
    torch.manual_seed(0)
    network = MLP(input_size=5, hidden_sizes=(8, 8), activation="tanh", output_size=2)
    features = torch.randn(70, 5)
    fused = network(features)
    torch.testing.assert_close(fused, network.double()(features.double()).float(), rtol=1e-5, atol=1e-6)


def test_two_stacks_together_equal_the_two_alone_and_add_up_where_they_read() -> None:
    generator = torch.Generator().manual_seed(5)
    stacks = [Stack(layers(generator), "tanh", True), Stack(layers(generator), "relu", True)]
    features = torch.randn((9, 5), generator=generator, requires_grad=True)
    weighting = torch.randn((2, 9, 3), generator=generator)
    everything = [features, *stacks[0].layers, *stacks[1].layers]
    alone = [fused_stacks(features, [stack])[0] for stack in stacks]
    together = fused_stacks(features, stacks)
    wanted = torch.autograd.grad(sum((y * w).sum() for y, w in zip(alone, weighting, strict=True)), everything)
    got = torch.autograd.grad(sum((y * w).sum() for y, w in zip(together, weighting, strict=True)), everything)
    for left, right in zip([*together, *got], [*alone, *wanted], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [8, 80])
def test_actor_and_critic_give_the_same_together_and_apart(rows: int) -> None:
    torch.manual_seed(1)
    actor = Actor(input_size=5, action=ActionSpec("discrete", (3,)), hidden_sizes=(8,))
    critic = Critic(input_size=5, hidden_sizes=(8,))
    features = torch.randn(rows, 5)
    policy, value = act_and_judge(actor, critic, features, None)
    torch.testing.assert_close(policy.logits, actor(features).logits)
    torch.testing.assert_close(value, critic(features))


@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("leading", [(8,), (2, 4), (6000,)])
@pytest.mark.parametrize("is_last_bare", [False, True])
def test_acting_gives_what_learning_gives(activation: str, leading: tuple[int, ...], is_last_bare: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn((*leading, 5), generator=generator)
    stack = Stack(layers(generator), activation, is_last_bare)
    kept = features.clone()
    found = act_with(features, stack)
    torch.testing.assert_close(found, fused_stacks(features, [stack])[0].detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(features, kept), "the observation was written to"


def test_only_acting_on_plain_float32_rows_goes_through_numpy() -> None:
    rows = torch.zeros(8, 5)
    assert not can_only_act(rows)  # gradients are wanted
    with torch.no_grad():
        assert can_only_act(rows)
        assert not can_only_act(rows.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert not can_only_act(rows)


def test_acting_follows_parameters_that_learn_move_or_are_copied() -> None:
    network = MLP(input_size=5, hidden_sizes=(7,), output_size=3)
    rows = torch.randn(4, 5)

    def assert_acts_as_it_learns(mlp: MLP) -> None:
        with torch.no_grad():
            acted = mlp(rows)
        torch.testing.assert_close(acted, F.linear(torch.tanh(mlp.hidden[0](rows)), *mlp.output.parameters()).detach())

    assert_acts_as_it_learns(network)
    network.hidden[0].weight.data.add_(1.0)  # learns in place
    assert_acts_as_it_learns(network)
    copied = copy.deepcopy(network)
    copied.hidden[0].weight.data.sub_(2.0)
    assert_acts_as_it_learns(copied)
    network.double().float()  # its memory moves
    assert_acts_as_it_learns(network)
    network.hidden[0].weight = torch.nn.Parameter(torch.randn(7, 5))
    assert_acts_as_it_learns(network)
