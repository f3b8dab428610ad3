"""What the docs claim of a GPU, in one go: the tests that need one, then benchmarks, each figure beside its goal.

    python benchmarks/gpu.py --output figures
    python benchmarks/gpu.py --only test-plans tdmpc2

Each part is a command of its own, shown with its seconds as it ends; what it printed is in OUTPUT/PART.log, its figures
are in OUTPUT/PART.json. After a part that fails or outlasts --limit the next one goes on. `+` marks kernels that are
asked for (runtime.fast_paths=all). The goals are meant for an NVIDIA H200.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parent / "tests"
ALL = "runtime.fast_paths=all"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """One number of a part's figures, and what it should be."""

    label: str
    read: Callable[[Figures], float]
    at_most: float | None = None
    at_least: float | None = None

    def row(self, figures: Figures) -> str:
        value = self.read(figures)
        is_met = (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)
        goal = f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"
        return f"    {self.label:<48}{value:>10.3g}   {goal:<8} {'yes' if is_met else 'NO'}"


def read(*keys: str | int) -> Callable[[Figures], float]:
    def found(figures: Any) -> float:
        for key in keys:
            figures = figures[key]
        return float(figures)

    return found


def dreamer() -> list[Goal]:
    limits = {"pixels-12m": 25.0, "state-12m": 15.0, "state-1m": 10.0, "pixels-50m": 42.0}
    return [
        Goal(f"{name}: update, ms", read("rows", index, "pipelined_ms"), at_most=limit)
        for index, (name, limit) in enumerate(limits.items())
    ]


def tdmpc2() -> list[Goal]:
    def growth(figures: Figures) -> float:
        return float(figures["captured plan, 16"]["pipelined_ms"] / figures["captured plan, 1"]["pipelined_ms"])

    return [
        Goal("update, ms", read("captured update", "pipelined_ms"), at_most=2.2),
        Goal("plan for 1 environment, ms", read("captured plan, 1", "pipelined_ms"), at_most=0.9),
        Goal("plan for 16 over plan for 1", growth, at_most=2.0),
        Goal("first update, s", read("captured update", "first_s"), at_most=30.0),
        Goal("losses, captured beside eager", read("largest_difference"), at_most=0.0),
    ]


def diffusion() -> list[Goal]:
    plan, update = "plan of 16 actions, 10 DDIM steps, 1 environment", "update, batch 256"
    return [
        Goal("plan with 10 DDIM steps, ms", read(plan, "ours_ms"), at_most=3.0),
        Goal("update beside the same network eager", read(update, "ratio"), at_least=2.0),
    ]


@dataclass(frozen=True)
class Part:
    """A command; one whose figures have goals takes --json."""

    command: list[str]
    goals: list[Goal]

    def run(self, name: str, output: Path, limit_s: float) -> list[str]:
        """Lines to print: how it went, and its figures beside their goals or else the end of what it said."""
        log, figures = output / f"{name}.log", output / f"{name}.json"
        figures.unlink(missing_ok=True)
        command = [sys.executable, *self.command, *(["--json", str(figures)] if self.goals else [])]
        begin, ended = time.perf_counter(), "ok"
        places = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings: Any = {"stderr": subprocess.STDOUT, "timeout": limit_s, "env": os.environ | {"PYTHONPATH": places}}
        with log.open("w") as stream:
            try:
                code = subprocess.run(command, stdout=stream, **settings).returncode
                ended = f"FAILED with exit code {code}, see {log}" if code else ended
            except subprocess.TimeoutExpired:
                ended = f"OUTLASTED {limit_s:g} s, see {log}"
        lines = [f"{name:<16}{time.perf_counter() - begin:>6.0f} s   {ended}"]
        if figures.exists():
            found = json.loads(figures.read_text())
            return [*lines, *(goal.row(found) for goal in self.goals)]
        return [*lines, *(f"    {line}" for line in log.read_text().strip().splitlines()[-3:])]


def script(name: str, *words: str, device: bool = True) -> list[str]:
    return [str(FOLDER / name), *(["--device", "cuda"] if device else []), *words]


def tests(*words: str | Path) -> Part:
    """Tests in a process of their own: after a fault of the GPU nothing else in that process can use it. Without the
    options of pyproject.toml, one of which refuses settings of plugins that are not installed."""
    options = ("-q", "-ra", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider")
    return Part(["-m", "pytest", *options, *map(str, words)], [])


def other_tests(*named: Path) -> list[Path]:
    """Files with tests for a GPU besides those named; whatever the others import need not be installed."""
    return [file for file in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in file.read_text() and file not in named]


def parts() -> dict[str, Part]:
    few, bf16 = ("--plans", "40", "--updates", "30"), "runtime.precision=bf16"
    fast = (*few, "--fast-paths", "all")
    generation = ("--generation", "--rollouts", "1", "--time-limit", "60")
    kernels, captures = TESTS / "kernels" / "test_on_a_gpu.py", TESTS / "test_captures_on_a_gpu.py"
    return {
        "test-kernels": tests(kernels, "-k", "not unet and not tdmpc2 and not search"),
        "test-plans": tests(kernels, "-k", "tdmpc2 or search"),
        "test-unet": tests(kernels, "-k", "unet"),
        "test-captures": tests(captures),
        "test-others": tests(*other_tests(kernels, captures)),
        "capture": Part(script("capture_check.py"), []),
        "tdmpc2": Part(script("tdmpc_update.py"), tdmpc2()),
        "tdmpc2+": Part(script("tdmpc_update.py", ALL), tdmpc2()),
        "tdmpc2+bf16": Part(script("tdmpc_update.py", ALL, bf16), tdmpc2()),
        "diffusion": Part(script("diffusion_policy.py", *few), diffusion()),
        "diffusion+": Part(script("diffusion_policy.py", *fast), diffusion()),
        "diffusion+tf32": Part(script("diffusion_policy.py", *fast, "--precision", "tf32"), diffusion()),
        "diffusion+bf16": Part(script("diffusion_policy.py", *fast, "--precision", "bf16"), diffusion()),
        "dreams": Part(
            script("world_models.py", device=False), [Goal("dreams of a generation, s", read("seconds"), at_most=3.0)]
        ),
        "generation": Part(
            script("world_models.py", *generation, device=False),
            [Goal("the simulator's part of a generation", read("simulator_share"), at_least=0.9)],
        ),
        "sac": Part(
            script("sac_update.py"), [Goal("update, ms (LeanRL: 0.47)", read("captured", "pipelined_ms"), at_most=0.47)]
        ),
        "dreamer": Part(script("dreamer_update.py", "--config", "pixels-12m,state-12m,state-1m,pixels-50m"), dreamer()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(parts()), metavar="PART", help=f"of {', '.join(parts())}")
    parser.add_argument("--output", type=Path, default=Path("gpu_figures"), help="folder of logs and figures")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a part")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    for name, part in parts().items():
        if given.only is None or name in given.only:
            print("\n".join(part.run(name, given.output, given.limit)), flush=True)


if __name__ == "__main__":
    main()
