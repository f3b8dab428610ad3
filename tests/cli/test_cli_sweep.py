"""`rl-lab sweep` and `rl-lab tune` with real trainings and real kills, and every sentence they say."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyte
import pytest
import torch
import yaml
from small_sweeps import CHEAP, PoolOfOne, facts, journal, write

from rl_lab.cli import sweep_run
from rl_lab.cli.main import main, parser_of
from rl_lab.cli.parsing import UsageError, settings_from_options
from rl_lab.cli.printing import format_value
from rl_lab.cli.sweep_run import check_points, words_of
from rl_lab.cli.sweep_table import TrialTable, short_names
from rl_lab.cli.tune import tuned
from rl_lab.config.compose import compose
from rl_lab.config.write import experiment_text
from rl_lab.experiment.trial import TrialCheck, check_trial
from rl_lab.launch.search import Trial
from rl_lab.launch.sweep import trial_from
from rl_lab.launch.sweep_plan import read_plan
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.sweeps import SweepDirectory
from rl_lab.types import ConfigError, RunError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project of a user."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def identities(name: str) -> dict[str, str]:
    """Which trainings there were: a run that was begun anew has another identity."""
    finished = [
        path for path in Path("runs").glob(f"{name}-*") if RunDirectory(path).read_status()["state"] == "finished"
    ]
    return {path.name: json.loads((path / "manifest.json").read_text())["identity"] for path in finished}


TINY_PPO = [
    *("environment.num_envs=4", "training.phases.train.duration_steps=600", "evaluation.final_episodes=4"),
    *("evaluation.num_envs=4", "evaluation.video=false", "logging.tensorboard=false", "algorithm.epochs=2"),
]
SEARCH = {
    "experiment": "ppo_cartpole",
    "overrides": TINY_PPO,
    "sampler": "tpe",
    "jobs": 1,
    "parameters": {"optimizers.controller.learning_rate": {"low": 1.0e-4, "high": 1.0e-2, "log": True}},
}
FEW = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a sweep that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder):
        assert main(["sweep", str(write("whole.yaml", **SEARCH, trials=FEW)), "--quiet"]) == 0
    return folder


def kill_and_compare(rl: Any, kills: int, trials: int, expected: list[tuple[Any, ...]]) -> None:
    """Kill -9 a sweep again and again, each time with two more runs begun; then let it end."""
    file = write("killed.yaml", **SEARCH, trials=trials)
    dice, seen = random.Random(1), {}
    for kill in range(kills):
        process = subprocess.Popen([sys.executable, "-m", "rl_lab", "sweep", str(file)], stdout=subprocess.DEVNULL)
        goal = min(trials - 1, 2 * (kill + 1))
        while process.poll() is None and len(list(Path("runs").glob("killed-*"))) < goal:
            time.sleep(0.02)
        time.sleep(dice.uniform(0.0, 0.8))
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
        finished = identities("killed")
        assert seen.items() <= finished.items(), "a finished run was begun anew"
        seen = finished
    answer = rl("sweep", file)
    assert answer.code == 0, answer.err
    assert seen.items() <= identities("killed").items()
    assert len(identities("killed")) == trials
    assert facts("killed") == expected


def test_a_sweep_that_was_killed_loses_and_repeats_nothing(rl: Any, whole: Path, here: Path) -> None:
    with contextlib.chdir(whole):
        expected = facts("whole")
    kill_and_compare(rl, kills=1, trials=FEW, expected=expected)
    best = [
        folder / "configs/experiment" / f"{folder_name}_best.yaml"
        for folder, folder_name in ((whole, "whole"), (here, "killed"))
    ]
    assert len({yaml.safe_load(file.read_text())["optimizers"]["controller"]["learning_rate"] for file in best}) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_killed_ten_times_loses_and_repeats_nothing(rl: Any, here: Path) -> None:
    assert rl("sweep", write("alone.yaml", **SEARCH, trials=24)).code == 0
    kill_and_compare(rl, kills=10, trials=24, expected=facts("alone"))


@pytest.mark.slow
def test_a_sweep_that_is_asked_to_stop_saves_and_says_how_to_go_on(rl: Any, here: Path) -> None:
    content = {**SEARCH, "overrides": [*TINY_PPO, "training.phases.train.duration_steps=2000000"], "jobs": 2}
    file = write("asked.yaml", **content, trials=2)
    process = subprocess.Popen([sys.executable, "-m", "rl_lab", "sweep", str(file)], stderr=subprocess.PIPE, text=True)
    runs = [RunDirectory(Path(f"runs/asked-000{number}-s0")) for number in range(2)]
    while process.poll() is None and not all(run.metrics_path.exists() for run in runs):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: the same command goes on" in said
    assert [run.read_status()["state"] for run in runs] == ["interrupted", "interrupted"]
    assert all((run.checkpoints_dir / "latest").exists() for run in runs)
    answer = rl("sweep", file, "--minutes", "0.05")
    assert answer.code == 1 and "out of time: the same command goes on" in answer.out
    assert "no trial has finished yet" in answer.err
    assert [run.read_status()["state"] for run in runs] == ["interrupted", "interrupted"]


def test_the_trials_of_a_warm_worker_equal_trainings_of_their_own(
    rl: Any, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of several trials in one process, trained again by `rl-lab train`: bit for bit the same."""
    monkeypatch.chdir(whole)
    last = f"whole-{FEW - 1:04d}-s0"
    rate = journal("whole")[FEW - 1]["parameters"]["optimizers.controller.learning_rate"]
    words = [*TINY_PPO, f"optimizers.controller.learning_rate={rate!r}", "seed=0"]
    alone = ["train", "ppo_cartpole", *words, "--run-id", "alone", "-q"]
    subprocess.run([sys.executable, "-m", "rl_lab", *alone], check=True, stdout=subprocess.DEVNULL)
    assert reproducible_rows(last) == reproducible_rows("alone")
    assert same_weights(last, "alone") and not same_weights("whole-0000-s0", "alone")
    assert Path(f"runs/{last}/config.yaml").read_text() == Path("runs/alone/config.yaml").read_text()


