"""Target network, segments, world, debug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.training.gradients import Segments, SegmentsByMembers
from rl_lab.training.target_network import TargetNetwork, frozen
from rl_lab.training.world import World
from rl_lab.types import ConfigError


def constant(value: float) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("seen", torch.tensor(value))
    nn.init.constant_(module.weight, value)
    return module


def weight(target: TargetNetwork) -> float:
    return next(target.module.parameters()).item()


def test_a_soft_target_moves_by_its_rate() -> None:
    target, online = TargetNetwork(constant(0.0), rate=0.25), constant(4.0)
    target.follow(online)
    assert weight(target) == 1.0
    target.follow(online)
    assert weight(target) == 1.75
    assert target.module.seen.item() == 4.0
    assert target(torch.ones(1)).item() == 1.75


def test_a_hard_target_copies_every_so_often() -> None:
    target, online = TargetNetwork(constant(0.0), every=3), constant(4.0)
    seen = []
    for _ in range(4):
        target.follow(online)
        seen.append(weight(target))
    assert seen == [0.0, 0.0, 4.0, 4.0]


def test_a_target_learns_nothing_and_leaves_its_model_alone() -> None:
    online = constant(1.0)
    target = TargetNetwork(online)
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert all(parameter.requires_grad for parameter in online.parameters())


def test_the_count_of_a_target_survives_a_save() -> None:
    online = constant(4.0)
    target, restored = TargetNetwork(constant(0.0), every=2), TargetNetwork(constant(0.0), every=2)
    target.follow(online)
    restored.load_state_dict(target.state_dict())
    restored.follow(online)
    assert weight(restored) == 4.0


def test_a_target_follows_whichever_module_it_is_given() -> None:
    target = TargetNetwork(constant(0.0), rate=0.5)
    for online, expected in ((constant(4.0), 2.0), (constant(8.0), 5.0)):
        target.follow(online)
        assert weight(target) == expected
        assert target.module.seen.item() == online.seen.item()
    restored = TargetNetwork(constant(0.0), rate=0.5)
    restored.load_state_dict(target.state_dict())  # the pairs remembered for speed are no part of the state
    restored.follow(constant(7.0))
    assert weight(restored) == 6.0


@pytest.mark.parametrize(("rate", "every"), [(0.0, 1), (1.5, 1), (0.5, 0)])
def test_impossible_targets_are_refused(rate: float, every: int) -> None:
    with pytest.raises(ConfigError, match=rf"rate is {rate} and every is {every}; allowed is 0 < rate <= 1"):
        TargetNetwork(constant(0.0), rate=rate, every=every)


def test_segments_scale_each_tensor_by_its_own_number() -> None:
    tensors = [torch.randn(shape) for shape in ((3, 50), (), (64,), (2, 2, 2))]  # 3 rows, then 1 each
    segments = Segments(tensors)
    block = segments.take(tensors)
    assert block.shape == (6, 64)
    block.mul_(segments.by_row(torch.tensor([2.0, 3.0, 5.0, 7.0])))
    for view, tensor, factor in zip(segments.views, tensors, (2.0, 3.0, 5.0, 7.0), strict=True):
        assert torch.equal(view, tensor * factor)
    assert segments.owner_of_row.tolist() == [0, 0, 0, 1, 2, 3]


def test_segments_lie_as_their_tensors_do() -> None:
    kernel = torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last)
    columns = torch.randn(4, 6).t()
    every_other = torch.randn(3, 8)[:, ::2]  # has gaps: there is room for its numbers alone
    segments = Segments([kernel, columns, every_other])
    assert [view.stride() for view in segments.views] == [kernel.stride(), columns.stride(), (4, 1)]
    segments.take([kernel, columns, every_other])
    for view, tensor in zip(segments.views, (kernel, columns, every_other), strict=True):
        assert torch.equal(view, tensor)


def test_scratch_space_is_made_once_per_set_of_tensors() -> None:
    rooms, tensors = SegmentsByMembers(), [torch.ones(2), torch.ones(3)]
    assert rooms.of(tensors) is rooms.of(list(tensors))
    assert rooms.of(tensors[:1]) is not rooms.of(tensors)


def test_a_world_of_one_agrees_with_itself() -> None:
    world, tensors = World(), [torch.ones(1)]
    assert (world.rank, world.size) == (0, 1)
    assert world.mean(tensors) is tensors
    assert world.broadcast("anything") == "anything"


def test_frozen_modules_pass_gradients_on_and_take_none() -> None:
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 1)
    with frozen(outer):
        outer(inner(torch.ones(1, 2))).sum().backward()
    assert inner.weight.grad is not None and outer.weight.grad is None
    assert outer.weight.requires_grad


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.full((2, 2), 3.0))),
        lambda model: model.__setitem__(0, nn.Linear(2, 2)),
        lambda model: model[1].register_buffer("running_mean", torch.full((2,), 3.0)),
    ],
    ids=["parameter", "module", "buffer"],
)
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_target_network_follows_what_was_replaced(rate: float, replace: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    target = TargetNetwork(model, rate=rate)
    target.follow(model)
    replace(model)
    before = {name: value.clone() for name, value in target.module.state_dict().items()}
    target.follow(model)
    for name, wanted in model.state_dict().items():
        moves = rate if name in dict(model.named_parameters()) else 1.0
        expected = before[name] + moves * (wanted - before[name])
        torch.testing.assert_close(target.module.state_dict()[name], expected.to(wanted.dtype))
