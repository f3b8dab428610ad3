"""The sizes of a Dreamer are those of danijar/dreamerv3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.config.compose import compose
from rl_lab.config.construct import construct
from rl_lab.types import ActionSpec, ArraySpec

WALKER = {"vector": ArraySpec((24,), "float32")}
PIXELS = {"image": ArraySpec((64, 64, 3), "uint8")}


@pytest.mark.parametrize(
    ("size", "observation", "millions"),
    [
        ("1m", WALKER, 0.64),  # as danijar/dreamerv3 counts them for 24 numbers to 6 actions
        ("12m", WALKER, 9.7),
        ("12m", PIXELS, 10.5),
        ("50m", PIXELS, 41.7),
    ],
)
def test_sizes_have_the_parameters_of_the_reference(
    size: str, observation: dict[str, ArraySpec], millions: float
) -> None:
    config = compose("rl_lab/Counter-v0:dreamer", [f"size={size}"])
    given: dict[str, Any] = {"observation": observation, "action": ActionSpec("continuous", (6,))}
    built: dict[str, Any] = {}
    with torch.device("meta"):  # shapes without memory
        for group in ("components", "controllers"):
            for name, block in config[group].items():
                built[name] = construct(block, place=name, injected=given, parts=built)
    count = sum(p.numel() for part in built.values() if isinstance(part, nn.Module) for p in part.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize(
    ("size", "deter", "hidden", "classes", "depth", "units"),
    [
        ("1m", 512, 64, 4, 4, 64),
        ("12m", 2048, 256, 16, 16, 256),
        ("25m", 3072, 384, 24, 24, 384),
        ("50m", 4096, 512, 32, 32, 512),
        ("100m", 6144, 768, 48, 48, 768),
        ("200m", 8192, 1024, 64, 64, 1024),
        ("400m", 12288, 1536, 96, 96, 1536),
    ],
)
def test_sizes_are_those_of_the_reference(
    size: str, deter: int, hidden: int, classes: int, depth: int, units: int
) -> None:
    config = compose("rl_lab/Counter-v0:dreamer", [f"size={size}"])
    components, controllers = config["components"], config["controllers"]
    dynamics = components["dynamics"]
    assert (dynamics["deter"], dynamics["hidden"], dynamics["latent"]["classes"]) == (deter, hidden, classes)
    assert components["decoder"]["deter"] == deter
    assert {components[name]["depth"] for name in ("encoder", "decoder")} == {depth}
    blocks = [components[name] for name in ("encoder", "decoder", "reward_head", "continue_head")]
    assert {block["units"] for block in [*blocks, controllers["actor"], controllers["critic"]]} == {units}