def test_the_runs_of_a_sweep_are_listed_and_its_best_config_composes(
    rl: Any, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole)
    listed = json.loads(rl("list", "sweep:whole", "--json").out)
    assert sorted(row["id"] for row in listed) == [f"whole-{number:04d}-s0" for number in range(FEW)]
    best = max(journal("whole").values(), key=lambda row: row["score"])["parameters"]
    words = [*TINY_PPO, *(f"{key}={value!r}" for key, value in best.items())]
    assert {**compose("whole_best"), "experiment": None} == {**compose("ppo_cartpole", words), "experiment": None}


def reproducible_rows(run_id: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(f"runs/{run_id}/metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith(("time/", "system/"))} for row in rows]


def same_weights(first: str, second: str) -> bool:
    states = []
    for run_id in (first, second):
        folder = Path(f"runs/{run_id}/checkpoints/latest")
        files = sorted(path.name for path in folder.iterdir() if path.suffix == ".pt")
        states.append({name: torch.load(folder / name, weights_only=True) for name in files})
    tensors = [_tensors(state) for state in states]
    assert tensors[0] and len(tensors[0]) == len(tensors[1])
    return all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))


def _tensors(tree: Any, path: str = "") -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [] if "wall" in path or "logger" in path else [tree]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else []
    return [each for key, value in items for each in _tensors(value, f"{path}/{key}")]


# --- what is said ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say which file describes the sweep: rl-lab sweep FILE.yaml"),
        (["a.yaml", "b.yaml"], "say which file describes the sweep"),
        (["show"], "say which sweep to show: rl-lab sweep show NAME. There are no sweeps there yet."),
        (["z.yaml"], "there is no sweep file z.yaml"),
        (["s.yml"], "there is no sweep file s.yml. Did you mean 's.yaml'?"),
        (["s.yaml", "--minutes", "0"], "'0' is not a number above 0"),
        (["s.yaml", "--minutes", "x"], "'x' is not a number above 0"),
    ],
)
def test_a_wrong_command_line_is_refused(rl: Any, here: Path, words: list[str], message: str) -> None:
    write()
    answer = rl("sweep", *words)
    assert answer.code == 2 and message in answer.err


def test_a_sweep_that_is_not_there_is_named_with_the_nearest(rl: Any, here: Path) -> None:
    assert "There are no sweeps there yet" in rl("sweep", "show", "s").err
    make_record("swep")
    assert "Did you mean 'swep'? There are: swep." in rl("sweep", "show", "sweep").err


