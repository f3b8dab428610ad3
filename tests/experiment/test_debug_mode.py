"""A NaN in the observation, the reward, the loss, the gradient or a parameter is named, and its bundle replays it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_lab.cli.main import main
from rl_lab.config.compose import compose
from rl_lab.config.schema import DebugBlock
from rl_lab.experiment.crash import find, newest_bundle, replay
from rl_lab.experiment.identical import row_differences
from rl_lab.experiment.session import start_run
from rl_lab.experiment.watch import NonFiniteError
from rl_lab.metrics.tensorboard_writer import TensorBoardWriter
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.metrics_file import read_metrics
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, EnvironmentFault, RunError

SMALL = [
    "environment.id=tests.broken_runs:Nan-v0",
    "environment.num_envs=2",
    "environment.vectorization=sync",
    "algorithm.epochs=1",
    "training.phases.train.collect_steps=8",
    "training.phases.train.duration_steps=null",
    "training.phases.train.duration_updates=5",
    "training.checkpoint.every_updates=1",
    "evaluation.final_episodes=0",
    "logging.tensorboard=false",
    "plugins=[tests]",
    "runtime.device=cpu",
    "runtime.fast_paths=off",  # those step aside where modules are watched, and differ in their last bits
]
TRUST = ("tests",)


def broken(bad: str, *words: str) -> dict[str, Any]:
    config = compose("ppo_cartpole", [*SMALL, *words])
    config["algorithm"]["_target_"] = "tests.broken_runs.BrokenPPO"
    if bad in ("observation", "reward"):
        config["environment"]["kwargs"] = {"bad": bad}
    else:
        config["algorithm"]["bad"] = bad
    return config


def crash(bad: str, folder: Path, *words: str) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        start_run(broken(bad, *words, "debug.check_finite=true"), run_id="mine", runs_dir=folder, quiet=True)
    return caught.value


PLACES = {  # what, name, index, operation, function
    "observation": ("observation", "vector of environment 0", (1,), "", ""),
    "reward": ("reward", "of environment 0", (), "", ""),
    "loss": ("loss", "loss/value", (), "aten.log", "loss"),
    "gradient": ("gradient", "critic.network.hidden.0.weight", (0, 0), "MulBackward0", "loss"),
    "parameter": ("parameter", "actor.network.hidden.0.weight", (1, 2), "aten.lift_fresh", "update_controller"),
}


@pytest.mark.parametrize("bad", PLACES)
def test_a_nan_is_named_and_its_bundle_comes_to_the_same_place(bad: str, tmp_path: Path) -> None:
    error = crash(bad, tmp_path)
    what, name, index, operation, function = PLACES[bad]
    place = error.place
    assert (place.what, place.name, place.index, place.value) == (what, name, index, "nan")
    assert (place.origin.operation if place.origin else "") == operation
    assert place.origin is None or (
        place.origin.line.startswith("broken_runs.py:") and place.origin.line.endswith(f" in {function}")
    )
    assert error.bundle is not None and f"`rl-lab debug replay {error.bundle}`" in str(error)
    advice = (
        "envs check" if bad in ("observation", "reward") else "a smaller learning rate (`lr=...`) or `max_grad_norm`"
    )
    assert advice in str(error)
    status = RunDirectory.open(tmp_path / "mine").read_status()
    assert status["state"] == "failed" and status["message"] == str(error)
    again = replay(error.bundle, trust=TRUST)
    assert again.is_same and again.found == place
    assert again.during == ("collecting" if bad in ("observation", "reward") else "update_controller")


def test_the_same_in_sac_whose_losses_bring_their_gradients(tmp_path: Path) -> None:
    words = [
        "training.phases.prefill.duration_steps=40",
        "training.phases.train.duration_steps=40",
        "debug.check_finite=true",
    ]
    words += [
        "optimizers.critic.learning_rate=1e38",
        "evaluation.final_episodes=0",
        "buffers.replay.capacity_rows=1000",
    ]
    with pytest.raises(NonFiniteError) as caught:
        start_run(compose("sac_pendulum", words), run_id="mine", runs_dir=tmp_path, quiet=True)
    assert caught.value.place.what in ("loss", "gradient", "parameter") and caught.value.bundle is not None
    assert replay(caught.value.bundle).is_same


def test_the_command_executes_a_bundle_and_judges_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = crash("loss", tmp_path)
    assert error.bundle is not None
    words = ["debug", "replay", str(error.bundle), "--trust", "tests"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("the same place\n") and "loss/value is nan, from aten.log at broken_runs.py" in said
    store = CheckpointStore(error.bundle.parent)
    state = dict(store.load(error.bundle).state)
    state["about"] = {**state["about"], "config": state["about"]["config"].replace("bad: loss", "bad: ''")}
    mended = store.save(state, agent_steps=999, counts={"agent_steps": 999})
    assert main(["debug", "replay", str(mended), "--trust", "tests", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["found"] is None and facts["is_same"] is False and facts["recorded"]["name"] == "loss/value"


def test_a_bundle_names_packages_that_need_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_lab.experiment.trust._consented", set())
    error = crash("loss", tmp_path)
    assert error.bundle is not None
    with pytest.raises(ConfigError, match="names the package 'tests'"):
        replay(error.bundle)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no crash bundle. Debug mode writes them: runs/RUN/crash/step_000000001024"):
        replay(tmp_path)
    path = CheckpointStore(tmp_path).save({"rng": {}}, agent_steps=1, counts={"agent_steps": 1})
    with pytest.raises(RunError, match="is a checkpoint of a run, no crash bundle"):
        replay(path)


def test_a_run_that_failed_without_debug_mode_is_looked_at_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match="loss/value is not finite") as caught:
        start_run(broken("loss"), run_id="mine", runs_dir=tmp_path, quiet=True)
    assert "`rl-lab debug find mine`" in str(caught.value) and not isinstance(caught.value, NonFiniteError)
    assert main(["debug", "find", "mine", "--runs-dir", str(tmp_path), "--trust", "tests", "-q"]) == 1
    assert capsys.readouterr().out == "loss/value is nan\n"
    (bundle,) = CheckpointStore(tmp_path / "mine" / "crash").paths()
    words = ["--runs-dir", str(tmp_path), "--trust", "tests", "-q"]
    assert main(["debug", "replay", "mine", *words]) == 0  # the newest of the run
    lost = bundle.rename(bundle.with_name(f"{bundle.name}-r2"))
    with pytest.raises(RunError, match=rf"is no crash bundle. A later one took its place: {lost}"):
        replay(bundle)
    with pytest.raises(RunError, match="Run mine has no crash bundle: `rl-lab debug find mine`"):
        shutil.rmtree(lost)
        newest_bundle(RunDirectory.open(tmp_path / "mine"))
    assert not (tmp_path / "mine" / "checkpoints" / "step_000000000074").exists()  # it went on in a copy


def test_a_run_without_such_a_number_comes_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start_run(broken(""), run_id="mine", runs_dir=tmp_path, quiet=True)
    rows = read_metrics(run.metrics_path)
    assert find(run, trust=TRUST) is None
    assert main(["debug", "find", "mine", "--runs-dir", str(tmp_path), "--trust", "tests"]) == 0
    assert capsys.readouterr().out == "mine came to its end, and every number was finite\n"
    watched = start_run(broken("", "debug.check_finite=true"), run_id="watched", runs_dir=tmp_path, quiet=True)
    assert not [
        found
        for pair in zip(rows, read_metrics(watched.metrics_path), strict=True)
        for found in row_differences(*pair, number=1)
    ]


def test_an_environments_fault_is_one_without_debug_mode(tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFault, match="Environment 0 of 'tests.broken_runs:Nan-v0' sent a reward that is not finite"
    ):
        start_run(broken("reward"), run_id="mine", runs_dir=tmp_path, quiet=True)


# --- histograms, profile, gradient checks: they look and change nothing ---


def test_instruments_look_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int]] = []
    monkeypatch.setattr(TensorBoardWriter, "show", lambda self, name, media, steps: shown.append((name, steps)))
    words = [
        "debug.histograms_every_updates=2",
        "debug.check_gradients=true",
        "debug.profile_updates=1",
        "logging.tensorboard=true",
    ]
    plain = start_run(broken(""), run_id="plain", runs_dir=tmp_path, quiet=True)
    run = start_run(broken("", *words), run_id="mine", runs_dir=tmp_path, quiet=True)
    pairs = zip(read_metrics(plain.metrics_path), read_metrics(run.metrics_path), strict=True)
    assert not [found for pair in pairs for found in row_differences(*pair, number=1)]
    names = {name for name, _ in shown}
    assert {"weights/actor/network/hidden/0/weight", "gradients/critic/network/hidden/0/bias"} <= names
    assert len({steps for _, steps in shown}) == 3  # updates 0, 2, 4
    trace = json.loads((run.path / "profile" / "trace.json").read_text())
    assert trace["traceEvents"] and "Self CPU" in (run.path / "profile" / "table.txt").read_text()
    log = run.log_path.read_text()
    assert "Profiled 1 updates: " in log and " ms " in log
    assert "modules agree with finite differences: " in log and "takes or gives more than tensors" in log


def test_histograms_are_taken_where_fast_paths_know_the_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(TensorBoardWriter, "show", lambda self, name, media, steps: shown.append(name))
    words = ["preset=debug", "runtime.fast_paths=true", "debug.check_finite=false", "logging.tensorboard=true"]
    config = compose("ppo_cartpole", [*words, "debug.histograms_every_updates=1", "runtime.device=cpu"])
    start_run(config, run_id="mine", runs_dir=tmp_path, quiet=True)
    assert shown.count("gradients/actor/network/hidden/0/weight") == 3


def test_a_profile_of_a_run_that_ends_sooner_is_written_at_its_end(tmp_path: Path) -> None:
    run = start_run(broken("", "debug.profile_updates=50"), run_id="mine", runs_dir=tmp_path, quiet=True)
    assert (run.path / "profile" / "trace.json").stat().st_size > 0 and "Profiled 2 updates" in run.log_path.read_text()


def test_counts_of_updates_begin_at_one() -> None:
    for name in ("histograms_every_updates", "profile_updates"):
        with pytest.raises(ConfigError, match=f"debug.{name} is 0: write a whole number of at least 1"):
            DebugBlock(**{name: 0})
