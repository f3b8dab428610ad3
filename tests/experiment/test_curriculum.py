"""Phases that change the environment, numbers, learning rates and weights: what they do, and that resuming is exact."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rl_lab import api
from rl_lab.buffers.episodes import EpisodeBuffer
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.config.compose import compose
from rl_lab.experiment import session
from rl_lab.experiment.build import build, check
from rl_lab.experiment.trust import foreign_packages
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.lineage import lineage_of
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, Phase
from rl_lab.utils.tree import equal
from tests.test_resume import CASES, COMMON, assert_same_run, reproducible_rows, reproducible_state, wait_for_rows

CYCLES = {"easy": 4, "hard": 4, "last": 3}
RATE = "optimizers.controller.learning_rate"
HARD: dict[str, dict[str, Any]] = {  # what the second phase sets, besides environment and learning rate
    "ppo discrete, sync": {
        "algorithm.clip_range": "linear(0.1, 0.05)",
        "algorithm": {"loss_scales": {"entropy": 0.02}},
    },
    "dqn with every switch, prioritised": {"algorithm": {"epsilon": 0.5, "target_every": 2, "discount": 0.9}},
    "reinforce": {},
}


def curriculum(case: str = "ppo discrete, sync", **more: Any) -> dict[str, Any]:
    """Three phases: counters of length 5, then of length 3 at another learning rate, then of length 5 again."""
    experiment, *own = CASES[case]
    config = compose(experiment, [*COMMON, *own])
    config["environment"] |= {"id": "rl_lab/Counter-v0", "vectorization": "sync"}
    config["optimizers"]["controller"]["learning_rate"] = 1e-3
    block = {key: value for key, value in config["training"]["phases"][-1].items() if "duration" not in key}
    phases = {name: {**block, "name": name, "duration_cycles": cycles} for name, cycles in CYCLES.items()}
    phases["hard"]["set"] = {"environment.kwargs": {"length": 3}, RATE: "linear(1e-4, 0)", **HARD[case]}
    phases["hard"] |= more
    config["training"]["phases"] = list(phases.values())
    return config


def set_in_hard(**settings: Any) -> dict[str, Any]:
    return curriculum(set={key.replace("__", "."): value for key, value in settings.items()})


def in_pieces(config: dict[str, Any], path: Path, cuts: tuple[int, ...]) -> None:
    """Train, interrupted after so many cycles of the run, and continued by a newly built experiment."""
    run = RunDirectory.create(path.parent, run_id=path.name, name="test", seed=0)
    done = 0
    for stop_at in (*cuts, None):
        cycles = count(done + 1)
        experiment = build(config, run=run, quiet=True, interrupted=lambda: next(cycles) == stop_at)  # noqa: B023
        try:
            if done:
                found = CheckpointStore(run.checkpoints_dir).load_newest_valid(lambda sentence: None)
                assert found is not None
                experiment.restore(found)
            assert experiment.orchestrator.run() == ("finished" if stop_at is None else "interrupted")
        finally:
            experiment.close()
        done = stop_at or 0


@pytest.mark.parametrize("case", HARD)
def test_a_curriculum_cut_in_and_between_its_phases_equals_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    config = curriculum(case)
    in_pieces(config, tmp_path / "whole", ())
    for number, cuts in enumerate([(4,), (3, 5), (8, 9)]):  # at the change, around it, around the change back
        in_pieces(config, tmp_path / str(number), cuts)
        assert_same_run(tmp_path / str(number), tmp_path / "whole")


def test_settings_of_a_phase_hold_for_that_phase_only(tmp_path: Path) -> None:
    in_pieces(curriculum(), tmp_path / "run", ())
    rows = [row for row in reproducible_rows(tmp_path / "run") if "train/learning_rate" in row]
    assert [row["train/learning_rate"] for row in rows] == pytest.approx(
        [1e-3] * 4 + [1e-4, 7.5e-5, 5e-5, 2.5e-5] + [1e-3] * 3
    )
    assert [row["train/clip_range"] for row in rows] == pytest.approx(
        [0.2] * 4 + [0.1, 0.0875, 0.075, 0.0625] + [0.2] * 3
    )
    lengths = [row["collect/episode_length_mean"] for row in rows]  # 5 or 6 rows an episode; 3 or 4 in the second phase
    assert all(length >= 5 for length in (*lengths[:4], *lengths[8:])) and all(length <= 4 for length in lengths[4:8])


def test_numbers_that_another_part_keeps_reach_it() -> None:
    experiment = build(curriculum("dqn with every switch, prioritised"), run=None, quiet=True)
    try:
        workflow, seen = experiment.agent.workflow, []
        for index in range(3):
            experiment.curriculum.begin(index, is_new=True)
            seen.append((workflow.target.every, workflow.discount, workflow.epsilon))  # type: ignore[attr-defined]
        assert seen[0] == seen[2] and seen[0][0] == 3
        assert seen[1] == (2, 0.9, 0.5)
    finally:
        experiment.close()


def rows_of(values: list[int], **flags: list[int]) -> dict[str, torch.Tensor]:
    row = {"vector": torch.tensor(values, dtype=torch.float32)[:, None], "reward": torch.zeros(len(values))}
    for name in ("is_first", "is_last", "is_terminal"):
        row[name] = torch.tensor(flags.get(name, [0] * len(values)), dtype=torch.bool)
    return row


def test_a_replay_ends_the_episodes_under_way_where_it_is_cut() -> None:
    replay = ReplayBuffer(num_envs=1, capacity_rows=8, batch_size=64)
    for value in range(3):
        replay.add({**rows_of([value], is_first=[value == 0]), "action": torch.tensor([0])})
    replay.set_pending(rows_of([3]))
    replay.cut()
    for value in (10, 11):
        replay.add({**rows_of([value], is_first=[value == 10]), "action": torch.tensor([0])})
    batch = replay.sample()
    pairs = {tuple(pair) for pair in batch["vector"][..., 0].int().tolist()}
    assert pairs == {(0, 1), (1, 2), (2, 3), (10, 11)}  # none from one environment into the other
    assert batch["is_last"][batch["vector"][..., 0] == 3].all()


def test_an_episode_that_a_change_cuts_is_never_given() -> None:
    episodes = EpisodeBuffer(num_envs=1, episodes_per_batch=1)
    for value in range(2):
        episodes.add({**rows_of([value], is_first=[value == 0]), "action": torch.tensor([0])})
    episodes.cut()
    for value in (10, 11):
        row = rows_of([value], is_first=[value == 10], is_last=[value == 11])
        episodes.add({**row, "action": torch.tensor([0])})
    assert episodes.sample()["vector"][0, :, 0].tolist() == [10.0, 11.0]


# --- refused before the first step ---

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm.clip_rnage": 0.1}, "Phase 'hard', set: algorithm.clip_rnage is not a setting of PPO. Did you mean"),
    ({"algorithm.clip_range": "often"}, "Phase 'hard', set: algorithm.clip_range: 'often' is neither a number nor"),
    ({"algorithm.clip_range": -0.1}, "Phase 'hard', set: algorithm.clip_range: -0.1; allowed is a number from 0 on"),
    ({"algorithm.discount": 1.5}, "Phase 'hard', set: algorithm.discount is 1.5: write a number from 0 to 1."),
    ({"algorithm.epochs": "two"}, "Phase 'hard', set: algorithm.epochs is 'two'. Allowed: a whole number."),
    ({"algorithm.sequence_length": 3}, "Phase 'hard', set: algorithm.sequence_length is 3: write a divisor of the 16"),
    ({"algorithm._target_": "x.Y"}, "Phase 'hard' sets algorithm._target_, which stays the same over a run: one run"),
    ({"environment.num_envs": 2}, "Phase 'hard' sets environment.num_envs, which stays the same over a run: the buf"),
    ({"environment.idd": "x"}, "Phase 'hard', set: environment.idd is not a setting of make_environment. Did you mean"),
    ({"environment.id": "rl_lab/Conter-v0"}, "Phase 'hard', set: "),
    ({"environment.kwargs.lenght": 3}, "It takes: length, num_actions."),
    ({"environment": "CartPole-v1"}, "Phase 'hard' sets environment to 'CartPole-v1': set one of its keys, such as"),
    ({"optimizers.controler.learning_rate": 1e-3}, "there is no such optimizer. Did you mean 'controller'?"),
    ({"optimizers.controller.learning_rat": 1e-3}, "Did you mean 'learning_rate'? Of an optimizer a phase sets the"),
    ({RATE: -1}, "Phase 'hard', set: optimizers.controller.learning_rate: -1; allowed is a number from 0 on"),
    ({RATE: "linear(1)"}, "Phase 'hard', set: optimizers.controller.learning_rate: a linear schedule needs an end."),
    ({"evaluation.episodes": 3}, "Phase 'hard' sets evaluation.episodes. A phase may set keys of: environment, algo"),
    ({"algoritm.discount": 0.9}, "Phase 'hard' sets algoritm.discount. Did you mean 'algorithm'?"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_a_wrong_setting_of_a_phase_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(curriculum(set=settings))
    assert sentence in str(refused.value)


def test_an_environment_with_other_spaces_is_refused_with_both() -> None:
    with pytest.raises(ConfigError) as refused:
        check(set_in_hard(environment__id="CartPole-v1"))
    assert str(refused.value).splitlines() == [
        "Phase 'hard' sets the environment CartPole-v1, whose spaces are not those the networks are made for:",
        "  CartPole-v1: observation vector float32 [4]; action discrete [2]",
        "  rl_lab/Counter-v0: observation vector float32 [3]; action discrete [10]",
        "Choose one with the same spaces, or map them: `environment.wrappers: [...]` in the phase's `set`.",
    ]


def test_a_buffer_that_cannot_be_cut_is_refused_where_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RolloutBuffer, "cut")
    with pytest.raises(ConfigError, match="buffers.rollout has no method `cut`, by which episodes end where a phase"):
        check(curriculum())
    check(curriculum(set={"algorithm.discount": 0.9}))


def test_wrappers_of_a_phase_map_other_spaces_to_those_of_the_run() -> None:
    stacked = {"environment.id": "rl_lab/Recall-v0", "environment.wrappers": [{"id": "frame_stack", "count": 2}]}
    config = curriculum(set={**stacked, "environment.kwargs": {"num_cues": 2}})
    config["environment"] |= {"id": "rl_lab/Recall-v0", "kwargs": {"num_cues": 2}, "wrappers": []}
    with pytest.raises(ConfigError, match=r"Recall-v0: observation vector float32 \[6\]; action discrete \[2\]"):
        check(config)
    config["environment"]["wrappers"] = [{"id": "frame_stack", "count": 2}]
    config["training"]["phases"][1]["set"]["environment.kwargs"] = {"num_cues": 2, "delay": 1}
    check(config)


def test_a_phase_that_collects_nothing_sets_no_environment() -> None:
    config = curriculum(type="eval_only")
    with pytest.raises(ConfigError, match="Phase 'hard' is eval_only and collects nothing, so it sets no environment"):
        check(config)


# --- parts of another run ---


def tiny(
    run_id: str,
    runs_dir: Path,
    *,
    phases: list[dict[str, Any]],
    overrides: tuple[str, ...] = (),
    resume_existing: bool = False,
) -> api.Run:
    """A training of a config with these phases."""
    from rl_lab.experiment import session

    experiment, *own = CASES["ppo discrete, sync"]
    config = compose(experiment, [*COMMON, *own, "components.encoder.hidden_sizes=[8]", *overrides])
    block = {key: value for key, value in config["training"]["phases"][-1].items() if "duration" not in key}
    config["training"]["phases"] = [{**block, "duration_cycles": 2, **phase} for phase in phases]
    trained = session.train(config, (), runs_dir=runs_dir, run_id=run_id, resume_existing=resume_existing, quiet=True)
    return api.Run(trained)


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return tiny("donor", tmp_path_factory.mktemp("runs"), phases=[{"name": "train"}], overrides=("seed=7",))


def test_weights_loaded_from_another_run_equal_that_runs(donor: api.Run) -> None:
    frozen = {"freeze": ["encoder", "actor"], "load": {"from": "don", "parts": ["components.encoder", "actor"]}}
    run = tiny("heir", donor.path.parent, phases=[{"name": "own"}, {"name": "taken", **frozen}])
    theirs, mine = (CheckpointStore(each.path / "checkpoints").load("latest") for each in (donor, run))
    for section, name in (("components", "encoder"), ("controllers", "actor")):
        assert equal(mine.state[section][name], theirs.state[section][name]), name
    assert not equal(mine.state["controllers"]["critic"], theirs.state["controllers"]["critic"])
    (event,) = lineage_of(run.directory.read_manifest())
    assert (event["event"], event["source"], event["phase"]) == ("loaded", "donor", "taken")
    assert event["checkpoint"] == theirs.path.name and event["source_counts"] == theirs.counts
    assert "components.encoder, controllers.actor of donor" in (run.path / "report.md").read_text()
    pinned = run.config["training"]["phases"][1]["load"]
    assert pinned["from"] == str(donor.path) and pinned["checkpoint"] == theirs.path.name


def test_the_same_command_with_resume_goes_on_although_its_source_is_pinned(donor: api.Run, tmp_path: Path) -> None:
    """The run's config names one checkpoint of one directory; the command still says `don` or `@last`."""
    shutil.copytree(donor.path, tmp_path / "donor", symlinks=True)
    load = {"from": "@last", "parts": ["encoder"]}
    asked = [{"name": "own"}, {"name": "taken", "load": load, "duration_cycles": 4}]
    run = tiny("heir", tmp_path, phases=asked)
    run.directory.write_status("interrupted")  # as if it had been, before its report
    again = tiny("heir", tmp_path, phases=asked, resume_existing=True)  # @last is the run itself by now
    assert again.status["state"] == "finished"
    named = [{"name": "own"}, {**asked[1], "load": {**load, "from": "donor", "checkpoint": "latest"}}]
    tiny("heir", tmp_path, phases=named, resume_existing=True)  # other words for the same checkpoint
    for other in ({**load, "parts": ["actor"]}, {**load, "from": "heir"}, {**load, "from": "gone"}):
        with pytest.raises(ConfigError, match=r"training.phases.1.load.(parts.0|from): .* asked for"):
            tiny("heir", tmp_path, phases=[asked[0], {**asked[1], "load": other}], resume_existing=True)


