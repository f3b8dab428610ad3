"""What a recurrent state-space model minimises, whoever acts with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_lab.types import Batch, LossOutput

Head = Callable[[Tensor], Any]
"""Features `[..., F]` to a prediction with `loss(target)`, `[...]`."""


class Dynamics(Protocol):
    """A model with a prior and a posterior: see `RSSM`."""

    latent: Any
    features: Callable[[Batch], Tensor]
    prior: Callable[[Batch], Tensor]


class Reconstructing(Protocol):
    loss: Callable[[Tensor, Batch], Tensor]


def world_model_loss(
    rows: Batch,
    state: Batch,
    posterior: Tensor,
    *,
    dynamics: Dynamics,
    decoder: Reconstructing,
    reward_head: Head,
    continue_head: Head | None = None,
    action_mask_head: Head | None = None,
    discount: float = 1.0,
    free_nats: float,
    are_free_on_average: bool = False,
) -> LossOutput:
    """Predict what was observed, and keep posterior and prior close to each other.

    Rows, states and posteriors `[B, T, ...]` of `observe_sequence`; equation 3 of PlaNet (arXiv:1811.04551), whose one
    divergence is two here, as in equations 3 to 5 of DreamerV3. A head that is None has no term.
    `aux` has every row's losses `[B, T]`.
    """
    features = dynamics.features(state)  # [B, T, F]
    prior = dynamics.prior(state)
    latent = dynamics.latent
    # Two divergences of the same value: one teaches the prior, the other the posterior. Below `free_nats` none.
    towards_posterior = latent.kl(posterior.detach(), prior)
    towards_prior = latent.kl(posterior, prior.detach())
    losses = {"reconstruction": decoder.loss(features, rows), "reward": reward_head(features).loss(rows["reward"])}
    if continue_head is not None:
        continues = (~rows["is_terminal"]).to(torch.float32) * discount
        losses["continue"] = continue_head(features).loss(continues)
    if action_mask_head is not None:
        losses["action_mask"] = action_mask_head(features).loss(rows["action_mask"])
    divergences = {"dynamics": towards_posterior, "representation": towards_prior}
    if not are_free_on_average:  # V3
        divergences = {name: divergence.clamp(min=free_nats) for name, divergence in divergences.items()}
    losses |= divergences
    terms = {name: loss.mean() for name, loss in losses.items()}
    if are_free_on_average:  # V1 and V2
        terms |= {name: terms[name].clamp(min=free_nats) for name in divergences}
    with torch.no_grad():
        metrics = {
            "train/model_kl": towards_posterior.mean(),
            "train/prior_entropy": latent.entropy(prior).mean(),
            "train/posterior_entropy": latent.entropy(posterior).mean(),
        }
    return LossOutput(terms, metrics, {name: loss.detach() for name, loss in losses.items()})
