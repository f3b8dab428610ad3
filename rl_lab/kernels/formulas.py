"""Where formulas stand that several fast paths compute."""

from __future__ import annotations

from typing import Any

from rl_lab.kernels.door import is_unchanged

HEADS = "rl_lab.components.heads."
ENCODER = "rl_lab.components.networks.encoders:ObservationEncoder"
MLP = "rl_lab.components.networks.encoders:MLP.forward"
STEP = (  # what hands gradients on
    "rl_lab.workflows.base:Workflow.gradient_step",
    "rl_lab.types:LossOutput.total",
    "rl_lab.training.optimizer:Optimizer.apply",
)


def reads_one_vector(encoder: Any) -> bool:
    """Whether the features are one key of the observation, as it is."""
    own = vars(encoder)
    return is_unchanged(encoder, ENCODER, "forward") and not own["has_layers"] and own["plain_key"] is not None
