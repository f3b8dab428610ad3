"""What tests of exported policies share: untrained policies, and a process without RL Lab in which their files act."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.config.compose import compose
from rl_lab.environments.sampling import draw_observations
from rl_lab.environments.spaces import pick
from rl_lab.experiment.build import build_agent, build_environment, build_runtime
from rl_lab.policy import Policy

STEPS = 5
BEGINS = {1: {0: [0], 2: [0]}, 3: {0: [0, 1, 2], 2: [1], 3: [2, 0]}}  # rows in a batch -> step -> who begins anew
WITHOUT_RL_LAB = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rl_lab", "gymnasium", "hydra"):
            raise ImportError(name + " is not to be imported here")
sys.meta_path.insert(0, Blocked())
"""
PLAYER = (
    WITHOUT_RL_LAB
    + """
try:
    import rl_lab
except ImportError:
    pass
else:
    raise SystemExit("rl_lab could be imported")
import numpy as np

def open_file(path):
    if path.endswith(".onnx"):
        import onnxruntime
        session = onnxruntime.InferenceSession(path)
        names = [output.name for output in session.get_outputs()]
        about = json.loads(session.get_modelmeta().custom_metadata_map["policy.json"])
        return about, lambda inputs: dict(zip(names, session.run(names, inputs)))
    import torch
    files = {"policy.json": ""}
    program = torch.export.load(path, extra_files=files).module()
    def act(inputs):
        outputs = program({name: torch.from_numpy(value) for name, value in inputs.items()})
        return {name: value.numpy() for name, value in outputs.items()}
    return json.loads(files["policy.json"]), act

for path in sys.argv[1:]:
    about, act = open_file(path)
    rows, answers = np.load(path + ".rows.npz"), {}
    for size in (1, 3):
        state = {name: np.zeros((size, *each["shape"]), each["dtype"]) for name, each in about["state"].items()}
        for step in range(len(rows[f"{size}/is_first"])):
            inputs = {name: rows[f"{size}/{name}"][step] for name in about["inputs"] if name not in state}
            outputs = act({**inputs, **state})
            assert list(outputs) == about["outputs"], (list(outputs), about["outputs"])
            state = {name: outputs["next_" + name] for name in state}
            answers[f"{size}/{step}"] = outputs["action"]
    np.savez(path + ".answers.npz", **answers)
assert not any(name.partition(".")[0] in ("rl_lab", "gymnasium") for name in sys.modules)
"""
)


def untrained(experiment: str, overrides: Iterable[str] = ()) -> Policy:
    """A policy with weights that no training made, none of them 0."""
    config = compose(experiment, ["runtime.device=cpu", *overrides])
    runtime, environment = build_runtime(config), build_environment(config, stream="play_environment", num_envs=1)
    environment.close()
    agent = build_agent(config, environment.spec, runtime=runtime)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for part in (*agent.components.values(), *agent.controllers.values()):
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return Policy(agent.workflow, environment.blueprint, device=runtime.device)


def write_rows(policy: Policy, path: Path) -> dict[str, np.ndarray]:
    """Observations for a file beside it, in batches of 1 and 3 with resets in mid-batch, and what the policy, asked row
    by row, answers to them."""
    arrays: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    for size, begins in BEGINS.items():
        is_first = np.zeros((STEPS, size), dtype=bool)
        for step, rows in begins.items():
            is_first[step, rows] = True
        drawn = draw_observations(policy.blueprint, STEPS * size, seed=size)
        arrays[f"{size}/is_first"] = is_first
        for leaf in policy.blueprint.observations.leaves:
            values = np.stack([np.asarray(pick(each, leaf.path)) for each in drawn]).astype(leaf.spec.dtype)
            arrays[f"{size}/{leaf.key}"] = values.reshape(STEPS, size, *leaf.source_shape)
        answers: list[list[Any]] = [[] for _ in range(STEPS)]
        for row in range(size):
            for step in range(STEPS):
                if is_first[step, row]:
                    policy.reset()
                answers[step].append(policy.act(drawn[step * size + row]))
        expected |= {f"{size}/{step}": np.stack(each) for step, each in enumerate(answers)}
    np.savez(f"{path}.rows.npz", **arrays)
    return expected


def play_without_rl_lab(paths: list[Path]) -> dict[Path, dict[str, np.ndarray]]:
    """What files answer to the rows beside them, in a process that cannot import rl_lab or gymnasium."""
    command = [sys.executable, "-I", "-c", PLAYER, *map(str, paths)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return {path: dict(np.load(f"{path}.answers.npz")) for path in paths}


def about_torch(path: Path) -> dict[str, Any]:
    files = {"policy.json": ""}
    torch.export.load(str(path), extra_files=files)
    return json.loads(files["policy.json"])
