"""RL Lab from Python: train, load, evaluate, resume, and what each of them refuses."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

import rl_lab
from rl_lab import api
from rl_lab.config.compose import apply_overrides
from rl_lab.config.spelling import spell
from rl_lab.experiment import session
from rl_lab.experiment.load import differences
from rl_lab.metrics.terminal import LiveDisplay
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.runs import report
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, RunError
from rl_lab.utils.formatting import format_duration
from rl_lab.utils.processes import ASKING
from rl_lab.utils.tree import leaves_with_paths
from rl_lab.workflows.ppo import PPO

BLIND = ["algorithm.epochs=8", "debug.check_finite=false"]  # it is seen in the metrics of the update, not before
DEBUG = ["preset=debug", "training.phases.train.collect_steps=16", "algorithm.epochs=1"]


def train(runs_dir: Path, *more: str, experiment: str = "ppo_cartpole", **settings: Any) -> api.Run:
    return api.train(experiment, overrides=[*DEBUG, *more], runs_dir=runs_dir, quiet=True, **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A short run that tests may read but not change."""
    return train(tmp_path_factory.mktemp("runs"), run_id="finished", seed=3)


# --- training ----------------------------------------------------------------------------------


def test_a_finished_run_leaves_everything_behind(finished: api.Run) -> None:
    assert finished.id == "finished"
    assert finished.status["state"] == "finished"
    assert finished.status["counts"]["updates"] == 3
    assert finished.config["seed"] == 3
    for name in ("config.yaml", "overrides.yaml", "manifest.json", "metrics.jsonl", "report.md"):
        assert (finished.path / name).is_file(), name
    assert (finished.path / "checkpoints" / "latest").is_dir()
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["updates"] for row in rows] == [1, 2, 3, 3]
    assert rows[-1]["eval/episodes"] == 2


