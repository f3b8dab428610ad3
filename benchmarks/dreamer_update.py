"""Whole Dreamer updates on random batches: how long they take, how much memory they need.

    python benchmarks/dreamer_update.py --config pixels-12m,state-12m,state-1m,pixels-50m --device cuda --json FILE
    python benchmarks/dreamer_update.py --config state-1m --device cpu --updates 5 --warmup 2
    python benchmarks/dreamer_update.py --config state-1m,pixels-12m --check

The parts are those of configs/algorithm/dreamer.yaml at the named size, without an environment: 64x64x3 images or 24
numbers, batches of 16 sequences of 64 rows and the row they begin with.

synced      the device is waited for after every update
pipelined   it is waited for once after all of them, as in training, where nothing reads the losses in between
first       the first update, libraries, compilation and capture included, until the graph is recorded

--check times nothing: it runs the same updates eagerly and captured, from the same seed, in fp32 and in bf16, and
prints the largest relative difference of each loss between the two; with --plain, captured with fast paths beside eager
without them.
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
import yaml
from torch import nn

from rl_lab.config.construct import construct
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, Counts, EnvSpec, Phase, Progress
from rl_lab.workflows.context import Parts, WorkflowContext
from rl_lab.workflows.dreamer import Dreamer

CONFIGS = Path(__file__).parents[1] / "rl_lab" / "configs"
OBSERVATIONS = {
    "pixels": {"image": ArraySpec((64, 64, 3), "uint8")},
    "state": {"vector": ArraySpec((24,), "float32")},
    "both": {"image": ArraySpec((64, 64, 3), "uint8"), "vector": ArraySpec((24,), "float32")},
}
PHASE = Phase("train", buffer="replay", duration_updates=1_000_000, progress=Progress(run=Counts(updates=1000)))
CAPTURE_CALLS = 4  # three eager updates, then the recorded one


def read_config(size: str) -> dict[str, Any]:
    """The algorithm's YAML with the size's laid over it; of references there is one, to the memory's size."""
    config = yaml.safe_load((CONFIGS / "algorithm" / "dreamer.yaml").read_text())
    _lay_over(config, yaml.safe_load((CONFIGS / "size" / f"{size}.yaml").read_text()))
    config["components"]["decoder"]["deter"] = config["components"]["dynamics"]["deter"]
    return config


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay_over(below[key], value)
        else:
            below[key] = value


def make_dreamer(config: dict[str, Any], spec: EnvSpec, runtime: Runtime) -> Dreamer:
    torch.manual_seed(0)
    injected = {"observation": dict(spec.observation), "action": spec.action, "num_envs": 1}
    built: dict[str, Any] = {}
    for group in ("components", "controllers"):
        for name, block in config[group].items():
            built[name] = construct(block, place=name, injected=injected, parts=built).to(runtime.device)
    settings = {key: value for key, value in config["optimizers"]["agent"].items() if key != "parts"}
    learning = {name: built[name] for name in config["optimizers"]["agent"]["parts"]}
    settings["betas"] = tuple(settings["betas"])
    optimizer = Optimizer(parameters=learning, precision=runtime.precision, **settings)
    dreamer = construct(config["algorithm"], place="algorithm")
    assert isinstance(dreamer, Dreamer)
    dreamer.initialize(
        WorkflowContext(
            components=Parts("components", {name: built[name] for name in config["components"]}),
            controllers=Parts("controllers", {name: built[name] for name in config["controllers"]}),
            optimizers=Parts("optimizers", {"agent": optimizer}),
            collector=None,  # type: ignore[arg-type]
            evaluator=None,  # type: ignore[arg-type]
            runtime=runtime,
            spec=spec,
            num_envs=1,
        )
    )
    runtime.capture_methods(dreamer)
    return dreamer


def make_batch(dreamer: Dreamer, spec: EnvSpec, device: torch.device, *, size: int, length: int) -> Batch:
    """Random rows `[B, T+1]` on the device, as replay gives them."""
    generator = torch.Generator().manual_seed(1)
    shape = (size, length + 1)
    batch: Batch = {}
    for key, each in spec.observation.items():
        if each.is_image:
            batch[key] = torch.randint(0, 256, (*shape, *each.shape), dtype=torch.uint8, generator=generator)
        else:
            batch[key] = torch.randn(*shape, *each.shape, generator=generator)
    if spec.action.kind == "continuous":
        batch["action"] = torch.rand(*shape, *spec.action.shape, generator=generator) * 2.0 - 1.0
    else:
        batch["action"] = torch.randint(0, spec.action.sizes[0], shape, generator=generator)
    batch["reward"] = torch.randn(shape, generator=generator)
    batch["is_last"] = torch.rand(shape, generator=generator) < 0.01
    batch["is_terminal"] = batch["is_last"]
    batch["is_first"] = torch.cat((torch.zeros(size, 1, dtype=torch.bool), batch["is_last"][:, :-1]), dim=1)
    context = dreamer.dynamics.pack(dreamer.dynamics.initial_state(size, device))
    batch |= {key: value.cpu().unsqueeze(1).repeat(1, length + 1, 1) for key, value in context.items()}
    return {key: value.to(device) for key, value in batch.items()}


