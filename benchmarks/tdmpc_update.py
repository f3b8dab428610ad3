"""One TD-MPC2 update (24 numbers seen, 6 actions, batch 256, horizon 3) and one plan for 1 and for 16 environments: how
long they take eagerly and as CUDA graphs, and whether both give the same losses.

    python benchmarks/tdmpc_update.py --device cuda --json figures.json
    python benchmarks/tdmpc_update.py --device cpu --size 1m --updates 3
    python benchmarks/tdmpc_update.py --device cuda runtime.precision=bf16 runtime.fast_paths=all

As nicklashansen/tdmpc2 for DeepMind Control, in TF32 and without a head that tells when episodes end
(`components.continue_head=null`); `--continue-head` keeps it. Other settings go last.

first       the first eight updates, with everything they compile and record, or the first plan
synced      the device is waited for after every one
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

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build_agent, build_runtime
from rl_lab.training.capture import WARM_UP_CALLS
from rl_lab.types import ActionSpec, ArraySpec, Batch, EnvSpec, Phase, TimeStep

OBSERVED, ACTIONS = 24, 6
SPEC = EnvSpec("shapes", {"vector": ArraySpec((OBSERVED,), "float32")}, ActionSpec("continuous", (ACTIONS,)))
PHASE = Phase("train", buffer="replay", duration_updates=1_000_000)
LOSSES = ("loss/consistency", "loss/reward", "loss/value", "loss/continue", "loss/policy", "loss/entropy")
WARM_UP = {"cuda": 30, "cpu": 1}
COMPARED = WARM_UP_CALLS + 5  # updates whose losses are compared: those before the recording run eagerly


def make(device: str, size: str, *words: str, capture: bool = True) -> Any:
    """TD-MPC2 with its parts, without an environment."""
    settings = [f"size=tdmpc2/{size}", f"runtime.device={device}", f"runtime.capture={'auto' if capture else 'false'}"]
    config = compose("tdmpc2", [*settings, *words])
    return build_agent(config, SPEC, runtime=build_runtime(config)).workflow


def make_batches(device: str, workflow: Any, batch_size: int, count: int = 8) -> list[Batch]:
    """Rollouts [B, H+1] of random numbers, on the device."""
    generator, rows = torch.Generator().manual_seed(1), workflow.horizon + 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch_size, rows, *shape, generator=generator)

    never = torch.zeros(batch_size, rows, dtype=torch.bool)
    batches = [
        {"vector": normal(OBSERVED), "action": normal(ACTIONS).tanh(), "reward": normal()}
        | {"is_first": never, "is_last": never, "is_terminal": normal() > 3.0}
        for _ in range(count)
    ]
    return [{key: value.to(device) for key, value in batch.items()} for batch in batches]


def losses(workflow: Any, batches: list[Batch], updates: int) -> torch.Tensor:
    """The losses of the first updates, `[updates, losses]`."""
    torch.manual_seed(2)
    rows = [workflow.update(dict(batches[index % len(batches)]), phase=PHASE) for index in range(updates)]
    return torch.stack([torch.stack([row[name] for name in LOSSES if name in row]) for row in rows]).cpu()


def planning(workflow: Any, device: str, num_envs: int) -> Callable[[int], Any]:
    """A call that plans for so many environments, each from the plan before."""
    flags = torch.zeros(num_envs, dtype=torch.bool, device=device)
    seen = torch.randn(num_envs, OBSERVED, generator=torch.Generator().manual_seed(3)).to(device)
    time_step = TimeStep({"vector": seen}, torch.zeros(num_envs, device=device), flags, flags, flags)
    states: list[Any] = [None]

    def plan(index: int) -> None:
        with torch.inference_mode():
            states[0] = workflow.act(time_step, states[0], mode="train").state

    return plan


def milliseconds(call: Callable[[int], Any], device: str, repeats: int) -> dict[str, float]:
    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    begin = time.perf_counter()
    call(0)
    wait()
    first = time.perf_counter() - begin
    for index in range(WARM_UP["cuda" if device.startswith("cuda") else "cpu"]):
        call(index)
    wait()
    synced = []
    for index in range(repeats):
        begin = time.perf_counter()
        call(index)
        wait()
        synced.append(1e3 * (time.perf_counter() - begin))
    begin = time.perf_counter()
    for index in range(repeats):
        call(index)
    wait()
    pipelined = 1e3 * (time.perf_counter() - begin) / repeats
    return {"first_s": first, "synced_ms": statistics.median(synced), "pipelined_ms": pipelined}


def measure(device: str, size: str, updates: int, batch_size: int, *words: str) -> dict[str, Any]:
    """All figures, each shown as soon as it is known, and the largest relative difference of the losses captured and
    eager."""
    figures: dict[str, Any] = {"size": size, "batch": batch_size, "device": device}
    modes = (True, False) if device.startswith("cuda") else (False,)
    found = {}
    for capture in modes:
        workflow = make(device, size, *words, capture=capture)
        batches = make_batches(device, workflow, batch_size)
        figures["precision"] = workflow.context.runtime.precision
        figures["continue_head"] = workflow.continue_head is not None
        begin = time.perf_counter()
        found[capture] = losses(workflow, batches, COMPARED)
        first = {"first_s": time.perf_counter() - begin}
        name = "captured" if capture else "eager"
        update = lambda index: workflow.update(dict(batches[index % len(batches)]), phase=PHASE)  # noqa: B023, E731
        calls = {f"{name} update": update}
        calls |= {f"{name} plan, {num_envs}": planning(workflow, device, num_envs) for num_envs in (1, 16)}
        for label, call in calls.items():
            figures[label] = milliseconds(call, device, updates) | (first if label.endswith("update") else {})
            show(label, figures[label])
    if len(found) == 2:
        figures["largest_difference"] = float(
            ((found[True] - found[False]) / found[False].abs().clamp(min=1e-3)).abs().max()
        )
    return figures


def show(name: str, value: Any) -> None:
    if isinstance(value, dict):
        value = (
            f"first {value['first_s']:.2f} s   synced {value['synced_ms']:.2f} ms   "
            f"pipelined {value['pipelined_ms']:.2f} ms"
        )
    print(f"{name:24} {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="5m", help="1m, 5m, 19m, 48m or 317m")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--continue-head", action="store_true", help="with the head that tells when episodes end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="settings such as runtime.precision=bf16")
    arguments = parser.parse_args()
    words = [*([] if arguments.continue_head else ["components.continue_head=null"]), *arguments.overrides]
    figures = measure(arguments.device, arguments.size, arguments.updates, arguments.batch, *words)
    for name, value in figures.items():
        if not isinstance(value, dict):
            show(name, value)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
