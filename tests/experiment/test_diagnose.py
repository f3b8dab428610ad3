"""What a run says about itself: rules that held, in the log, in the report, in `show`, and across a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_lab import api
from rl_lab.cli.show import describe, gather
from rl_lab.config.schema import LoggingBlock
from rl_lab.metrics import system
from rl_lab.metrics.system import SystemUsage
from rl_lab.runs.report import alert_line
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError

SMALL = [
    "environment.num_envs=4",
    "algorithm.epochs=1",
    "training.phases.train.collect_steps=8",
    "training.phases.train.duration_steps=null",
    "training.phases.train.duration_updates=3",
    "evaluation.final_episodes=0",
    "logging.tensorboard=false",
]
RULES = "logging.rules={mine: {metric: controller/entropy, above: 0, rows: 2, tip: Mine.}, disk_full: {below: 1e9}}"


def test_an_alert_is_in_the_log_the_report_and_show_once(tmp_path: Path) -> None:
    run = api.train("ppo_cartpole", overrides=[*SMALL, RULES], runs_dir=tmp_path, quiet=True).directory
    disk, mine = run.read_alerts()
    assert (disk["rule"], disk["metric"], mine["rule"]) == ("disk_full", "system/disk_free_gib", "mine")
    line = alert_line(mine)
    assert line.startswith("controller/entropy 0.6") and line.endswith("(above 0 in 2 rows in a row): Mine.")
    assert f"## Alerts\n\n- {alert_line(disk)}\n- {line}\n" in run.report_path.read_text()
    assert (
        run.log_path.read_text().count("Mine.") == 1
        and " warning controller/entropy is 0.6" in run.log_path.read_text()
    )
    facts = gather(run)
    assert facts["alerts"] == [disk, mine] and f"alerts\n  1  {alert_line(disk)}\n  2  {line}\n" in describe(facts)


QUICK = [
    *("evaluation.video=false", "evaluation.final_episodes=2", "evaluation.every_steps=null"),
    *("logging.tensorboard=false", "runtime.threads=1", "seed=0"),
]
SEQUENCES = [
    *("logging.every_steps=100", "buffers.replay.batch_size=8", "buffers.replay.sequence_length=17"),
    "total_timesteps=4000",
]
PLANET = [
    *(*SEQUENCES, "controllers.planner.candidates=30", "controllers.planner.best=5"),
    *("controllers.planner.iterations=2", "controllers.planner.horizon=8"),
]
DREAMER = [
    *(*SEQUENCES, "components.dynamics.deter=64", "components.dynamics.hidden=32", "algorithm.horizon=8"),
    "algorithm.dream_last=4",
]
DQN = ["q_values=expected", "logging.every_steps=1000", "total_timesteps=12000"]
RUNAWAY = ["algorithm.double=false", "algorithm.target_rate=1.0", "optimizers.controller.learning_rate=0.02"]
FREE = ["algorithm.free_nats=60"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("experiment", "words", "said"),
    [
        ("dqn_cartpole", DQN, set()),
        ("dqn_cartpole", [*DQN, *RUNAWAY], {"value_explodes", "value_loss_explodes", "q_overestimation"}),
        ("dqn_cartpole", ["total_timesteps=4000", "components.q_values.highest=10"], {"support_clipped"}),
        ("planet_pendulum", PLANET, set()),
        ("planet_pendulum", [*PLANET, *FREE], {"kl_at_free_nats"}),
        ("dreamer_v3_cartpole", DREAMER, set()),
        ("dreamer_v3_cartpole", [*DREAMER, *FREE], {"kl_at_free_nats"}),
    ],
    ids=["dqn", "dqn-runaway", "dqn-support", "planet", "planet-free-nats", "dreamer", "dreamer-free-nats"],
)
def test_rules_are_silent_about_healthy_runs_and_name_what_is_broken(
    experiment: str, words: list[str], said: set[str], tmp_path: Path
) -> None:
    run = api.train(experiment, overrides=[*QUICK, *words], runs_dir=tmp_path, quiet=True).directory
    of_the_machine = {"memory_full", "disk_full"}
    assert {alert["rule"] for alert in run.read_alerts()} - of_the_machine == said


def test_a_run_that_goes_on_says_nothing_twice(tmp_path: Path) -> None:
    run = api.train("ppo_cartpole", overrides=[*SMALL, RULES], run_id="mine", runs_dir=tmp_path, quiet=True).directory
    api.resume("mine", overrides=["training.phases.train.duration_updates=5"], runs_dir=tmp_path, quiet=True)
    assert run.log_path.read_text().count("Mine.") == 1 and len(run.read_alerts()) == 2


def test_what_cannot_be_read_is_no_alert(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.read_alerts() == []
    run.write_alerts([])
    assert not run.alerts_path.exists()
    for text in ("{", "[]", json.dumps({"alerts": 3})):
        run.alerts_path.write_text(text)
        assert run.read_alerts() == []
    assert alert_line({"metric": "loss/value", "value": None, "tip": "x"}) == "loss/value not finite: x"


def test_a_stall_is_never_or_after_minutes() -> None:
    assert LoggingBlock(stall_minutes=None).stall_minutes is None
    with pytest.raises(ConfigError, match=r"logging.stall_minutes is 0: write minutes above 0, or null for never"):
        LoggingBlock(stall_minutes=0)


def test_memory_is_that_of_the_container_where_that_is_tighter(tmp_path: Path) -> None:
    machine = system._memory_fraction(tmp_path)
    assert 0.0 < machine < 1.0
    for name, text in {
        "memory.max": "1000",
        "memory.current": "990",
        "memory.stat": "anon 5\ninactive_file 1\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert system._memory_fraction(tmp_path) == pytest.approx(0.989)
    (tmp_path / "memory.max").write_text("max")
    assert system._memory_fraction(tmp_path) == pytest.approx(machine, abs=0.2)


def test_the_disk_is_that_of_the_runs(tmp_path: Path) -> None:
    assert SystemUsage(directory=tmp_path).sample()["system/disk_free_gib"] > 0.0
    assert "system/disk_free_gib" not in SystemUsage().sample()
    assert "system/disk_free_gib" not in SystemUsage(directory=tmp_path / "gone").sample()
