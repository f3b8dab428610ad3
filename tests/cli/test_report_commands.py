"""The commands in a report work when they are pasted, however the run was made; what is said of them is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from rl_lab import api
from rl_lab.cli.main import main
from rl_lab.config.compose import compose
from rl_lab.types import ConfigError

LITTLE = ["preset=debug", "evaluation.timeout_steps=10"]


def commands_in(report: Path) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", report.read_text(), re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def test_every_command_in_the_report_of_a_run_made_in_python_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    run = api.train("ppo_cartpole", overrides=LITTLE, quiet=True)
    began, commands = run.config, commands_in(run.path / "report.md")
    assert [words[0] for words in commands] == ["train", "play", "evaluate", "resume", "resume"]
    assert commands[3] == ["resume", run.id, "training.limit_cycles=6"]
    assert commands[4] == ["resume", run.id, "--mode", "warm_start"]
    for words in commands:
        more = ["--quiet"] if words[0] != "play" else ["--quiet", "--episodes", "1"]
        episodes = [word if word != "100" else "2" for word in words]
        assert main([*episodes, *more]) == 0, (words, capsys.readouterr().err)
    runs = sorted(
        (path for path in (tmp_path / "runs").iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    assert len(runs) == 3
    again, warm = (api.Run(api.RunDirectory(path)) for path in runs if path != run.path)
    for key in ("algorithm", "environment", "training", "seed"):
        assert again.config[key] == began[key]
    (first, *_) = commands_in(warm.path / "report.md")
    assert first == ["resume", run.id, "--mode", "warm_start"]
    assert main([*first, "-q"]) == 0


FEW = ["evaluation.timeout_steps=10", "evaluation.every_steps=null", "evaluation.final_episodes=1"]
FEW += ["lr=1e-3", "evaluation.video=false", "logging.tensorboard=false", "training.phases.train.duration_steps=2000"]


def test_a_finished_run_is_offered_to_go_on_with_twice_its_steps_and_is_then_repeated_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = api.train("ppo_cartpole", overrides=FEW, quiet=True)
    more = commands_in(run.path / "report.md")[3]
    assert more == ["resume", run.id, "training.phases.train.duration_steps=4000"]
    assert main([*more, "-q"]) == 0
    again, _, _, more, _ = commands_in(run.path / "report.md")
    assert again == ["train", f"runs/{run.id}/config.yaml", "training.phases.train.duration_steps=4000"]
    assert more == ["resume", run.id, "training.phases.train.duration_steps=8000"]
    assert main([*again, "-q"]) == 0
    (other,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and path.name != run.id)
    losses = [each.metrics()["loss/value"] for each in (api.Run(api.RunDirectory(other)), run)]
    np.testing.assert_array_equal(*losses)


def test_more_steps_are_offered_than_the_last_cycle_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = api.train("ppo_cartpole", overrides=[*FEW[:-1], "total_timesteps=10"], quiet=True)
    more = commands_in(run.path / "report.md")[3]
    assert more[2] == f"training.phases.train.duration_steps={10 + run.status['counts']['agent_steps']}"
    assert main([*more, "-q"]) == 0


def test_a_run_that_a_rule_stopped_is_offered_to_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = api.train("ppo_cartpole", overrides=[*FEW, "training.stop.env_frames=10", "num_envs=4"], quiet=True)
    more = commands_in(run.path / "report.md")[3]
    assert more == ["resume", run.id, "training.stop.env_frames=null"]
    assert main([*more, "-q"]) == 0
    assert run.status["state"] == "finished"


def test_a_run_that_is_not_done_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from rl_lab.runs.report import write_report

    run = api.train("ppo_cartpole", overrides=LITTLE, runs_dir=tmp_path / "else where", quiet=True)
    run.directory.write_status("interrupted")
    write_report(run.directory)
    commands = commands_in(run.path / "report.md")
    assert commands[0] == ["train", f"else where/{run.id}/config.yaml"]
    assert commands[1] == ["resume", str(run.path)]


def test_only_a_whole_config_without_plugins_is_trained_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=r"config\.yaml is not a file: name an experiment"):
        compose(str(file))
    file.write_text("seed: 3\n")
    with pytest.raises(ConfigError, match=r"lacks the block 'experiment': only the config\.yaml of a run"):
        compose(str(file))
    file.write_text("plugins: [mine]\n")
    with pytest.raises(ConfigError, match=r"names plugins \(mine\), and a saved config may not import packages"):
        compose(str(file))
