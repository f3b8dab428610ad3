"""The unroll as one node equals the loop of single steps: states, posteriors and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rl_lab.components.world_model.latents import CategoricalLatent
from rl_lab.components.world_model.rssm import RSSM, State
from rl_lab.types import ActionSpec

BATCH, LENGTH, EMBEDDING = 3, 6, 7


def make_rssm(seed: int = 0) -> RSSM:
    torch.manual_seed(seed)
    action = ActionSpec(kind="continuous", sizes=(2,))
    latent = CategoricalLatent(groups=3, classes=4)
    rssm = RSSM(input_size=EMBEDDING, action=action, latent=latent, deter=8, hidden=5, blocks=2)
    with torch.no_grad():
        for parameter in rssm.parameters():  # biases and norms of their own, so that each one matters
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return rssm


@contextmanager
def step_by_step(rssm: RSSM) -> Iterator[None]:
    rssm._can_unroll_at_once = lambda: False  # type: ignore[method-assign]
    yield
    del rssm._can_unroll_at_once


def learn(rssm: RSSM, is_first: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, and the gradients of a loss that reads all of them with weights of their own."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    embedding = draw(BATCH, LENGTH, EMBEDDING).requires_grad_()
    action = draw(BATCH, LENGTH, 2)
    start: State = {"deter": draw(BATCH, 8), "stoch": draw(BATCH, 12)}
    torch.manual_seed(9)  # the same noise for everybody
    states, posterior = rssm.observe_sequence(embedding, action, is_first, start)
    outputs = {**states, "posterior": posterior}
    loss = sum((value * draw(*value.shape)).sum() for value in outputs.values())
    named = dict(rssm.named_parameters())
    assert isinstance(loss, Tensor)
    found = torch.autograd.grad(loss, [embedding, *named.values()], allow_unused=True)
    gradients = {name: g for name, g in zip(["embedding", *named], found, strict=True) if g is not None}
    return {key: value.detach() for key, value in outputs.items()}, gradients


def test_states_and_gradients_equal_those_of_single_steps_across_resets() -> None:
    rssm = make_rssm()
    is_first = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    is_first[0, 0] = is_first[1, 3] = is_first[2, LENGTH - 1] = True
    outputs, gradients = learn(rssm, is_first)
    with step_by_step(rssm):
        expected_outputs, expected_gradients = learn(rssm, is_first)
    assert gradients.keys() == expected_gradients.keys()
    assert any(name.startswith("cell.") for name in gradients)
    for name, expected in {**expected_outputs, **expected_gradients}.items():
        found = {**outputs, **gradients}[name]
        torch.testing.assert_close(found, expected, rtol=3e-5, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("length", [1, 2])
def test_short_sequences_have_no_next_row(length: int) -> None:
    rssm = make_rssm(1)
    embedding, action = torch.randn(2, length, EMBEDDING), torch.randn(2, length, 2)
    start = {"deter": torch.randn(2, 8), "stoch": torch.randn(2, 12)}
    is_first = torch.zeros(2, length, dtype=torch.bool)
    torch.manual_seed(2)
    found, _ = rssm.observe_sequence(embedding, action, is_first, start)
    with step_by_step(rssm):
        torch.manual_seed(2)
        expected, _ = rssm.observe_sequence(embedding, action, is_first, start)
    torch.testing.assert_close(found["deter"], expected["deter"])
    torch.testing.assert_close(found["stoch"].round(), expected["stoch"].round())


@pytest.mark.parametrize("deterministic", [False, True])
def test_dreams_without_a_graph_equal_dreams_with_one(deterministic: bool) -> None:
    rssm = make_rssm(2)
    start = {"deter": torch.randn(5, 8), "stoch": torch.randn(5, 12)}

    def policy(features: Tensor, step: int) -> Tensor:
        return features[:, :2] * (1.0 + step)

    torch.manual_seed(6)
    expected, expected_actions = rssm.imagine(start, policy, 4, deterministic=deterministic)
    with torch.no_grad():
        torch.manual_seed(6)
        found, actions = rssm.imagine(start, policy, 4, deterministic=deterministic)
    assert expected["deter"].requires_grad and not found["deter"].requires_grad
    torch.testing.assert_close(actions, expected_actions.detach())
    for key in start:
        torch.testing.assert_close(found[key], expected[key].detach(), rtol=1e-5, atol=1e-6)
