"""V of "World Models" (Ha and Schmidhuber 2018, arXiv:1803.10122): a variational autoencoder of single images.

    encoder    64 x 64 x 3 -> 31 x 31 x 32 -> 14 x 14 x 64 -> 6 x 6 x 128 -> 2 x 2 x 256 -> mean and log variance of z
    decoder    z -> 1 x 1 x 1024 -> 5 x 5 x 128 -> 13 x 13 x 64 -> 30 x 30 x 32 -> 64 x 64 x 3

Convolutions of stride 2 with ReLU, the last one with a sigmoid (appendix A.1). Other image sizes take other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rl_lab.types import ArraySpec, Batch, ConfigError, LossOutput


class ConvVAE(nn.Module):
    """Images `[..., height, width, C]` to a normal over latents `[..., Z]`, and back.

    A normal is its means and log variances side by side, `[..., 2 Z]`: what the networks that follow take in. Of an
    observation only the image is looked at: the one called `key`, or the only one there is.
    """

    def __init__(
        self,
        *,
        observation: Mapping[str, ArraySpec],
        key: str | None = None,
        latents: int = 32,
        channels: Sequence[int] = (32, 64, 128, 256),
        kernels_down: Sequence[int] = (4, 4, 4, 4),
        kernels_up: Sequence[int] = (5, 5, 6, 6),
    ) -> None:
        super().__init__()
        self.image_key, self.image_shape = _one_image(observation, key)
        if not len(channels) == len(kernels_down) == len(kernels_up) > 0 or latents < 1:
            raise ConfigError(
                f"components.vae has {len(channels)} channels, {len(kernels_down)} kernels_down, {len(kernels_up)} "
                f"kernels_up and {latents} latents: write lists of one length, and at least 1 latent."
            )
        height, width, image_channels = self.image_shape
        smallest = _check_sizes((height, width), kernels_down, kernels_up)
        self.latents, self.output_size = latents, 2 * latents
        down = zip(pairwise((image_channels, *channels)), kernels_down, strict=True)
        self.down = nn.ModuleList(nn.Conv2d(*pair, kernel, stride=2) for pair, kernel in down)
        self.to_normal = nn.Linear(math.prod(smallest) * channels[-1], 2 * latents)
        self.from_latent = nn.Linear(latents, 4 * channels[-1])
        up = zip(pairwise((4 * channels[-1], *reversed(channels[:-1]), image_channels)), kernels_up, strict=True)
        self.up = nn.ModuleList(nn.ConvTranspose2d(*pair, kernel, stride=2) for pair, kernel in up)

    def forward(self, observation: Batch) -> Tensor:
        """The normal over latents `[..., 2 Z]` of the image of an observation."""
        image = observation[self.image_key]
        hidden = self.pixels(image).flatten(0, -4).permute(0, 3, 1, 2)
        for layer in self.down:
            hidden = layer(hidden).relu()
        return self.to_normal(hidden.flatten(1)).float().view(*image.shape[:-3], -1)

    def decode(self, latent: Tensor) -> Tensor:
        """Latents `[..., Z]` to pixels `[..., height, width, C]` from 0 to 1."""
        hidden = self.from_latent(latent.reshape(-1, self.latents))[..., None, None]
        for layer in self.up[:-1]:
            hidden = layer(hidden).relu()
        pixels = self.up[-1](hidden).float().sigmoid().permute(0, 2, 3, 1)
        return pixels.reshape(*latent.shape[:-1], *self.image_shape)

    def pixels(self, image: Tensor) -> Tensor:
        """uint8 images on the scale 0..1."""
        return image.to(torch.float32) * (1.0 / 255.0)

    def reconstruct(self, features: Tensor) -> Batch:
        """Features `[..., F]` that begin with a latent, as the image that the environment would show."""
        return {self.image_key: (self.decode(features[..., : self.latents]) * 255.0).round().to(torch.uint8)}


def draw_latent(normal: Tensor, *, deterministic: bool = False) -> Tensor:
    """A latent `[..., Z]` of the normal `[..., 2 Z]`: drawn, or its mean."""
    mean, log_variance = normal.chunk(2, dim=-1)
    return mean if deterministic else mean + (0.5 * log_variance).exp() * torch.randn_like(mean)


def vae_loss(vae: ConvVAE, images: Batch, *, kl_tolerance: float) -> LossOutput:
    """Squared error of the reconstruction, summed over an image, and KL(N(mean, variance) || N(0, 1)) where it is above
    `kl_tolerance` nats per latent; means over images."""
    normal = vae(images)
    mean, log_variance = normal.chunk(2, dim=-1)
    seen = vae.pixels(images[vae.image_key])
    reconstruction = (vae.decode(draw_latent(normal)) - seen).square().sum(dim=(-3, -2, -1))
    kl = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(dim=-1)
    terms = {"reconstruction": reconstruction.mean(), "kl": kl.clamp(min=kl_tolerance * vae.latents).mean()}
    return LossOutput(terms, {"train/vae_kl": kl.detach().mean()})


def _one_image(observation: Mapping[str, ArraySpec], key: str | None) -> tuple[str, tuple[int, int, int]]:
    images = [name for name, spec in observation.items() if spec.is_image]
    if key is None and len(images) == 1:
        key = images[0]
    if key not in images:
        shown = ", ".join(f"{name} {spec.shape} {spec.dtype}" for name, spec in observation.items())
        cure = (
            f"write one of {', '.join(images)}."
            if images
            else ("choose an environment that shows pixels, or `algorithm=dreamer`, which takes any.")
        )
        raise ConfigError(f"components.vae.key is {key}: World Models sees one image, and there are: {shown}; {cure}")
    height, width, channels = observation[key].shape
    return key, (height, width, channels)


def _check_sizes(image: tuple[int, int], down: Sequence[int], up: Sequence[int]) -> tuple[int, int]:
    """Height and width that the encoder leaves, after checking that both networks fit the image."""
    smallest = image
    for kernel in down:
        smallest = ((smallest[0] - kernel) // 2 + 1, (smallest[1] - kernel) // 2 + 1)
    drawn = 1
    for kernel in up:
        drawn = (drawn - 1) * 2 + kernel
    if min(smallest) < 1 or image != (drawn, drawn):
        raise ConfigError(
            f"components.vae draws {drawn}x{drawn} pixels with kernels_up {list(up)} and leaves "
            f"{smallest[0]}x{smallest[1]} with kernels_down {list(down)}, but images have {image[0]}x{image[1]}: "
            "resize them with the wrapper "
            f"{{id: resize, height: {drawn}, width: {drawn}}}, or write kernels that fit. A layer up makes "
            "2 (size - 1) + kernel of a size, from 1 on; a layer down (size - kernel) / 2 + 1, and at least 1 is left."
        )
    return smallest
