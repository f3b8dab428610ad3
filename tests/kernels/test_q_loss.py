"""The loss of plain Q networks and its gradient, both at once, against torch layer by layer."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.heads.q_values import CategoricalQ, QValues
from rl_lab.components.heads.tables import allowed_values
from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.components.returns.transitions import n_step_transitions, rows_at
from rl_lab.kernels import q_loss
from rl_lab.kernels.q_loss import PlainValues, ValueLoss
from rl_lab.training.optimizer import Optimizer
from rl_lab.types import ActionSpec, ArraySpec, Batch

DISCOUNT, ROWS = 0.9, 64
THREE = ActionSpec("discrete", (3,))


def batch_of(*, n_step: int = 1, weighted: bool = False, masked: bool = False, count: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(5)

    def chances(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    rows = (count, n_step + 1)
    batch = {
        "vector": torch.randn(*rows, 4, generator=generator),
        "action": torch.randint(0, 3, rows, generator=generator),
        "reward": 2.0 * torch.randn(*rows, generator=generator),
        "is_last": chances(*rows) < 0.3,
        "is_terminal": torch.zeros(rows, dtype=torch.bool),
    }
    batch["is_last"][:, 0] = False  # replay starts nowhere an episode ends
    batch["is_terminal"] = batch["is_last"] & (chances(*rows) < 0.5)
    if weighted:
        batch["weight"] = chances(count)
    if masked:
        batch["action_mask"] = chances(*rows, 3) < 0.6
        batch["action_mask"][..., 1] = True
    return batch


def heads(**settings: Any) -> tuple[QValues, QValues]:
    """A network that learns and another one to judge; the biases matter."""
    torch.manual_seed(0)
    made = [QValues(input_size=4, action=THREE, **{"hidden_sizes": [7, 6], **settings}) for _ in range(2)]
    for parameter in [each for head in made for each in head.parameters() if each.dim() == 1]:
        torch.nn.init.normal_(parameter, std=0.3)
    made[1].requires_grad_(False)
    return made[0], made[1]


def plain(head: Any, slow_head: Any, **encoder: Any) -> PlainValues:
    observation = {"vector": ArraySpec((4,), "float32")}
    return PlainValues(ObservationEncoder(observation=observation, **{"hidden_sizes": (), **encoder}), head, slow_head)


def by_autograd(head: QValues, slow_head: QValues, batch: Batch, *, double: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, priorities and the mean value as the paper says, every step a torch call."""
    transition = n_step_transitions(batch, DISCOUNT)
    following = rows_at(batch["vector"], transition["next_row"])
    output, next_output = head(batch["vector"][:, 0]), slow_head(following)
    mask = rows_at(batch["action_mask"], transition["next_row"]) if "action_mask" in batch else None
    next_action = allowed_values(head(following).detach() if double else next_output, mask).argmax(-1)
    told = {"reward": transition["reward"], "discount": transition["discount"], "weight": batch.get("weight")}
    loss, priority = head.loss(output, batch["action"][:, 0], next_output=next_output, next_action=next_action, **told)
    return loss, priority, output.detach().mean()


def found_by(learner: PlainValues, batch: Batch, **settings: Any) -> ValueLoss:
    found = learner.loss(batch, discount=DISCOUNT, **settings)
    assert found is not None
    return found


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    ("rows", "head"),
    [
        ({}, {}),
        ({}, {"huber_threshold": None}),
        ({}, {"huber_threshold": 0.3, "activation": "tanh"}),
        ({"weighted": True}, {"hidden_sizes": []}),
        ({"masked": True}, {"dueling": True}),
        ({"n_step": 3, "weighted": True, "masked": True}, {"dueling": True, "activation": "tanh"}),
    ],
    ids=["plain", "squared", "tanh", "weighted, one layer", "masked, dueling", "everything"],
)
def test_losses_priorities_and_gradients_are_those_of_autograd(
    rows: dict[str, Any], head: dict[str, Any], double: bool
) -> None:
    one, slow = heads(**head)
    other, batch = copy.deepcopy(one), batch_of(**rows)
    found = found_by(plain(one, slow), batch, double=double)
    loss, priority, value_mean = by_autograd(other, slow, batch, double=double)
    for ours, theirs in ((found.loss, loss), (found.priority, priority), (found.value_mean, value_mean)):
        assert torch.as_tensor(ours).tolist() == pytest.approx(theirs.tolist(), rel=1e-5, abs=1e-6)
    assert not found.priority.requires_grad
    loss.backward()
    assert all(map(operator.is_, found.known.parameters, one.parameters()))
    for ours, theirs in zip(found.known.gradients, other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)
        assert bool((ours != 0.0).any())
    assert torch.equal(found.known.flat, torch.cat([gradient.flatten() for gradient in found.known.gradients]))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("limit", ["MOST_PRODUCTS", "MOST_NUMBERS"])
