"""What the pages and the examples folder show, run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from docs_pages import ROOT, blocks

import rl_lab
from rl_lab.config.compose import compose
from rl_lab.kernels import door
from rl_lab.types import ConfigError
from tests.test_resume import COMMON, assert_same_run, run_to_the_end
from tests.tiny_diffusion import write_detour

EXAMPLES = ROOT / "examples"
MY_ALGORITHM = EXAMPLES / "my_algorithm"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; what imports add to the search path is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and plugins look it up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page trains is over in a moment."""
    train, evaluate = rl_lab.train, rl_lab.evaluate

    def train_quickly(*arguments: Any, overrides: Any = (), **settings: Any) -> rl_lab.Run:
        short = ["preset=debug", "training.phases.train.collect_steps=16", "logging.tensorboard=false"]
        short += ["evaluation.video=false", "evaluation.num_envs=2", "algorithm.epochs=1"]
        return train(*arguments, overrides=[*short, *overrides], **{**settings, "quiet": True})

    monkeypatch.setattr(rl_lab, "train", train_quickly, raising=False)
    monkeypatch.setattr(rl_lab, "evaluate", lambda run, **settings: evaluate(run, **{**settings, "episodes": 2}))


def test_the_python_of_the_readme_runs(here: Path, quick: None) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    run = names["run"]
    assert run.status["state"] == "finished"
    assert (names["columns"]["updates"] > 0).all()
    left_behind = {entry.name for entry in run.path.iterdir()}
    assert {"config.yaml", "overrides.yaml", "manifest.json", "status.json"} <= left_behind
    assert {"metrics.jsonl", "report.md", "learning_curve.png", "checkpoints"} <= left_behind


def test_every_block_of_the_python_page_runs(here: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for number, code in enumerate(blocks(ROOT / "docs" / "from_python.md", "python")):
        exec(compile(code, f"from_python.md, block {number}", "exec"), names)
    assert (here / "losses.png").is_file()
    assert "<Run " in capsys.readouterr().out
    assert names["observations"].shape == (4, 4)


def test_the_example_with_a_callback_stops_once_it_is_solved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module_at(EXAMPLES / "callbacks.py").main(seed=1) == pytest.approx(0.5)
    told = capsys.readouterr().out
    assert ": stopped, " in told and "one episode: 0.5" in told


def test_the_worked_advantages_are_what_the_code_computes() -> None:
    (code,) = blocks(ROOT / "docs" / "time_steps.md", "python")
    exec(compile(code, "time_steps.md", "exec"), {})


def test_the_script_without_yaml_trains(capsys: pytest.CaptureFixture[str]) -> None:
    score = module_at(EXAMPLES / "ppo_cartpole.py").main(["--steps", "4096"])
    assert score > 5.0
    assert "deterministic evaluation" in capsys.readouterr().out


def test_a_component_of_ones_own_is_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "custom_component", raising=False)
    run = module_at(EXAMPLES / "custom_component.py").main(["preset=debug", "logging.terminal=quiet"])
    assert run.config["controllers"]["critic"]["members"] == 3
    critic = rl_lab.load(run).workflow.critic
    assert type(critic).__name__ == "EnsembleCritic" and len(critic.members) == 3