def make_record(name: str, *trials: dict[str, Any], **content: Any) -> None:
    """A sweep on disk, without its runs."""
    plan = read_plan({**CHEAP, **content}, place="s.yaml", default_name=name, default_jobs=1)
    folder = Path(f"runs/sweeps/{name}")
    folder.mkdir(parents=True)
    rows = [{"plan": plan.as_dict()}, *trials]
    (folder / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"number": 99, "par')


def trial(number: int, epsilon: float, discount: float, score: float | None, state: str = "finished") -> dict[str, Any]:
    parameters = {"algorithm.epsilon": epsilon, "algorithm.discount": discount}
    return {"number": number, "parameters": parameters, "state": state, "score": score, "message": ""}


TRIALS = [
    *(trial(n, 0.1 * (n + 1), (0.9, 0.99)[n % 2], float(n // 2)) for n in range(8)),
    {**trial(8, 0.5, 0.9, None, "failed"), "message": "loss/value is not finite"},
]


def test_show_prints_trials_best_and_importance_and_draws(rl: Any, here: Path) -> None:
    make_record("s", *TRIALS)
    answer = rl("sweep", "show", "s")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0].split() == ["TRIAL", "STATE", "SCORE", "TIME", "EPSILON", "DISCOUNT", "REMARK"]
    assert [line.split()[0] for line in lines[1:10]] == [str(number) for number in range(9)], "the cut line is left out"
    assert "best: trial 6, collect/episode_return_mean 3, run s-0006-s0" in answer.out
    assert "loss/value is not finite" in answer.out
    shares = [line.split() for line in lines if line.endswith(("algorithm.epsilon", "algorithm.discount"))]
    assert shares == [["100%", "algorithm.epsilon"], ["0%", "algorithm.discount"]]
    for name in ("parallel_coordinates", "importance"):
        assert Path(f"runs/sweeps/s/{name}.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads(rl("sweep", "show", "s", "--json").out)
    make_record("level", *(trial(n, 0.1 * (n + 1), (0.9, 0.99)[n % 2], (1.0, 2.0, 2.0, 1.0)[n % 4]) for n in range(4)))
    assert "none explains more than chance would: more trials or seeds may tell" in rl("sweep", "show", "level").out
    assert facts["best"] == 6 and len(facts["trials"]) == 9 and facts["importance"]["algorithm.discount"] == 0


def test_show_of_a_sweep_without_a_finished_trial(rl: Any, here: Path) -> None:
    make_record("s", TRIALS[-1])
    assert "no trial has finished yet" in rl("sweep", "show", "s").out


def test_show_tells_trials_that_wait_from_those_that_run(rl: Any, here: Path) -> None:
    make_record("s", *({"number": number, "parameters": TRIALS[0]["parameters"]} for number in (0, 1)))
    directory = SweepDirectory(Path("runs"), "s")
    begun = directory.run(0, 0)
    begun.path.mkdir()
    begun.config_path.write_text("seed: 0")

    def states() -> list[str]:
        return [trial["state"] for trial in json.loads(rl("sweep", "show", "s", "--json").out)["trials"]]

    assert states() == ["stopped", "waiting"]
    with directory.locked():
        assert states() == ["running", "waiting"]


def test_a_sweep_goes_on_only_as_it_began(rl: Any, here: Path) -> None:
    make_record("s", *TRIALS, sampler="random", trials=9)
    answer = rl("sweep", write(sampler="random", trials=4))
    assert (
        answer.code == 2 and "trials is 4, but 9 trials of sweep s have ended already: write at least 9" in answer.err
    )
    answer = rl("sweep", write(sampler="random", trials=9, metric="eval/episode_return_mean"))
    assert answer.code == 2 and "Sweep s exists with other settings" in answer.err
    assert "metric was collect/episode_return_mean, now eval/episode_return_mean" in answer.err
    answer = rl("sweep", write(sampler="random", trials=9, parameters={"algorithm.epsilon": [0.1, 0.2]}))
    assert "parameters.algorithm.epsilon was {'low': 0.01, 'high': 0.9}, now [0.1, 0.2]" in answer.err
    assert "parameters.algorithm.discount was [0.9, 0.99], now None" in answer.err
    answer = rl("sweep", write(sampler="random", trials=9), "environment.num_envs=2")
    assert answer.code == 2 and "overrides was" in answer.err
    assert len(journal_lines("s")) == 11, "nothing was written"


def journal_lines(name: str) -> list[str]:
    return Path(f"runs/sweeps/{name}/trials.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"parameters": {"algorithm.discont": [0.9, 0.99]}}, "algorithm.discont is not a setting. Did you mean"),
        ({"parameters": {"algorithm.discount": [0.9, 1.5]}}, "parameters.algorithm.discount=1.5: "),
        ({"metric": "eval/episode_retrun_mean"}, "is not known. Did you mean 'eval/episode_return_mean'?"),
        ({"metric": "eval/episode_return_mean", "overrides": ["evaluation.final_episodes=0"]}, "is never logged"),
        (
            {
                "metric": "eval/episode_return_mean",
                "pruner": "median",
                "overrides": ["evaluation.every_steps=null"],
            },
            "set evaluation.every_steps",
        ),
    ],
)
def test_values_are_checked_before_the_first_trial(content: dict[str, Any], message: str) -> None:
    """What a worker says of the configs that `rl_lab.cli.sweep_run.check_points` names; most need no worker."""
    plan = read_plan({**CHEAP, **content}, place="s.yaml", default_name="s", default_jobs=1)
    assert any(message in check_trial(task) for task in check_points(plan, None))


def test_a_refused_sweep_leaves_nothing_behind(rl: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "Pool", PoolOfOne)
    answer = rl("sweep", write(parameters={"algorithm.discont": [0.9, 0.99]}, sampler="grid"))
    assert answer.code == 2 and "cannot run, so nothing was started" in answer.err
    assert answer.err.count("algorithm.discont is not a setting") == 1
    assert [path.name for path in here.iterdir()] == ["s.yaml"]


def test_a_sweep_says_what_it_found_and_where_it_lies(rl: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "Pool", PoolOfOne)
    parameters = {"algorithm.epsilon": [0.05, 0.9]}
    answer = rl("sweep", write(parameters=parameters, sampler="grid", seeds=[3]), "--output", "best/good.yaml")
    assert answer.code == 0, answer.err
    assert "trial    0/2  finished" in answer.out and "best so far" in answer.out
    assert "2 of 2 trials ended in" in answer.out and "look: rl-lab sweep show s" in answer.out
    assert "best config: best/good.yaml" in answer.out
    assert "experiment:\n  name: good" in Path("best/good.yaml").read_text()
    before = Path("runs/sweeps/s/trials.jsonl").read_text()
    again = rl("sweep", Path("s.yaml"), "--output", "best/good.yaml", "-q")
    assert again.code == 0 and again.out.startswith("best: trial ")
    assert Path("runs/sweeps/s/trials.jsonl").read_text() == before, "nothing is left to do"


def test_a_line_cut_by_a_kill_is_cut_off_before_the_next(here: Path) -> None:
    make_record("s", *TRIALS)
    directory = SweepDirectory(Path("runs"), "s")
    directory.append({"number": 9, "state": "started"})
    assert [json.loads(line) for line in journal_lines("s")][-1] == {"number": 9, "state": "started"}
    assert len(journal_lines("s")) == 11


def test_one_process_at_a_time_works_on_a_sweep(here: Path) -> None:
    directory = SweepDirectory(Path("runs"), "s")
    message = "Sweep s is being worked on by another process"
    with directory.locked(), pytest.raises(RunError, match=message), directory.locked():
        pass


def test_a_terminal_shows_a_table_of_the_newest_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    plan = read_plan(CHEAP, place="s.yaml", default_name="s", default_jobs=1)
    trials = [trial_from(row) for row in TRIALS] + [Trial(9, TRIALS[0]["parameters"], "running", values=[0.25])]
    trials.append(Trial(10, TRIALS[0]["parameters"]))  # asked for ahead
    lines = TrialTable(plan, is_quiet=False).render(trials, columns=120, lines=50)
    assert "s · 9 of 20 trials · best 3 in trial 6" in lines[0]
    assert lines[1].split() == ["trial", "state", "score", "s", "epsilon", "discount"]
    assert lines[-2].split() == ["9", "running", "0.25", "0", "0.1", "0.9"]
    assert lines[-1].split()[:2] == ["10", "waiting"]


@pytest.mark.parametrize("experiment", ["ppo_cartpole", "sac_pendulum", "dreamer_v3"])
def test_the_table_of_tune_can_be_read_in_eighty_columns(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    content = tuned(compose(experiment), None) | {"experiment": experiment}
    plan = read_plan(content, place="s.yaml", default_name="s", default_jobs=1)
    point = {each.key: each.at(0.37) for each in plan.parameters}
    trials = [Trial(number, point, state="finished", score=123.456, seconds=1234.5) for number in range(40)]
    text = "\n".join(TrialTable(plan, is_quiet=False).render(trials, columns=80, lines=24))
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines()) and len(text.splitlines()) <= 24
    shown = text.split("finished")[-1]
    for name, value in zip(short_names([*point]), point.values(), strict=True):  # all are there, none cut in two
        is_column = name in text.splitlines()[1].split()
        assert (format_value(value) if is_column else f"{name}={format_value(value)}") in shown.split()
    assert text.count("finished") >= 4


def test_as_much_of_a_key_is_shown_as_tells_it_apart() -> None:
    assert short_names(["o.a.x", "o.b.x", "b.y", "x"]) == ["a.x", "b.x", "y", "x"]


def test_elsewhere_each_trial_is_one_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    plan = read_plan(CHEAP, place="s.yaml", default_name="s", default_jobs=1)
    table = TrialTable(plan, is_quiet=False)
    table.show([trial_from(row) for row in TRIALS[:1]])
    table.show([trial_from(row) for row in TRIALS[:1]])
    table.say("\nstopping")
    said = capsys.readouterr()
    assert (
        said.out == "trial    0/20  finished           0  algorithm.epsilon=0.1  algorithm.discount=0.9  best so far\n"
    )
    assert said.err == "\nstopping\n"


class Terminal(io.StringIO):
    """A stream that is one, until it is gone."""

    is_gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError("it is gone")
        return super().write(text)


def test_the_table_is_painted_over_and_what_is_said_stays_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(CHEAP, place="s.yaml", default_name="s", default_jobs=1)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    table, screen = TrialTable(plan, is_quiet=False), pyte.Screen(80, 24)
    table.show([trial_from(row) for row in TRIALS[:1]])
    table.say("stopping")
    table.show([trial_from(row) for row in TRIALS[:2]])
    pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    shown = [line.split() for line in screen.display if line.strip()]
    assert shown[0] == ["stopping"] and shown[1][:4] == ["s", "·", "2", "of"] and len(shown) == 5
    assert [line[:2] for line in shown[3:]] == [["0", "finished"], ["1", "finished"]]
    terminal.is_gone = True
    table.show([trial_from(row) for row in TRIALS[:3]])
    table.show([trial_from(row) for row in TRIALS[:4]])


# --- the best config ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("rl_lab/Counter-v0:ppo", ["algorithm.epochs=3", "training.phases.train.collect_steps=64"]),
        ("dqn_cartpole", ["replay=prioritized", "training.updates_per_step=0.5"]),
        ("ppo_cartpole", ["preset=debug", "total_timesteps=2000", "algorithm.epochs=3"]),  # it joins after experiments
    ],
)
def test_the_best_config_composes_to_what_its_trial_had(here: Path, experiment: str, words: list[str]) -> None:
    text = experiment_text("good", experiment, words, remarks=["Best of all: 1"], config_dir=None)
    Path("configs/experiment").mkdir(parents=True)
    Path("configs/experiment/good.yaml").write_text(text)
    assert {**compose("good"), "experiment": None} == {**compose(experiment, words), "experiment": None}
    assert compose("good")["experiment"]["name"] == "good"


def test_choices_that_no_file_can_say_are_refused(here: Path) -> None:
    """`size=` replaces an experiment's own layer sizes on the command line only."""
    with pytest.raises(ConfigError, match="cannot be written into one experiment file"):
        experiment_text("good", "dreamer_v3_cartpole", ["size=1m"], remarks=[], config_dir=None)


# --- tune --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "experiment",
    [
        "bandit_thompson",
        "dreamer_v3",
        "dreamer_v2",
        "planet",
        "reinforce_cartpole",
        "tdmpc2",
        "diffusion_policy",
        "bc_detour",
    ],
)
def test_a_shipped_space_fits_its_experiments(experiment: str) -> None:
    content = {**tuned(compose(experiment), None), "experiment": experiment}
    assert read_plan(content, place="space", default_name="s", default_jobs=1).parameters