def test_status_report_and_rows_tell_one_time(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training's, evaluations included, without the video and the report, which come after it."""

    def slow_report(run: RunDirectory, **said: Any) -> Path:
        sleep(1.0)
        return report.write_report(run, **said)

    monkeypatch.setattr(session, "write_report", slow_report)
    run = train(runs_dir)
    seconds = run.status["wall_s"]
    assert 0.0 <= seconds - run.metrics()["wall_s"][-1] < 0.5
    assert f"| wall time | {format_duration(seconds)} |" in (run.path / "report.md").read_text()


def test_settings_may_be_keywords(runs_dir: Path) -> None:
    run = train(
        runs_dir, algorithm__discount=0.5, experiment__description="it's mine, all of it", experiment__tags=["a"]
    )
    config = run.config
    assert config["algorithm"]["discount"] == 0.5
    assert config["experiment"]["description"] == "it's mine, all of it"
    assert config["experiment"]["tags"] == ["a"]
    assert "algorithm.discount=0.5" in (run.path / "overrides.yaml").read_text()


@pytest.mark.parametrize(
    ("value", "spelt"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (1e-3, "0.001"),
        ("gru", "gru"),
        ("linear(1e-3, 0)", "'linear(1e-3, 0)'"),
        ("it's", r"'it\'s'"),
        ("", "''"),
        ("12", "'12'"),
        ("true", "'true'"),
        ([1, 2], "[1, 2]"),
        (["a", None], "[a, null]"),
        ({"size": 3}, "{size: 3}"),
        (Path("data/rows"), "data/rows"),
        (np.float32(0.5), "0.5"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.arange(3), "[0, 1, 2]"),
        ({"a b": (1, None)}, "{'a b': [1, null]}"),
    ],
)
def test_python_values_are_spelt_as_overrides(value: Any, spelt: str) -> None:
    assert spell(value) == spelt


@pytest.mark.parametrize(
    "value",
    ["it's", "12", "true", "null", "", "a b", "x,y", "back\\slash", "ends\\", "q\\'q", ["1", "b c"], {"k": ["v w"]}],
)
def test_spelt_values_come_back_as_they_were(value: Any) -> None:
    assert apply_overrides({"key": None}, [f"key={spell(value)}"]) == {"key": value}


def test_a_dict_adds_to_its_block_and_folders_may_be_texts(runs_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    run = train(
        runs_dir,
        config_dir=str(tmp_path / "configs"),
        environment__kwargs={"sutton_barto_reward": np.bool_(True)},
        evaluation__num_envs=np.int64(2),
    )
    assert run.config["environment"]["kwargs"] == {"sutton_barto_reward": True}
    assert run.config["evaluation"]["num_envs"] == 2


def test_a_value_that_no_config_can_hold_is_refused(runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment.kwargs holds a object \(<object.*numbers, texts, True, False"):
        train(runs_dir, environment__kwargs={"a": object()})
    with pytest.raises(ConfigError, match="does not accept kwargs.*reward.*It takes"):
        train(runs_dir, environment__kwargs={"suton_barto_reward": True})
    with pytest.raises(
        ConfigError, match=r"callback is no setting, and no callback. Callbacks: on_row, on_evaluation,"
    ):
        train(runs_dir, callback=print)
    with pytest.raises(ConfigError, match=r"overrides is the text 'seed=3': write a list of them, \['seed=3'\]\."):
        api.train("ppo_cartpole", overrides="seed=3", runs_dir=runs_dir)
    with pytest.raises(ConfigError, match=r"on_rows is no setting, and no callback. Did you mean 'on_row'\?"):
        train(runs_dir, on_rows=print)


def test_an_id_that_is_taken_is_refused(finished: api.Run) -> None:
    with pytest.raises((RunError, ConfigError), match="finished"):
        train(finished.path.parent, run_id="finished")
    assert finished.status["state"] == "finished"


def test_a_config_refused_at_the_door_leaves_no_run(runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean"):
        train(runs_dir, "+components.encoder.hiden_sizes=[1]", run_id="refused")
    assert not (runs_dir / "refused").exists()


def test_masks_that_an_environment_does_not_have_leave_no_run(runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match="found no mask"):
        train(runs_dir, "environment.action_masks=true", run_id="maskless")
    assert not (runs_dir / "maskless").exists()


def test_resume_existing_returns_a_finished_run_untouched(finished: api.Run) -> None:
    before = (finished.path / "metrics.jsonl").read_bytes()
    again = train(finished.path.parent, run_id="finished", seed=3, resume_existing=True)
    assert again.id == finished.id
    assert (finished.path / "metrics.jsonl").read_bytes() == before


def test_resume_existing_refuses_other_settings_with_the_difference(finished: api.Run) -> None:
    more = ["algorithm.clip_range=0.5", "+environment.kwargs.sutton_barto_reward=true", "environment.max_restarts=3"]
    with pytest.raises(ConfigError) as refusal:
        train(finished.path.parent, *more, run_id="finished", resume_existing=True)
    assert str(refusal.value).splitlines() == [
        "Run finished has other settings than those asked for:",
        "  seed: 3 in the run, 0 asked for",
        "  algorithm.clip_range: 0.2 in the run, 0.5 asked for",
        "  environment.kwargs.sutton_barto_reward: nothing in the run, True asked for",
        f"  To go on with its own, write `rl-lab resume {finished.path}`; for others choose another --run-id.",
    ]


def test_resume_existing_says_how_a_run_becomes_longer(finished: api.Run) -> None:
    length = "training.phases.train.duration_steps=9000"
    with pytest.raises(ConfigError) as refusal:
        train(finished.path.parent, length, run_id="finished", seed=3, resume_existing=True)
    assert f"`rl-lab resume {finished.path} training.phases.0.duration_steps=9000`" in str(refusal.value)


def test_many_differences_are_not_all_listed(finished: api.Run) -> None:
    with pytest.raises(ConfigError, match=r"(?s)asked for:.*\.\.\. and \d+ more\n  To go on"):
        api.train("dqn_cartpole", run_id="finished", runs_dir=finished.path.parent, resume_existing=True)


def test_settings_that_a_newer_version_knows_are_no_difference() -> None:
    run, asked = {"environment": {"id": "A"}, "runs": {"id": "x"}}, {"environment": {"id": "A", "new": 1}, "runs": {}}
    assert differences(run, asked, []) == []
    assert differences(run, asked, ["+environment.new=1"]) == ["environment.new: nothing in the run, 1 asked for"]


def test_the_same_seed_gives_the_same_rows(finished: api.Run, runs_dir: Path) -> None:
    again = train(runs_dir, seed=3)

    def rows(run: api.Run) -> list[dict[str, float]]:
        lines = (run.path / "metrics.jsonl").read_text().splitlines()
        return [
            {
                name: value
                for name, value in json.loads(line).items()
                if not name.startswith(("time/", "system/", "wall_s"))
            }
            for line in lines
        ]

    assert rows(again) == rows(finished)


@pytest.mark.parametrize("experiment", ["CartPole-v1:reinforce", "random_cartpole", "ppo_recall"])
def test_every_algorithm_trains(runs_dir: Path, experiment: str) -> None:
    run = api.train(experiment, overrides=["preset=debug"], runs_dir=runs_dir, quiet=True)
    assert run.status["state"] == "finished"


def test_a_failure_is_recorded_with_its_reason(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: PPO, *arguments: Any, **settings: Any) -> Any:
        raise MemoryError("no memory left")

    monkeypatch.setattr(PPO, "update_controller", fails)
    with pytest.raises(MemoryError):
        train(runs_dir, run_id="failed")
    status = json.loads((runs_dir / "failed" / "status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "MemoryError: no memory left")
    log = (runs_dir / "failed" / "run.log").read_text()
    assert "Traceback (most recent call last)" in log and "in fails" in log and "MemoryError: no memory left" in log


def test_a_loss_that_is_not_finite_fails_the_run_with_advice(runs_dir: Path) -> None:
    with pytest.raises(RunError, match="is not finite at .* agent steps, so learning stopped"):
        train(runs_dir, "optimizers.controller.learning_rate=1e30", *BLIND, run_id="broken")
    assert "smaller learning rate" in json.loads((runs_dir / "broken" / "status.json").read_text())["message"]


# --- interruptions and resuming ----------------------------------------------------------------


def train_and_ask(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int, **settings: Any) -> None:
    """A training that gets a signal in its second cycle."""
    calls = iter(range(100))
    original = Orchestrator._cycle

    def asked(self: Orchestrator, *arguments: Any) -> None:
        original(self, *arguments)
        if next(calls) == 1:
            signal.raise_signal(number)

    with monkeypatch.context() as patched:
        patched.setattr(Orchestrator, "_cycle", asked)
        train(runs_dir, **settings)


@pytest.fixture
def interrupted(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> api.Run:
    """A run that was asked to leave in its second cycle."""
    with pytest.raises(SystemExit):
        train_and_ask(runs_dir, monkeypatch, signal.SIGTERM, run_id="interrupted", seed=3)
    return api.Run(RunDirectory.open(runs_dir / "interrupted"))


@pytest.mark.parametrize("number", ASKING, ids=lambda number: number.name)
def test_a_signal_saves_and_ends_the_script(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as left:
        train_and_ask(runs_dir, monkeypatch, number, run_id="asked")
    assert isinstance(left.value, KeyboardInterrupt) or left.value.code == 128 + number
    assert isinstance(left.value, KeyboardInterrupt) == (number == signal.SIGINT)
    assert left.value.__notes__ == [f"Continue with `rl-lab resume {runs_dir / 'asked'}`."]
    status = RunDirectory.open(runs_dir / "asked").read_status()
    assert (status["state"], status["counts"]["updates"]) == ("interrupted", 2)
    assert status["message"] == "Continue with `rl-lab resume asked`."
    assert signal.getsignal(number) == before


def test_a_hang_up_that_nohup_ignores_changes_nothing(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train_and_ask(runs_dir, monkeypatch, signal.SIGHUP, run_id="nohup")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert RunDirectory.open(runs_dir / "nohup").read_status()["state"] == "finished"


def test_a_signal_in_the_last_cycle_leaves_before_the_final_evaluation(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations: list[int] = []
    monkeypatch.setattr(PPO, "evaluate", lambda self, episodes: evaluations.append(episodes) or {})
    with pytest.raises(SystemExit):
        train_and_ask(runs_dir, monkeypatch, signal.SIGTERM, run_id="last", training__limit_cycles=2)
    assert not evaluations
    assert api.resume("last", runs_dir=runs_dir, quiet=True).status["state"] == "finished"
    assert evaluations == [2]


def test_an_interrupted_run_is_resumed_to_its_end(interrupted: api.Run, finished: api.Run) -> None:
    resumed = api.resume("interrupted", runs_dir=interrupted.path.parent, quiet=True)
    assert resumed.status["state"] == "finished"
    assert resumed.status["final_score"] == finished.status["final_score"]
    assert "Resumed interrupted at" in (resumed.path / "run.log").read_text()


def test_a_second_ctrl_c_leaves_at_once(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked_twice(self: PPO, *arguments: Any, **settings: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PPO, "update_controller", asked_twice)
    with pytest.raises(KeyboardInterrupt) as left:
        train(runs_dir, run_id="hurried")
    assert left.value.__notes__ == ["Left at once. Continue with `rl-lab resume hurried`."]
    status = json.loads((runs_dir / "hurried" / "status.json").read_text())
    assert status["state"] == "interrupted"
    assert status["message"] == "Left at once. Continue with `rl-lab resume hurried`."


def test_what_a_job_queue_sends_twice_does_not_hurry(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PPO.update_controller

    def asked_twice(self: PPO, *arguments: Any, **settings: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        return original(self, *arguments, **settings)

    monkeypatch.setattr(PPO, "update_controller", asked_twice)
    with pytest.raises(SystemExit) as left:
        train(runs_dir, run_id="patient")
    assert left.value.code == 143
    assert (runs_dir / "patient" / "checkpoints" / "latest").is_dir()


STAGES = {
    "final evaluation": (PPO, "evaluate"),
    "video": (session, "record_video"),
    "report": (session, "write_report"),
    "curve": (report, "write_curve"),
}


@pytest.mark.parametrize(
    ("stage", "number"),
    [*((stage, signal.SIGINT) for stage in STAGES), ("final evaluation", signal.SIGTERM), ("report", signal.SIGTERM)],
    ids=lambda each: getattr(each, "name", each),
)
def test_where_a_run_only_looks_the_first_signal_leaves_and_a_resumed_run_repeats_the_end(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, stage: str, number: signal.Signals, finished: api.Run
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(*STAGES[stage], lambda *_, **__: signal.raise_signal(number))
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(runs_dir, "evaluation.every_steps=null", run_id="hasty", seed=3, evaluation__video=True)
    status = json.loads((runs_dir / "hasty" / "status.json").read_text())
    assert (status["state"], status["counts"]["updates"]) == ("interrupted", 3)
    resumed = rl_lab.resume("hasty", runs_dir=runs_dir, quiet=True)
    assert resumed.status["state"] == "finished"
    assert resumed.status["final_score"] == finished.status["final_score"]
    assert (resumed.path / "report.md").is_file() and list((resumed.path / "videos").glob("*.mp4"))


def test_a_signal_after_the_end_leaves_the_run_finished(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(LiveDisplay, "summary", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit):
            train(runs_dir, run_id="late")
    assert RunDirectory.open(runs_dir / "late").read_status()["state"] == "finished"


def test_a_run_without_a_checkpoint_starts_from_its_beginning(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(PPO, "update_controller", lambda self, *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(runs_dir, run_id="early")
    resumed = api.resume("early", runs_dir=runs_dir, quiet=True)
    assert resumed.status["state"] == "finished"
    assert "has no checkpoint yet: it starts from its beginning" in (resumed.path / "run.log").read_text()


def test_a_run_that_died_over_its_report_makes_it_when_resumed(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(session, "write_report", die)
        with pytest.raises(SystemExit):
            api.train("ppo_cartpole", overrides=DEBUG, run_id="cut", runs_dir=runs_dir, quiet=True)
    assert not (runs_dir / "cut" / "report.md").exists()
    run = api.resume("cut", runs_dir=runs_dir, quiet=True)
    assert run.status["state"] == "finished"
    assert "| state | finished |" in (run.path / "report.md").read_text()


def test_a_finished_run_is_not_resumed(finished: api.Run) -> None:
    with pytest.raises(
        RunError, match=f"Run finished has finished already. Evaluate it with `rl-lab evaluate {finished.path}`"
    ):
        api.resume(finished, quiet=True)


def test_an_exact_resume_takes_no_overrides_that_change_a_number(interrupted: api.Run) -> None:
    with pytest.raises(
        ConfigError, match="seed=1: an exact resume .* changes only environment.max_restarts, .* and how long .*optim"
    ):
        api.resume(interrupted, overrides=["seed=1"])


@pytest.mark.parametrize("how", ["resume", "train"])
def test_the_restarts_an_environment_may_have_can_be_changed_at_a_resume(
    interrupted: api.Run, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    seen: list[Any] = []
    original = session.build
    monkeypatch.setattr(session, "build", lambda config, **things: seen.append(config) or original(config, **things))
    if how == "resume":
        resumed = api.resume(interrupted, overrides=["environment.max_restarts=77"], quiet=True)
    else:
        more = ["environment.max_restarts=77"]
        resumed = train(interrupted.path.parent, *more, run_id="interrupted", seed=3, resume_existing=True)
    assert resumed.status["state"] == "finished"
    assert seen[0]["environment"]["max_restarts"] == 77


def test_a_mode_that_is_not_there_is_refused(finished: api.Run) -> None:
    with pytest.raises(ConfigError, match="mode is 'warm': write exact, warm_start, warm_start_optimizer"):
        api.resume(finished, mode="warm")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["warm_start", "warm_start_optimizer"])
def test_a_warm_start_is_a_new_run_with_old_weights(
    finished: api.Run, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    original = PPO.update_controller

    def first_weights(self: PPO, *arguments: Any, **settings: Any) -> Any:
        weight = next(iter(self.actor.parameters()))  # type: ignore[attr-defined]
        seen.setdefault("weight", weight.detach().clone())
        seen.setdefault("moments", float(sum(abs(x).sum() for x in _tensors(self.optimizer.state_dict()["rule"]))))
        return original(self, *arguments, **settings)

    monkeypatch.setattr(PPO, "update_controller", first_weights)
    run = api.resume(finished, mode=mode, overrides=["algorithm.discount=0.7"], quiet=True)
    assert run.id != finished.id
    assert run.path.parent == finished.path.parent
    assert run.config["algorithm"]["discount"] == 0.7
    assert run.status["counts"]["updates"] == 3, "counters begin anew"
    policy = rl_lab.load(finished)
    assert np.array_equal(seen["weight"], next(iter(policy.workflow.actor.parameters())).detach())  # type: ignore[attr-defined]
    assert (seen["moments"] > 0.0) == (mode == "warm_start_optimizer")
    assert f"# {mode} from finished" in (run.path / "overrides.yaml").read_text()


def _tensors(tree: Any) -> list[Any]:
    return [leaf for _, leaf in leaves_with_paths(tree) if hasattr(leaf, "abs") and leaf.dtype.is_floating_point]


def test_outside_the_main_thread_signals_are_left_alone(runs_dir: Path) -> None:
    runs: list[api.Run] = []
    thread = threading.Thread(target=lambda: runs.append(train(runs_dir)))
    thread.start()
    thread.join()
    assert runs[0].status["state"] == "finished"


# --- using what was learnt ---------------------------------------------------------------------


def test_a_loaded_policy_is_the_one_that_was_evaluated(finished: api.Run) -> None:
    """The same policy on the same seeds scores what training wrote down."""
    scored = rl_lab.evaluate(finished, episodes=2)
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    assert scored["eval/episode_return_mean"] == rows[-1]["eval/episode_return_mean"]
    assert all(isinstance(value, float) for value in scored.values())


def test_an_evaluation_may_have_its_own_seed_and_checkpoint(finished: api.Run) -> None:
    assert (
        rl_lab.evaluate("finished", episodes=4, seed=9, checkpoint="best", runs_dir=finished.path.parent)[
            "eval/episodes"
        ]
        == 4
    )
    with pytest.raises(RunError, match="There is no checkpoint 'step_5'"):
        rl_lab.evaluate(finished, episodes=1, checkpoint="step_5")


def test_evaluating_changes_nothing_on_disk(finished: api.Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")}
    rl_lab.evaluate(finished, episodes=1)
    assert {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")} == before


def test_play_writes_a_video_where_there_is_no_window(
    finished: api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    path = rl_lab.play(finished, output=tmp_path / "one.mp4")
    assert path is not None
    assert path.stat().st_size > 0


def test_what_cannot_be_drawn_cannot_be_played(runs_dir: Path) -> None:
    run = api.train("rl_lab/Counter-v0:ppo", overrides=DEBUG, runs_dir=runs_dir, quiet=True)
    with pytest.raises(RunError, match="rl_lab/Counter-v0 cannot render, so there is nothing to show"):
        rl_lab.play(run)
    with pytest.raises(RunError, match="rl_lab/Counter-v0 cannot render here, so there is no video"):
        rl_lab.evaluate(run, episodes=1, video=runs_dir / "x.mp4")


def test_a_run_that_is_not_there_is_refused(runs_dir: Path) -> None:
    with pytest.raises(RunError):
        rl_lab.load("nowhere", runs_dir=runs_dir)


def test_environments_can_be_made_as_algorithms_see_them() -> None:
    environment = rl_lab.make_env("CartPole-v1", num_envs=3)
    rows = environment.reset()
    assert rows.observation["vector"].shape == (3, 4)
    assert rows.is_first.all()
    environment.close()
