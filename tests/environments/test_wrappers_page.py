"""Every example of docs/wrappers.md runs, follows its spec, and resumes exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rl_lab.environments import make_environment
from rl_lab.environments.wrappers import WRAPPERS
from rl_lab.utils import tree

from .helpers import as_tree, play, random_actions

PAGE = (Path(__file__).parents[2] / "docs" / "wrappers.md").read_text()
EXAMPLES: list[dict[str, Any]] = [
    document["environment"]
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    for document in yaml.safe_load_all(block)
]
NAMES = [f"{example['id']}:{'+'.join(entry['id'] for entry in example['wrappers'])}" for example in EXAMPLES]


def test_there_is_an_example_of_every_wrapper() -> None:
    shown = {entry["id"] for example in EXAMPLES for entry in example["wrappers"]}
    ours = {name for name, wrapper in WRAPPERS.items() if wrapper.__module__.startswith("rl_lab.environments.")}
    assert ours <= shown


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_an_example_follows_its_spec_and_resumes_exactly(example: dict[str, Any]) -> None:
    """Cut in the middle of an episode and at its end; the state that a wrapper keeps goes on with the environment."""
    if example["id"].startswith("MiniGrid"):
        pytest.importorskip("minigrid")
    settings = {**example, "num_envs": 2, "vectorization": "sync"}
    environment = make_environment(**settings)
    rows = play(environment, steps=23, seed=0)
    for key, spec in environment.spec.observation.items():
        assert rows[-1].observation[key].shape == (2, *spec.shape) and rows[-1].observation[key].dtype == spec.dtype
    labels, sizes = environment.spec.action.labels, environment.spec.action.sizes
    assert len(labels) in (0, sizes[0], len(sizes))
    resumed = make_environment(**settings)
    resumed.set_state(environment.get_state())
    generator = np.random.default_rng(1)
    for _ in range(12):
        action = random_actions(environment, generator)
        assert tree.equal(vars(environment.step(action)), vars(resumed.step(action)))
    assert tree.equal(environment.get_state(), resumed.get_state())


def test_wrappers_apply_in_their_order_in_worker_processes_too() -> None:
    """Scaling before clipping is not clipping before scaling."""
    scale, clip = {"id": "scale_reward", "scale": 0.1}, {"id": "clip_reward"}
    rewards = []
    for wrappers in ([scale, clip], [clip, scale]):
        ways = [
            make_environment(id="Pendulum-v1", num_envs=2, wrappers=wrappers, vectorization=way)
            for way in ("sync", "async")
        ]
        rows = [play(environment, steps=5, seed=0) for environment in ways]
        ways[1].close()
        assert tree.equal(as_tree(rows[0]), as_tree(rows[1]))
        rewards.append(np.stack([row.reward for row in rows[0]]))
    assert rewards[0].min() >= -1 and (rewards[0] < -0.11).any() and rewards[1].min() >= -0.1001
