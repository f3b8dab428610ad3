"""Interrupted equals uninterrupted, bit for bit: every metrics row and every saved number.

Two kinds of cut: inside one process at chosen cycles (many, quick), and kill -9 of a real training process at a
random instant, as an out-of-memory killer or a power cut would do it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rl_lab import api
from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.compose import compose
from rl_lab.experiment import film, session
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.identical import reproducible
from rl_lab.metrics.names import is_wall_clock
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.runs import report
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.index import RunIndex
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.utils.tree import equal
from tests.fault_injection import killed_at, operations_of
from tests.tiny_diffusion import TINY_DIFFUSION, with_detour
from tests.tiny_dreamer import TINY_DREAMER
from tests.tiny_planet import TINY_PLANET
from tests.tiny_tdmpc import TINY_TDMPC
from tests.tiny_tdmpc2 import TINY_TDMPC2
from tests.tiny_world_models import TINY_WORLD_MODELS

COMMON = [
    "training.checkpoint.every_updates=2",
    "training.checkpoint.every_minutes=null",
    "evaluation.every_updates=4",
    "evaluation.episodes=2",
    "evaluation.final_episodes=2",
    "evaluation.num_envs=2",
    "evaluation.timeout_steps=50",
    "evaluation.video=false",
    "logging.tensorboard=false",
]
SMALL_PPO = ["algorithm.epochs=2", "algorithm.minibatch_size=32", "training.phases.train.collect_steps=16"]
SMALL_DQN = [
    "environment.num_envs=4",
    "buffers.replay.capacity_rows=160",
    "buffers.replay.minimum_rows=64",
    "buffers.replay.batch_size=16",
    "algorithm.target_every=3",
    "algorithm.epsilon='linear(1.0, 0.1)'",
    "training.phases.train.collect_steps=8",
    "training.phases.train.updates_per_step=0.04",  # 1.28 passes per cycle: the rest must survive a resume
    "logging.every_updates=1",
]
SMALL_SAC = [
    "environment.num_envs=4",
    "buffers.replay.capacity_rows=120",
    "buffers.replay.batch_size=16",
    "training.phases.prefill.duration_steps=24",
    "training.phases.train.collect_steps=4",
    "training.phases.train.updates_per_step=0.08",  # 1.28 passes per cycle: the rest must survive a resume
    "logging.every_updates=1",
]
SMALL_DREAMER = [
    *TINY_DREAMER,
    "environment.num_envs=4",
    "buffers.replay.capacity_rows=200",  # the ring comes round, and states are written back into old rows
    "buffers.replay.batch_size=4",
    "buffers.replay.sequence_length=9",
    "training.phases.prefill.duration_steps=40",
    "training.phases.train.collect_steps=8",
    "training.phases.train.updates_per_step=0.04",
    "logging.every_updates=1",
]
SMALL_TDMPC2 = [
    *TINY_TDMPC2,
    "training.phases.pretrain.duration_updates=2",
    *SMALL_SAC,
]
FEW_PLANS = [f"controllers.planner.{word}" for word in ("candidates=16", "best=4", "iterations=2")]
SMALL_PLANET = [*TINY_PLANET, *SMALL_DREAMER[len(TINY_DREAMER) :]]
SMALL_IMITATION = [*with_detour(), "logging.every_updates=1"]
CASES = {
    "ppo discrete, native": ["ppo_cartpole", "environment.num_envs=4", *SMALL_PPO],
    "ppo discrete, sync": ["ppo_cartpole", "environment.num_envs=4", "environment.vectorization=sync", *SMALL_PPO],
    "ppo discrete, async": ["ppo_cartpole", "environment.num_envs=4", "environment.vectorization=async", *SMALL_PPO],
    "ppo continuous with normalisation": ["ppo_pendulum", "environment.num_envs=4", *SMALL_PPO],
    "ppo with memory": ["ppo_recall", "environment.num_envs=4", *SMALL_PPO],
    "ppo with lstm and schedules": [
        "ppo_recall",
        "memory=lstm",
        "environment.num_envs=4",
        "optimizers.controller.learning_rate='linear(1e-3, 0)'",
        "algorithm.clip_range='linear(0.2, 0)'",
        *SMALL_PPO,
    ],
    "reinforce": ["reinforce_cartpole", "environment.num_envs=4", "buffers.episodes.episodes_per_batch=4"],
    "dqn": ["dqn_cartpole", "q_values=expected", *SMALL_DQN],
    "dqn with a distribution of returns": ["dqn_cartpole", *SMALL_DQN],
    "dqn with every switch, prioritised": ["dqn_cartpole_rainbow", *SMALL_DQN],
    "sac continuous, policy delayed": ["sac_pendulum", "algorithm.policy_every=2", *SMALL_SAC],
    "sac prioritised with normalisation": [
        "sac_pendulum",
        "replay=prioritized",
        "algorithm.n_step=2",
        "components.observation_normalizer.mode=rolling",
        *SMALL_SAC,
    ],
    "sac discrete from pixels": ["sac_pixels", *SMALL_SAC],
    "dreamer from states": ["dreamer_v3_cartpole", *SMALL_DREAMER],
    "dreamer that plans to explore": ["rl_lab/Maze-v0:dreamer", "exploration=plan2explore", *SMALL_DREAMER],
    "dreamer with uniform actions": ["dreamer_v3_cartpole", "exploration=epsilon", *SMALL_DREAMER],
    "dreamer from pixels": ["rl_lab/PixelCatch-v0:dreamer", *SMALL_DREAMER],
    "dreamer under action masks": ["rl_lab/MaskedChain-v0:dreamer", *SMALL_DREAMER],
    "planet": ["planet_pendulum", *SMALL_PLANET],
    "planet with mppi, whose plans go on": ["planet_pendulum", "planner=mppi", *SMALL_PLANET],
    "dreamer with mppi": ["dreamer_v3_pendulum", "planner=mppi", *FEW_PLANS, *SMALL_DREAMER],
    "tdmpc2": ["rl_lab/PointMass-v0:tdmpc2", *SMALL_TDMPC2],
    "diffusion policy": ["rl_lab/Detour-v0:diffusion_policy", "sampler=ddim", *TINY_DIFFUSION, *SMALL_IMITATION],
    "diffusion policy that draws at every level": [
        *("rl_lab/Detour-v0:diffusion_policy", "sampler=ddpm", *TINY_DIFFUSION, *SMALL_IMITATION),
    ],
    "behaviour cloning": ["rl_lab/Detour-v0:bc", "actor=mixture", *SMALL_IMITATION],
    "tdmpc, prioritised, plans growing": [
        *("rl_lab/PointMass-v0:tdmpc", *TINY_TDMPC, *SMALL_TDMPC2[len(TINY_TDMPC2) :]),
        "algorithm.plan_horizon='linear(1, 5, over=60 agent_steps)'",
    ],
    "tdmpc2 with several tasks": [
        "tdmpc2_tasks",
        *(word for word in SMALL_TDMPC2 if "continue_head" not in word),
        "environment.vectorization=sync",
    ],
    "world_models": ["world_models_follow_real", *TINY_WORLD_MODELS],
    "world_models in the dream": ["world_models_follow", *TINY_WORLD_MODELS],
    "random": ["random_cartpole", "logging.every_steps=100", "training.phases.play.collect_steps=16"],
}


def overrides_of(case: str, *, updates: int) -> tuple[str, list[str]]:
    experiment, *own = CASES[case]
    phase, unit = ("play", "cycles") if experiment == "random_cartpole" else ("train", "updates")
    length = [f"training.phases.{phase}.duration_steps=null", f"training.phases.{phase}.duration_{unit}={updates}"]
    return experiment, [*COMMON, *own, *length]


def reproducible_rows(run_path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not is_wall_clock(name)} for row in rows]


def reproducible_state(run_path: Path) -> dict[str, Any]:
    return reproducible(CheckpointStore(run_path / "checkpoints").load("latest"))


def assert_same_run(cut: Path, whole: Path) -> None:
    assert reproducible_rows(cut) == reproducible_rows(whole)
    cut_state, whole_state = reproducible_state(cut), reproducible_state(whole)
    assert cut_state.keys() == whole_state.keys()
    for section in whole_state:
        assert equal(cut_state[section], whole_state[section]), f"section '{section}' differs"


# --- cuts at chosen cycles, in one process ---


def run_to_the_end(config: dict[str, Any], path: Path, *, cuts: list[int]) -> None:
    """Train in `path`, interrupted after each cycle in `cuts` and continued by a newly built experiment."""
    run = RunDirectory.create(path.parent, run_id=path.name, name="test", seed=0)
    checked: Callable[[], bool]
    for attempt in range(len(cuts) + 1):
        stop_at = cuts[attempt] if attempt < len(cuts) else None
        experiment: Experiment
        checked = lambda: stop_at is not None and experiment.orchestrator.scheduler.cycles >= stop_at  # noqa: B023, E731
        experiment = build(config, run=run, quiet=True, interrupted=checked)
        try:
            if attempt > 0:
                found = CheckpointStore(run.checkpoints_dir).load_newest_valid(lambda sentence: None)
                assert found is not None
                experiment.restore(found)
            outcome = experiment.orchestrator.run()
            assert outcome == ("finished" if stop_at is None else "interrupted")
        finally:
            experiment.close()


@pytest.mark.parametrize("case", CASES)
def test_a_run_cut_at_several_cycles_equals_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    experiment, overrides = overrides_of(case, updates=7)
    config = compose(experiment, overrides)
    run_to_the_end(config, tmp_path / "whole", cuts=[])
    run_to_the_end(config, tmp_path / "cut", cuts=[1, 4, 5])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_checkpoint_between_two_log_rows_keeps_the_unwritten_window(tmp_path: Path) -> None:
    experiment, overrides = overrides_of("ppo discrete, native", updates=9)
    config = compose(experiment, [*overrides, "logging.every_updates=4", "evaluation.every_updates=null"])
    run_to_the_end(config, tmp_path / "whole", cuts=[])
    run_to_the_end(config, tmp_path / "cut", cuts=[3, 6])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_curriculum_cut_in_every_phase_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    experiment, overrides = overrides_of("ppo discrete, sync", updates=3)
    config = compose(experiment, overrides)
    prefill = {
        "name": "prefill",
        "controller": "random",
        "workflow_hooks": [],
        "collect_steps": 8,
        "duration_cycles": 3,
    }
    finetune = {"name": "finetune", "freeze": ["encoder"], "collect_steps": 8, "duration_cycles": 3}
    config["training"]["phases"] = [prefill, *config["training"]["phases"], finetune]
    run_to_the_end(config, tmp_path / "whole", cuts=[])
    run_to_the_end(config, tmp_path / "cut", cuts=[2])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


# --- kill -9 of a real process ---


def train_process(run_id: str, runs_dir: Path, experiment: str, overrides: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rl_lab", "train", experiment, *overrides, "-q"]
    command += ["--run-id", run_id, "--runs-dir", str(runs_dir)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def wait_for_rows(path: Path, count: int, process: subprocess.Popen[bytes], *, timeout_s: float = 60.0) -> None:
    """Until the metrics file has `count` rows or the process has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)


