"""Noise schedules and samplers by hand and beside diffusers; denoisers: what they see and what they refuse."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.diffusion.embedding import LevelEmbedding
from rl_lab.components.diffusion.schedule import DDIMSampler, DDPMSampler, SquaredCosineSchedule
from rl_lab.components.diffusion.transformer import DenoisingTransformer
from rl_lab.components.diffusion.unet import ConditionalUNet
from rl_lab.types import ActionSpec, ConfigError

ACTION = ActionSpec("continuous", (2,))
SMALL_UNET = {"channels": (8, 16), "groups": 4, "kernel_size": 3, "level_size": 8}
SMALL_TRANSFORMER = {"layers": 2, "heads": 2, "units": 16, "dropout": 0.0}


def kept_by_hand(levels: int) -> list[float]:
    """Alpha bar of every level, in Python's float64."""

    def signal(k: int) -> float:
        return math.cos((k / levels + 0.008) / 1.008 * math.pi / 2) ** 2

    kept, product = [], 1.0
    for k in range(levels):
        product *= 1.0 - min(1.0 - signal(k + 1) / signal(k), 0.999)
        kept.append(product)
    return kept


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 4, 100])
def test_the_squared_cosine_schedule_by_hand(levels: int) -> None:
    kept = SquaredCosineSchedule(levels=levels).kept.tolist()
    assert kept == pytest.approx([1.0, *kept_by_hand(levels)], rel=1e-6)
    assert all(before > after > 0.0 for before, after in pairwise(kept))


def test_noise_is_added_by_level() -> None:
    schedule = SquaredCosineSchedule(levels=10)
    kept = kept_by_hand(10)
    noisy = schedule.add_noise(torch.ones(2, 3, 1), torch.full((2, 3, 1), 2.0), torch.tensor([0, 7]))
    for row, level in enumerate((0, 7)):
        expected = math.sqrt(kept[level]) + 2.0 * math.sqrt(1.0 - kept[level])
        assert noisy[row].flatten().tolist() == pytest.approx([expected] * 3, rel=1e-6)


def test_the_noise_that_was_added_can_be_removed_again_within_the_range() -> None:
    schedule = SquaredCosineSchedule(levels=10)
    clean, noise = normal(1, 4, 2).clamp(-0.9, 0.9), normal(1, 4, 2, seed=1)
    noisy = schedule.add_noise(clean, noise, torch.tensor([5]))
    assert torch.allclose(schedule.remove_noise(noisy, noise, 5), clean, atol=1e-5)
    assert schedule.remove_noise(noisy * 100.0, noise, 5).abs().max() == 1.0


def test_a_predicted_plan_implies_the_noise_by_hand() -> None:
    """x_k = sqrt(a_k) x0 + sqrt(1 - a_k) noise, solved for the noise; a predicted noise is itself."""
    kept, noisy, predicted = kept_by_hand(10)[5], torch.full((1, 1, 1), 0.7), torch.full((1, 1, 1), 0.4)
    clean, noise = torch.zeros(1), torch.ones(1)
    schedule = SquaredCosineSchedule(levels=10, predicts="plan")
    expected = (0.7 - math.sqrt(kept) * 0.4) / math.sqrt(1.0 - kept)
    assert float(schedule.predicted_noise(noisy, predicted, 5)) == pytest.approx(expected, rel=1e-6)
    assert schedule.target(clean, noise) is clean
    schedule = SquaredCosineSchedule(levels=10)
    assert schedule.predicted_noise(noisy, predicted, 5) is predicted and schedule.target(clean, noise) is noise


# --- samplers ------------------------------------------------------------------------------------


def ddpm_by_hand(x: float, e: float, k: int, after: int, z: float, levels: int) -> float:
    kept = [*kept_by_hand(levels), 1.0]  # index -1: the data
    clean = max(-1.0, min(1.0, (x - math.sqrt(1.0 - kept[k]) * e) / math.sqrt(kept[k])))
    alpha = kept[k] / kept[after]
    beta = 1.0 - alpha
    mean = math.sqrt(kept[after]) * beta / (1.0 - kept[k]) * clean
    mean += math.sqrt(alpha) * (1.0 - kept[after]) / (1.0 - kept[k]) * x
    return mean + (math.sqrt((1.0 - kept[after]) / (1.0 - kept[k]) * beta) * z if after >= 0 else 0.0)


def ddim_by_hand(x: float, e: float, k: int, after: int, levels: int) -> float:
    kept = [*kept_by_hand(levels), 1.0]
    clean = max(-1.0, min(1.0, (x - math.sqrt(1.0 - kept[k]) * e) / math.sqrt(kept[k])))
    return math.sqrt(kept[after]) * clean + math.sqrt(1.0 - kept[after]) * e


