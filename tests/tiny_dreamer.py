"""Overrides that make a Dreamer small enough to learn a toy in seconds; several tests share them."""

from __future__ import annotations

TINY_PARTS = [
    *(f"components.{part}.layers=1" for part in ("encoder", "decoder")),
    *(f"components.{part}.units=32" for part in ("encoder", "decoder", "reward_head", "continue_head")),
    *(f"components.{part}.depth=4" for part in ("encoder", "decoder")),
    *(f"components.{part}.blocks=2" for part in ("dynamics", "decoder")),
    *(f"components.dynamics.{name}=32" for name in ("deter", "hidden")),
    *(f"components.dynamics.latent.{name}=4" for name in ("groups", "classes")),
    *(f"controllers.{part}.{size}" for part in ("actor", "critic") for size in ("layers=1", "units=32")),
    *(f"{head}.bins=41" for head in ("components.reward_head", "controllers.critic")),
]
TINY_DREAMER = [
    *TINY_PARTS,
    "algorithm.horizon=8",
    "environment.num_envs=8",
    "buffers.replay.batch_size=16",
    "buffers.replay.sequence_length=17",
    "buffers.replay.capacity_rows=20000",
    "optimizers.agent.learning_rate=constant(1e-3, warmup=50 updates)",
    "training.phases.prefill.duration_steps=400",
    "training.phases.train.updates_per_step=0.25",
]
