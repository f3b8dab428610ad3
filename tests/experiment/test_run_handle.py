"""A run in a notebook: its numbers as columns, its curve, its video, and how it shows itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import rl_lab
from rl_lab.collection.evaluator import Evaluator
from rl_lab.runs.metrics_file import columns
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, RunError

SHORT = ["preset=debug", "evaluation.video=false", "logging.tensorboard=false", "evaluation.num_envs=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rl_lab.Run:
    runs_dir = tmp_path_factory.mktemp("runs")
    return rl_lab.train("ppo_cartpole", overrides=SHORT, run_id="short", runs_dir=runs_dir, quiet=True)


def test_rows_become_columns_with_gaps() -> None:
    found = columns([{"updates": 1, "loss/a": 0.5}, {"updates": 2, "loss/a": None, "b": 3, "non_finite": ["loss/a"]}])
    assert found["updates"].dtype == np.int64 and found["updates"].tolist() == [1, 2]
    np.testing.assert_array_equal(found["loss/a"], [0.5, np.nan])
    np.testing.assert_array_equal(found["b"], [np.nan, 3.0])
    assert found.keys() == {"updates", "loss/a", "b"}
    assert columns([]) == {}


def test_metrics_are_the_rows_of_the_file(run: rl_lab.Run) -> None:
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    found = run.metrics()
    assert {len(column) for column in found.values()} == {len(rows)}
    assert found["agent_steps"].tolist() == [row["agent_steps"] for row in rows]
    assert found["eval/episode_return_mean"][-1] == run.status["final_score"]


def test_columns_are_what_pandas_wants(run: rl_lab.Run) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(run.metrics())
    assert table["updates"].iloc[-1] == 3 and len(table.columns) == len(run.metrics())


def test_a_run_is_drawn_in_new_axes_or_in_ones_own(run: rl_lab.Run) -> None:
    from matplotlib.figure import Figure

    axes = run.plot()
    assert axes.get_title(loc="left") == "short" and axes.figure is not None
    mine = Figure().add_subplot()
    assert run.plot("loss/policy", "loss/value", axes=mine) is mine
    assert [line.get_label() for line in mine.get_lines()] == ["loss/policy", "loss/value"]
    with pytest.raises(
        ConfigError, match="no row of run short has a number called 'loss/polcy'. Did you mean 'loss/pol"
    ):
        run.plot("loss/polcy")


def test_a_video_is_recorded_where_there_is_none(run: rl_lab.Run) -> None:
    path = run.video()
    assert path.parent == run.path / "videos" and path.stat().st_size > 0
    before = path.stat().st_mtime_ns
    assert run.video() == path and path.stat().st_mtime_ns == before


def test_what_cannot_be_drawn_has_no_video(run: rl_lab.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (run.path / "videos").glob("*.mp4"):
        path.unlink()
    monkeypatch.setattr(Evaluator, "record", lambda *_, **__: None)
    with pytest.raises(RunError, match="CartPole-v1 cannot render here, so there is no video"):
        run.video()


def test_a_run_shows_itself_in_a_line_and_in_a_notebook(run: rl_lab.Run) -> None:
    score = run.status["final_score"]
    steps = run.status["counts"]["agent_steps"]
    best = run.status["best_score"]
    line = f"<Run short: finished, {steps:,} agent steps, best score {best:,.1f}, final score {score:,.1f}; {run.path}>"
    assert repr(run) == line
    shown = run._repr_html_()
    assert "<b>short</b> finished" in shown and "data:image/png;base64," in shown


def test_a_run_without_rows_shows_itself_too(tmp_path: Path) -> None:
    bare = rl_lab.Run(RunDirectory.create(tmp_path / "a&b", run_id="bare", name="x", seed=0))
    assert repr(bare) == f"<Run bare: created, 0 agent steps; {bare.path}>"
    assert "a&amp;b" in bare._repr_html_() and "<img" not in bare._repr_html_()
    assert bare.metrics() == {}
    with pytest.raises(RunError, match="Run bare has no returns to draw yet: no episode has ended"):
        bare.plot()
    with pytest.raises(ConfigError, match=r"run.metrics\(\) has: nothing yet"):
        bare.plot("loss/policy")
