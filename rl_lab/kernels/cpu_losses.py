"""Losses of small networks on a CPU, with their gradients by the networks' outputs (`cpu_mlp.differentiate`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.kernels.cpu_mlp import (
    FEWEST_ROWS_OF_A_LOSS,
    Networks,
    backward,
    differentiate,
    forward,
    gradients_by_parameter,
    is_plain,
    learns_from,
    plain_ensemble,
    plain_mlp,
)
from rl_lab.kernels.door import FastPath, is_unchanged, takes_gradients
from rl_lab.kernels.squashed import draw, draw_backward
from rl_lab.types import LossOutput, PolicyStep

_HEADS = "rl_lab.components.heads."
_SOFT = f"{_HEADS}soft_actor_critic:"
_NORMALIZER = "rl_lab.components.networks.normalizers:ObservationNormalizer"
_ENCODER = "rl_lab.components.networks.encoders:ObservationEncoder"
_MLP = "rl_lab.components.networks.encoders:MLP.forward"
_ENSEMBLE = "rl_lab.components.networks.ensemble:EnsembleMLP.forward"

Gradients = list[list[Tensor | None]]

# --- PPO: the clipped surrogate, the squared error of the value, the entropy ------------------------


def _ppo_loss(
    actor: Any,
    critic: Any,
    features: Tensor,
    sample: dict[str, Tensor],
    *,
    critic_features: Tensor | None = None,
    clip_range: float,
    value_clip_range: float | None = None,
) -> dict[str, Tensor]:
    """For discrete actions, all of them allowed, from samples that all count; one encoder; an unclipped value.

    d policy / d logit_k = -A r / M (1[k = action] - p_k) where r A is the lesser of the two, else 0
    d value / d V = 2 (V - R) / M;   d entropy / d logit_k = p_k (log p_k + H) / M, of the negated mean entropy
    """
    if critic_features is not None or value_clip_range is not None or "valid" in sample or "action_mask" in sample:
        return NotImplemented
    modules = _actor_and_critic(actor, critic) if features.dim() == 2 and learns_from(features) else None
    if modules is None:
        return NotImplemented
    action, advantage, per_row = sample["action"].unsqueeze(1), sample["advantage"], 1.0 / len(features)

    def loss(outputs: list[Tensor]) -> tuple[list[Tensor], Gradients, Tensor]:
        logits, value = outputs
        log_probs = torch.log_softmax(logits, dim=-1)
        probs, log_prob = log_probs.exp(), log_probs.gather(1, action).squeeze(1)
        ratio = (log_prob - sample["log_prob"]).exp_()
        unclipped, clipped = ratio * advantage, ratio.clamp(1.0 - clip_range, 1.0 + clip_range).mul_(advantage)
        d_log_prob = torch.where(unclipped <= clipped, unclipped, 0.0 * unclipped).mul_(-per_row).unsqueeze(1)
        d_policy = (probs * -d_log_prob).scatter_add_(1, action, d_log_prob)
        entropy = -(probs * log_probs).sum(dim=1, keepdim=True)
        d_entropy = (log_probs + entropy).mul_(probs).mul_(per_row)
        error = value.squeeze(1) - sample["return"]
        terms = [-torch.minimum(unclipped, clipped).mean(), error.square().mean(), -entropy.mean()]
        return terms, [[d_policy, None], [None, (error * (2.0 * per_row)).unsqueeze(1)], [d_entropy, None]], log_prob

    (policy, value, entropy), log_prob = differentiate(modules, features, loss)
    return {"policy": policy, "value": value, "entropy": entropy, "log_prob": log_prob}


def _actor_and_critic(actor: Any, critic: Any) -> list[Networks] | None:
    home = f"{_HEADS}actor_critic:"
    if not is_unchanged(actor, f"{home}Actor", "forward", "distribution") or actor.kind != "discrete":
        return None
    if not is_unchanged(critic, f"{home}Critic", "forward"):
        return None
    found = [plain_mlp(actor.network), plain_mlp(critic.network)]
    return None if None in found else found  # type: ignore[return-value]


PPO_LOSS = FastPath(
    _ppo_loss,
    (
        "rl_lab.workflows.ppo:ppo_loss",
        *(f"{_HEADS}actor_critic:{name}" for name in ("Actor.forward", "Actor.distribution", "Critic.forward")),
        *(f"{_HEADS}distributions:Categorical.{name}" for name in ("__init__", "log_probs", "log_prob", "entropy")),
        _MLP,
    ),
)


# --- DQN: the temporal-difference error of expected returns -----------------------------------------


def _dqn_loss(workflow: Any, batch: dict[str, Tensor]) -> LossOutput:
    """For expected returns straight from one observed vector. With e = Q(s, a) - target, c = e cut to the Huber limit:

    L = mean(w c (e - c / 2)),   dL/dQ(s, a) = w c / B

    The result brings the gradients of all parameters with it: no graph is made.
    """
    parts = _q_parts(workflow) if takes_gradients() else None
    if parts is None or not learns_from(batch[parts.key], (workflow.n_step + 1) * FEWEST_ROWS_OF_A_LOSS):
        return NotImplemented
    learning, slow = parts.learning, parts.slow
    observed = batch[parts.key].numpy()
    rows, action = observed[:, 0], batch["action"].numpy()[:, 0]
    every, mask = np.arange(len(rows)), None
    if workflow.n_step == 1 and workflow.reward_clip is None and "action_mask" not in batch:
        next_rows, reward = observed[:, 1], batch["reward"].numpy()[:, 1]
        discount = np.where(batch["is_terminal"].numpy()[:, 1], np.float32(0.0), np.float32(workflow.discount))
    else:
        transition, following = workflow.transitions(batch)
        next_rows, mask = following[parts.key].numpy(), following.get("action_mask")
        reward, discount = transition["reward"].numpy(), transition["discount"].numpy()
    next_values = _q_values([forward(each.members[0], next_rows) for each in slow])
    chooser = next_values
    if workflow.double:
        chooser = _q_values([forward(each.members[0], next_rows) for each in learning])
    if mask is not None:
        chooser = np.where(mask.bool().numpy(), chooser, -np.inf)
    target = reward + discount * next_values[every, chooser.argmax(axis=1)]

    reached = [forward(each.members[0], rows) for each in learning]
    values, limit = _q_values(reached), workflow.head.huber_threshold
    error = values[every, action] - target
    cut = error if limit is None else np.minimum(np.maximum(error, -limit), limit)
    d_value = cut * np.float32(1.0 / len(error))
    if "weight" in batch:
        d_value *= batch["weight"].numpy()
    d_values = np.zeros(values.shape, np.float32)
    d_values[every, action] = d_value
    by_outputs = [d_values]
    if len(reached) == 2:  # dueling: Q = V + A - mean A
        by_outputs = [d_values - d_values.mean(axis=1, keepdims=True), d_value[:, None]]
    return LossOutput(
        {"value": torch.scalar_tensor(d_value @ (error - 0.5 * cut))},
        {"controller/value_mean": torch.scalar_tensor(np.add.reduce(values, axis=None) / values.size)},
        {"priority": torch.from_numpy(np.abs(error))},
        gradients_by_parameter(learning, reached, by_outputs),
    )


def _q_values(reached: list[list[np.ndarray]]) -> np.ndarray:
    """Values `[B, A]` from the advantages alone, or from advantages and state values."""
    if len(reached) == 1:
        return reached[0][-1]
    advantage, value = reached[0][-1], reached[1][-1]
    return value + advantage - advantage.mean(axis=1, keepdims=True)  # type: ignore[no-any-return]


class _QParts(NamedTuple):
    """The one key of the observation that the networks read as it is, and those networks: advantages, state values."""

    key: str
    learning: list[Networks]
    slow: list[Networks]


def _q_parts(workflow: Any) -> _QParts | None:
    """None where there is more to it."""
    target = workflow.target
    if not is_unchanged(workflow, "rl_lab.workflows.dqn:DQN", "loss", "transitions", "learn", "gradient_step"):
        return None
    if not is_unchanged(workflow.optimizer, "rl_lab.training.optimizer:Optimizer", "apply"):
        return None
    if not is_unchanged(target, "rl_lab.training.target_network:TargetNetwork", "forward"):
        return None
    learning, slow = _learning_network(workflow), _q_network(vars(target)["_modules"]["module"])
    return None if learning is None or slow is None else _QParts(learning[0], learning[1], slow[1])


def _learning_network(workflow: Any) -> tuple[str, list[Networks]] | None:
    """The one key that the network reads as it was observed, and what it consists of."""
    normalizer = workflow.observation_normalizer
    if not is_unchanged(normalizer, _NORMALIZER, "forward", "update") or vars(normalizer)["keys"]:
        return None
    network = workflow.network
    return _q_network(network) if next(reversed(vars(network)["_modules"].values())) is workflow.head else None


def _q_network(network: Any) -> tuple[str, list[Networks]] | None:
    if not is_unchanged(network, "torch.nn:Sequential", "forward"):
        return None
    layers = vars(network)["_modules"]
    if len(layers) != 2:
        return None
    encoder, head = layers.values()
    seen = vars(encoder)
    if not is_unchanged(encoder, _ENCODER, "forward") or seen["has_layers"] or seen["plain_key"] is None:
        return None
    if not is_unchanged(head, f"{_HEADS}q_values:QValues", "forward", "values", "loss", "metrics", "_by_action"):
        return None
    modules = vars(head)["_modules"]
    found = [plain_mlp(each) for each in (modules["advantage"], modules.get("value")) if each is not None]
    return None if None in found else (seen["plain_key"], found)  # type: ignore[return-value]


DQN_LOSS = FastPath(
    _dqn_loss,
    (
        "rl_lab.workflows.dqn:DQN.loss",
        *(f"{_HEADS}q_values:ActionNetwork.{name}" for name in ("forward", "_by_action")),
        *(f"{_HEADS}q_values:QValues.{name}" for name in ("values", "loss", "metrics")),
        f"{_ENCODER}.forward",
        "rl_lab.training.target_network:TargetNetwork.forward",
        "rl_lab.workflows.dqn:DQN.transitions",
        _MLP,
        "rl_lab.workflows.dqn:DQN.learn",  # from here on: what hands the gradients on
        "rl_lab.workflows.base:Workflow.gradient_step",
        "rl_lab.types:LossOutput.total",
        "rl_lab.training.optimizer:Optimizer.apply",
    ),
)


# --- SAC: squared errors of the critics, the soft value of the policy ---------------------------------


def _critic_loss(
    workflow: Any, features: Tensor, action: Tensor, target: Tensor, weight: Tensor | None = None
) -> LossOutput:
    """d/dQ_i = 2 w (Q_i - target) / (E B)

    The result brings the gradients with it, unless the features learn too.
    """
    fits = learns_from(features) and not target.requires_grad and _takes_gradients(workflow, "critic")
    networks = _critics(workflow.critic) if fits else None
    if networks is None:
        return NotImplemented

    def loss(outputs: list[Tensor]) -> tuple[list[Tensor], Gradients, Tensor]:
        values = torch.cat(outputs, dim=1).t()  # [E, B]
        error = values - target
        weighted = error if weight is None else error * weight
        by_outputs = (weighted * (2.0 / error.numel())).unsqueeze(-1)
        return [(error * weighted).mean()], [list(by_outputs.unbind())], values

    rows = torch.cat((features, action), dim=1)
    if features.requires_grad:
        (total,), values = differentiate([networks], rows, loss)
        return LossOutput({"critic": total}, aux={"values": values})
    reached = [forward(member, rows.numpy()) for member in networks.members]
    (total,), (by_outputs,), values = loss([torch.from_numpy(each[-1]) for each in reached])
    gradients = gradients_by_parameter([networks], reached, [each.numpy() for each in by_outputs])  # type: ignore[union-attr]
    return LossOutput({"critic": total}, {}, {"values": values}, gradients)


def _policy_loss(
    workflow: Any, features: Tensor, noise: Tensor, temperature: Tensor, mask: Tensor | None = None
) -> LossOutput:
    """Each row's value comes from its least critic alone, so its gradient goes back through that one network. The
    result brings the gradients of the actor with it."""
    learns_more = features.requires_grad or temperature.requires_grad or noise.requires_grad
    fits = learns_from(features) and not learns_more and _takes_gradients(workflow, "actor")
    networks, critics = _soft_parts(workflow.actor, workflow.critic) if fits else (None, None)
    if networks is None or critics is None:
        return NotImplemented
    rows, (lowest, highest) = len(features), workflow.actor.log_std_bounds
    reached, valued, (action, entropy, spread) = _valued_draw(networks, critics, features, noise, (lowest, highest))
    unbounded = torch.from_numpy(reached[-1])[:, action.shape[1] :]
    values = np.stack([each[-1][:, 0] for each in valued])  # [E, B]
    least = values.argmin(axis=0)
    d_action = np.empty(action.shape, np.float32)
    for index, member in enumerate(critics.members):
        own = (least == index).nonzero()[0]
        reads, *hidden, output = valued[index]  # only the hidden layers tell where the gradient passes
        layers = [reads, *(layer.take(own, axis=0) for layer in hidden), output]
        back = backward(member, layers, np.full((len(own), 1), -1.0 / rows, np.float32), wants_rows=True)
        assert back is not None
        d_action[own] = back[:, features.shape[1] :]
    by_entropy = (temperature * (-1.0 / rows)).expand(rows)
    d_mean, d_log_std = draw_backward(torch.from_numpy(d_action), by_entropy, action, spread)
    d_log_std = d_log_std * ((unbounded > lowest) & (unbounded < highest))
    by_output = torch.cat((d_mean, d_log_std), dim=1).numpy()
    mean_entropy = entropy.mean()
    total = -(torch.from_numpy(values.min(axis=0)).mean() + temperature * mean_entropy)
    gradients = gradients_by_parameter([networks], [reached], [by_output])
    return LossOutput({"policy": total}, {"controller/entropy": mean_entropy}, {}, gradients)


def _temperature_loss(workflow: Any, entropy: Tensor, mask: Tensor | None = None) -> LossOutput:
    """d/d log(temperature) is the loss itself."""
    temperature = workflow.temperature
    if not is_unchanged(temperature, f"{_SOFT}Temperature", "forward", "loss") or not torch.is_grad_enabled():
        return NotImplemented
    if (mask is not None and temperature.follows_mask) or not _takes_gradients(workflow, "temperature"):
        return NotImplemented
    number = temperature.log_value
    if number.dtype is not torch.float32 or not number.is_cpu:
        return NotImplemented
    loss = number.detach().exp() * (entropy.detach() - temperature.target_entropy)
    return LossOutput({"temperature": loss}, {}, {}, ((number, loss.clone()),))


def _soft_value(workflow: Any, observation: dict[str, Tensor], temperature: Tensor) -> Tensor:
    """For continuous actions from one observed vector."""
    encoder, actor, slow = workflow.encoder, workflow.actor, workflow.slow_critic
    if not is_unchanged(encoder, _ENCODER, "forward") or encoder.has_layers or encoder.plain_key is None:
        return NotImplemented
    features = observation[encoder.plain_key]
    if workflow.slow_encoder is not None or not is_plain(features) or features.dim() != 2:
        return NotImplemented
    networks, critics = _soft_parts(actor, vars(slow)["_modules"]["module"])
    if networks is None or critics is None:
        return NotImplemented
    with torch.no_grad():
        drawn = actor.noise(features)
        _, valued, (_, entropy, _) = _valued_draw(networks, critics, features, drawn, actor.log_std_bounds)
        return torch.from_numpy(np.stack([each[-1][:, 0] for each in valued]).min(axis=0)) + temperature * entropy


def _soft_parts(actor: Any, critic: Any) -> tuple[Networks | None, Networks | None]:
    """An actor of continuous actions and critics of which the least counts."""
    if not is_unchanged(actor, f"{_SOFT}SoftActor", "forward") or not actor.is_continuous:
        return None, None
    return plain_ensemble(actor.network), _critics(critic) if critic.target_subset is None else None


def _valued_draw(
    networks: Networks, critics: Networks, features: Tensor, noise: Tensor, bounds: tuple[float, float]
) -> tuple[list[np.ndarray], list[list[np.ndarray]], tuple[Tensor, Tensor, Tensor]]:
    """What the layers of the actor and of each critic make of the features; the draw in between."""
    seen = features.numpy()
    reached = forward(networks.members[0], seen)
    mean, unbounded = torch.from_numpy(reached[-1]).chunk(2, dim=1)
    drawn = draw(mean, F.hardtanh(unbounded, *bounds), noise)
    read = np.concatenate((seen, drawn[0].numpy()), axis=1)
    return reached, [forward(member, read) for member in critics.members], drawn


def _takes_gradients(workflow: Any, optimizer: str) -> bool:
    """Whether the gradients that a loss brings with it reach the parameters as those of its graph would."""
    methods = ("critic_loss", "policy_loss", "temperature_loss", "learn", "improve_policy", "gradient_step")
    is_ours = is_unchanged(workflow, "rl_lab.workflows.sac:SAC", *methods)
    return (
        takes_gradients()
        and is_ours
        and is_unchanged(workflow.optimizers[optimizer], "rl_lab.training.optimizer:Optimizer", "apply")
    )


def _critics(critic: Any) -> Networks | None:
    """Critics of continuous actions."""
    is_ours = is_unchanged(critic, f"{_SOFT}TwinCritic", "forward", "expect", "combine") and critic.is_continuous
    return plain_ensemble(critic.networks) if is_ours else None


_HANDED_ON = (
    "rl_lab.workflows.sac:SAC.learn",
    "rl_lab.workflows.sac:SAC.improve_policy",
    "rl_lab.workflows.base:Workflow.gradient_step",
    "rl_lab.types:LossOutput.total",
    "rl_lab.training.optimizer:Optimizer.apply",
)
SAC_CRITIC_LOSS = FastPath(
    _critic_loss, ("rl_lab.workflows.sac:SAC.critic_loss", f"{_SOFT}TwinCritic.forward", _ENSEMBLE, *_HANDED_ON)
)
_EXPECTATION = (
    *(
        f"{_SOFT}{name}"
        for name in ("SoftActor.forward", *(f"TwinCritic.{n}" for n in ("forward", "expect", "combine")))
    ),
    *(f"{_HEADS}distributions:{name}" for name in ("SquashedGaussian.rsample_with_log_prob", "DiagonalGaussian.draw")),
    _ENSEMBLE,
)
SAC_POLICY_LOSS = FastPath(_policy_loss, ("rl_lab.workflows.sac:SAC.policy_loss", *_EXPECTATION, *_HANDED_ON))
SAC_TEMPERATURE_LOSS = FastPath(
    _temperature_loss,
    (
        "rl_lab.workflows.sac:SAC.temperature_loss",
        *(f"{_SOFT}Temperature.{name}" for name in ("forward", "loss")),
        *_HANDED_ON,
    ),
)
SAC_SOFT_VALUE = FastPath(_soft_value, ("rl_lab.workflows.sac:SAC.soft_value", *_EXPECTATION, f"{_ENCODER}.forward"))


# --- drawing actions ------------------------------------------------------------------------------


def _sample(policy: Any) -> Tensor:
    if not is_plain(policy.logits):
        return NotImplemented
    noise = torch.empty_like(policy.logits).exponential_()
    return torch.from_numpy((policy.logits.detach().numpy() - np.log(noise.numpy())).argmax(axis=-1))


def _dqn_act(workflow: Any, time_step: Any, state: Any, *, mode: str) -> PolicyStep:
    """While training, without a mask, for values straight from one observed vector."""
    if mode != "train" or "action_mask" in time_step.observation:
        return NotImplemented
    is_ours = is_unchanged(workflow, "rl_lab.workflows.dqn:DQN", "act", "count_in_statistics")
    parts = _learning_network(workflow) if is_ours else None
    if parts is None or torch.is_grad_enabled() or not is_plain(time_step.observation[parts[0]]):
        return NotImplemented
    rows = time_step.observation[parts[0]].numpy()
    values = _q_values([forward(each.members[0], rows) for each in parts[1]])
    anything = torch.rand(values.shape).numpy().argmax(axis=1)
    explores = torch.rand(len(values)).numpy() < workflow._acting_epsilon
    return PolicyStep(torch.from_numpy(np.where(explores, anything, values.argmax(axis=1))))


CATEGORICAL_SAMPLE = FastPath(_sample, (f"{_HEADS}distributions:Categorical.sample",))
DQN_ACT = FastPath(
    _dqn_act,
    (
        "rl_lab.workflows.dqn:DQN.act",
        "rl_lab.workflows.dqn:DQN.count_in_statistics",
        *(f"{_NORMALIZER}.{name}" for name in ("forward", "update")),
        f"{_ENCODER}.forward",
        *(f"{_HEADS}q_values:ActionNetwork.{name}" for name in ("forward", "_by_action")),
        f"{_HEADS}q_values:QValues.values",
        _MLP,
    ),
)
