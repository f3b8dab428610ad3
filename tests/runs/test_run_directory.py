from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rl_lab.runs.index import RunIndex
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import STATES, RunDirectory, first_files
from rl_lab.types import ConfigError, RunError

MakeRun = Callable[..., RunDirectory]


def test_a_new_run_is_named_by_time_name_and_seed(runs_dir: Path) -> None:
    run = RunDirectory.create(runs_dir, name="ppo_cartpole", seed=3)
    assert re.fullmatch(r"\d{8}-\d{6}-ppo_cartpole-s3-[0-9a-f]{4}", run.id)
    assert run.path.parent == runs_dir


def test_a_name_with_odd_characters_still_gives_a_valid_id(runs_dir: Path) -> None:
    run = RunDirectory.create(runs_dir, name="CartPole-v1:ppo/é", seed=0)
    assert re.fullmatch(r"\d{8}-\d{6}-CartPole-v1_ppo_-s0-[0-9a-f]{4}", run.id)


@pytest.mark.parametrize("run_id", ["a b", "a/b", "../x", ".hidden", "@last", "", "x" * 121, "index.sqlite"])
def test_an_unusable_run_id_is_refused_with_one_that_works(runs_dir: Path, run_id: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(runs_dir, run_id=run_id, name="n", seed=0)
    assert f"--run-id '{run_id}' is not usable" in str(caught.value)
    assert "letters, digits, '.', '_' and '-'" in str(caught.value)
    assert not runs_dir.exists()


def test_an_existing_run_is_not_overwritten_but_resumed(runs_dir: Path, make_run: MakeRun) -> None:
    make_run("mine")
    with pytest.raises(RunError, match=r"Run 'mine' exists already in .*: continue it with `rl-lab resume mine`"):
        RunDirectory.create(runs_dir, run_id="mine", name="n", seed=0)


@pytest.mark.parametrize("left", [[], [".lock"], [".lock", "config.yaml"], [".lock", "config.yaml", "overrides.yaml"]])
def test_what_a_killed_start_left_behind_is_taken_over(runs_dir: Path, left: list[str], make_run: MakeRun) -> None:
    (runs_dir / "mine").mkdir(parents=True)
    for name in left:
        (runs_dir / "mine" / name).touch()
    assert make_run("mine").read_manifest()["seed"] == 1
    assert [path.name for path in runs_dir.iterdir()] == ["mine"]


def test_a_start_that_another_process_is_making_is_left_alone(runs_dir: Path, make_run: MakeRun) -> None:
    early = RunDirectory.create(runs_dir, run_id="mine", name="n", seed=0, files={"config.yaml": ""})
    with RunLock(early), pytest.raises(RunError, match="Run 'mine' exists already"):
        make_run("mine")


def test_of_two_starts_with_one_id_the_later_is_refused(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        make_run("mine")
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(RunError, match="Run 'mine' exists already"):
        make_run("mine")
    assert [path.name for path in runs_dir.iterdir()] == ["mine"]


def test_a_run_that_never_began_is_removed_at_one_instant(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("mine")
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # a kill just before it
    run.discard()
    assert not run.path.exists()
    monkeypatch.undo()
    (leftover,) = runs_dir.iterdir()
    assert RunIndex(runs_dir).find() == []
    os.utime(leftover, (0, 0))
    make_run("mine")
    assert not leftover.exists()


def test_only_what_is_long_dead_is_cleaned(runs_dir: Path, make_run: MakeRun) -> None:
    old, young, foreign = (runs_dir / name for name in (".a.tmp-1-abc123", ".b.tmp-2-abc123", ".mine"))
    for path in (old, young, foreign):
        path.mkdir(parents=True)
        (path / "config.yaml").touch()
    os.utime(old, (0, 0))
    os.utime(foreign, (0, 0))
    make_run("a")
    assert not old.exists() and young.exists() and foreign.exists()
    assert [row["id"] for row in RunIndex(runs_dir).find()] == ["a"]


def test_a_run_directory_is_absolute_so_that_no_environment_can_move_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs", run_id="mine", name="n", seed=0, files={"config.yaml": "a: 1\n"})
    found = RunDirectory.open("runs/mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run == found
    assert found.read_config_text() == "a: 1\n"


def test_a_foreign_directory_is_not_taken_over(runs_dir: Path) -> None:
    (runs_dir / "mine").mkdir(parents=True)
    (runs_dir / "mine" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"holds files and is not a run \(no config.yaml\): choose another --run-id"):
        RunDirectory.create(runs_dir, run_id="mine", name="n", seed=0)


def test_a_file_in_the_place_of_the_run_is_refused(runs_dir: Path) -> None:
    runs_dir.mkdir()
    (runs_dir / "mine").touch()
    with pytest.raises(RunError, match="exists and is a file: choose another --run-id"):
        RunDirectory.create(runs_dir, run_id="mine", name="n", seed=0)


def test_runs_below_a_regular_file_are_refused_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write .*file/runs/mine: .* not a directory.*--runs-dir"):
        RunDirectory.create(tmp_path / "file" / "runs", run_id="mine", name="n", seed=0)
    with pytest.raises(RunError, match=r"file exists and is not a directory.*--runs-dir"):
        RunDirectory.create(tmp_path / "file", run_id="mine", name="n", seed=0)


@pytest.mark.parametrize(("code", "words"), [(errno.EROFS, "read-only file system"), (errno.EACCES, "no permission")])
def test_an_unwritable_runs_directory_is_refused_with_a_cure(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunError, match=rf"{words}: cannot write {runs_dir / 'mine'}.*--runs-dir"):
        RunDirectory.create(runs_dir, run_id="mine", name="n", seed=0)


def test_opening_what_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory: it has no config\.yaml"):
        RunDirectory.open(tmp_path)
    with pytest.raises(RunError, match="is not a run directory: it does not exist"):
        RunDirectory.open(tmp_path / "nowhere")


def test_every_path_lies_where_the_design_says(make_run: MakeRun) -> None:
    run = make_run("mine")
    assert RunDirectory.open(run.path) == run
    paths = {
        run.config_path: "config.yaml",
        run.overrides_path: "overrides.yaml",
        run.manifest_path: "manifest.json",
        run.status_path: "status.json",
        run.tags_path: "tags.json",
        run.lock_path: ".lock",
        run.log_path: "run.log",
        run.metrics_path: "metrics.jsonl",
        run.report_path: "report.md",
        run.curve_path: "learning_curve.png",
        run.tensorboard_dir: "tensorboard",
        run.videos_dir: "videos",
        run.episodes_dir: "episodes",
        run.checkpoints_dir: "checkpoints",
    }
    assert {path.relative_to(run.path).as_posix(): name for path, name in paths.items()} == {
        name: name for name in paths.values()
    }


def test_a_run_opened_by_a_relative_path_knows_its_id(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("mine")
    monkeypatch.chdir(run.path)
    assert RunDirectory.open(".").id == "mine"


def test_the_config_comes_back_as_written(runs_dir: Path) -> None:
    run = RunDirectory.create(runs_dir, name="n", seed=0, files={"config.yaml": "a: 1\n# é\n"})
    assert run.read_config_text() == "a: 1\n# é\n"
    run.config_path.write_bytes(b"\xff")
    with pytest.raises(RunError, match=r"config.yaml is damaged: not valid UTF-8 .*, so run .* cannot be rebuilt"):
        run.read_config_text()
    run.config_path.unlink()
    with pytest.raises(RunError, match=r"config.yaml is missing, so run .* cannot be rebuilt"):
        run.read_config_text()


@pytest.mark.parametrize("overrides", [[], ["seed=3"], ["name='a: b'", 'x="q"', "list=[1,2]", "é=#no comment"]])
def test_overrides_are_a_yaml_list_whatever_they_contain(overrides: list[str]) -> None:
    files = first_files(config_text="", overrides=overrides, manifest={}, tags=[])
    assert yaml.safe_load(files["overrides.yaml"]) == overrides


def test_tags_and_notes_come_back(make_run: MakeRun) -> None:
    run = make_run()
    assert run.read_tags() == {"tags": [], "notes": ""}
    run.write_tags(["baseline", "paper"], "the long one")
    assert run.read_tags() == {"tags": ["baseline", "paper"], "notes": "the long one"}


def test_a_status_keeps_what_the_next_one_does_not_say(make_run: MakeRun) -> None:
    run = make_run()
    assert run.read_status()["state"] == "created"
    run.write_status("running", counts={"agent_steps": 10, "updates": 2}, wall_s=1.5, best_score=7.0)
    run.write_status("failed", message="disk full")
    status = run.read_status()
    assert (status["state"], status["message"], status["best_score"], status["final_score"]) == (
        "failed",
        "disk full",
        7.0,
        None,
    )
    assert (status["counts"], status["wall_s"]) == ({"agent_steps": 10, "updates": 2}, 1.5)
    assert status["pid"] == os.getpid() and status["host"] and status["time"]
    run.write_status("finished", final_score=6.0)
    assert (run.read_status()["message"], run.read_status()["final_score"]) == ("", 6.0)


def test_an_unknown_state_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"Run status 'finish' is unknown: use one of .*Did you mean 'finished'\?"):
        make_run().write_status("finish")


def test_running_without_a_lock_reads_as_killed(make_run: MakeRun) -> None:
    run = make_run("mine")
    with RunLock(run):
        run.write_status("running")
        assert run.read_status()["state"] == "running"
    status = run.read_status()
    assert status["state"] == "killed"
    assert "`rl-lab resume mine`" in status["message"]
    for state in set(STATES) - {"running"}:
        run.write_status(state)
        assert run.read_status()["state"] == state


def test_a_damaged_status_does_not_block_the_run(make_run: MakeRun) -> None:
    run = make_run()
    run.status_path.write_text('{"state": "runn')
    assert run.read_status()["state"] == "unknown"
    assert "status.json is damaged" in run.read_status()["message"]
    run.write_status("running", counts={"agent_steps": 1})
    assert json.loads(run.status_path.read_text())["state"] == "running"


def test_a_full_disk_while_writing_the_status_says_how_to_go_on(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("mine")
    run.write_status("finished")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rl_lab.runs.files.write_durably", full)
    with pytest.raises(RunError, match=r"disk full: cannot write .*status.json.*`rl-lab resume mine`"):
        run.write_status("failed")
    assert run.read_status()["state"] == "finished"


def test_a_config_that_was_changed_is_not_continued_exactly(make_run: MakeRun) -> None:
    run = make_run("mine")
    run.check_config()
    run.config_path.write_text(run.read_config_text() + "# a remark\n")
    with pytest.raises(RunError, match=r"config.yaml has been changed since run 'mine' began .*--mode warm_start"):
        run.check_config()
    run.write_manifest({name: value for name, value in run.read_manifest().items() if name != "config_hash"})
    run.check_config()


def test_a_renamed_run_keeps_its_identity(make_run: MakeRun, runs_dir: Path) -> None:
    run = make_run("mine")
    identity = run.identity()
    assert identity
    os.rename(run.path, runs_dir / "other")
    assert RunDirectory.open(runs_dir / "other").identity() == identity
    assert RunDirectory.create(runs_dir, run_id="bare", name="n", seed=0).identity() is None
