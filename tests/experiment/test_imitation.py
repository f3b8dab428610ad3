"""Demonstrations to policies, through whole runs: training, play, films, export, collecting, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.cli.main import main
from rl_lab.types import ConfigError
from tests.tiny_diffusion import TINY_DIFFUSION, write_detour

SMALL = [
    "training.phases.train.duration_updates=6",
    "evaluation.final_episodes=2",
    "evaluation.num_envs=2",
    "evaluation.every_steps=null",
    "evaluation.video=false",
    "logging.tensorboard=false",
    "logging.every_updates=2",
    "runtime.device=cpu",
]


def train(folder: Path, run_id: str, experiment: str, *overrides: str, shows: str = "state") -> Any:
    path = write_detour(folder / f"{shows}.npz", shows=shows)
    seen = [f"+environment.kwargs.shows={shows}"] if shows != "state" else []
    return rl_lab.train(
        f"rl_lab/Detour-v0:{experiment}",
        overrides=[*SMALL, path, *seen, *overrides],
        run_id=run_id,
        runs_dir=folder / "runs",
        quiet=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imitation")
    train(folder, "state", "diffusion_policy", *TINY_DIFFUSION, "evaluation.dream_every_updates=3")
    train(folder, "cloned", "bc", "controllers.actor.hidden_sizes=[16]")
    return folder


@pytest.mark.parametrize("shows", ["image", "both"])
def test_images_are_learnt_from(folder: Path, shows: str) -> None:
    run = train(
        folder, shows, "diffusion_policy", *TINY_DIFFUSION, "components.encoder.image_network=small", shows=shows
    )
    assert run.status["counts"]["updates"] == 6
    policy = rl_lab.load(folder / "runs" / shows)
    env = policy.environment()
    observation, _ = env.reset(seed=0)
    assert env.action_space.contains(policy.act(observation))


def test_a_loaded_policy_follows_its_plan(folder: Path) -> None:
    """Four actions of a plan, then four of the next; `reset` forgets it."""
    policy = rl_lab.load(folder / "runs" / "state")
    torch.manual_seed(0)
    observation = np.array([0.0, -0.9], np.float32)
    actions = [policy.act(observation) for _ in range(5)]
    plan = policy._state["plan"].clone()
    assert policy._state["next"].tolist() == [2]
    assert np.allclose(actions[4], plan[0, 1].numpy(), atol=1e-6)
    policy.act(observation)
    assert torch.equal(policy._state["plan"], plan)
    policy.reset()
    policy.act(observation)
    assert not torch.equal(policy._state["plan"], plan)


def test_plans_are_filmed_while_a_run_learns_and_on_demand(folder: Path) -> None:
    videos = folder / "runs" / "state" / "videos"
    made = [f"dream_update_{updates:012d}.{kind}" for updates in (3, 6) for kind in ("mp4", "png")]
    assert sorted(path.name for path in videos.iterdir()) == sorted(made)
    output = folder / "plans.mp4"
    words = [
        "dream",
        str(folder / "runs" / "state"),
        "--horizon",
        "6",
        "--sequences",
        "2",
        "--output",
        str(output),
        "-q",
    ]
    assert main(words) == 0
    assert output.stat().st_size > 1000 and output.with_suffix(".png").is_file()


def test_a_run_that_is_filmed_learns_as_if_nobody_watched(folder: Path) -> None:
    unseen = train(folder, "unseen", "diffusion_policy", *TINY_DIFFUSION)

    def learnt(path: Path) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        clock = ("wall_s", "time/", "system/")
        return [{key: value for key, value in row.items() if not key.startswith(clock)} for row in rows]

    assert learnt(unseen.path) == learnt(folder / "runs" / "state")


def test_a_cloned_policy_can_be_exported_and_a_diffusion_policy_says_why_not(folder: Path) -> None:
    written = rl_lab.load(folder / "runs" / "cloned").export(folder / "cloned.pt2")
    assert written.agreement.largest_difference < 1e-5
    with pytest.raises(ConfigError, match="DiffusionPolicy cannot be written to a file: every plan begins with noise"):
        rl_lab.load(folder / "runs" / "state").export(folder / "state.pt2")


def test_its_own_policy_collects_in_mid_plan(folder: Path) -> None:
    """Rows come 16 at a time, plans are of 4 actions: what `collect` keeps between two of them includes the plan."""
    settings = {"steps": 40, "num_envs": 1, "runs_dir": folder / "runs"}
    written = rl_lab.collect("state", output=folder / "a", **settings)
    again = rl_lab.collect("state", output=folder / "b", **settings)
    files = sorted(written.path.glob("*.npz"))
    assert written.agent_steps == 40 and files
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in sorted(again.path.glob("*.npz"))]


@pytest.mark.parametrize(
    ("experiment", "overrides", "message"),
    [
        (
            "diffusion_policy",
            ["+environment.kwargs.shows=both"],
            "observation keys is .*, but environment .* has image, vector",
        ),
        ("diffusion_policy", ["environment.id=CartPole-v1"], "are discrete: write `algorithm=bc`|keys|shape|action"),
        (
            "diffusion_policy",
            ["buffers.demonstrations.path=nowhere.npz"],
            "no demonstrations at nowhere.npz. Record a policy that solves rl_lab/Detour-v0 with `rl-lab collect RUN "
            "--mode eval --output DATA`, and set buffers.demonstrations.path=DATA; it may",
        ),
        (
            "diffusion_policy",
            ["buffers.demonstrations.prediction_steps=12"],
            "prediction_steps is 16, but buffer .* gives 12",
        ),
        ("bc", ["environment.id=Pendulum-v1"], "Dataset .*: .* is .*, but environment 'Pendulum-v1' has|has shape"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door(
    folder: Path, experiment: str, overrides: list[str], message: str
) -> None:
    path = write_detour(folder / "state.npz")
    with pytest.raises(ConfigError, match=message):
        rl_lab.train(
            f"rl_lab/Detour-v0:{experiment}",
            overrides=[*SMALL, path, *overrides],
            runs_dir=folder / "refused",
            quiet=True,
        )
