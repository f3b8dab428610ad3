"""SIGKILL before and half-way through the file operations of a run, from its first on: nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab import api
from rl_lab.runs.index import RunIndex
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError
from tests.fault_injection import killed_at, operations_of, tried

MakeRun = Callable[..., RunDirectory]


def test_a_kill_at_any_instant_of_a_start_blocks_no_id(runs_dir: Path, start: Callable[[], None]) -> None:
    names = operations_of(runs_dir, start)
    assert len(names) > 40
    for at, name in enumerate(names):
        for half_way in (False, True) if name in ("write", "pwrite") else (False,):
            shutil.rmtree(runs_dir)
            assert killed_at(runs_dir, at, start, half_way=half_way)
            found = RunIndex(runs_dir).find()
            if not found:
                start()
                continue
            (row,) = found
            run = RunDirectory.open(runs_dir / "mine")
            assert (row["id"], row["seed"], row["status"]) == ("mine", 1, run.read_status()["state"])
            assert row["status"] in ("created", "killed")
            assert run.read_config_text() and run.read_manifest() and run.read_tags()
            try:
                start()
            except RunError as error:
                assert "continue it with `rl-lab resume mine`" in str(error)


def test_a_kill_at_any_instant_of_a_discard_blocks_no_id(runs_dir: Path, make_run: MakeRun) -> None:
    count = len(operations_of(runs_dir, make_run("mine").discard))
    for at in range(count):
        run = make_run("mine") if not (runs_dir / "mine").exists() else RunDirectory.open(runs_dir / "mine")
        assert killed_at(runs_dir, at, run.discard)
        assert [row["id"] for row in RunIndex(runs_dir).find()] in ([], ["mine"])


# One process with torch loaded forks for each training: autograd may not be used before a fork.
KILLER = """
import os, random, sys
from pathlib import Path
from rl_lab import api
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.verify import verify_run
from tests.fault_injection import forked, killed_at, operations_of
from tests.test_resume import assert_same_run, overrides_of

directory, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
experiment, overrides = overrides_of(sys.argv[4], updates=6)
overrides += ["evaluation.video=" + sys.argv[5]]

def train(run_id):
    return lambda: api.train(
        experiment, overrides=overrides, run_id=run_id, runs_dir=directory, quiet=True, resume_existing=True
    )

forked(lambda: (directory / "count").write_text(str(len(operations_of(directory / "whole", train("whole"))))))
count = int((directory / "count").read_text())
stages, killed = set(), 0
for number, at in enumerate(sorted(chance.sample(range(count), min(kills, count)))):
    run_id = f"cut{number}"
    killed += killed_at(directory / run_id, at, train(run_id), half_way=number % 2 == 0)
    if (directory / run_id).exists():
        verdict = verify_run(RunDirectory.open(directory / run_id))
        assert verdict.is_whole, verdict.findings
        stages.add(len(verdict.checkpoints))
    forked(train(run_id))
    assert_same_run(directory / run_id, directory / "whole")
    assert (directory / run_id / "report.md").exists()
print(count, len(stages), killed)
"""


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("case", "video"), [("ppo discrete, native", "true"), ("dqn with every switch, prioritised", "false")]
)
def test_a_kill_at_any_file_operation_of_a_whole_run_resumes_bit_for_bit(tmp_path: Path, case: str, video: str) -> None:
    """Also while it evaluates, records its video and writes its report."""
    kills = os.environ.get("RL_LAB_KILLS", "10")
    environment = os.environ | {"PYTHONPATH": str(Path(api.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLER, str(tmp_path), kills, "0", case, video]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    operations, stages, number = map(int, answer.stdout.split()[-3:])
    tried["kills"] += number
    assert number >= 0.9 * int(kills), "some operations depend on the clock"
    assert operations > 100 and stages > 2, "kills before, between and after the checkpoints"
