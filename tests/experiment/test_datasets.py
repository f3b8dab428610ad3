"""From a policy to a dataset to a policy: collecting, learning from it alone, and what each of them refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab import api
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.cli.main import main
from rl_lab.config.compose import compose
from rl_lab.environments.factory import make_environment
from rl_lab.experiment import session
from rl_lab.experiment.build import build, check
from rl_lab.types import ConfigError, Phase, RunError
from rl_lab.workflows.q_learning import TabularQ
from tests.test_resume import assert_same_run, run_to_the_end

PHASES = "[{name: learn, type: offline, buffer: data, duration_updates: %d}]"
QUICK = ["evaluation.video=false", "evaluation.final_episodes=20", "logging.tensorboard=false"]


def offline(dataset: Path | str, *, updates: int, experiment: str = "q_learning_frozenlake") -> dict[str, Any]:
    """Tabular Q-learning on ice that is not slippery, from a dataset alone."""
    words = ["+environment.kwargs.is_slippery=false", "algorithm.learning_rate=0.5", "logging.every_steps=null"]
    config = compose(experiment, [*QUICK, *words, "logging.every_updates=4", f"training.phases={PHASES % updates}"])
    config["buffers"]["data"] = {
        "_target_": "rl_lab.buffers.offline.OfflineBuffer",
        "dataset": str(dataset),
        "batch_size": 32,
    }
    return config


def collect_ice(path: Path, **settings: Any) -> Any:
    return rl_lab.collect(
        "random",
        environment="FrozenLake-v1",
        overrides=["+environment.kwargs.is_slippery=false"],
        output=path,
        **{"steps": 3000, **settings},
    )


@pytest.fixture(scope="module")
def ice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "ice"
    collect_ice(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    words = ["preset=debug", "training.phases.train.collect_steps=16", "algorithm.epochs=1", *QUICK]
    return api.train("ppo_cartpole", overrides=words, runs_dir=tmp_path_factory.mktemp("runs"), run_id="a", quiet=True)


# --- collecting --------------------------------------------------------------------------------


def test_the_random_policy_is_described_and_repeatable(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    written = rl_lab.collect(
        "random",
        environment="CartPole-v1",
        steps=500,
        num_envs=3,
        seed=5,
        output=tmp_path / "a",
        progress=lambda done, total: seen.append((done, total)),
    )
    again = rl_lab.collect("random", environment="CartPole-v1", steps=500, num_envs=3, seed=5, output=tmp_path / "b")
    other = rl_lab.collect("random", environment="CartPole-v1", steps=500, num_envs=3, seed=6, output=tmp_path / "c")
    contents = [(tmp_path / name / "chunk_00000.npz").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]
    assert written.episode_return_mean == again.episode_return_mean != other.episode_return_mean
    assert seen[-1] == (500, 500)
    description = json.loads((tmp_path / "a" / "dataset.json").read_text())
    assert description["environment"]["id"] == "CartPole-v1"
    assert description["source"] == {
        "policy": "random",
        "run": None,
        "checkpoint": None,
        "config_hash": None,
        "mode": "train",
        "seed": 5,
        "num_envs": 3,
    }
    assert (description["rows"], description["agent_steps"]) == (written.rows, 500)
    assert written.rows == 500 + written.episodes + written.cut_episodes
    assert written.size_bytes == sum(file.stat().st_size for file in (tmp_path / "a").iterdir())


def test_a_runs_policy_is_recorded_in_the_runs_own_folder(trained: api.Run) -> None:
    written = rl_lab.collect(trained, episodes=3)
    assert written.path == trained.path / "episodes" and written.source == "a"
    description = json.loads((written.path / "dataset.json").read_text())
    manifest = trained.directory.read_manifest()
    assert description["source"]["config_hash"] == manifest["config_hash"]
    assert description["source"]["checkpoint"].startswith("step_")
    spec = make_environment(id="CartPole-v1").spec
    buffer = OfflineBuffer(spec=spec, dataset=str(trained.path), batch_size=4)
    assert buffer.num_rows == written.rows == written.agent_steps + 3


def test_without_exploration_a_policy_repeats_itself(trained: api.Run, tmp_path: Path) -> None:
    """The same observations get the same actions in eval mode, and sampled ones in train mode."""
    policy = rl_lab.load(trained)
    for mode, always in (("eval", True), ("train", False)):
        rl_lab.collect(trained, steps=300, mode=mode, output=tmp_path / mode)
        with np.load(tmp_path / mode / "chunk_00000.npz") as rows:
            decided = ~rows["is_last"]
            best = policy.act(rows["vector"][decided])
            assert bool((best == rows["action"][decided]).all()) == always


def test_exploration_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """A finished run's epsilon is at the end of its schedule, not at its beginning."""
    words = ["algorithm.epsilon='linear(1.0, 0.0)'", "training.phases.train.duration_steps=2000", *QUICK]
    run = api.train("q_learning_frozenlake", overrides=words, runs_dir=tmp_path / "runs", quiet=True)
    rl_lab.collect(run, steps=200, output=tmp_path / "data")
    with np.load(tmp_path / "data" / "chunk_00000.npz") as rows:
        action_of: dict[int, set[int]] = {}
        for state, action, is_last in zip(rows["discrete"], rows["action"], rows["is_last"], strict=True):
            if not is_last:
                action_of.setdefault(int(state), set()).add(int(action))
    assert all(len(actions) == 1 for actions in action_of.values())


