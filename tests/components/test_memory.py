"""Memories: unrolled equals stepped, resets forget, gradients are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_lab.components.networks.memory import GRUMemory, LSTMMemory
from rl_lab.types import ConfigError

MEMORIES = [GRUMemory, LSTMMemory]
Memory = GRUMemory | LSTMMemory


def make(kind: type[Memory], **sizes: int) -> Memory:
    torch.manual_seed(0)
    return kind(input_size=3, hidden_size=5, **sizes).double()


def rows(memory: Memory, batch: int = 4, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(batch, length, 3, generator=generator, dtype=torch.float64)
    state = torch.randn(batch, memory.state_size, generator=generator, dtype=torch.float64)
    return features, state, torch.rand(batch, length, generator=generator) < 0.3


def stepped(memory: Memory, features: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(features.shape[1]):
        output, state = memory.step(features[:, t], state, is_first[:, t])
        outputs.append(output)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("kind", MEMORIES)
def test_unroll_equals_a_loop_of_steps_with_resets_on_the_way(kind: type[Memory]) -> None:
    memory = make(kind)
    features, state, is_first = rows(memory)
    assert is_first[:, 1:].any()
    outputs, last = memory.unroll(features, state, is_first)
    expected_outputs, expected_last = stepped(memory, features, state, is_first)
    torch.testing.assert_close(outputs, expected_outputs, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, expected_last, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MEMORIES)
def test_unroll_in_float32_equals_steps_to_a_millionth(kind: type[Memory]) -> None:
    memory = make(kind).float()
    features, state, is_first = rows(memory)
    outputs, _ = memory.unroll(features.float(), state.float(), is_first)
    torch.testing.assert_close(
        outputs, stepped(memory, features.float(), state.float(), is_first)[0], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("kind", MEMORIES)
def test_gradients_of_unroll_equal_those_of_the_loop(kind: type[Memory]) -> None:
    memory = make(kind)
    features, state, is_first = rows(memory)
    weight = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    collected = []
    for unroll in (memory.unroll, lambda *arguments: stepped(memory, *arguments)):
        inputs = features.clone().requires_grad_(), state.clone().requires_grad_()
        outputs, last = unroll(*inputs, is_first)
        loss = (outputs * weight).sum() + last.square().sum()
        collected.append(torch.autograd.grad(loss, [*inputs, *memory.parameters()]))
    for ours, reference in zip(*collected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MEMORIES)
def test_gradients_equal_finite_differences(kind: type[Memory]) -> None:
    memory = make(kind)
    features, state, is_first = rows(memory, batch=2, length=3)
    assert torch.autograd.gradcheck(
        lambda f, s: memory.unroll(f, s, is_first)[0], (features.requires_grad_(), state.requires_grad_())
    )


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_first_row_forgets_everything_before_it(kind: type[Memory]) -> None:
    memory = make(kind)
    features, state, _ = rows(memory)
    first = torch.ones(4, dtype=torch.bool)
    output, _ = memory.step(features[:, 0], state * 100.0, first)
    fresh, _ = memory.step(features[:, 0], memory.initial_state(4).double(), torch.zeros(4, dtype=torch.bool))
    assert torch.equal(output, fresh)


@pytest.mark.parametrize(("kind", "state_size"), [(GRUMemory, 5), (LSTMMemory, 10)])
def test_initial_state_is_one_zero_tensor(kind: type[Memory], state_size: int) -> None:
    memory = make(kind)
    state = memory.initial_state(3, torch.device("cpu"))
    assert state.shape == (3, state_size)
    assert not state.any()
    assert memory.output_size == 5


def test_gru_agrees_with_torch() -> None:
    memory = make(GRUMemory)
    features, state, _ = rows(memory)
    reference = torch.nn.GRU(3, 5, batch_first=True).double()
    with torch.no_grad():
        reference.weight_ih_l0.copy_(memory.from_input.weight)
        reference.weight_hh_l0.copy_(memory.from_state.weight)
        reference.bias_ih_l0.copy_(memory.from_input.bias)
        reference.bias_hh_l0.copy_(memory.from_state.bias)
    outputs, _ = memory.unroll(features, state, torch.zeros(4, 7, dtype=torch.bool))
    torch.testing.assert_close(outputs, reference(features, state.unsqueeze(0))[0])


def test_lstm_agrees_with_torch() -> None:
    memory = make(LSTMMemory)
    features, state, _ = rows(memory)
    reference = torch.nn.LSTM(3, 5, batch_first=True).double()
    # torch orders input, forget, candidate, output; ours is input, forget, output, candidate.
    order = torch.cat([torch.arange(0, 10), torch.arange(15, 20), torch.arange(10, 15)])
    with torch.no_grad():
        reference.weight_ih_l0.copy_(memory.from_input.weight[order])
        reference.weight_hh_l0.copy_(memory.from_state.weight[order])
        reference.bias_ih_l0.copy_(memory.from_input.bias[order])
        reference.bias_hh_l0.copy_(memory.from_state.bias[order])
    outputs, _ = memory.unroll(features, state, torch.zeros(4, 7, dtype=torch.bool))
    hidden, cell = state.split(5, dim=1)
    expected, _ = reference(features, (hidden.unsqueeze(0).contiguous(), cell.unsqueeze(0).contiguous()))
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("kind", MEMORIES)
def test_no_graph_is_kept_without_gradients(kind: type[Memory]) -> None:
    memory = make(kind)
    features, state, is_first = rows(memory)
    with torch.no_grad():
        assert not memory.unroll(features, state, is_first)[0].requires_grad


def test_a_memory_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size is 0; allowed is a whole number from 1 on"):
        GRUMemory(input_size=3, hidden_size=0)
