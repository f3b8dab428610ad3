"""Every fast path that needs a GPU: what it stands for and when it fits. What runs then is in `triton/`.

This module imports without Triton, and so do the formulas that name it; a kernel is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.kernels.door import FastPath, find, is_unchanged

LAYERS, RSSM, LATENTS, HEADS, TWO_HOT, IMPLICIT, ENCODER, DECODER, DISTRIBUTIONS = (
    *(
        f"rl_lab.components.world_model.{each}"
        for each in ("layers", "rssm", "latents", "heads", "two_hot", "implicit")
    ),
    *(f"rl_lab.components.{each}" for each in ("world_model.encoder", "world_model.decoder", "heads.distributions")),
)
UNET, EMBEDDING, SCHEDULE = (f"rl_lab.components.diffusion.{each}" for each in ("unet", "embedding", "schedule"))


def on_gpu(tensor: Tensor) -> bool:
    """Whether Triton kernels can read this tensor."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def kernel(place: str) -> Callable[..., Any]:
    """The function `module:name` of `triton/`, imported when it is called."""

    def run(*args: Any, **keywords: Any) -> Any:
        return find(f"rl_lab.kernels.triton.{place}")(*args, **keywords)

    return run


# --- layers ---------------------------------------------------------------------------------------


def is_rms_silu(norm: Any, activation: Any) -> bool:
    """Whether a norm and an activation are those of DreamerV3."""
    return activation is F.silu and is_unchanged(norm, f"{LAYERS}:RMSNorm", "forward")


def is_standard_layer(layer: Any) -> bool:
    """Whether a layer is linear, RMS norm, SiLU."""
    return (
        is_unchanged(layer, f"{LAYERS}:Layer", "forward")
        and is_unchanged(layer.linear, "torch.nn:Linear", "forward")
        and is_rms_silu(layer.norm, layer.activation)
    )


LAYER = FastPath(
    run=kernel("elementwise:layer"),
    fits=lambda layer, features: on_gpu(features) and is_standard_layer(layer),
    formulas=(f"{LAYERS}:Layer.forward", f"{LAYERS}:RMSNorm.forward"),
)

# --- the recurrent state-space model --------------------------------------------------------------

CELL_FORMULAS = (
    f"{RSSM}:RSSM.encode_action",
    f"{RSSM}:BlockGRU.forward",
    f"{LAYERS}:BlockLinear.forward",
    *LAYER.formulas,
    f"{LATENTS}:CategoricalLatent.sample",
    f"{LATENTS}:CategoricalLatent.probs",
    f"{LATENTS}:CategoricalLatent.noise",
)


def has_standard_cell(rssm: Any) -> bool:
    """Whether recurrence and latent are those of DreamerV3."""
    cell = rssm.cell
    return (
        is_unchanged(rssm, f"{RSSM}:RSSM", "_observe", "imagine_step", "prior", "features", "encode_action")
        and is_unchanged(cell, f"{RSSM}:BlockGRU", "forward")
        and is_unchanged(rssm.latent, f"{LATENTS}:CategoricalLatent", "sample", "probs")
        and is_rms_silu(cell.mix_norm, cell.activation)
        and all(is_standard_layer(each) for each in (cell.from_deter, cell.from_stoch, cell.from_action))
        and all(is_unchanged(each, f"{LAYERS}:BlockLinear", "forward") for each in (cell.mix, cell.gates))
    )


def fits_observe_sequence(rssm: Any, embedding: Tensor, action: Tensor, is_first: Tensor, state: Any) -> bool:
    return (
        on_gpu(embedding)
        and has_standard_cell(rssm)
        and is_standard_layer(rssm.posterior_layer)
        and len(rssm.posterior_stack.layers) == 0
        and not any(each.requires_grad for each in state.values())
    )


def fits_imagine(rssm: Any, start: Any, policy: Any, horizon: int, *, deterministic: bool = False) -> bool:
    return on_gpu(start["deter"]) and not torch.is_grad_enabled() and has_standard_cell(rssm)


def fits_features(rssm: Any, state: Any) -> bool:
    """A dream, whose deter and stoch are views of one tensor, side by side."""
    left, right = state["deter"], state["stoch"]
    return (
        on_gpu(left)
        and not torch.is_grad_enabled()
        and left.dtype == right.dtype
        and left.stride() == right.stride()
        and left.stride(-1) == 1
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.shape[-1] == right.storage_offset()
    )


def features(rssm: Any, state: Any) -> Tensor:
    """A view of both: nothing is copied."""
    deter: Tensor = state["deter"]
    return deter.as_strided((*deter.shape[:-1], rssm.output_size), deter.stride())


