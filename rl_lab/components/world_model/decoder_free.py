"""World models without reconstruction: a state is to agree with its own observation's embedding instead.

     features    [B, T, F] of the states  -> projected to [R, E]      R = B * T rows of a batch
     embedding   [B, T, E] of the encoder -> as [R, E]                the target: no gradient flows back into it

Both stand where a decoder would (`decoder=infonce`, `decoder=barlow`) and cost a product instead of convolutions. They
are the losses that R2-Dreamer compares (arXiv:2603.18202; NM512/r2dreamer, dreamer.py): the encoder learns through the
states alone, or it could make the task easier by seeing nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.components.world_model.layers import dense
from rl_lab.types import Batch, ConfigError


class InfoNCE(nn.Module):
    """Which of all the batch's observations belongs to a state? (van den Oord et al. 2018, arXiv:1807.03748)"""

    def __init__(self, *, input_size: int, target_size: int) -> None:
        super().__init__()
        self.project = dense(input_size, target_size)

    def loss(self, features: Tensor, rows: Batch) -> Tensor:
        """Nats `[...]` of the cross-entropy of each state's own row among all: the log of their number at chance."""
        projected, seen = _pairs(self.project(features), rows["embedding"])
        logits = projected @ seen.t()  # [R, R]; row i is right with column i
        nats = torch.logsumexp(logits.float(), dim=-1) - logits.diagonal().float()
        return nats.view(features.shape[:-1])

    def reconstruct(self, features: Tensor) -> Batch:
        """Nothing: observations cannot be reconstructed."""
        return {}


class BarlowTwins(nn.Module):
    """Each number of the embedding correlates with one number of the state's alone (Zbontar et al. 2021,
    arXiv:2103.03230).

    redundancy: what a correlation costs between two numbers that are not each other's (R2-Dreamer's 5e-4).
    """

    def __init__(self, *, input_size: int, target_size: int, redundancy: float = 5e-4) -> None:
        super().__init__()
        if redundancy < 0.0:
            raise ConfigError(f"decoder: redundancy is {redundancy}: write a number from 0, such as 5e-4.")
        self.project = dense(input_size, target_size)
        self.redundancy = redundancy

    def loss(self, features: Tensor, rows: Batch) -> Tensor:
        """One number for the whole batch, repeated for every row `[...]`."""
        projected, seen = (_standardised(each) for each in _pairs(self.project(features), rows["embedding"]))
        correlation = (projected.t() @ seen).float() / len(projected)  # [E, E]
        own = correlation.diagonal()
        others = correlation.square().sum() - own.square().sum()
        return ((own - 1.0).square().sum() + self.redundancy * others).expand(features.shape[:-1])

    def reconstruct(self, features: Tensor) -> Batch:
        """Nothing: observations cannot be reconstructed."""
        return {}


def _pairs(projected: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Both as `[R, E]`; the second is a target."""
    return projected.flatten(0, -2), embedding.detach().flatten(0, -2)


def _standardised(rows: Tensor) -> Tensor:
    """Every column with mean 0 and std 1 over the rows."""
    rows = rows.float()
    return (rows - rows.mean(dim=0)) / (rows.std(dim=0) + 1e-8)  # a column that never changes stays 0
