"""The implicit world model of TD-MPC2: SimNorm, layers, heads and critics by hand, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.world_model.implicit import (
    CriticEnsemble,
    ImplicitEncoder,
    ImplicitReward,
    LatentDynamics,
    NormedMLP,
    PolicyPrior,
    simnorm,
)
from rl_lab.types import ActionSpec, ArraySpec, ConfigError

ACTION = ActionSpec("continuous", (2,))
VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((64, 64, 3), "uint8")}


def test_simnorm_by_hand() -> None:
    values = torch.tensor([[0.0, 0.0, 0.0, torch.tensor(3.0).log()]])
    assert simnorm(values, 2)[0].tolist() == pytest.approx([0.5, 0.5, 0.25, 0.75])


def test_a_latent_is_made_of_simplices() -> None:
    latent = ImplicitEncoder(observation=VECTOR, latent_size=24, simplex_size=8)({"vector": torch.randn(5, 2, 3)})
    assert latent.shape == (5, 2, 24)
    torch.testing.assert_close(latent.unflatten(-1, (3, 8)).sum(dim=-1), torch.ones(5, 2, 3))


def test_members_of_an_mlp_are_networks_of_their_own() -> None:
    """Each equals the plain torch layers with its weights: linear, LayerNorm, Mish, linear."""
    mlp = NormedMLP(3, [4], 2, members=2)
    inputs = torch.randn(6, 3)
    with torch.no_grad():
        for weight in mlp.weights:
            weight.normal_()
    for member, found in enumerate(mlp(inputs)):
        hidden = F.linear(inputs, mlp.weights[0][member].T, mlp.biases[0][member, 0])
        hidden = F.mish(F.layer_norm(hidden, (4,)))
        torch.testing.assert_close(found, F.linear(hidden, mlp.weights[1][member].T, mlp.biases[1][member, 0]))


def test_dropout_is_asked_for_and_acts_after_the_first_layer() -> None:
    mlp = NormedMLP(3, [64], 1, dropout=0.5)
    inputs = torch.randn(4, 3)
    assert torch.equal(mlp(inputs), mlp(inputs))
    assert not torch.equal(mlp(inputs, drop=True), mlp(inputs, drop=True))


def test_reward_and_critics_begin_at_zero_and_weights_small() -> None:
    reward, critic = (kind(input_size=8, action=ACTION) for kind in (ImplicitReward, CriticEnsemble))
    latent, action = torch.randn(3, 8), torch.randn(3, 2)
    assert torch.equal(reward(latent, action).mean(), torch.zeros(3))
    assert torch.equal(critic(latent, action).mean(), torch.zeros(5, 3))
    assert critic.mlp.weights[0].std().item() == pytest.approx(0.02, rel=0.1)


def test_a_reward_is_a_softmax_over_bins_of_symlog() -> None:
    """All weight on symlog 1 and 1.2, half each: symexp(1.1). A target's loss is the cross-entropy to its two bins."""
    head = ImplicitReward(input_size=8, action=ACTION)
    assert head.bins[[0, 50, 55, 100]].tolist() == pytest.approx([-10.0, 0.0, 1.0, 10.0])
    with torch.no_grad():
        head.mlp.biases[-1].fill_(-1e9)
        head.mlp.biases[-1][..., 55:57] = 0.0
    prediction = head(torch.zeros(1, 8), torch.zeros(1, 2))
    assert prediction.mean().item() == pytest.approx(torch.tensor(1.1).expm1().item(), rel=1e-5)
    assert prediction.loss(torch.tensor([1.05]).expm1()).item() == pytest.approx(0.693147, rel=1e-5)


