"""Heads over actions: dueling, targets and losses by hand, the projection against a loop, and every refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_lab.components.heads.q_values import ActionNetwork, CategoricalQ, QuantileQ, QValues, of_action
from rl_lab.components.networks.noisy import without_noise
from rl_lab.types import ActionSpec, ConfigError

THREE = ActionSpec("discrete", (3,))
HEADS: list[type[Any]] = [QValues, CategoricalQ, QuantileQ]


def head(kind: type[Any], **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(input_size=4, action=THREE, hidden_sizes=[8], **settings)


def no_discount(count: int) -> dict[str, Tensor]:
    """Transitions that end: whatever comes next counts nothing."""
    return {"discount": torch.zeros(count), "next_action": torch.zeros(count, dtype=torch.int64)}


def loss_of(
    q_values: Any, output: Tensor, action: Tensor, *, next_output: Tensor, next_action: Tensor, **transition: Any
) -> tuple[Tensor, Tensor]:
    return q_values.loss(of_action(output, action), of_action(next_output, next_action), **transition)


# --- every head --------------------------------------------------------------------------------


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_values_have_one_number_per_action_whatever_the_leading_axes(kind: type[Any], dueling: bool) -> None:
    q_values = head(kind, dueling=dueling)
    for leading in ((5,), (2, 3), ()):
        features = torch.randn(*leading, 4)
        assert q_values.values(q_values(features)).shape == (*leading, 3)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_learning_with_fused_layers_gives_the_outputs_and_gradients_of_layer_by_layer(
    kind: type[Any], dueling: bool
) -> None:
    """64 rows are fused, fewer are not: the same numbers either way."""
    q_values = head(kind, dueling=dueling)
    features = torch.randn(64, 4)
    together = q_values(features)
    apart = torch.cat([q_values(part) for part in features.split(16)])
    assert torch.allclose(together, apart, atol=1e-6)
    parameters = list(q_values.parameters())
    found = torch.autograd.grad(together.square().sum(), parameters)
    expected = torch.autograd.grad(apart.square().sum(), parameters)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", HEADS)
def test_each_transition_has_a_priority_and_only_the_loss_teaches(kind: type[Any]) -> None:
    q_values = head(kind)
    output, following = q_values(torch.randn(6, 4)), q_values(torch.randn(6, 4)).detach()
    action = torch.arange(6) % 3
    loss, priority = loss_of(
        q_values,
        output,
        action,
        reward=torch.randn(6),
        discount=torch.full((6,), 0.9),
        next_output=following,
        next_action=action,
    )
    assert loss.shape == () and priority.shape == (6,)
    assert loss.requires_grad and not priority.requires_grad
    assert bool((priority >= 0).all())
    gradient = torch.autograd.grad(loss, output)[0]
    others = torch.ones(6, 3, dtype=torch.bool).scatter_(1, action.unsqueeze(1), False)
    assert bool((gradient[others] == 0).all()), "only the action taken learns"


def test_of_action_picks_one_action_of_each_row() -> None:
    output = torch.arange(12.0).reshape(2, 3, 2)
    assert of_action(output, torch.tensor([2, 0])).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert of_action(output[..., 0], torch.tensor([2, 0])).tolist() == [4.0, 6.0]


@pytest.mark.parametrize("numbers", [1, 5])
def test_dueling_adds_the_state_value_to_advantages_without_their_mean(numbers: int) -> None:
    torch.manual_seed(0)
    network = ActionNetwork(numbers, input_size=4, action=THREE, hidden_sizes=[8], dueling=True)
    features = torch.randn(7, 4)
    output = network(features).reshape(7, 3, numbers)
    assert network.value is not None
    value = network.value(features)  # [7, K]
    advantage = network.advantage(features).reshape(7, 3, numbers)
    assert torch.allclose(output.mean(1), value, atol=1e-6), "the mean over the actions is the state's value"
    differences = advantage - advantage[:, :1]
    assert torch.allclose(output - output[:, :1], differences, atol=1e-6), "actions differ by their advantages"


# --- expected values ---------------------------------------------------------------------------


ERRORS = {
    "output": torch.tensor([[9.0, 4.0, 9.0], [1.0, 9.0, 9.0]]),
    "action": torch.tensor([1, 0]),
    "reward": torch.tensor([1.0, -2.0]),
    "discount": torch.tensor([0.5, 0.0]),
    "next_output": torch.tensor([[0.0, 0.0, 8.0], [3.0, 0.0, 0.0]]),
    "next_action": torch.tensor([2, 0]),
}
"""Two transitions: target 1 + 0.5 * 8 = 5 against 4, and target -2 + 0 * 3 = -2 against 1."""


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 2.0])], ids=["unweighted", "weighted"])
@pytest.mark.parametrize(
    ("threshold", "losses", "gradients"),
    [
        (None, [0.5, 4.5], [-1.0, 3.0]),
        (1.0, [0.5, 3.0 - 0.5], [-1.0, 1.0]),
        (2.0, [0.5, 2.0 * (3.0 - 1.0)], [-1.0, 2.0]),
    ],
)
def test_the_error_of_expected_values_by_hand(
    threshold: float | None, losses: list[float], gradients: list[float], weight: Tensor | None
) -> None:
    output = ERRORS["output"].clone().requires_grad_()
    loss, priority = loss_of(head(QValues, huber_threshold=threshold), **{**ERRORS, "output": output}, weight=weight)
    first, second = (1.0, 1.0) if weight is None else weight.tolist()
    assert loss.item() == pytest.approx((first * losses[0] + second * losses[1]) / 2)
    assert priority.tolist() == [1.0, 3.0]
    (3.0 * loss).backward()
    expected = [[0.0, 1.5 * first * gradients[0], 0.0], [1.5 * second * gradients[1], 0.0, 0.0]]
    assert output.grad is not None and output.grad.tolist() == expected


@pytest.mark.parametrize("kind", [CategoricalQ, QuantileQ])
def test_weights_scale_the_loss_of_each_transition(kind: type[Any]) -> None:
    q_values = head(kind)
    output = q_values(torch.randn(2, 4)).detach()
    action = torch.tensor([0, 1])
    target = {"reward": torch.tensor([1.0, 2.0]), "next_output": torch.zeros_like(output), **no_discount(2)}
    weighted, _ = loss_of(q_values, output, action, **target, weight=torch.tensor([0.5, 2.0]))
    alone = [
        float(
            loss_of(q_values, output[i : i + 1], action[i : i + 1], **{k: v[i : i + 1] for k, v in target.items()})[0]
        )
        for i in range(2)
    ]
    assert weighted.item() == pytest.approx((0.5 * alone[0] + 2.0 * alone[1]) / 2)


# --- the categorical distribution --------------------------------------------------------------


def naive_projection(
    probability: np.ndarray, reward: float, discount: float, *, lowest: float, highest: float
) -> np.ndarray:
    """Atom by atom, rounding down and up, as the paper's algorithm is written."""
    count = len(probability)
    spacing = (highest - lowest) / (count - 1)
    projected = np.zeros(count)
    for j in range(count):
        moved = min(max(reward + discount * (lowest + j * spacing), lowest), highest)
        place = (moved - lowest) / spacing
        below, above = math.floor(place), math.ceil(place)
        if below == above:
            projected[below] += probability[j]
        else:
            projected[below] += probability[j] * (above - place)
            projected[above] += probability[j] * (place - below)
    return projected


