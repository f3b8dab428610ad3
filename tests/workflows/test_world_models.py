"""World Models: who plays which rollout, dreams by hand, what learns from what, every stage resumed, refusals."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.buffers.episode_returns import EpisodeReturns
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build, build_agent, build_runtime
from rl_lab.experiment.film import film_dreams
from rl_lab.experiment.identical import reproducible
from rl_lab.metrics.names import is_wall_clock
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.training import optimizer
from rl_lab.training.update_rules import UpdateRule
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec, Phase, Progress, TimeStep
from rl_lab.utils.tree import equal
from rl_lab.workflows import world_models
from rl_lab.workflows.film import can_dream
from rl_lab.workflows.world_models import WorldModels
from tests.test_captured_methods import Watched
from tests.tiny_dreamer import random_rows
from tests.tiny_world_models import TINY_WORLD_MODELS

DREAM, REAL = "world_models_follow", "world_models_follow_real"
IMAGE = {"image": ArraySpec((16, 16, 1), "uint8")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (3,)), ActionSpec("continuous", (2,))
PHASE = Phase(name="train", type="offline", buffer="replay", progress=Progress())


@cache
def config_of(*overrides: str) -> dict[str, Any]:
    return compose(DREAM, [*TINY_WORLD_MODELS, *overrides])


def make(
    action: ActionSpec = DISCRETE, observation: dict[str, ArraySpec] = IMAGE, overrides: tuple[str, ...] = ()
) -> tuple[WorldModels, Agent]:
    """A tiny one for an environment that need not exist."""
    config = config_of(*overrides)
    agent = build_agent(config, EnvSpec("none", observation, action), runtime=build_runtime(config))
    assert isinstance(agent.workflow, WorldModels)
    return agent.workflow, agent


def time_step(is_first: list[bool]) -> TimeStep:
    count = len(is_first)
    nothing = torch.zeros(count, dtype=torch.bool)
    image = torch.randint(0, 256, (count, 16, 16, 1), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return TimeStep({"image": image}, torch.zeros(count), torch.tensor(is_first), nothing, nothing)


# --- who plays which rollout -------------------------------------------------------------------


def test_an_environment_that_ends_an_episode_begins_the_next_rollout() -> None:
    workflow, _ = make()  # 4 candidates with 2 rollouts
    workflow.is_evolving, workflow.candidates = True, workflow.new_population()
    answer = workflow.act(time_step([True] * 3), None, mode="train")
    assert answer.extras["candidate"].tolist() == [0, 1, 2]
    answer = workflow.act(time_step([False, True, False]), answer.state, mode="train")
    assert answer.extras["candidate"].tolist() == [0, 3, 2]
    answer = workflow.act(time_step([True, True, True]), answer.state, mode="train")
    assert answer.extras["candidate"].tolist() == [0, 1, 2]  # their second rollouts
    answer = workflow.act(time_step([True, True, False]), answer.state, mode="train")
    assert answer.extras["candidate"].tolist() == [3, -1, 2]  # the generation has no more of them


def test_each_environment_is_answered_by_its_own_candidate() -> None:
    workflow, _ = make()
    workflow.is_evolving = True
    workflow.candidates = torch.zeros(4, len(workflow.controller.evolved), dtype=torch.float64)
    for candidate in range(3):
        workflow.candidates[candidate, -3 + candidate] = 1.0  # a bias: candidate i always chooses action i
    assert workflow.act(time_step([True] * 3), None, mode="train").action.tolist() == [0, 1, 2]
    workflow.controller.evolved[-1] = 1.0
    evaluated = workflow.act(time_step([True] * 3), None, mode="eval")
    assert evaluated.action.tolist() == [2, 2, 2] and not evaluated.extras


def row(reward: list[float], *, first: list[int], last: list[int], candidate: list[int], generation: int = 1) -> Batch:
    flags = {"is_first": torch.tensor(first, dtype=torch.bool), "is_last": torch.tensor(last, dtype=torch.bool)}
    generations = torch.full((len(reward),), generation)
    return {"reward": torch.tensor(reward), "candidate": torch.tensor(candidate), "generation": generations, **flags}


def test_returns_are_added_up_for_each_candidate() -> None:
    buffer = EpisodeReturns(num_envs=2, population=2, rollouts=1)
    buffer.add(row([0.0, 0.0], first=[1, 1], last=[0, 0], candidate=[0, 1]))
    buffer.add(row([1.0, 5.0], first=[0, 0], last=[0, 1], candidate=[0, 1]))
    assert not buffer.ready()
    again = EpisodeReturns(num_envs=2, population=2, rollouts=1)
    again.set_state(buffer.get_state())
    for each in (buffer, again):
        each.add(row([2.0, 0.0], first=[0, 1], last=[1, 0], candidate=[0, -1]))
        assert each.ready()
        batch = each.sample()
        assert batch["candidate"].tolist() == [1, 0] and batch["episode_return"].tolist() == [5.0, 3.0]
        assert batch["length"].tolist() == [1, 2] and not each.ready()


def test_episodes_of_another_generation_or_of_nobody_are_forgotten() -> None:
    buffer = EpisodeReturns(num_envs=1, population=2, rollouts=1)
    buffer.add(row([1.0], first=[0], last=[1], candidate=[0]))
    buffer.add(row([0.0], first=[1], last=[0], candidate=[0], generation=2))
    buffer.add(row([1.0], first=[0], last=[1], candidate=[0], generation=2))
    buffer.add(row([0.0], first=[1], last=[0], candidate=[-1], generation=2))
    buffer.add(row([1.0], first=[0], last=[1], candidate=[-1], generation=2))
    assert not buffer.ready()
    buffer.add(row([0.0], first=[1], last=[0], candidate=[1], generation=2))
    buffer.add(row([7.0], first=[0], last=[1], candidate=[1], generation=2))
    assert buffer.sample()["episode_return"].tolist() == [1.0, 7.0]


def test_rows_without_candidates_are_refused() -> None:
    rows = row([1.0], first=[0], last=[1], candidate=[0])
    with pytest.raises(ConfigError, match="Choose another buffer"):
        EpisodeReturns(num_envs=1).add({key: rows[key] for key in ("reward", "is_first", "is_last")})
    with pytest.raises(ConfigError, match="whole numbers from 1"):
        EpisodeReturns(num_envs=1, rollouts=0)


# --- dreams ------------------------------------------------------------------------------------


def test_a_dream_counts_rewards_until_its_end() -> None:
    workflow, _ = make()
    memory = workflow.memory
    ends = [False, False, True, True]  # of each step: the end is predicted in the third

    def dream_step(state: Batch, action: torch.Tensor, temperature: torch.Tensor) -> Batch:
        assert float(temperature) == pytest.approx(1.15)
        return {**state, "latent": state["latent"] + 1.0}

    def reward(features: torch.Tensor) -> Any:
        return SimpleNamespace(mean=lambda: 10.0 ** features[..., 0])  # 10, 100, 1000, ... from latent 0 on

    def survival(features: torch.Tensor) -> torch.Tensor:
        return 1.0 - torch.tensor(ends).float()[(features[..., 0] - 1.0).long().clamp(max=3)]

    replaced = {"dream_step": dream_step, "reward": reward, "survival": survival}
    workflow.memory = SimpleNamespace(**{name: getattr(memory, name) for name in ("initial_state", "features")})
    vars(workflow.memory).update(replaced, controller_inputs=memory.controller_inputs)  # type: ignore[attr-defined]
    workflow.dream_starts.draw = lambda count: torch.zeros(count, 4)  # type: ignore[method-assign]
    found = workflow.dream_rollouts(workflow.new_population(), 1.15)
    assert (found["episode_return"] == 1110.0).all() and found["episode_return"].shape == (4, 2)
    assert (found["length"] == 3.0).all()
    ends[2] = ends[3] = False
    workflow.dream_steps = 4
    assert (workflow.dream_rollouts(workflow.new_population(), 1.15)["length"] == 4.0).all()


def test_dreams_that_are_over_leave_the_batch_and_keep_what_they_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dream i of 8 lasts (3 i) % 7 + 1 chunks and every candidate adds a number of its own to the reward."""
    monkeypatch.setattr(world_models, "DREAM_CHUNK", 1)
    monkeypatch.setattr(world_models, "LEAST_DREAMS", 2)
    workflow, _ = make(CONTINUOUS)
    memory, rows = workflow.memory, []
    lengths = torch.tensor([(3 * i) % 7 + 1 for i in range(8)]).float()

    def dream_step(state: Batch, action: torch.Tensor, temperature: torch.Tensor) -> Batch:
        rows.append(len(action))
        return {**state, "latent": state["latent"] + 1.0, "cell": action[:, :1].expand(-1, 8)}

    workflow.memory = SimpleNamespace(
        initial_state=lambda count, device: {
            **memory.initial_state(count, device),
            "hidden": lengths[:, None].expand(-1, 8),
        },
        features=memory.features,
        controller_inputs=memory.controller_inputs,
        dream_step=dream_step,
        reward=lambda features: SimpleNamespace(mean=lambda: features[..., -1]),
        survival=lambda features: (features[..., 0] < features[..., 4]).float(),  # the latent counts up to the length
    )
    workflow.dream_starts.draw = lambda count: torch.zeros(count, 4)  # type: ignore[method-assign]
    population = torch.zeros(4, len(workflow.controller.evolved))
    population[:, -2] = torch.tensor([0.1, 0.2, 0.3, 0.4])  # the bias of the first number of an action
    found = workflow.dream_rollouts(population, 1.0)
    assert found["length"].flatten().tolist() == lengths.tolist()
    expected = lengths.view(4, 2) * torch.tanh(population[:, -2:-1])
    torch.testing.assert_close(found["episode_return"], expected)
    assert rows == [8, 8, 8, 4, 4, 2, 2]  # 6, 5, 4, 3, 2, 1 and 0 go on after each step