def test_every_algorithm_that_learns_has_a_space() -> None:
    spaces = {file.stem for file in (ROOT / "rl_lab/launch/spaces").glob("*.yaml")}
    files = (ROOT / "rl_lab/configs/algorithm").glob("*.yaml")
    workflows = {found[1] for file in files if (found := re.search(r"rl_lab\.workflows\.(\w+)\.", file.read_text()))}
    assert spaces == workflows - {"random"}


TUNED = ["ppo_cartpole", "dqn_cartpole", "sac_pendulum"]


@pytest.mark.parametrize("experiment", TUNED)
def test_the_ends_of_a_shipped_space_can_be_built(experiment: str) -> None:
    content = {**tuned(compose(experiment), None), "experiment": experiment}
    plan = read_plan(content, place="space", default_name="s", default_jobs=1)
    for fraction in (0.0, 1.0):
        values = {parameter.key: parameter.at(fraction) for parameter in plan.parameters}
        words = (*words_of(plan, values), "runtime.device=cpu")
        task = TrialCheck("", experiment, words, None, plan.metric, plan.pruner != "none")
        assert check_trial(task) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to tune: rl-lab tune EXPERIMENT"),
        (["random_cartpole"], "no search space is shipped for rl_lab.workflows.random.RandomPolicy. There are: bandit"),
        (["ppo_cartpol"], "Did you mean 'ppo_cartpole'?"),
    ],
)
def test_tune_says_what_it_cannot_tune(rl: Any, here: Path, words: list[str], message: str) -> None:
    answer = rl("tune", *words)
    assert answer.code == 2 and message in answer.err


