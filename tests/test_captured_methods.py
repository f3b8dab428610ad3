"""What a CUDA graph could not record is found without a GPU: captured methods run under a watch on every operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.training import optimizer
from rl_lab.training.capture import CapturedMethod, Packed
from rl_lab.training.runtime import Runtime
from rl_lab.training.update_rules import UpdateRule
from rl_lab.types import Batch
from tests.tiny_diffusion import TINY_DIFFUSION, with_detour
from tests.tiny_dreamer import TINY_OLDER_DREAMER

READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "_unique2")
SMALL = ["preset=debug", "debug.check_finite=false", "evaluation.final_episodes=0", "training.limit_cycles=null"]
OLDER = [*TINY_OLDER_DREAMER, "environment.num_envs=2", "training.phases.prefill.duration_steps=100"]
IMITATION = [
    *with_detour(),
    "evaluation.every_steps=null",
    "evaluation.episodes=2",
    "training.phases.train.duration_updates=9",
]
PPO = ["algorithm.epochs=2", "training.phases.train.collect_steps=8", "algorithm.minibatch_size=16"]
CASES = {
    "ppo": ["ppo_cartpole", "environment.num_envs=4", *PPO],
    "ppo of numbers": ["ppo_pendulum", "environment.num_envs=4", "algorithm.value_clip_range=0.2", *PPO],
    "ppo with memory": ["ppo_recall", "environment.num_envs=4", "algorithm.sequence_length=4", *PPO],
    "dqn": ["dqn_cartpole", "q_values=expected"],
    "dqn_categorical": ["dqn_cartpole"],
    "dqn rainbow": ["dqn_cartpole_rainbow"],
    "sac": ["sac_pendulum"],
    "dreamer": ["dreamer_v3_cartpole"],
    "dreamer that plans to explore": ["dreamer_v3_cartpole", "exploration=plan2explore"],
    "dreamer_v1": ["dreamer_v1", *OLDER],
    "dreamer_v2": ["dreamer_v2", *OLDER],
    "dreamer_v3_2023": ["dreamer_v3_2023", "environment=gymnasium", "environment.id=Pendulum-v1", *OLDER],
    "dreamer_v2 of choices": ["dreamer_v2", "environment.id=CartPole-v1", *OLDER],
    "dreamer_v2 of images": [
        "rl_lab/PixelCatch-v0:dreamer_v2",
        "environment.wrappers=[{id: resize, height: 64, width: 64}]",
        "components.encoder.depth=2",
        *OLDER,
    ],
    "planet": ["planet_pendulum", "training.phases.prefill.duration_steps=100"],
    "tdmpc2": [
        *("tdmpc2_pendulum", "training.phases.prefill.duration_steps=100"),
        *("training.phases.pretrain.duration_updates=1", "training.phases.train.updates_per_step=0.25"),
    ],
    "diffusion_policy": [
        "rl_lab/Detour-v0:diffusion_policy",
        "sampler=ddim",
        *TINY_DIFFUSION,
        *IMITATION,
        "evaluation.every_updates=1",
    ],
    "diffusion_policy of transformers": [
        *(
            "rl_lab/Detour-v0:diffusion_policy",
            "denoiser=transformer_small",
            "sampler=ddpm",
            "controllers.sampler.steps=3",
        ),
        *(*IMITATION, "evaluation.every_updates=1"),
    ],
    "bc": ["rl_lab/Detour-v0:bc", *IMITATION],
    "tdmpc": [
        *("tdmpc_pendulum", "training.phases.prefill.duration_steps=100"),
        *("training.phases.pretrain.duration_updates=1", "training.phases.train.updates_per_step=0.25"),
    ],
    "tdmpc2 with several tasks": [
        *("tdmpc2_tasks", "training.phases.prefill.duration_steps=100"),
        *("training.phases.pretrain.duration_updates=1", "training.phases.train.updates_per_step=0.25"),
    ],
    "the example of docs/add_an_algorithm.md": ["CartPole-v1:soft_q"],
}
MY_ALGORITHM = Path(__file__).parents[1] / "examples" / "my_algorithm"
UPDATES = 4


class Watch(TorchDispatchMode):
    """Refuses operations that wait for a value, or that bring one from Python's memory."""

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        assert name not in READS, f"{name} waits for the device"
        is_made = name == "lift_fresh" and arguments[0].dim() == 0
        assert not is_made, "torch.tensor(number) copies from Python's memory: make it once, outside"
        if name in ("index", "index_put", "index_put_"):
            masks = [index for index in arguments[1] if index is not None and index.dtype == torch.bool]
            assert not masks, "indexing by a mask waits for the count of its rows"
        return operation(*arguments, **(named or {}))


