"""The image networks of DreamerV3 against the operations of their paper, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rl_lab.components.world_model.decoder import DoublingCNN

STYLE = {"depth": 2, "multipliers": (2, 3), "kernel": 5, "activation": "silu", "norm": "rms"}


def test_the_error_of_an_image_is_summed_over_everything_on_the_scale_of_0_to_1() -> None:
    torch.manual_seed(0)
    decoder = DoublingCNN((16, 16, 3), deter=8, stoch_size=6, units=4, blocks=2, **STYLE)  # type: ignore[arg-type]
    torch.nn.init.zeros_(decoder.output.weight)  # sigmoid(0) is half of 255
    seen = torch.full((2, 16, 16, 3), 255, dtype=torch.uint8)
    assert decoder.error(torch.randn(2, 14), seen).tolist() == [0.25 * 16 * 16 * 3] * 2


def test_pixels_are_repeated_and_then_convolved() -> None:
    torch.manual_seed(1)
    decoder = DoublingCNN((12, 12, 1), deter=8, stoch_size=6, units=4, blocks=2, **{**STYLE, "multipliers": (2,)})  # type: ignore[arg-type]
    small: list[torch.Tensor] = []
    decoder.first_norm.register_forward_hook(lambda module, inputs, output: small.append(output))
    drawn = decoder(torch.randn(3, 14))
    doubled = F.silu(small[0]).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).permute(0, 3, 1, 2)
    expected = F.conv2d(doubled, decoder.output.weight, decoder.output.bias, padding=2).permute(0, 2, 3, 1)
    torch.testing.assert_close(drawn, expected)


def test_blocks_that_do_not_divide_the_channels_of_small_images_become_fewer() -> None:
    """As size 1m has them for images of 16x16: 12 channels in 8 blocks."""
    style = {**STYLE, "depth": 4}
    decoder = DoublingCNN((16, 16, 3), deter=16, stoch_size=6, units=4, blocks=8, **style)  # type: ignore[arg-type]
    assert decoder.blocks == 4 and decoder(torch.randn(2, 22)).shape == (2, 16, 16, 3)
