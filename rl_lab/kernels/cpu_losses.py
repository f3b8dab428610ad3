"""Losses of DQN and SAC for small networks on a CPU, with their gradients by the networks' outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.kernels.cpu_mlp import (
    FEWEST_ROWS_OF_A_LOSS,
    ByOutput,
    Networks,
    Scales,
    backward,
    bring_gradients,
    differentiate,
    forward,
    is_plain,
    learns_from,
    plain_ensemble,
    plain_mlp,
)
from rl_lab.kernels.door import FastPath, has_gradient_hooks, is_unchanged, takes_gradients
from rl_lab.kernels.formulas import ENCODER, HEADS, MLP, STEP, reads_one_vector
from rl_lab.kernels.squashed import draw, draw_backward
from rl_lab.types import Gradients, LossOutput, PolicyStep

_SOFT = f"{HEADS}soft_actor_critic:"
_NORMALIZER = "rl_lab.components.networks.normalizers:ObservationNormalizer"
_NORMALIZED = tuple(f"{_NORMALIZER}.{name}" for name in ("forward", "update"))
_ENSEMBLE = "rl_lab.components.networks.ensemble:EnsembleMLP.forward"

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
        bring_gradients(learning, reached, ("value",), lambda scales: _scaled(by_outputs, scales)),
    )


def _q_values(reached: list[list[np.ndarray]]) -> np.ndarray:
    """Values `[B, A]` from the advantages alone, or from advantages and state values."""
    if len(reached) == 1:
        return reached[0][-1]
    advantage, value = reached[0][-1], reached[1][-1]
    return value + advantage - advantage.mean(axis=1, keepdims=True)  # type: ignore[no-any-return]


def _scaled(by_outputs: list[np.ndarray], scales: Scales) -> ByOutput:
    """The gradients of the one term that a loss has."""
    scale = scales[0]
    return by_outputs if scale == 1.0 else [each * np.float32(scale) for each in by_outputs]  # type: ignore[arg-type]


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
    if not is_unchanged(workflow.head, f"{HEADS}q_values:QValues", "loss", "metrics"):
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
    if not reads_one_vector(encoder):
        return None
    if not is_unchanged(head, f"{HEADS}q_values:QValues", "forward", "values", "_by_action"):
        return None
    modules = vars(head)["_modules"]
    found = [plain_mlp(each) for each in (modules["advantage"], modules.get("value")) if each is not None]
    return None if None in found else (vars(encoder)["plain_key"], found)  # type: ignore[return-value]


DQN_LOSS = FastPath(
    _dqn_loss,
    (
        "rl_lab.workflows.dqn:DQN.loss",
        *(f"{HEADS}q_values:ActionNetwork.{name}" for name in ("forward", "_by_action")),
        *(f"{HEADS}q_values:QValues.{name}" for name in ("values", "loss", "metrics")),
        f"{ENCODER}.forward",
        "rl_lab.training.target_network:TargetNetwork.forward",
        "rl_lab.workflows.dqn:DQN.transitions",
        *_NORMALIZED,
        MLP,
        "rl_lab.workflows.dqn:DQN.learn",
        *STEP,
    ),
)


# --- SAC: squared errors of the critics, the soft value of the policy ---------------------------------


def _critic_loss(
    workflow: Any, features: Tensor, action: Tensor, target: Tensor, weight: Tensor | None = None
) -> LossOutput:
    """d/dQ_i = 2 w (Q_i - target) / (E B)

    The result brings the gradients with it, unless the features learn too.
    """
    fits = learns_from(features) and not target.requires_grad and _takes_gradients(workflow, "critic", "critic_loss")
    networks = _critics(workflow.critic) if fits else None
    if networks is None:
        return NotImplemented

    expected, weights = target.numpy(), None if weight is None else weight.numpy()

    def loss(outputs: list[np.ndarray]) -> tuple[list[float], Callable[[Scales], ByOutput], np.ndarray]:
        values = np.concatenate(outputs, axis=1).T  # [E, B]
        error = values - expected
        weighted = error if weights is None else error * weights
        by_outputs = list((weighted * np.float32(2.0 / error.size))[:, :, None])
        number = float(np.add.reduce(error * weighted, axis=None)) / error.size
        return [number], lambda scales: _scaled(by_outputs, scales), values

    rows = torch.cat((features, action), dim=1)
    if features.requires_grad:
        (total,), values = differentiate([networks], rows, loss)
        return LossOutput({"critic": total}, aux={"values": torch.from_numpy(values)})
    reached = [forward(member, rows.numpy()) for member in networks.members]
    (number,), by_output, values = loss([each[-1] for each in reached])
    gradients = bring_gradients([networks], reached, ("critic",), by_output)
    return LossOutput({"critic": torch.scalar_tensor(number)}, {}, {"values": torch.from_numpy(values)}, gradients)


def _policy_loss(
    workflow: Any, features: Tensor, noise: Tensor, temperature: Tensor, mask: Tensor | None = None
) -> LossOutput:
    """Each row's value comes from its least critic alone, so its gradient goes back through that one network. The
    result brings the gradients of the actor with it."""
    learns_more = features.requires_grad or temperature.requires_grad or noise.requires_grad
    fits = learns_from(features) and not learns_more and _takes_gradients(workflow, "actor", "policy_loss")
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
    gradients = bring_gradients([networks], [reached], ("policy",), lambda scales: _scaled([by_output], scales))
    return LossOutput({"policy": total}, {"controller/entropy": mean_entropy}, {}, gradients)


def _temperature_loss(workflow: Any, entropy: Tensor, mask: Tensor | None = None) -> LossOutput:
    """d/d log(temperature) is the loss itself."""
    temperature = workflow.temperature
    if not is_unchanged(temperature, f"{_SOFT}Temperature", "forward", "loss") or not torch.is_grad_enabled():
        return NotImplemented
    if (mask is not None and temperature.follows_mask) or not _takes_gradients(
        workflow, "temperature", "temperature_loss"
    ):
        return NotImplemented
    number = temperature.log_value
    if number.dtype is not torch.float32 or not number.is_cpu or has_gradient_hooks(number):
        return NotImplemented
    loss = number.detach().exp() * (entropy.detach() - temperature.target_entropy)
    return LossOutput(
        {"temperature": loss}, {}, {}, lambda scales: Gradients((number,), (loss * scales["temperature"],))
    )


def _soft_value(workflow: Any, observation: dict[str, Tensor], temperature: Tensor) -> Tensor:
    """For continuous actions from one observed vector."""
    encoder, actor, slow = workflow.encoder, workflow.actor, workflow.slow_critic
    if not reads_one_vector(encoder):
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
    is_least = critic.target_subset is None and is_unchanged(critic, f"{_SOFT}TwinCritic", "expect", "combine")
    return plain_ensemble(actor.network), _critics(critic) if is_least else None


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


def _takes_gradients(workflow: Any, optimizer: str, loss: str) -> bool:
    """Whether the gradients that a loss brings with it reach the parameters as those of its graph would."""
    is_ours = is_unchanged(workflow, "rl_lab.workflows.sac:SAC", loss, "learn", "improve_policy", "gradient_step")
    return (
        takes_gradients()
        and is_ours
        and is_unchanged(workflow.optimizers[optimizer], "rl_lab.training.optimizer:Optimizer", "apply")
    )


def _critics(critic: Any) -> Networks | None:
    """Critics of continuous actions."""
    is_ours = is_unchanged(critic, f"{_SOFT}TwinCritic", "forward") and critic.is_continuous
    return plain_ensemble(critic.networks) if is_ours else None


_HANDED_ON = (
    "rl_lab.workflows.sac:SAC.learn",
    "rl_lab.workflows.sac:SAC.improve_policy",
    *STEP,
)
SAC_CRITIC_LOSS = FastPath(
    _critic_loss, ("rl_lab.workflows.sac:SAC.critic_loss", f"{_SOFT}TwinCritic.forward", _ENSEMBLE, *_HANDED_ON)
)
_EXPECTATION = (
    *(
        f"{_SOFT}{name}"
        for name in ("SoftActor.forward", *(f"TwinCritic.{n}" for n in ("forward", "expect", "combine")))
    ),
    *(f"{HEADS}distributions:{name}" for name in ("SquashedGaussian.rsample_with_log_prob", "DiagonalGaussian.draw")),
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
SAC_SOFT_VALUE = FastPath(_soft_value, ("rl_lab.workflows.sac:SAC.soft_value", *_EXPECTATION, f"{ENCODER}.forward"))


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


CATEGORICAL_SAMPLE = FastPath(_sample, (f"{HEADS}distributions:Categorical.sample",))
DQN_ACT = FastPath(
    _dqn_act,
    (
        "rl_lab.workflows.dqn:DQN.act",
        "rl_lab.workflows.dqn:DQN.count_in_statistics",
        *_NORMALIZED,
        f"{ENCODER}.forward",
        *(f"{HEADS}q_values:ActionNetwork.{name}" for name in ("forward", "_by_action")),
        f"{HEADS}q_values:QValues.values",
        MLP,
    ),
)