class Watched:
    """A captured method that checks what it is given, does and returns."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.calls = 0

    def __call__(self, batch: Batch, numbers: Batch, **choices: bool | int | str) -> Batch:
        assert all(isinstance(value, Tensor) and value.dim() == 0 for value in numbers.values())
        self.calls += 1
        if self.calls == 1:
            return self.method(batch, numbers, **choices)  # scratch space may be made once
        with Watch():
            outputs = self.method(dict(batch), numbers, **choices)
        assert all(isinstance(output, Tensor) and not output.requires_grad for output in outputs.values())
        return outputs


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and learning rates in tensors, and none of the short cuts that only CPUs take."""
    monkeypatch.setattr(optimizer, "divisor_to", lambda limit, norm: (norm / limit).clamp_(min=1.0))

    original = UpdateRule.__init__

    def init(self: UpdateRule, *arguments: Any, is_static: bool | None = None, **settings: Any) -> None:
        original(self, *arguments, is_static=True, **settings)

    monkeypatch.setattr(UpdateRule, "__init__", init)
    monkeypatch.setattr(Runtime, "scalars", Runtime.numbers)


@pytest.mark.parametrize("case", CASES)
def test_a_captured_method_reads_nothing_back(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, *overrides = CASES[case]
    monkeypatch.syspath_prepend(str(MY_ALGORITHM))
    config = compose(experiment, [*SMALL, *overrides, "runtime.fast_paths=off"], config_dir=MY_ALGORITHM / "configs")
    trained = build(config, run=None, quiet=True)
    try:
        workflow = trained.agent.workflow
        assert workflow.captured
        watched = [Watched(getattr(workflow, name)) for name in workflow.captured]
        for name, method in zip(workflow.captured, watched, strict=True):
            setattr(workflow, name, method)
        trained.orchestrator.interrupted = lambda: trained.housekeeping.counts.updates >= UPDATES
        trained.housekeeping.save = lambda: None  # type: ignore[method-assign]
        trained.orchestrator.run()
        assert all(method.calls >= UPDATES for method in watched)
    finally:
        trained.close()


class Again:
    """Replaying is running again into the same outputs; recording draws nothing."""

    def warm_up(self, function: Callable[[], Packed]) -> Packed:
        return function()

    def capture(self, function: Callable[[], Packed]) -> tuple[Any, Packed]:
        generator = torch.get_rng_state()
        outputs = function()
        torch.set_rng_state(generator)
        return (function, outputs), outputs

    def replay(self, graph: Any) -> None:
        function, outputs = graph
        new = function()
        with torch.inference_mode():
            for name, tensor in outputs.outputs.items():
                tensor.copy_(new.outputs[name])


@pytest.mark.parametrize("overrides", [[], ["environment.id=rl_lab/PointMass-v0"]], ids=["discrete", "continuous"])
def test_a_dreamer_whose_answers_are_recorded_learns_the_same(overrides: list[str]) -> None:
    """What one answer leaves in a recording must not reach the next but through the state that is handed on."""

    def learnt(is_recorded: bool) -> list[Tensor]:
        trained = build(compose("dreamer_v3_cartpole", [*SMALL, *overrides, "seed=3"]), run=None, quiet=True)
        try:
            workflow: Any = trained.agent.workflow
            if is_recorded:
                place = CapturedMethod(workflow.respond, place="respond", device=torch.device("cpu"), backend=Again())
                workflow.respond = place
            trained.orchestrator.interrupted = lambda: trained.housekeeping.counts.updates >= UPDATES
            trained.housekeeping.save = lambda: None  # type: ignore[method-assign]
            trained.orchestrator.run()
            assert not is_recorded or any(each.graph is not None for each in place.recordings.values())
            return [each.detach().clone() for each in workflow.actor.parameters()]
        finally:
            trained.close()

    for expected, found in zip(learnt(False), learnt(True), strict=True):
        assert torch.equal(expected, found)


def test_the_watch_sees_what_it_should() -> None:
    tensor = torch.arange(3.0)
    mask = tensor > 1.0
    for read in (lambda: tensor.sum().item(), lambda: bool(mask.any()), lambda: tensor[mask], mask.nonzero):
        with pytest.raises(AssertionError, match="waits"), Watch():
            read()
    with pytest.raises(AssertionError, match="make it once, outside"), Watch():
        torch.tensor(0.5)
    with Watch():
        assert torch.where(mask, tensor, 0.0).sum().dim() == 0