OBSERVE_SEQUENCE = FastPath(
    run=kernel("recurrence:observe_sequence"),
    fits=fits_observe_sequence,
    formulas=(f"{RSSM}:RSSM.observe_sequence", f"{RSSM}:RSSM._observe", *CELL_FORMULAS),
)
IMAGINE = FastPath(
    run=kernel("dream:imagine"),
    fits=fits_imagine,
    formulas=(
        f"{RSSM}:RSSM.imagine",
        f"{RSSM}:RSSM.imagine_step",
        f"{RSSM}:RSSM.prior",
        f"{RSSM}:RSSM.features",
        f"{RSSM}:Decisions.__call__",
        *CELL_FORMULAS,
        f"{HEADS}:LatentActor.decide",
        f"{HEADS}:LatentActor.forward",
        f"{HEADS}:LatentActor._log_probs",
        f"{HEADS}:LatentActor._numbers",
    ),
)
FEATURES = FastPath(run=features, fits=fits_features, formulas=(f"{RSSM}:RSSM.features",))

# --- heads ----------------------------------------------------------------------------------------


def fits_decide(actor: Any, features: Tensor, noise: Tensor) -> bool:
    return (
        on_gpu(features)
        and not torch.is_grad_enabled()
        and actor.action.kind == "continuous"
        and actor.distribution == "bounded"
        and is_unchanged(actor, f"{HEADS}:LatentActor", "forward", "_numbers")
    )


DECIDE = FastPath(
    run=kernel("heads:decide"),
    fits=fits_decide,
    formulas=(
        *(f"{HEADS}:LatentActor.{each}" for each in ("decide", "forward", "_numbers")),
        f"{DISTRIBUTIONS}:DiagonalGaussian.draw",
    ),
)
TWO_HOT_MEAN = FastPath(
    run=kernel("heads:two_hot_mean"),
    fits=lambda head: on_gpu(head.logits) and not (torch.is_grad_enabled() and head.logits.requires_grad),
    formulas=(f"{TWO_HOT}:TwoHot.mean",),
)
SYMLOG_TWO_HOT_MEAN = FastPath(
    run=kernel("heads:symlog_mean"),
    fits=lambda head: on_gpu(head.logits),
    formulas=(f"{TWO_HOT}:SymlogTwoHot.mean", f"{TWO_HOT}:TwoHot.mean"),
    is_measured=False,
)
TWO_HOT_LOSS = FastPath(
    run=kernel("heads:two_hot_loss"),
    fits=lambda head, target: on_gpu(head.logits),
    formulas=(f"{TWO_HOT}:TwoHot.loss",),
)

# --- TD-MPC2's networks ---------------------------------------------------------------------------

WIDEST_NORMED = 4096  # numbers of a row that a program holds


def fits_normed_mlp(mlp: Any, inputs: Tensor, **settings: Any) -> bool:
    simplex = mlp.simplex_size or 1
    return (
        on_gpu(inputs)
        and simplex & (simplex - 1) == 0
        and all(scale.shape[-1] <= WIDEST_NORMED and scale.dtype is torch.float32 for scale in mlp.norm_weights)
    )


NORMED_MLP = FastPath(
    run=kernel("normed:forward"), fits=fits_normed_mlp, formulas=(f"{IMPLICIT}:NormedMLP.forward",), is_measured=False
)

# --- images ---------------------------------------------------------------------------------------


def has_standard_stages(network: Any) -> bool:
    """Whether every stage is a convolution, an RMS norm and SiLU."""
    return all(is_rms_silu(norm, network.activation) for norm in network.norms) and all(
        is_unchanged(layer, "torch.nn:Conv2d", "forward") for layer in network.convolutions
    )


ENCODE_IMAGES = FastPath(
    run=kernel("images:encode"),
    fits=lambda network, image: on_gpu(image) and has_standard_stages(network),
    formulas=(f"{ENCODER}:HalvingCNN.forward", f"{LAYERS}:RMSNorm.forward"),
)
IMAGE_ERROR = FastPath(
    run=kernel("images:error"),
    fits=lambda network, features, target: (
        on_gpu(features)
        and is_unchanged(network, f"{DECODER}:DoublingCNN", "forward")
        and is_rms_silu(network.first_norm, network.activation)
        and has_standard_stages(network)
    ),
    formulas=(f"{DECODER}:DoublingCNN.error", f"{DECODER}:DoublingCNN.forward", f"{LAYERS}:RMSNorm.forward"),
)

# --- denoisers ------------------------------------------------------------------------------------


