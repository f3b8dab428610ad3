"""Runs side by side: which are seeds of one method, where they are compared, and what stands beside them."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rl_lab.runs import tables as tables_module
from rl_lab.runs.compare import Comparison, compare_runs
from rl_lab.runs.compare_report import write_export
from rl_lab.runs.compare_tables import run_table, score_tables
from rl_lab.runs.metrics_file import read_metrics, series
from rl_lab.runs.published import published_beside, published_curves, task_of
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.series import Curve, common_grid, on_grid, read_curves
from rl_lab.runs.tables import Table
from rl_lab.types import ConfigError, MissingExtraError, RunError

MakeRun = Callable[..., RunDirectory]
METRIC = "eval/episode_return_mean"


@pytest.fixture
def made(make_run: MakeRun) -> MakeRun:
    """A run with a curve: a value for every thousand env frames."""

    def make(
        run_id: str, values: Sequence[float], *, seed: int = 0, discount: float = 0.9, name: str = "ppo", **more: str
    ) -> RunDirectory:
        run = make_run(run_id, **more)
        run.config_path.write_text(f"seed: {seed}\nalgorithm: {{discount: {discount}}}\nruns: {{id: {run_id}}}\n")
        run.write_manifest(run.read_manifest() | {"name": name, "seed": seed})
        rows = [{"env_frames": 1000 * (index + 1), METRIC: value} for index, value in enumerate(values)]
        run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run

    return make


def test_runs_that_differ_in_their_seed_alone_are_one_group(made: MakeRun) -> None:
    runs = [
        made("a", [1.0] * 10, seed=1),
        made("b", [2.0] * 10, seed=2),
        made("c", [9.0] * 10, discount=0.99),
        made("d", [5.0] * 10, environment_id="Pendulum-v1"),
    ]
    found = compare_runs(runs)
    assert [(group.label, [each.run.id for each in group.members]) for group in found.groups] == [
        ("discount=0.9", ["a", "b", "d"]),
        ("discount=0.99", ["c"]),
    ]
    assert found.tasks == ["CartPole-v1", "Pendulum-v1"] and found.shared_tasks() == []
    assert found.scores(found.groups[0], "CartPole-v1").tolist() == [1.0, 2.0]
    assert found.differences() == ["algorithm.discount"]
    one = compare_runs(runs, group_by=["algorithm.discount"])
    assert [len(group.members) for group in one.groups] == [3, 1]
    with pytest.raises(
        ConfigError, match="--group-by algorithm.discont: these runs have no such setting. Did you mean"
    ):
        compare_runs(runs, group_by=["algorithm.discont"])


def test_groups_of_different_experiments_have_their_names(made: MakeRun) -> None:
    others = [made("c", [1.0], name="three"), made("d", [1.0], name="three", discount=0.5)]
    labels = [group.label for group in compare_runs([made("e", [1.0], name="one", discount=0.7), *others]).groups]
    assert labels == ["one", "three, discount=0.9", "three, discount=0.5"], "what tells those of one name apart"
    found = compare_runs([made("a", [1.0], name="one"), made("b", [1.0], name="two", discount=0.99)])
    assert [group.label for group in found.groups] == ["one", "two"]


def test_a_score_is_the_mean_of_the_last_tenth_that_all_runs_reach(made: MakeRun) -> None:
    long, short = made("a", list(range(1, 41)), seed=1), made("b", list(range(1, 21)), seed=2)
    found = compare_runs([long, short])
    assert found.end("CartPole-v1", METRIC) == 22_000  # a tenth beyond the shorter one
    # of a: rows above 19,800 up to 22,000; of b: above 18,000 up to its end
    assert found.scores(found.groups[0], "CartPole-v1").tolist() == [21.0, 19.5]
    assert found.notes == [
        "CartPole-v1: compared up to 22,000 env_frames, a tenth beyond the end of the shortest run, b; 1 of 2 go on"
    ]
    assert compare_runs([long, short], at=5000).scores(found.groups[0], "CartPole-v1").tolist() == [5.0, 5.0]
    assert compare_runs([long, short], at=40_000).notes == [
        "CartPole-v1: 1 of 2 runs end before 40,000 env_frames and count with what they had: b at 20,000"
    ]
    with pytest.raises(ConfigError, match="at is -1: write a number of env_frames above 0"):
        compare_runs([long], at=-1)


def test_what_a_reader_must_know_is_said(made: MakeRun) -> None:
    first, twin, empty = made("a", [1.0]), made("b", [2.0]), made("c", [], seed=3)
    twin.write_manifest(twin.read_manifest() | {"git": {"commit": "b" * 40}})
    notes = compare_runs([first, twin, empty]).notes
    assert any("its runs are of 2 commits: " in note for note in notes)
    assert "ppo: a seed occurs more than once, so its runs are not independent" in notes
    assert f"ppo: without {METRIC}, so left out: c" in notes


def test_runs_that_take_no_steps_are_compared_over_updates_unless_an_axis_was_asked_for(made: MakeRun) -> None:
    def offline(run_id: str, env_frames: int = 0, rows: int = 3) -> RunDirectory:
        run = made(run_id, [])
        lines = [{"env_frames": env_frames, "updates": 100 * (row + 1), METRIC: float(row)} for row in range(rows)]
        run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    still, online, empty = [offline("a"), offline("b", env_frames=500)], made("c", [1.0, 2.0]), made("d", [])
    found = compare_runs([*still, empty])
    assert found.x == "updates" and found.groups[0].members[0].curves[METRIC].x.tolist() == [100, 200, 300]
    assert found.notes[0] == "over updates: no env_frames pass in these runs while they learn"
    assert compare_runs([offline("e", rows=1)]).x == "updates", "an evaluation after no step"
    asked = compare_runs(still, x="env_frames")
    assert asked.x == "env_frames" and asked.notes[0].endswith("so that they count as they end (--x updates): a, b")
    mixed = compare_runs([*still, online])
    assert mixed.end("CartPole-v1", METRIC) == 2000 and len(mixed.notes) == 2, mixed.notes
    assert sorted(mixed.scores(mixed.groups[0], "CartPole-v1").tolist()) == [2.0, 2.0, 2.0]
    assert mixed.x == "env_frames" and mixed.notes[0].endswith("so that they count as they end (--x updates): a, b")
    assert compare_runs([online]).notes == [] and compare_runs([made("f", [1.0])]).x == "env_frames"


def test_a_metric_or_counter_that_is_not_there_is_answered(made: MakeRun) -> None:
    run, empty = made("a", [1.0]), made("b", [])
    with pytest.raises(
        ConfigError, match="No row of these runs has 'eval/episode_retur'. Did you mean 'eval/episode_ret"
    ):
        compare_runs([run], metrics=["eval/episode_retur"])
    with pytest.raises(ConfigError, match="x is 'env_frame'. Did you mean 'env_frames'"):
        compare_runs([run], x="env_frame")
    with pytest.raises(RunError, match="None of these runs has logged anything yet: b"):
        compare_runs([empty])
    found = compare_runs([run, made("c", [], discount=0.5)]).tables()[0]
    assert [0, None, "", None, "", None, ""] in [row[1:] for row in found.rows], "nothing, rather than nan"


def test_tables_give_the_estimates_and_the_differences(made: MakeRun) -> None:
    runs = [made(f"a{seed}", [float(seed)] * 10, seed=seed) for seed in range(4)]
    runs += [made(f"b{seed}", [float(10 + seed)] * 10, seed=seed, discount=0.99) for seed in range(4)]
    scores, improvements, difference = compare_runs(runs).tables()
    assert scores.title == f"CartPole-v1: {METRIC} at 10,000 env frames"
    assert [row[:3] for row in scores.rows] == [["discount=0.9", 4, 1.5], ["discount=0.99", 4, 11.5]]
    assert improvements.rows == [["discount=0.9 > discount=0.99", 0.0, "0 to 0"]]
    assert difference.rows == [["algorithm.discount", "0.9", "0.99"]]


def test_groups_with_runs_in_every_environment_are_aggregated(made: MakeRun) -> None:
    runs = []
    for place, environment in enumerate(("CartPole-v1", "Pendulum-v1")):
        for discount in (0.9, 0.99):
            for seed in (1, 2):
                run_id = f"r{place}-{discount}-{seed}"
                values = [10.0 * place + seed + (discount == 0.99)]
                runs.append(made(run_id, values, seed=seed, discount=discount, environment_id=environment))
    found = compare_runs(runs)
    assert found.shared_tasks() == ["CartPole-v1", "Pendulum-v1"]
    table = score_tables(found)[-1]
    assert table.title == f"{METRIC} over 2 environments, scores as they are"
    assert [row[4] for row in table.rows] == [pytest.approx((1.5 + 11.5) / 2), pytest.approx((2.5 + 12.5) / 2)]


def test_of_many_groups_only_the_best_is_compared_with_the_others(made: MakeRun) -> None:
    runs = [made(f"r{index}", [float(index)], discount=0.9001 + index / 1e7) for index in range(6)]
    improvements = compare_runs(runs).tables()[1]
    assert [row[:2] for row in improvements.rows] == [[f"F > {other}", 1.0] for other in "ABCDE"]


# --- curves ------------------------------------------------------------------------------------


def test_a_curve_read_quickly_is_the_curve_read_whole(tmp_path: Path) -> None:
    rows = [{"env_frames": index, "a/b": index / 7, "a/bc": -1.0} for index in range(50)]
    rows[3]["a/b"] = None  # type: ignore[typeddict-item]
    lines = [json.dumps(row) for row in rows]
    lines[5] = '{"a/b":-1.5e-3,"env_frames":5}'  # another order, no blanks
    lines[6] = '{"env_frames": 6, "non_finite": ["a/b"]}'
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + '\n{"env_frames": 50, "a/b": 99')  # cut short by a kill
    curve = read_curves(path, "env_frames", ["a/b"])["a/b"]
    slow = [(row["env_frames"], value) for row, value in series(read_metrics(path), "a/b")]
    assert list(zip(curve.x, curve.y, strict=True)) == slow and len(slow) == 48
    assert len(read_curves(tmp_path / "none", "env_frames", ["a/b"])["a/b"]) == 0


def test_curves_meet_on_a_grid() -> None:
    dense = Curve(np.arange(1000.0), np.arange(1000.0) % 2)  # 0 1 0 1 ...
    sparse = Curve(np.asarray([0.0, 1000.0]), np.asarray([0.0, 10.0]))
    grid = common_grid([dense, sparse])
    assert (grid[0], grid[-1], len(grid)) == (0.0, 1000.0, 200)
    assert on_grid(dense, grid)[1:-1] == pytest.approx(0.5, abs=0.2)
    assert on_grid(sparse, grid) == pytest.approx(grid / 100)


# --- published curves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "task"),
    [("dmc/walker_walk", "walkerwalk"), ("ALE/MsPacman-v5", "mspacman"), ("UpNDownNoFrameskip-v4", "upndown")],
)
def test_the_letters_of_a_task_are_those_of_the_environment(environment: str, task: str) -> None:
    assert task_of(environment) == task


def test_published_curves_are_found_by_method_and_suite() -> None:
    (curve,) = published_curves("dreamerv3:dmc_state", ["dmc/acrobot_swingup", "CartPole-v1"]).values()
    assert (curve.method, curve.source, curve.seeds) == ("dreamerv3", "danijar/dreamerv3", "5")
    assert (curve.curve.x[0], curve.curve.y[0], curve.std[0]) == (50_000, 63.4, 43.0)
    assert published_curves("dreamerv1:dmc", ["dmc/walker_walk"])["dmc/walker_walk"].method == "dreamerv1"
    assert published_curves("dreamerv3:atari100k_pixels", ["ALE/UpNDown-v5"])


def test_published_curves_that_are_not_there_are_answered() -> None:
    with pytest.raises(
        ConfigError, match=r"no such curves are here. Did you mean 'dreamerv3:dmc_state'\? There are: curl"
    ):
        published_curves("dreamer3:dmc_state", ["dmc/walker_walk"])
    with pytest.raises(
        ConfigError, match="dreamerv3:dmc is ambiguous: write dreamerv3:dmc_pixels or dreamerv3:dmc_state"
    ):
        published_curves("dreamerv3:dmc", ["dmc/walker_walk"])
    with pytest.raises(ConfigError, match="has no curve for CartPole-v1. It has: acrobot_swingup, "):
        published_curves("dreamerv3:dmc_state", ["CartPole-v1"])
    with pytest.raises(ConfigError, match="--against needs --x env_frames, .*; here it is updates"):
        published_beside(["dreamerv3:dmc_state"], ["dmc/walker_walk"], x="updates")


def test_published_curves_stand_beside_ones_own(made: MakeRun, tmp_path: Path) -> None:
    run = made("a", [float(value) for value in range(1, 101)], environment_id="dmc/walker_walk")
    found = compare_runs([run], against=["dreamerv3:dmc_state", "tdmpc2:dmc_state"])
    rows = found.tables()[0].rows
    assert [row[0] for row in rows[1:]] == [
        "dreamerv3, published (5 seeds, danijar/dreamerv3)",
        *(row[0] for row in rows[2:]),
    ]
    assert rows[1][4] == published_curves("dreamerv3:dmc_state", ["dmc/walker_walk"])["dmc/walker_walk"].curve.y[1]
    assert found.write(tmp_path / "with.png").stat().st_size > 10_000


def test_a_published_curve_that_begins_later_has_no_score_and_one_evaluation_is_a_point(made: MakeRun) -> None:
    run = made("a", [32.0], environment_id="dmc/walker_walk")
    found = compare_runs([run], against=["dreamerv3:dmc_state"])
    assert found.tables()[0].rows[1][4] is None
    ours, published = found.plot().axes[0].lines
    assert (ours.get_marker(), published.get_marker()) == ("o", "s")
    several = compare_runs([run, made("b", [40.0], environment_id="dmc/walker_walk", seed=1)]).plot()
    assert several.axes[0].lines[-1].get_marker() == "o"
    longer = compare_runs([made("c", [1.0, 2.0])]).plot()
    assert longer.axes[0].lines[0].get_marker() == "None"


# --- files -------------------------------------------------------------------------------------


@pytest.fixture
def comparison(made: MakeRun) -> Comparison:
    return compare_runs([made("a", [1.0, 2.0]), made("b", [3.0, 4.0], discount=0.99)])


def test_a_file_is_written_by_its_ending(comparison: Comparison, tmp_path: Path) -> None:
    for name in ("deep/down/c.png", "c.html", "c.md"):
        assert comparison.write(tmp_path / name).is_file()
    assert "](c.png)" in (tmp_path / "c.md").read_text() and (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match=r"c.pdf ends in '.pdf': write .png, .html, .md"):
        comparison.write(tmp_path / "c.pdf")
    with pytest.raises(ConfigError, match="band is 'wide': write ci, std, range"):
        comparison.plot(band="wide")  # type: ignore[arg-type]
    assert comparison._repr_html_().startswith('<p><img alt="curves" src="data:image/png;base64,')


@pytest.mark.parametrize("band", ["ci", "std", "range"])
def test_a_picture_has_a_panel_for_each_environment_and_metric(made: MakeRun, band: str) -> None:
    runs = [made(f"r{seed}", [1.0, 2.0, float(seed)], seed=seed) for seed in range(3)]
    runs.append(made("other", [1.0, 2.0], environment_id="Pendulum-v1"))
    figure = compare_runs(runs, metrics=["eval/return", METRIC]).plot(band=band)  # type: ignore[arg-type]
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == ["CartPole-v1"] * 2 + ["Pendulum-v1"] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ppo (1-3 runs)"]
    assert shown[0].collections and not shown[2].collections  # a band over three runs, none over one


def test_a_missing_pyarrow_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"Parquet files need pyarrow: `pip install 'rl-lab\[parquet\]'`"):
        tables_module.to_parquet(Table("t", ("a",), [[1]]))


def test_latex_and_html_escape_what_they_would_read_as_theirs() -> None:
    table = Table("t", ("a_b", "50 %"), [["x & <y> \\ ~^", 1.23456], ["{z}", float("nan")]])
    latex = tables_module.to_latex(table)
    assert (
        r"a\_b & 50 \% \\" in latex and r"x \& \textless{}y\textgreater{} \textbackslash{} \textasciitilde{}" in latex
    )
    assert r"\{z\} & - \\" in latex and r"\begin{tabular}{lr}" in latex
    assert "x &amp; &lt;y&gt; \\ ~^" in tables_module.to_html(table)
    assert json.loads(tables_module.to_json(table))[1] == {"a_b": "{z}", "50 %": None}
    assert tables_module.to_markdown(Table("", ("a|b",), [["c|d"]])) == "| a\\|b |\n|---|\n| c\\|d |\n"


def test_a_latex_table_compiles_whatever_stands_in_it(tmp_path: Path) -> None:
    """`[` and `*` at the begin of a line are arguments of what ends the line before; a title is one line."""
    rows = [
        [[1, 2], "*starred", 0.5],
        ["*starred", {"a": [1]}, float("nan")],
        ["a_b & 50 % ~ ^ \\ # $ {x} <y> ±", "\"quoted\" 'x' -- `tick` | é ß", float("inf")],
        ["two\nlines", "tab\t\x00\x1b", -1e-9],
    ]
    text = tables_module.to_latex(Table("50 % of\nrows \\x", ("[first", "sec_ond", "95 %"), rows))
    assert text.splitlines()[0].startswith("% ") and text.splitlines()[1] == r"\begin{tabular}{llr}"
    assert "{}[first & " in text and "\n{}[1, 2] & " in text and "\n{}*starred & " in text and "two lines" in text
    assert "lualatex" not in text and "lualatex" in tables_module.to_latex(Table("t", ("α",), [[1]]))
    compiler = shutil.which("pdflatex")
    if compiler is None:
        pytest.skip("needs pdflatex")
    page = f"\\documentclass{{article}}\n\\usepackage{{booktabs}}\n\\begin{{document}}\n{text}\\end{{document}}\n"
    (tmp_path / "page.tex").write_text(page)
    words = [compiler, "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(words, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    assert (tmp_path / "page.pdf").is_file()


def test_scores_of_several_environments_are_one_table_for_programs(made: MakeRun, tmp_path: Path) -> None:
    runs = [made("a", [1.0]), made("b", [2.0], environment_id="Pendulum-v1")]
    for format in ("csv", "json", "html", "latex"):
        write_export(tmp_path / format, compare_runs(runs), "scores", format)
    rows = json.loads((tmp_path / "json").read_text())
    assert [row["mean"] for row in rows] == [1.0, 2.0, 1.5] and "Pendulum-v1" in rows[1]["title"]
    assert (tmp_path / "latex").read_text().count(r"\begin{tabular}") == 3


def test_of_two_evaluations_at_one_place_the_last_is_drawn_and_counts() -> None:
    curve = Curve(np.array([1.0, 2.0, 2.0]), np.array([5.0, 6.0, 7.0]))
    found = curve.last_of_each()
    assert (found.x.tolist(), found.y.tolist()) == ([1.0, 2.0], [5.0, 7.0])
    assert [curve.until(2.0), curve.until(1.5), curve.until(0.5)] == [7.0, 5.0, 5.0]
    late = Curve(np.array([95.0, 100.0, 100.0]), np.array([5.0, 6.0, 7.0]))
    assert late.until(100.0) == 6.0, "the mean of 5 and 7"


def test_a_parquet_column_has_one_kind_of_value() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [["auto", 1, True, None], [5000, 2.5, 1, 3], [None, None, None, None]]
    found = parquet.read_table(io.BytesIO(tables_module.to_parquet(Table("t", ("a", "b", "c", "d"), rows)))).to_pydict()
    texts = {"a": ["auto", "5000", None], "c": ["True", "1", None]}
    assert found == {**texts, "b": [1.0, 2.5, None], "d": [None, 3, None]}


def test_the_table_of_runs_has_no_column_twice(made: MakeRun) -> None:
    columns = run_table(compare_runs([made("a", [1.0])])).columns
    assert len(set(columns)) == len(columns) and "seed" in columns and "updates" in columns
