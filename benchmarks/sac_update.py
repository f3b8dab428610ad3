"""One SAC update at the size of HalfCheetah (17 numbers seen, 6 actions, batch 256, layers of 256): how long it takes
eagerly and as a CUDA graph, how many kernels it launches, and whether both give the same losses.

    python benchmarks/sac_update.py --device cuda --json figures.json
    python benchmarks/sac_update.py --device cpu

synced      the device is waited for after every update
pipelined   it is waited for once after all of them, as in training, where nothing reads the losses in between
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_lab.components.heads.soft_actor_critic import SoftActor, Temperature, TwinCritic
from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.components.networks.normalizers import ObservationNormalizer
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, EnvSpec, Phase
from rl_lab.workflows.context import Parts, WorkflowContext
from rl_lab.workflows.sac import SAC

OBSERVED, ACTIONS, BATCH, HIDDEN = 17, 6, 256, (256, 256)
SPEC = EnvSpec("shapes", {"vector": ArraySpec((OBSERVED,), "float32")}, ActionSpec("continuous", (ACTIONS,)))
PHASE = Phase("train", buffer="replay", duration_updates=1_000_000)
LOSSES = ("loss/critic", "loss/policy", "loss/temperature", "controller/entropy")


def make_sac(device: str, *, capture: bool | str = "auto", seed: int = 0) -> SAC:
    """SAC with its parts, without an environment."""
    torch.manual_seed(seed)
    runtime = Runtime(device=device, capture=capture)
    encoder = ObservationEncoder(observation=dict(SPEC.observation), hidden_sizes=())
    components: dict[str, nn.Module] = {
        "observation_normalizer": ObservationNormalizer(observation=dict(SPEC.observation)),
        "encoder": encoder,
        "temperature": Temperature(action=SPEC.action),
    }
    controllers: dict[str, nn.Module] = {
        "actor": SoftActor(input_size=OBSERVED, action=SPEC.action, hidden_sizes=HIDDEN),
        "critic": TwinCritic(input_size=OBSERVED, action=SPEC.action, hidden_sizes=HIDDEN),
    }
    for part in (*components.values(), *controllers.values()):
        part.to(runtime.device)
    learning = {
        "critic": controllers["critic"],
        "actor": controllers["actor"],
        "temperature": components["temperature"],
    }
    sac = SAC()
    context = WorkflowContext(
        components=Parts("components", components),
        controllers=Parts("controllers", controllers),
        optimizers=Parts("optimizers", {name: Optimizer(parameters={name: part}) for name, part in learning.items()}),
        collector=None,  # type: ignore[arg-type]
        evaluator=None,  # type: ignore[arg-type]
        runtime=runtime,
        spec=SPEC,
        num_envs=1,
    )
    sac.initialize(context)
    runtime.capture_methods(sac)
    return sac


def make_batches(device: str, count: int = 8) -> list[Batch]:
    """Transitions [B, 2] of random numbers, on the device."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, 2, *shape, generator=generator)

    no = torch.zeros(BATCH, 2, dtype=torch.bool)
    batches = [
        {
            "vector": normal(OBSERVED),
            "action": normal(ACTIONS).tanh(),
            "reward": normal(),
            "is_first": no,
            "is_last": no,
            "is_terminal": normal() > 2.0,
        }
        for _ in range(count)
    ]
    return [{key: value.to(device) for key, value in batch.items()} for batch in batches]


def losses(sac: SAC, batches: list[Batch], updates: int) -> torch.Tensor:
    """The losses of the first updates, `[updates, losses]`."""
    torch.manual_seed(2)
    rows = [sac.update_controller(dict(batches[i % len(batches)]), phase=PHASE) for i in range(updates)]
    return torch.stack([torch.stack([row[name] for name in LOSSES]) for row in rows]).cpu()


def milliseconds(update: Callable[[int], Any], device: str, updates: int) -> dict[str, float]:
    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    for index in range(30):
        update(index)
    wait()
    synced = []
    for index in range(updates):
        start = time.perf_counter()
        update(index)
        wait()
        synced.append(time.perf_counter() - start)
    pipelined = []
    for _ in range(5):
        start = time.perf_counter()
        for index in range(updates):
            update(index)
        wait()
        pipelined.append((time.perf_counter() - start) / updates)
    return {"synced_ms": statistics.median(synced) * 1e3, "pipelined_ms": statistics.median(pipelined) * 1e3}


def kernels(update: Callable[[int], Any], calls: int = 10) -> dict[str, float]:
    """Kernels and copies of one update on the GPU, and the time they fill."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in range(calls):
            update(index)
        torch.cuda.synchronize()
    found = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy_us = sum(event.device_time_total for event in found)
    names: dict[str, int] = {}
    for event in found:
        names[event.name[:90]] = names.get(event.name[:90], 0) + 1
    for name, count in sorted(names.items(), key=lambda item: -item[1]):
        print(f"  {count / calls:6.1f}  {name}")
    return {"kernels": len(found) / calls, "kernel_ms": busy_us / calls / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--updates", type=int, default=300, help="updates timed, after 30 to warm up")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    device, batches = arguments.device, make_batches(arguments.device)
    modes = {"eager": False, "captured": True} if device.startswith("cuda") else {"eager": False}
    figures: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device.startswith("cuda"):
        figures["device"] = torch.cuda.get_device_name()
    seen = {}
    for mode, capture in modes.items():
        seen[mode] = losses(make_sac(device, capture=capture), batches, 40)
        sac = make_sac(device, capture=capture)

        def update(index: int, sac: SAC = sac) -> Any:
            return sac.update_controller(dict(batches[index % len(batches)]), phase=PHASE)

        figures[mode] = milliseconds(update, device, arguments.updates)
        if device.startswith("cuda"):
            print(f"{mode}:")
            figures[mode] |= kernels(update)
        print(mode, {name: round(value, 4) for name, value in figures[mode].items()}, flush=True)
    if "captured" in seen:
        difference = (seen["eager"] - seen["captured"]).abs().max()
        figures["largest_loss_difference"] = float(difference)
        print(f"largest difference of a loss, eager and captured, over 40 updates: {float(difference):.3g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
