"""What the actions of well-known environments mean, for people who look at a policy."""

from __future__ import annotations

import gymnasium as gym

from rl_lab.environments.snapshot import layers

LEFT_RIGHT_NOTHING = ("push left", "nothing", "push right")
COMPASS = ("up", "right", "down", "left")
LABELS: dict[str, tuple[str, ...]] = {
    "CartPole": ("push left", "push right"),
    "MountainCar": LEFT_RIGHT_NOTHING,
    "MountainCarContinuous": ("force",),
    "Pendulum": ("torque",),
    "Acrobot": ("torque -1", "torque 0", "torque +1"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": COMPASS,
    "CliffWalkingSlippery": COMPASS,
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
    "LunarLander": ("nothing", "left engine", "main engine", "right engine"),
    "LunarLanderContinuous": ("main engine", "side engines"),
    "BipedalWalker": ("hip 1", "knee 1", "hip 2", "knee 2"),
    "BipedalWalkerHardcore": ("hip 1", "knee 1", "hip 2", "knee 2"),
    "CarRacing": ("steer", "gas", "brake"),
    "rl_lab/CarRacing": ("steer", "gas", "brake"),
    "rl_lab/Corridor": ("left", "right"),
    "rl_lab/Recall": ("cue 0", "cue 1"),
    "rl_lab/PixelCatch": ("left", "stay", "right"),
    "rl_lab/PixelFollow": ("left", "stay", "right"),
}
MINIGRID = ("left", "right", "forward", "pick up", "drop", "toggle", "done")


def action_labels(env: gym.Env, num_labels: int) -> tuple[str, ...]:
    """Labels in the order the policy sees, empty where none are known or a wrapper changed the actions."""
    if env.spec is None:
        return ()
    name = f"{env.spec.namespace}/{env.spec.name}" if env.spec.namespace else env.spec.name
    labels = list(LABELS.get(name, MINIGRID if name.startswith(("MiniGrid-", "BabyAI-")) else ()))
    labels = labels or list(getattr(env.unwrapped, "action_labels", ()))
    meanings = getattr(env.unwrapped, "get_action_meanings", None)  # of ALE's own environments
    labels = labels or [str(each).lower() for each in (meanings() if callable(meanings) else ())]
    for layer in reversed(layers(env)):
        if labels and hasattr(type(layer), "remap"):
            labels = layer.remap(labels)
    return tuple(labels) if len(labels) == num_labels else ()