def test_a_generation_moves_the_controller_towards_what_earns_more() -> None:
    workflow, _ = make(CONTINUOUS)
    workflow.dream_rollouts = lambda population, temperature: {  # type: ignore[method-assign]
        "episode_return": -(population - 1.0).square().sum(dim=1, keepdim=True).expand(-1, 2),
        "length": torch.ones(len(population), 2),
    }
    means = [float(workflow.update_controller({}, phase=PHASE)["controller/generation_return_mean"]) for _ in range(80)]
    assert means[-1] > 0.5 * means[0]
    assert torch.equal(workflow.controller.evolved, workflow.evolution.mean().float())


def test_candidates_on_the_environment_are_told_what_they_earned() -> None:
    workflow, _ = make()
    population = workflow.candidates = workflow.new_population()
    told: list[Any] = []
    workflow.evolution.tell = lambda *arguments: told.append(arguments)  # type: ignore[method-assign]
    candidate = torch.tensor([3, 0, 1, 2, 2, 0, 1, 3])
    batch = {"candidate": candidate, "episode_return": candidate.double() * 10 + torch.arange(8.0), "length": candidate}
    metrics = workflow.update_controller(batch, phase=PHASE)
    assert told[0][0] is population and workflow.candidates is None
    assert told[0][1].tolist() == [3.0, 14.0, 23.5, 33.5]
    assert float(metrics["controller/generation_return_max"]) == 33.5
    assert float(metrics["controller/generation_length_mean"]) == 1.5