@pytest.mark.parametrize("discount", [0.0, 0.9, 0.99, 1.0])
def test_the_projection_equals_a_loop_over_atoms_and_keeps_the_mass(discount: float) -> None:
    q_values = head(CategoricalQ, num_atoms=11, lowest=-2.0, highest=3.0)
    reward = torch.tensor([-9.0, -2.0, -0.3, 0.0, 0.5, 1.2345, 3.0, 9.0])  # beyond both ends, on atoms and between
    probability = torch.randn(8, 11).softmax(-1)
    projected = q_values.project(probability, reward, torch.full((8,), discount))
    assert torch.allclose(projected.sum(-1), torch.ones(8), atol=1e-5)
    assert bool((projected >= 0).all())
    for row in range(8):
        expected = naive_projection(probability[row].numpy(), float(reward[row]), discount, lowest=-2.0, highest=3.0)
        assert projected[row].numpy() == pytest.approx(expected, abs=1e-5)


def test_the_projection_of_one_sure_return_by_hand() -> None:
    """Atoms 0, 1, 2. A sure return of 1 with reward 0.25 and discount 0.5 is 0.75: three quarters on 1, one on 0."""
    q_values = head(CategoricalQ, num_atoms=3, lowest=0.0, highest=2.0)
    sure = torch.tensor([[0.0, 1.0, 0.0]])
    assert q_values.project(sure, torch.tensor([0.25]), torch.tensor([0.5])).tolist() == [[0.25, 0.75, 0.0]]