def test_tune_evaluates_for_its_pruner_but_leaves_that_out_of_the_best_config(here: Path) -> None:
    content = tuned(compose("ppo_cartpole"), None)
    assert content["trial_overrides"] == ["evaluation.video=false", "evaluation.every_steps=15000"]
    plan = read_plan(content, place="space", default_name="s", default_jobs=1)
    assert words_of(plan, {"algorithm.discount": 0.9}, is_trial=False) == ("algorithm.discount=0.9",)


def test_tune_does_not_search_for_a_setting_that_is_given(rl: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sweep_run, "start", lambda content, **options: seen.append((content, options)) or 0)
    assert rl("tune", "ppo_cartpole", "algorithm.discount=0.98").code == 0
    (content, options), shipped = seen[0], tuned(compose("ppo_cartpole"), None)["parameters"]
    assert shipped.keys() - content["parameters"].keys() == {"algorithm.discount"}
    assert options["overrides"] == ["algorithm.discount=0.98"] and content["name"] == "tune_ppo_cartpole"


# --- wandb agent -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "is_sweep", "expected"),
    [
        (["--algorithm.discount=0.9"], False, ["algorithm.discount=0.9"]),
        (["--algorithm.discount", "0.9", "ppo_cartpole"], False, ["algorithm.discount=0.9", "ppo_cartpole"]),
        (["--algorithm.x", "-1"], False, ["algorithm.x=-1"]),
        (["--algorithm.double", "--quiet"], False, ["algorithm.double=true", "--quiet"]),
        (["--seed=3"], False, ["seed=3"]),
        (["--colour=3"], True, ["colour=3"]),
        (["--seed=3", "--memory", "lstm"], True, ["seed=3", "memory=lstm"]),
        (["--run-id", "a", "--jobs=2", "seed=1"], True, ["--run-id", "a", "--jobs=2", "seed=1"]),
        (["--run-id", "--a.b=1"], True, ["--run-id", "--a.b=1"]),
    ],
)
def test_arguments_of_wandb_agent_are_overrides(words: list[str], is_sweep: bool, expected: list[str]) -> None:
    assert settings_from_options(words, parser_of("train"), is_sweep=is_sweep) == expected


def test_an_unknown_option_is_a_mistake_where_there_is_no_sweep() -> None:
    with pytest.raises(UsageError, match=r"unknown option '--colour'\.\n"):  # and not --lr for its dashes
        settings_from_options(["--colour=3"], parser_of("train"), is_sweep=False)


def test_wandb_agent_can_call_train(rl: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def train(config: dict[str, Any], overrides: list[str], **options: Any) -> Any:
        seen.append((config["experiment"]["name"], overrides))
        return SimpleNamespace(id="a")

    fake("experiment.session", train=train)
    assert rl("train", "--colour=3", "ppo_cartpole").code == 2
    monkeypatch.setenv("WANDB_SWEEP_ID", "x1")
    assert rl("train", "ppo_cartpole", "--algorithm.discount=0.98", "--seed", "3", "-q").code == 0
    assert seen == [("ppo_cartpole", ["algorithm.discount=0.98", "seed=3"])]
