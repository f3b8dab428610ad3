"""Where a policy comes from: enough to make its environment, and to build it again in another process."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch

from rl_lab.config.construct import import_plugins
from rl_lab.environments.base import Blueprint
from rl_lab.environments.gymnasium_form import make_gymnasium
from rl_lab.experiment.build import POLICY, Agent, build_agent, build_runtime
from rl_lab.policy import Policy
from rl_lab.runs.state import apply_state, gather_state
from rl_lab.utils.seeding import get_rng_state, set_rng_state


@dataclass(frozen=True)
class PolicySource:
    """A config, the agent built from it, and the environment it was built for."""

    config: dict[str, Any]
    agent: Agent
    blueprint: Blueprint

    def environment(self, *, num_envs: int | None, render: bool) -> Any:
        import_plugins(tuple(self.config["plugins"] or ()))  # they may register environments and wrappers
        known = signature(make_gymnasium).parameters
        settings = {key: value for key, value in self.config["environment"].items() if key in known}
        return make_gymnasium(**{**settings, "num_envs": num_envs, "render": render})

    def recipe(self) -> Callable[[], Policy]:
        """Something that pickle can carry and that makes the same policy anew."""
        targets = self.agent.state_targets()
        weights = io.BytesIO()
        torch.save(gather_state({name: targets[name] for name in POLICY}), weights)
        return partial(_build, self.config, self.blueprint, weights.getvalue())


def policy_of(config: dict[str, Any], agent: Agent, blueprint: Blueprint) -> Policy:
    """A policy that knows where it comes from."""
    source = PolicySource(config, agent, blueprint)
    return Policy(agent.workflow, blueprint, device=agent.runtime.device, source=source)


def _build(config: dict[str, Any], blueprint: Blueprint, weights: bytes) -> Policy:
    random_state = get_rng_state()  # building an agent seeds the process; reading a pickle must not
    try:
        agent = build_agent(config, blueprint.spec, runtime=build_runtime(config))
    finally:
        set_rng_state(random_state)
    targets = agent.state_targets()
    state = torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True)
    apply_state({name: targets[name] for name in POLICY}, state)
    return policy_of(config, agent, blueprint)
