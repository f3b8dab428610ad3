"""Diffusion Policy: loss and averages by hand, which action of which plan is executed, what learns from what."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.diffusion_policy import DiffusionPolicy
from tests.tiny_diffusion import TINY_DIFFUSION

VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((16, 16, 3), "uint8")}
ACTION = ActionSpec("continuous", (2,))
LEARNING = ("denoiser", "average_denoiser")
SHIFT = "components.augmentation={_target_: rl_lab.components.networks.augmentation.RandomShift, pixels: 2}"


@cache
def config_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose("rl_lab/Detour-v0:diffusion_policy", [*overrides])


def make(
    observation: dict[str, ArraySpec] = VECTOR, *, overrides: tuple[str, ...] = (), action: ActionSpec = ACTION
) -> tuple[DiffusionPolicy, Agent]:
    """A tiny Diffusion Policy for an environment that need not exist."""
    config = config_of((*TINY_DIFFUSION, "optimizers.controller.learning_rate=1e-3", *overrides))
    agent = build_agent(config, EnvSpec("none", observation, action), runtime=build_runtime(config))
    assert isinstance(agent.workflow, DiffusionPolicy)
    return agent.workflow, agent


def phase_at(updates: int = 0) -> Phase:
    return Phase("train", buffer="demonstrations", progress=Progress(run=Counts(updates=updates)))


def batch_of(observation: dict[str, ArraySpec] = VECTOR, size: int = 6) -> Batch:
    random = torch.Generator().manual_seed(5)
    batch: Batch = {}
    for key, spec in observation.items():
        shape = (size, 2, *spec.shape)
        batch[key] = torch.randn(shape, generator=random)
        if spec.dtype == "uint8":
            batch[key] = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        else:
            batch[f"{key}_range"] = torch.stack((batch[key].amin(dim=(0, 1)), batch[key].amax(dim=(0, 1))))
    batch["action"] = torch.rand(size, 8, 2, generator=random) * 2 - 1
    batch["action_range"] = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    return batch


def time_step(*values: float, is_first: tuple[bool, ...] | None = None) -> TimeStep:
    """What each environment shows is one number, three times."""
    count = len(values)
    nothing = torch.zeros(count, dtype=torch.bool)
    seen = {"vector": torch.tensor(values).unsqueeze(1).expand(-1, 3).clone()}
    return TimeStep(seen, torch.zeros(count), torch.tensor(is_first or (False,) * count), nothing, nothing)


# --- acting: the receding horizon ----------------------------------------------------------------


class Plans:
    """Stands for the denoising: plan p for a row has the actions 100 p + 0, 1, ..., and notes what it was made for."""

    def __init__(self, workflow: DiffusionPolicy) -> None:
        self.seen: list[list[float]] = []
        workflow.denoise = self  # type: ignore[method-assign, assignment]

    def __call__(self, history: Batch, numbers: Batch) -> Batch:
        plans = []
        for row in history["vector"]:
            self.seen.append(row[:, 0].tolist())
            plans.append(100.0 * len(self.seen) + torch.arange(8.0).unsqueeze(-1).expand(-1, 2))
        plan = torch.stack(plans)
        return {"plan": plan, "iterations": plan.unsqueeze(1)}


def test_the_executed_actions_of_each_plan_by_hand() -> None:
    """2 observed, 8 planned, 4 executed: actions 1 to 4 of each plan, made for the newest two."""
    workflow, _ = make()
    plans, state, answers = Plans(workflow), None, []
    for step in range(9):
        answer = workflow.act(time_step(float(step), is_first=(step == 0,)), state, mode="eval")
        state = answer.state
        answers.append(float(answer.action[0, 0]))
    assert answers == [101, 102, 103, 104, 201, 202, 203, 204, 301]
    assert plans.seen == [[0.0, 0.0], [3.0, 4.0], [7.0, 8.0]]


def test_a_new_episode_inside_a_vector_begins_a_plan_of_its_own() -> None:
    workflow, _ = make()
    plans = Plans(workflow)
    state, answers = None, []
    begins = [(True, True), (False, False), (False, True), (False, False), (False, False)]
    for step, is_first in enumerate(begins):
        answer = workflow.act(time_step(float(step), 10.0 + step, is_first=is_first), state, mode="eval")
        state = answer.state
        answers.append(answer.action[:, 0].tolist())
    assert answers == [[101, 201], [102, 202], [103, 301], [104, 302], [401, 303]]
    assert plans.seen == [[0.0, 0.0], [10.0, 10.0], [12.0, 12.0], [3.0, 4.0]]


@pytest.mark.parametrize(("observed", "executed"), [(1, 8), (1, 1), (3, 6), (8, 1)])
def test_any_horizon_that_fits_the_plan(observed: int, executed: int) -> None:
    steps = (f"algorithm.observation_steps={observed}", f"algorithm.action_steps={executed}")
    workflow, _ = make(overrides=steps)
    Plans(workflow)
    state, answers = None, []
    for step in range(2 * executed):
        answer = workflow.act(time_step(0.0, is_first=(step == 0,)), state, mode="train")
        state = answer.state
        answers.append(float(answer.action[0, 0]))
    places = [float(observed - 1 + step) for step in range(executed)]
    assert answers == [100 + place for place in places] + [200 + place for place in places]


def test_a_state_that_was_saved_in_mid_plan_goes_on_with_it() -> None:
    workflow, _ = make()
    torch.manual_seed(0)
    first = workflow.act(time_step(0.1, -0.2, is_first=(True, True)), None, mode="eval")
    saved = {key: value if key == "history" else value.clone() for key, value in first.state.items()}
    second = workflow.act(time_step(0.2, -0.1), first.state, mode="eval")
    again = workflow.act(time_step(0.2, -0.1), saved, mode="eval")
    assert torch.equal(second.action, again.action) and torch.equal(second.action, first.state["plan"][:, 2])


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_a_plan_comes_out_of_noise_and_is_in_the_demonstrated_range(sampler: str) -> None:
    workflow, _ = make(overrides=(f"sampler={sampler}", "controllers.sampler.steps=20"))
    workflow.normalizer.learn(batch_of() | {"action_range": torch.tensor([[0.2, -0.5], [0.4, 0.5]])})
    made = workflow.denoise({"vector": torch.randn(5, 2, 3)}, {})
    assert made["plan"].shape == (5, 8, 2) and made["iterations"].shape == (5, 21, 8, 2)
    assert torch.equal(made["plan"], made["iterations"][:, -1])
    low, high = made["plan"].amin(dim=(0, 1)), made["plan"].amax(dim=(0, 1))
    assert (low >= torch.tensor([0.2, -0.5]) - 1e-5).all() and (high <= torch.tensor([0.4, 0.5]) + 1e-5).all()
    assert not torch.equal(made["plan"], workflow.denoise({"vector": torch.randn(5, 2, 3)}, {})["plan"])


def test_the_average_acts_and_not_the_newest_weights() -> None:
    workflow, agent = make()
    history = {"vector": torch.randn(2, 2, 3)}

    def planned() -> Tensor:
        torch.manual_seed(1)
        return workflow.denoise(history, {})["plan"]

    before = planned()
    for parameter in agent.controllers["denoiser"].parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(planned(), before)
    for parameter in agent.components["average_denoiser"].parameters():
        nn.init.ones_(parameter)
    assert not torch.equal(planned(), before)


def test_dropout_is_off_where_it_acts() -> None:
    dropping = (
        "components.encoder.hidden_sizes=[]",
        "denoiser=transformer",
        "controllers.denoiser.dropout=0.5",
        *TRANSFORMER,
    )
    config = compose("rl_lab/Detour-v0:diffusion_policy", [*dropping, *TINY_DIFFUSION[:2], *TINY_DIFFUSION[6:]])
    agent = build_agent(config, EnvSpec("none", VECTOR, ACTION), runtime=build_runtime(config))
    inputs = (torch.randn(2, 8, 2), torch.tensor([1, 2]), torch.randn(2, 2, 3))
    average, newest = agent.components["average_denoiser"], agent.controllers["denoiser"]
    assert torch.equal(average(*inputs), average(*inputs)) and not torch.equal(newest(*inputs), newest(*inputs))


TRANSFORMER = [f"controllers.denoiser.{each}" for each in ("layers=1", "heads=2", "units=16")]


# --- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("predicts", ["noise", "plan"])
def test_the_loss_by_hand(predicts: str) -> None:
    """A denoiser that answers with the noisy plan: its error is that of the noisy plan as a guess of the noise, or of
    the plan."""
    workflow, _ = make(overrides=(f"components.schedule.predicts={predicts}",))
    batch = batch_of()
    workflow.normalizer.learn(batch)
    workflow.denoiser = lambda plan, level, features: plan  # type: ignore[assignment]
    torch.manual_seed(3)
    loss = workflow.loss(batch).terms["noise"]
    torch.manual_seed(3)
    noise = torch.randn(6, 8, 2)
    level = torch.randint(20, (6,))
    kept = workflow.schedule.kept[level + 1].reshape(-1, 1, 1)  # type: ignore[attr-defined]
    noisy = kept.sqrt() * batch["action"] + (1 - kept).sqrt() * noise
    expected = (noisy - (noise if predicts == "noise" else batch["action"])).square().mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_observations_and_actions_are_learnt_on_the_scale_of_the_data() -> None:
    workflow, _ = make()
    batch = batch_of() | {
        "vector_range": torch.tensor([[0.0, 5.0, -1.0], [4.0, 5.0, 1.0]]),  # the second is a constant
        "action_range": torch.tensor([[0.0, -1.0], [0.5, 1.0]]),
    }
    workflow.normalizer.learn(batch)
    scaled = workflow.normalizer({"vector": torch.tensor([[[4.0, 5.0, 0.0]]])})["vector"]
    assert scaled.flatten().tolist() == [1.0, 0.0, 0.0]
    action = torch.tensor([[[0.0, 0.0], [0.5, 1.0]]])
    assert workflow.normalizer.scale_action(action).tolist() == [[[-1.0, 0.0], [1.0, 1.0]]]
    assert torch.equal(workflow.normalizer.restore_action(workflow.normalizer.scale_action(action)), action)


def test_the_average_of_the_weights_by_hand() -> None:
    """Updates 0 and 1 copy; update k then moves it by k ** -0.75, and never by less than 1 - decay."""
    workflow, agent = make(overrides=("algorithm.average_decay=0.9",))
    rates = [workflow.average_rate(updates) for updates in (0, 1, 2, 3, 10_000)]
    assert rates == pytest.approx([1.0, 1.0, 2**-0.75, 3**-0.75, 0.1])
    newest, average = agent.controllers["denoiser"].output.bias, agent.components["average_denoiser"].module.output.bias
    expected = average.detach().clone()
    for updates in range(4):
        workflow.update_controller(batch_of(), phase=phase_at(updates))
        expected = expected + (newest.detach() - expected) * rates[updates]
        assert torch.allclose(average, expected, atol=1e-7), updates
    assert not torch.allclose(average, newest)


@pytest.mark.parametrize("observation", [VECTOR, IMAGE, {**VECTOR, **IMAGE}], ids=["state", "pixels", "both"])
def test_an_update_changes_every_part(observation: dict[str, ArraySpec]) -> None:
    workflow, agent = make(observation, overrides=(SHIFT,) if "image" in observation else ())
    parts = {**agent.components, **agent.controllers}
    learning = (*LEARNING, *(("encoder", "average_encoder") if "image" in observation else ()))
    before = {name: [p.detach().clone() for p in parts[name].parameters()] for name in learning}
    for updates in range(2):
        metrics = workflow.update_controller(batch_of(observation), phase=phase_at(updates + 500))
    for name in learning:
        changed = [not torch.equal(a, b) for a, b in zip(before[name], parts[name].parameters(), strict=True)]
        assert all(changed) and changed, name
    assert torch.isfinite(metrics["loss/noise"])
    history = {key: values[:1] for key, values in batch_of(observation).items() if key in observation}
    assert workflow.denoise(history, {})["plan"].shape == (1, 8, 2)


def learn_by_heart(denoiser: str, batch: Batch, *, updates: int, predicts: str = "noise", times: int = 12) -> Any:
    """A small Diffusion Policy after so many updates from one batch, repeated so that many levels are drawn."""
    tiny = [*TINY_DIFFUSION[:2], *TINY_DIFFUSION[6:], *(TRANSFORMER[:2] if denoiser == "transformer" else [])]
    tiny += ["controllers.denoiser.units=32"] if denoiser == "transformer" else TINY_DIFFUSION[2:6]
    tiny += ["controllers.sampler.steps=20", f"components.schedule.predicts={predicts}"]
    config = compose(
        "rl_lab/Detour-v0:diffusion_policy",
        [f"denoiser={denoiser}", *tiny, "optimizers.controller.learning_rate=4e-3", "algorithm.average_decay=0.95"],
    )
    workflow: Any = build_agent(config, EnvSpec("none", VECTOR, ACTION), runtime=build_runtime(config)).workflow
    many = {key: values if key.endswith("_range") else values.repeat(times, 1, 1) for key, values in batch.items()}
    losses = [float(workflow.update_controller(many, phase=phase_at(k))["loss/noise"]) for k in range(updates)]
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])
    return workflow


@pytest.mark.parametrize(("denoiser", "updates"), [("unet", 150), ("transformer", 300)])
def test_one_batch_can_be_learnt_by_heart(denoiser: str, updates: int) -> None:
    """Few plans, each for an observation of its own: from noise they come back, whatever noise it is."""
    batch = batch_of(size=2)
    workflow = learn_by_heart(denoiser, batch, updates=updates)
    plans = workflow.denoise({"vector": batch["vector"].repeat(32, 1, 1)}, {})["plan"]
    assert float((plans - batch["action"].repeat(32, 1, 1)).abs().mean()) < 0.2  # a random plan is 0.67 away


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_a_plan_goes_one_of_two_ways_and_never_between_them(sampler: str) -> None:
    """One observation, and plans that go left or right: what comes out of noise is either, and not their mean."""
    workflow, vector = two_ways()
    sampling = make(overrides=(f"sampler={sampler}", "controllers.sampler.steps=10"))[0]
    workflow.sampler, workflow.steps = sampling.sampler, sampling.steps
    turned = workflow.denoise({"vector": vector.expand(64, -1, -1)}, {})["plan"][:, 2:5, 0]
    went_left, went_right = (turned < -0.5).all(dim=1), (turned > 0.5).all(dim=1)
    assert int(went_left.sum()) >= 16 and int(went_right.sum()) >= 16
    assert int((went_left | went_right).sum()) >= 62


@cache
def two_ways() -> tuple[Any, Tensor]:
    left, ahead = torch.tensor([0.0, 0.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0]), torch.full((8,), 0.5)
    batch = batch_of(size=2)
    batch["action"] = torch.stack((torch.stack((left, ahead), dim=-1), torch.stack((-left, ahead), dim=-1)))
    batch["vector"] = batch["vector"][:1].expand(2, -1, -1)
    return learn_by_heart("unet", batch, updates=100, predicts="plan", times=32), batch["vector"][:1]


def test_the_default_settings_are_the_published_ones() -> None:
    """Those of the U-Net for states: all 100 levels are denoised, and each step draws."""
    config = compose("diffusion_policy")
    algorithm, optimizer = config["algorithm"], config["optimizers"]["controller"]
    assert [algorithm[f"{name}_steps"] for name in ("observation", "prediction", "action")] == [2, 16, 8]
    assert (algorithm["average_power"], algorithm["average_decay"]) == (0.75, 0.9999)
    assert config["controllers"]["sampler"] == {"_target_": f"{SCHEDULES}.DDPMSampler", "steps": 100}
    schedule = {"_target_": f"{SCHEDULES}.SquaredCosineSchedule", "levels": 100, "predicts": "noise"}
    assert config["components"]["schedule"] == schedule
    assert config["controllers"]["denoiser"]["channels"] == [256, 512, 1024]
    assert (optimizer["name"], optimizer["betas"], optimizer["weight_decay"]) == ("adamw", [0.95, 0.999], 1e-6)
    assert optimizer["learning_rate"] == "cosine(1e-4, 0, warmup=0.005)"  # 500 of 100,000 updates
    assert config["training"]["phases"][0]["duration_updates"] == 100_000
    assert config["buffers"]["demonstrations"]["batch_size"] == 256


SCHEDULES = "rl_lab.components.diffusion.schedule"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.action_steps=8",), "observation_steps is 2, action_steps 8 and prediction_steps 8: a plan begins"),
        (("algorithm.observation_steps=0",), "algorithm.observation_steps is 0, action_steps 4"),
        (("algorithm.average_decay=1.5",), "algorithm.average_decay is 1.5: write a number from 0 to 1"),
        (("controllers.sampler.steps=21",), "controllers.sampler.steps is 21, but the schedule has 20 levels"),
    ],
)
def test_impossible_settings_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(overrides=overrides)


def test_discrete_actions_are_refused_with_another_algorithm() -> None:
    with pytest.raises(ConfigError, match="plans continuous actions, .* are discrete: write `algorithm=bc`, which"):
        make(action=ActionSpec("discrete", (4,)))


def test_other_buffers_are_refused() -> None:
    workflow, _ = make()
    with pytest.raises(ConfigError, match=r"prediction_steps is 8, but buffer 'replay' gives 2 rows: write `buffers"):
        workflow.check_rows(2, buffer="replay")
    for batch in (
        {key: value for key, value in batch_of().items() if key != "action_range"},
        batch_of() | {"vector": torch.zeros(6, 3, 3)},
    ):
        with pytest.raises(ConfigError, match="learns from 2 observations and the range .* 'demonstrations' gives"):
            workflow.update_controller(batch, phase=phase_at())
