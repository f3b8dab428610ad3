"""Questions about many runs: conditions, order, settings and metrics, and mistakes that are answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab.runs import index as index_module
from rl_lab.runs.index import RunIndex
from rl_lab.runs.index_rows import row_of
from rl_lab.runs.lock import RunLock
from rl_lab.runs.query import Condition
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError

MakeRun = Callable[..., RunDirectory]


def ids(runs_dir: Path, *where: str, **more: object) -> list[str]:
    return [row["id"] for row in RunIndex(runs_dir).find(where=where, **more)]  # type: ignore[arg-type]


def set_up(run: RunDirectory, *, config: str, score: float | None, rows: list[dict[str, float]]) -> None:
    """Another config, with the hash of its own, and rows of metrics."""
    run.config_path.write_text(config)
    run.write_manifest(run.read_manifest() | {"config_hash": run.id})
    run.write_status("finished", final_score=score)
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def three(runs_dir: Path, make_run: MakeRun) -> Path:
    config = "algorithm: {{discount: {0}, hidden: [64, 64], double: {1}, limit: null}}\n"
    for name, algorithm, environment, discount, double, score in (
        ("a", "PPO", "CartPole-v1", 0.9, "true", 10.0),
        ("b", "PPO", "Pendulum-v1", 0.99, "false", 300.0),
        ("c", "DQN", "CartPole-v1", 0.99, "false", None),
    ):
        run = make_run(name, algorithm=algorithm, environment_id=environment)
        rows = [{"agent_steps": 5, "eval/episode_return_mean": score or 0.0}, {"agent_steps": 9, "loss/value": 0.5}]
        set_up(run, config=config.format(discount, double), score=score, rows=rows if score else rows[1:])
    RunDirectory(runs_dir / "b").write_tags(["paper", "sweep:x"], "the good one")
    return runs_dir


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("algorithm=ppo", ["b", "a"]),
        ("algorithm!=ppo", ["c"]),
        ("algo == PPO", ["b", "a"]),
        ("env~cart", ["c", "a"]),
        ("score>10", ["b"]),
        ("score>=1e1", ["b", "a"]),
        ("score=null", ["c"]),
        ("score!=null", ["b", "a"]),
        ("score!=10", ["c", "b"]),
        ("eval/return<100", ["a"]),
        ("eval/episode_return_mean=300.0", ["b"]),
        ("loss/value<=0.5", ["c", "b", "a"]),
        ("algorithm.discount<0.95", ["a"]),
        ("algorithm.double=true", ["a"]),
        ("algorithm.hidden=[64, 64]", ["c", "b", "a"]),
        ("algorithm.limit=null", ["c", "b", "a"]),
        ("tags=paper", ["b"]),
        ("tags!=paper", ["c", "a"]),
        ("tag~sweep", ["b"]),
        ("notes~GOOD", ["b"]),
        ("created>2020-01-01", ["c", "b", "a"]),
    ],
)
def test_a_condition_finds_its_runs(three: Path, condition: str, expected: list[str]) -> None:
    assert ids(three, condition) == expected


def test_conditions_hold_together_and_with_text_and_status(three: Path) -> None:
    assert ids(three, "algorithm=ppo", "env~Cart") == ["a"]
    assert ids(three, "algorithm=ppo", text="good", status=["finished", "failed"]) == ["b"]
    assert ids(three, "algorithm=ppo", status=("failed", "killed")) == []


def test_a_list_is_sorted_by_any_field_and_what_lacks_it_comes_last(three: Path) -> None:
    assert ids(three, sort="eval/return") == ["b", "a", "c"]
    assert ids(three, sort="eval/return", is_reversed=True) == ["a", "b", "c"]
    assert ids(three, sort="algorithm.discount") == ["c", "b", "a"]
    assert ids(three, sort="env") == ["c", "a", "b"]
    assert ids(three, sort="created") == ["c", "b", "a"]
    assert ids(three, is_reversed=True) == ["a", "b", "c"]


def test_what_is_asked_for_stands_in_the_row(three: Path) -> None:
    row = RunIndex(three).find(where=["tags=paper"], sort="eval/return", show=["algorithm.discount"])[0]
    assert (row["eval/episode_return_mean"], row["algorithm.discount"], row["tags"]) == (
        *(300.0, 0.99, ["paper", "sweep:x"]),
    )


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("algoritm=ppo", "No run has a setting 'algoritm'. Did you mean 'algorithm'?"),
        ("return>1", "No run has a setting 'return'. Did you mean eval/return or collect/return?"),
        ("discount=1", "No run has a setting 'discount'. Did you mean algorithm.discount?"),
        ("eval/retrun=1", "metric 'eval/retrun'. Did you mean 'eval/return'?"),
        ("eval/episode_retrun_mean=1", "metric 'eval/episode_retrun_mean'. Did you mean 'eval/episode_return_mean'?"),
    ],
)
def test_an_unknown_field_gets_the_nearest(three: Path, word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ids(three, word)
    assert hint in str(refusal.value) and "a setting by its dotted key" in str(refusal.value)


@pytest.mark.parametrize("text", ["algorithm", "=ppo", ""])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no condition: write FIELD OPERATOR VALUE with one of != <= >= = ~ < >"):
        Condition.parse(text)


def test_a_run_under_way_shows_how_far_it_is(runs_dir: Path, make_run: MakeRun) -> None:
    run = make_run("a")
    phases = "training: {phases: [{name: one, duration_steps: 100}, {name: two, duration_steps: 300}]}\n"
    set_up(run, config=phases, score=None, rows=[{"agent_steps": 100, "env_frames": 400}])
    with RunLock(run):
        run.write_status("running", counts={"agent_steps": 50})
        (row,) = RunIndex(runs_dir).find()
        assert (row["status"], row["progress"], row["agent_steps"], row["env_frames"]) == ("running", 0.25, 100, 400)
        run.metrics_path.write_text('{"agent_steps": 200}\n{"agent_st')  # its status is not written again
        assert RunIndex(runs_dir).find()[0]["progress"] == 0.5
    run.config_path.write_text(
        "training: {phases: [{name: one, duration_updates: 9}, {name: two, duration_steps: 3}]}\n"
    )
    run.metrics_path.write_text('{"train/phase_index": 1, "train/phase_fraction": 0.5}\n')
    assert RunIndex(runs_dir).find()[0]["progress"] == 0.75


def test_the_last_evaluation_is_found_far_from_the_end(runs_dir: Path, make_run: MakeRun) -> None:
    run = make_run("a")
    rows = [{"eval/episode_return_mean": 7.0}, *({"loss/value": float(number)} for number in range(9000)), {"x": None}]
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"loss/value": 1')
    (row,) = RunIndex(runs_dir).find(show=["eval/return", "loss/value"])
    assert (row["eval/episode_return_mean"], row["loss/value"]) == (7.0, 8999.0)


def test_continued_durations_are_settings(three: Path) -> None:
    run = RunDirectory(three / "a")
    changes = {"training.phases.train.duration_steps": 500}
    run.write_manifest(run.read_manifest() | {"continuations": [changes]})
    assert ids(three, "training.phases.train.duration_steps=500") == ["a"]


def test_a_rebuild_reads_everything_anew(three: Path) -> None:
    index = RunIndex(three)
    assert index.rebuild() == 3
    (three / "a" / "metrics.jsonl").write_text('{"eval/episode_return_mean": 5.0}\n')  # behind the index's back
    assert ids(three, "eval/return=5") == []
    assert index.rebuild() == 3
    assert ids(three, "eval/return=5") == ["a"]
    assert RunIndex(three / "none").rebuild() == 0


def test_killed_runs_are_not_read_again_at_every_question(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("a")
    run.write_status("running")
    assert ids(runs_dir, "status=killed") == ["a"]
    read: list[str] = []
    monkeypatch.setattr(index_module, "row_of", lambda each: read.append(each.id) or row_of(each))
    assert ids(runs_dir, "status=killed") == ["a"] and read == []
    with RunLock(run):
        assert ids(runs_dir, "status=running") == ["a"] and read == ["a"]
