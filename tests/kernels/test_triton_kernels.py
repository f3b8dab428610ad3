"""The Triton kernels equal the plain ones: on a GPU, or on a CPU through Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from rl_lab.components.world_model.image_stages import _ImageError, distance_to_image, draw_image  # noqa: E402
from rl_lab.kernels import plain as plain_kernels  # noqa: E402
from rl_lab.kernels.triton import elementwise as triton_kernels  # noqa: E402
from rl_lab.kernels.triton import images as image_kernels  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
BATCH, BLOCKS, WIDTH, GROUPS, CLASSES = 5, 3, 12, 4, 6
DETER, STOCH = BLOCKS * WIDTH, GROUPS * CLASSES


@pytest.fixture
def draw() -> object:
    torch.manual_seed(0)
    return lambda *shape: torch.randn(*shape, device=DEVICE)


def both(name: str, arguments: list[Tensor | None], outputs: list[int], **constants: object) -> None:
    """Call both with copies of the arguments; those at `outputs` must end up equal, and so must what is returned."""
    results = []
    for kernels in (plain_kernels, triton_kernels if hasattr(triton_kernels, name) else image_kernels):
        given = [None if each is None else each.clone() for each in arguments]
        returned = getattr(kernels, name)(*given, **constants)
        found = [] if returned is None else list(returned) if isinstance(returned, tuple) else [returned]
        results.append([given[index] for index in outputs] + found)
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm_and_silu(draw, segments: int, with_bias: bool) -> None:  # type: ignore[no-untyped-def]
    size = segments * WIDTH
    bias = draw(size) if with_bias else None
    both("norm_silu", [draw(BATCH, size), bias, draw(size), draw(BATCH, size)], [3], segments=segments, epsilon=1e-4)
    for wants_parameters in (False, True):
        both(
            "norm_silu_backward",
            [draw(BATCH, size), bias, draw(size), draw(BATCH, size), draw(BATCH, size)],
            [4],
            segments=segments,
            epsilon=1e-4,
            wants_parameters=wants_parameters,
        )


@pytest.mark.parametrize("has_next", [False, True])
def test_gates(draw, has_next: bool) -> None:  # type: ignore[no-untyped-def]
    gates, bias, before = draw(BLOCKS, BATCH, 3, WIDTH), draw(3 * DETER), draw(BATCH, DETER)
    keep = (draw(BATCH) > 0).float() if has_next else None
    following = draw(BATCH, DETER) if has_next else None
    both(
        "gate", [gates, bias, before, keep, before, before, following, following], [4, 5, *([6, 7] if has_next else [])]
    )
    both(
        "gate_backward",
        [gates, bias, before, draw(BATCH, DETER), draw(BATCH, DETER), following, following, keep, gates, before],
        [8, 9],
    )


@pytest.mark.parametrize("has_next", [False, True])
@pytest.mark.parametrize("has_noise", [False, True])
def test_choice(draw, has_next: bool, has_noise: bool) -> None:  # type: ignore[no-untyped-def]
    noise = draw(BATCH, STOCH).abs() + 0.1 if has_noise else None
    keep = (draw(BATCH) > 0).float() if has_next else None
    following = draw(BATCH, STOCH) if has_next else None
    rows = draw(BATCH, STOCH)
    both(
        "sample",
        [draw(BATCH, STOCH), draw(STOCH), noise, keep, rows, rows, following],
        [4, 5, *([6] if has_next else [])],
        groups=GROUPS,
        unimix=0.01,
    )
    both(
        "sample_backward",
        [draw(BATCH, STOCH), draw(BATCH, STOCH), draw(BATCH, STOCH), following, keep, rows],
        [5],
        groups=GROUPS,
        unimix=0.01,
    )


@pytest.mark.parametrize("channels", [6, 48])
def test_between_convolutions(draw, channels: int) -> None:  # type: ignore[no-untyped-def]
    bias, weight = draw(channels), draw(channels)
    small, large = draw(2, 3, 5, channels), draw(2, 6, 10, channels)
    phases = draw(2, 3, 5, 2, 2, channels)
    both("pool_norm_silu", [large, bias, weight, small], [3], epsilon=1e-4)
    both("pool_norm_silu_backward", [large, bias, weight, small, large], [4], epsilon=1e-4)
    both("spread_norm_silu", [phases, bias, weight, large], [3], epsilon=1e-4)
    both("spread_norm_silu_backward", [phases, bias, weight, large, phases], [4], epsilon=1e-4)


@pytest.mark.parametrize("shape", [(1, 3), (700, 2, 12)])
def test_the_total_of_what_programs_found(draw, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    partial = draw(*shape)
    torch.testing.assert_close(triton_kernels.total(partial), partial.sum(dim=0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("channels", [8, 24])
def test_pixels_are_centred_scaled_and_filled_up(channels: int) -> None:
    image = torch.tensor([0, 51, 255, 102, 204, 0], dtype=torch.uint8, device=DEVICE).view(1, 2, 1, 3)
    filled = image_kernels.pixels(image, channels, torch.float32)
    expected = torch.tensor([[-0.5, -0.3, 0.5], [-0.1, 0.3, -0.5]], device=DEVICE).view(1, 2, 1, 3)
    torch.testing.assert_close(filled[..., :3], expected)
    assert filled.shape == (1, 2, 1, channels) and not filled[..., 3:].any()


@pytest.mark.parametrize(("channels", "filled"), [(3, 16), (2, 8), (1, 4), (9, 40)])
def test_the_error_of_an_image_and_its_slopes(draw, channels: int, filled: int) -> None:  # type: ignore[no-untyped-def]
    phases, bias = draw(5, 7, 11, filled), draw(channels)  # more pixels than one program holds at once
    target = torch.randint(0, 256, (5, 14, 22, channels), dtype=torch.uint8, device=DEVICE)
    weight = draw(5)
    phases.requires_grad_()
    bias.requires_grad_()
    expected = distance_to_image(draw_image(phases, bias), target)
    (expected * weight).sum().backward()
    found = image_kernels.image_error(phases.detach(), bias.detach(), target)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    slopes = image_kernels.image_error_backward(phases.detach(), bias.detach(), target, weight)
    torch.testing.assert_close(slopes[0], phases.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slopes[1], bias.grad, rtol=1e-5, atol=1e-5)
    own = [each.detach().clone().requires_grad_() for each in (phases, bias)]  # and as the node that learning uses
    (_ImageError.apply(*own, target) * weight).sum().backward()
    for each, slope in zip(own, slopes, strict=True):
        torch.testing.assert_close(each.grad, slope, rtol=0.0, atol=0.0)
