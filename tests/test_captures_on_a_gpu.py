"""On a GPU, a training whose updates and answers are CUDA graphs is the training that runs them as they are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.training.capture import CapturedMethod
from tests.test_captured_methods import CASES, SMALL
from tests.tiny_world_models import TINY_WORLD_MODELS

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PHASES = ("training.phases.vae.duration_updates=6", "training.phases.memory.duration_updates=6")
UPDATES = {"world_models": 17}  # after which a training is stopped; 6 of all others
TRAINED = {  # words of the command, and the methods that must have been recorded by then
    **{name: (CASES[name], {"learn", "respond"}) for name in ("ppo", "ppo of numbers", "ppo with memory", "tdmpc2")},
    **{name: (CASES[name], {"learn"}) for name in ("dqn", "sac", "diffusion_policy", "bc")},
    "world_models in the dream": (
        ["world_models_follow", *TINY_WORLD_MODELS, *PHASES],
        {"learn_vae", "learn_memory", "dream"},
    ),
    "world_models": (
        ["world_models_follow_real", *TINY_WORLD_MODELS, *PHASES],
        {"learn_vae", "learn_memory", "respond"},
    ),
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The methods that were recorded, as `learn`."""
    found: set[str] = set()
    capture = CapturedMethod._capture

    def noted(method: CapturedMethod, run: Any) -> Any:
        recording = capture(method, run)
        found.add(method.place.rpartition(".")[2])
        return recording

    monkeypatch.setattr(CapturedMethod, "_capture", noted)
    return found


def trained(words: list[str], updates: int, *, is_captured: bool) -> dict[str, Tensor]:
    """Every parameter and buffer after so many updates."""
    experiment, *overrides = words
    settings = [f"runtime.device={DEVICE}", f"runtime.capture={str(is_captured).lower()}", "seed=3"]
    run = build(compose(experiment, [*SMALL, *overrides, *settings]), run=None, quiet=True)
    try:
        run.orchestrator.interrupted = lambda: run.housekeeping.counts.updates >= updates
        run.housekeeping.save = lambda: None  # type: ignore[method-assign]
        run.orchestrator.run()
        parts = {**run.agent.components, **run.agent.controllers}
        modules = [(name, part) for name, part in parts.items() if isinstance(part, nn.Module)]
        states = {f"{name}.{key}": value for name, part in modules for key, value in part.state_dict().items()}
        return {key: value.detach().clone() for key, value in states.items() if isinstance(value, Tensor)}
    finally:
        run.close()


@pytest.mark.parametrize("name", TRAINED)
def test_a_captured_training_is_the_eager_one(name: str, recorded: set[str]) -> None:
    (words, methods), updates = TRAINED[name], UPDATES.get(name.partition(" ")[0], 6)
    plain = trained(words, updates, is_captured=False)
    assert not recorded
    captured = trained(words, updates, is_captured=True)
    assert methods <= recorded
    for key, value in plain.items():
        torch.testing.assert_close(captured[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")
