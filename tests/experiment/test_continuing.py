"""A run that has ended goes on with more steps: the same run as if it had been meant to be longer from the start."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rl_lab import api
from rl_lab.cli.main import main
from rl_lab.experiment.continuing import note_extension
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.runs.index import RunIndex
from rl_lab.runs.lineage import lineage_of, mark, sentences
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.verify import verify_run
from rl_lab.types import ConfigError, RunError
from rl_lab.utils.tree import equal
from tests.test_resume import overrides_of, reproducible_rows, reproducible_state

LONGER = "training.phases.train.duration_updates=8"
CONSTANT = {
    "ppo": ("optimizers.controller.learning_rate=1e-3", "algorithm.clip_range=0.2"),
    "dqn": ("optimizers.controller.learning_rate=1e-3", "algorithm.epsilon=0.1", "buffers.replay.beta=0.4"),
}
CASES = {"ppo discrete, native": "ppo", "dqn with every switch, prioritised": "dqn"}


def train(run_id: str, runs_dir: Path, *more: str, case: str = "ppo discrete, native", updates: int = 5) -> api.Run:
    experiment, overrides = overrides_of(case, updates=updates)
    words = [*overrides, *CONSTANT[CASES[case]], "logging.every_updates=3", *more]
    return api.train(experiment, overrides=words, run_id=run_id, runs_dir=runs_dir, quiet=True)


def assert_as_if_longer(run: api.Run, whole: api.Run) -> None:
    """Every number is that of the longer run, but what rows said of the fraction that was done."""
    rows = [reproducible_rows(each.path) for each in (run, whole)]
    assert len(rows[0]) == len(rows[1])
    for mine, theirs in zip(*rows, strict=True):
        assert {**mine, "train/phase_fraction": 0} == {**theirs, "train/phase_fraction": 0}
    assert rows[0][-1] == rows[1][-1]
    states = [reproducible_state(each.path) for each in (run, whole)]
    for state in states:
        state["progress"].pop("continuations")
        state["progress"].pop("best_of_ends")
    for section in states[1]:
        assert equal(states[0][section], states[1][section]), section


@pytest.mark.parametrize("case", CASES)
def test_a_finished_run_that_goes_on_equals_one_that_was_longer_from_the_start(case: str, tmp_path: Path) -> None:
    whole, run = train("whole", tmp_path, case=case, updates=8), train("run", tmp_path, case=case)
    ended_at = run.status["counts"]["agent_steps"]
    api.resume("run", runs_dir=tmp_path, quiet=True, training__phases__train__duration_updates=8)
    assert run.status["state"] == "finished" and run.status["counts"]["agent_steps"] > ended_at
    assert_as_if_longer(run, whole)
    assert verify_run(run.directory).is_whole
    (event,) = lineage_of(run.directory.read_manifest())
    assert (event["event"], event["changes"], event["counts"]["agent_steps"]) == ("continued", LONGER, ended_at)
    assert f"continued at {ended_at:,} agent steps" in (run.path / "report.md").read_text()
    assert run.config["training"]["phases"][0]["duration_updates"] == 8


def test_the_best_checkpoint_of_an_end_stays_when_the_run_goes_on_and_gets_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([9.0, 4.0, 12.0])
    monkeypatch.setattr(
        "rl_lab.workflows.base.Workflow.evaluate",
        lambda self, *, episodes: {"eval/episode_return_mean": next(scores)},
    )
    final_only = ("evaluation.final_episodes=1", "evaluation.every_steps=null", "evaluation.every_updates=null")
    run = train("run", tmp_path, *final_only)
    best = (run.path / "checkpoints" / "best").resolve()
    api.resume("run", runs_dir=tmp_path, quiet=True, training__phases__train__duration_updates=8)
    assert (run.status["best_score"], run.status["final_score"]) == (9.0, 4.0)
    assert (run.path / "checkpoints" / "best").resolve() == best
    api.resume("run", runs_dir=tmp_path, quiet=True, training__phases__train__duration_updates=11)
    assert run.status["best_score"] == 12.0
    assert (run.path / "checkpoints" / "best").resolve() == (run.path / "checkpoints" / "latest").resolve() != best


@pytest.mark.parametrize("updates", [5, 6, 8])
def test_a_run_that_ended_between_the_passes_of_a_cycle_goes_on_there(updates: int, tmp_path: Path) -> None:
    """Three passes a cycle: a longer run makes those that are still owed before it collects again."""
    settings = {"case": "dqn with every switch, prioritised"}
    ratio = "training.phases.train.updates_per_step=0.09375"  # of 4 environments and 8 rows: 3 passes
    more = (ratio, "buffers.replay.minimum_rows=32", "evaluation.every_updates=2")
    whole = train("whole", tmp_path, *more, **settings, updates=11)
    run = train("run", tmp_path, *more, **settings, updates=updates)
    for longer in (updates + 1, 11):  # goes on twice, the first time by one pass
        api.resume("run", runs_dir=tmp_path, quiet=True, training__phases__train__duration_updates=longer)
    assert_as_if_longer(run, whole)


def stop_at(updates: int) -> Any:
    return lambda moment: moment.get("updates", 0) < updates


@pytest.mark.parametrize("callback", ["on_row", "on_evaluation", "on_checkpoint"])
def test_a_run_that_a_callback_stopped_goes_on(callback: str, tmp_path: Path) -> None:
    whole = train("whole", tmp_path, updates=8)
    experiment, overrides = overrides_of("ppo discrete, native", updates=8)
    words = [*overrides, *CONSTANT["ppo"], "logging.every_updates=3"]
    settings: dict[str, Any] = {"overrides": words, "run_id": "run", "runs_dir": tmp_path, "quiet": True}
    run = api.train(experiment, **settings, **{callback: stop_at(4)})
    assert run.status["state"] == "stopped" and run.status["counts"]["updates"] < 8
    api.resume(run, quiet=True)
    assert run.status["state"] == "finished"
    assert_as_if_longer(run, whole)
    (event,) = lineage_of(run.directory.read_manifest())
    assert event["event"] == "continued"
    assert sentences(run.directory.read_manifest())[0].endswith(f"after it was stopped: {callback} asked for it")


def test_a_pruned_run_goes_on(tmp_path: Path) -> None:
    from rl_lab.config.compose import compose
    from rl_lab.experiment.session import start_run

    whole = train("whole", tmp_path, updates=8)
    experiment, overrides = overrides_of("ppo discrete, native", updates=8)
    words = [*overrides, *CONSTANT["ppo"], "logging.every_updates=3"]

    def prune(row: dict[str, Any]) -> str | None:
        return "it is the worst" if row["updates"] >= 3 else None

    run = api.Run(
        start_run(compose(experiment, words), overrides=words, run_id="run", runs_dir=tmp_path, quiet=True, prune=prune)
    )
    assert run.status["state"] == "pruned" and run.status["counts"]["updates"] < 8
    api.resume("run", runs_dir=tmp_path, quiet=True)
    assert run.status["state"] == "finished"
    assert_as_if_longer(run, whole)


def test_a_run_that_was_cut_short_for_debugging_says_so(tmp_path: Path) -> None:
    run = train("run", tmp_path, "training.limit_cycles=2", updates=5)
    sentence = r"training.limit_cycles is 2 \(preset=debug sets it\).*Add training.limit_cycles=null"
    for words in ([], [LONGER]):
        with pytest.raises((ConfigError, RunError), match=sentence):
            api.resume(run, quiet=True, overrides=words)
    api.resume(run, quiet=True, overrides=["training.limit_cycles=null"])
    assert run.status["counts"]["updates"] == 5


def test_a_run_that_a_rule_stopped_goes_on_without_it(tmp_path: Path) -> None:
    whole = train("whole", tmp_path, updates=8)
    run = train("run", tmp_path, "training.stop.env_frames=150", updates=8)
    assert run.status["state"] == "stopped"
    with pytest.raises(ConfigError, match="would stop at once: the budget of 100 environment frames is spent"):
        api.resume("run", runs_dir=tmp_path, quiet=True, overrides=["training.stop.env_frames=100"])
    assert run.status["state"] == "stopped"
    api.resume("run", runs_dir=tmp_path, quiet=True, overrides=["training.stop.env_frames=null"])
    assert_as_if_longer(run, whole)


def test_a_continuation_killed_before_it_saved_goes_on_by_a_plain_resume(tmp_path: Path) -> None:
    whole, run = train("whole", tmp_path, updates=8), train("run", tmp_path)
    note_extension(run.directory, {"training.phases.train.duration_updates": 8}, None)
    run.directory.write_status("interrupted")
    for name in ("save", "catch_up"):  # before the undone end is saved, and after it
        child = os.fork()
        if child == 0:
            setattr(Housekeeping, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            try:
                api.resume("run", runs_dir=tmp_path, quiet=True)
            finally:
                os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), name
    api.resume("run", runs_dir=tmp_path, quiet=True)
    assert_as_if_longer(run, whole)


def test_what_differs_from_a_run_that_was_longer_from_the_start_is_said(tmp_path: Path) -> None:
    train("run", tmp_path, "algorithm.clip_range='linear(0.2, 0.1)'", "algorithm.loss_scales.entropy=0.01")
    api.resume("run", runs_dir=tmp_path, quiet=True, overrides=[LONGER])
    log = (tmp_path / "run" / "run.log").read_text()
    assert "algorithm.clip_range runs over the phase 'train', which is longer now" in log
    assert "learning_rate runs over" not in log


REFUSED = [
    ("training.phases.train.duration_updates=5", "Run run has these durations and stop rules already"),
    ("training.phases.train.duration_updates=4", "duration_updates is 4, but that phase has 5 updates already: write"),
    ("training.phases.train.duration_steps=9", "Phase 'train' sets duration_steps and duration_updates: keep the one"),
    ("training.phases.trian.duration_steps=9", "there is no phase 'trian'. Did you mean 'train'?"),
    ("training.stop.env_frame=9", "training.stop.env_frame is not a setting. Did you mean 'training.stop.env_frames'?"),
    (
        "training.phases.train.collect_steps=9",
        "and how long it goes on: training.phases.NAME.duration_steps (_updates, _cycles) and",
    ),
    ("algorithm.discount=0.9", "To go on with other settings, use --mode warm_start_optimizer"),
    ("training.stop.eval_return=1e9", "duration_updates is 5, but that phase has 5 updates already"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return train("run", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("word", "sentence"), REFUSED)
def test_a_continuation_that_cannot_be_is_refused_and_changes_nothing(
    word: str, sentence: str, finished: api.Run
) -> None:
    before = finished.directory.read_manifest(), finished.status
    with pytest.raises(ConfigError) as refused:
        api.resume(finished, quiet=True, overrides=[word])
    assert sentence in str(refused.value)
    assert (finished.directory.read_manifest(), finished.status) == before


def test_without_more_steps_a_finished_run_says_how_to_go_on(finished: api.Run) -> None:
    command = f"rl-lab resume {finished.path} training.phases.train.duration_updates=N"
    with pytest.raises(RunError, match=re.escape(f"or go on with more updates: `{command}`, N of them in all.")):
        api.resume(finished, quiet=True)


def test_a_phase_that_is_over_stays_as_long_as_it_was(tmp_path: Path) -> None:
    experiment, overrides = overrides_of("sac continuous, policy delayed", updates=2)
    api.train(experiment, overrides=overrides, run_id="run", runs_dir=tmp_path, quiet=True)
    with pytest.raises(ConfigError, match="Phase 'prefill' is over, and what came after it follows from it"):
        api.resume("run", runs_dir=tmp_path, overrides=["training.phases.prefill.duration_steps=999"])


def test_a_run_ended_by_an_earlier_version_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Housekeeping, "_note_end", lambda self, *, is_row_due: None)
    train("run", tmp_path)
    with pytest.raises(RunError, match="ended by an earlier version of RL Lab"):
        api.resume("run", runs_dir=tmp_path, overrides=[LONGER])


def test_lineage_is_shown_in_lists_and_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("first", tmp_path)
    heir = api.resume("first", runs_dir=tmp_path, mode="warm_start_optimizer", quiet=True)
    capsys.readouterr()
    main(["list", "--runs-dir", str(tmp_path)])
    assert "LINEAGE" in (shown := capsys.readouterr().out) and "from first" in shown
    main(["show", heir.id, "--runs-dir", str(tmp_path)])
    assert "begun with the weights and optimizers of first at " in capsys.readouterr().out
    rows: list[dict[str, Any]] = RunIndex(tmp_path).find()
    assert {row["id"]: row["lineage"] for row in rows} == {"first": "", heir.id: "from first"}


def test_a_lineage_that_is_not_one_is_left_out() -> None:
    manifest = {
        "lineage": ["x", {"event": "sold"}, {"event": "resumed"}, {"event": "resumed", "counts": {"agent_steps": 9}}]
    }
    assert mark(manifest) == "resumed 2x"
    assert sentences(manifest)[1].endswith("resumed at 9 agent steps (from its beginning)")


CONTINUATIONS = [
    ({"plugins": ["os"]}, "plugins is no duration and no stop rule"),
    ("x", r"manifest.json, continuation 0 is damaged: 'continuations' is \"x\""),
    (None, "continuation 0 is damaged: 'continuations' is null"),
    ({"training.stop.a.b": 1}, "training.stop.a.b is no duration and no stop rule"),
    ({"training.stop.a": 1}, "training.stop.a is not a setting of StopBlock"),
    ({"training.phases.nobody.duration_steps": 1}, "there is no phase 'nobody'"),
    ({"training.phases.train.duration_updates": "x"}, "duration_updates is 'x'"),
    ({"training.phases.train.duration_updates": {"a": []}}, "duration_updates is {'a'"),
    ({"training.limit_cycles": []}, "training.limit_cycles is"),
]


@pytest.mark.parametrize(("changes", "sentence"), CONTINUATIONS, ids=[str(changes) for changes, _ in CONTINUATIONS])
def test_a_continuation_that_is_none_is_refused(changes: Any, sentence: str, finished: api.Run, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, run_id="odd", name="odd", seed=0, files={"config.yaml": ""})
    run.manifest_path.write_text(json.dumps(finished.directory.read_manifest() | {"continuations": [changes]}))
    run.config_path.write_text(finished.directory.read_config_text())
    with pytest.raises((ConfigError, RunError), match=sentence):
        api.resume(run.path, quiet=True)
    assert main(["show", "odd", "--runs-dir", str(tmp_path)]) in (0, 1, 2)
