"""The loss that Dreamer and PlaNet share: every term by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.world_model.heads import AllowedActions, Continuation, Scalar
from rl_lab.components.world_model.latents import GaussianLatent
from rl_lab.components.world_model.rssm import world_model_loss
from rl_lab.types import Batch, LossOutput


def gaussian(*means_and_deviations: tuple[float, float]) -> Tensor:
    """Parameters `[1, T, 2]` of a latent of size 1."""
    rows = [[mean, math.log(math.expm1(deviation - 0.1))] for mean, deviation in means_and_deviations]
    return torch.tensor([rows], requires_grad=True)


class Model:
    """Features are the memory; the prior is what the test says."""

    def __init__(self, prior: Tensor) -> None:
        self.latent = GaussianLatent(size=1, minimum_std=0.1)
        self.prior = lambda deter: prior
        self.features = lambda state: state["deter"]


class Decoder(nn.Module):
    def loss(self, features: Tensor, rows: Batch) -> Tensor:
        return (features - rows["vector"]).square().sum(dim=-1)


def loss_of(prior: Tensor, posterior: Tensor, more_rows: Batch | None = None, **settings: Any) -> LossOutput:
    """Two rows: the model shows 1 and 2 where 0 was seen, and expects rewards 1 and 2 where 3 came."""
    rows = {
        "vector": torch.zeros(1, 2, 1),
        "reward": torch.full((1, 2), 3.0),
        "is_terminal": torch.tensor([[False, True]]),
        **(more_rows or {}),
    }
    state = {"deter": torch.tensor([[[1.0], [2.0]]])}
    return world_model_loss(
        rows, state, posterior, dynamics=Model(prior), decoder=Decoder(), reward_head=Scalar, **settings
    )


def test_predictions_are_means_over_the_rows() -> None:
    parameters = gaussian((0.0, 1.0), (0.0, 1.0))
    loss = loss_of(parameters, parameters, free_nats=0.0)
    assert float(loss.terms["reconstruction"]) == pytest.approx((1.0 + 4.0) / 2.0)
    assert float(loss.terms["reward"]) == pytest.approx((0.5 * 4.0 + 0.5 * 1.0) / 2.0)
    assert list(loss.terms) == ["reconstruction", "reward", "dynamics", "representation"]
    assert float(loss.metrics["train/posterior_entropy"]) == pytest.approx(0.5 * math.log(2.0 * math.pi * math.e))


def test_continuation_is_learnt_where_there_is_a_head_for_it() -> None:
    parameters = gaussian((0.0, 1.0), (0.0, 1.0))
    loss = loss_of(
        parameters, parameters, free_nats=0.0, continue_head=lambda x: Continuation(x.squeeze(-1)), discount=0.9
    )
    goes_on = -(0.9 * math.log(1.0 / (1.0 + math.exp(-1.0))) + 0.1 * math.log(1.0 / (1.0 + math.exp(1.0))))
    ended = -math.log(1.0 / (1.0 + math.exp(2.0)))
    assert float(loss.terms["continue"]) == pytest.approx((goes_on + ended) / 2.0, rel=1e-5)


def test_action_masks_are_learnt_action_by_action_where_there_is_a_head_for_them() -> None:
    """Logits 1 and -1 in row 0, 2 and -2 in row 1; allowed are the first action, then both."""
    parameters = gaussian((0.0, 1.0), (0.0, 1.0))
    head = lambda x: AllowedActions(torch.cat((x, -x), dim=-1), (2,))  # noqa: E731
    masks = torch.tensor([[[True, False], [True, True]]])
    loss = loss_of(parameters, parameters, {"action_mask": masks}, free_nats=0.0, action_mask_head=head)
    first = 2.0 * math.log(1.0 + math.exp(-1.0))  # both as expected
    second = math.log(1.0 + math.exp(-2.0)) + math.log(1.0 + math.exp(2.0))
    assert loss.aux["action_mask"].tolist() == [pytest.approx([first, second], rel=1e-5)]
    assert float(loss.terms["action_mask"]) == pytest.approx((first + second) / 2.0, rel=1e-5)
    assert list(loss.terms) == ["reconstruction", "reward", "action_mask", "dynamics", "representation"]


def test_free_nats_are_granted_to_every_row_and_only_the_rest_teaches() -> None:
    """KL of two normals: log(s2/s1) + (s1^2 + (m1 - m2)^2) / (2 s2^2) - 1/2; row 0 costs 0.5, row 1 costs 8."""
    prior, posterior = gaussian((0.0, 1.0), (0.0, 1.0)), gaussian((1.0, 1.0), (4.0, 1.0))
    loss = loss_of(prior, posterior, free_nats=3.0)
    assert float(loss.metrics["train/model_kl"]) == pytest.approx((0.5 + 8.0) / 2.0, rel=1e-5)
    for name, learns, stays, slope in (("dynamics", prior, posterior, -4.0), ("representation", posterior, prior, 4.0)):
        assert float(loss.terms[name].detach()) == pytest.approx((3.0 + 8.0) / 2.0, rel=1e-5)
        (gradient,) = torch.autograd.grad(loss.terms[name], [learns], retain_graph=True)
        assert gradient[0, 0].tolist() == [0.0, 0.0], "within the free nats nothing pulls"
        assert float(gradient[0, 1, 0]) == pytest.approx(slope / 2.0, rel=1e-5)
        assert torch.autograd.grad(loss.terms[name], [stays], retain_graph=True, allow_unused=True) == (None,)


def test_free_nats_of_the_average_let_every_row_teach_once_the_batch_costs_more() -> None:
    """As in V1 and V2. The rows cost 0.5 and 8, on average 4.25: with 4 nats free all of it counts, with 5 nothing."""
    prior, posterior = gaussian((0.0, 1.0), (0.0, 1.0)), gaussian((1.0, 1.0), (4.0, 1.0))
    for free_nats, cost, slopes in ((4.0, 4.25, [-0.5, -2.0]), (5.0, 5.0, [0.0, 0.0])):
        loss = loss_of(prior, posterior, free_nats=free_nats, are_free_on_average=True)
        assert float(loss.terms["dynamics"].detach()) == pytest.approx(cost, rel=1e-5)
        (gradient,) = torch.autograd.grad(loss.terms["dynamics"], [prior])
        assert gradient[0, :, 0].tolist() == pytest.approx(slopes, rel=1e-5)
