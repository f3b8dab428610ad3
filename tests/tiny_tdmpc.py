"""Overrides that make a TD-MPC small enough to learn a toy in seconds; several tests share them."""

from __future__ import annotations

from tests.tiny_tdmpc2 import FEW_STEPS

TINY_TDMPC_MODEL = [
    "components.encoder.latent_size=16",
    *(f"components.{part}.units=32" for part in ("encoder", "dynamics", "reward_head")),
    *(f"controllers.{part}.units=32" for part in ("actor", "critic")),
    *(f"controllers.planner.{setting}" for setting in ("candidates=32", "best=8", "iterations=2")),
    "algorithm.policy_plans=4",
    "algorithm.plan_horizon='linear(1, 5, over=1000 agent_steps)'",
    "algorithm.plan_std='linear(0.5, 0.05, over=1000 agent_steps)'",
]
TINY_TDMPC = [*TINY_TDMPC_MODEL, *FEW_STEPS]
