"""Every fast path of a GPU equals the formula it stands for: on a GPU, or on a CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_on_a_gpu.py compares on a GPU", allow_module_level=True)

from rl_lab.components.world_model.decoder import DoublingCNN
from rl_lab.components.world_model.encoder import HalvingCNN
from rl_lab.components.world_model.heads import LatentActor
from rl_lab.components.world_model.latents import CategoricalLatent, GaussianLatent
from rl_lab.components.world_model.layers import Layer
from rl_lab.components.world_model.rssm import RSSM, Decisions
from rl_lab.components.world_model.two_hot import TwoHot, symexp_bins
from rl_lab.kernels import door, gpu
from rl_lab.kernels.triton import elementwise, images
from rl_lab.types import ActionSpec
from tests.kernels.kernel_harness import Call, Inputs, Variant, check, run, shaken, tensors_in, trusted_formulas

VARIANTS = [  # few rows: the interpreter is slow
    *(Variant(rows=rows) for rows in (1, 2, 3, 33)),
    *(Variant(rows=9, layout=layout) for layout in ("strided", "transposed")),
    *(Variant(rows=9, values=values) for values in ("saturated", "nan")),
]
ONE_ROW, TWO_ROWS, STRIDED = Variant(rows=1), Variant(rows=2), Variant(rows=5, layout="strided")
CONTINUOUS, DISCRETE = ActionSpec("continuous", (2,)), ActionSpec("discrete", (3,))
BINS = symexp_bins(255)


def named(value: Any) -> str:
    return str(getattr(value, "kind", value))


PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@pytest.fixture(autouse=True)
def everything_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "on_gpu", lambda tensor: True)
    yield
    door.open_door(True, takes_unmeasured=True)


def made(kind: Callable[..., nn.Module], *args: Any, **keywords: Any) -> Any:
    torch.manual_seed(0)
    return shaken(kind(*args, **keywords))


def in_bf16(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Under autocast; which results come in which precision, the two may do differently."""

    def autocasting(*args: Any, **keywords: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = formula(*args, **keywords)
        return [each.float() if each.is_floating_point() else each for each in tensors_in(results)]

    return autocasting


def compare(
    name: str,
    make: Callable[[Inputs], Call],
    variant: Variant,
    precision: str,
    *,
    tolerance: float = 2e-5,
    is_used: bool = True,
) -> None:
    """In bf16 both round at other places: a hundredth apart is alike."""

    def make_precise(inputs: Inputs) -> Call:
        call = make(inputs)
        if precision == "bf16":
            call.formula = in_bf16(call.formula)
        return call

    tolerance = tolerance if precision == "fp32" else 3e-2
    check(f"rl_lab.kernels.gpu:{name}", make_precise, variant, tolerance=tolerance, is_used=is_used)


# --- layers ---


def layer_call(inputs: Inputs, *leading: int, turned: bool = False) -> Call:
    layer = made(Layer, 6, 12)
    features = inputs.normal(*leading, 6, requires_grad=True)
    return Call(layer.forward, [features.transpose(0, 1) if turned else features], modules=[layer], leaves=[features])


@PRECISIONS
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_layer(variant: Variant, precision: str) -> None:
    compare("LAYER", layer_call, variant, precision)


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_of_dreams_whose_steps_lie_first(turned: bool) -> None:
    compare("LAYER", lambda inputs: layer_call(inputs, 4, turned=turned), Variant(rows=3), "fp32")


def test_other_layers_run_as_they_are_written() -> None:
    for style in ({"norm": "layer"}, {"activation": "elu"}):
        make = lambda inputs, style=style: Call(made(Layer, 6, 12, **style).forward, [inputs.normal(6)])  # noqa: E731
        compare("LAYER", make, Variant(rows=2), "fp32", is_used=False)
    watched = made(Layer, 6, 12)
    watched.norm.register_forward_hook(lambda module, inputs, output: output * 2.0)
    compare("LAYER", lambda inputs: Call(watched.forward, [inputs.normal(6)]), Variant(rows=2), "fp32", is_used=False)


def test_a_sum_has_the_same_gradient_everywhere() -> None:
    layer, features = made(Layer, 6, 12), torch.randn(3, 6)
    fast = torch.autograd.grad(layer(features).sum(), layer.linear.weight)[0]
    with door.plain_formulas():
        torch.testing.assert_close(fast, torch.autograd.grad(layer(features).sum(), layer.linear.weight)[0])


# --- heads ---


def two_hot_call(inputs: Inputs, *, kind: str, dtype: torch.dtype) -> Call:
    logits = (inputs.normal(255) * 2.0).to(dtype).detach().requires_grad_(kind == "loss")
    if kind == "mean":
        return Call(lambda logits: TwoHot(logits, BINS).mean(), [logits])
    target = inputs.normal(scale=50.0)
    if inputs.variant.values == "saturated":
        target = target * 1e10  # beyond the outermost bins
    return Call(lambda logits, target: TwoHot(logits, BINS).loss(target), [logits, target], leaves=[logits])


@PRECISIONS
@pytest.mark.parametrize("kind", ["mean", "loss"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_two_hot(variant: Variant, kind: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    make = partial(two_hot_call, kind=kind, dtype=dtype)
    compare(f"TWO_HOT_{kind.upper()}", make, variant, precision, tolerance=1e-4)


def test_targets_at_a_bin_between_two_in_the_middle_and_beyond_both_ends() -> None:
    target = torch.tensor([0.0, 1.5, -321.0, float(BINS[200]), float(BINS[-1]), float(BINS[0]), 1e12, -1e12, 0.01])
    logits = torch.randn(9, 255, requires_grad=True)
    make = lambda inputs: Call(lambda *args: TwoHot(args[0], BINS).loss(args[1]), [logits, target], leaves=[logits])  # noqa: E731
    compare("TWO_HOT_LOSS", make, Variant(rows=9), "fp32")


def test_mirrored_logits_mean_exactly_zero() -> None:
    mirrored = torch.randn(4, 255)
    assert TwoHot(mirrored + mirrored.flip(-1), BINS).mean().tolist() == [0.0] * 4
    assert "gpu:TWO_HOT_MEAN" in door.in_use()


@torch.no_grad()
@PRECISIONS
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_actions_with_bounded_stds(variant: Variant, precision: str) -> None:
    actor = made(LatentActor, input_size=6, action=CONTINUOUS, units=8, output_scale=1.0)
    make = lambda inputs: Call(actor.decide, [inputs.normal(6), inputs.normal(2)], modules=[actor])  # noqa: E731
    with torch.no_grad():
        compare("DECIDE", make, variant, precision)


# --- images ---

IMAGES: dict[str, Any] = {"depth": 2, "multipliers": (3, 4), "kernel": 5, "activation": "silu", "norm": "rms"}


def encoder_call(inputs: Inputs, channels: int) -> Call:
    encoder = made(HalvingCNN, (12, 20, channels), **IMAGES)
    return Call(encoder.forward, [inputs.integers(256, 12, 20, channels).to(torch.uint8)], modules=[encoder])


@pytest.mark.parametrize("channels", [1, 3])
def test_the_encoder_of_images(channels: int) -> None:
    for rows in (1, 2):
        make = partial(encoder_call, channels=channels)
        compare("ENCODE_IMAGES", make, Variant(rows=rows), "fp32", tolerance=1e-4)


def test_the_encoder_of_images_in_bf16_is_as_near_to_fp32_as_its_formula() -> None:
    """Rounding decides which of four nearly equal pixels is the largest, and its gradient goes there."""
    errors = {"plain": 0.0, "fast": 0.0}
    for seed in range(4):
        exact = whole_encoder(seed, plain=True, low=False)
        for name in errors:
            found = whole_encoder(seed, plain=name == "plain", low=True)
            pairs = zip(found, exact, strict=True)
            errors[name] += sum(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    assert errors["fast"] < 1.5 * errors["plain"], errors


def whole_encoder(seed: int, *, plain: bool, low: bool) -> list[Tensor]:
    """The result and all gradients."""
    call = encoder_call(Inputs(Variant(rows=2), seed), channels=3)
    call.formula = in_bf16(call.formula) if low else call.formula
    results, gradients, _ = run(call, plain=plain, seed=0)
    return [*results, *(each for each in gradients if each is not None)]


@PRECISIONS
@pytest.mark.parametrize(
    ("variant", "kernel"),
    [(ONE_ROW, 5), (Variant(rows=2, layout="strided"), 3), (Variant(rows=2, layout="transposed"), 5)],
    ids=str,
)
def test_the_error_of_decoded_images(variant: Variant, kernel: int, precision: str) -> None:
    def make(inputs: Inputs) -> Call:
        parts = {"deter": 8, "stoch_size": 6, "units": 4, "blocks": 2}
        decoder = made(DoublingCNN, (12, 20, 3), **parts, **{**IMAGES, "kernel": kernel})
        features, target = inputs.normal(14, requires_grad=True), inputs.integers(256, 12, 20, 3).to(torch.uint8)
        return Call(decoder.error, [features, target], modules=[decoder], leaves=[features])

    compare("IMAGE_ERROR", make, variant, precision, tolerance=1e-4)


def test_a_row_of_taps_is_summed_as_drawn() -> None:
    weight = torch.zeros(1, 1, 5, 5)
    weight[0, 0, 2] = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    phases = images.phase_weights(weight).view(2, 2, 3, 3)
    assert phases[0, 0, 1].tolist() == [11.0, 1100.0, 10000.0]
    assert phases[0, 1, 1].tolist() == [1.0, 110.0, 11000.0]


@pytest.mark.parametrize("shape", [(1, 3), (700, 2, 12)])
def test_the_total_over_programs(shape: tuple[int, ...]) -> None:
    partial_sums = torch.randn(shape)
    torch.testing.assert_close(elementwise.total(partial_sums), partial_sums.sum(dim=0), rtol=1e-5, atol=1e-4)


# --- the recurrent state-space model ---


def make_rssm(action: ActionSpec = CONTINUOUS) -> RSSM:
    latent = CategoricalLatent(groups=3, classes=4)
    rssm: RSSM = made(RSSM, input_size=7, action=action, latent=latent, deter=8, hidden=5, blocks=2)
    return rssm


def sequence_call(inputs: Inputs, *, action: ActionSpec = CONTINUOUS, length: int = 3) -> Call:
    rssm, rows = make_rssm(action), inputs.rows
    embedding = inputs.normal(length, 7, requires_grad=True)
    taken = inputs.normal(length, 2, requires_grad=True) if action is CONTINUOUS else inputs.integers(3, length)
    is_first = inputs.uniform(length) < 0.3
    start = {"deter": inputs.normal(8).detach().tanh(), "stoch": inputs.normal(12).detach()}
    start = {
        key: value.masked_fill(is_first[:, :1] & (torch.arange(rows)[:, None] % 2 == 0), torch.nan)
        for key, value in start.items()
    }
    leaves = [embedding, *([taken] if action is CONTINUOUS else [])]
    return Call(rssm.observe_sequence, [embedding, taken, is_first, start], modules=[rssm], leaves=leaves)


@pytest.mark.parametrize(
    ("variant", "action"), [(ONE_ROW, CONTINUOUS), (TWO_ROWS, DISCRETE), (STRIDED, CONTINUOUS)], ids=named
)
def test_a_sequence_with_resets(variant: Variant, action: ActionSpec) -> None:
    compare("OBSERVE_SEQUENCE", partial(sequence_call, action=action), variant, "fp32", tolerance=5e-5)


@pytest.mark.parametrize("length", [1, 2])
def test_short_sequences_have_no_next_row(length: int) -> None:
    compare("OBSERVE_SEQUENCE", partial(sequence_call, length=length), Variant(rows=2), "fp32", tolerance=5e-5)


def test_saturated_sequences() -> None:
    variant = Variant(rows=3, values="saturated")
    compare("OBSERVE_SEQUENCE", sequence_call, variant, "fp32", tolerance=2e-4)


def test_a_sequence_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """With choices that no rounding tips, since one that does changes everything after it."""
    decided = torch.where(torch.rand(3, 3, 3, 4, generator=torch.Generator().manual_seed(3)) < 0.25, 1e-12, 1e12)
    monkeypatch.setattr(CategoricalLatent, "noise", lambda self, *leading, device: decided[: leading[0], : leading[1]])
    with trusted_formulas():
        compare("OBSERVE_SEQUENCE", sequence_call, Variant(rows=3), "bf16")


def test_other_models_run_as_they_are_written() -> None:
    shared: dict[str, Any] = {"input_size": 7, "action": CONTINUOUS, "deter": 8, "hidden": 5}
    categorical, gaussian = CategoricalLatent(groups=3, classes=4), GaussianLatent(size=12)
    for style in (
        {"latent": gaussian, "blocks": 2},
        {"latent": categorical, "blocks": 1, "recurrence": "gru"},
        {"latent": categorical, "blocks": 2, "posterior_layers": 2},
        {"latent": categorical, "blocks": 2, "norm": "layer"},
    ):

        def make(inputs: Inputs, style: dict[str, Any] = style) -> Call:
            rssm = made(RSSM, **shared, **style)
            rows = (inputs.normal(2, 7), inputs.normal(2, 2), torch.zeros(inputs.rows, 2, dtype=torch.bool))
            return Call(rssm.observe_sequence, [*rows, rssm.initial_state(inputs.rows, torch.device("cpu"))])

        compare("OBSERVE_SEQUENCE", make, Variant(rows=2), "fp32", is_used=False)


def test_a_state_that_learns_keeps_its_gradient() -> None:
    def make(inputs: Inputs) -> Call:
        call = sequence_call(inputs)
        start = {key: value.detach().nan_to_num().requires_grad_() for key, value in call.args[3].items()}
        call.args = [*call.args[:3], start]
        call.leaves = [*call.leaves, *start.values()]
        return call

    compare("OBSERVE_SEQUENCE", make, Variant(rows=2), "fp32", is_used=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("variant", "action"), [(ONE_ROW, CONTINUOUS), (TWO_ROWS, DISCRETE), (STRIDED, CONTINUOUS)], ids=named
)
def test_a_dream(variant: Variant, action: ActionSpec, deterministic: bool) -> None:
    def make(inputs: Inputs) -> Call:
        rssm = make_rssm(action)
        actor = made(LatentActor, input_size=20, action=action, layers=2, units=6, output_scale=1.0)
        start = {"deter": inputs.normal(8).tanh(), "stoch": inputs.normal(12)}
        policy = Decisions(actor, actor.noise(4, inputs.rows, device=torch.device("cpu")))
        return Call(rssm.imagine, [start, policy, 4], {"deterministic": deterministic}, modules=[rssm, actor])

    with torch.no_grad():
        torch.manual_seed(5)
        noise = torch.randn(4, variant.rows, 2 if action is CONTINUOUS else 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LatentActor, "noise", lambda self, *leading, device: noise)
            compare("IMAGINE", make, variant, "fp32", tolerance=5e-5)


def test_a_dream_through_which_gradients_flow_runs_as_it_is_written() -> None:
    def make(inputs: Inputs) -> Call:
        rssm = make_rssm()
        start = {"deter": inputs.normal(8, requires_grad=True), "stoch": inputs.normal(12)}
        return Call(rssm.imagine, [start, lambda features, step: features[:, :2], 2], leaves=[start["deter"]])

    compare("IMAGINE", make, Variant(rows=2), "fp32", is_used=False)


def test_the_features_of_a_dream_are_not_copied() -> None:
    rssm, both = make_rssm(), torch.randn(3, 2, 20).transpose(0, 1)
    state = {"deter": both[..., :8], "stoch": both[..., 8:]}
    with torch.no_grad():
        compare("FEATURES", lambda inputs: Call(rssm.features, [state]), Variant(rows=2), "fp32")
        assert rssm.features(state).data_ptr() == both.data_ptr()
        for other in ({**state, "stoch": state["stoch"].clone()}, {**state, "stoch": both[..., :12]}):
            make = lambda inputs, other=other: Call(rssm.features, [other])  # noqa: E731
            compare("FEATURES", make, Variant(rows=2), "fp32", is_used=False)


def test_a_gpu_without_triton_runs_formulas_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    gpu._has_triton.cache_clear()
    assert not gpu.on_gpu(torch.zeros(1)) and not gpu._has_triton()
    gpu._has_triton.cache_clear()
