"""Does a policy's file act as the policy does? Both answer the same observations, in sequences that reset at different
times, one row at a time here and all rows at once there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.environments.base import Blueprint
from rl_lab.environments.sampling import draw_observations
from rl_lab.environments.spaces import pick
from rl_lab.types import RunError

ROWS, STEPS = 32, 8
DRAWS, RARE = 3, 0.02  # of observations, while no more than this fraction of the actions differs
TOLERANCE = 1e-5  # of continuous actions, in halves of their range where that is more than 1

Acting = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Agreement:
    """How many observations were compared, and by how much the actions differed at most."""

    observations: int
    largest_difference: float


def compare(policy: Any, path: Path, format: str, about: Mapping[str, Any]) -> Agreement:
    """Refuse a file whose actions are not those of `policy.act`.

    Rounding differs between the two, so that a policy may choose otherwise where two choices are equally good. That is
    rare: where hardly any action differs, other observations are drawn; a file that is wrong is wrong there, too.
    """
    policy, act, tolerance = copy.copy(policy), open_file(path, format), _tolerance(policy.blueprint)
    for seed in range(DRAWS):
        difference = _differences(policy, act, about, seed=seed)
        wrong = ~(difference <= tolerance).all(axis=1)  # NaN is wrong, too
        if not wrong.any():
            return Agreement(len(difference), float(difference.max()))
        if wrong.mean() > RARE:
            break
    raise RunError(
        f"The exported file would not act as the policy does: {int(wrong.sum())} of {wrong.size} actions differ, by "
        f"{np.max(difference):g} at most, so it is not kept. Please report this with the run's config.yaml."
    )


def _differences(policy: Any, act: Acting, about: Mapping[str, Any], *, seed: int) -> np.ndarray:
    """How far the file's actions for random observations are from the policy's, `[ROWS * STEPS, A]`."""
    observations = draw_observations(policy.blueprint, ROWS * STEPS, seed=seed)
    is_first = np.zeros((ROWS, STEPS), dtype=bool)
    is_first[:, 0] = True
    is_first[np.arange(ROWS), np.arange(ROWS) % STEPS] = True  # each row begins anew at a time of its own
    expected = []
    for observation, begins in zip(observations, is_first.reshape(-1), strict=True):
        if begins:
            policy.reset()
        expected.append(np.asarray(policy.act(observation)))
    found = play(act, policy.blueprint, observations, is_first, about)
    return _distance(np.stack(expected), found)


def play(
    act: Acting, blueprint: Blueprint, observations: list[Any], is_first: np.ndarray, about: Mapping[str, Any]
) -> np.ndarray:
    """A file's actions for observations `[rows * steps]`, all rows at once and its states handed on."""
    rows, steps = is_first.shape
    state = {name: np.zeros((rows, *each["shape"]), each["dtype"]) for name, each in about["state"].items()}
    actions = []
    for step in range(steps):
        seen = [observations[row * steps + step] for row in range(rows)]
        inputs: dict[str, np.ndarray] = {
            leaf.key: np.stack([np.asarray(pick(each, leaf.path)) for each in seen]).astype(leaf.spec.dtype)
            for leaf in blueprint.observations.leaves
        }
        if state:
            inputs |= {"is_first": is_first[:, step], **state}
        outputs = act(inputs)
        state = {name: outputs[f"next_{name}"] for name in state}
        actions.append(outputs["action"])
    return np.stack(actions, axis=1).reshape(rows * steps, *actions[0].shape[1:])


def open_file(path: Path, format: str) -> Acting:
    """A written file as a function of named arrays: as its user would open it."""
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))
    with open(path, "rb") as file:
        program = torch.export.load(file).module()

    def act(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = program({name: torch.from_numpy(values) for name, values in inputs.items()})
        return {name: values.numpy() for name, values in outputs.items()}

    return act


def _tolerance(blueprint: Blueprint) -> np.ndarray | float:
    """Of each dimension of a continuous action `[A]`; choices must be equal."""
    if blueprint.actions.spec.kind != "continuous":
        return 0.0
    return TOLERANCE * np.maximum(blueprint.actions.range["half"], 1.0)


def _distance(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Of every number of every action `[count, A]`."""
    if expected.shape != found.shape:
        raise RunError(f"The exported file answers with shape {found.shape} instead of {expected.shape}.")
    return np.abs(expected.astype(np.float64) - found.astype(np.float64)).reshape(len(expected), -1)
