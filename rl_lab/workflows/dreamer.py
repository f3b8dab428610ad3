"""Dreamer: learn a model of the world from replayed sequences, learn to act in dreams of it.

    V1  "Dream to Control" (Hafner et al. 2020, arXiv:1912.01603)
    V2  "Mastering Atari with Discrete World Models" (2021, arXiv:2010.02193)
    V3  "Mastering Diverse Domains through World Models" (2023, arXiv:2301.04104), as danijar/dreamerv3 has it today

One update, V3:
    states  = model(rows)                        L_model = reconstruction + reward + continue + KL, both ways
    dreams  = policy and prior, H steps from every state
    returns = lambda-returns of the dreams       L_value = cross-entropy to them, in dreams and on the rows
                                                 L_policy = -log pi * (return - value) / scale - entropy
With `exploration=plan2explore` a second actor and critic learn so of another reward (exploration.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.returns.returns import lambda_return
from rl_lab.components.world_model.rssm import unroll, world_model_loss
from rl_lab.training.schedules import Schedule
from rl_lab.training.target_network import TargetNetwork, frozen
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, checked_fraction, checked_scales, named
from rl_lab.workflows.behaviour import Actor, Behaviour, checked_policy_gradient
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.exploration import EXPLORATION, Plan2Explore, explorer_of, mixed
from rl_lab.workflows.latent_planning import plan_before
from rl_lab.workflows.latent_states import BEFORE, SEEN, LatentStateWorkflow, Network, marked, those_marked

TERMS = {  # which optimiser each loss is for, where they are not all one
    "world_model": ("reconstruction", "reward", "continue", "action_mask", "dynamics", "representation"),
    "actor": ("policy", "entropy"),
    "critic": ("value", "replay_value"),
}


class Dreamer(LatentStateWorkflow):
    """A world model, and an actor and a critic that learn in it."""

    captured = ("learn", "respond")

    def __init__(
        self,
        *,
        discount: float = 0.997,
        lambda_: float = 0.95,
        horizon: int = 15,
        dream_last: int | None = None,
        free_nats: float = 1.0,
        free_nats_on_average: bool = False,
        exploration_noise: float = 0.0,
        explorer_fraction: float = 0.0,
        sample_in_evaluations: bool = False,
        policy_gradient: Literal["reinforce", "dynamics", "advantage", "both", "auto"] = "reinforce",
        dynamics_fraction: float = 0.1,
        slow_critic_rate: float = 0.02,
        slow_critic_every: int = 1,
        slow_target: bool = False,
        slow_regularizer: float = 1.0,
        loss_scales: Mapping[str, float | Schedule],
    ) -> None:
        if horizon < 1:
            raise ConfigError(f"algorithm.horizon is {horizon}: dreams need at least 1 step.")
        if dream_last is not None and dream_last < 2:
            raise ConfigError(f"algorithm.dream_last is {dream_last}: write 2 rows or more, or null for all of them.")
        if min(free_nats, slow_regularizer, exploration_noise) < 0.0:
            raise ConfigError(
                f"algorithm.free_nats is {free_nats}, slow_regularizer is {slow_regularizer} and exploration_noise is "
                f"{exploration_noise}: write numbers from 0."
            )
        self.explorer_fraction = checked_fraction("explorer_fraction", explorer_fraction)
        self.discount, self.lambda_ = checked_fraction("discount", discount), checked_fraction("lambda_", lambda_)
        self.horizon, self.dream_last, self.sample_in_evaluations = horizon, dream_last, sample_in_evaluations
        self.free_nats, self.policy_gradient = free_nats, str(policy_gradient)
        self.dynamics_fraction = checked_fraction("dynamics_fraction", dynamics_fraction)
        self.free_nats_on_average, self.exploration_noise = free_nats_on_average, exploration_noise
        self.slow_critic_rate, self.slow_critic_every = slow_critic_rate, slow_critic_every
        self.slow_target, self.slow_regularizer = slow_target, slow_regularizer
        scales = {**dict.fromkeys(("action_mask", *EXPLORATION), 1.0), **loss_scales}  # not in every config
        self.loss_scales = checked_scales(scales, algorithm="Dreamer", terms=sum(TERMS.values(), EXPLORATION))

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.continue_head: Network = context.components.require("continue_head", Network)
        mask_head = context.components.optional("action_mask_head", Network)  # none in older runs
        self.action_mask_head: Network | None = mask_head if context.spec.has_action_mask else None
        self.return_scale = context.components.require("return_scale")
        self.actor: Actor = context.controllers.require("actor", Actor)
        self.critic: Any = context.controllers.require("critic", Network)
        self.slow_critic = TargetNetwork(self.critic, rate=self.slow_critic_rate, every=self.slow_critic_every)
        context.components.add("slow_critic", self.slow_critic)
        self.explorer = explorer_of(context, self.explorer_fraction)
        curious = "disagreement" in context.components
        self.plan2explore = Plan2Explore(context, self.dynamics, self.slow_critic) if curious else None
        absent = [*([] if self.action_mask_head else ["action_mask"]), *([] if curious else EXPLORATION)]
        self.loss_scales = {name: scale for name, scale in self.loss_scales.items() if name not in absent}
        # One optimiser for everything (V3), or one each (V1, V2); what explores has its own.
        self.terms = {"": sum(TERMS.values(), ())} if "agent" in context.optimizers else dict(TERMS)
        self.terms |= {"exploration": EXPLORATION} if curious else {}
        self.optimizers = {name: context.optimizers.require(name or "agent") for name in self.terms}
        self.policy_gradient = checked_policy_gradient(self.policy_gradient, context.spec, self.terms)

    def check_phase(self, phase: Phase) -> None:
        super().check_phase(phase)
        if "update" in phase.workflow_hooks and "" not in self.terms:
            raise ConfigError(
                f"Phase '{phase.name}' lists update, which needs one optimizer `agent` for everything: write "
                "`workflow_hooks: [update_world_model, update_controller]`."
            )
        if "update_explorer" in phase.workflow_hooks and self.plan2explore is None:
            raise ConfigError(f"Phase '{phase.name}' lists update_explorer: that needs `exploration=plan2explore`.")

    def check_rows(self, num_rows: int, *, buffer: str) -> None:
        if num_rows < 3:
            raise ConfigError(
                f"buffers.{buffer}.sequence_length is {num_rows}: Dreamer needs 3 rows or more, one to begin with and "
                "two to learn from."
            )

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        """`state` is the model's state and the action that followed it; is_first forgets both."""
        before = self.blank_state(time_step) if state is None else state
        rows = marked(SEEN, time_step.observation) | marked(BEFORE, before) | {"is_first": time_step.is_first}
        after = self.respond(rows, {}, mode=mode)
        return self.answer(after.pop("action"), after, mode=mode)

    def respond(self, rows: Batch, numbers: Batch, *, mode: Mode) -> Batch:
        """To a row `[N, ...]` and what was before it: the state after it, and the action."""
        observation, before = those_marked(SEEN, rows), those_marked(BEFORE, rows)
        with self.context.runtime.autocast(), torch.no_grad():
            is_greedy = mode == "eval" and not self.sample_in_evaluations
            state = self.observe(observation, rows["is_first"], before, deterministic=is_greedy)
            seen = self.dynamics.features(state), observation.get("action_mask")
            planned = {}
            if self.planner is None:
                policy = self.actor(*seen)
                action = policy.mode() if is_greedy else policy.sample()
            else:
                plan = self.search(state | plan_before(before, rows["is_first"]), mode=mode)
                action, planned = plan.action, {"plan": plan.mean}
            if mode == "train" and self.explorer_fraction:
                action = mixed(self.explorer(*seen).sample(), action, self.explorer_fraction)
            return {**state, **planned, "action": self.explore(action, mode=mode)}

    def planned_return(self, features: Tensor) -> Tensor:
        """Of plans `[N*C, H, F]`: rewards while the episode continues, then the critic's value of where they end."""
        reach = self.continue_head(features).mean().cumprod(dim=1)  # the probability that it continues after each step
        reward = self.reward_head(features).mean() * F.pad(reach[:, :-1], (1, 0), value=1.0)
        return reward.sum(dim=1) + reach[:, -1] * self.critic(features[:, -1]).mean()

    # --- learning ---

    def update(self, batch: Batch, *, phase: Phase) -> Metrics:
        """World model, actor and critic at once."""
        return self.learn_from(batch, phase, model=True, controller=True)

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Only the world model."""
        return self.learn_from(batch, phase, model=True)

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Only actor and critic, in dreams of the model as it is."""
        return self.learn_from(batch, phase, controller=True)

    def update_explorer(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Only Plan2Explore's ensemble, actor and critic; the other controller hooks teach them too where they act."""
        return self.learn_from(batch, phase, explorer=True)

    def learn_from(self, batch: Batch, phase: Phase, **choices: bool) -> Metrics:
        acts = self.plan2explore is not None and self.explorer_fraction > 0.0
        choices = {"model": False, "controller": False, "explorer": acts and "controller" in choices, **choices}
        metrics = super().learn_from(batch, phase, **choices)
        if choices["controller"]:
            self.slow_critic.follow(self.critic)
        if choices["explorer"] and self.plan2explore:
            self.plan2explore.follow(self.slow_critic)
        return metrics

    def learn(self, batch: Batch, numbers: Batch, *, model: bool, controller: bool, explorer: bool) -> Batch:
        """Rows `[B, T]` to new parameters; with a context, row 0 only tells where the model stood."""
        rows, before = self.dynamics.begin(batch)
        losses: list[LossOutput] = []
        outputs: Batch = {}
        # Each part under an autocast of its own: one that began without gradients would keep weights cast without.
        with self.context.runtime.autocast(), torch.set_grad_enabled(model):
            state, posterior = self.observe_rows(rows, before)
            if model:
                losses.append(self.model_loss(rows, state, posterior))
                outputs["priority"] = self.priority(losses[0], numbers)
        if controller:
            losses.append(self.controller_loss(rows, state))
        if explorer and self.plan2explore:
            losses.append(self.behaviour_loss(self.plan2explore.behaviour, self.last_rows(state)))
            losses.append(self.plan2explore.ensemble_loss(rows, state))
        scaled: dict[str, Tensor] = {}
        for loss in losses:
            outputs |= loss.metrics | {f"loss/{name}": term.detach() for name, term in loss.terms.items()}
            scaled |= {name: term * numbers[name] for name, term in loss.terms.items()}
        for optimizer, terms in self.terms.items():
            if present := [scaled[name] for name in terms if name in scaled]:
                outputs |= named(self.optimizers[optimizer].apply(torch.stack(present).sum()), optimizer)
        return outputs | self.dynamics.renew(batch, state)

    def model_loss(self, rows: Batch, state: Batch, posterior: Tensor) -> LossOutput:
        """Equations 3 to 5 of V3: predict what was seen, and keep posterior and prior close to each other."""
        heads: Any = {"continue_head": self.continue_head, "action_mask_head": self.action_mask_head}
        free: Any = {"free_nats": self.free_nats, "are_free_on_average": self.free_nats_on_average}
        return world_model_loss(rows, state, posterior, **self.model_parts, **heads, discount=self.discount, **free)

    def controller_loss(self, rows: Batch, state: Batch) -> LossOutput:
        """What the task's actor and critic minimise: in dreams of its reward, and the critic on the rows themselves."""
        rows, state = self.last_rows(rows), self.last_rows(state)
        loss = self.behaviour_loss(self.task, state)
        with self.context.runtime.autocast():
            loss.terms["replay_value"] = self.replay_value_loss(rows, state, loss.aux["return"][:, 0].detach())
        return loss

    def last_rows(self, rows: Batch) -> Batch:
        """The rows `[B, T, ...]` that dreams begin from."""
        return {key: part[:, -(self.dream_last or 0) :] for key, part in rows.items()}

    @property
    def task(self) -> Behaviour:
        parts: tuple[Any, Any, Any, Any] = self.actor, self.critic, self.slow_critic, self.return_scale
        return Behaviour(*parts, lambda features, action: self.reward_head(features).mean(), self.reward_head)

    def behaviour_loss(self, behaviour: Behaviour, state: Batch) -> LossOutput:
        """What an actor and a critic minimise in dreams from states `[B, T, ...]`; `aux` has the returns `[N, H]`.

        dream step       0      1      ...    H          N = B*T dreams, one from every row or the last of them
        action           a0     a1            .          drawn from the policy, among those expected to be allowed
        reward, continue r0 c0  r1 c1         rH cH      predicted; r1 is what a0 earned, r0 belongs to the row
        weight           c0     c0 c1         .          whether the dream has got this far at all
        return           R0     R1            .          R_t = r_t+1 + c_t+1 ((1 - lambda) v_t+1 + lambda R_t+1)
        """
        of = behaviour.name
        dream = self.dream(behaviour, {key: value.detach().flatten(0, 1) for key, value in state.items()})
        features, continues = dream["features"].detach(), dream["continue"]
        with self.context.runtime.autocast():
            value = behaviour.critic(features)  # of [N, H+1]
            slow = behaviour.slow_critic(features).mean()
            policy = behaviour.actor(features[:, :-1], dream.get("action_mask"))
            with torch.no_grad():
                expected = slow if self.slow_target else value.mean()
            bootstrap = dream.get("value", expected)
            never = torch.zeros_like(continues, dtype=torch.bool)
            steps = (dream["reward"], bootstrap, never, 1.0 - continues)
            returns = lambda_return(*steps, discount=1.0, lambda_=self.lambda_)  # [N, H]
            behaviour.return_scale.update(returns)
            scale = behaviour.return_scale.scale()
            advantage = (returns - bootstrap[:, :-1]) / scale
            objective = self.policy_objective(policy, dream["action"], advantage, returns / scale)
            weight = continues.detach().cumprod(dim=1)[:, :-1]
            entropy = policy.entropy()
            terms = {
                f"{of}policy": -(weight * objective).mean(),
                f"{of}entropy": -(weight * entropy).mean(),
                f"{of}value": self.value_loss(value.until_last(), returns, slow[:, :-1], weight),
            }
        metrics = {
            f"controller/{of}entropy": entropy.detach().mean(),
            f"controller/{of}value_mean": bootstrap.detach().mean(),
            f"controller/{of}advantage_std": advantage.detach().std(),
            f"controller/{of}imagined_reward": dream["reward"][:, 1:].detach().mean(),
            f"controller/{of}imagined_return": returns.detach().mean(),
            f"controller/{of}return_scale": scale,
        }
        return LossOutput(terms, metrics, {"return": returns})

    def policy_objective(self, policy: Any, action: Tensor, advantage: Tensor, returns: Tensor) -> Tensor:
        """What the actor maximises `[N, H]`: likelier good actions, or returns or advantages through the model.

        V2 mixes a tenth of the returns in (danijar/dreamerv2, agent.py: actor_grad both, actor_grad_mix). An advantage
        also passes the gradient of its baseline, so that an action is not credited again with the returns of later
        steps (danijar/dreamerv3 at 8fa35f8, agent.py: actor_grad_cont backprop).
        """
        if self.policy_gradient in ("dynamics", "advantage"):
            return returns if self.policy_gradient == "dynamics" else advantage
        likelier = policy.log_prob(action.detach()) * advantage.detach()
        return likelier if self.policy_gradient == "reinforce" else likelier.lerp(returns, self.dynamics_fraction)

    def dream(self, behaviour: Behaviour, start: Batch) -> Batch:
        """An actor in the model, H steps from states `[N, ...]`. Gradients, if wanted, reach the actor alone."""
        through_model = self.policy_gradient != "reinforce"
        seen_through: Any = self.dynamics, self.continue_head, behaviour.reward_part, behaviour.critic
        graph = frozen(*seen_through) if through_model else torch.no_grad()
        with self.context.runtime.autocast(), graph:
            states, actions = unroll(self.dynamics, behaviour.actor, start, self.horizon, self.action_mask_head)
            features = self.dynamics.features(states)
            dream = {"features": features, **actions, "reward": behaviour.reward(features, actions["action"])}
            dream["continue"] = self.continue_head(features).mean()
            if through_model:
                dream["value"] = (behaviour.slow_critic if self.slow_target else behaviour.critic)(features).mean()
        return dream

    def value_loss(self, value: Any, returns: Tensor, slow: Tensor, weight: Tensor) -> Tensor:
        """Towards the returns, and towards what the slow critic says, which keeps it from running away."""
        loss = value.loss(returns.detach()) + self.slow_regularizer * value.loss(slow.detach())
        return (weight * loss).mean()

    def replay_value_loss(self, rows: Batch, state: Batch, dreamt: Tensor) -> Tensor:
        """The critic on the rows themselves: real rewards, then what was dreamt from there `[B*T]`. Its gradient
        reaches the model, whose features learn to tell values apart."""
        features = self.dynamics.features(state)
        slow = self.slow_critic(features.detach()).mean()[:, :-1]
        steps = (rows["reward"], dreamt.view_as(rows["reward"]), rows["is_last"], rows["is_terminal"])
        returns = lambda_return(*steps, discount=self.discount, lambda_=self.lambda_)
        weight = (~rows["is_last"][:, :-1]).to(torch.float32)
        return self.value_loss(self.critic(features).until_last(), returns, slow, weight)

    # --- dreaming, for people ---

    @torch.no_grad()
    def imagine(self, start: Batch, *, horizon: int) -> Batch:
        """What the model expects from states `[N, ...]` on, the policy acting: per step 0..H the model's state,
        `reward`, `continue`, `value` and every observation key; `action` and any `action_mask` for steps 0..H-1."""
        with self.context.runtime.autocast():
            states, actions = unroll(self.dynamics, self.actor, self.model_state(start), horizon, self.action_mask_head)
            features = self.dynamics.features(states)
            heads: Any = {"reward": self.reward_head, "continue": self.continue_head, "value": self.critic}
            numbers = {name: head(features).mean() for name, head in heads.items()}
            return {**self.decoder.reconstruct(features), **states, **numbers, **actions}