def test_two_critics_are_drawn_for_each_value() -> None:
    critic = CriticEnsemble(input_size=8, action=ACTION, members=5)
    with torch.no_grad():  # critic i says symexp(i) always
        critic.mlp.biases[-1].fill_(-1e9)
        for member in range(5):
            critic.mlp.biases[-1][member, 0, 50 + 5 * member] = 0.0
    said = torch.expm1(torch.arange(5.0))
    pairs = {(i, j) for i in range(5) for j in range(i + 1, 5)}
    latent, action = torch.zeros(1, 8), torch.zeros(1, 2)
    for kind, combine in (("least", torch.minimum), ("mean", lambda a, b: (a + b) / 2)):
        allowed = {round(float(combine(said[i], said[j])), 3) for i, j in pairs}
        seen = {round(critic.value(latent, action, of_two=kind).item(), 3) for _ in range(100)}  # type: ignore[arg-type]
        assert seen <= allowed and len(seen) > 2


def test_the_policys_std_stays_within_its_bounds() -> None:
    actor = PolicyPrior(input_size=8, action=ACTION, log_std_bounds=(-2.0, 1.0))
    with torch.no_grad():
        actor.mlp.biases[-1][0, 0] = torch.tensor([0.3, -0.3, 100.0, -100.0])
        actor.mlp.weights[-1].zero_()
    policy = actor(torch.randn(4, 8))
    assert policy.base.log_std[0].tolist() == pytest.approx([1.0, -2.0])
    assert policy.mode()[0].tolist() == pytest.approx([0.2913, -0.2913], abs=1e-4)


@pytest.mark.parametrize("observation", [IMAGE, {**VECTOR, **IMAGE}], ids=["pixels", "both"])
def test_images_become_latents(observation: dict[str, ArraySpec]) -> None:
    encoder = ImplicitEncoder(observation=observation, latent_size=64)
    rows = {"vector": torch.randn(2, 3, 3), "image": torch.randint(0, 256, (2, 3, 64, 64, 3), dtype=torch.uint8)}
    assert encoder(rows).shape == (2, 3, 64)
    assert not torch.equal(encoder(rows), encoder({**rows, "image": torch.zeros_like(rows["image"])}))


def test_the_published_convolutions_make_the_latents_own_numbers() -> None:
    """64 x 64 pixels become 4 x 4 x 32 = 512: a latent of as many is their simplices; others pass a layer."""
    image = torch.randint(0, 256, (2, 64, 64, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    encoder = ImplicitEncoder(observation=IMAGE, latent_size=512)
    hidden = image.permute(0, 3, 1, 2) / 255.0 - 0.5
    for index, (stride, layer) in enumerate(zip((2, 2, 2, 1), encoder.images["image"].convolutions, strict=True)):  # type: ignore[arg-type]
        hidden = F.conv2d(hidden, layer.weight, layer.bias, stride=stride)
        hidden = hidden.relu() if index < 3 else hidden
    expected = hidden.flatten(1).unflatten(1, (64, 8)).softmax(dim=-1).flatten(1)
    torch.testing.assert_close(encoder({"image": image}), expected)
    for other in ({"latent_size": 128}, {"observation": {**IMAGE, **VECTOR}}):
        assert ImplicitEncoder(**{"observation": IMAGE, "latent_size": 512, **other}).mlp is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LatentDynamics(input_size=10, action=ACTION),
            "simplex_size is 8, which does not divide the latent's 10",
        ),
        (lambda: CriticEnsemble(input_size=8, action=ACTION, dropout=1.0), "dropout is 1.0: write a number from 0"),
        (lambda: CriticEnsemble(input_size=8, action=ACTION, members=0), "controllers.critic.members is 0"),
        (lambda: ImplicitReward(input_size=8, action=ACTION, layers=-1), "layers is -1: write a whole number from 0"),
        (lambda: ImplicitReward(input_size=8, action=ACTION, units=0), "hidden layers are \\[0, 0\\]"),
        (lambda: ImplicitEncoder(observation=VECTOR, layers=0), "components.encoder.layers is 0"),
        (
            lambda: ImplicitEncoder(observation={"image": ArraySpec((16, 16, 3), "uint8")}),
            "images of 16x16 pixels are too small for its four convolutions",
        ),
        (
            lambda: PolicyPrior(input_size=8, action=ACTION, log_std_bounds=(2.0, 1.0)),
            "log_std_bounds is \\[2.0, 1.0\\]",
        ),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