def test_large_products_are_left_to_torch_and_say_the_same(
    monkeypatch: pytest.MonkeyPatch, limit: str, activation: str
) -> None:
    one, slow = heads(dueling=True, activation=activation)
    batch = batch_of(n_step=2)
    expected = found_by(plain(one, slow), batch)
    monkeypatch.setattr(q_loss, limit, 0)
    found = found_by(plain(one, slow), batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for ours, theirs in zip(found.known.gradients, expected.known.gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rewards_are_cut_before_they_count() -> None:
    one, slow = heads()
    batch = batch_of(n_step=2)
    cut = {**batch, "reward": batch["reward"].clamp(-0.5, 0.5)}
    assert found_by(plain(one, slow), batch, reward_clip=0.5).loss == found_by(plain(one, slow), cut).loss
    assert found_by(plain(one, slow), batch).loss != found_by(plain(one, slow), cut).loss


def test_frozen_parameters_are_left_alone() -> None:
    one, slow = heads(dueling=True)
    learner = plain(one, slow)
    expected = [gradient.clone() for gradient in found_by(learner, batch_of()).known.gradients]
    one.advantage.requires_grad_(False)
    found = found_by(learner, batch_of())
    assert one.value is not None
    assert all(map(operator.is_, found.known.parameters, one.value.parameters())) and len(found.known.parameters) == 6
    for ours, theirs in zip(found.known.gradients, expected[6:], strict=True):
        assert torch.equal(ours, theirs)
    one.requires_grad_(False)
    assert found_by(learner, batch_of()).known.parameters == []


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"adaptive_clip": 0.01, "log_module_norms": True}])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimizer_changes_the_same_as_by_backward(settings: dict[str, Any], frozen: bool) -> None:
    one, slow = heads(dueling=True)
    if frozen:
        one.advantage.requires_grad_(False)
    other = copy.deepcopy(one)
    optimizers = [Optimizer(parameters={"q": each}, max_grad_norm=0.1, **settings) for each in (one, other)]
    learner = plain(one, slow)
    for count in (64, 80, 64, 96):
        found = found_by(learner, batch_of(count=count))
        metrics = optimizers[0].apply_known(*found.known)
        expected = optimizers[1].apply(by_autograd(other, slow, batch_of(count=count), double=False)[0])
        assert metrics == {name: pytest.approx(float(value), rel=1e-5) for name, value in expected.items()}
        assert all(each.grad is None for each in one.parameters()) == (optimizers[0].accumulated == 0)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_everything_else_goes_layer_by_layer() -> None:
    one, slow = heads()
    told = {"discount": DISCOUNT}
    assert plain(one, slow).loss(batch_of(), **told) is not None
    assert plain(one, slow, hidden_sizes=(8,)).loss(batch_of(), **told) is None, "an encoder that learns"
    assert plain(*heads(activation="elu")).loss(batch_of(), **told) is None, "another activation"
    atoms = CategoricalQ(input_size=4, action=THREE)
    assert plain(atoms, atoms).loss(batch_of(), **told) is None, "another head"
    with torch.no_grad():
        assert plain(one, slow).loss(batch_of(), **told) is None, "nothing to learn"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain(one, slow).loss(batch_of(), **told) is None, "another precision"
