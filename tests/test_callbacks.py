"""Callbacks from Python: what they are handed, how they stop a run, and that they change nothing else."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.orchestration.callbacks import Callbacks
from rl_lab.types import ConfigError, Episode
from tests.test_resume import assert_same_run

SHORT = ["preset=debug", "training.phases.train.collect_steps=16", "algorithm.epochs=1", "evaluation.video=false"]
SHORT += ["logging.tensorboard=false", "evaluation.every_updates=2", "evaluation.num_envs=2"]
SHORT += ["evaluation.episodes=2", "training.limit_cycles=4"]
EACH = ("on_row", "on_evaluation", "on_checkpoint", "on_episode")


def train(runs_dir: Path, run_id: str, **settings: Any) -> rl_lab.Run:
    return rl_lab.train("ppo_cartpole", overrides=SHORT, run_id=run_id, runs_dir=runs_dir, quiet=True, **settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run without callbacks, `plain`."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "plain")
    return folder


def test_callbacks_get_plain_values_and_change_no_bit(runs: Path) -> None:
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in EACH}

    def meddles(name: str) -> Any:
        def callback(moment: dict[str, Any]) -> None:
            seen[name].append(dict(moment))
            moment.clear()
            random.random(), np.random.rand(3), torch.rand(3)

        return callback

    run = train(runs, "watched", **{name: meddles(name) for name in EACH})
    assert_same_run(runs / "watched", runs / "plain")
    assert [row["updates"] for row in seen["on_row"]] == run.metrics()["updates"].tolist()
    assert [each["eval/episodes"] for each in seen["on_evaluation"]] == [2.0, 2.0, 2.0]
    assert len(seen["on_episode"]) == run.status["counts"]["episodes"] > 0
    assert seen["on_episode"][0].keys() == {"env_index", "episode_return", "length", "is_terminal", "outcome"}
    saved = seen["on_checkpoint"][-1]
    assert saved["path"] == (run.path / "checkpoints" / "latest").resolve()
    assert saved["score"] == run.status["final_score"]
    assert any(each["is_best"] for each in seen["on_checkpoint"])
    assert all(episode.pop("outcome") == {} for episode in seen["on_episode"])  # this environment tells none
    values = [value for moments in seen.values() for moment in moments for value in moment.values()]
    assert all(value is None or isinstance(value, int | float | Path) for value in values)


@pytest.mark.parametrize("name", EACH)
def test_a_callback_stops_the_run_which_saves_and_ends(runs: Path, name: str) -> None:
    ask: Any = (lambda moment: False) if name in ("on_row", "on_checkpoint") else (lambda moment: moment.stop())
    run = train(runs, f"stopped_by_{name}", **{name: ask})
    assert (run.status["state"], run.status["message"]) == ("stopped", f"{name} asked for it.")
    report = (run.path / "report.md").read_text()
    assert f"stopped: {name} asked for it." in report and f"Continue:\n\n```bash\nrl-lab resume {run.path}\n" in report
    assert 1 <= run.status["counts"]["updates"] < 4
    assert f"Stopped: {name} asked for it." in (run.path / "run.log").read_text()
    assert rl_lab.evaluate(run, episodes=1)["eval/episodes"] == 1


@pytest.mark.parametrize("name", ["on_evaluation", "on_episode"])
def test_an_error_in_a_callback_comes_after_a_save_and_the_run_goes_on_exactly(runs: Path, name: str) -> None:
    def breaks(moment: dict[str, Any]) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as raised:
        train(runs, f"broken_by_{name}", **{name: breaks})
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "breaks"
    broken = rl_lab.Run(rl_lab.api.RunDirectory.open(runs / f"broken_by_{name}"))
    assert (broken.status["state"], broken.status["message"]) == ("failed", "LookupError: mine")
    updates: list[int] = []
    rl_lab.resume(broken, on_row=lambda row: updates.append(row["updates"]), quiet=True)
    assert updates[0] > 1, "it went on from where it broke off"
    assert_same_run(broken.path, runs / "plain")


def test_an_error_in_the_last_callback_leaves_a_whole_run(runs: Path) -> None:
    def breaks(moment: dict[str, Any]) -> None:
        if Path(moment["path"]).name and moment["updates"] == 4:
            raise LookupError("late")

    with pytest.raises(LookupError, match="late"):
        train(runs, "late", on_checkpoint=breaks)
    assert rl_lab.resume("late", runs_dir=runs, quiet=True).status["state"] == "finished"
    assert_same_run(runs / "late", runs / "plain")


@pytest.mark.parametrize("name", EACH)
def test_what_cannot_be_called_is_refused_before_a_run_begins(tmp_path: Path, name: str) -> None:
    sentence = f"{name} is 3: write a function that takes one argument, or None"
    with pytest.raises(ConfigError, match=sentence):
        train(tmp_path, "never", **{name: 3})
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=sentence):
        rl_lab.resume("never", runs_dir=tmp_path, **{name: 3})


def test_nothing_is_done_for_callbacks_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_lab.orchestration.callbacks.get_rng_state", lambda: pytest.fail("was called"))
    callbacks = Callbacks()
    callbacks.row({})
    callbacks.evaluation({}, {})
    callbacks.checkpoint({}, path=None, score=None, is_best=False)
    callbacks.episodes([Episode(0, 1.0, 2, is_terminal=True)])
    Callbacks(on_episode=print).episodes([])


def test_after_an_error_no_callback_is_called_again() -> None:
    calls: list[str] = []

    def breaks(moment: dict[str, Any]) -> None:
        calls.append("row")
        raise LookupError

    callbacks = Callbacks(on_row=breaks, on_checkpoint=lambda moment: calls.append("checkpoint"))
    callbacks.row({"updates": 1})
    callbacks.checkpoint({}, path=None, score=None, is_best=False)
    callbacks.row({"updates": 2})
    assert calls == ["row"] and isinstance(callbacks.error, LookupError)