LOADS: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"from": "nobody", "parts": ["encoder"]}, (), "Phase 'taken' loads from the run nobody, which cannot be: "),
    (
        {"from": "donor", "parts": ["encodr"]},
        (),
        "loads 'encodr', which is no part of this run. Did you mean 'encoder'?",
    ),
    ({"from": "donor", "parts": []}, (), "training.phases.0.load.parts is []: it lists parts of that run; write"),
    ({"from": "donor", "part": ["encoder"]}, (), "training.phases.0.load.part is unknown. Did you mean 'parts'?"),
    ({"parts": ["encoder"]}, (), "training.phases.0.load.from is None: it names a run (an id, a path, @last); write"),
    (
        {"from": "donor", "parts": ["encoder"], "checkpoint": "step_1"},
        (),
        "Write training.phases.taken.load.checkpoint=latest.",
    ),
    (
        {"from": "donor", "parts": ["encoder"]},
        ("components.encoder.hidden_sizes=[16]",),
        "what does not fit:\n  components.encoder.",
    ),
    ({"from": "donor", "parts": ["memory"]}, ("memory=gru",), "it has no components.memory."),
]


@pytest.mark.parametrize(("load", "overrides", "sentence"), LOADS, ids=[sentence[:60] for *_, sentence in LOADS])
def test_what_cannot_be_loaded_is_refused_before_the_first_step(
    load: dict[str, Any], overrides: tuple[str, ...], sentence: str, donor: api.Run
) -> None:
    before = sorted(donor.path.parent.iterdir())
    with pytest.raises(ConfigError) as refused:
        tiny("refused", donor.path.parent, phases=[{"name": "taken", "load": load}], overrides=overrides)
    assert sentence in str(refused.value)
    assert sorted(donor.path.parent.iterdir()) == before


