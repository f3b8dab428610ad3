"""PlaNet: learn a model of the world from replayed sequences, and plan in it anew at every step.

    "Learning Latent Dynamics for Planning from Pixels" (Hafner et al. 2019, arXiv:1811.04551)

    learning    states = model(rows)                     L = reconstruction + reward + KL(posterior || prior)
    acting      1000 plans of 12 actions, dreamt from the state now; the 100 with the most reward say where to draw
                the next 1000; after 10 rounds the first action of their mean. While collecting, with noise.

There is no actor, no critic and no end of an episode in a plan: episodes should end by their time limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_lab.components.world_model.rssm import world_model_loss
from rl_lab.training.schedules import Schedule
from rl_lab.types import Batch, ConfigError, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, checked_scales, named
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.latent_planning import Planner, plan_before
from rl_lab.workflows.latent_states import LatentStateWorkflow

TERMS = ("reconstruction", "reward", "dynamics", "representation")


class PlaNet(LatentStateWorkflow):
    """A world model, and a planner that asks it."""

    captured = ("learn", "plan")
    not_exportable = "it plans anew at every step, with draws of its own, and has no network that acts"

    def __init__(
        self,
        *,
        free_nats: float = 3.0,
        exploration_noise: float = 0.3,
        loss_scales: Mapping[str, float | Schedule],
    ) -> None:
        if free_nats < 0.0 or exploration_noise < 0.0:
            raise ConfigError(
                f"algorithm.free_nats is {free_nats} and exploration_noise is {exploration_noise}: write numbers from "
                "0, such as 3.0 and 0.3."
            )
        self.free_nats, self.exploration_noise = free_nats, exploration_noise
        self.loss_scales = checked_scales(loss_scales, algorithm="PlaNet", terms=TERMS)

    def initialize(self, context: WorkflowContext) -> None:
        if context.spec.action.kind != "continuous":
            raise ConfigError(
                f"PlaNet plans with continuous actions, but those of {context.spec.id} are {context.spec.action.kind}: "
                "write `algorithm=dreamer`, which takes any."
            )
        super().initialize(context)
        context.controllers.require("planner", Planner)
        self.optimizers = {"": context.optimizers.require("world_model")}

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        """`state` is the model's state, the action that followed it and the plan it began; is_first forgets them."""
        before = self.blank_state(time_step) if state is None else state
        with self.context.runtime.autocast():
            state = self.observe(time_step.observation, time_step.is_first, before, deterministic=mode == "eval")
        plan = self.plan(state | plan_before(before, time_step.is_first), {}, mode=mode)
        return self.answer(self.explore(plan["action"], mode=mode), state | {"plan": plan["plan"]}, mode=mode)

    def plan(self, batch: Batch, numbers: Batch, *, mode: Mode = "eval") -> Batch:
        """From states `[N, ...]`, the first action `[N, A]` of the plan that promises the most, and the plan."""
        with self.context.runtime.autocast(), torch.no_grad():
            plan = self.search(batch, mode=mode)
        return {"action": plan.action, "plan": plan.mean}

    # --- learning ---

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        """All there is to learn."""
        return self.learn_from(batch, phase)

    def learn(self, batch: Batch, numbers: Batch) -> Batch:
        """Rows `[B, T]` to new parameters; with a context, row 0 only tells where the model stood."""
        rows, before = self.dynamics.begin(batch)
        with self.context.runtime.autocast():
            state, posterior = self.observe_rows(rows, before)
            loss = world_model_loss(rows, state, posterior, **self.model_parts, free_nats=self.free_nats)
        total = torch.stack([term * numbers[name] for name, term in loss.terms.items()]).sum()
        outputs = loss.metrics | {f"loss/{name}": term.detach() for name, term in loss.terms.items()}
        outputs["priority"] = self.priority(loss, numbers)
        return outputs | named(self.optimizers[""].apply(total)) | self.dynamics.renew(batch, state)

    # --- dreaming, for people ---

    @torch.inference_mode()
    def imagine(self, start: Batch, *, horizon: int) -> Batch:
        """What the model expects from states `[N, ...]` on, planning anew at every step: per step 0..H the model's
        state, `reward` and every observation key; `action` for steps 0..H-1."""
        states, actions = [self.model_state(start)], []
        with self.context.runtime.autocast():
            for _ in range(horizon):
                actions.append(self.plan(states[-1], {})["action"])
                after, _ = self.dynamics.imagine(states[-1], lambda features, step: actions[-1], 1)
                states.append({key: value[:, 1] for key, value in after.items()})
            together = {key: torch.stack([state[key] for state in states], dim=1) for key in states[0]}
            features = self.dynamics.features(together)
            reward, action = self.reward_head(features).mean(), torch.stack(actions, dim=1)
            return {**self.decoder.reconstruct(features), **together, "reward": reward, "action": action}
