"""The random policy: the floor every curve is compared with, and the collector of prefill phases."""

from __future__ import annotations

from typing import Any

from rl_lab.types import PolicyStep, TimeStep
from rl_lab.workflows.base import ActingController, Mode, Workflow
from rl_lab.workflows.context import WorkflowContext


class RandomPolicy(Workflow):
    """Acts uniformly at random, in training and in evaluation, and learns nothing."""

    not_exportable = "its actions are drawn at random"

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.controller: ActingController = context.controllers.require("random", ActingController)

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        mask = time_step.observation.get("action_mask")
        return PolicyStep(self.controller.sample(time_step.num_envs, device=time_step.reward.device, mask=mask))
