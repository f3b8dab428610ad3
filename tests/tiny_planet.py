"""Overrides that make a PlaNet small enough to learn a toy in seconds; several tests share them."""

from __future__ import annotations

TINY_MODEL = [
    *(f"components.{part}.layers=1" for part in ("encoder", "decoder", "reward_head")),
    *(f"components.{part}.units=32" for part in ("encoder", "decoder", "reward_head")),
    *(f"components.{part}.depth=4" for part in ("encoder", "decoder")),
    *(f"components.dynamics.{name}=32" for name in ("deter", "hidden")),
    "components.dynamics.latent.size=4",
    *(f"controllers.planner.{setting}" for setting in ("candidates=64", "best=8", "iterations=4", "horizon=6")),
]
TINY_PLANET = [
    *TINY_MODEL,
    "algorithm.free_nats=1.0",
    "optimizers.world_model.learning_rate=3e-3",
    "optimizers.world_model.epsilon=1e-5",
    "environment.num_envs=8",
    "buffers.replay.batch_size=16",
    "buffers.replay.sequence_length=17",
    "buffers.replay.capacity_rows=20000",
    "training.phases.prefill.duration_steps=800",
    "training.phases.train.updates_per_step=0.5",
]
