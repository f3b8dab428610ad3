"""World Models: how long the dreams of one generation take, and how much of a real generation is the simulator's.

python benchmarks/world_models.py                       64 candidates x 16 dreams x 1,000 steps, paper's sizes
python benchmarks/world_models.py --steps 100           a tenth of it, for a CPU
python benchmarks/world_models.py --generation          one generation on CarRacing: the simulator's share
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, EnvSpec
from rl_lab.workflows.world_models import WorldModels

CAR = EnvSpec("none", {"image": ArraySpec((64, 64, 3), "uint8")}, ActionSpec("continuous", (3,)))


def dream_seconds(*, candidates: int, rollouts: int, steps: int, repeats: int) -> dict[str, Any]:
    """Wall seconds of a generation's dreams, none of which ends early; the first ones, which start up, are left out."""
    sizes = [f"controllers.evolution.population={candidates}", f"algorithm.rollouts={rollouts}"]
    config = compose("world_models_car_racing", [*sizes, f"algorithm.dream_steps={steps}"])
    workflow = build_agent(config, CAR, runtime=build_runtime(config)).workflow
    assert isinstance(workflow, WorldModels)
    with torch.no_grad():
        workflow.memory.outcome_output.bias[1] = -30.0  # type: ignore[attr-defined]  # nothing ends
    device, taken = workflow.context.runtime.device, []
    for _ in range(repeats + 1):
        population = workflow.new_population()
        start = time.perf_counter()
        found = workflow.dream_rollouts(population, 1.15)
        assert float(found["length"].min()) == steps
        taken.append(time.perf_counter() - start)
    return {"device": str(device), "seconds": sorted(taken[1:])[len(taken[1:]) // 2], "first_s": taken[0]}


def generation_share(*, num_envs: int, candidates: int, rollouts: int, time_limit: int | None) -> dict[str, Any]:
    """One generation on CarRacing with untrained V and M, which cost the same: seconds, and the simulator's part."""
    limit = "null" if time_limit is None else time_limit
    words = [
        f"environment.num_envs={num_envs}",
        f"environment.time_limit={limit}",
        f"controllers.evolution.population={candidates}",
        f"algorithm.rollouts={rollouts}",
        "buffers.replay.capacity_rows=1000",
        "buffers.replay.batch_size=1",
        "buffers.replay.sequence_length=2",
        f"training.phases.collect.duration_steps={2 * num_envs}",
        "training.phases.collect.collect_steps=2",
        "training.phases.vae.duration_updates=1",
        "training.phases.memory.duration_updates=1",
        "training.phases.train.duration_updates=1",
        "evaluation.final_episodes=0",
    ]
    trained = build(compose("world_models_car_racing", words), run=None, quiet=True)
    try:
        collect = trained.agent.workflow.collect_step
        spent = {"collecting": 0.0, "environment": 0.0}

        def timed(step: int, *, phase: Any) -> Any:
            before, start = trained.orchestrator.stopwatch.seconds.get("environment", 0.0), time.perf_counter()
            result = collect(step, phase=phase)
            if phase.name == "train":
                spent["collecting"] += time.perf_counter() - start
                spent["environment"] += trained.orchestrator.stopwatch.seconds.get("environment", 0.0) - before
            return result

        trained.agent.workflow.collect_step = timed  # type: ignore[method-assign]
        trained.orchestrator.run()
        return {"seconds": spent["collecting"], "simulator_share": spent["environment"] / spent["collecting"]}
    finally:
        trained.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--generation", action="store_true", help="one generation on CarRacing instead of dreams")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--time-limit", type=int, default=None, help="agent steps of an episode")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    given = parser.parse_args()
    sizes = {"candidates": given.candidates, "rollouts": given.rollouts}
    if given.generation:
        found = generation_share(num_envs=given.num_envs, time_limit=given.time_limit, **sizes)
    else:
        found = dream_seconds(steps=given.steps, repeats=given.repeats, **sizes)
        found["steps_per_s"] = given.candidates * given.rollouts * given.steps / found["seconds"]
    settings = {name: value for name, value in vars(given).items() if name != "json"}
    figures = json.dumps({**settings, **found, "machine": platform.processor() or platform.machine()})
    print(figures)
    if given.json is not None:
        given.json.write_text(figures + "\n")


if __name__ == "__main__":
    main()
