"""Encoder, decoder, heads, actor and return scale of world models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_lab.components.heads.distributions import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
    TruncatedGaussian,
)
from rl_lab.components.returns.returns import PercentileScale, percentile
from rl_lab.components.world_model.decoder import ObservationDecoder
from rl_lab.components.world_model.encoder import WorldModelEncoder, convolution, stage_depths
from rl_lab.components.world_model.heads import (
    ActionMaskHead,
    AllowedActions,
    ContinueHead,
    LatentActor,
    Scalar,
    ScalarHead,
)
from rl_lab.components.world_model.layers import Layer, LayerNorm, RMSNorm, Stack, dense
from rl_lab.components.world_model.rssm import MaskedDecisions
from rl_lab.components.world_model.two_hot import TwoHot
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError

CPU = torch.device("cpu")
VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((16, 16, 3), "uint8")}
MIXED = {
    "image": ArraySpec((16, 16, 3), "uint8"),
    "map": ArraySpec((16, 16, 1), "uint8"),
    "vector": ArraySpec((2, 2), "float32"),
    "level": ArraySpec((), "int64", num_values=(4,)),
    "bytes": ArraySpec((5,), "uint8"),
    "action_mask": ArraySpec((2,), "bool"),
}


def observation(specs: dict[str, ArraySpec], *leading: int) -> Batch:
    rows: Batch = {}
    for key, spec in specs.items():
        if spec.dtype == "float32":
            rows[key] = torch.randn(*leading, *spec.shape) * 5.0
        else:
            highest = {"uint8": 256, "bool": 2}.get(spec.dtype, spec.num_values[0] if spec.num_values else 2)
            rows[key] = torch.randint(0, highest, (*leading, *spec.shape)).to(getattr(torch, spec.dtype))
    return rows


def small_encoder(specs: dict[str, ArraySpec]) -> WorldModelEncoder:
    return WorldModelEncoder(observation=specs, layers=1, units=8, depth=2, multipliers=(2, 3, 4, 4))


def small_decoder(specs: dict[str, ArraySpec], **settings: int) -> ObservationDecoder:
    sizes = {"layers": 1, "units": 8, "depth": 4, "blocks": 2, **settings}
    return ObservationDecoder(input_size=12, observation=specs, deter=8, **sizes)  # type: ignore[arg-type]


# --- layers ---


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    normed = RMSNorm(2)(torch.tensor([[3.0, 4.0]]))
    root = math.sqrt(12.5 + 1e-4)
    assert normed[0].tolist() == pytest.approx([3.0 / root, 4.0 / root])
    assert LayerNorm(2)(torch.tensor([[3.0, 5.0]]))[0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)


def test_weights_start_truncated_at_two_deviations_with_the_deviation_of_the_inputs() -> None:
    torch.manual_seed(0)
    weight = dense(400, 300).weight.detach()
    assert float(weight.std()) == pytest.approx(0.05, rel=0.02)
    assert float(weight.abs().max()) <= 2.0 * 0.05 / 0.87962566 + 1e-6
    assert float(dense(4, 3, scale=0.0).weight.abs().max().detach()) == 0.0


def test_a_layer_is_linear_then_norm_then_activation() -> None:
    layer = Layer(5, 4)
    features = torch.randn(2, 5)
    assert torch.equal(layer(features), torch.nn.functional.silu(layer.norm(layer.linear(features))))


def test_impossible_stacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers is -1 and units is 0: write layers from 0 and units from 1 on"):
        Stack(3, layers=-1, units=0)


# --- encoder and decoder ---


def test_every_kind_of_observation_is_embedded_at_once() -> None:
    encoder = small_encoder(MIXED)
    rows = observation(MIXED, 2, 3)
    embedding = encoder(rows)
    assert embedding.shape == (2, 3, encoder.output_size) == (2, 3, 8 + 4 * 4 * 6)
    assert torch.allclose(embedding[1, 2], encoder({key: value[1, 2] for key, value in rows.items()}), atol=1e-5)


def test_keys_choose_what_is_looked_at() -> None:
    assert WorldModelEncoder(observation=MIXED, units=8, layers=1, keys=["vector"]).output_size == 8


def test_large_numbers_reach_the_network_compressed() -> None:
    encoder = WorldModelEncoder(observation=VECTOR, layers=0)
    assert encoder({"vector": torch.tensor([[0.0, math.e - 1.0, -99.0]])})[0].tolist() == pytest.approx(
        [0.0, 1.0, -math.log(100.0)]
    )


def test_images_are_halved_as_often_as_they_can_be() -> None:
    assert stage_depths((64, 64, 3), depth=16, multipliers=(2, 3, 4, 4)) == [32, 48, 64, 64]
    assert stage_depths((12, 24, 3), depth=1, multipliers=(2, 3, 4, 4)) == [2, 3]
    with pytest.raises(ConfigError, match="Images of 5x64 cannot be halved for the world model: both sides must be"):
        stage_depths((5, 64, 3), depth=1, multipliers=(2,))
    with pytest.raises(
        ConfigError, match="Images of 84x84 can be halved for the world model down to 21x21, more than 16"
    ):
        stage_depths((84, 84, 3), depth=1, multipliers=(2, 3, 4, 4))
    with pytest.raises(
        ConfigError, match="Images of 3x32 cannot be halved.* Move their channels, which come first, last"
    ):
        stage_depths((3, 32, 32), depth=1, multipliers=(2, 3, 4, 4))
    with pytest.raises(ConfigError, match="kernel is 4: write an odd number, such as 5, so that images keep their"):
        convolution(3, 4, kernel=4)
    other = {"a": ArraySpec((16, 16, 3), "uint8"), "b": ArraySpec((32, 16, 3), "uint8")}
    with pytest.raises(ConfigError, match="reads images of one size, but these differ: a 16x16, b 32x16. Choose some"):
        WorldModelEncoder(observation=other)


def test_reconstructions_have_the_shapes_and_types_of_the_observation() -> None:
    decoder = small_decoder(MIXED)
    shown = decoder.reconstruct(torch.randn(2, 3, 12))
    assert shown.keys() == MIXED.keys() - {"action_mask"}
    for key, rows in shown.items():
        assert rows.shape == (2, 3, *MIXED[key].shape), key
        assert str(rows.dtype).removeprefix("torch.") == MIXED[key].dtype, key


def test_the_loss_of_a_vector_is_the_summed_squared_error_after_symlog() -> None:
    decoder = small_decoder(VECTOR)
    with torch.no_grad():
        decoder.outputs["vector"].weight.zero_()
    target = torch.tensor([[1.0, -math.e + 1.0, 0.0]])
    expected = math.log(2.0) ** 2 + 1.0
    assert float(decoder.loss(torch.randn(1, 12), {"vector": target}).detach()) == pytest.approx(expected)


def test_the_loss_of_an_image_is_the_summed_squared_error_of_its_pixels() -> None:
    decoder = small_decoder(IMAGE)
    with torch.no_grad():
        decoder.image_network.output.weight.zero_()  # a grey image: 0.5 everywhere
    black = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    losses = decoder.loss(torch.randn(2, 12), {"image": black})
    assert losses.tolist() == pytest.approx([0.25 * 16 * 16 * 3] * 2)


def test_the_loss_of_a_discrete_value_is_its_cross_entropy() -> None:
    specs = {"level": ArraySpec((), "int64", num_values=(4,))}
    decoder = small_decoder(specs)
    with torch.no_grad():
        decoder.outputs["level"].weight.zero_()
    loss = decoder.loss(torch.randn(3, 12), {"level": torch.tensor([0, 3, 1])})
    assert loss.tolist() == pytest.approx([math.log(4.0)] * 3)


def test_a_memory_larger_than_the_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="decoder: deter is 12, but the features have 12 numbers in all"):
        ObservationDecoder(input_size=12, observation=VECTOR, deter=12)


# --- heads ---


def test_rewards_and_values_start_at_exactly_zero() -> None:
    head = ScalarHead(input_size=4, units=8)
    prediction = head(torch.randn(5, 4))
    assert isinstance(prediction, TwoHot)
    assert prediction.mean().tolist() == [0.0] * 5


def test_a_normal_head_predicts_one_number_with_half_its_squared_error() -> None:
    prediction = Scalar(torch.tensor([[1.0], [3.0]]))
    assert prediction.mean().tolist() == [1.0, 3.0]
    assert prediction.loss(torch.tensor([1.0, 1.0])).tolist() == [0.0, 2.0]
    head = ScalarHead(input_size=4, units=8, prediction="normal", output_scale=1.0)
    assert isinstance(head(torch.randn(2, 3, 4)), Scalar)
    assert head(torch.randn(2, 3, 4)).until_last().mean().shape == (2, 2)
    with pytest.raises(
        ConfigError, match="head prediction: 'two-hot' is not known; allowed: two_hot, symlog_two_hot, normal"
    ):
        ScalarHead(input_size=4, prediction="two-hot")


def test_a_normal_head_keeps_its_digits_in_bfloat16() -> None:
    torch.manual_seed(0)
    head = ScalarHead(input_size=4, units=8, prediction="normal", output_scale=1.0)
    with torch.no_grad():
        head.output.bias.fill_(80.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head(torch.randn(500, 4)).mean()
    assert found.dtype == torch.float32
    assert len(found.unique()) > 400  # bfloat16 has steps of a half there


def test_a_policy_without_a_share_of_chance_stays_finite_when_it_is_sure() -> None:
    for spec in (ActionSpec("discrete", (3,)), ActionSpec("multi_discrete", (2, 1))):
        actor = LatentActor(input_size=4, action=spec, units=8, unimix=0.0)
        with torch.no_grad():
            actor.output.bias.copy_(torch.tensor([200.0, 0.0, 0.0]))
        policy = actor(torch.randn(5, 4))
        policy.entropy().sum().backward()
        assert policy.entropy().isfinite().all() and policy.log_prob(policy.mode()).isfinite().all()
        assert all(each.grad is None or each.grad.isfinite().all() for each in actor.parameters())


def test_continuation_is_a_probability_with_cross_entropy() -> None:
    head = ContinueHead(input_size=4, units=8)
    with torch.no_grad():
        head.output.weight.zero_()
    prediction = head(torch.randn(2, 4))
    assert prediction.mean().tolist() == [0.5, 0.5]
    assert prediction.loss(torch.tensor([1.0, 0.997])).tolist() == pytest.approx([math.log(2.0)] * 2)


def test_what_is_likelier_allowed_than_not_is_allowed_and_everything_where_nothing_is() -> None:
    logits = torch.tensor([[0.1, -0.1, 3.0], [-1.0, -2.0, -3.0]])
    assert AllowedActions(logits, (3,)).mask().tolist() == [[True, False, True], [True, True, True]]
    assert AllowedActions(logits, (2, 1)).mask().tolist() == [[True, False, True], [True, True, True]]
    assert AllowedActions(-logits, (1, 2)).mask().tolist() == [[True, True, False], [True, True, True]]
    assert AllowedActions(logits, (3,)).mean()[0, 2] == torch.sigmoid(torch.tensor(3.0))


def test_a_head_for_action_masks_has_layers_only_where_there_is_a_mask() -> None:
    settings: dict[str, Any] = {"input_size": 4, "action": ActionSpec("multi_discrete", (2, 3)), "units": 8}
    mask = ArraySpec((5,), "bool")
    before = torch.get_rng_state()
    assert not ActionMaskHead(observation={"vector": ArraySpec((3,), "float32")}, **settings).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert ActionMaskHead(observation={"action_mask": mask}, **settings)(torch.randn(2, 7, 4)).mask().shape == (2, 7, 5)


@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
def test_masked_decisions_are_draws_from_the_masked_policy(sizes: tuple[int, ...]) -> None:
    kind = "discrete" if len(sizes) == 1 else "multi_discrete"
    actor = LatentActor(input_size=2, action=ActionSpec(kind, sizes), units=8, output_scale=3.0)  # type: ignore[arg-type]
    features = torch.ones(20_000, 2)
    logits = torch.tensor([1.0, -1.0, 1.0, 1.0] if len(sizes) == 1 else [-1.0, 1.0, 1.0, -1.0, 1.0, 1.0])
    noise = actor.noise(1, len(features), device=torch.device("cpu"))
    policy = MaskedDecisions(actor, noise, lambda x: AllowedActions(logits.expand(len(x), -1), sizes))
    drawn = policy(features, 0).view(len(features), -1)[:, -1]
    [mask] = policy.masks
    masked = actor(features[:1], mask[:1])
    expected = (masked if kind == "discrete" else masked.parts[-1]).probs[0]  # type: ignore[union-attr]
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    assert shares[1] == expected[1] == 0.0
    assert shares.tolist() == pytest.approx(expected.tolist(), abs=0.02)


def test_discrete_policies_keep_one_percent_of_chance() -> None:
    actor = LatentActor(input_size=4, action=ActionSpec("discrete", (4,)), units=8)
    with torch.no_grad():
        actor.output.bias.copy_(torch.tensor([100.0, 0.0, 0.0, 0.0]))
    policy = actor(torch.randn(3, 4))
    assert isinstance(policy, Categorical)
    assert policy.probs[0].tolist() == pytest.approx([0.9925, 0.0025, 0.0025, 0.0025], rel=1e-4)
    masked = actor(torch.randn(1, 4), torch.tensor([[False, True, True, False]]))
    assert isinstance(masked, Categorical)
    assert masked.probs[0].tolist() == pytest.approx([0.0, 0.5, 0.5, 0.0], abs=1e-2)


def test_continuous_policies_have_means_in_the_unit_box_and_bounded_deviations() -> None:
    actor = LatentActor(input_size=4, action=ActionSpec("continuous", (2,)), units=8, output_scale=0.0)
    policy = actor(torch.randn(3, 4))
    assert isinstance(policy, DiagonalGaussian)
    deviation = 0.1 + 0.9 / (1.0 + math.exp(-2.0))
    assert policy.log_std[0].tolist() == pytest.approx([math.log(deviation)] * 2)
    with torch.no_grad():
        actor.output.bias.fill_(50.0)
    assert actor(torch.randn(1, 4)).mode()[0].tolist() == pytest.approx([1.0, 1.0])  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="actor: minimum_std is 2.0 and maximum_std 1.0; write"):
        LatentActor(input_size=4, action=ActionSpec("continuous", (2,)), minimum_std=2.0)


@pytest.mark.parametrize(
    "spec", [ActionSpec("discrete", (3,)), ActionSpec("multi_discrete", (2, 3)), ActionSpec("continuous", (2,))]
)
def test_deciding_with_noise_draws_from_the_policy(spec: ActionSpec) -> None:
    torch.manual_seed(0)
    actor = LatentActor(input_size=4, action=spec, units=8, output_scale=1.0)
    features = torch.randn(1, 4).expand(20_000, 4)
    action = actor.decide(features, actor.noise(20_000, device=CPU))
    policy = actor(features[:1])
    if isinstance(policy, DiagonalGaussian):
        assert action.mean(dim=0).tolist() == pytest.approx(policy.mean[0].tolist(), abs=0.03)
        assert action.std(dim=0).tolist() == pytest.approx(policy.log_std.exp()[0].tolist(), abs=0.03)
        return
    parts = policy.parts if isinstance(policy, MultiCategorical) else [policy]
    for index, part in enumerate(parts):
        chosen = action[:, index] if isinstance(policy, MultiCategorical) else action
        found = torch.bincount(chosen, minlength=part.logits.shape[-1]) / 20_000
        assert found.tolist() == pytest.approx(part.probs[0].tolist(), abs=0.015)


@pytest.mark.parametrize(("distribution", "kind"), [("truncated", TruncatedGaussian), ("tanh", SquashedGaussian)])
def test_actions_of_the_older_policies_stay_in_the_unit_box(distribution: Any, kind: type) -> None:
    torch.manual_seed(0)
    spec = ActionSpec("continuous", (2,))
    actor = LatentActor(input_size=4, action=spec, units=8, output_scale=1.0, distribution=distribution)
    features, noise = torch.randn(500, 4), actor.noise(500, device=CPU)
    policy, action = actor(features), actor.decide(features, noise)
    assert isinstance(policy, kind)
    assert action.abs().max() <= 1.0 and policy.mode().abs().max() <= 1.0  # type: ignore[union-attr]
    torch.testing.assert_close(action, policy.draw(noise))  # type: ignore[union-attr]
    assert policy.log_prob(action).isfinite().all() and policy.entropy().isfinite().all()


@pytest.mark.parametrize(
    ("distribution", "settings", "at_zero", "at_two"),
    [
        ("bounded", (0.1, 1.0), 0.1 + 0.9 / (1.0 + math.exp(-2.0)), 0.1 + 0.9 / (1.0 + math.exp(-4.0))),
        ("truncated", (0.1, 2.1), 0.1 + 2.0 * 0.5, 0.1 + 2.0 / (1.0 + math.exp(-1.0))),
        ("tanh", (1e-4, 5.0), 5.0 + 1e-4, 1e-4 + math.log1p(math.exp(2.0) * math.expm1(5.0))),
    ],
)
def test_each_policy_has_the_deviation_of_its_paper(
    distribution: Any, settings: tuple[float, float], at_zero: float, at_two: float
) -> None:
    low, high = settings
    spec = ActionSpec("continuous", (1,))
    actor = LatentActor(
        input_size=4, action=spec, units=8, distribution=distribution, minimum_std=low, maximum_std=high
    )
    for output, expected in ((0.0, at_zero), (2.0, at_two)):
        with torch.no_grad():
            actor.deviation_output.weight.zero_()
            actor.deviation_output.bias.fill_(output)
        policy = actor(torch.randn(3, 4))
        normal = policy if isinstance(policy, DiagonalGaussian) else policy.base  # type: ignore[union-attr]
        assert normal.log_std.exp().flatten().tolist() == pytest.approx([expected] * 3, rel=1e-5)


# --- return scale ---


def test_percentiles_interpolate_between_sorted_numbers() -> None:
    ordered = torch.arange(11.0)
    assert [float(percentile(ordered, percent)) for percent in (0.0, 5.0, 95.0, 100.0)] == [0.0, 0.5, 9.5, 10.0]
    numbers = torch.randn(1000)
    expected = torch.quantile(numbers, 0.95)
    assert float(percentile(numbers.sort().values, 95.0)) == pytest.approx(float(expected), rel=1e-5)


def test_the_scale_is_the_running_range_of_returns_and_never_below_one() -> None:
    scale = PercentileScale()
    returns = torch.arange(101.0).reshape(1, 101) * 2.0  # 5th percentile 10, 95th 190
    assert float(scale.scale()) == 1.0
    scale.update(returns)
    assert float(scale.scale()) == pytest.approx(0.01 * 180.0)
    scale.update(returns)
    assert float(scale.scale()) == pytest.approx((0.99 * 0.01 + 0.01) * 180.0)
    for _ in range(2000):
        scale.update(returns * 0.001)
    assert float(scale.scale()) == 1.0


def test_a_scale_that_does_not_start_at_zero_is_the_first_range_from_the_first_update_on() -> None:
    scale = PercentileScale(smallest_scale=1e-6, starts_at_zero=False)
    numbers = torch.arange(101.0) * 2e-4  # 5th percentile 0.001, 95th 0.019
    scale.update(torch.zeros(5))  # nothing to tell apart: still none seen
    scale.update(numbers)
    assert float(scale.scale()) == pytest.approx(0.018)
    scale.update(numbers * 2.0)
    assert float(scale.scale()) == pytest.approx(0.99 * 0.018 + 0.01 * 0.036)
    still = PercentileScale(decay=1.0, smallest_scale=1e-6, starts_at_zero=False)
    still.update(numbers)
    assert float(still.scale()) == pytest.approx(1e-6)


def test_impossible_percentiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="return scale: percentiles are 95 and 5, decay is 0.99 and smallest_scale"):
        PercentileScale(low_percentile=95, high_percentile=5)
