"""Overrides that make a Dreamer small enough to learn a toy in seconds, and rows for it: tests share them."""

from __future__ import annotations

import torch

from rl_lab.types import ActionSpec, ArraySpec, Batch

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
TINY_OLDER_DREAMER = [  # V1 and V2: other parts, and an optimiser each
    *(f"components.{part}.layers=1" for part in ("encoder", "decoder", "reward_head", "continue_head")),
    *(f"components.{part}.units=32" for part in ("encoder", "decoder", "reward_head", "continue_head")),
    *(f"components.dynamics.{name}=32" for name in ("deter", "hidden")),
    *(f"controllers.{part}.{size}" for part in ("actor", "critic") for size in ("layers=1", "units=32")),
    "algorithm.horizon=6",
    "environment.num_envs=8",
    "buffers.replay.batch_size=16",
    "buffers.replay.sequence_length=17",
    "buffers.replay.capacity_rows=20000",
    "optimizers.world_model.learning_rate=3e-3",
    *(f"optimizers.{part}.learning_rate=2e-3" for part in ("actor", "critic")),
    "training.phases.prefill.duration_steps=800",
    "training.phases.train.updates_per_step=0.25",
]


def random_rows(observation: dict[str, ArraySpec], action: ActionSpec, *, size: int = 3, length: int = 7) -> Batch:
    """Random rows with a reset in the middle."""
    generator = torch.Generator().manual_seed(7)
    batch: Batch = {
        key: torch.randn(size, length, *spec.shape, generator=generator)
        if spec.dtype == "float32"
        else torch.randint(0, 256, (size, length, *spec.shape), generator=generator, dtype=torch.uint8)
        for key, spec in observation.items()
    }
    if action.kind == "continuous":
        batch["action"] = torch.rand(size, length, *action.shape, generator=generator) * 2.0 - 1.0
    else:
        batch["action"] = torch.randint(0, 2, (size, length, *action.shape), generator=generator)
    batch["reward"] = torch.randn(size, length, generator=generator)
    for name in ("is_first", "is_last", "is_terminal"):
        batch[name] = torch.zeros(size, length, dtype=torch.bool)
    batch["is_last"][0, 3] = batch["is_terminal"][0, 3] = batch["is_first"][0, 4] = True
    return batch
