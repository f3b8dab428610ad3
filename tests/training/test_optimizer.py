"""One gradient step: clipping, accumulation, freezing, schedules, and what a checkpoint holds."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from rl_lab.training.gradients import clip_adaptively
from rl_lab.training.optimizer import Optimizer, named_parameters
from rl_lab.training.update_rules import Adam
from rl_lab.training.world import World
from rl_lab.types import ConfigError, Gradients, Progress
from rl_lab.utils import tree


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(network: nn.Module, seed: int = 7, scale: float = 1.0) -> Tensor:
    rows = torch.randn(16, 3, generator=torch.Generator().manual_seed(seed))
    return network(rows).square().mean() * scale


def values(network: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def test_sgd_by_hand_with_clipping() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = Optimizer(parameters=[weight], name="sgd", learning_rate=0.5, max_grad_norm=1.0)
    metrics = optimizer.step((weight * torch.tensor([3.0, 4.0])).sum())  # gradient (3, 4) of norm 5, clipped to 1
    assert metrics["grad_norm"].item() == 5.0
    assert metrics["learning_rate"] == 0.5
    torch.testing.assert_close(weight.data, torch.tensor([3.0 - 0.3, 4.0 - 0.4]))
    assert weight.grad is None


def test_small_gradients_are_not_clipped() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    Optimizer(parameters=[weight], name="sgd", learning_rate=1.0, max_grad_norm=10.0).step(weight.sum() * 0.5)
    assert weight.item() == 0.5


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "laprop", "sgd"])
def test_every_rule_lowers_a_loss(name: str) -> None:
    network = model()
    optimizer = Optimizer(parameters=[network], name=name, learning_rate=0.01, max_grad_norm=0.5)
    before = loss_of(network).item()
    for _ in range(20):
        optimizer.step(loss_of(network))
    assert loss_of(network).item() < before


def test_steps_agree_with_torch() -> None:
    ours, theirs = model(), model()
    optimizer = Optimizer(parameters={"net": ours}, learning_rate=1e-2, max_grad_norm=0.05, epsilon=1e-5)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=1e-5)
    for seed in range(10):
        metrics = optimizer.step(loss_of(ours, seed))
        reference.zero_grad()
        loss_of(theirs, seed).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        reference.step()
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-4, atol=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_large_models_have_the_same_norm_by_another_way() -> None:
    weight = nn.Parameter(torch.full((600, 600), 0.5))
    metrics = Optimizer(parameters=[weight], name="sgd").step(weight.sum())
    assert metrics["grad_norm"].item() == pytest.approx(600.0)


def test_the_schedule_moves_the_learning_rate() -> None:
    weight = nn.Parameter(torch.tensor([0.0]))
    optimizer = Optimizer(parameters=[weight], name="sgd", learning_rate="linear(1, 0)")
    rates = [optimizer.step(weight.sum(), Progress(fraction=f))["learning_rate"] for f in (0.0, 0.25, 1.0)]
    assert rates == [1.0, 0.75, 0.0]
    assert weight.item() == -1.75


def test_accumulated_losses_equal_their_mean() -> None:
    whole, parts = model(), model()
    optimizer = Optimizer(parameters=[parts], name="sgd", learning_rate=0.1, max_grad_norm=0.1, accumulate=2)
    assert optimizer.step(loss_of(parts, 1)) == {}
    assert same(whole, parts)
    assert "grad_norm" in optimizer.step(loss_of(parts, 2))
    mean_loss = (loss_of(whole, 1) + loss_of(whole, 2)) / 2.0
    Optimizer(parameters=[whole], name="sgd", learning_rate=0.1, max_grad_norm=0.1).step(mean_loss)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_parameters_are_left_alone() -> None:
    network = model()
    optimizer = Optimizer(parameters={"net": network}, learning_rate=0.1, weight_decay=0.5, name="adamw")
    optimizer.step(loss_of(network))
    network[0].requires_grad_(False)
    before = values(network)
    optimizer.step(loss_of(network))
    after = values(network)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    network[0].requires_grad_(True)
    optimizer.step(loss_of(network))
    assert optimizer.rule.counts == [2, 2, 3, 3]


def test_a_leftover_gradient_of_a_frozen_parameter_changes_nothing() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = Optimizer(parameters=[weight, other], name="sgd", learning_rate=1.0)
    weight.grad = torch.ones(1)
    weight.requires_grad_(False)
    metrics = optimizer.step(other.sum())
    assert weight.item() == 1.0
    assert metrics["grad_norm"].item() == 1.0


def test_when_everything_is_frozen_nothing_happens() -> None:
    frozen, free = model().requires_grad_(False), nn.Parameter(torch.ones(1))
    metrics = Optimizer(parameters=[frozen]).step(free.sum())
    assert metrics == {"learning_rate": 3e-4}


def test_a_shared_parameter_counts_once() -> None:
    shared = nn.Linear(2, 2)
    left, right = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(2, 1))
    assert list(named_parameters({"left": left, "right": right})) == [
        "left.0.weight",
        "left.0.bias",
        "right.1.weight",
        "right.1.bias",
    ]


def test_module_norms_are_logged_when_asked_and_make_up_the_whole() -> None:
    parts = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    optimizer = Optimizer(parameters=parts, log_module_norms=True)
    metrics = optimizer.step(sum(part(torch.ones(1, 2)).square().sum() for part in parts.values()))  # type: ignore[arg-type]
    squares = metrics["grad_norm/actor"] ** 2 + metrics["grad_norm/critic"] ** 2
    torch.testing.assert_close(squares.sqrt(), metrics["grad_norm"])
    assert not metrics["grad_norm"].requires_grad


def test_adaptive_clipping_by_hand() -> None:
    # |p| = 5, clip .1: gradients up to .5.  |g| = 2 -> .5; the second stays; the zero parameter counts as 1e-3.
    parameters = [torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]), torch.zeros(1)]
    gradients = [torch.tensor([0.0, 2.0]), torch.tensor([0.25, 0.0]), torch.tensor([1.0])]
    clip_adaptively(parameters, gradients, 0.1)
    torch.testing.assert_close(gradients[0], torch.tensor([0.0, 0.5]))
    assert gradients[1].tolist() == [0.25, 0.0]
    torch.testing.assert_close(gradients[2], torch.tensor([1e-4]))


def test_adaptive_clipping_equals_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(s, generator=generator) for s in ((3, 4), (5,))]
    gradients = [torch.randn(s, generator=generator) * 9.0 for s in ((3, 4), (5,))]
    expected = []
    for p, g in zip(parameters, gradients, strict=True):
        limit = 0.3 * max(p.double().norm().item(), 1e-3)
        expected.append(g.double() * min(1.0, limit / g.double().norm().item()))
    clip_adaptively(parameters, gradients, 0.3)
    for g, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=1e-6, atol=1e-6)


def test_adaptive_clipping_then_norm_clipping() -> None:
    weight = nn.Parameter(torch.tensor([10.0]))
    optimizer = Optimizer(parameters=[weight], name="sgd", learning_rate=1.0, adaptive_clip=0.1, max_grad_norm=0.5)
    assert optimizer.step(weight.sum() * 100.0)["grad_norm"].item() == 100.0  # before any clipping
    assert weight.item() == pytest.approx(9.5)


def test_gradients_are_averaged_over_ranks_before_clipping() -> None:
    class TwoRanks(World):
        size = 2

        def mean(self, tensors: list[Tensor]) -> list[Tensor]:
            return [tensor / 2.0 for tensor in tensors]  # the other rank saw nothing

    weight = nn.Parameter(torch.tensor([0.0]))
    optimizer = Optimizer(parameters=[weight], name="sgd", learning_rate=1.0, world=TwoRanks())
    assert optimizer.step(weight.sum() * 4.0)["grad_norm"].item() == 2.0
    assert weight.item() == -2.0


def test_a_non_finite_gradient_shows_in_the_norm() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    metrics = Optimizer(parameters=[weight], max_grad_norm=1.0).step(weight.sum() * float("nan"))
    assert not torch.isfinite(metrics["grad_norm"])


@pytest.mark.parametrize("name", ["adam", "laprop"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_restored_optimizer_goes_on_bit_for_bit(name: str, accumulate: int) -> None:
    network = model()
    settings = {"name": name, "max_grad_norm": 0.1, "accumulate": accumulate, "learning_rate": 0.01}
    optimizer = Optimizer(parameters={"net": network}, **settings)  # type: ignore[arg-type]
    for seed in range(4):
        optimizer.step(loss_of(network, seed))
    twin = copy.deepcopy(network)
    restored = Optimizer(parameters={"net": twin}, **settings)  # type: ignore[arg-type]
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert tree.equal(restored.state_dict(), optimizer.state_dict())
    for seed in range(4, 10):
        optimizer.step(loss_of(network, seed))
        restored.step(loss_of(twin, seed))
    assert same(network, twin)


def test_fp16_skips_an_overflow_and_halves_its_scale() -> None:
    network = model()
    optimizer = Optimizer(parameters=[network], precision="fp16", learning_rate=0.1)
    before = values(network)
    optimizer.step(loss_of(network) * float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert optimizer.loss_scale is not None
    assert optimizer.loss_scale.value == 2.0**15
    assert optimizer.rule.counts == [0, 0, 0, 0]
    optimizer.step(loss_of(network))
    assert optimizer.rule.counts == [1, 1, 1, 1]
    restored = Optimizer(parameters=[model()], precision="fp16")
    restored.load_state_dict(optimizer.state_dict())
    assert restored.loss_scale is not None
    assert restored.loss_scale.get_state() == {"value": 2.0**15, "accepted": 1}


def test_fp16_without_overflow_computes_the_same() -> None:
    plain, scaled = model(), model()
    Optimizer(parameters=[plain], max_grad_norm=0.1).step(loss_of(plain))
    optimizer = Optimizer(parameters=[scaled], max_grad_norm=0.1, precision="fp16")
    optimizer.step(loss_of(scaled))
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert optimizer.loss_scale is not None
    optimizer.loss_scale.accepted = 1999
    optimizer.step(loss_of(scaled))
    assert optimizer.loss_scale.value == 2.0**17


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_known_gradients_change_the_same_as_backward(precision: str, accumulate: int, is_frozen: bool) -> None:
    networks = [model(), model()]
    settings = {"max_grad_norm": 0.1, "accumulate": accumulate, "precision": precision, "log_module_norms": True}
    optimizers = [Optimizer(parameters={"model": network}, **settings) for network in networks]
    for update in range(6):
        everything = list(networks[1].parameters())
        gradients = torch.autograd.grad(loss_of(networks[1], seed=update), everything)
        for network in networks:
            next(network.parameters()).requires_grad_(not is_frozen)
        first = optimizers[0].apply(loss_of(networks[0], seed=update))
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        second = optimizers[1].apply(None, Gradients(everything, gradients, joined))
        for network in networks:
            next(network.parameters()).requires_grad_(True)
        torch.testing.assert_close(first, second)
    for left, right in zip(*map(values, networks), strict=True):
        torch.testing.assert_close(left, right)


def test_known_gradients_of_what_is_frozen_change_nothing() -> None:
    network = model().requires_grad_(False)
    before = copy.deepcopy(network)
    known = Gradients(list(network.parameters()), [torch.ones_like(each) for each in network.parameters()])
    assert Optimizer(parameters=[network]).apply(None, known) == {}
    assert same(network, before)


def test_mistakes_are_refused() -> None:
    network = model()
    with pytest.raises(ConfigError, match=r"optimizer name: 'adm' is not known.*Did you mean 'adam'"):
        Optimizer(parameters=[network], name="adm")
    with pytest.raises(ConfigError, match=r"optimizer accumulate: 0; allowed is a whole number from 1 on"):
        Optimizer(parameters=[network], accumulate=0)
    with pytest.raises(ConfigError, match=r"optimizer max_grad_norm: -1; allowed is a number above 0. Write null"):
        Optimizer(parameters=[network], max_grad_norm=-1)
    for below_zero in (-1.0, "linear(1e-3, -1)", math.nan):
        with pytest.raises(ConfigError, match=r"optimizer learning_rate: (-1|nan); allowed is a number from 0 on"):
            Optimizer(parameters=[network], learning_rate=below_zero)
    for below_zero in ({"epsilon": -1.0}, {"weight_decay": math.nan}):
        with pytest.raises(ConfigError, match=r"optimizer (epsilon: -1.0|weight_decay: nan); allowed is a number from"):
            Optimizer(parameters=[network], **below_zero)
    for beyond in ({"betas": (0.9, 2.0)}, {"betas": (-1.0, 0.9)}, {"momentum": 1.0}):
        with pytest.raises(ConfigError, match=r"optimizer (betas|momentum): (2|-1|1).0; allowed is 0 up to below"):
            Optimizer(parameters=[network], **beyond)
    with pytest.raises(ConfigError, match=r"optimizer parameters: there is nothing to learn"):
        Optimizer(parameters={"nothing": nn.Tanh()})
    with pytest.raises(ConfigError, match=r"optimizer learning_rate: 'fast' is neither a number nor a schedule"):
        Optimizer(parameters=[network], learning_rate="fast")


# --- learning rates of parts ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "sgd", "laprop"])
def test_a_part_learns_at_its_own_fraction_of_the_learning_rate(name: str) -> None:
    def changes(rate_of: dict[str, float] | None) -> list[Tensor]:
        parts = {"encoder": model(1), "head": model(2)}
        before = [values(part) for part in parts.values()]
        optimizer = Optimizer(parameters=parts, name=name, learning_rate=1e-2, max_grad_norm=0.1, rate_of=rate_of)
        optimizer.step(sum(loss_of(part) for part in parts.values()))  # type: ignore[arg-type]
        after = [values(part) for part in parts.values()]
        return [
            torch.cat([(b - a).flatten() for a, b in zip(*pair, strict=True)])
            for pair in zip(before, after, strict=True)
        ]

    plain, slowed = changes(None), changes({"encoder": 0.25})
    torch.testing.assert_close(slowed[0], 0.25 * plain[0], rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(slowed[1], plain[1])


@pytest.mark.parametrize("is_static", [False, True])
def test_rates_of_parts_are_the_same_for_rules_that_a_graph_can_hold(is_static: bool) -> None:
    parameters = {"encoder.w": nn.Parameter(torch.ones(3)), "head.w": nn.Parameter(torch.ones(3))}
    rule = Adam(parameters, epsilon=1e-8, betas=(0.9, 0.999), weight_decay=0.0, momentum=0.0, is_static=is_static)
    rule.rates = [0.5, 1.0]
    rate = torch.tensor(0.1) if is_static else 0.1
    rule.apply([torch.ones(3), torch.ones(3)], rate)
    assert [p[0].item() for p in parameters.values()] == pytest.approx([0.95, 0.9], abs=1e-6)
    rule.apply([None, torch.ones(3)], rate)
    assert [p[0].item() for p in parameters.values()] == pytest.approx([0.95, 0.8], abs=1e-6)


@pytest.mark.parametrize(
    ("rate_of", "message"),
    [
        ({"encodr": 0.3}, "optimizer rate_of: 'encodr' is none of its parts. Did you mean 'encoder'"),
        ({"encoder": -1.0}, "optimizer rate_of.encoder: -1.0; allowed is a number from 0 on"),
    ],
)
def test_impossible_rates_of_parts_are_refused(rate_of: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Optimizer(parameters={"encoder": model()}, rate_of=rate_of)