@pytest.mark.parametrize("words", [["--output", "{}/data/ice"], ["--output", "ice-v0", "--format", "minari"]])
def test_a_killed_collection_leaves_nothing_under_the_name(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "minari" in words:
        pytest.importorskip("minari")
        pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "data"))
    command = ["collect", "random", "--env", "FrozenLake-v1", "--num-envs", "2"]
    command += [word.format(tmp_path) for word in words]
    killed = subprocess.Popen([sys.executable, "-m", "rl_lab", *command, "--steps", "1000000000"])
    try:
        while not list(tmp_path.glob("data/*partial*")):
            assert killed.poll() is None, "it ended before it was killed"
            time.sleep(0.02)
    finally:
        killed.kill()
        killed.wait()
    assert not list(tmp_path.glob("data/ice")) + list(tmp_path.glob("data/ice-v0"))
    assert main([*command, "--steps", "100", "-q"]) == 0
    assert list(tmp_path.glob("data/ice")) + list(tmp_path.glob("data/ice-v0"))


def test_minari_holds_what_the_environment_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py")
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    written = rl_lab.collect(
        "random", environment="Pendulum-v1", steps=450, num_envs=2, format="minari", output="pendulum/random-v0"
    )
    assert written.dataset == "minari:pendulum/random-v0" and written.size_bytes > 1000
    dataset = minari.load_dataset("pendulum/random-v0")
    assert (dataset.total_steps, dataset.total_episodes) == (450, 4)
    environment = dataset.recover_environment()
    assert environment.spec.id == "Pendulum-v1" and dataset.action_space == environment.action_space
    for episode in dataset.iterate_episodes():
        assert episode.observations.shape == (len(episode.rewards) + 1, 3)
        assert np.abs(episode.actions).max() > 1.0, "in the environment's own units, which reach to 2"
    spec = make_environment(id="Pendulum-v1").spec
    batch = OfflineBuffer(spec=spec, dataset=written.dataset, batch_size=500).sample()
    assert float(batch["action"].abs().max()) <= 1.0
    with pytest.raises(RunError, match="random-v0 exists already: write to another --output, or replace it with"):
        rl_lab.collect("random", environment="Pendulum-v1", steps=9, format="minari", output="pendulum/random-v0")
    words = ["environment.time_limit=50"]
    rl_lab.collect(*["random"], environment="Pendulum-v1", steps=9, format="minari", output="other-v0", overrides=words)
    assert minari.load_dataset("other-v0").env_spec is None, "Minari would recover one without the time limit"


