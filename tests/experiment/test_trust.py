"""A run directory from somebody else runs no code: what its config names is imported only with consent from outside."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl_lab
from rl_lab import api
from rl_lab.cli.main import main
from rl_lab.experiment import trust
from rl_lab.types import ConfigError, RLLabError

QUICK = ["preset=debug", "runtime.device=cpu", "evaluation.final_episodes=0", "evaluation.video=false"]
MODULE = """
import pathlib
pathlib.Path({marker!r}).touch()
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn
class Thing(nn.Identity):
    pass
if "TrustedCart-v0" not in gymnasium.registry:
    gymnasium.register("TrustedCart-v0", entry_point=CartPoleEnv, max_episode_steps=20)
"""
USES: dict[str, Callable[..., Any]] = {
    "evaluate": lambda run, **more: api.evaluate(run, episodes=1, **more),
    "load": api.load,
    "play": lambda run, **more: api.play(run, output=run.parent.parent / "play.mp4", **more),
    "collect": lambda run, **more: api.collect(run, steps=5, output=run.parent.parent / "data", **more),
    "dream": api.dream,
    "resume": api.resume,
    "warm_start": lambda run, **more: api.resume(run, mode="warm_start", quiet=True, **more),
}


@pytest.fixture
def rl(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`rl("show", run)` runs one command line: its exit code and what it printed as errors."""

    def run(*words: str | Path) -> tuple[int, str]:
        return main([str(word) for word in words]), capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return api.train("ppo_cartpole", overrides=QUICK, runs_dir=folder, run_id="shared", quiet=True).path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder one stands in, with a user who has consented to nothing yet, and an evil module that leaves a mark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(trust, "_consented", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "evil_plugin.py").write_text(MODULE.format(marker=str(tmp_path / "executed")))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("runs", "evil_plugin"):
            del sys.modules[name]


@pytest.fixture
def hostile(project: Path, plain_run: Path) -> Callable[..., Path]:
    """`hostile({"plugins": [...]})`: a trained run whose saved config was changed."""

    def change(changes: dict[str, Any]) -> Path:
        run = project / "runs" / "shared"
        shutil.copytree(plain_run, run)
        shutil.copy(project / "evil_plugin.py", run / "evil.py")
        config = yaml.safe_load((run / "config.yaml").read_text())
        for key, value in changes.items():
            *parents, last = key.split(".")
            node = config
            for parent in parents:
                node = node[parent]
            node[last] = value
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        return run

    return change