# --- what learns from what ---------------------------------------------------------------------


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_a_hook_changes_its_own_part_and_no_other(action: ActionSpec) -> None:
    workflow, agent = make(action)
    rows = random_rows(IMAGE, action, size=4, length=9)
    rows["is_first"][:, 0] = True
    changes = {"update_vae": {"vae"}, "update_memory": {"memory", "dream_starts"}, "update_controller": {"controller"}}
    for hook, expected in {**changes, "update_world_model": {"vae", "memory", "dream_starts"}}.items():
        parts = {**agent.components, "controller": agent.controllers["controller"]}
        before = {name: {k: v.clone() for k, v in part.state_dict().items()} for name, part in parts.items()}
        metrics = getattr(workflow, hook)(rows, phase=PHASE)
        assert {name for name, part in parts.items() if not equal(dict(part.state_dict()), before[name])} == expected
        assert all(np.isfinite(float(value)) for value in metrics.values())


def test_captured_methods_read_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "divisor_to", lambda limit, norm: (norm / limit).clamp_(min=1.0))  # as on a GPU
    original = UpdateRule.__init__

    def init(self: UpdateRule, *arguments: Any, is_static: bool | None = None, **settings: Any) -> None:
        original(self, *arguments, is_static=True, **settings)

    monkeypatch.setattr(UpdateRule, "__init__", init)
    workflow, _ = make()
    rows = random_rows(IMAGE, DISCRETE, size=4, length=9)
    for name in workflow.captured:
        setattr(workflow, name, Watched(getattr(workflow, name)))
    for _ in range(2):
        workflow.update_world_model(rows, phase=PHASE)
        workflow.update_controller(rows, phase=PHASE)
        workflow.act(time_step([True] * 3), None, mode="train")
    assert all(getattr(workflow, name).calls >= 2 for name in workflow.captured)


# --- resuming ----------------------------------------------------------------------------------

CUT = [
    *TINY_WORLD_MODELS,
    "training.phases.collect.collect_steps=4",
    "training.phases.collect.duration_steps=48",
    "training.phases.vae.duration_updates=3",
    "training.phases.memory.duration_updates=3",
    "training.phases.train.duration_updates=3",
    "evaluation.final_episodes=2",
    "evaluation.num_envs=2",
    "evaluation.video=false",
    "logging.tensorboard=false",
    "training.checkpoint.every_minutes=null",
]


