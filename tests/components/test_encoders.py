"""Observations of every kind become one feature vector."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.types import ArraySpec, Batch, ConfigError

VECTOR = {"vector": ArraySpec((4,), "float32")}
EVERYTHING = {
    "camera": ArraySpec((16, 16, 3), "uint8"),
    "joints": ArraySpec((2, 3), "float32"),
    "speed": ArraySpec((), "float32"),
    "room": ArraySpec((), "int64", num_values=(5,)),
    "cards": ArraySpec((2,), "int64", num_values=(3, 2)),
    "bytes": ArraySpec((2,), "uint8"),
    "action_mask": ArraySpec((4,), "int64", num_values=(2, 2, 2, 2)),
}


def a_row(*leading: int) -> Batch:
    return {
        "camera": torch.randint(0, 256, (*leading, 16, 16, 3), dtype=torch.uint8),
        "joints": torch.randn(*leading, 2, 3),
        "speed": torch.randn(leading),
        "room": torch.randint(0, 5, leading),
        "cards": torch.randint(0, 2, (*leading, 2)),
        "bytes": torch.randint(0, 256, (*leading, 2), dtype=torch.uint8),
    }


def raw(*keys: str) -> ObservationEncoder:
    return ObservationEncoder(observation=EVERYTHING, hidden_sizes=(), keys=keys)


@pytest.mark.parametrize("leading", [(5,), (2, 3), ()])
def test_all_kinds_together_keep_any_leading_axes(leading: tuple[int, ...]) -> None:
    encoder = ObservationEncoder(observation=EVERYTHING, hidden_sizes=(8,), image_features=12)
    assert encoder(a_row(*leading)).shape == (*leading, 8)
    assert encoder.output_size == 8
    assert encoder.mlp.hidden[0].in_features == 12 + 6 + 1 + 5 + 5 + 2


def test_time_axes_change_nothing() -> None:
    encoder = ObservationEncoder(observation=EVERYTHING)
    rows = a_row(2, 3)
    flat = encoder({key: value.flatten(0, 1) for key, value in rows.items()})
    torch.testing.assert_close(encoder(rows).flatten(0, 1), flat)


def test_one_vector_goes_straight_into_the_mlp() -> None:
    encoder = ObservationEncoder(observation={**VECTOR, "action_mask": ArraySpec((2,), "int64")})
    assert encoder.plain_key == "vector"
    rows = {"vector": torch.randn(3, 4), "reward": torch.zeros(3)}
    assert torch.equal(encoder(rows), encoder.mlp(rows["vector"]))


def test_discrete_values_are_one_hot_side_by_side() -> None:
    assert raw("room")({"room": torch.tensor([3])}).tolist() == [[0, 0, 0, 1, 0]]
    assert raw("cards")({"cards": torch.tensor([[2, 1]])}).tolist() == [[0, 0, 1, 0, 1]]


def test_bytes_are_scaled_and_floats_are_not() -> None:
    encoder = raw("bytes", "speed")
    rows = {"bytes": torch.tensor([[255, 51]], dtype=torch.uint8), "speed": torch.tensor([200.0])}
    torch.testing.assert_close(encoder(rows), torch.tensor([[1.0, 0.2, 200.0]]))


def test_an_image_reaches_its_network_scaled_and_channels_first() -> None:
    encoder = raw("camera")
    image = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    network = encoder.image_networks[0]
    torch.testing.assert_close(encoder({"camera": image}), network(image.permute(0, 3, 1, 2).float() / 255.0))


def test_two_images_have_two_networks() -> None:
    specs = {"left.eye": ArraySpec((16, 16, 1), "uint8"), "right.eye": ArraySpec((40, 40, 3), "uint8")}
    encoder = ObservationEncoder(observation=specs, image_features=6, hidden_sizes=())
    rows = {key: torch.zeros(2, *spec.shape, dtype=torch.uint8) for key, spec in specs.items()}
    assert encoder(rows).shape == (2, 12)


def test_dots_in_keys_are_allowed() -> None:
    encoder = ObservationEncoder(observation={"arm.angle": ArraySpec((1,), "float32"), "b": ArraySpec((1,), "float32")})
    assert encoder({"arm.angle": torch.zeros(2, 1), "b": torch.zeros(2, 1)}).shape == (2, 64)


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no observation 'vectr'; it has vector. Did you mean 'vector'"):
        ObservationEncoder(observation=VECTOR, keys=["vectr"])


def test_looking_at_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no observation is left to look at"):
        ObservationEncoder(observation={"action_mask": ArraySpec((4,), "int64")})
    with pytest.raises(ConfigError, match=r"no observation is left to look at"):
        ObservationEncoder(observation=VECTOR, keys=[])


def test_a_discrete_spec_without_counts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'cards' is discrete with shape .* counts values for 1 elements"):
        ObservationEncoder(observation={"cards": ArraySpec((2,), "int64", num_values=(3,))})


def test_nature_on_a_small_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Write image_network: small"):
        ObservationEncoder(observation=EVERYTHING, image_network="nature")