def kill_at_a_random_instant(case: str, runs_dir: Path, seed: int) -> None:
    """Start the run, kill it somewhere between its start and its end, resume; again if it lives long enough."""
    chance = random.Random(seed)
    experiment, overrides = overrides_of(case, updates=30)
    process = train_process("cut", runs_dir, experiment, overrides)
    wait_for_rows(runs_dir / "cut" / "metrics.jsonl", chance.randrange(0, 24), process)
    time.sleep(chance.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if RunDirectory.open(runs_dir / "cut").read_status()["state"] != "finished":
        api.resume("cut", runs_dir=runs_dir, quiet=True)


KILLED = ("ppo discrete, async", "dqn with every switch, prioritised")  # -m slow kills each algorithm


@pytest.mark.parametrize(("case", "seed"), [(case, index) for index, case in enumerate(KILLED)])
def test_a_killed_run_resumes_bit_for_bit(case: str, seed: int, tmp_path: Path) -> None:
    experiment, overrides = overrides_of(case, updates=30)
    api.train(experiment, overrides=overrides, run_id="whole", runs_dir=tmp_path, quiet=True)
    kill_at_a_random_instant(case, tmp_path, seed)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


# --- kill -9 where a run only looks at itself: final evaluation, video, report ---


@dataclass(frozen=True)
class Ending:
    """The same run twice: finished, and as it is when training is over and its end is still to come."""

    whole: Path
    trained: Path

    def copy(self, place: Path) -> Path:
        """The second of the two, in a folder of its own."""
        return Path(shutil.copytree(self.trained, place / self.trained.name, symlinks=True))


def finish(run: Path) -> None:
    api.resume(run.name, runs_dir=run.parent, quiet=True)


def killed_while(run: Path, owner: Any, name: str) -> bool:
    """Let the end of a run be killed in a function: in another process, which is forked."""
    child = os.fork()
    if child == 0:
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            finish(run)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def assert_ends_the_same(run: Path, ending: Ending) -> None:
    if RunDirectory.open(run).read_status()["state"] != "finished":
        finish(run)
    assert_same_run(run, ending.whole)
    assert RunDirectory.open(run).read_status()["state"] == "finished"
    assert (run / "report.md").is_file() and (run / "learning_curve.png").is_file()
    assert [video.name for video in (run / "videos").glob("*.mp4")] == [
        video.name for video in (ending.whole / "videos").glob("*.mp4")
    ]


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    experiment, overrides = overrides_of("ppo discrete, native", updates=6)
    more = ["evaluation.video=true", "evaluation.every_updates=null", "evaluation.timeout_steps=20"]
    folder = tmp_path_factory.mktemp("ending")
    api.train(experiment, overrides=[*overrides, *more], run_id="whole", runs_dir=folder, quiet=True)

    def leave(self: Housekeeping, reason: str | None) -> None:
        self.save()
        raise SystemExit

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(Housekeeping, "finish", leave)
        api.train(experiment, overrides=[*overrides, *more], run_id="cut", runs_dir=folder, quiet=True)
    return Ending(folder / "whole", folder / "cut")


STAGES = {
    "final evaluation": (Evaluator, "play_episodes"),
    "last checkpoint": (CheckpointStore, "save"),
    "episode of the video": (Evaluator, "record_episodes"),
    "writing the video": (film, "write_video"),
    "report": (session, "write_report"),
    "learning curve": (report, "write_curve"),
    "index": (RunIndex, "record"),
}


def test_a_run_killed_in_every_stage_of_its_end_ends_the_same(ending: Ending, tmp_path: Path) -> None:
    run = ending.copy(tmp_path)
    for owner, name in STAGES.values():
        assert killed_while(run, owner, name), name
    assert_ends_the_same(run, ending)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_at_any_file_operation_of_its_end_ends_the_same(ending: Ending, tmp_path: Path) -> None:
    first = ending.copy(tmp_path / "count")
    count = len(operations_of(first, lambda: finish(first)))
    assert count > 100
    for at in range(count):
        run = ending.copy(tmp_path / str(at))
        killed_at(run, at, lambda: finish(run), half_way=at % 2 == 0)  # noqa: B023
        assert_ends_the_same(run, ending)
        shutil.rmtree(run)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # as many kills as RL_LAB_KILLS says
@pytest.mark.parametrize("case", [case for case in CASES if case != "random"])
def test_many_kills_resume_bit_for_bit(case: str, tmp_path: Path) -> None:
    experiment, overrides = overrides_of(case, updates=30)
    api.train(experiment, overrides=overrides, run_id="whole", runs_dir=tmp_path, quiet=True)
    for seed in range(int(os.environ.get("RL_LAB_KILLS", "10"))):
        runs_dir = tmp_path / str(seed)
        kill_at_a_random_instant(case, runs_dir, 1000 + seed)
        assert_same_run(runs_dir / "cut", tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "case"),
    [(signal.SIGTERM, "ppo discrete, native"), (signal.SIGINT, "dqn"), (signal.SIGUSR1, "ppo discrete, async")],
)
def test_a_signal_to_all_processes_saves_says_how_to_go_on_and_loses_nothing(
    number: signal.Signals, case: str, tmp_path: Path
) -> None:
    experiment, overrides = overrides_of(case, updates=60)
    api.train(experiment, overrides=overrides, run_id="whole", runs_dir=tmp_path, quiet=True)
    process = train_process("cut", tmp_path, experiment, overrides)
    wait_for_rows(tmp_path / "cut" / "metrics.jsonl", 3, process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"rl-lab resume {tmp_path / 'cut'}" in errors.decode()
    assert RunDirectory.open(tmp_path / "cut").read_status()["state"] == "interrupted"
    api.resume("cut", runs_dir=tmp_path, quiet=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint_starts_anew_and_ends_the_same(tmp_path: Path) -> None:
    experiment, overrides = overrides_of("ppo discrete, native", updates=5)
    late = [*overrides, "training.checkpoint.every_updates=null", "evaluation.every_updates=null"]
    api.train(experiment, overrides=late, run_id="whole", runs_dir=tmp_path, quiet=True)
    process = train_process("cut", tmp_path, experiment, [*late, "training.phases.train.duration_updates=5"])
    wait_for_rows(tmp_path / "cut" / "metrics.jsonl", 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if RunDirectory.open(tmp_path / "cut").read_status()["state"] != "finished":
        api.resume("cut", runs_dir=tmp_path, quiet=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