@pytest.mark.parametrize(("level", "after"), [(0, -1), (1, 0), (50, 49), (90, 80), (99, 98)])
def test_a_step_of_ddpm_by_hand(level: int, after: int) -> None:
    schedule, noisy, noise = SquaredCosineSchedule(levels=100), normal(1, 3, 2), normal(1, 3, 2, seed=1)
    torch.manual_seed(4)
    found = DDPMSampler().step(schedule, noisy, noise, level, after).flatten()
    torch.manual_seed(4)
    drawn = torch.randn(1, 3, 2).flatten()
    numbers = zip(noisy.flatten().tolist(), noise.flatten().tolist(), drawn.tolist(), strict=True)
    expected = [ddpm_by_hand(x, e, level, after, z, 100) for x, e, z in numbers]
    assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)  # 1 - alpha cancels in float32


@pytest.mark.parametrize(("level", "after"), [(0, -1), (10, 0), (90, 80), (99, 0)])
def test_a_step_of_ddim_by_hand(level: int, after: int) -> None:
    schedule, noisy, noise = SquaredCosineSchedule(levels=100), normal(1, 3, 2), normal(1, 3, 2, seed=1)
    state = torch.get_rng_state()
    found = DDIMSampler().step(schedule, noisy, noise, level, after).flatten()
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    numbers = zip(noisy.flatten().tolist(), noise.flatten().tolist(), strict=True)
    assert found.tolist() == pytest.approx([ddim_by_hand(x, e, level, after, 100) for x, e in numbers], abs=1e-5)


def test_levels_are_spread_evenly_from_0_on() -> None:
    schedule = SquaredCosineSchedule(levels=10)
    assert DDIMSampler(steps=3).levels(schedule) == [(6, 3), (3, 0), (0, -1)]
    assert DDPMSampler(steps=10).levels(schedule)[:2] == [(9, 8), (8, 7)]
    assert DDPMSampler(steps=1).levels(schedule) == [(0, -1)]


@pytest.mark.parametrize(
    "sampler", [DDPMSampler(steps=100), DDPMSampler(steps=7), DDIMSampler(), DDIMSampler(steps=16)]
)
def test_every_step_is_that_of_diffusers(sampler: Any) -> None:
    diffusers = pytest.importorskip("diffusers", reason="pip install 'rl-lab[peers]'")
    shared = {"num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "prediction_type": "epsilon"}
    theirs = diffusers.DDIMScheduler(**shared, clip_sample=True, set_alpha_to_one=True)
    if isinstance(sampler, DDPMSampler):
        theirs = diffusers.DDPMScheduler(**shared, clip_sample=True, variance_type="fixed_small")
    schedule, plan, noise = SquaredCosineSchedule(levels=100), normal(3, 16, 2), normal(3, 16, 2, seed=1)
    level = torch.tensor([0, 40, 99])
    assert torch.allclose(schedule.add_noise(plan, noise, level), theirs.add_noise(plan, noise, level), atol=1e-6)
    theirs.set_timesteps(sampler.steps)
    levels = sampler.levels(schedule)
    assert theirs.timesteps.tolist() == [level for level, _ in levels]
    for level, after in levels:
        ours = (torch.manual_seed(level), sampler.step(schedule, plan, noise, level, after))[1]
        drawing = {"generator": torch.manual_seed(level)} if isinstance(sampler, DDPMSampler) else {}
        assert torch.allclose(ours, theirs.step(noise, level, plan, **drawing).prev_sample, atol=5e-5)


@pytest.mark.parametrize("predicts", ["noise", "plan"])
@pytest.mark.parametrize("sampler", [DDPMSampler(), DDIMSampler()])
def test_a_denoiser_that_knows_the_answer_leads_to_it(sampler: Any, predicts: Any) -> None:
    """The noise that leads from a plan to any noisy one is known, so both samplers end in that plan."""
    schedule, goal = SquaredCosineSchedule(levels=100, predicts=predicts), normal(2, 4, 2).clamp(-1.0, 1.0)
    plan = normal(2, 4, 2, seed=3)
    for level, after in sampler.levels(schedule):
        kept = schedule.kept_at(level)
        known = schedule.target(goal, (plan - kept.sqrt() * goal) / (1.0 - kept).sqrt())
        plan = sampler.step(schedule, plan, schedule.predicted_noise(plan, known, level), level, after)
    assert torch.allclose(plan, goal, atol=1e-4)


# --- denoisers -----------------------------------------------------------------------------------


def denoisers(**settings: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    shared = {"input_size": 3, "action": ACTION, "observation_steps": 2, "prediction_steps": 8, **settings}
    return [ConditionalUNet(**shared, **SMALL_UNET), DenoisingTransformer(**shared, **SMALL_TRANSFORMER)]  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [0, 1], ids=["unet", "transformer"])
def test_a_denoiser_looks_at_plan_level_and_observations(index: int) -> None:
    denoiser = denoisers()[index]
    plan, level, features = normal(3, 8, 2), torch.tensor([0, 5, 9]), normal(3, 2, 3, seed=1)
    noise = denoiser(plan, level, features)
    assert noise.shape == (3, 8, 2)
    assert not torch.allclose(noise, denoiser(plan, level + 20, features))
    for row in (0, 1):
        other = features.clone()
        other[:, row] += 1.0
        assert not torch.equal(noise, denoiser(plan, level, other))
    assert torch.allclose(noise[1:2], denoiser(plan[1:2], level[1:2], features[1:2]), atol=1e-5)  # rows are apart
    noise.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in denoiser.parameters())