def train_with_cuts(config: dict[str, Any], path: Path, cuts: list[int]) -> int:
    """Interrupted after so many cycles each, continued by an experiment built anew; the cycles in all."""
    run = RunDirectory.create(path.parent, run_id=path.name, name="test", seed=0)
    total = 0
    for attempt, cut in enumerate([*cuts, 10_000]):
        cycles = iter(range(1, cut + 1))
        experiment = build(config, run=run, quiet=True, interrupted=lambda cycles=cycles, cut=cut: next(cycles) == cut)
        try:
            if attempt:
                experiment.restore(CheckpointStore(run.checkpoints_dir).load("latest"))
            outcome = experiment.orchestrator.run()
            total += next(cycles, cut + 1) - 1
        finally:
            experiment.close()
        if outcome == "finished":
            break
    return total


def rows_written(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in each.items() if not is_wall_clock(name)} for each in rows]


@pytest.mark.parametrize("experiment", [DREAM, REAL])
def test_a_run_cut_at_random_in_every_stage_equals_the_uninterrupted_run(experiment: str, tmp_path: Path) -> None:
    config = compose(experiment, CUT)
    cycles = train_with_cuts(config, tmp_path / "whole", [])
    chance = random.Random(experiment)
    cuts = []
    while sum(cuts) < cycles - 1:  # about two in each stage, some in the middle of a generation
        cuts.append(chance.randint(1, max(2, cycles // 8)))
    train_with_cuts(config, tmp_path / "cut", cuts)
    assert rows_written(tmp_path / "cut") == rows_written(tmp_path / "whole")
    states = [
        reproducible(CheckpointStore(tmp_path / name / "checkpoints").load("latest")) for name in ("cut", "whole")
    ]
    for section in states[1]:
        assert equal(states[0][section], states[1][section]), f"section '{section}' differs"


# --- films, policies ---------------------------------------------------------------------------


def test_the_bar_below_the_track_is_not_seen() -> None:
    """Of 96 rows the paper's code takes 84 (carracing/env.py, `_process_frame`), then makes them smaller."""
    wrappers = compose("world_models_car_racing")["environment"]["wrappers"]
    assert wrappers[-2:] == [{"id": "crop", "bottom": 12}, {"id": "resize", "height": 64, "width": 64}]


def test_it_is_filmed_and_acts_outside_a_run(tmp_path: Path) -> None:
    run = rl_lab.train(DREAM, overrides=CUT, run_id="small", runs_dir=tmp_path, quiet=True)
    policy = rl_lab.load(str(run.path))
    env = policy.environment()
    observation, _ = env.reset(seed=0)
    assert env.action_space.contains(policy.act(observation))
    dreamt = policy.imagine(horizon=3)
    assert dreamt["image"].shape == (1, 4, 16, 16, 1) and dreamt["image"].dtype == torch.uint8
    assert dreamt["reward"].shape == (1, 4) and dreamt["action"].shape == (1, 3)
    experiment = build(compose(DREAM, CUT), run=None, quiet=True)
    try:
        assert can_dream(experiment.agent.workflow)
        files = film_dreams(experiment.agent.workflow, experiment.evaluator, tmp_path / "film.mp4", horizon=5)
        assert len(files.frames) == 10  # real, V's reconstruction, and the dream
    finally:
        experiment.close()


# --- what is refused ---------------------------------------------------------------------------


def test_observations_that_it_cannot_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="World Models sees one image"):
        make(observation={"vector": ArraySpec((3,), "float32")})
    with pytest.raises(ConfigError, match="obeys no action masks"):
        make(observation={**IMAGE, "action_mask": ArraySpec((3,), "bool")})


@pytest.mark.parametrize(
    "override",
    [
        "rollouts=0",
        "dream_steps=0",
        "images_per_update=0",
        "temperature=0.0",
        "temperature='linear(1.0, 0.0)'",
        "kl_tolerance=-1.0",
        "loss_scales.kl=-1.0",
    ],
)
def test_numbers_that_make_no_sense_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\..*{override.partition('=')[0].rpartition('.')[2]}.*: write"):
        make(overrides=(f"algorithm.{override}",))


@pytest.mark.parametrize(
    ("experiment", "override"),
    [
        (REAL, "training.phases.train.buffer=replay"),
        (REAL, "training.phases.train.controller=random"),
        (DREAM, "training.phases.memory.buffer=returns"),
        (DREAM, "training.phases.collect.buffer=returns"),
    ],
)
def test_phases_with_the_wrong_buffer_are_refused(experiment: str, override: str) -> None:
    with pytest.raises(ConfigError, match="evolves a controller on the environment is online"):
        build(compose(experiment, [*TINY_WORLD_MODELS, override]), run=None, quiet=True)
