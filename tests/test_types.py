"""The words every layer shares."""

from __future__ import annotations

import pytest
import torch

from rl_lab.types import ActionSpec, ArraySpec, Counts, EnvSpec, LossOutput, did_you_mean


def test_counts_add_field_by_field() -> None:
    total = Counts(env_frames=4, agent_steps=2, episodes=1) + Counts(env_frames=8, agent_steps=4, updates=3)
    assert total.as_dict() == {"env_frames": 12, "agent_steps": 6, "episodes": 1, "updates": 3}


def test_the_nearest_spelling_or_nothing() -> None:
    assert did_you_mean("discout", ["discount", "epochs"]) == " Did you mean 'discount'?"
    assert did_you_mean("zzz", ["discount"]) == ""
    assert did_you_mean("ppo", []) == ""


def test_a_total_loss_is_the_scaled_sum() -> None:
    terms = {"policy": torch.tensor(2.0), "value": torch.tensor(10.0), "entropy": torch.tensor(100.0)}
    assert LossOutput(terms).total({"policy": 1.0, "value": 0.5, "entropy": 0.0}).item() == 7.0
    assert LossOutput(terms).total({"policy": 0.0, "value": 0.0, "entropy": 0.0}).item() == 0.0


@pytest.mark.parametrize("scales", [{"policy": 1.0}, {"policy": 1.0, "value": 1.0, "other": 1.0}])
def test_every_term_has_a_scale_and_every_scale_a_term(scales: dict[str, float]) -> None:
    loss = LossOutput({"policy": torch.tensor(1.0), "value": torch.tensor(1.0)})
    with pytest.raises(AssertionError, match=r"loss terms \['policy', 'value'\] != scales"):
        loss.total(scales)


def test_gradients_flow_through_the_total() -> None:
    weight = torch.ones((), requires_grad=True)
    LossOutput({"a": weight * 3.0, "b": weight * 5.0}).total({"a": 1.0, "b": 2.0}).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 13.0


@pytest.mark.parametrize(
    ("spec", "shape", "dtype"),
    [
        (ActionSpec("discrete", (4,)), (), "int64"),
        (ActionSpec("multi_discrete", (3, 4)), (2,), "int64"),
        (ActionSpec("continuous", (6,)), (6,), "float32"),
    ],
)
def test_the_shape_of_one_action(spec: ActionSpec, shape: tuple[int, ...], dtype: str) -> None:
    assert (spec.shape, spec.dtype) == (shape, dtype)


def test_dtype_decides_what_an_observation_is() -> None:
    assert ArraySpec((64, 64, 3), "uint8").is_image
    assert not ArraySpec((64, 64), "uint8").is_image
    assert not ArraySpec((64, 64, 3), "float32").is_image
    assert ArraySpec((), "int64", num_values=(5,)).is_discrete


def test_an_environment_says_whether_it_masks_actions() -> None:
    vector, mask = ArraySpec((3,), "float32"), ArraySpec((4,), "bool")
    assert not EnvSpec("x", {"vector": vector}, ActionSpec("discrete", (4,))).has_action_mask
    assert EnvSpec("x", {"vector": vector, "action_mask": mask}, ActionSpec("discrete", (4,))).has_action_mask
