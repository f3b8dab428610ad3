"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347) with generalised advantages
(Schulman et al. 2015, arXiv:1506.02438), for any action space, with or without memory.

One update: advantages over the rollout, then a few epochs of minibatches on the clipped surrogate

    L = -E[ min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) ] + c_v E[(V - R)^2] - c_e E[H]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from rl_lab.components.returns.returns import lambda_return, mean, standardize
from rl_lab.kernels.door import fast_path, precomputed_gradients
from rl_lab.training.schedules import Schedule, never_negative, value_at
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_fraction, checked_scales, named
from rl_lab.workflows.context import WorkflowContext

ROWS_AT_ONCE = 8192  # rows evaluated in one pass: bounds the memory that images take


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """`[..., *shape]` per key to features `[..., F]`."""


class Memory(Protocol):
    def initial_state(self, batch_size: int, device: torch.device) -> Tensor: ...
    def step(self, features: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]: ...
    def unroll(self, features: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]: ...


class Actor(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any:
        """Features `[..., F]` to a distribution with sample, mode, log_prob and entropy."""


class Critic(Protocol):
    def __call__(self, features: Tensor) -> Tensor:
        """Features `[..., F]` to values `[...]`."""


class PPO(Workflow):
    """Clipped surrogate, GAE, epochs of minibatches. Time limits bootstrap, terminations do not."""

    is_on_policy = True
    captured: ClassVar[tuple[str, ...]] = ("learn", "respond")

    def __init__(
        self,
        *,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        value_clip_range: float | Schedule | None = None,
        epochs: int = 10,
        minibatch_size: int | float = 64,
        sequence_length: int | None = None,
        advantage_normalization: Literal["batch", "minibatch", "none"] = "minibatch",
        target_kl: float | None = None,
        loss_scales: Mapping[str, float | Schedule],
    ) -> None:
        if epochs < 1:
            raise ConfigError(f"algorithm.epochs is {epochs}: PPO needs at least 1 pass over each rollout.")
        if minibatch_size <= 0 or (isinstance(minibatch_size, float) and minibatch_size > 1):
            raise ConfigError(
                f"algorithm.minibatch_size is {minibatch_size}: write a whole number of samples (64) "
                "or a fraction of the rollout in (0, 1], such as 0.25."
            )
        if minibatch_size == 1 and isinstance(minibatch_size, int) and advantage_normalization == "minibatch":
            raise ConfigError(
                "algorithm.minibatch_size is 1, and the advantage of a single sample cannot be normalised: write at "
                "least 2, or `algorithm.advantage_normalization: batch`."
            )
        self.discount = checked_fraction("discount", discount)
        self.gae_lambda = checked_fraction("gae_lambda", gae_lambda)
        self.clip_range = never_negative(clip_range, "algorithm.clip_range")
        self.value_clip_range = value_clip_range and never_negative(value_clip_range, "algorithm.value_clip_range")
        self.epochs = epochs
        self.minibatch_size = minibatch_size
        self.sequence_length = sequence_length
        self.advantage_normalization = advantage_normalization
        if target_kl is not None and target_kl <= 0:
            raise ConfigError(f"algorithm.target_kl is {target_kl}: write a number above 0, or null for no limit.")
        self.target_kl = target_kl
        self.loss_scales = checked_scales(loss_scales, algorithm="PPO", terms=("policy", "value", "entropy"))

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.encoder: Encoder = context.components.require("encoder", Encoder)
        self.critic_encoder: Encoder | None = context.components.optional("critic_encoder", Encoder)
        self.memory: Memory | None = context.components.optional("memory", Memory)
        self.observation_normalizer = context.components.require("observation_normalizer")
        self.reward_normalizer = context.components.require("reward_normalizer")
        self.actor: Actor = context.controllers.require("actor", Actor)
        self.critic: Critic = context.controllers.require("critic", Critic)
        self.optimizer = context.optimizers.require("controller")
        if self.memory is not None and self.critic_encoder is not None:
            raise ConfigError(
                "components has both a memory and a critic_encoder: with memory the critic reads the memory's output. "
                "Write `components.critic_encoder: null`."
            )

    def check_phase(self, phase: Phase) -> None:
        super().check_phase(phase)
        if (length := self.sequence_length) is not None and (length < 1 or phase.collect_steps % length):
            raise ConfigError(
                f"algorithm.sequence_length is {length}: write a divisor of the {phase.collect_steps} collect_steps of "
                f"phase '{phase.name}', or null for whole rollouts."
            )

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        rows, extras = dict(time_step.observation), {}
        if self.memory is not None:
            if state is None:
                state = self.memory.initial_state(time_step.num_envs, time_step.reward.device)
            rows |= {"memory_state": state, "is_first": time_step.is_first}
            extras = {"memory_state": state} if mode == "train" else {}
        answer = self.respond(rows, {}, mode=mode)
        return PolicyStep(answer["action"], answer.get("memory_state"), extras)

    def respond(self, rows: Batch, numbers: Batch, *, mode: Mode) -> Batch:
        """To observations `[N, ...]`, actions; where there is memory, from its state before them to that after them."""
        features, after = self.encoder(self.observation_normalizer(rows)), {}
        if self.memory is not None:
            features, after["memory_state"] = self.memory.step(features, rows["memory_state"], rows["is_first"])
        policy = self.actor(features, rows.get("action_mask"))
        return {"action": policy.mode() if mode == "eval" else policy.sample(), **after}

    # --- learning ---

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Epochs of minibatches over one rollout `[N, T+1]`, whose last row only bootstraps."""
        if bool(batch["is_last"][:, :-1].all()):
            return {}  # every row was an episode's last: nothing was decided, so nothing can be learnt
        samples, metrics = self.prepare(batch)
        metrics |= named(self.optimizer.prepare(phase.progress))
        settings = {**self.loss_scales, "clip_range": self.clip_range, "value_clip_range": self.value_clip_range}
        values = {name: value_at(each, phase.progress) for name, each in settings.items() if each is not None}
        runtime = self.context.runtime
        numbers = runtime.scalars(values)
        steps: list[Metrics] = []
        minibatches: list[Batch] = []
        epochs_done, gradient_steps = 0, 0
        for epoch in range(self.epochs):
            is_watched = self.target_kl is not None or epoch == self.epochs - 1  # metrics of the last epoch suffice
            if len(minibatches) != 1:  # a single one is the same in every epoch
                minibatches = list(self.minibatches(samples))
            for minibatch in minibatches:
                taken = self.learn(minibatch, numbers, with_metrics=is_watched or runtime.captures)
                gradient_steps += 1
                if is_watched:
                    steps.append(taken)
            epochs_done += 1
            if self.target_kl is not None and bool(steps[-1]["controller/approx_kl"] > 1.5 * self.target_kl):
                break  # 1.5: the customary margin of the reference implementations
        self.learn_statistics(batch)
        for name in dict.fromkeys(name for step in steps for name in step):
            metrics[name] = torch.stack([torch.as_tensor(step[name]) for step in steps if name in step]).mean()
        return metrics | {
            "train/epochs_done": epochs_done,
            "train/gradient_steps": gradient_steps,
            "train/clip_range": values["clip_range"],
        }

    def learn(self, batch: Batch, numbers: Mapping[str, Any], *, with_metrics: bool) -> Metrics:
        """One gradient step from a minibatch."""
        limits = {name: numbers.get(name) for name in ("clip_range", "value_clip_range")}
        with self.context.runtime.autocast(), precomputed_gradients():
            loss = self.loss(batch, **limits, with_metrics=with_metrics)  # type: ignore[arg-type]
        return self.gradient_step(self.optimizer, loss, {name: numbers[name] for name in self.loss_scales})

    @fast_path("rl_lab.kernels.cpu_ppo:PPO_STEP_LOSS")
    def loss(
        self, sample: Batch, *, clip_range: float, value_clip_range: float | None, with_metrics: bool = True
    ) -> LossOutput:
        features, critic_features = self.features(sample)
        terms = ppo_loss(
            self.actor,
            self.critic,
            features,
            sample,
            critic_features=critic_features,
            clip_range=clip_range,
            value_clip_range=value_clip_range,
        )
        log_prob = terms.pop("log_prob")
        return LossOutput(terms, self.loss_metrics(terms, log_prob, sample, clip_range) if with_metrics else {})

    @torch.no_grad()
    def loss_metrics(self, terms: Batch, log_prob: Tensor, sample: Batch, clip_range: float) -> Metrics:
        """How far the policy has moved from the one that acted."""
        log_ratio = log_prob - sample["log_prob"]
        ratio, valid = log_ratio.exp(), sample.get("valid")  # None: every sample counts
        return {
            "controller/entropy": -terms["entropy"].detach(),
            "controller/approx_kl": mean(ratio - 1.0 - log_ratio, valid),  # k3 of joschu.net/blog/kl-approx.html
            "controller/clip_fraction": mean(((ratio - 1.0).abs() > clip_range).float(), valid),
        }

    def policy_and_value(self, sample: Batch) -> tuple[Any, Tensor]:
        """Policy and value of the samples, `[M]`, or `[n, T]` sequences where there is memory."""
        features, critic_features = self.features(sample)
        policy = self.actor(features, sample.get("action_mask"))
        return policy, self.critic(features if critic_features is None else critic_features)

    def features(self, sample: Batch) -> tuple[Tensor, Tensor | None]:
        """What the actor reads, and what the critic reads where that is something else."""
        observation = self.observation_normalizer(sample)
        features = self.encoder(observation)
        if self.memory is not None:
            features, _ = self.memory.unroll(features, sample["memory_state"][:, 0], sample["is_first"])
        return features, None if self.critic_encoder is None else self.critic_encoder(observation)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Advantages and returns of a rollout, and the samples to learn from.

        row        0 … T-1                    T
        sample     action, log_prob, value    pending: observation only, its value bootstraps
        valid      where ~is_last             the answer to an episode's last row moved nothing
        """
        log_prob, value = self.evaluate_actions(batch)  # [N, T+1] each
        self.reward_normalizer.update(batch["reward"][:, 1:], batch["is_first"][:, 1:])  # row 0 was counted before
        reward = self.reward_normalizer(batch["reward"])
        returns = lambda_return(
            reward, value, batch["is_last"], batch["is_terminal"], discount=self.discount, lambda_=self.gae_lambda
        )  # [N, T]
        value = value[:, :-1]
        advantage = returns - value
        valid = ~batch["is_last"][:, :-1]
        if self.advantage_normalization == "batch":
            advantage = standardize(advantage, valid)
        kept = (*self.context.spec.observation, "action", *(("memory_state", "is_first") if self.memory else ()))
        samples = {key: batch[key][:, :-1] for key in kept}
        samples |= {"log_prob": log_prob[:, :-1], "value": value, "advantage": advantage, "return": returns}
        if self.memory is None:
            samples = {key: rows.flatten(0, 1) for key, rows in samples.items()}
            if len(acted := valid.flatten().nonzero()[:, 0]) < valid.numel():
                samples = {key: rows.index_select(0, acted) for key, rows in samples.items()}
            value, returns = samples["value"], samples["return"]
        else:
            samples["valid"] = valid
            value, returns = value[valid], returns[valid]
            if (length := self.sequence_length) is not None:  # [N * T / L, L], from the state of each first row
                samples = {key: rows.unflatten(1, (-1, length)).flatten(0, 1) for key, rows in samples.items()}
        residual = returns - value
        metrics = {
            "train/explained_variance": 1.0 - residual.var() / returns.var().clamp(min=1e-8),
            "controller/value_mean": value.mean(),
            "controller/advantage_std": residual.std(),
        }
        return samples, metrics

    def evaluate_actions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability of each action taken and value of each row, `[N, T+1]`, under the parameters that acted.

        They have not changed since, so one pass over the rollout replaces a critic call per time step.
        """
        num_envs, length = batch["reward"].shape
        parts = []
        for first in range(0, num_envs, max(1, ROWS_AT_ONCE // length)):
            rows = {key: values[first : first + max(1, ROWS_AT_ONCE // length)] for key, values in batch.items()}
            with self.context.runtime.autocast():  # as when learning, or ratios would not begin at 1
                policy, value = self.policy_and_value(rows)
            parts.append((policy.log_prob(rows["action"]), value.float()))
        return torch.cat([log_prob for log_prob, _ in parts]), torch.cat([value for _, value in parts])

    def minibatches(self, samples: Batch) -> Iterator[Batch]:
        """Shuffled minibatches: single samples, or whole sequences where there is memory."""
        count = samples["advantage"].numel()
        wanted = self.minibatch_size
        if isinstance(wanted, float):
            wanted = max(1, round(wanted * count))
        units = len(samples["advantage"])  # samples, or sequences where there is memory
        parts = min(units, max(1, round(count / wanted)))
        for indices in torch.randperm(units).tensor_split(parts) if parts > 1 else (slice(None),):
            minibatch = {key: rows[indices] for key, rows in samples.items()}  # slice(None): the whole rollout
            if self.advantage_normalization == "minibatch":
                minibatch["advantage"] = standardize(minibatch["advantage"], minibatch.get("valid"))
            yield minibatch

    @torch.no_grad()
    def learn_statistics(self, batch: Batch) -> None:
        """After learning, so that the whole rollout was acted and learnt under the same normalisation."""
        self.observation_normalizer.update({key: rows[:, :-1] for key, rows in batch.items()})


@fast_path("rl_lab.kernels.cpu_ppo:PPO_LOSS")
def ppo_loss(
    actor: Actor,
    critic: Critic,
    features: Tensor,
    sample: Batch,
    *,
    critic_features: Tensor | None = None,
    clip_range: float,
    value_clip_range: float | None = None,
) -> dict[str, Tensor]:
    """Equation 9 of the paper as three terms to minimise, and `log_prob [...]` of the actions, without gradient.

    `sample` has action, log_prob, advantage, return, value and, where not every sample counts, valid. The critic reads
    `critic_features` where it has its own. With a `value_clip_range` the larger of two errors counts: that of the
    value, and that of the value kept near its old one.
    """
    valid = sample.get("valid")
    policy = actor(features, sample.get("action_mask"))
    value = critic(features if critic_features is None else critic_features)
    log_prob = policy.log_prob(sample["action"])
    ratio = (log_prob - sample["log_prob"]).exp()
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    surrogate = torch.minimum(ratio * sample["advantage"], clipped * sample["advantage"])
    error = (value - sample["return"]).square()
    if value_clip_range is not None:
        near = sample["value"] + (value - sample["value"]).clamp(-value_clip_range, value_clip_range)
        error = torch.maximum(error, (near - sample["return"]).square())
    return {
        "policy": -mean(surrogate, valid),
        "value": mean(error, valid),
        "entropy": -mean(policy.entropy(), valid),
        "log_prob": log_prob.detach(),
    }
