"""The example of docs/add_a_hook.md: a discriminator beside PPO, outside the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_pages import ROOT, blocks

import rl_lab
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.metrics.logger import STRICT_NAMES_VARIABLE
from rl_lab.types import ConfigError, Phase
from tests.test_resume import COMMON, assert_same_run, run_to_the_end

GAIL = ROOT / "examples" / "gail"
PHASE = Phase(name="train")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations as `rl-lab collect` writes them; of somebody who knows nothing."""
    path = tmp_path_factory.mktemp("data") / "demonstrations"
    rl_lab.collect("random", env="CartPole-v1", steps=400, output=path)
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path, str(GAIL)])
    monkeypatch.delenv(STRICT_NAMES_VARIABLE, raising=False)  # a user's metrics are in no table of ours
    monkeypatch.chdir(GAIL)
    return tmp_path


def words(dataset: Path, *more: str) -> list[str]:
    return [f"components.demonstrations.dataset={dataset}", "environment.num_envs=4", *more]


def test_the_page_shows_the_files_that_run() -> None:
    page = ROOT / "docs" / "add_a_hook.md"
    assert blocks(page, "python") == [(GAIL / "gail.py").read_text()]
    assert blocks(page, "yaml") == [(GAIL / "configs/algorithm/gail.yaml").read_text()]
    assert len((GAIL / "gail.py").read_text().splitlines()) <= 120


def test_each_hook_changes_its_own_parts_and_the_reward_is_the_discriminators(dataset: Path) -> None:
    trained = build(compose("CartPole-v1:gail", words(dataset)), run=None, quiet=True)
    workflow: Any = trained.agent.workflow
    parts = {"discriminator": workflow.discriminator, "actor": workflow.actor, "critic": workflow.critic}

    def changed(hook: str, batch: dict[str, torch.Tensor]) -> set[str]:
        before = {name: [each.detach().clone() for each in part.parameters()] for name, part in parts.items()}
        getattr(workflow, hook)(batch, phase=PHASE)
        return {
            name
            for name, part in parts.items()
            if any(not torch.equal(a, b) for a, b in zip(before[name], part.parameters(), strict=True))
        }

    batch = {
        "vector": torch.randn(4, 9, 4),
        "action": torch.randint(0, 2, (4, 9)),
        "reward": torch.full((4, 9), 7.0),
        **{key: torch.zeros(4, 9, dtype=torch.bool) for key in ("is_first", "is_last", "is_terminal")},
    }
    batch["is_last"][0, 3] = batch["is_terminal"][0, 3] = batch["is_first"][0, 4] = True
    assert changed("update_discriminator", batch) == {"discriminator"}
    rows = {key: batch[key][:, :-1] for key in ("vector", "action")}
    probability = torch.sigmoid(workflow.discriminator(rows["vector"], rows["action"])).detach()
    expected = torch.where(batch["is_last"][:, :-1], 0.0, -torch.log(1.0 - probability))
    torch.testing.assert_close(batch["reward"][:, 1:], expected)
    assert changed("update_controller", batch) == {"actor", "critic"}
    batch["is_last"] = torch.ones(4, 9, dtype=torch.bool)  # every row ended an episode: no mean of nothing
    for hook in ("update_discriminator", "update_controller"):
        assert getattr(workflow, hook)(batch, phase=PHASE) == {}
    assert all(torch.isfinite(each).all() for part in parts.values() for each in part.parameters())
    trained.close()


def test_it_trains_loads_and_names_its_metrics(dataset: Path, here: Path) -> None:
    run = rl_lab.train("CartPole-v1:gail", overrides=words(dataset), preset="debug", runs_dir=here / "runs", quiet=True)
    assert run.status["counts"]["updates"] == 3
    row = (run.path / "metrics.jsonl").read_text()
    assert "loss/discriminator" in row and "train/discriminator_grad_norm" in row and "loss/policy" in row
    assert rl_lab.load(run).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_it_resumes_exactly(dataset: Path, here: Path) -> None:
    length = ["training.phases.train.duration_steps=null", "training.phases.train.duration_updates=6"]
    config = compose("CartPole-v1:gail", [*COMMON, *words(dataset), *length])
    run_to_the_end(config, here / "whole", cuts=[])
    run_to_the_end(config, here / "cut", cuts=[1, 3, 4])
    assert_same_run(here / "cut", here / "whole")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["algorithm.discriminator_steps=0"], "algorithm.discriminator_steps is 0: write a whole number from 1 on"),
        (["environment.id=Acrobot-v1"], "vector"),
        (["algorithm.clip_rang=0.1"], "clip_range"),
    ],
)
def test_what_cannot_be_is_refused(more: list[str], message: str, dataset: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build(compose("CartPole-v1:gail", words(dataset, *more)), run=None, quiet=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_demonstrations_teach_cartpole_without_its_reward(here: Path) -> None:
    expert = rl_lab.train(
        "ppo_cartpole", overrides=["evaluation.video=false"], runs_dir=here / "runs", run_id="expert", quiet=True
    )
    rl_lab.collect(expert.path, episodes=10, mode="eval", output=here / "expert")
    run = rl_lab.train(
        "CartPole-v1:gail",
        overrides=[f"components.demonstrations.dataset={here / 'expert'}", "evaluation.video=false"],
        runs_dir=here / "runs",
        quiet=True,
    )
    assert run.status["final_score"] > 450.0
