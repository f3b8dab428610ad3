"""`list`, `show`, `evaluate` and `play`: what they read, what they print, and what is JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Calls

from rl_lab.runs.manifest import collect_manifest
from rl_lab.runs.run_directory import RunDirectory, first_files


def make_run(runs_dir: Path, run_id: str, *, state: str = "finished", score: float | None = 500.0) -> RunDirectory:
    text = "seed: 7\nalgorithm: {discount: 0.98}\n"
    settings = {"config_text": text, "seed": 7, "name": "ppo_cartpole"}
    manifest = collect_manifest(**settings, algorithm="PPO", environment_id="CartPole-v1")
    files = first_files(config_text=text, overrides=[], manifest=manifest, tags=[])
    run = RunDirectory.create(runs_dir, run_id=run_id, name="ppo_cartpole", seed=7, files=files)
    run.write_status(state, counts={"agent_steps": 20480, "updates": 10}, wall_s=75.0, best_score=score)
    rows = [{"agent_steps": step, "collect/episode_return_mean": 5.0 * step} for step in range(1, 101)]
    rows.append({"agent_steps": 101, "collect/episode_return_mean": float("nan"), "eval/episode_return_mean": 500.0})
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    make_run(tmp_path, "first", score=20.0)
    make_run(tmp_path, "second")
    make_run(tmp_path, "third", state="interrupted", score=None)
    return tmp_path


def test_list_shows_newest_first(rl: Any, runs_dir: Path) -> None:
    answer = rl("list", "--runs-dir", runs_dir)
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert " ".join(lines[0].split()) == "RUN STATE ALGORITHM ENVIRONMENT SEED AGENT STEPS BEST EVAL TIME"
    assert [line.split()[0] for line in lines[1:]] == ["third", "second", "first"]
    assert lines[2].split() == [
        "second",
        "finished",
        "PPO",
        "CartPole-v1",
        "7",
        "20,480",
        "500.0",
        "1:15",
    ]


def test_list_counts_updates_of_runs_that_take_no_steps(rl: Any, runs_dir: Path) -> None:
    def columns() -> list[str]:
        lines = rl("list", "--runs-dir", runs_dir).out.splitlines()
        return [" ".join(lines[0].split()), " ".join(lines[1].split())]

    for run_id in ("first", "second", "third"):
        make_run(runs_dir, f"offline-{run_id}").write_status("finished", counts={"updates": 4096}, wall_s=1.0)
    headings, offline = columns()
    assert "SEED AGENT STEPS UPDATES BEST EVAL" in headings and "CartPole-v1 7 0 4,096 " in offline
    for run_id in ("first", "second", "third"):
        shutil.rmtree(runs_dir / run_id)
    headings, offline = columns()
    assert "SEED UPDATES BEST EVAL" in headings and "CartPole-v1 7 4,096 " in offline


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_list_fits_the_window(rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    run_id = "20261118-052130-ppo_cartpole-s0-048b"
    run = make_run(tmp_path, run_id, state="interrupted")
    run.write_manifest(run.read_manifest() | {"lineage": [{"event": "resumed"}, {"event": "resumed"}]})
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = rl("list", "--runs-dir", tmp_path).out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert run_id in lines[1] and "500.0" in lines[1]
    assert ("resumed 2x" in lines[1]) == (columns > 60) and ("no space for" in "".join(lines)) == (columns < 200)


def test_list_filters(rl: Any, runs_dir: Path) -> None:
    assert rl("list", "-q", "--runs-dir", runs_dir, "--status", "interrupted").out == "third\n"
    assert rl("list", "-q", "--runs-dir", runs_dir, "fir").out == "first\n"
    assert rl("list", "-q", "--runs-dir", runs_dir, "--limit", "2").out == "third\nsecond\n"
    assert "... and 2 older (--limit 3)" in rl("list", "--runs-dir", runs_dir, "--limit", "1").out
    assert "No run in" in rl("list", "--runs-dir", runs_dir, "nothing-like-it").out


def test_list_without_runs_says_how_to_make_one(rl: Any, tmp_path: Path) -> None:
    assert rl("list", "--runs-dir", tmp_path / "none").out == f"No runs in {tmp_path / 'none'} yet: rl-lab train\n"


def test_list_json(rl: Any, runs_dir: Path) -> None:
    rows = json.loads(rl("list", "--json", "--runs-dir", runs_dir).out)
    assert [(row["id"], row["status"], row["best_score"]) for row in rows] == [
        *(("third", "interrupted", None), ("second", "finished", 500.0), ("first", "finished", 20.0))
    ]


def test_list_refuses_an_unknown_state(rl: Any) -> None:
    answer = rl("list", "--status", "finnished")
    assert answer.code == 2 and "Did you mean 'finished'?" in answer.err


def test_show_tells_the_whole_run(rl: Any, runs_dir: Path) -> None:
    out = rl("show", "second", "--runs-dir", runs_dir).out
    for expected in ("second\n", "PPO", "CartPole-v1", "20,480", "1:15", "500", "metrics.jsonl", "torch 2"):
        assert expected in out
    assert "▁" in out and "█" in out and "5 -> 500, best 500" in out
    assert out.rstrip().endswith(f"next: rl-lab evaluate {runs_dir / 'second'}"), "they are not in ./runs"


def test_show_of_an_interrupted_run_says_resume(rl: Any, runs_dir: Path) -> None:
    assert f"next: rl-lab resume {runs_dir / 'third'}" in rl("show", "@last", "--runs-dir", runs_dir).out


def test_show_json_has_everything_and_no_nan(rl: Any, runs_dir: Path) -> None:
    facts = json.loads(rl("show", "@best", "--json", "--runs-dir", runs_dir).out)
    assert facts["id"] == "second"
    assert facts["config"] == {"seed": 7, "algorithm": {"discount": 0.98}}
    assert facts["status"]["counts"] == {"agent_steps": 20480, "updates": 10}
    assert facts["last_metrics"]["collect/episode_return_mean"] is None
    assert facts["curves"]["training return"][-1] == 500.0
    assert facts["paths"]["metrics"].endswith("second/metrics.jsonl")


def test_show_of_an_unknown_run_names_the_nearest(rl: Any, runs_dir: Path) -> None:
    answer = rl("show", "secnod", "--runs-dir", runs_dir)
    assert answer.code == 1
    assert "There is no run 'secnod'" in answer.err and "second" in answer.err


# --- evaluate and play -------------------------------------------------------------------------

SCORES = {"eval/episode_return_mean": 497.5, "eval/episode_return_std": 5.0, "eval/episodes": 20.0}


def noisy_scores(*_: Any, **__: Any) -> dict[str, float]:
    print("a library's greeting")
    return SCORES | {"eval/episode_return_min": float("nan")}


def test_evaluate_passes_everything_on(rl: Any, fake: Any, runs_dir: Path) -> None:
    api = fake("api", evaluate=Calls(SCORES))
    words = ("--episodes", "20", "--checkpoint", "best", "--seed", "3", "--video", "v.mp4", "--runs-dir", runs_dir)
    words += ("--trust", "my_package", "--trust", "other")
    answer = rl("evaluate", "@last", *words)
    settings = {
        "episodes": 20,
        "checkpoint": "best",
        "seed": 3,
        "video": Path("v.mp4"),
        "trust": ["my_package", "other"],
    }
    ((arguments, options),) = api.evaluate.seen
    assert callable(options.pop("progress"))
    assert (arguments, options) == ((runs_dir / "third",), settings)
    assert "eval/episode_return_mean  497.5" in answer.out and "v.mp4" in answer.out


def test_evaluate_json_is_all_that_stdout_holds(rl: Any, fake: Any, runs_dir: Path) -> None:
    fake("api", evaluate=Calls(noisy_scores))
    answer = rl("evaluate", "@last", "--json", "--runs-dir", runs_dir)
    facts = json.loads(answer.out)
    assert facts["run"] == "third" and facts["episodes"] == 100
    assert facts["scores"]["eval/episode_return_mean"] == 497.5
    assert facts["scores"]["eval/episode_return_min"] is None
    assert "a library's greeting" in answer.err


def test_evaluate_quiet_is_one_number(rl: Any, fake: Any, runs_dir: Path) -> None:
    fake("api", evaluate=Calls(SCORES))
    assert rl("evaluate", "@last", "-q", "--runs-dir", runs_dir).out == "497.5\n"


def test_play_says_where_the_video_lies(rl: Any, fake: Any) -> None:
    api = fake("api", play=Calls(Path("out.mp4")))
    assert rl("play", "@last", "--output", "out.mp4", "--episodes", "2", "--task", "1").out == "video: out.mp4\n"
    (_, keywords), *_ = api.play.seen
    assert keywords["output"] == Path("out.mp4") and keywords["episodes"] == 2 and keywords["checkpoint"] == "latest"
    assert keywords["task"] == "1"


def test_play_in_a_window_prints_nothing(rl: Any, fake: Any) -> None:
    fake("api", play=Calls(None))
    assert rl("play", "@last").out == ""


def test_stored_texts_cannot_steer_the_terminal(rl: Any, runs_dir: Path) -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202e"
    run = RunDirectory.open(runs_dir / "second")
    words = {"name": evil, "algorithm": evil, "environment_id": f"a\n{evil}", "command_line": evil}
    run.write_manifest(run.read_manifest() | words)
    run.write_status("failed", message=evil)
    run.write_tags([evil], evil)
    (runs_dir / "second").rename(runs_dir / f"evil{evil}")
    (runs_dir / "first" / "manifest.json").write_text(json.dumps({"config_schema_version": evil}))
    for command in (["list"], ["list", "-q"], ["list", "--json"], ["show", "evil"], ["show", "evil", "--json"]):
        answer = rl(*command, "--runs-dir", runs_dir)
        assert answer.code == 0
        assert "\\u001b]0;owned\\u0007\\u009b2J\\u202e" in answer.out
        assert all(each.isprintable() or each == "\n" for each in answer.out + answer.err)
    refused = rl("show", "first", "--runs-dir", runs_dir)
    assert refused.code == 1 and "\x1b" not in refused.err
    assert "\x1b" not in rl("show", f"none{evil}", "--runs-dir", runs_dir).err
