"""Random shifts of images (Kostrikov et al. 2020, arXiv:2004.13649): a critic that sees the same thing a few pixels
aside learns features of the scene and not of the pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.types import ArraySpec, Batch, ConfigError


class RandomShift(nn.Module):
    """Every image moved by up to `pixels` in both directions, its edge repeated; other keys pass untouched."""

    def __init__(self, *, observation: dict[str, ArraySpec], pixels: int = 4) -> None:
        super().__init__()
        if pixels < 1:
            raise ConfigError(f"random shift: pixels is {pixels}; allowed is a whole number from 1 on. Write 4.")
        self.pixels = pixels
        self.image_keys = tuple(key for key, spec in observation.items() if spec.is_image)
        if not self.image_keys:
            raise ConfigError(
                f"random shift: no observation is an image; there are {', '.join(observation)}. "
                "Write `components.augmentation: null`."
            )

    def forward(self, observation: Batch) -> Batch:
        """The same keys; images `[B, height, width, C]` uint8 shifted, each row by an amount of its own."""
        return {key: self._shift(rows) if key in self.image_keys else rows for key, rows in observation.items()}

    def _shift(self, images: Tensor) -> Tensor:
        count, height, width = images.shape[:3]
        device = images.device
        by = torch.randint(-self.pixels, self.pixels + 1, (2, count, 1), device=device)
        row = (torch.arange(height, device=device) + by[0]).clamp_(0, height - 1)  # [B, height]
        column = (torch.arange(width, device=device) + by[1]).clamp_(0, width - 1)
        index = torch.arange(count, device=device)
        return images[index[:, None, None], row[:, :, None], column[:, None, :]]