POPEN = {"_target_": "subprocess.Popen", "args": ["touch", "executed"]}
ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "a program": ({"plugins": ["subprocess"], "algorithm": POPEN}, "subprocess"),
    "a part": ({"plugins": ["subprocess"], "components.encoder": POPEN}, "subprocess"),
    "an environment inside the run": ({"environment.id": "runs.shared.evil:CartPole-v1"}, "runs"),
    "an environment's argument": ({"environment.kwargs": {"env_id": "runs.shared.evil:CartPole-v1"}}, "runs"),
    "a plugin here": ({"plugins": ["evil_plugin"]}, "evil_plugin"),
    "a class here": ({"plugins": ["evil_plugin"], "algorithm._target_": "evil_plugin.Thing"}, "evil_plugin"),
    "a nested class": ({"algorithm.loss_scales": {"policy": {"_target_": "evil_plugin.Thing"}}}, "evil_plugin"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("attack", ["a program", "an environment inside the run"])
def test_no_command_runs_what_a_saved_config_names(
    use: str, attack: str, hostile: Callable[..., Path], project: Path
) -> None:
    changes, package = ATTACKS[attack]
    run = hostile(changes)
    with pytest.raises(RLLabError, match=f"'{package}'"):
        USES[use](run)
    assert not (project / "executed").exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_error_asks_for_consent_by_name(attack: str, hostile: Callable[..., Path], project: Path) -> None:
    changes, package = ATTACKS[attack]
    with pytest.raises(ConfigError) as refusal:
        api.evaluate(hostile(changes), episodes=1)
    if package in sys.stdlib_module_names:
        assert f"'{package}', a part of Python itself, which no run may use" in str(refusal.value)
    else:
        assert f"Run shared names the package '{package}' in " in str(refusal.value)
        assert f"--trust {package} (in Python: trust=['{package}'])" in str(refusal.value)
        assert str(project / "home" / "rl_lab" / "trusted") in str(refusal.value)
    assert not (project / "executed").exists()
    assert package in sys.stdlib_module_names or package not in sys.modules


def test_consent_is_no_key_to_the_standard_library(hostile: Callable[..., Path], project: Path) -> None:
    run = hostile(ATTACKS["a program"][0])
    with pytest.raises(ConfigError, match="'subprocess', a part of Python itself, which no run may use"):
        api.evaluate(run, episodes=1, trust=["subprocess"])
    assert not (project / "executed").exists()


@pytest.mark.parametrize("id", ["runs.shared.evil:CartPole-v1", "runs.loose:CartPole-v1"])
def test_nothing_is_imported_from_a_runs_folder_even_with_consent(
    id: str, hostile: Callable[..., Path], project: Path
) -> None:
    run = hostile({"environment.id": id})
    shutil.copy(project / "evil_plugin.py", project / "runs" / "loose.py")
    with pytest.raises(ConfigError, match=r"would import '.*' from .*runs.*, a folder of runs\. .* never"):
        api.evaluate(run, episodes=1, trust=["runs"])
    assert not (project / "executed").exists()


def test_standing_inside_a_run_makes_its_files_no_packages(
    hostile: Callable[..., Path], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hostile({"plugins": ["evil"]})
    monkeypatch.chdir(run)
    with pytest.raises(ConfigError, match=r"would import 'evil' from .*shared.*, a folder of runs"):
        api.evaluate(run, episodes=1, trust=["evil"])
    assert not (project / "executed").exists()


@pytest.mark.parametrize("how", ["argument", "file", "command line"])
def test_consent_from_outside_opens_a_run(how: str, hostile: Callable[..., Path], project: Path, rl: Any) -> None:
    run = hostile({"plugins": ["evil_plugin"], "environment.id": "evil_plugin:TrustedCart-v0"})
    if how == "file":
        (project / "home" / "rl_lab").mkdir(parents=True)
        (project / "home" / "rl_lab" / "trusted").write_text("# mine\nother\nevil_plugin\n")
    if how == "command line":
        assert rl("evaluate", run, "--episodes", "1")[0] == 2
        assert rl("evaluate", run, "--episodes", "1", "--trust", "evil_plugin", "-q") == (0, "")
    else:
        more = {"trust": ["evil_plugin"]} if how == "argument" else {}
        assert rl_lab.evaluate(run, episodes=1, **more)["eval/episode_return_mean"] > 0
    assert (project / "executed").exists()


def test_whoever_trained_with_a_package_opens_the_run_without_a_word(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*QUICK, "plugins=[evil_plugin]"]
    run = api.train("evil_plugin:TrustedCart-v0:ppo", overrides=words, runs_dir="runs", quiet=True)
    assert (project / "home" / "rl_lab" / "trusted").read_text() == "evil_plugin\n"
    assert len([record for record in caplog.records if "evil_plugin" in record.message]) == 1
    assert api.evaluate(run, episodes=1)
    monkeypatch.setattr(trust, "_consented", set())  # as in a new process
    assert api.evaluate(run.path, episodes=1)
    caplog.clear()
    api.resume(run, mode="warm_start", quiet=True)
    assert not caplog.records
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "elsewhere"))  # as another user
    monkeypatch.setattr(trust, "_consented", set())
    with pytest.raises(ConfigError, match="--trust evil_plugin"):
        api.evaluate(run.path, episodes=1)
    words = [*words, "runs.id=again"]
    (project / "elsewhere").write_text("a file where a folder should be: what was trained with cannot be remembered")
    again = api.train("evil_plugin:TrustedCart-v0:ppo", overrides=words, runs_dir="runs", quiet=True)
    monkeypatch.setattr(trust, "_consented", set())
    more = {"runs_dir": "runs", "quiet": True, "resume_existing": True}
    (again.path / "status.json").write_text('{"state": "interrupted", "counts": {}}')
    assert api.train("evil_plugin:TrustedCart-v0:ppo", overrides=words, **more).id == "again"  # the command consents


def test_reading_a_config_needs_no_consent(hostile: Callable[..., Path], rl: Any) -> None:
    run = hostile(ATTACKS["a program"][0])
    assert rl("show", run)[0] == 0
    assert rl("config", "diff", run, "ppo_cartpole")[0] == 0


def test_suites_and_our_own_packages_need_no_consent() -> None:
    config = {
        "plugins": None,
        "environment": {"id": "ale_py:ALE/Pong-v5"},
        "components": {"a": {"_target_": "rl_lab.x.Y"}, "b": {"_target_": "torch.nn.Linear"}},
    }
    assert trust.foreign_packages(config) == {}
    config["environment"]["id"] = "gymnasium:CartPole-v1"
    assert trust.foreign_packages({**config, "runs": {"id": "first:try"}}) == {}


@pytest.mark.parametrize("plugins", [5, "evil_plugin", {"evil_plugin": 1}, [["evil_plugin"]]])
def test_plugins_of_another_type_run_nothing_either(plugins: Any, hostile: Callable[..., Path], project: Path) -> None:
    with pytest.raises(ConfigError):
        api.evaluate(hostile({"plugins": plugins}), episodes=1)
    assert not (project / "executed").exists()
