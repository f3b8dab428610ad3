"""Diffusion Policy: imitate demonstrations by denoising plans of actions (Chi et al. 2023, arXiv:2303.04137).

learning    L = E[ |noise - e(sqrt(a_k) A + sqrt(1 - a_k) noise, k, O)|^2 ]      demonstrated actions A, observations O
acting      A_K ~ N(0, 1), then level by level to A_0; of each plan a few actions are executed, then the next is made

    step           t-1   t    t+1  ...                        observation_steps 2, prediction_steps 16, action_steps 8
    observed       o     o
    planned        a     a    a    ...  a   a  ...  a         16 actions; the first answers the oldest observation
    executed             a    a    ...  a                     8 of them, from the newest observation's on
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_fraction, named
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """`[B, T, *shape]` per key to features `[B, T, F]`."""


class Normalizer(Protocol):
    def __call__(self, observation: Batch) -> Batch: ...
    def learn(self, batch: Batch) -> None: ...
    def scale_action(self, action: Tensor) -> Tensor: ...
    def restore_action(self, scaled: Tensor) -> Tensor: ...


class Schedule(Protocol):
    levels: int

    def add_noise(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor: ...
    def target(self, clean: Tensor, noise: Tensor) -> Tensor: ...
    def predicted_noise(self, noisy: Tensor, predicted: Tensor, level: int) -> Tensor: ...


class Sampler(Protocol):
    def levels(self, schedule: Any) -> list[tuple[int, int]]:
        """Pairs of a level and the one after it, the noisiest first."""

    def step(self, schedule: Any, noisy: Tensor, noise: Tensor, level: int, after: int) -> Tensor: ...


class Denoiser(Protocol):
    def __call__(self, plan: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Plans `[B, T, A]` at levels `[B]` and features `[B, observation_steps, F]` to the noise in them, or to
        the plans without it: the schedule's `target`."""


class Planned(NamedTuple):
    """An answer, and how the plans that were made for it came out of noise."""

    step: PolicyStep
    rows: Tensor  # environments that got a new plan
    iterations: Tensor | None  # their plans from noise to the last, [rows, iterations + 1, T, A]; None: none was made


