"""Overrides that make a TD-MPC2 small enough to learn a toy in seconds; several tests share them."""

from __future__ import annotations

TINY_TDMPC2_MODEL = [
    "components.encoder.latent_size=16",
    "components.encoder.simplex_size=4",
    *(f"components.{part}.units=32" for part in ("encoder", "dynamics", "reward_head", "continue_head")),
    *(f"controllers.{part}.units=32" for part in ("actor", "critic")),
    "controllers.critic.members=2",
    *(f"controllers.planner.{setting}" for setting in ("candidates=32", "best=8", "iterations=2")),
    "algorithm.policy_plans=4",
]
FEW_STEPS = [
    "environment.num_envs=8",
    "buffers.replay.batch_size=64",
    "buffers.replay.capacity_rows=20000",
    "training.phases.prefill.duration_steps=400",
    "training.phases.pretrain.duration_updates=50",
    "training.phases.train.updates_per_step=0.25",
]
TINY_TDMPC2 = [
    *TINY_TDMPC2_MODEL,
    *(f"optimizers.{part}.learning_rate=2e-3" for part in ("world_model", "actor")),
    *FEW_STEPS,
]