def test_the_algorithm_page_shows_the_file_that_runs() -> None:
    page = ROOT / "docs" / "add_an_algorithm.md"
    files = {name: (MY_ALGORITHM / f"{name}.py").read_text() for name in ("actor_critic", "soft_q")}
    assert blocks(page, "python")[:2] == list(files.values())
    assert blocks(page, "yaml") == [(MY_ALGORITHM / f"configs/algorithm/{name}.yaml").read_text() for name in files]
    assert [len(code.splitlines()) <= most for code, most in zip(files.values(), (80, 110), strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("algorithm", ["actor_critic", "soft_q"])
def test_an_algorithm_of_ones_own_trains_and_loads(algorithm: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MY_ALGORITHM)
    run = rl_lab.train(f"CartPole-v1:{algorithm}", preset="debug", runs_dir=here / "runs", quiet=True)
    assert run.status["counts"]["updates"] == 3
    assert rl_lab.load(run).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_an_algorithm_of_ones_own_is_refused_where_it_is_not_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "actor_critic", raising=False)
    with pytest.raises(ConfigError, match="plugins names 'actor_critic', which Python does not find"):
        rl_lab.train("CartPole-v1:actor_critic", config_dir=MY_ALGORITHM / "configs", quiet=True)


@pytest.mark.slow
def test_an_algorithm_of_ones_own_learns(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MY_ALGORITHM)
    settings = {"environment__num_envs": 32, "evaluation__video": False, "quiet": True}
    run = rl_lab.train("CartPole-v1:actor_critic", runs_dir=here / "runs", **settings)
    assert run.status["final_score"] > 150.0


def test_an_off_policy_algorithm_of_ones_own_learns_in_seconds(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MY_ALGORITHM)
    overrides = ["training.phases.train.duration_steps=6000", "buffers.replay.batch_size=64"]
    overrides += ["algorithm.temperature='linear(1.0, 0.02, over=3000 agent_steps)'", "evaluation.video=false"]
    run = rl_lab.train("CartPole-v1:soft_q", overrides=overrides, runs_dir=here / "runs", quiet=True)
    assert run.status["final_score"] > 80.0  # random play: about 20


@pytest.mark.parametrize("algorithm", ["actor_critic", "soft_q"])
def test_an_algorithm_of_ones_own_resumes_exactly(algorithm: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MY_ALGORITHM)
    small = ["buffers.replay.minimum_rows=64", "buffers.replay.capacity_rows=160", "logging.every_updates=1"]
    small += ["training.phases.train.collect_steps=8", "training.phases.train.updates_per_step=0.04"]
    small = small if algorithm == "soft_q" else []
    length = ["training.phases.train.duration_steps=null", "training.phases.train.duration_updates=7"]
    config = compose(f"CartPole-v1:{algorithm}", [*COMMON, *small, *length, "environment.num_envs=4"])
    run_to_the_end(config, here / "whole", cuts=[])
    run_to_the_end(config, here / "cut", cuts=[1, 4, 5])
    assert_same_run(here / "cut", here / "whole")


@pytest.mark.parametrize("temperature", [0.0, "linear(1.0, 0)"])
def test_a_temperature_of_zero_is_refused(
    temperature: float | str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MY_ALGORITHM)
    with pytest.raises(ConfigError, match="algorithm.temperature divides, so it may not be 0: write numbers above 0"):
        rl_lab.train("CartPole-v1:soft_q", algorithm__temperature=temperature, runs_dir=here / "runs", quiet=True)


def test_a_faster_version_of_ones_own_formula_steps_aside_when_it_is_edited(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the page, as a user would save it; then with one number changed."""
    code = blocks(ROOT / "docs" / "add_an_algorithm.md", "python")[2]
    heard: list[str] = []
    monkeypatch.syspath_prepend(str(here))
    value, target = torch.tensor([0.0, 3.0], requires_grad=True), torch.tensor([0.5, 0.0])
    for text, is_used in ((code, True), (code.replace("size - 0.5", "size - 0.25"), False)):
        (here / "my_loss.py").write_text(text)
        module = module_at(here / "my_loss.py")
        door.listen(lambda sentence, level: heard.append(sentence))
        assert module.huber(value, target).allclose(module.huber.plain(value, target))
        assert torch.autograd.grad(module.huber(value, target), value)[0].allclose(torch.tensor([-0.25, 0.5]))
        assert ("my_loss:FUSED_HUBER" in door.in_use()) is is_used
    assert heard[0] == "my_loss:FUSED_HUBER is used for huber (runtime.fast_paths)."
    assert "my_loss.huber is not the formula that the fast path my_loss:FUSED_HUBER was tested against" in heard[-1]
    door.open_door(True)
    door._door.edited.clear()


def test_the_picture_is_drawn_from_a_run_and_needs_no_other_host(here: Path) -> None:
    drawing = module_at(ROOT / "docs" / "images" / "make_live_picture.py")
    drawing.draw(here / "live.svg", ["preset=debug"])
    picture = (here / "live.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg") and "ppo_cartpole" in picture and "episode" in picture and "█" in picture
    assert "font-face" not in picture and "cdnjs" not in picture


def test_walks_around_the_block_are_drawn(here: Path) -> None:
    drawing = module_at(ROOT / "docs" / "images" / "make_detour_picture.py")
    write_detour(here / "detour.npz")
    walks = drawing.demonstrated(here / "detour.npz")
    assert len(walks) == 20 and all(-1.0 <= walk[0, 1] <= -0.8 and walk[-1, 1] >= 0.9 for walk in walks)
    drawing.draw({"left": walks, "right": walks}, here / "detour.png")
    assert (here / "detour.png").read_bytes().startswith(b"\x89PNG")


def test_learning_curves_are_drawn_beside_the_published_ones(here: Path) -> None:
    drawing = module_at(ROOT / "docs" / "images" / "make_learning_picture.py")
    drawing.draw(here / "learning.svg")
    drawn = (here / "learning.svg").read_text()
    for (task, observation), curves in drawing.read(drawing.POINTS).items():
        assert f"{task}, {observation}" in drawn
        assert "published" in curves and all(who in drawn for who in curves)
        told = (ROOT / "docs" / "results.md").read_text()
        ours = [points for who, points in curves.items() if who != "published"]
        assert all(f"{returns:.0f}" in told for points in ours for _, returns, _ in points)


def test_the_walkers_experiment_is_the_one_that_was_measured() -> None:
    told = (ROOT / "docs" / "results.md").read_text()
    row = next(line for line in told.splitlines() if line.startswith("| **0.25** |"))
    ratio, rate, entropy, discount = (cell.strip(" *") for cell in row.split("|")[1:5])
    config = compose("dreamer_v3_walker_walk")
    assert config["training"]["phases"][-1]["updates_per_step"] == float(ratio)
    assert config["optimizers"]["agent"]["learning_rate"] == f"constant({rate}, warmup=1000 updates)"
    assert config["algorithm"]["loss_scales"]["entropy"] == float(entropy)
    assert config["algorithm"]["discount"] == float(discount)
    assert (config["environment"]["num_envs"], config["environment"]["action_repeat"]) == (4, 2)
