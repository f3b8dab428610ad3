"""What workflows share that plan in latents without a decoder: how they act, plan, roll latents out, and step.

This is no algorithm: what to minimise, each workflow says itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.planners.plan import Plan, Search
from rl_lab.kernels.door import fast_path
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, WorldModelWorkflow, named
from rl_lab.workflows.context import WorkflowContext


class Network(Protocol):
    def __call__(self, *inputs: Any) -> Any: ...


class Critic(Protocol):
    def __call__(self, latent: Tensor, action: Tensor, *, drop: bool = False) -> Any:
        """Predictions of `[E, ...]`, one per critic."""

    value: Callable[..., Tensor]
    """`value(latent, action, of_two="least" or "mean")`: `[...]`, of two critics drawn at random."""


class Planner(Protocol):
    horizon: int
    plan: Callable[[Search], Plan]


class ImplicitModelWorkflow(WorldModelWorkflow):
    """Latents that predict rewards, values and each other; a policy that proposes plans, and a planner."""

    captured: ClassVar[tuple[str, ...]] = ("learn", "respond")
    not_exportable = "it plans anew at every step, with draws of its own; one trained with planner=none can leave"
    part_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "world_model": ("encoder", "dynamics", "reward_head", "continue_head")
    }
    paper_name: ClassVar[str]
    plan_value: ClassVar[Literal["least", "mean"]] = "mean"  # of two critics, for what follows a plan
    policy_plans: int
    discount: float
    rho: float
    loss_scales: Mapping[str, float | Schedule]

    @abstractmethod
    def model_loss(self, rows: Batch, latents: Tensor, valid: Tensor) -> LossOutput:
        """Of rows `[B, H+1]`, their rolled-out latents `[B, H+1, Z]` and which steps count `[B, H]`."""

    @abstractmethod
    def policy_loss(self, latents: Tensor, valid: Tensor, task: Tensor | None = None) -> LossOutput:
        """Of latents `[B, H+1, Z]` without a gradient, and their tasks `[B, H+1]`."""

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        if context.spec.action.kind != "continuous":
            raise ConfigError(
                f"{self.paper_name} plans with continuous actions, but those of {context.spec.id} are "
                f"{context.spec.action.kind}: write `algorithm=dreamer`, which takes any."
            )
        self.encoder: Network = context.components.require("encoder", Network)
        self.augmentation = context.components.optional("augmentation")
        self.dynamics: Network = context.components.require("dynamics", Network)
        self.reward_head: Network = context.components.require("reward_head", Network)
        self.continue_head: Network | None = context.components.optional("continue_head", Network)
        self.actor: Network = context.controllers.require("actor", Network)
        self.critic: Critic = context.controllers.require("critic", Critic)
        self.planner: Planner | None = context.controllers.optional("planner", Planner)
        if self.planner is None:
            self.not_exportable = ""  # type: ignore[misc]  # the policy acts alone
        candidates = getattr(self.planner, "candidates", self.policy_plans)
        if self.policy_plans > candidates:
            raise ConfigError(
                f"algorithm.policy_plans is {self.policy_plans}, but the planner tries {candidates} plans: write at "
                f"most {candidates}, or raise controllers.planner.candidates."
            )
        self.latent_size: int | None = getattr(self.encoder, "latent_size", None)  # without the task's embedding
        self.optimizers = {name: context.optimizers.require(name) for name in ("world_model", "actor")}
        if self.continue_head is None:
            self.loss_scales = {name: scale for name, scale in self.loss_scales.items() if name != "continue"}
        self.row_keys = (*context.spec.observation, "action", "reward", "is_last", "is_terminal")
        (self.action_size,) = context.spec.action.shape
        self.task_discounts = self.action_masks = None  # of several tasks: [K] and [K, A]
        if tasks := context.spec.tasks:
            self.task_discounts = torch.tensor([self.discount_of_task(each.max_episode_steps) for each in tasks])
            taken = [[float(number < each.action_size) for number in range(self.action_size)] for each in tasks]
            self.task_discounts = self.task_discounts.to(context.runtime.device)
            self.action_masks = torch.tensor(taken, device=context.runtime.device)

    # --- several tasks: a latent ends with its task's embedding; discounts and masks go by the task's number ---

    def discount_of_task(self, max_episode_steps: int | None) -> float:
        """What a reward of a task is worth one agent step later."""
        return self.discount

    def discount_at(self, task: Tensor | None) -> float | Tensor:
        """The discount of tasks `[...]`."""
        return self.discount if self.task_discounts is None or task is None else self.task_discounts[task]

    def masked(self, action: Tensor, task: Tensor | None) -> Tensor:
        """Actions `[..., A]` with 0 for the numbers that their task, `[...]` or fewer leading axes, does not take."""
        if self.action_masks is None or task is None:
            return action
        mask = self.action_masks[task]
        return action * mask.view(*task.shape, *[1] * (action.dim() - mask.dim()), -1)

    def policy_action(self, latent: Tensor, task: Tensor | None, *, sample: bool = True) -> Tensor:
        policy = self.actor(latent)
        return self.masked(policy.sample() if sample else policy.mode(), task)

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        """`state` is the mean of the last plan; is_first forgets it."""
        rows = dict(time_step.observation)
        if self.planner is not None:
            shape = (time_step.num_envs, self.planner.horizon, self.action_size)
            plan = torch.zeros(shape, device=time_step.reward.device) if state is None else state["plan"]
            rows["previous plan"] = plan.masked_fill(time_step.is_first[:, None, None], 0.0)
        numbers, choices = self.search_settings(mode) if self.planner is not None else ({}, {})
        answer = self.respond(rows, numbers, mode=mode, **choices)
        action = answer.pop("action")
        return PolicyStep(action, answer or None, dict(answer) if mode == "eval" else {})  # films show plans, rows none

    def search_settings(self, mode: Mode) -> tuple[Batch, dict[str, Any]]:
        """What a search goes by that changes while a run goes on: numbers, and the `horizon` of plans."""
        return {}, {}

    @torch.no_grad()
    def respond(self, rows: Batch, numbers: Batch, *, mode: Mode, horizon: int | None = None) -> Batch:
        """To observations `[N, ...]`, the action `[N, A]` and the plan it begins."""
        with self.context.runtime.autocast():
            latent, task = self.encoder(rows).float(), rows.get("task")
            if self.planner is None:
                return {"action": self.policy_action(latent, task, sample=mode == "train")}
            settings = {"horizon": horizon, "minimum_std": numbers.get("minimum_std")}
            plan = self.search(latent, rows["previous plan"], explore=mode == "train", task=task, **settings)
        return {"action": plan.action, "plan": plan.mean}

    def search(
        self, latent: Tensor, previous: Tensor, *, explore: bool, task: Tensor | None = None, **settings: Any
    ) -> Plan:
        """The planner's plans from latents `[N, Z]`, some of its candidates being the policy's."""
        assert self.planner is not None
        score = self.scores(latent, task)
        horizon = settings.get("horizon") or self.planner.horizon
        proposals = self.proposed_plans(latent, horizon, task) if self.policy_plans else None
        mask = None if self.action_masks is None or task is None else self.action_masks[task]
        return self.planner.plan(
            Search(score, len(latent), self.action_size, latent.device, previous, proposals, explore, mask, **settings)
        )

    @fast_path("rl_lab.kernels.gpu_plans:PROPOSED_PLANS")
    def proposed_plans(self, latent: Tensor, horizon: int, task: Tensor | None = None) -> Tensor:
        """`policy_plans` plans `[N, P, H, A]` in which the policy acts in latents of its own making."""
        latent = latent.unsqueeze(1).expand(-1, self.policy_plans, -1)  # [N, P, Z]
        actions = []
        for step in range(horizon):
            actions.append(self.policy_action(latent, task))
            latent = self.dynamics(latent, actions[-1]) if step < horizon - 1 else latent
        return torch.stack(actions, dim=2)

    @fast_path("rl_lab.kernels.gpu_plans:SCORES")
    def scores(self, latent: Tensor, task: Tensor | None) -> Callable[[Tensor], Tensor]:
        """What tells the value of plans from these latents."""
        return lambda plans: self.value_of_plans(latent, plans, task)

    def value_of_plans(self, latent: Tensor, plans: Tensor, task: Tensor | None = None) -> Tensor:
        """What plans `[N, C, H, A]` promise `[N, C]`: discounted rewards and, for what follows, the policy's value.

        Once the episode has likely ended, nothing more counts.
        """
        latent = latent.unsqueeze(1).expand(-1, plans.shape[1], -1)  # [N, C, Z]
        total = torch.zeros(plans.shape[:2], device=plans.device)
        weight = torch.ones_like(total)
        discount = self.discount_at(task if task is None else task.unsqueeze(1))
        for action in plans.unbind(dim=2):
            total = total + weight * self.reward_head(latent, action).mean()
            latent = self.dynamics(latent, action)
            weight = weight * discount
            if self.continue_head is not None:
                weight = weight * (self.continue_head(latent) >= 0.0)
        action = self.policy_action(latent, task)
        return total + weight * self.critic.value(latent, action, of_two=self.plan_value)

    # --- learning ---

    def update(self, batch: Batch, *, phase: Phase) -> Metrics:
        """World model and critics, then the policy in the latents that they just passed through."""
        return self.learn_from(batch, phase, "world_model", "actor")

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Only the world model and the critics."""
        return self.learn_from(batch, phase, "world_model")

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Only the policy."""
        return self.learn_from(batch, phase, "actor")

    def learn_from(self, batch: Batch, phase: Phase, *optimizers: str) -> Metrics:
        self.check_rows(batch["reward"].shape[1], buffer=phase.buffer)
        rows = self.context.runtime.to_device({key: batch[key] for key in self.row_keys if key in batch})
        scales = {name: value_at(scale, phase.progress) for name, scale in self.loss_scales.items()}
        metrics: Metrics = {}
        for name, optimizer in self.optimizers.items():
            metrics |= named(optimizer.prepare(phase.progress), name)
        outputs = self.learn(rows, self.context.runtime.numbers(scales), steps=optimizers)
        batch |= {key: outputs.pop(key) for key in ("priority",) if key in outputs}  # the buffer draws by it
        return metrics | outputs

    def learn(self, batch: Batch, numbers: Batch, *, steps: tuple[str, ...]) -> Batch:
        """Rows `[B, H+1]` to new parameters of the world model, of the actor, or of both."""
        outputs: Batch = {}
        with self.context.runtime.autocast(), torch.set_grad_enabled("world_model" in steps):
            rows = batch if self.augmentation is None else batch | self.shifted(batch)
            rows = rows | {"action": self.masked(rows["action"], rows.get("task"))}
            valid = (~rows["is_last"][:, :-1]).cumprod(dim=1)  # [B, H]: whether this step is still the episode's
            latents = self.rollout(rows)
            model_loss = self.model_loss(rows, latents, valid) if "world_model" in steps else None
        if model_loss is not None:
            scales = {term: numbers[term] for term in model_loss.terms}
            outputs |= self.gradient_step(self.optimizers["world_model"], model_loss, scales, name="world_model")
            outputs |= model_loss.aux
        if "actor" in steps:
            with self.context.runtime.autocast():
                policy_loss = self.policy_loss(latents.detach(), valid, rows.get("task"))
            scales = {term: numbers[term] for term in policy_loss.terms}
            outputs |= self.gradient_step(self.optimizers["actor"], policy_loss, scales, name="actor")
        return outputs

    def rollout(self, rows: Batch) -> Tensor:
        """Latents `[B, H+1, Z]` that see row 0 and then nothing but the actions taken."""
        latents = [self.encoder({key: rows[key][:, 0] for key in self.context.spec.observation})]
        for action in rows["action"][:, :-1].unbind(dim=1):
            latents.append(self.dynamics(latents[-1], action))
        return torch.stack(latents, dim=1)

    def inconsistency(self, before: Tensor, action: Tensor, after: Tensor, seen: Tensor) -> Tensor:
        """How far `[B, H]` latents rolled out are from those seen: the squared distance, without tasks' embeddings,
        which are the same; or what the dynamics calls its `error`, where they are drawn."""
        if hasattr(self.dynamics, "error"):
            return self.dynamics.error(before, action, seen.float())
        return (after.float() - seen.float())[..., : self.latent_size].square().mean(dim=-1)

    def continue_term(self, rows: Batch, after: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """The cross-entropy of whether the episode goes on, where there is a head that tells."""
        if self.continue_head is None:
            return {}
        continues = (~rows["is_terminal"][:, 1:]).float()
        errors = F.binary_cross_entropy_with_logits(self.continue_head(after).float(), continues, reduction="none")
        return {"continue": (errors * valid).sum() / valid.sum().clamp(min=1)}

    def weigh(self, errors: Tensor, valid: Tensor) -> Tensor:
        """Errors `[B, H]`: at each step the mean over the rows that are valid, later steps by powers of `rho`."""
        per_step = (errors * valid).sum(dim=0) / valid.sum(dim=0).clamp(min=1)
        return (per_step * self.powers(len(per_step), errors.device)).mean()

    def powers(self, count: int, device: torch.device) -> Tensor:
        return self.rho ** torch.arange(count, device=device)

    def shifted(self, rows: Batch) -> Batch:
        """The observations `[B, T, ...]` of learning: images a few pixels aside, each row by an amount of its own."""
        count = rows["reward"].shape[:2]
        flat = {key: rows[key].flatten(0, 1) for key in self.context.spec.observation}
        return {key: values.unflatten(0, count) for key, values in self.augmentation(flat).items()}  # type: ignore[misc]

    # --- imagining, for people ---

    @torch.inference_mode()
    def imagine(self, start: Batch, *, horizon: int) -> Batch:
        """From observations `[N, ...]`, what the model expects while the policy acts: `latent`, `value` `[N, H+1]`,
        `reward` `[N, H+1]` (0 at first) and `action` `[N, H, A]`."""
        latents, actions, rewards, task = [self.encoder(start)], [], [], start.get("task")
        for _ in range(horizon):
            actions.append(self.policy_action(latents[-1], task, sample=False))
            rewards.append(self.reward_head(latents[-1], actions[-1]).mean())
            latents.append(self.dynamics(latents[-1], actions[-1]))
        latent = torch.stack(latents, dim=1)
        value = self.critic.value(latent, self.policy_action(latent, task, sample=False), of_two="mean")
        reward = torch.stack([torch.zeros_like(rewards[0]), *rewards], dim=1)
        return {"latent": latent, "value": value, "reward": reward, "action": torch.stack(actions, dim=1)}
