"""Actor, twin critics and temperature of maximum-entropy learning, against numbers found in another way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.heads.distributions import Categorical, SquashedGaussian
from rl_lab.components.heads.soft_actor_critic import SoftActor, Temperature, TwinCritic
from rl_lab.components.networks.augmentation import RandomShift
from rl_lab.types import ActionSpec, ArraySpec, ConfigError

CONTINUOUS, DISCRETE = ActionSpec("continuous", (2,)), ActionSpec("discrete", (3,))


def actor(action: ActionSpec = CONTINUOUS, activation: str = "relu") -> SoftActor:
    torch.manual_seed(0)
    return SoftActor(input_size=4, action=action, hidden_sizes=(16, 16), activation=activation)


def critic(action: ActionSpec = CONTINUOUS) -> TwinCritic:
    torch.manual_seed(1)
    return TwinCritic(input_size=4, action=action, hidden_sizes=(16, 16))


# --- the squashed normal ---


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5)])
def test_the_density_of_a_squashed_normal_integrates_to_one(mean: float, log_std: float) -> None:
    policy = SquashedGaussian(torch.tensor([mean], dtype=torch.float64), torch.tensor([log_std], dtype=torch.float64))
    edges = torch.tanh(torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64))  # close together near the edge
    density = policy.log_prob(edges.unsqueeze(1)).exp()
    assert torch.trapezoid(density, edges) == pytest.approx(1.0, abs=1e-4)


def test_a_draw_knows_its_log_probability_by_the_change_of_variables() -> None:
    """log p(a) = log N(u; mean, std) - log|da/du|, with u = atanh(a) and da/du = 1 - a^2."""
    mean, log_std = torch.tensor([[0.3, -0.8]], dtype=torch.float64), torch.tensor([[-0.5, 0.2]], dtype=torch.float64)
    action, log_prob = SquashedGaussian(mean, log_std).rsample_with_log_prob(torch.randn_like(mean))
    expected = 0.0
    for a, m, s in zip(action[0].tolist(), mean[0].tolist(), log_std.exp()[0].tolist(), strict=True):
        u = math.atanh(a)
        expected += -0.5 * ((u - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi) - math.log(1 - a * a)
    assert float(log_prob) == pytest.approx(expected, rel=1e-9)


def test_the_entropy_estimate_is_right_on_average() -> None:
    torch.manual_seed(0)
    mean, log_std = torch.full((40_000, 1), 0.5), torch.full((40_000, 1), -0.3)
    _, log_prob = SquashedGaussian(mean, log_std).rsample_with_log_prob(torch.randn_like(mean))
    u = 0.5 + math.exp(-0.3) * torch.linspace(-6, 6, 4001, dtype=torch.float64)
    density = torch.exp(-0.5 * ((u - 0.5) / math.exp(-0.3)) ** 2) / (math.exp(-0.3) * math.sqrt(2 * math.pi))
    entropy = -torch.trapezoid(density * (density.log() - torch.log(1 - torch.tanh(u) ** 2)), u)
    assert float(-log_prob.mean()) == pytest.approx(float(entropy), abs=0.02)


def test_a_draw_far_out_keeps_finite_numbers_and_gradients() -> None:
    mean = torch.tensor([[40.0, -40.0]], requires_grad=True)
    action, log_prob = SquashedGaussian(mean, torch.zeros(1, 2)).rsample_with_log_prob(torch.randn_like(mean))
    (action.sum() + log_prob.sum()).backward()
    assert torch.isfinite(log_prob).all() and torch.isfinite(mean.grad).all()


def test_gradients_of_a_draw_agree_with_autograd() -> None:
    values = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(6, 2, dtype=torch.float64)

    def by_autograd() -> Tensor:
        mean, log_std = values.chunk(2, dim=1)
        u = mean + noise * log_std.exp()
        log_prob = (-0.5 * noise**2 - log_std - torch.log(1 - torch.tanh(u) ** 2)).sum(1)
        return (torch.tanh(u) * torch.tensor([1.0, -2.0])).sum() + (log_prob * torch.arange(6)).sum()

    (expected,) = torch.autograd.grad(by_autograd(), values)
    action, log_prob = SquashedGaussian(*values.chunk(2, dim=1)).rsample_with_log_prob(noise)
    total = (action * torch.tensor([1.0, -2.0])).sum() + (log_prob * torch.arange(6)).sum()
    torch.testing.assert_close(torch.autograd.grad(total, values)[0], expected)


# --- the actor ---


def test_the_std_stays_within_its_bounds() -> None:
    model = SoftActor(input_size=4, action=CONTINUOUS, hidden_sizes=(4,), log_std_bounds=(-1.0, 0.5))
    log_std = model(1e4 * torch.randn(200, 4)).base.log_std.detach()
    assert (float(log_std.min()), float(log_std.max())) == (-1.0, 0.5)


def test_masked_choices_are_never_drawn() -> None:
    mask = torch.tensor([[True, False, True]]).expand(50, 3)
    policy = actor(DISCRETE)(torch.randn(50, 4), mask)
    assert isinstance(policy, Categorical)
    assert not (policy.sample() == 1).any()


# --- the critics ---


def test_values_of_choices_are_read_at_the_action() -> None:
    model, features, action = critic(DISCRETE), torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    every = model.networks(features)  # [2, 5, 3]
    expected = torch.stack([every[:, row, choice] for row, choice in enumerate(action.tolist())], dim=1)
    assert torch.equal(model(features, action), expected)


def test_the_expectation_over_choices_by_hand() -> None:
    """Twin values (1, 4, 2) and (3, 1, 2): the lesser are (1, 1, 2). Probabilities (1/2, 1/4, 1/4) expect 1.25."""
    model = critic(DISCRETE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.networks.biases[-1].copy_(torch.tensor([[[1.0, 4.0, 2.0]], [[3.0, 1.0, 2.0]]]))
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().requires_grad_()
    value, entropy = model.expect(torch.zeros(1, 4), Categorical(logits), torch.zeros(1, 0))
    assert float(value.detach()) == pytest.approx(0.5 * 1 + 0.25 * 1 + 0.25 * 2)
    assert float(entropy.detach()) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    (gradient,) = torch.autograd.grad(value, logits)  # p_k (q_k - E q)
    assert gradient[0].tolist() == pytest.approx([0.5 * -0.25, 0.25 * -0.25, 0.25 * 0.75])


def test_the_expectation_of_a_draw_is_the_lesser_value_and_its_surprise() -> None:
    model, features, noise = critic(), torch.randn(20, 4), torch.randn(20, 2)
    policy = SquashedGaussian(torch.zeros(20, 2), torch.zeros(20, 2))
    action, log_prob = policy.rsample_with_log_prob(noise)
    value, entropy = model.expect(features, policy, noise)
    torch.testing.assert_close(value, model(features, action).amin(dim=0))
    torch.testing.assert_close(entropy, -log_prob)


# --- the temperature ---


@pytest.mark.parametrize(("entropy", "sign"), [(-1.0, 1.0), (-3.0, -1.0)], ids=["too much: falls", "too little: rises"])
def test_the_temperature_moves_against_the_entropy_it_finds(entropy: float, sign: float) -> None:
    model = Temperature(action=CONTINUOUS, initial=0.5)  # target: -2
    loss = model.loss(torch.tensor(entropy))
    assert float(loss) == pytest.approx(0.5 * (entropy + 2.0))
    loss.backward()
    assert float(model.log_value.grad) * sign > 0  # descent goes the other way  # type: ignore[arg-type]


def test_target_entropies() -> None:
    assert Temperature(action=CONTINUOUS).target_entropy == -2.0
    assert Temperature(action=DISCRETE, target_share=0.5).target_entropy == pytest.approx(0.5 * math.log(3))
    assert Temperature(action=DISCRETE, target_entropy=0.3).target_entropy == 0.3


def test_a_mask_lowers_the_target_to_what_is_allowed() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    model = Temperature(action=DISCRETE, target_share=0.5)
    expected = 0.25 - 0.5 * (math.log(2) + math.log(1)) / 2
    assert float(model.loss(torch.tensor(0.25), mask)) == pytest.approx(expected)
    fixed = Temperature(action=DISCRETE, target_entropy=0.1)
    assert float(fixed.loss(torch.tensor(0.25), mask)) == pytest.approx(0.15)


# --- shifts ---


def test_images_are_shifted_each_by_itself_and_keep_their_pixels() -> None:
    torch.manual_seed(0)
    shift = RandomShift(observation={"image": ArraySpec((9, 9, 2), "uint8"), "v": ArraySpec((2,), "float32")}, pixels=2)
    image = torch.randint(0, 255, (1, 9, 9, 2), dtype=torch.uint8).expand(200, 9, 9, 2)
    seen = shift({"image": image, "v": torch.zeros(200, 2)})
    assert seen["image"].dtype == torch.uint8 and seen["image"].shape == image.shape
    found = set()
    for each in seen["image"]:
        place = next(
            (down, right)
            for down in range(-2, 3)
            for right in range(-2, 3)
            if torch.equal(each[2:-2, 2:-2], image[0, 2 + down : 7 + down, 2 + right : 7 + right])
        )
        found.add(place)
    assert len(found) == 25  # every shift of -2 to 2 in both directions comes up
    assert torch.equal(seen["v"], torch.zeros(200, 2))


# --- refusals ---


def test_several_choices_at_once_are_refused() -> None:
    several = ActionSpec("multi_discrete", (2, 3))
    for build in (SoftActor, TwinCritic):
        with pytest.raises(ConfigError, match="SAC answers with continuous actions .* wants 2 choices at once.*ppo"):
            build(input_size=4, action=several)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"log_std_bounds is \[2.0, -5.0\]; allowed is \[lowest, highest\]"):
        SoftActor(input_size=4, action=CONTINUOUS, log_std_bounds=(2.0, -5.0))
    with pytest.raises(ConfigError, match="temperature: initial is 0.0; allowed is a finite number above 0"):
        Temperature(action=CONTINUOUS, initial=0.0)
    with pytest.raises(ConfigError, match="temperature: target_share is 1.5; allowed is above 0, up to 1"):
        Temperature(action=DISCRETE, target_share=1.5)
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"temperature: target_entropy is {value}; allowed is a finite number of"):
            Temperature(action=CONTINUOUS, target_entropy=value)
        with pytest.raises(ConfigError, match=f"temperature: initial is {value}; allowed is a finite number above 0"):
            Temperature(action=CONTINUOUS, initial=value)
    with pytest.raises(ConfigError, match=r"log_std_bounds is \[-inf, 2.0\]; allowed is \[lowest, highest\]"):
        SoftActor(input_size=4, action=CONTINUOUS, log_std_bounds=(-math.inf, 2.0))
    with pytest.raises(ConfigError, match="random shift: pixels is 0"):
        RandomShift(observation={"image": ArraySpec((9, 9, 1), "uint8")}, pixels=0)
    with pytest.raises(ConfigError, match="random shift: no observation is an image; there are v"):
        RandomShift(observation={"v": ArraySpec((2,), "float32")})


# --- more critics than two ---


def test_targets_take_the_least_of_a_random_subset_and_policies_the_mean() -> None:
    critic = TwinCritic(input_size=3, action=ActionSpec("continuous", (2,)), num_critics=3, target_subset=2)
    values = torch.tensor([[1.0], [2.0], [3.0]])
    assert critic.combine(values, is_target=False).tolist() == [2.0]
    torch.manual_seed(0)
    found = [critic.combine(values, is_target=True).item() for _ in range(300)]
    assert found.count(1.0) + found.count(2.0) == 300 and 170 < found.count(1.0) < 230  # two pairs of three hold the 1
    critic.target_subset = None
    assert critic.combine(values, is_target=True).tolist() == critic.combine(values, is_target=False).tolist() == [1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_critics": 0}, "num_critics is 0; write a whole number of at least 1"),
        ({"target_subset": 3}, r"target_subset is 3; write a whole number from 1 to num_critics \(2\)"),
        ({"norm": "batch"}, "ensemble norm: 'batch' is not known; allowed: none, layer"),
    ],
)
def test_impossible_critics_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TwinCritic(input_size=3, action=ActionSpec("continuous", (2,)), **settings)