def test_the_categorical_loss_is_the_cross_entropy_and_the_priority_is_0_where_nothing_is_to_learn() -> None:
    q_values = head(CategoricalQ, num_atoms=3, lowest=0.0, highest=2.0)
    half = math.log(0.5)
    output = torch.tensor([[[0.0, 0.0, -1e9]] * 3, [[0.0, 0.0, 0.0]] * 3])  # (1/2, 1/2, 0) and (1/3, 1/3, 1/3)
    zeros = torch.zeros(2, dtype=torch.int64)
    target = {"reward": torch.tensor([0.5, 0.5]), "next_output": torch.zeros(2, 3, 3), **no_discount(2)}
    loss, priority = loss_of(q_values, output, zeros, **target)  # the target is (1/2, 1/2, 0) for both
    assert loss.item() == pytest.approx((-half + math.log(3)) / 2)
    assert priority.tolist() == pytest.approx([0.0, math.log(3) + half], abs=1e-6)


def test_categorical_values_are_means_of_the_distribution() -> None:
    q_values = head(CategoricalQ, num_atoms=3, lowest=-1.0, highest=5.0)  # atoms -1, 2, 5
    output = torch.log(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]))
    assert q_values.values(output).tolist() == pytest.approx([0.5, 4.25])


# --- quantiles ---------------------------------------------------------------------------------


def test_the_quantile_huber_loss_by_hand() -> None:
    """Quantiles 1/4 and 3/4 predicted at 0 and 1, targets 0.5 and 3; sum over predictions, mean over targets.

    prediction 0 (1/4): errors 0.5 and 3, both above: 1/4 * (0.125, 2.5)     -> mean 1/4 * 1.3125
    prediction 1 (3/4): error -0.5, below: 1/4 * 0.125; error 2: 3/4 * 1.5   -> mean (0.03125 + 1.125) / 2
    """
    q_values = head(QuantileQ, num_quantiles=2)
    loss, priority = loss_of(
        q_values,
        torch.tensor([[[0.0, 1.0], [7.0, 7.0], [7.0, 7.0]]]),
        torch.tensor([0]),
        reward=torch.tensor([0.5]),
        discount=torch.tensor([0.5]),
        next_output=torch.tensor([[[9.0, 9.0], [0.0, 5.0], [9.0, 9.0]]]),
        next_action=torch.tensor([1]),
    )
    assert loss.item() == pytest.approx(0.25 * 1.3125 + (0.03125 + 1.125) / 2)
    assert priority.tolist() == [1.75 - 0.5]


def test_the_quantile_threshold_divides_the_error_as_in_the_paper() -> None:
    """An error of 3 beyond a threshold of 2: 2 * (3 - 1) = 4, over the threshold 2."""
    q_values = head(QuantileQ, num_quantiles=2, huber_threshold=2.0)
    transition = {"reward": torch.tensor([3.0]), "next_output": torch.zeros(1, 3, 2), **no_discount(1)}
    loss, _ = loss_of(q_values, torch.zeros(1, 3, 2), torch.tensor([0]), **transition)
    assert loss.item() == (0.25 + 0.75) * 2.0


