"""`rl-lab verify`: the files of a run, a run repeated, an experiment cut and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Calls

from rl_lab.experiment.identical import Difference
from rl_lab.experiment.verify_resume import Cut
from rl_lab.experiment.verify_run import RunVerdict
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.manifest import collect_manifest
from rl_lab.runs.run_directory import RunDirectory, first_files


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    facts = {"config_text": "seed: 7\n", "seed": 7, "algorithm": "PPO", "environment_id": "CartPole-v1"}
    files = first_files(config_text="seed: 7\n", overrides=[], manifest=collect_manifest(**facts), tags=[])
    return RunDirectory.create(tmp_path, run_id="mine", name="x", seed=7, files=files)


def save(run: RunDirectory, steps: int) -> Path:
    state: dict[str, Any] = {name: {"n": steps} for name in ("components", "controllers", "optimizers")}
    return CheckpointStore(run.checkpoints_dir).save(state, agent_steps=steps, counts={"agent_steps": steps})


def test_a_whole_run_says_where_it_goes_on(rl: Any, run: RunDirectory) -> None:
    answer = rl("verify", "checkpoint", "mine", "--runs-dir", run.path.parent)
    assert answer.code == 0
    assert answer.out == "whole, but nothing has been saved yet: `rl-lab resume mine` begins at the beginning\n"
    save(run, 1024)
    answer = rl("verify", "checkpoint", "mine", "--runs-dir", run.path.parent)
    lines = [line.split() for line in answer.out.splitlines()]
    assert answer.code == 0
    assert lines[1] == ["step_000000001024", "1,024", "exact,", "warm_start_optimizer,", "warm_start,", "evaluate"]
    assert answer.out.endswith("\nwhole: `rl-lab resume mine` goes on from step_000000001024\n")


def test_a_damaged_run_says_what_is_left(rl: Any, run: RunDirectory) -> None:
    words = ("verify", "checkpoint", run.path)
    first, second = save(run, 1), save(run, 2)
    (second / "optimizers.pt").write_bytes(b"")
    answer = rl(*words)
    assert answer.code == 1
    assert "error    checkpoints/step_000000000002: optimizers.pt has 0 bytes" in answer.out
    assert "damaged: `rl-lab resume mine` goes on from step_000000000001" in answer.out
    (first / "controllers.pt").unlink()
    assert "`rl-lab resume mine --mode warm_start` starts from step_000000000002" in rl(*words).out
    (second / "manifest.json").unlink()
    answer = rl(*words)
    assert answer.out.endswith("damaged: no checkpoint is usable; start again with `rl-lab train`\n")
    assert " nothing" in answer.out.splitlines()[1]


def test_json_says_the_same(rl: Any, run: RunDirectory) -> None:
    (save(run, 1) / "optimizers.pt").unlink()
    facts = json.loads(rl("verify", "checkpoint", run.path, "--json").out)
    assert facts["id"] == "mine" and facts["is_whole"] is False
    assert facts["checkpoints"][0]["usable_for"] == ["warm_start", "evaluate"]
    assert facts["findings"][0]["what"] == "optimizers.pt is missing."


def test_nothing_else_can_be_verified(rl: Any, run: RunDirectory) -> None:
    assert rl("verify", "weather", "mine").code == 2
    answer = rl("verify", "run", "mine", "--tolerance", "much")
    assert answer.code == 2 and "'much' is not a number from 0 on" in answer.err


# --- a run, repeated ---

NEAR = Difference("loss/value", 1.0, 1.0 + 1e-9, 1e-9, 2, 64)
FAR = Difference("controller/entropy", 0.5, 0.6, 0.17, 3, 96)


def verdict(**facts: Any) -> RunVerdict:
    return RunVerdict(1e-5, rows_recorded=9, rows_compared=9, checkpoint="step_9", sections=["rng"], **facts)


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (verdict(), 0, "bit-identical: mine repeats itself in 9 of 9 rows; every number of step_9 (rng)\n"),
        (
            verdict(largest=NEAR, rows_identical=8, reasons=["numpy 1, now 2"]),
            0,
            "within tolerance (1e-05): 8 of 9 of 9 rows are bit-identical; furthest apart is loss/value: 1.0 in the "
            "run, 1.000000001 now (1e-09 apart)\nlikely because of\n  numpy 1, now 2\n",
        ),
        (
            verdict(differences=[FAR, NEAR], reasons=["torch 1, now 2"]),
            1,
            "different: row 3, at 96 agent steps, is the first to differ\n"
            "  controller/entropy: 0.5 in the run, 0.6 now (0.2 apart)\n"
            "  loss/value: 1.0 in the run, 1.000000001 now (1e-09 apart)\nlikely because of\n  torch 1, now 2\n",
        ),
        (
            verdict(differences=[Difference("rng.torch", "a", "b", float("inf"))], reasons=["x"]),
            1,
            "different: 9 of 9 rows agree, the state in step_9 does not\n  rng.torch: a in the run, b now\n"
            "likely because of\n  x\n",
        ),
    ],
)
def test_a_repeated_run_is_judged(
    rl: Any, fake: Any, run: RunDirectory, given: RunVerdict, code: int, said: str
) -> None:
    verify = Calls(given)
    fake("experiment.verify_run", verify_run=verify)
    answer = rl("verify", "run", "mine", "--runs-dir", run.path.parent, "--steps", "500")
    assert (answer.code, answer.out) == (code, said)
    assert verify.seen[0][1]["steps"] == 500 and verify.seen[0][1]["tolerance"] == 1e-5
    facts = json.loads(rl("verify", "run", "mine", "--runs-dir", run.path.parent, "--json").out)
    assert facts["outcome"] == given.outcome and facts["rows_compared"] == 9


# --- an experiment, cut and resumed ---


def test_the_cuts_of_an_experiment_are_listed(rl: Any, fake: Any) -> None:
    cuts = [Cut("stop", 64, 2, 64, 9), Cut("kill -9", 96, 3, None, 9, [FAR])]
    verify = Calls(cuts)
    fake("experiment.verify_resume", verify_resume=verify)
    answer = rl("verify", "resume", "ppo_cartpole", "seed=3", "--kills", "1", "--cuts", "0")
    assert answer.code == 1
    assert [line.split() for line in answer.out.splitlines()[1:3]] == [
        ["stop", "64", "2", "64", "9", "same"],
        ["kill", "-9", "96", "3", "-", "9", "DIFFERENT"],
    ]
    assert "cut by kill -9 at 96 agent steps, row 3 differs from the run that was not cut:" in answer.out
    assert answer.out.endswith("not exact: 1 of 2 cut runs differ\n")
    assert verify.seen[0][0][0]["seed"] == 3
    assert (verify.seen[0][1]["kills"], verify.seen[0][1]["cuts"]) == (1, 0)
    del cuts[1]
    answer = rl("verify", "resume", "ppo_cartpole")
    assert answer.code == 0
    assert answer.out.endswith(
        "exact: 1 cut runs ended with the rows and the saved numbers of the run that was not cut\n"
    )
    assert json.loads(rl("verify", "resume", "ppo_cartpole", "--json").out)["is_exact"] is True