def test_a_misfit_is_said_with_both_shapes(donor: api.Run) -> None:
    load = {"from": "donor", "parts": ["encoder"]}
    with pytest.raises(ConfigError, match=r"weight: checkpoint \[8, 4\], this run \[16, 4\]"):
        tiny(
            "refused",
            donor.path.parent,
            phases=[{"name": "taken", "load": load}],
            overrides=("components.encoder.hidden_sizes=[16]",),
        )


# --- kill -9 around the change ---

CONFIG = "kill.yaml"
TRAINER = """
import sys, yaml
from pathlib import Path
from rl_lab.experiment import session
config = yaml.safe_load(Path(sys.argv[1]).read_text())
session.train(config, (), runs_dir=sys.argv[2], run_id="cut", resume_existing=True, quiet=True)
"""


def killed_around_the_change(config: dict[str, Any], folder: Path, *, chance: random.Random, kills: int) -> int:
    """Kill the training where the second phase begins, again and again, then let it end; how often it was killed."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(yaml.safe_dump(config))
    environment = os.environ | {"PYTHONPATH": str(Path(api.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAINER, str(folder / CONFIG), str(folder)]
    killed = 0
    for _ in range(kills):
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        wait_for_rows(folder / "cut" / "metrics.jsonl", chance.randrange(6, 11), process)  # the change is after row 8
        time.sleep(chance.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    session.train(config, (), runs_dir=folder, run_id="cut", resume_existing=True, quiet=True)
    return killed


def longer(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for phase, cycles in zip(config["training"]["phases"], (8, 12, 4), strict=True):
        phase["duration_cycles"] = cycles
    return config


def test_a_curriculum_killed_around_the_change_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = longer(curriculum())
    in_pieces(config, tmp_path / "whole", ())
    assert killed_around_the_change(config, tmp_path / "0", chance=random.Random(1), kills=1)
    assert_same_run(tmp_path / "0" / "cut", tmp_path / "whole")
    assert [each["event"] for each in lineage_of(json.loads((tmp_path / "0/cut/manifest.json").read_text()))] == [
        "resumed"
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", HARD)
def test_many_kills_around_the_change_resume_bit_for_bit(case: str, tmp_path: Path) -> None:
    config, killed = longer(curriculum(case)), 0
    in_pieces(config, tmp_path / "whole", ())
    seeds = int(os.environ.get("RL_LAB_KILLS", "10"))
    for seed in range(seeds):
        killed += killed_around_the_change(config, tmp_path / str(seed), chance=random.Random(seed), kills=2)
        assert_same_run(tmp_path / str(seed) / "cut", tmp_path / "whole")
    assert killed > seeds, "most processes were killed while they trained"


def test_reproducible_state_knows_which_environment_is_held(tmp_path: Path) -> None:
    in_pieces(curriculum(), tmp_path / "run", (4,))
    assert reproducible_state(tmp_path / "run")["collector"]["stage"] == 2  # there, and back in a new one of the first


@pytest.mark.parametrize("settings", [{"environment.id": "evil:Env-v0"}, {"environment": {"id": "evil:Env-v0"}}])
def test_a_package_that_a_phase_names_needs_consent(settings: dict[str, Any]) -> None:
    assert foreign_packages(curriculum(set=settings)) == {
        "evil": "training.phases.1.set.environment.id",
    }


def test_a_world_model_is_one_word_to_load_and_its_algorithm_is_set_like_any() -> None:
    experiment, *own = CASES["dreamer from states"]
    config = compose(experiment, [*COMMON, *own])
    settings = {"algorithm.horizon": 3, "algorithm.slow_critic_rate": 0.5, "algorithm.loss_scales.entropy": 0.01}
    config["training"]["phases"].append({**config["training"]["phases"][-1], "name": "later", "set": settings})
    built = build(config, run=None, quiet=True)
    try:
        named = built.curriculum.parts_to_load(Phase("any", load={"from": "any", "parts": ["world_model"]}))
        assert {"components.encoder", "components.dynamics", "components.decoder"} <= set(named)
        assert not any("critic" in name or "actor" in name or "return_scale" in name for name in named)
        workflow: Any = built.agent.workflow
        scales = dict(workflow.loss_scales)
        built.curriculum.begin(2, is_new=True)
        assert (workflow.horizon, workflow.slow_critic.rate) == (3, 0.5)
        assert workflow.loss_scales == {**scales, "entropy": 0.01}  # none for a mask that this environment has not
    finally:
        built.close()
