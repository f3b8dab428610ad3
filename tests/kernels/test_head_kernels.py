"""The kernels behind heads equal what torch computes: on a GPU, or on a CPU through Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from rl_lab.components.world_model.heads import LatentActor  # noqa: E402
from rl_lab.components.world_model.two_hot import TwoHot, symexp_bins  # noqa: E402
from rl_lab.kernels.triton import heads as head_kernels  # noqa: E402
from rl_lab.types import ActionSpec  # noqa: E402

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
BINS = symexp_bins(255)
ROWS, LENGTH = 5, 3  # 15 rows: the last program has one to spare


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, 255, generator=torch.Generator().manual_seed(0)) * 2.0


def test_means(logits: torch.Tensor) -> None:
    found = head_kernels.two_hot_mean(logits.to(DEVICE), BINS.to(DEVICE))
    torch.testing.assert_close(found.cpu(), TwoHot(logits, BINS).mean(), rtol=1e-4, atol=1e-2)


def test_mirrored_logits_mean_exactly_zero() -> None:
    mirrored = torch.randn(4, 255)
    mirrored = mirrored + mirrored.flip(-1)
    assert head_kernels.two_hot_mean(mirrored.to(DEVICE), BINS.to(DEVICE)).tolist() == [0.0] * 4


def test_losses_and_their_gradients(logits: torch.Tensor) -> None:
    # At a bin, between two, in the middle, and beyond both ends.
    target = torch.tensor(
        [[0.0, 1.5, -321.0], [float(BINS[200]), float(BINS[-1]), float(BINS[0])], [1e12, -1e12, 0.01]]
    )
    target = torch.cat((target, torch.randn(2, 3) * 50.0))
    gradient = torch.randn(ROWS, LENGTH)
    exact = logits.clone().requires_grad_()
    expected = TwoHot(exact, BINS).loss(target)
    expected.backward(gradient)
    told = (logits.to(DEVICE), target.to(DEVICE), BINS.to(DEVICE))
    found, normalizers = head_kernels.two_hot_loss(*told)
    slopes = head_kernels.two_hot_loss_backward(*told, normalizers, gradient.to(DEVICE))
    torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slopes.cpu(), exact.grad, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_lie_side_by_side(logits: torch.Tensor) -> None:
    for length in (LENGTH - 1, 1):  # one row of each: they could be read as one block with gaps
        cut, exact = logits.to(DEVICE)[:, :length], logits[:, :length].clone().requires_grad_()
        target = torch.linspace(-5.0, 5.0, ROWS * length).view(ROWS, length)
        expected, told = TwoHot(exact, BINS).loss(target), (cut, target.to(DEVICE), BINS.to(DEVICE))
        expected.sum().backward()
        found, normalizers = head_kernels.two_hot_loss(*told)
        slopes = head_kernels.two_hot_loss_backward(*told, normalizers, torch.ones_like(found))
        torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slopes.cpu(), exact.grad, rtol=1e-5, atol=1e-5)
        means = head_kernels.two_hot_mean(cut, BINS.to(DEVICE))
        torch.testing.assert_close(means.cpu(), TwoHot(logits[:, :length], BINS).mean(), rtol=1e-4, atol=1e-2)


def test_a_target_that_is_no_number_gives_a_loss_that_is_none(logits: torch.Tensor) -> None:
    target = torch.zeros(ROWS, LENGTH)
    target[2, 1] = float("nan")
    found, _ = head_kernels.two_hot_loss(logits.to(DEVICE), target.to(DEVICE), BINS.to(DEVICE))
    assert torch.equal(found.cpu().isnan(), target.isnan())


@torch.no_grad()
def test_a_bounded_action_is_what_the_actor_decides() -> None:
    actor = LatentActor(input_size=6, action=ActionSpec(kind="continuous", sizes=(3,)), units=8, output_scale=1.0)
    features, noise = torch.randn(7, 6), torch.randn(7, 3)
    hidden = actor.stack(features)
    outputs = (actor.output(hidden).to(DEVICE), actor.deviation_output(hidden).to(DEVICE))
    for drawn in (noise, noise.t().contiguous().t()):  # however the noise lies
        found = head_kernels.bounded_draw(*outputs, drawn.to(DEVICE), 0.1, 1.0)
        torch.testing.assert_close(found.cpu(), actor.decide(features, noise), rtol=1e-5, atol=1e-5)


def test_actions_are_pressed_into_the_range() -> None:
    action = torch.tensor([[-3.0, -1.0, 0.25], [0.0, 1.0, 2.0]])
    found = head_kernels.press(action.to(DEVICE), torch.float32)
    assert found.tolist() == [[-1.0, -1.0, 0.25], [0.0, 1.0, 1.0]]


@pytest.mark.gpu
def test_on_a_gpu_heads_give_what_they_give_on_a_cpu(logits: torch.Tensor) -> None:
    target = torch.linspace(-9.0, 9.0, ROWS * LENGTH).view(ROWS, LENGTH)
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        own = logits.detach().clone().to(device).requires_grad_()
        head = TwoHot(own, BINS.to(device))
        loss = head.loss(target.to(device))
        loss.sum().backward()
        assert own.grad is not None
        with torch.no_grad():
            found.append([each.cpu() for each in (loss.detach(), own.grad, head.mean())])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-2)