def test_an_existing_place_is_refused_and_only_a_dataset_is_replaced(tmp_path: Path) -> None:
    collect_ice(tmp_path / "data", steps=10)
    with pytest.raises(
        RunError, match="data exists already: write to another --output, or replace it with --overwrite"
    ):
        collect_ice(tmp_path / "data", steps=20)
    assert collect_ice(tmp_path / "data", steps=20, overwrite=True).agent_steps == 20
    assert json.loads((tmp_path / "data" / "dataset.json").read_text())["agent_steps"] == 20
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="mine is no dataset, so --overwrite does not touch it"):
        collect_ice(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write .*file/data"):
        collect_ice(tmp_path / "file" / "data", steps=10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": None}, "The random policy needs an environment: write --env CartPole-v1."),
        ({"output": None}, "Say where the dataset goes: --output data/cartpole"),
        ({"steps": None}, "Say how much to collect: steps or episodes"),
        ({"episodes": 0, "steps": None}, "episodes is 0: write a whole number of at least 1."),
        ({"format": "csv"}, "format is 'csv': write npz or minari."),
        ({"mode": "test"}, "mode is 'test': write train or eval."),
        ({"seed": -1}, "seed is -1: write a whole number from 0 on."),
    ],
)
def test_what_random_collecting_refuses(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl_lab.collect("random", **{"environment": "CartPole-v1", "output": tmp_path / "d", "steps": 10, **settings})
    assert not (tmp_path / "d").exists()


def test_a_run_plays_in_its_own_environment(trained: api.Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was trained on CartPole-v1, so its policy cannot act in Acrobot-v1: leave"):
        rl_lab.collect(trained, environment="Acrobot-v1", steps=5, output=tmp_path / "d")
    with pytest.raises(
        ConfigError,
        match="environment.time_limit=5: a run's policy plays in the run's own environment; only random takes",
    ):
        rl_lab.collect(trained, steps=5, output=tmp_path / "d", overrides=["environment.time_limit=5"])


# --- learning from a dataset alone --------------------------------------------------------------


def test_a_policy_is_learnt_without_a_single_step(ice: Path, tmp_path: Path) -> None:
    run = session.start_run(offline(ice, updates=400), runs_dir=tmp_path, run_id="learnt", quiet=True)
    status = run.read_status()
    assert status["counts"]["agent_steps"] == 0 and status["counts"]["updates"] == 400
    assert status["final_score"] == 1.0, "every episode reaches the goal"


def test_an_offline_run_cut_twice_equals_the_uninterrupted_run(ice: Path, tmp_path: Path) -> None:
    config = offline(ice, updates=20)
    run_to_the_end(config, tmp_path / "whole", cuts=[])
    run_to_the_end(config, tmp_path / "cut", cuts=[3, 11])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_run_whose_dataset_changed_is_not_resumed(tmp_path: Path) -> None:
    collect_ice(tmp_path / "data", steps=200)
    config = offline(tmp_path / "data", updates=6)
    experiment = build(config, run=None, quiet=True)
    state = experiment.orchestrator.buffers["data"].get_state()
    experiment.close()
    collect_ice(tmp_path / "data", steps=200, seed=9, overwrite=True)
    experiment = build(config, run=None, quiet=True)
    with pytest.raises(ConfigError, match="data has changed since the checkpoint was taken"):
        experiment.orchestrator.buffers["data"].set_state(state)
    experiment.close()


def test_the_shipped_offline_experiment_builds_once_its_dataset_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose("dqn_cartpole_offline")
    with pytest.raises(ConfigError, match="There is no dataset at data/cartpole. Collect one with `rl-lab collect"):
        check(config)
    rl_lab.collect("random", environment="CartPole-v1", steps=300, output="data/cartpole")
    check(config)
    words = ["preset=debug", "runtime.device=cpu", *QUICK]
    run = api.train("dqn_cartpole_offline", overrides=words, quiet=True)
    assert run.status["counts"] == {"agent_steps": 0, "env_frames": 0, "episodes": 0, "updates": 3}


def test_a_dataset_of_another_environment_is_refused_before_training(ice: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="ice: the set of observation keys is discrete, but environment 'CartPole-v1'"
    ):
        api.train(
            "dqn_cartpole_offline", overrides=[f"buffers.replay.dataset={ice}"], runs_dir=tmp_path / "runs", quiet=True
        )
    assert not (tmp_path / "runs").exists(), "no run began"


@pytest.mark.parametrize(
    ("experiment", "phases", "message"),
    [
        (
            "q_learning_frozenlake",
            "[{name: play, buffer: data, collect_steps: 4, duration_cycles: 1}]",
            "Phase 'play' collects into buffer 'data', which holds a dataset and takes no new rows: name another",
        ),
        (
            "ppo_cartpole",
            "[{name: learn, type: offline, buffer: data, duration_updates: 1}]",
            "Phase 'learn' learns from the dataset in buffer 'data', but PPO learns only from its own actions: use an",
        ),
    ],
)
def test_phases_that_a_dataset_does_not_serve_are_refused(
    ice: Path, tmp_path: Path, experiment: str, phases: str, message: str
) -> None:
    config = compose(experiment, [f"training.phases={phases}"])
    if experiment == "ppo_cartpole":
        rl_lab.collect("random", environment="CartPole-v1", steps=50, output=tmp_path / "data")
    dataset = tmp_path / "data" if experiment == "ppo_cartpole" else ice
    config["buffers"]["data"] = {"_target_": "rl_lab.buffers.offline.OfflineBuffer", "dataset": str(dataset)}
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_any_row_of_a_dataset_may_teach(ice: Path) -> None:
    """A batch of two-row sequences is what a one-step learner takes: every entry it names moves."""
    experiment = build(offline(ice, updates=1), run=None, quiet=True)
    try:
        workflow = experiment.agent.workflow
        assert isinstance(workflow, TabularQ)
        before = workflow.table.values.clone()
        batch = experiment.orchestrator.buffers["data"].sample()
        batch["reward"] = torch.ones_like(batch["reward"])
        workflow.update_controller(batch, phase=Phase("learn"))
        moved = {tuple(place) for place in (workflow.table.values != before).nonzero().tolist()}
        named = zip(batch["discrete"][:, 0].tolist(), batch["action"][:, 0].tolist(), strict=True)
        assert moved == set(named)
    finally:
        experiment.close()