class DiffusionPolicy(Workflow):
    """A denoiser of plans, a slow average of its weights that acts, and a plan that outlives a step."""

    captured: ClassVar[tuple[str, ...]] = ("learn", "denoise")
    not_exportable = "every plan begins with noise that is drawn anew"

    def __init__(
        self,
        *,
        observation_steps: int = 2,
        prediction_steps: int = 16,
        action_steps: int = 8,
        average_power: float = 0.75,
        average_decay: float = 0.9999,
    ) -> None:
        if min(observation_steps, action_steps) < 1 or observation_steps - 1 + action_steps > prediction_steps:
            raise ConfigError(
                f"algorithm.observation_steps is {observation_steps}, action_steps {action_steps} and prediction_steps "
                f"{prediction_steps}: a plan begins with the oldest observation, so write whole numbers from 1 on with "
                "observation_steps - 1 + action_steps of at most prediction_steps, such as 2, 8 and 16."
            )
        self.observation_steps, self.prediction_steps = observation_steps, prediction_steps
        self.first_executed, self.after_executed = observation_steps - 1, observation_steps - 1 + action_steps
        self.average_power = checked_fraction("average_power", average_power)
        self.average_decay = checked_fraction("average_decay", average_decay)

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.normalizer: Normalizer = context.components.require("normalizer", Normalizer)
        self.encoder: Encoder = context.components.require("encoder", Encoder)
        self.augmentation = context.components.optional("augmentation")
        self.schedule: Schedule = context.components.require("schedule", Schedule)
        self.denoiser: Denoiser = context.controllers.require("denoiser", Denoiser)
        self.sampler: Sampler = context.controllers.require("sampler", Sampler)
        self.optimizer = context.optimizers.require("controller")
        assert isinstance(self.denoiser, nn.Module) and isinstance(self.encoder, nn.Module)
        self.average_denoiser, self.average_encoder = TargetNetwork(self.denoiser), TargetNetwork(self.encoder)
        for name, average in (("denoiser", self.average_denoiser), ("encoder", self.average_encoder)):
            context.components.add(f"average_{name}", average.eval())  # no dropout where it acts
        self.steps = self.sampler.levels(self.schedule)
        self.keys = tuple(context.spec.observation)

    def check_rows(self, num_rows: int, *, buffer: str) -> None:
        if num_rows != self.prediction_steps:
            raise ConfigError(
                f"algorithm.prediction_steps is {self.prediction_steps}, but buffer '{buffer}' gives {num_rows} rows: "
                f"write `buffers.{buffer}.prediction_steps: ${{algorithm.prediction_steps}}`, and a "
                "rl_lab.buffers.demonstrations.DemonstrationBuffer."
            )

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        """The next action of each environment's plan; both modes draw plans the same way."""
        return self.follow_plan(time_step, state).step

    def follow_plan(self, time_step: TimeStep, state: Any) -> Planned:
        """`state`: the newest observations, the plan, and which of its actions comes next; is_first forgets them.

        next        1 ... 8      9                         observation_steps 2, action_steps 8
        answer      plan[next]   a new plan, its action 1
        """
        history, plan, place = self.recall(time_step, state)
        is_over = place == self.after_executed
        rows = is_over.nonzero().squeeze(-1)
        iterations = None
        if len(rows):
            made = self.denoise({key: history[key][rows] for key in self.keys}, {})
            plan, iterations = plan.index_copy(0, rows, made["plan"]), made["iterations"]
            place = place.masked_fill(is_over, self.first_executed)
        action = plan.take_along_dim(place[:, None, None], dim=1).squeeze(1)
        return Planned(PolicyStep(action, {"history": history, "plan": plan, "next": place + 1}), rows, iterations)

    def recall(self, time_step: TimeStep, state: Any) -> tuple[Batch, Tensor, Tensor]:
        """The newest observations `[N, observation_steps, ...]`, the plans and their places; where an episode begins,
        its first observation also stands for those before it, and no plan is left."""
        seen = {key: time_step.observation[key].unsqueeze(1) for key in self.keys}
        alone = {key: values.expand(-1, self.observation_steps, *values.shape[2:]) for key, values in seen.items()}
        if state is None:
            count, device = time_step.num_envs, time_step.reward.device
            plan = torch.zeros(count, self.prediction_steps, *self.context.spec.action.shape, device=device)
            return {key: values.clone() for key, values in alone.items()}, plan, self.no_plan(count, device)
        is_first = time_step.is_first
        history = {}
        for key, values in seen.items():
            shifted = torch.cat((state["history"][key][:, 1:], values), dim=1)
            history[key] = torch.where(is_first.reshape(-1, *[1] * (shifted.dim() - 1)), alone[key], shifted)
        return history, state["plan"], state["next"].masked_fill(is_first, self.after_executed)

    def no_plan(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), self.after_executed, device=device)

    @torch.no_grad()
    def denoise(self, history: Batch, numbers: Batch) -> Batch:
        """Plans `[N, T, A]` for observations `[N, observation_steps, ...]`, and all that came before on their way."""
        with self.context.runtime.autocast():
            features = self.average_encoder(self.normalizer(history))
        shape = (len(features), self.prediction_steps, *self.context.spec.action.shape)
        plans = [torch.randn(shape, device=features.device)]
        for level, after in self.steps:
            levels = torch.full(shape[:1], level, device=features.device)
            with self.context.runtime.autocast():
                predicted = self.average_denoiser(plans[-1], levels, features)
            noise = self.schedule.predicted_noise(plans[-1], predicted.float(), level)
            plans.append(self.sampler.step(self.schedule, plans[-1], noise, level, after))
        iterations = self.normalizer.restore_action(torch.stack(plans, dim=1))
        return {"plan": iterations[:, -1].clone(), "iterations": iterations}

    # --- learning ---

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """One gradient step, and the average of the weights moves."""
        self.check_batch(batch, buffer=phase.buffer)
        rate = named(self.optimizer.prepare(phase.progress))
        numbers = self.context.runtime.numbers({"average_rate": self.average_rate(phase.progress.run.updates)})
        return {**rate, **self.learn(self.context.runtime.to_device(batch), numbers)}

    def average_rate(self, updates: int) -> float:
        """What the average takes over from the newest weights: 1 at first, then less and less, but never nothing."""
        return max(max(updates, 1) ** -self.average_power, 1.0 - self.average_decay)

    def learn(self, batch: Batch, numbers: Batch) -> Batch:
        """Windows of demonstrations to new weights, and to their average."""
        self.normalizer.learn(batch)
        with self.context.runtime.autocast():
            loss = self.loss(batch)
        metrics = self.gradient_step(self.optimizer, loss)
        self.average_denoiser.move_towards(self.denoiser, numbers["average_rate"])  # type: ignore[arg-type]
        self.average_encoder.move_towards(self.encoder, numbers["average_rate"])  # type: ignore[arg-type]
        return metrics

    def loss(self, batch: Batch) -> LossOutput:
        """The error of the noise predicted in demonstrated actions `[B, T, A]`, each plan at a level of its own; or of
        the actions, where these are predicted."""
        clean = self.normalizer.scale_action(batch["action"])
        noise = torch.randn_like(clean)
        level = torch.randint(self.schedule.levels, clean.shape[:1], device=clean.device)
        features = self.encoder(self.seen(batch))
        predicted = self.denoiser(self.schedule.add_noise(clean, noise, level), level, features)
        return LossOutput({"noise": F.mse_loss(predicted.float(), self.schedule.target(clean, noise))})

    def seen(self, batch: Batch) -> Batch:
        """Observations `[B, observation_steps, ...]` as the encoder sees them while learning: images shifted, each by
        an amount of its own, then scaled."""
        observation = {key: batch[key] for key in self.keys}
        if self.augmentation is not None:
            shifted = self.augmentation({key: values.flatten(0, 1) for key, values in observation.items()})
            observation = {key: values.unflatten(0, (-1, self.observation_steps)) for key, values in shifted.items()}
        return self.normalizer(observation)

    def check_batch(self, batch: Batch, *, buffer: str) -> None:
        rows = batch[self.keys[0]].shape[1]
        if "action_range" not in batch or rows != self.observation_steps:
            raise ConfigError(
                f"Diffusion Policy learns from {self.observation_steps} observations and the range of the demonstrated "
                f"actions, but buffer '{buffer}' gives {rows} and {', '.join(batch)}: use a "
                "rl_lab.buffers.demonstrations.DemonstrationBuffer with `observation_steps: "
                "${algorithm.observation_steps}`."
            )
