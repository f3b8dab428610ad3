"""On a GPU, every fast path gives what its formula gives there, forward and backward, in fp32 and in bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.diffusion.schedule import DDIMSampler, SquaredCosineSchedule
from rl_lab.components.diffusion.unet import ConditionalUNet
from rl_lab.components.planners.mppi import MPPIPlanner
from rl_lab.components.world_model.decoder import DoublingCNN
from rl_lab.components.world_model.encoder import HalvingCNN
from rl_lab.components.world_model.heads import LatentActor, ScalarHead
from rl_lab.components.world_model.implicit import NormedMLP
from rl_lab.components.world_model.latents import CategoricalLatent
from rl_lab.components.world_model.layers import Layer
from rl_lab.components.world_model.rssm import RSSM, Decisions
from rl_lab.components.world_model.two_hot import SymlogTwoHot, symlog_bins
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build_agent, build_runtime
from rl_lab.kernels import door
from rl_lab.types import ActionSpec, ArraySpec, EnvSpec
from tests.kernels.kernel_harness import tensors_in

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
CANDIDATES = 512
IMAGES: dict[str, Any] = {"depth": 8, "multipliers": (2, 3), "kernel": 5, "activation": "silu", "norm": "rms"}
CONTINUOUS = ActionSpec("continuous", (3,))
Case = tuple[str, nn.Module, Callable[[Any], Any]]


@pytest.fixture(autouse=True)
def a_fault_is_the_fault_of_its_test() -> Iterator[None]:
    """Kernels run after Python went on; and precision is a setting of the process."""
    precision = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = precision
    torch.cuda.synchronize()


def cases() -> list[Case]:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (16, 16, 16, 3), dtype=torch.uint8, device=DEVICE)
    rows, target = torch.randn(33, 24, device=DEVICE), torch.randn(33, device=DEVICE) * 50.0
    bins = symlog_bins(101, largest=10.0).to(DEVICE)
    parts = {"deter": 16, "stoch_size": 8, "units": 16, "blocks": 8}
    return [
        ("LAYER", Layer(24, 48), lambda layer: layer(rows)),
        ("TWO_HOT_LOSS", ScalarHead(input_size=24, units=16), lambda head: head(rows).loss(target)),
        ("TWO_HOT_MEAN", ScalarHead(input_size=24, units=16, output_scale=1.0), lambda head: no_grad(head, rows)),
        ("NORMED_MLP", NormedMLP(24, [48], 16, simplex_size=8, members=2), lambda mlp: mlp(rows)),
        ("SYMLOG_TWO_HOT_MEAN", NormedMLP(24, [48], 101), lambda mlp: SymlogTwoHot(mlp(rows) * 9.0, bins).mean()),
        ("ENCODE_IMAGES", HalvingCNN((16, 16, 3), **IMAGES), lambda encoder: encoder(images)),
        ("IMAGE_ERROR", DoublingCNN((16, 16, 3), **parts, **IMAGES), lambda decoder: decoder.error(rows[:16], images)),
    ]


@torch.no_grad()
def no_grad(head: Any, rows: Tensor) -> Tensor:
    return head(rows).mean()


def results(part: nn.Module, call: Callable[[Any], Any], *, is_plain: bool, precision: str) -> list[Tensor]:
    """What a call gives, and the gradients of all parameters."""
    own, generator = copy.deepcopy(part), torch.Generator(DEVICE).manual_seed(1)
    low = torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=precision == "bf16")
    with low, door.plain_formulas() if is_plain else nullcontext():
        found = [each.float() for each in tensors_in(call(own))]
        learning = [each for each in found if each.requires_grad]
        if learning:
            weights = [torch.randn(each.shape, device=DEVICE, generator=generator) for each in learning]
            torch.autograd.backward(learning, weights)
    gradients = [parameter.grad for parameter in own.parameters() if parameter.grad is not None]
    return [*(each.detach() for each in found), *gradients]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name",
    [
        *("LAYER", "TWO_HOT_LOSS", "TWO_HOT_MEAN", "NORMED_MLP", "SYMLOG_TWO_HOT_MEAN", "ENCODE_IMAGES"),
        "IMAGE_ERROR",
    ],
)
def test_layers_heads_and_images(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    part, call = next((part.to(DEVICE), call) for case, part, call in cases() if case == name)
    door.open_door(True, takes_unmeasured=True)
    fast = results(part, call, is_plain=False, precision=precision)
    assert f"gpu:{name}" in door.in_use()
    plain = results(part, call, is_plain=True, precision=precision)
    # Relative to the norm. In bf16 rounding decides which of four nearly equal pixels is the largest.
    allowed = 5e-3 if precision == "fp32" else 0.3 if name == "ENCODE_IMAGES" else 0.05
    for ours, theirs in zip(fast, plain, strict=True):
        assert float((ours - theirs).norm()) <= allowed * float(theirs.norm()) + 1e-4, (name, ours.shape)


@pytest.mark.parametrize("rows", [5, 16])
def test_a_sequence_and_a_dream(rows: int) -> None:
    torch.manual_seed(0)
    latent = CategoricalLatent(groups=4, classes=4)
    rssm = RSSM(input_size=7, action=CONTINUOUS, latent=latent, deter=32, hidden=16, blocks=2).to(DEVICE)
    actor = LatentActor(input_size=48, action=CONTINUOUS, layers=2, units=16, output_scale=1.0).to(DEVICE)
    embedding, action = torch.randn(rows, 6, 7, device=DEVICE), torch.randn(rows, 6, 3, device=DEVICE)
    is_first = torch.rand(rows, 6, device=DEVICE) < 0.3

    def observe(model: Any) -> Any:
        torch.manual_seed(2)
        return model.observe_sequence(embedding, action, is_first, model.initial_state(rows, torch.device(DEVICE)))

    @torch.no_grad()
    def imagine(model: Any) -> Any:
        torch.manual_seed(3)
        policy = Decisions(actor, actor.noise(5, rows, device=torch.device(DEVICE)))
        return model.imagine(model.initial_state(rows, torch.device(DEVICE)), policy, 5)

    for name, call in (("OBSERVE_SEQUENCE", observe), ("IMAGINE", imagine)):
        door.open_door(True, takes_unmeasured=True)
        fast = results(rssm, call, is_plain=False, precision="fp32")
        assert f"gpu:{name}" in door.in_use()
        for ours, theirs in zip(fast, results(rssm, call, is_plain=True, precision="fp32"), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_unet_over_plans(rows: int, precision: str) -> None:
    torch.manual_seed(0)
    unet = ConditionalUNet(input_size=5, action=ActionSpec("continuous", (2,)), channels=(64, 128), level_size=32)
    unet, plan, seen = unet.to(DEVICE), torch.randn(rows, 16, 2, device=DEVICE), torch.randn(rows, 2, 5, device=DEVICE)
    level = torch.randint(100, (rows,), device=DEVICE)
    for learns in (True, False):
        door.open_door(True, takes_unmeasured=True)
        with torch.set_grad_enabled(learns):
            fast = results(unet, lambda unet: unet(plan, level, seen), is_plain=False, precision=precision)
            assert "gpu:UNET_FORWARD" in door.in_use()
            plain = results(unet, lambda unet: unet(plan, level, seen), is_plain=True, precision=precision)
        for ours, theirs in zip(fast, plain, strict=True):
            assert (
                float((ours - theirs).norm()) <= (0.02 if precision == "fp32" else 0.15) * float(theirs.norm()) + 1e-4
            )


def tdmpc2(precision: str) -> Any:
    """Its published size of 5 million parameters, with weights that all matter."""
    settings = ["size=tdmpc2/5m", "components.continue_head=null", f"runtime.device={DEVICE}", "runtime.fast_paths=all"]
    config = compose("tdmpc2", [*settings, f"runtime.precision={precision}"])
    spec = EnvSpec("shapes", {"vector": ArraySpec((24,), "float32")}, ActionSpec("continuous", (6,)))
    torch.manual_seed(0)
    workflow = build_agent(config, spec, runtime=build_runtime(config)).workflow
    shake(workflow)
    return workflow


@torch.no_grad()
def shake(workflow: Any) -> None:
    generator = torch.Generator(DEVICE).manual_seed(5)
    for part in (workflow.dynamics, workflow.reward_head, workflow.critic, workflow.actor):
        for parameter in part.parameters():
            parameter.add_(torch.randn(parameter.shape, device=DEVICE, generator=generator) * 0.02)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("count", [1, 3, 16])  # few rows, more of them, and as many as cuBLAS multiplies
@torch.no_grad()
def test_plans_of_tdmpc2(count: int, precision: str) -> None:
    workflow = tdmpc2(precision)
    latent = torch.softmax(torch.randn(count, workflow.latent_size // 8, 8, device=DEVICE), dim=-1).flatten(1)
    plans, found = torch.rand(count, CANDIDATES, 3, 6, device=DEVICE) * 2.0 - 1.0, []
    for is_plain in (False, True):
        torch.manual_seed(1)
        low = workflow.context.runtime.autocast() if not is_plain else nullcontext()
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32" and not is_plain
        with low, door.plain_formulas() if is_plain else nullcontext():
            score = workflow.scores(latent, None)
            found.append([score(plans), score(plans.flip(1)), workflow.proposed_plans(latent, 3)])
    assert {"gpu_plans:SCORES", "gpu_plans:PROPOSED_PLANS"} <= door.in_use().keys()
    for ours, theirs in zip(*found, strict=True):
        assert float(theirs.std()) > 1e-3, "plans that are all worth the same compare nothing"
        error = float((ours - theirs).norm() / theirs.norm())
        assert error <= (0.02 if precision == "tf32" else 0.1), error


@pytest.mark.parametrize("count", [1, 16])
@torch.no_grad()
def test_a_replayed_search_reads_the_parameters_as_they_are(count: int) -> None:
    workflow = tdmpc2("tf32")
    rows = {"vector": torch.randn(count, 24, device=DEVICE), "previous plan": torch.zeros(count, 3, 6, device=DEVICE)}

    def plan(respond: Any) -> Tensor:
        torch.manual_seed(1)
        return respond(rows, {}, mode="train")["plan"].clone()

    for _ in range(5):
        old = plan(workflow.respond)
    shake(workflow)
    new = plan(workflow.respond)
    assert not torch.allclose(new, old, atol=1e-2)
    torch.testing.assert_close(new, plan(workflow.respond.method), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [1, 16])
@torch.no_grad()
def test_the_best_plans(count: int) -> None:
    torch.manual_seed(0)
    planner, found = MPPIPlanner(candidates=CANDIDATES, best=64), []
    plans = torch.rand(count, CANDIDATES, 3, 6, device=DEVICE)
    scores = torch.randn(count, CANDIDATES, device=DEVICE) * 3.0
    scores[:, 7], scores[:, 9] = torch.nan, torch.inf
    door.open_door(True, takes_unmeasured=True)
    for is_plain in (False, True):
        with door.plain_formulas() if is_plain else nullcontext():
            found.append(planner.refit(plans, scores, None))
    assert "gpu_plans:REFIT" in door.in_use()
    assert torch.equal(found[0].plans, found[1].plans)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_step_of_the_sampler() -> None:
    torch.manual_seed(0)
    schedule, found = SquaredCosineSchedule(levels=100).to(DEVICE), []
    noisy, noise = torch.randn(2, 3, 16, 2, device=DEVICE).unbind()
    door.open_door(True, takes_unmeasured=True)
    for is_plain in (False, True):
        with door.plain_formulas() if is_plain else nullcontext():
            found.append([DDIMSampler(steps=10).step(schedule, noisy, noise, *each) for each in ((90, 80), (0, -1))])
    assert "gpu:DDIM_STEP" in door.in_use()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
