"""Overrides that make World Models small enough for a toy of 16 x 16 pixels; several tests share them."""

from __future__ import annotations

TINY_VAE = [
    "components.vae.latents=4",
    "components.vae.channels=[4, 8]",
    "components.vae.kernels_down=[4, 4]",
    "components.vae.kernels_up=[6, 6]",
]
TINY_WORLD_MODELS = [
    *TINY_VAE,
    "components.memory.hidden=8",
    "components.memory.gaussians=3",
    "controllers.evolution.population=4",
    "algorithm.rollouts=2",
    "algorithm.dream_steps=30",
    "algorithm.images_per_update=16",
    "algorithm.dream_starts=8",
    "environment.num_envs=4",
    "buffers.replay.capacity_rows=400",
    "buffers.replay.batch_size=4",
    "buffers.replay.sequence_length=9",
    "training.phases.collect.collect_steps=16",
    "training.phases.collect.duration_steps=120",
    "training.phases.vae.duration_updates=2",
    "training.phases.memory.duration_updates=2",
]
EXPERIMENT = "world_models_follow"
REAL_EXPERIMENT = "world_models_follow_real"