def fits_unet(unet: Any, plan: Tensor, level: Tensor, features: Tensor) -> bool:
    blocks = [block for pair in (*unet.down, unet.middle, *unet.up) for block in pair]
    layers = [unet.last, *(layer for block in blocks for layer in (block.first, block.second))]
    residuals = [block.residual for block in blocks if not isinstance(block.residual, nn.Identity)]
    convolutions = [unet.output, *unet.shorten, *residuals, *(layer[0] for layer in layers)]
    return (
        on_gpu(plan)
        and plan.dtype is torch.float32
        and all(is_unchanged(block, f"{UNET}:FiLMBlock", "forward") for block in blocks)
        and all(is_standard_convolution(each, "Conv1d") for each in convolutions)
        and all(is_standard_convolution(each, "ConvTranspose1d") for each in unet.lengthen)
        and all(is_norm_mish(layer) for layer in layers)
        and all(is_mish_linear(block.film) for block in blocks)
        and is_unchanged(unet.level, f"{EMBEDDING}:LevelEmbedding", "forward")
        and is_unchanged(unet.level.layers, "torch.nn:Sequential", "forward")
        and is_unchanged(unet.level.layers[0], "torch.nn:Linear", "forward")
        and is_mish_linear(unet.level.layers[1:])
        and Taps.of(unet.output) == (1, 1, 0)
    )


class Taps(NamedTuple):
    """How a convolution goes over the steps of a plan."""

    number: int
    stride: int
    padding: int

    @staticmethod
    def of(layer: Any) -> Taps:
        return Taps(layer.kernel_size[0], layer.stride[0], layer.padding[0])

    def after(self, length: int) -> int:
        """How many steps a convolution leaves."""
        return (length + 2 * self.padding - self.number) // self.stride + 1

    def before(self, length: int) -> int:
        """How many steps a transposed one makes."""
        return (length - 1) * self.stride - 2 * self.padding + self.number


def is_standard_convolution(layer: Any, kind: str) -> bool:
    methods = ("forward", "_conv_forward") if kind == "Conv1d" else ("forward", "_output_padding")
    return (
        is_unchanged(layer, f"torch.nn:{kind}", *methods)
        and (layer.groups, layer.dilation, layer.output_padding, layer.padding_mode) == (1, (1,), (0,), "zeros")
        and layer.bias is not None
        and not isinstance(layer.padding, str)
    )


def is_norm_mish(layer: Any) -> bool:
    """Whether a layer is a convolution, a group norm and Mish."""
    return (
        len(layer) == 3
        and is_unchanged(layer, "torch.nn:Sequential", "forward")
        and is_unchanged(layer[1], "torch.nn:GroupNorm", "forward")
        and is_unchanged(layer[2], "torch.nn:Mish", "forward")
        and layer[1].weight is not None
    )


def is_mish_linear(layer: Any) -> bool:
    return (
        len(layer) == 2
        and is_unchanged(layer, "torch.nn:Sequential", "forward")
        and is_unchanged(layer[0], "torch.nn:Mish", "forward")
        and is_unchanged(layer[1], "torch.nn:Linear", "forward")
        and layer[1].bias is not None
    )


UNET_FORWARD = FastPath(
    run=kernel("unet:forward"),
    fits=fits_unet,
    formulas=(f"{UNET}:ConditionalUNet.forward", f"{UNET}:FiLMBlock.forward", f"{EMBEDDING}:LevelEmbedding.forward"),
    is_measured=False,
)
DDIM_STEP = FastPath(
    run=kernel("unet:ddim_step"),
    fits=lambda sampler, schedule, noisy, noise, level, after: (
        on_gpu(noisy)
        and not torch.is_grad_enabled()
        and noisy.dtype is noise.dtype is torch.float32
        and is_unchanged(schedule, f"{SCHEDULE}:SquaredCosineSchedule", "remove_noise", "kept_at")
    ),
    formulas=(
        f"{SCHEDULE}:DDIMSampler.step",
        f"{SCHEDULE}:SquaredCosineSchedule.remove_noise",
        f"{SCHEDULE}:SquaredCosineSchedule.kept_at",
    ),
    is_measured=False,
)

# --- the optimiser --------------------------------------------------------------------------------

LAPROP = FastPath(
    run=kernel("laprop:change"),
    fits=lambda rule, members, learning_rate, divisor: (
        on_gpu(members.parameters[0])
        and isinstance(members.count, list)
        and rule.gradients_stay
        and not rule.weight_decay
        and find("rl_lab.kernels.triton.laprop:table_of")(rule, members) is not None
    ),
    formulas=("rl_lab.training.laprop:LaProp.change",),
)