def test_the_transformer_sees_neither_later_actions_nor_later_observations() -> None:
    denoiser = denoisers()[1]
    plan, level, features = normal(1, 8, 2).requires_grad_(), torch.tensor([3]), normal(1, 2, 3).requires_grad_()
    noise = denoiser(plan, level, features)
    by_plan, by_features = torch.autograd.grad(noise[0, 0].sum(), (plan, features), retain_graph=True)
    assert by_plan[0, 0].any() and not by_plan[0, 1:].any()
    assert by_features[0, 0].any() and not by_features[0, 1].any()
    by_plan, by_features = torch.autograd.grad(noise[0, 4].sum(), (plan, features))
    assert by_plan[0, :5].any(dim=1).all() and not by_plan[0, 5:].any() and by_features[0].any(dim=1).all()


def test_the_transformers_level_is_waves_that_the_layers_of_the_memory_read() -> None:
    """Level 5 of 16 units: sin and cos of 5 times 1 to 1/10,000, in 8 even steps of the exponent."""
    denoiser = denoisers()[1]
    assert isinstance(denoiser, DenoisingTransformer) and not list(denoiser.level.parameters())
    angles = [5.0 * 10_000.0 ** (-i / 7) for i in range(8)]
    expected = [wave(angle) for wave in (math.sin, math.cos) for angle in angles]
    assert denoiser.level(torch.tensor([5]))[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_published_unet_has_its_published_size() -> None:
    with torch.device("meta"):
        unet = ConditionalUNet(input_size=5, action=ACTION)
    assert sum(p.numel() for p in unet.parameters()) == 65_353_218  # "about 65 M"


def test_film_scales_and_shifts() -> None:
    unet = denoisers()[0]
    block = unet.down[0][0]  # type: ignore[index, union-attr]
    block.first, block.second, block.residual = nn.Identity(), nn.Identity(), nn.Identity()
    del block.film
    block.film = lambda condition: torch.tensor([[2.0, 3.0, 10.0, 20.0]])
    hidden = torch.tensor([[[1.0], [1.0]]])
    assert block(hidden, None).flatten().tolist() == [2.0 + 10.0 + 1.0, 3.0 + 20.0 + 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SquaredCosineSchedule(levels=0), "levels is 0; write a whole number of at least 1"),
        (lambda: SquaredCosineSchedule(predicts="velocity"), "predicts is 'velocity'; write noise or plan"),  # type: ignore[arg-type]
        (lambda: DDIMSampler(steps=0), "sampler.steps is 0: write a whole number of at least 1"),
        (
            lambda: DDPMSampler(steps=20).levels(SquaredCosineSchedule(levels=10)),
            "sampler.steps is 20, but the schedule has 10 levels: write at most 10",
        ),
        (lambda: LevelEmbedding(5), "level_size is 5; write an even number of at least 4"),
        (lambda: denoisers(action=ActionSpec("discrete", (3,))), "are discrete: write `algorithm=bc`, which takes any"),
        (lambda: denoisers(prediction_steps=7), "prediction_steps is 7, .* halved 1 times: write a multiple of 2"),
        (
            lambda: ConditionalUNet(input_size=3, action=ACTION, channels=(8, 9)),
            r"channels is \[8, 9\]; write at least",
        ),
        (lambda: ConditionalUNet(input_size=3, action=ACTION, kernel_size=4), "kernel_size is 4; write an odd number"),
        (lambda: DenoisingTransformer(input_size=3, action=ACTION, units=20), "heads is 4 and units is 20; write at"),
        (lambda: DenoisingTransformer(input_size=3, action=ACTION, dropout=1.0), "dropout is 1.0; write a number from"),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
