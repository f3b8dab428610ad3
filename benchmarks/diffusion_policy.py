"""Diffusion Policy at its published size (U-Net of 256, 512, 1024 channels; 2 observations of 5 numbers, plans of 16
actions of 2 numbers): how long one plan takes with 10 DDIM steps, and one training step at batch 256, beside the same
network with the schedulers of diffusers, run eagerly.

    python benchmarks/diffusion_policy.py --device cuda --json figures.json
    python benchmarks/diffusion_policy.py --device cuda --precision bf16 --fast-paths all
    python benchmarks/diffusion_policy.py --device cpu --plans 20 --updates 5

Both sides draw the same shapes, use AdamW with the same settings and keep an average of the weights. On a GPU ours
runs as CUDA graphs. Ours and theirs are timed in turns; figures are medians, ratios those of each turn. Where diffusers
is not installed, our own schedules, run eagerly, take its place.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.diffusion.schedule import DDIMSampler, SquaredCosineSchedule
from rl_lab.components.diffusion.unet import ConditionalUNet
from rl_lab.components.networks.data_range import RangeNormalizer
from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.kernels.door import plain_formulas
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, Counts, EnvSpec, Phase, Progress
from rl_lab.workflows.context import Parts, WorkflowContext
from rl_lab.workflows.diffusion_policy import DiffusionPolicy

OBSERVED, ACTIONS, BATCH, HISTORY, PLAN = 5, 2, 256, 2, 16
SPEC = EnvSpec("shapes", {"vector": ArraySpec((OBSERVED,), "float32")}, ActionSpec("continuous", (ACTIONS,)))
PHASE = Phase("train", buffer="demonstrations", progress=Progress(run=Counts(updates=1000)))
ADAMW: dict[str, Any] = {"betas": (0.95, 0.999), "weight_decay": 1e-6}


def make_ours(
    device: str,
    channels: tuple[int, ...],
    *,
    capture: bool | str = "auto",
    precision: str = "fp32",
    fast_paths: bool | str = True,
) -> DiffusionPolicy:
    """The workflow with its parts, without an environment."""
    torch.manual_seed(0)
    runtime = Runtime(device=device, capture=capture, precision=precision, fast_paths=fast_paths)
    components: dict[str, nn.Module] = {
        "normalizer": RangeNormalizer(observation=dict(SPEC.observation), action=SPEC.action),
        "encoder": ObservationEncoder(observation=dict(SPEC.observation), hidden_sizes=()),
        "schedule": SquaredCosineSchedule(levels=100),
    }
    denoiser = ConditionalUNet(input_size=OBSERVED, action=SPEC.action, channels=channels)
    for part in (*components.values(), denoiser):
        part.to(runtime.device)
    optimizer = Optimizer(parameters={"denoiser": denoiser}, name="adamw", learning_rate=1e-4, **ADAMW)
    context = WorkflowContext(
        components=Parts("components", components),
        controllers=Parts("controllers", {"denoiser": denoiser, "sampler": DDIMSampler(steps=10)}),
        optimizers=Parts("optimizers", {"controller": optimizer}),
        collector=None,  # type: ignore[arg-type]
        evaluator=None,  # type: ignore[arg-type]
        runtime=runtime,
        spec=SPEC,
        num_envs=1,
    )
    workflow = DiffusionPolicy()
    workflow.initialize(context)
    runtime.capture_methods(workflow)
    return workflow


class OurSchedulers:
    """What is asked of diffusers' schedulers, by our own formulas."""

    def __init__(self, device: str) -> None:
        self.schedule, self.sampler = SquaredCosineSchedule(levels=100).to(device), DDIMSampler(steps=10)
        self.after = dict(self.sampler.levels(self.schedule))
        self.timesteps, self.add_noise = torch.tensor(list(self.after)), self.schedule.add_noise

    def step(self, noise: torch.Tensor, level: torch.Tensor, plan: torch.Tensor) -> Any:
        with plain_formulas():
            after = self.sampler.step(self.schedule, plan, noise, int(level), self.after[int(level)])
        return SimpleNamespace(prev_sample=after)


