from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.curve import draw_curve, draw_metric, write_curve
from rl_lab.runs.figures import make_figure
from rl_lab.runs.metrics_file import read_metrics, series
from rl_lab.runs.report import alert_line, run_word, runs_dir_words, write_report
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import MissingExtraError

MakeRun = Callable[..., RunDirectory]


def rows_of_a_run() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(1, 11):
        counters = {"env_frames": 4000 * number, "agent_steps": 1000 * number, "episodes": 9 * number}
        row = counters | {"updates": 4 * number, "wall_s": 0.5 * number}
        row |= {"collect/episode_return_mean": 20.0 * number, "loss/value": 1.0 / number, "system/cpu_percent": 50.0}
        row |= {"time/environment_fraction": 0.25, "time/update_fraction": 0.5 if number > 5 else 0.7}
        if number % 5 == 0:
            row |= {"eval/episode_return_mean": 22.0 * number, "eval/episode_return_std": 3.0}
        rows.append(row)
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_half_written_last_line_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"agent_steps": 1}\n{"agent_steps": 2}\n{"agent_st')
    assert read_metrics(path) == [{"agent_steps": 1}, {"agent_steps": 2}]
    assert caplog.text == ""


def test_a_broken_line_elsewhere_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"agent_steps": 1}\n\x00\x00\xff\n17\n\n{"agent_steps": 2}\n')
    assert read_metrics(path) == [{"agent_steps": 1}, {"agent_steps": 2}]
    assert "line 2 is no row of metrics" in caplog.text
    assert "line 3 is no row of metrics" in caplog.text


def test_no_metrics_file_means_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_series_skips_rows_without_a_number() -> None:
    rows: list[dict[str, Any]] = [{"x": 1}, {}, {"x": None}, {"x": 2.5}]
    assert [value for _, value in series(rows, "x")] == [1.0, 2.5]


@pytest.mark.usefixtures("real_pictures")
def test_the_report_tells_the_run_on_one_page(make_run: MakeRun) -> None:
    run = make_run("mine")
    write_rows(run.metrics_path, rows_of_a_run())
    counts = {"agent_steps": 10000, "env_frames": 40000, "episodes": 90, "updates": 40}
    run.write_status("finished", counts=counts, wall_s=65.2, best_score=220.0, final_score=219.5)
    CheckpointStore(run.checkpoints_dir).save({"a": 1}, agent_steps=1, counts={}, is_best=True)
    run.videos_dir.mkdir()
    (run.videos_dir / "final.mp4").touch()
    assert write_report(run) == run.report_path
    text = run.report_path.read_text()
    for expected in (
        "# ppo on CartPole-v1, seed 1",
        "| run | `mine` |",
        "| state | finished |",
        "| final evaluation score | **219.50** |",
        "| best evaluation score | **220.00** |",
        "| agent steps | 10,000 |",
        "| env frames | 40,000 |",
        "| wall time | 1:05 |",
        "![learning curve](learning_curve.png)",
        "| `collect/episode_return_mean` | 200 |",
        "| `loss/value` | 0.1 |",
        "| update | 60.0 % |\n| environment | 25.0 % |",
        f"rl-lab resume {run.path} --mode warm_start",  # it has nothing to continue
        f"rl-lab play {run.path}",
        run.read_manifest()["command_line"],
        "[best](checkpoints/best)",
        "[latest](checkpoints/latest)",
        "[final.mp4](videos/final.mp4)",
        "[metrics.jsonl](metrics.jsonl)",
        "```yaml\nalgorithm:\n  discount: 0.99\nseed: 1\n```",
    ):
        assert expected in text, expected
    assert "system/cpu_percent" not in text
    assert run.curve_path.read_bytes().startswith(b"\x89PNG")
    assert run.curve_path.stat().st_size > 10_000


def test_a_run_that_has_no_rows_yet_gets_a_report_too(make_run: MakeRun) -> None:
    run = make_run("mine")
    text = write_report(run).read_text()
    assert "*No episode has finished yet.*" in text
    assert f"rl-lab resume {run.path}\n" in text
    assert "| final evaluation score | not evaluated |" in text
    assert "Last metrics" not in text and "Where the time went" not in text
    assert not run.curve_path.exists()


def test_a_half_written_row_and_values_that_are_not_finite_do_not_stop_the_report(make_run: MakeRun) -> None:
    run = make_run("mine")
    rows = rows_of_a_run()
    rows[-1] |= {"loss/value": None, "non_finite": ["loss/value"], "eval/episode_return_mean": None}
    write_rows(run.metrics_path, rows)
    with run.metrics_path.open("a") as file:
        file.write('{"env_frames": 44')
    text = write_report(run).read_text()
    assert "| `loss/value` | not finite |" in text
    assert "| agent steps | 10,000 |" in text
    assert "non_finite" not in text


def test_one_point_and_all_nan_can_be_drawn(tmp_path: Path) -> None:
    row: dict[str, Any] = {"agent_steps": 0, "env_frames": 0, "eval/episode_return_mean": float("nan")}
    assert write_curve(tmp_path / "curve.png", [row], title="t")
    assert not write_curve(tmp_path / "none.png", [{"agent_steps": 0}], title="t")
    assert not (tmp_path / "none.png").exists()


def test_without_matplotlib_the_report_says_what_to_install(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    write_rows(run.metrics_path, rows_of_a_run())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"learning curve needs matplotlib: `pip install matplotlib`"):
        write_curve(run.curve_path, rows_of_a_run(), title="t")
    assert "needs matplotlib: `pip install matplotlib`" in write_report(run).read_text()


def test_a_run_without_steps_has_its_curve_over_updates() -> None:
    rows = [{"agent_steps": 0, "updates": updates, "eval/episode_return_mean": 0.5} for updates in (300, 600)]
    for draw in (
        lambda axes: draw_curve(axes, rows, title="t"),
        lambda axes: draw_metric(axes, rows, "eval/episode_return_mean"),
    ):
        axes = make_figure("A curve", 320, 240, dpi=80).add_subplot()
        assert draw(axes)
        assert axes.get_xlabel() == "updates" and list(axes.lines[0].get_xdata()) == [300, 600]


def test_an_alert_of_a_run_without_steps_says_after_how_many_updates() -> None:
    alert = {
        "metric": "loss/noise",
        "value": 2.0,
        "agent_steps": 0,
        "updates": 1200,
        "condition": "above 1",
        "tip": "x",
    }
    assert alert_line(alert) == "loss/noise 2 after 1,200 updates (above 1): x"


def test_commands_find_runs_that_are_not_in_the_usual_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    usual, elsewhere = RunDirectory(Path("runs/a")), RunDirectory(Path("my runs/a"))
    assert (run_word(usual), runs_dir_words(usual)) == ("a", "")
    assert (run_word(elsewhere), runs_dir_words(elsewhere)) == ("'my runs/a'", " --runs-dir 'my runs'")