def test_learning_by_quantiles_finds_the_quantiles_of_a_distribution() -> None:
    """Returns 0 … 9 equally often: the 1/10-wide quantiles' middles are the returns themselves."""
    q_values = head(QuantileQ, num_quantiles=5, huber_threshold=0.01)
    quantiles = torch.zeros(1, 3, 5, requires_grad=True)
    reward = torch.arange(10.0)
    optimizer = torch.optim.Adam([quantiles], lr=0.05)
    for _ in range(600):
        output = quantiles.expand(10, 3, 5)
        transition = {"reward": reward, "next_output": torch.zeros(10, 3, 5), **no_discount(10)}
        loss, _ = loss_of(q_values, output, torch.zeros(10, dtype=torch.int64), **transition)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # the 1/10, 3/10, … quantiles lie between two returns each: 0 and 1, 2 and 3, …
    assert quantiles[0, 0].tolist() == pytest.approx([0.5, 2.5, 4.5, 6.5, 8.5], abs=0.6)
    assert q_values.values(quantiles)[0, 0].item() == pytest.approx(4.5, abs=0.3)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("action", "message"),
    [
        (ActionSpec("continuous", (6,)), r"needs discrete actions, .* continuous \(of size 6\)\. Use .*:sac`"),
        (ActionSpec("multi_discrete", (3, 4)), r"takes 2 at once \(sizes \(3, 4\)\)\. Use .*:ppo`"),
    ],
)
def test_other_actions_are_refused_with_the_algorithm_to_use(kind: type[Any], action: ActionSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(input_size=4, action=action)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (QValues, {"huber_threshold": 0.0}, r"huber_threshold is 0; write a finite number above 0"),
        (QuantileQ, {"huber_threshold": -1.0}, r"huber_threshold is -1; write a finite number above 0"),
        (QuantileQ, {"num_quantiles": 1}, r"num_quantiles is 1; write a whole number of at least 2"),
        (CategoricalQ, {"num_atoms": 1}, r"num_atoms is 1; write a whole number of at least 2"),
        (CategoricalQ, {"lowest": 2.0, "highest": 2.0}, r"lowest is 2 and highest is 2; the first must be below"),
        (
            CategoricalQ,
            {"highest": math.inf},
            r"highest is inf; the first must be below the second, both finite\. Write",
        ),
        (CategoricalQ, {"lowest": -math.inf}, r"lowest is -inf and"),
        (CategoricalQ, {"lowest": math.nan}, r"lowest is nan and"),
        (QValues, {"huber_threshold": math.inf}, r"huber_threshold is inf; write a finite number above 0"),
    ],
)
def test_impossible_settings_are_refused(kind: type[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        head(kind, **settings)


def test_the_fraction_of_a_target_outside_the_support_by_hand() -> None:
    """Atoms 0, 1, 2, equally likely. Row 0: 1 + atoms, so 3 is outside. Row 1: -5 alone. Row 2: nothing moves."""
    net = head(CategoricalQ, num_atoms=3, lowest=0.0, highest=2.0)
    transition = {"reward": torch.tensor([1.0, -5.0, 0.0]), "discount": torch.tensor([1.0, 0.0, 1.0])}
    found = net.metrics(torch.zeros(3, 3), **transition)
    assert float(found["train/clipped_target_fraction"]) == pytest.approx((1 / 3 + 1 + 0) / 3)


@pytest.mark.parametrize("kind", HEADS)
def test_noisy_values_differ_from_call_to_call_and_evaluations_use_the_means(kind: type[Any]) -> None:
    torch.manual_seed(0)
    net, features = head(kind, noisy=True, dueling=True), torch.randn(5, 4)
    assert not torch.equal(net(features), net(features))
    with without_noise(net):
        quiet = net(features)
        with without_noise(net):
            assert torch.equal(net(features), quiet)
        assert torch.equal(net(features), quiet), "the noise came back too early"
    torch.manual_seed(1)
    first = net(features)
    torch.manual_seed(1)
    assert torch.equal(net(features), first), "all noise is from torch's generator"
    mean = torch.stack([net(features) for _ in range(4000)]).mean(0)
    assert torch.allclose(mean, quiet, atol=0.2)