def measure(update: Callable[[], Any], device: torch.device, *, warmup: int, updates: int) -> dict[str, float]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    for _ in range(CAPTURE_CALLS if device.type == "cuda" else 1):
        update()
    wait()
    first_s = time.perf_counter() - start
    for _ in range(warmup):
        update()
    wait()
    synced = []
    for _ in range(updates):
        start = time.perf_counter()
        update()
        wait()
        synced.append(time.perf_counter() - start)
    pipelined = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(max(1, updates // 5)):
            update()
        wait()
        pipelined.append((time.perf_counter() - start) / max(1, updates // 5))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "first_s": first_s,
        "synced_ms": statistics.median(synced) * 1e3,
        "pipelined_ms": statistics.median(pipelined) * 1e3,
        "peak_gib": peak,
    }


def show_profile(update: Callable[[], Any], device: torch.device) -> None:
    """The kernels that fill one update."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        update()
        if is_cuda:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80))


def make_action(text: str) -> ActionSpec:
    kind, _, size = text.partition(":")
    assert kind in ("discrete", "continuous"), f"--actions is {text}: write discrete:17 or continuous:6"
    return ActionSpec(kind, (int(size),))  # type: ignore[arg-type]


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    kind, _, size = name.partition("-")
    spec = EnvSpec(name, OBSERVATIONS[kind], make_action(options.actions))
    is_cuda = options.device.startswith("cuda")
    precision = options.precision or ("bf16" if is_cuda else "fp32")
    runtime = Runtime(
        device=options.device,
        precision=precision,
        capture=not options.eager and is_cuda,
        deterministic=False,
        fast_paths=not options.plain,
    )
    dreamer = make_dreamer(read_config(size), spec, runtime)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    batch = make_batch(dreamer, spec, runtime.device, size=options.batch_size, length=options.batch_length)
    update = lambda: dreamer.update(dict(batch), phase=PHASE)  # noqa: E731
    figures = measure(update, runtime.device, warmup=options.warmup, updates=options.updates)
    if options.profile:
        show_profile(update, runtime.device)
    learning = dreamer.optimizers[""].parameters
    parameters = sum(each.numel() for each in learning if isinstance(each, nn.Parameter))
    losses = {key: float(value) for key, value in update().items() if key.startswith("loss/")}
    return {"config": name, "parameters": parameters, "precision": precision, **figures, "losses": losses}


def check(name: str, options: argparse.Namespace) -> None:
    """Captured updates beside eager ones: eight of each, of which the captured ones replay a graph five times."""
    kind, _, size = name.partition("-")
    spec = EnvSpec(name, OBSERVATIONS[kind], make_action(options.actions))
    for precision in ("fp32", "bf16"):
        losses: list[list[dict[str, float]]] = []
        for capture in (False, options.device.startswith("cuda")):
            fast_paths = capture or not options.plain
            runtime = Runtime(device=options.device, precision=precision, capture=capture, fast_paths=fast_paths)
            dreamer = make_dreamer(read_config(size), spec, runtime)
            batch = make_batch(dreamer, spec, runtime.device, size=options.batch_size, length=options.batch_length)
            outputs = [dreamer.update(dict(batch), phase=PHASE) for _ in range(2 * CAPTURE_CALLS)]
            losses.append([{key: float(each[key]) for key in each if key.startswith("loss/")} for each in outputs])
        apart: dict[str, float] = {}
        for eager, captured in zip(*losses, strict=True):
            for key, value in eager.items():
                relative = abs(captured[key] - value) / max(abs(value), 1e-8)
                apart[key] = max(apart.get(key, 0.0), relative)
        print(f"{name:12} {precision}  largest relative difference {max(apart.values()):.2e}", flush=True)
        print("             " + "  ".join(f"{key.removeprefix('loss/')} {value:.1e}" for key, value in apart.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="state-1m", help="comma-separated: {pixels,state,both}-{1m,12m,...}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default=None, help="fp32 or bf16; by default bf16 on a GPU")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batch-length", type=int, default=64)
    parser.add_argument("--actions", default="continuous:6", help="discrete:17 or continuous:6")
    parser.add_argument("--warmup", type=int, default=20, help="updates before any is timed")
    parser.add_argument("--updates", type=int, default=100, help="updates that are timed")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--plain", action="store_true", help="without fast paths: every formula as it is written")
    parser.add_argument("--profile", action="store_true", help="print what one update consists of")
    parser.add_argument("--check", action="store_true", help="compare captured updates with eager ones instead")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    options = parser.parse_args()
    if options.check:
        if not options.device.startswith("cuda"):
            print(f"device {options.device}: nothing is captured, so equal numbers prove nothing here.")
        for name in options.config.split(","):
            check(name, options)
        return
    rows = []
    print(f"{'config':12} {'params':>8} {'first s':>8} {'synced ms':>10} {'pipelined ms':>13} {'peak GiB':>9}")
    for name in options.config.split(","):
        row = run(name, options)
        rows.append(row)
        print(
            f"{name:12} {row['parameters'] / 1e6:7.2f}M {row['first_s']:8.1f} {row['synced_ms']:10.2f} "
            f"{row['pipelined_ms']:13.2f} {row['peak_gib']:9.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
