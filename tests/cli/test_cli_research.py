"""A research day as a user types it: three tiny runs, found, tagged, compared, exported, reported, cleaned up."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.cli.main import main
from rl_lab.runs.index import RunIndex
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
TINY = [
    *("preset=debug", "training.phases.train.collect_steps=16", "algorithm.epochs=1", "evaluation.num_envs=2"),
    *("evaluation.video=false", "logging.tensorboard=false"),
]
RUNS = {"first": ("0.9", "1"), "second": ("0.9", "2"), "third": ("0.99", "1")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, two seeds of one method and one of another, in a repository with a change that is not committed.
    Tests that change them copy them first."""
    folder = tmp_path_factory.mktemp("day")
    (folder / "code.py").write_text("before\n")
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org"]
    for words in (["init", "-q", "-b", "trunk"], ["add", "code.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    (folder / "code.py").write_text("after\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, (discount, seed) in RUNS.items():
            words = [f"algorithm.discount={discount}", f"seed={seed}", "--run-id", name, "-q"]
            assert main(["train", "ppo_cartpole", *TINY, *words]) == 0
    return folder / "runs"


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of the three runs."""
    shutil.copytree(trained, tmp_path / "runs", symlinks=True, ignore=shutil.ignore_patterns("index.sqlite*"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Page(HTMLParser):
    """Counts what opens, checks that it is closed, and keeps the texts of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_field_with_a_dash_sorts_descending(rl: Any, here: Path) -> None:
    def order(*words: str) -> list[str]:
        return rl("list", "--quiet", *words).out.split()

    assert order("--sort", "-seed")[0] == order("--sort=-seed")[0] == order("--sort", "seed")[0] == "second"
    assert order("--sort", "-seed", "--reverse")[-1] == "second"
    assert order("--sort", "id") == ["first", "second", "third"] == order("--sort", "-id")[::-1]
    headings = rl("list", "--sort", "-collect/episode_length_mean").out.splitlines()[0]
    assert headings.endswith("COLLECT/EPISODE LENGTH MEAN")
    assert [run.id for run in rl_lab.find_runs(sort="-id", runs_dir=here / "runs")] == ["third", "second", "first"]
    assert "expected one argument" in rl("list", "--sort", "--reverse").err


def test_runs_are_found_by_algorithm_environment_setting_and_metric(rl: Any, here: Path) -> None:
    question = ("list", "--where", "algorithm=ppo", "--where", "env~Cart", "--sort", "eval/return", "--limit", "20")
    answer = rl(*question)
    assert answer.code == 0
    header, *lines = answer.out.splitlines()
    assert header.split()[-3:] == ["EVAL/EPISODE", "RETURN", "MEAN"] and len(lines) == 3
    values = [float(line.split()[-1]) for line in lines]
    assert values == sorted(values, reverse=True)
    assert rl("list", "-q", "--where", "algorithm.discount>0.95").out == "third\n"
    assert rl("list", "-q", "--where", "seed=1", "--reverse").out == "first\nthird\n"
    rows = json.loads(rl(*question, "--json").out)
    assert {"eval/episode_return_mean", "host", "branch", "config_hash", "progress"} <= rows[0].keys()
    table = list(csv.DictReader(io.StringIO(rl("list", "--csv", "--show", "algorithm.discount").out)))
    assert [row["algorithm.discount"] for row in table] == ["0.99", "0.9", "0.9"]
    misspelt = rl("list", "--where", "algoritm=ppo")
    assert misspelt.code == 2 and "Did you mean 'algorithm'?" in misspelt.err
    assert rl("list", "--where", "algorithm=sac").out.startswith("No run in runs matches")


def test_a_broken_index_is_rebuilt_and_one_is_rebuilt_on_request(rl: Any, here: Path) -> None:
    rl("list")
    Path("runs/index.sqlite").write_bytes(b"no database" * 1000)
    assert rl("list", "-q").out == "third\nsecond\nfirst\n"
    Path("runs/first/metrics.jsonl").write_text('{"eval/episode_return_mean": 1234.0}\n')
    assert rl("list", "-q", "--where", "eval/return=1234").out == ""
    assert rl("list", "-q", "--where", "eval/return=1234", "--rebuild").out == "first\n"


def test_a_run_keeps_the_state_of_the_code_it_began_with(rl: Any, here: Path) -> None:
    assert Path("runs/first/changes.diff").read_text().endswith("-before\n+after\n")
    shown = rl("show", "first").out
    assert " with changes on trunk" in shown and "runs/first/changes.diff" in shown
    assert rl("list", "-q", "--where", "branch=trunk", "--where", "git~+changes").out == "third\nsecond\nfirst\n"


def test_tags_and_notes_lie_in_the_run(rl: Any, here: Path) -> None:
    assert rl("tag", "second", "paper", "good-one").out == "second: paper, good-one\n"
    assert rl("tag", "second", "--remove", "good-one").out == "second: paper\n"
    assert rl("tag", "first").out == "first: no tags\n"
    assert rl("note", "second", "the third seed diverges").out == "the third seed diverges\n"
    assert rl("note", "second", "or", "not").out == "the third seed diverges\nor not\n"
    for name in os.listdir("runs"):
        if name.startswith("index.sqlite"):
            os.unlink(Path("runs", name))
    assert rl("list", "-q", "--tag", "paper").out == rl("list", "-q", "diverges").out == "second\n"
    assert rl("note", "second", "--replace", "").out == rl("note", "first").out == "no notes\n"
    assert rl("note", "second", "--replace").code == 2
    assert "has no tag 'papper'. Did you mean 'paper'?" in rl("tag", "second", "--remove", "papper").err


def test_runs_are_compared_in_one_command(rl: Any, here: Path) -> None:
    answer = rl("compare", "first", "second", "third", "--metrics", "eval/return", "--x", "env_frames")
    assert answer.code == 0
    for expected in ("IQM 95 %", "discount=0.9 ", "discount=0.99", "probability of improvement", "algorithm.discount"):
        assert expected in answer.out
    assert Path("compare.png").read_bytes()[:4] == b"\x89PNG" and answer.out.endswith("written: compare.png\n")
    facts = json.loads(rl("compare", "--where", "env~Cart", "--output", "c.html", "--json").out)
    assert [(each["label"], len(each["runs"])) for each in facts["groups"]] == [
        *(("discount=0.9", 2), ("discount=0.99", 1))
    ]
    page = Page(Path("c.html").read_text())
    assert page.counts["table"] == 4 and page.counts["img"] == 1 and "discount=0.99" in page.texts
    for words, message in (
        (("compare",), "no run is named: write RUN, or --where, --tag or --sweep"),
        (("compare", "first", "--metrics", "eval/retun"), "Did you mean"),
        (("compare", "first", "--output", "c.pdf"), "c.pdf ends in '.pdf': write .png, .html, .md"),
        (("compare", "--tag", "nothing"), "No run in runs fits tags=nothing"),
        (("compare", "first", "--against", "dreamerv3:dmc_state"), "has no curve for CartPole-v1"),
    ):
        refused = rl(*words)
        assert refused.code != 0 and message in refused.err


def test_the_door_in_scripts_compares(here: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "analyze.py", "first", "third", "--output", "door.png"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "IQM" in answer.stdout and Path("door.png").is_file()


def test_curves_are_drawn_by_filter_and_by_sweep(rl: Any, here: Path) -> None:
    assert rl("plot", "@last", "-q").out == "plot.png\n"
    rl("tag", "first", "sweep:mine")
    words = ("--metrics", "eval/return,loss/value", "--output", "sweep.png", "--band", "std")
    assert rl("plot", "--sweep", "mine", *words).out == "sweep.png\n"
    assert Path("sweep.png").stat().st_size > Path("plot.png").stat().st_size


def test_an_exported_file_has_the_format_of_its_name(rl: Any, here: Path) -> None:
    assert rl("export", "first", "--output", "by_name.json").code == 0
    assert json.loads(Path("by_name.json").read_text())[0]["run"] == "first"
    assert rl("export", "first", "--table", "runs", "--output", "by_name.TEX").code == 0
    assert "tabular" in Path("by_name.TEX").read_text()
    refused = rl("export", "first", "--output", "by_name.xls")
    assert refused.code == 2 and "by_name.xls ends in '.xls': write .csv, .json, .tex" in refused.err
    assert rl("export", "first", "--format", "csv", "--output", "by_name.xls").code == 0
    unknown = rl("export", "--sweep", "nosuch")
    assert unknown.code == 1 and "There is no sweep 'nosuch'" in unknown.err


@pytest.mark.parametrize("table", ["rows", "runs", "scores"])
def test_every_table_is_exported_as_csv_json_and_html(rl: Any, here: Path, table: str) -> None:
    for format in ("csv", "json", "html", "markdown"):
        output = f"out.{format}"
        assert rl("export", "--where", "env~Cart", "--table", table, "--format", format, "--output", output).code == 0
    records = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    facts = json.loads(Path("out.json").read_text())
    assert len(facts) == len(records) >= {"rows": 6, "runs": 3, "scores": 2}[table]
    assert list(facts[0]) == list(records[0])
    page = Page(Path("out.html").read_text())
    assert page.counts["tr"] == len(facts) + 1
    assert len(Path("out.markdown").read_text().splitlines()) == len(facts) + 2
    if table == "rows":
        logged = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
        mine = [row for row in facts if row["run"] == "first"]
        assert [row["env_frames"] for row in mine] == [row["env_frames"] for row in logged]
        assert mine[-1]["eval/episode_return_mean"] == logged[-1]["eval/episode_return_mean"]
    if table == "runs":
        assert {row["run"]: row["algorithm.discount"] for row in facts} == {"first": 0.9, "second": 0.9, "third": 0.99}


def test_a_parquet_file_holds_every_row(rl: Any, here: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert rl("export", "first", "--format", "parquet").out == "rows.parquet\n"
    table = parquet.read_table("rows.parquet")
    assert table.num_rows == len(Path("runs/first/metrics.jsonl").read_text().splitlines())
    assert table["run"].to_pylist()[0] == "first" and "eval/episode_return_mean" in table.column_names


def test_a_latex_table_is_whole(rl: Any, here: Path) -> None:
    assert rl("export", "--where", "env~Cart", "--format", "latex").out == "scores.tex\n"
    text = Path("scores.tex").read_text()
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 3 and all(line.count(" & ") == 7 for line in lines)
    assert text.count("{") == text.count("}") and r"IQM 95 \%" in text
    compiler = shutil.which("pdflatex") or shutil.which("tectonic")
    if compiler is None:
        pytest.skip("its structure is whole; compiling it needs pdflatex or tectonic")
    Path("page.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{scores.tex}\\end{document}\n"
    )
    subprocess.run([compiler, "page.tex"], check=True, stdin=subprocess.DEVNULL, capture_output=True)


def test_reports_of_one_run_and_of_many(rl: Any, here: Path) -> None:
    Path("runs/first/report.md").unlink()
    assert rl("report", "first").out.strip().endswith("runs/first/report.md")
    assert "![learning curve]" in Path("runs/first/report.md").read_text()
    assert rl("report", "first", "second", "third", "--output", "reports/ppo").out == "reports/ppo/report.md\n"
    text = Path("reports/ppo/report.md").read_text()
    assert "![curves](curves.png)" in text and "| discount=0.99 | third | CartPole-v1 | 1 | finished |" in text
    assert Path("reports/ppo/curves.png").is_file()


def test_the_same_from_python(here: Path) -> None:
    assert [run.id for run in rl_lab.find_runs(where="algorithm=ppo", sort="seed", limit=2)] == ["second", "third"]
    found = rl_lab.compare("first", rl_lab.find_runs("third")[0])
    assert [group.label for group in found.groups] == ["discount=0.9", "discount=0.99"]
    assert found.tables()[0].rows[0][1] == 1
    assert rl_lab.compare(where=["env~Cart"]).write("all.png").is_file()
    with pytest.raises(rl_lab.types.RunError, match="compare: no run in runs fits; `rl_lab.find_runs"):
        rl_lab.compare(where="algorithm=sac")


def test_a_cleanup_shows_what_goes_and_keeps_the_results(rl: Any, here: Path) -> None:
    words = ("cleanup", "--keep-best", "1", "--keep-recent", "0h")
    before = sorted(str(path) for path in Path("runs").rglob("*") if path.name not in (".lock", "index.sqlite"))
    shown = rl(*words, "--dry-run")
    assert shown.code == 0 and "2 runs would give back" in shown.out and "among the best in CartPole-v1" in shown.out
    after = sorted(str(path) for path in Path("runs").rglob("*") if path.name not in (".lock", "index.sqlite"))
    assert before == after
    assert "kept: 3, each because it is" in rl("cleanup", "--dry-run").out  # by default the ten best and a month
    best = max(RunIndex("runs").find(), key=lambda row: row["score"])["id"]
    planned = json.loads(rl(*words, "--dry-run", "--json").out)
    assert rl(*words, "--yes").out.endswith(" freed\n")
    for name in RUNS:
        assert Path("runs", name, "checkpoints").exists() == (name == best)
        for kept in ("config.yaml", "metrics.jsonl", "report.md", "learning_curve.png", "manifest.json"):
            assert Path("runs", name, kept).is_file()
    assert set(planned["removals"]) == set(RUNS) - {best} and planned["freed"] == 0 < planned["bytes"]
    assert rl("compare", *RUNS).code == 0
    lost = next(name for name in RUNS if name != best)
    assert "`rl-lab cleanup` has removed it" in rl("evaluate", lost).err
    shown = rl("show", lost).out
    assert "checkpoints" in shown.partition("cleaned")[2].splitlines()[0]
    assert shown.endswith(f"next: rl-lab train runs/{lost}/config.yaml\n"), "it has no policy to evaluate"


def test_nothing_under_way_is_cleaned_or_removed(rl: Any, here: Path) -> None:
    run = RunDirectory(Path("runs/first"))
    run.write_status("running")
    with RunLock(run):
        assert "because it is running" in rl("cleanup", "--keep-best", "0", "--keep-recent", "0h", "--dry-run").out
        assert re.search(r"first +running \d+%", rl("list", "--where", "status=running").out)
        assert "Run 'first' is in use by process" in rl("rm", "first", "--yes").err
        refused = rl("rm", "second", "first")
        assert "Run 'first' is in use" in refused.err and not refused.out, "before anybody is asked"
        assert Path("runs/second").is_dir()
        assert rl("show", "first").out.endswith("next: rl-lab evaluate first\n")
        shutil.move(run.checkpoints_dir, "aside")
        assert rl("show", "first").out.endswith("next: rl-lab list --status running\n"), "nothing to evaluate yet"
        shutil.move("aside", run.checkpoints_dir)
        rl("cleanup", "--keep-best", "0", "--keep-recent", "0h", "--unfinished", "--yes")
    assert run.checkpoints_dir.is_dir() and not Path("runs/second/checkpoints").exists()


def test_removing_asks_first(rl: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = rl("rm", "first")
    assert refused.code == 2 and "nobody is there to ask: add --yes" in refused.err
    for reply, is_there in (("n\n", True), ("y\n", False)):
        monkeypatch.setattr(sys, "stdin", stdin := io.StringIO(reply))
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        answer = rl("rm", "first")
        assert "Remove 1 run with everything in them? [y/N]" in answer.out
        assert answer.code == (1 if is_there else 0) and Path("runs/first").exists() == is_there
    assert rl("list", "-q").out == "third\nsecond\n"
    assert "no run 'first'" in rl("rm", "first", "--yes").err