def schedulers(device: str) -> tuple[Any, Any]:
    """To add noise, and to take it away."""
    if find_spec("diffusers") is None:
        return OurSchedulers(device), OurSchedulers(device)
    from diffusers import DDIMScheduler, DDPMScheduler

    shared = {"num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "clip_sample": True}
    noising, sampling = DDPMScheduler(**shared), DDIMScheduler(**shared)
    sampling.set_timesteps(10)
    return noising, sampling


class Theirs:
    """The same network with the schedulers of diffusers, eagerly."""

    def __init__(self, device: str, channels: tuple[int, ...], *, precision: str = "fp32") -> None:
        torch.manual_seed(0)
        self.noising, self.sampling = schedulers(device)
        self.network = ConditionalUNet(input_size=OBSERVED, action=SPEC.action, channels=channels).to(device)
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, **ADAMW)
        self.device, self.is_low = torch.device(device).type, precision == "bf16"

    def predict(self, network: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.is_low), plain_formulas():
            predicted: torch.Tensor = network(*inputs)
        return predicted.float()

    def update(self, batch: Batch) -> None:
        clean = batch["action"]
        noise = torch.randn_like(clean)
        level = torch.randint(100, (len(clean),), device=clean.device)
        predicted = self.predict(self.network, self.noising.add_noise(clean, noise, level), level, batch["vector"])
        self.optimizer.zero_grad()
        F.mse_loss(predicted, noise).backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.network.parameters()), 1000**-0.75)

    @torch.no_grad()
    def plan(self, vector: torch.Tensor) -> torch.Tensor:
        plan = torch.randn(len(vector), PLAN, ACTIONS, device=vector.device)
        for level in self.sampling.timesteps:
            noise = self.predict(self.average, plan, level.to(vector.device).expand(len(vector)), vector)
            plan = self.sampling.step(noise, level, plan).prev_sample
        return plan


def make_batch(device: str) -> Batch:
    random = torch.Generator().manual_seed(1)
    batch = {
        "vector": torch.rand(BATCH, HISTORY, OBSERVED, generator=random) * 2 - 1,
        "action": torch.rand(BATCH, PLAN, ACTIONS, generator=random) * 2 - 1,
        "vector_range": torch.tensor([[-1.0] * OBSERVED, [1.0] * OBSERVED]),
        "action_range": torch.tensor([[-1.0] * ACTIONS, [1.0] * ACTIONS]),
    }
    return {key: values.to(device) for key, values in batch.items()}


def milliseconds(call: Callable[[], Any], device: str, count: int) -> float:
    """Of one call, the device being waited for once after all of them."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def compare(
    ours: Callable[[], Any], theirs: Callable[[], Any], device: str, count: int, turns: int
) -> dict[str, float]:
    """Medians over turns in which both are timed, the one that begins changing."""
    for call in (ours, theirs):
        milliseconds(call, device, 5 if device.startswith("cuda") else 1)  # on a GPU, also the recording
    pairs = []
    for turn in range(turns):
        order = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
        first, second = (milliseconds(call, device, count) for call in order)
        pairs.append((first, second) if turn % 2 == 0 else (second, first))
    return {
        "ours_ms": statistics.median(ours_ms for ours_ms, _ in pairs),
        "diffusers_ms": statistics.median(theirs_ms for _, theirs_ms in pairs),
        "ratio": statistics.median(theirs_ms / ours_ms for ours_ms, theirs_ms in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--channels", type=int, nargs="+", default=[256, 512, 1024], help="of the U-Net")
    parser.add_argument(
        "--fast-paths", choices=["on", "all", "off"], default="on", help="ours; all: unmeasured kernels too"
    )
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="fp32", help="of both sides")
    parser.add_argument("--plans", type=int, default=200, help="plans timed in a turn")
    parser.add_argument("--updates", type=int, default=100, help="updates timed in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    device, channels, turns = arguments.device, tuple(arguments.channels), arguments.turns
    ours = make_ours(device, channels, precision=arguments.precision, fast_paths=arguments.fast_paths)
    theirs, batch = Theirs(device, channels, precision=arguments.precision), make_batch(device)
    seen = batch["vector"][:1]

    def learn() -> Any:
        return ours.update_controller(dict(batch), phase=PHASE)

    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
        "plan of 16 actions, 10 DDIM steps, 1 environment": (
            lambda: ours.denoise({"vector": seen}, {}),
            lambda: theirs.plan(seen),
            arguments.plans,
        ),
        f"update, batch {BATCH}": (learn, lambda: theirs.update(batch), arguments.updates),
    }
    figures: dict[str, dict[str, float]] = {}
    for name, (our_call, their_call, count) in sides.items():
        figures[name] = numbers = compare(our_call, their_call, device, count, turns)
        ours_ms, theirs_ms, ratio = numbers["ours_ms"], numbers["diffusers_ms"], numbers["ratio"]
        print(f"{name}: ours {ours_ms:.2f} ms, diffusers {theirs_ms:.2f} ms, {ratio:.2f}x", flush=True)
    settings = {"device": device, "channels": channels, "precision": arguments.precision}
    settings["beside"] = "our schedules" if find_spec("diffusers") is None else "diffusers"
    print(f"{settings}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**settings, **figures}, indent=2))


if __name__ == "__main__":
    main()
