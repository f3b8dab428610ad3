"""Check CUDA-graph capture on a real GPU, and time it: `python benchmarks/capture_check.py` (about half a minute).

Every check compares captured updates with the same updates run eagerly: outputs, parameters, optimizer state and
random generator must be equal to the bit. Prints PASS or FAIL lines, then a table in microseconds; exits 1 on a FAIL.
With `--device cpu` nothing is captured, and only the script itself is checked.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_lab.training.capture import Recording
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import Batch, ConfigError, Progress
from rl_lab.utils import tree
from rl_lab.utils.seeding import get_rng_state, set_rng_state

ROWS, INPUTS, HIDDEN = 256, 23, 256  # a critic of SAC on a MuJoCo task
SCALES = (1.0, 0.5, 2.0)


class Regression:
    """A critic with dropout and noise, its target network and one optimizer: an update as SAC and DQN have it."""

    compiled: ClassVar[tuple[str, ...]] = ()
    captured: ClassVar[tuple[str, ...]] = ("learn",)

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Dropout(0.2)]
        self.network = nn.Sequential(*layers, nn.Linear(HIDDEN, 1)).to(device)
        self.slow = TargetNetwork(self.network, rate=0.005)
        self.optimizer = Optimizer(
            parameters={"critic": self.network},
            name=name,
            learning_rate="linear(1e-3, 0)",
            max_grad_norm=1.0,
            adaptive_clip=0.3 if name == "laprop" else None,
            weight_decay=0.01 if name == "adamw" else 0.0,
        )

    def learn(self, batch: Batch, numbers: Batch, *, with_noise: bool = True) -> Batch:
        inputs = batch["input"] + 0.1 * torch.randn_like(batch["input"]) if with_noise else batch["input"]
        with torch.no_grad():
            target = batch["reward"] + 0.9 * self.slow(batch["next"])[:, 0]
        error = self.network(inputs)[:, 0] - target
        loss = error.square().mean() * numbers["scale"]
        taken = self.optimizer.apply(loss)
        self.slow.move_towards(self.network)
        return {"loss/critic": loss.detach(), "priority": error.detach().abs(), **taken}

    def state(self) -> dict[str, Any]:
        parts = {"network": dict(self.network.state_dict()), "slow": dict(self.slow.state_dict())}
        return tree.map_leaves(_cloned, {**parts, "optimizer": self.optimizer.state_dict()})

    def restore(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.slow.load_state_dict(state["slow"])
        self.optimizer.load_state_dict(state["optimizer"])


class ReadsBack(Regression):
    def learn(self, batch: Batch, numbers: Batch, *, with_noise: bool = True) -> Batch:
        return {"mean": batch["input"].mean() * batch["reward"].mean().item()}


def _cloned(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def learner_of(
    name: str, device: str, *, capture: bool, kind: type[Regression] = Regression
) -> tuple[Regression, Runtime]:
    runtime = Runtime(device=device, capture=capture)
    learner = kind(name, runtime.device)
    runtime.capture_methods(learner)
    return learner, runtime


def batch_of(update: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(update)
    shapes = {"input": (ROWS, INPUTS), "next": (ROWS, INPUTS), "reward": (ROWS,)}
    batch = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return {key: values.to(device) for key, values in batch.items()}


def taught(learner: Regression, runtime: Runtime, first: int, updates: int) -> list[Batch]:
    outputs = []
    for update in range(first, first + updates):
        learner.optimizer.prepare(Progress(fraction=update / 100))
        numbers = runtime.numbers({"scale": SCALES[update % len(SCALES)]})
        outputs.append(learner.learn(batch_of(update, runtime.device), numbers, with_noise=update % 5 != 0))
    return outputs


def same_as_eager(name: str, device: str) -> bool:
    """Fifty updates each way: two choices, a schedule, changing scales, dropout and noise."""
    outcomes = []
    for capture in (False, True):
        learner, runtime = learner_of(name, device, capture=capture)
        torch.manual_seed(1)
        outputs = taught(learner, runtime, 0, 50)
        outcomes.append((outputs, learner.state(), get_rng_state()))
    return tree.equal(outcomes[0], outcomes[1])


def same_after_restart(name: str, device: str) -> bool:
    """Thirty updates at once, and the last ten again from a saved state by a learner that must record anew."""
    learner, runtime = learner_of(name, device, capture=True)
    torch.manual_seed(1)
    taught(learner, runtime, 0, 20)
    saved, generators = learner.state(), get_rng_state()
    ahead = taught(learner, runtime, 20, 10)
    again, other_runtime = learner_of(name, device, capture=True)
    again.restore(saved)
    set_rng_state(generators)
    repeated = taught(again, other_runtime, 20, 10)
    return tree.equal(ahead, repeated) and tree.equal(learner.state(), again.state())


def same_after_going_back(device: str) -> bool:
    """The recordings themselves go on from an older state and generator."""
    learner, runtime = learner_of("adam", device, capture=True)
    torch.manual_seed(1)
    taught(learner, runtime, 0, 20)
    saved, generators = learner.state(), get_rng_state()
    ahead = taught(learner, runtime, 20, 10)
    learner.restore(saved)
    set_rng_state(generators)
    return tree.equal(ahead, taught(learner, runtime, 20, 10))


def frozen_stays(device: str) -> bool:
    learner, runtime = learner_of("adam", device, capture=True)
    taught(learner, runtime, 0, 20)
    learner.network[0].requires_grad_(False)
    runtime.forget_captures()
    before = _cloned(learner.network[0].weight)
    taught(learner, runtime, 20, 20)
    return torch.equal(before, learner.network[0].weight) and learner.optimizer.rule.counts == [20, 20, 40, 40, 40, 40]


def reading_back_is_refused(device: str) -> bool:
    learner, runtime = learner_of("adam", device, capture=True, kind=ReadsBack)
    try:
        taught(learner, runtime, 0, 10)
    except ConfigError as error:
        print(f"       {error}")
        return "runtime.capture=false" in str(error)
    return device == "cpu"


# --- timing ---


def microseconds(function: Callable[[], object], device: torch.device, *, repeats: int = 200) -> tuple[float, float]:
    """Medians of five rounds: until the device is done, and until the call returns."""
    whole, host = [], []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        returned = time.perf_counter()
        synchronize(device)
        whole.append((time.perf_counter() - start) / repeats * 1e6)
        host.append((returned - start) / repeats * 1e6)
    return statistics.median(whole), statistics.median(host)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_updates(device: str) -> None:
    for name in ("adam", "laprop"):
        for capture in (False, True):
            learner, runtime = learner_of(name, device, capture=capture)
            batch, numbers = batch_of(0, runtime.device), runtime.numbers({"scale": 1.0})

            def update(learner: Regression = learner, batch: Batch = batch, numbers: Batch = numbers) -> object:
                learner.optimizer.prepare(Progress())
                return learner.learn(batch, numbers)

            for _ in range(10):
                update()
            row(f"{name} update, {'captured' if capture else 'eager'}", microseconds(update, runtime.device))
            if capture and runtime.graphs is not None:
                recording = next(iter(learner.learn.recordings.values()))  # type: ignore[attr-defined]
                time_parts(recording, runtime, [*batch.values(), *numbers.values()])


def time_parts(recording: Recording, runtime: Runtime, values: list[Tensor]) -> None:
    replay = runtime.graphs.replay if runtime.graphs is not None else list
    row("  of it: the replay", microseconds(lambda: replay(recording.graph), runtime.device))
    row("  of it: inputs in", microseconds(lambda: recording.take(values), runtime.device))
    row("  of it: outputs out", microseconds(recording.outputs.copied, runtime.device))


class Wide:
    """A change of many parameters alone, as large as a small world model's."""

    compiled: ClassVar[tuple[str, ...]] = ()
    captured: ClassVar[tuple[str, ...]] = ("learn",)

    def __init__(self, name: str, device: torch.device) -> None:
        scale = 1 if device.type == "cuda" else 8
        shapes = [(512 // scale, 512)] * 45 + [(512,)] * 90
        self.parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        self.optimizer = Optimizer(
            parameters=self.parameters, name=name, adaptive_clip=0.3 if name == "laprop" else None
        )

    def learn(self, batch: Batch, numbers: Batch) -> Batch:
        norms = torch.stack([parameter.sum() for parameter in self.parameters])
        return self.optimizer.apply(norms.square().sum() * numbers["scale"])


def time_changes(device: str) -> None:
    for name in ("adam", "laprop"):
        for capture in (False, True):
            runtime = Runtime(device=device, capture=capture)
            wide = Wide(name, runtime.device)
            runtime.capture_methods(wide)
            numbers = runtime.numbers({"scale": 1e-3})
            for _ in range(6):
                wide.learn({}, numbers)
            label = f"{name}, 135 tensors, {sum(p.numel() for p in wide.parameters) / 1e6:.1f}M, "
            timed = microseconds(lambda wide=wide, n=numbers: wide.learn({}, n), runtime.device, repeats=20)  # type: ignore[misc]
            row(label + ("captured" if capture else "eager"), timed)


def row(label: str, timed: tuple[float, float]) -> None:
    print(f"{label:<44}{timed[0]:>12.1f}{timed[1]:>14.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    device = parser.parse_args().device
    if device == "cpu":
        print("device cpu: nothing is captured, so equal numbers prove nothing here.")
    else:
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    checks: dict[str, Callable[[], bool]] = {}
    for name in ("adam", "adamw", "laprop", "rmsprop", "sgd"):
        checks[f"{name}: captured = eager over 50 updates"] = lambda name=name: same_as_eager(name, device)  # type: ignore[misc]
    for name in ("adam", "laprop"):
        checks[f"{name}: a restart goes on alike"] = lambda name=name: same_after_restart(name, device)  # type: ignore[misc]
    checks["adam: recordings go on from an older state"] = lambda: same_after_going_back(device)
    checks["adam: what is frozen stays"] = lambda: frozen_stays(device)
    failed = 0
    for label, check in checks.items():
        is_right = check()
        failed += not is_right
        print(f"{'PASS' if is_right else 'FAIL'}  {label}", flush=True)
    print(f"\n{'microseconds per call (median of 5 rounds)':<44}{'until done':>12}{'until return':>14}")
    time_updates(device)
    time_changes(device)
    is_right = reading_back_is_refused(device)  # last: a broken recording may leave the device in a bad state
    print(f"{'PASS' if is_right else 'FAIL'}  reading a value back is refused with its cure")
    return 1 if failed or not is_right else 0


if __name__ == "__main__":
    raise SystemExit(main())
