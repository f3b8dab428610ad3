"""Returns by hand first, then against a naive walk over each episode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_lab.components.returns import returns as rc
from rl_lab.types import Batch


def rows(**columns: list[float]) -> Batch:
    flags = ("is_first", "is_last", "is_terminal")
    return {
        key: torch.tensor([column], dtype=torch.bool if key in flags else torch.float64)
        for key, column in columns.items()
    }


# Row 2 ends an episode by a time limit (V2 counts), row 3 begins the next, row 5 ends it for good (V5 does not),
# row 6 begins a third that goes on after row 7.
MIXED = rows(
    reward=[0, 1, 2, 0, 4, 5, 0, 7],
    value=[10, 20, 30, 40, 50, 60, 70, 80],
    is_first=[1, 0, 0, 1, 0, 0, 1, 0],
    is_last=[0, 0, 1, 0, 0, 1, 0, 0],
    is_terminal=[0, 0, 0, 0, 0, 1, 0, 0],
)
ACTED = [0, 1, 3, 4, 6]  # rows 2 and 5 are is_last: nobody acted there


def on(batch: Batch, function: Any, **numbers: float) -> list[float]:
    result = function(batch["reward"], batch["value"], batch["is_last"], batch["is_terminal"], **numbers)
    return result[0, ACTED].tolist()


def test_lambda_return_of_mixed_ends_by_hand() -> None:
    # discount and lambda 0.5.  R1 = 2 + .5*30 = 17;  R0 = 1 + .5*(.5*20 + .5*17) = 10.25
    # R4 = 5 (terminal);  R3 = 4 + .5*(.5*50 + .5*5) = 17.75;  R6 = 7 + .5*80 = 47
    assert on(MIXED, rc.lambda_return, discount=0.5, lambda_=0.5) == [10.25, 17.0, 17.75, 5.0, 47.0]


def test_lambda_0_asks_the_critic_at_once_and_lambda_1_only_at_the_end() -> None:
    # lambda 0:  R0 = 1 + .5*20;  R1 = 2 + .5*30;  R3 = 4 + .5*50;  R4 = 5;  R6 = 7 + .5*80
    assert on(MIXED, rc.lambda_return, discount=0.5, lambda_=0.0) == [11.0, 17.0, 29.0, 5.0, 47.0]
    # lambda 1:  R1 = 2 + .5*30 = 17;  R0 = 1 + .5*17 = 9.5;  R4 = 5;  R3 = 4 + .5*5 = 6.5;  R6 = 7 + .5*80 = 47
    assert on(MIXED, rc.lambda_return, discount=0.5, lambda_=1.0) == [9.5, 17.0, 6.5, 5.0, 47.0]


def test_reward_to_go_never_crosses_a_reset() -> None:
    to_go = rc.reward_to_go(MIXED["reward"], MIXED["is_last"])
    assert to_go[0, ACTED].tolist() == [3.0, 2.0, 9.0, 5.0, 7.0]
    halved = rc.reward_to_go(MIXED["reward"], MIXED["is_last"], discount=0.5)
    assert halved[0, ACTED].tolist() == [2.0, 2.0, 6.5, 5.0, 7.0]


def test_episode_return_is_one_number_per_episode() -> None:
    whole = rc.episode_return(MIXED["reward"], MIXED["is_last"])
    assert whole[0, ACTED].tolist() == [3.0, 3.0, 9.0, 9.0, 7.0]


def test_a_single_transition_bootstraps() -> None:
    batch = rows(reward=[0, 3], value=[1, 8], is_last=[0, 0], is_terminal=[0, 0])
    flags = batch["is_last"], batch["is_terminal"]
    returns = rc.lambda_return(batch["reward"], batch["value"], *flags, discount=0.5, lambda_=0.9)
    assert returns.tolist() == [[7.0]]


def test_gradients_flow_through_a_dreamt_return() -> None:
    reward = torch.zeros(1, 3, requires_grad=True)
    never = torch.zeros(1, 3, dtype=torch.bool)
    rc.lambda_return(reward, torch.zeros(1, 3), never, never, discount=0.5, lambda_=1.0)[0, 0].backward()
    assert reward.grad is not None
    assert reward.grad.tolist() == [[0.0, 1.0, 0.5]]


def naive_lambda_return(env: dict[str, list[float]], discount: float, lambda_: float) -> list[float]:
    """Each episode walked alone, in plain Python, straight from the definition."""
    length = len(env["reward"]) - 1
    returns = [float("nan")] * length
    for t in reversed(range(length)):
        if env["is_last"][t]:
            continue
        following = env["value"][t + 1]
        if not env["is_last"][t + 1] and t + 1 < length:
            following = (1 - lambda_) * env["value"][t + 1] + lambda_ * returns[t + 1]
        alive = 0.0 if env["is_terminal"][t + 1] else 1.0
        returns[t] = env["reward"][t + 1] + discount * alive * following
    return returns


@st.composite
def rollouts(draw: st.DrawFn) -> list[dict[str, list[float]]]:
    length, batch = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    number = st.floats(-5, 5, width=32)
    envs = []
    for _ in range(batch):
        ends = draw(
            st.lists(st.sampled_from(["goes on", "goes on", "terminal", "limit"]), min_size=length, max_size=length)
        )
        reward = draw(st.lists(number, min_size=length, max_size=length))
        value = draw(st.lists(number, min_size=length, max_size=length))
        for t in range(1, length):
            if ends[t - 1] != "goes on":
                ends[t], reward[t] = "goes on", 0.0  # the row after an end is a reset
        envs.append(
            {
                "reward": reward,
                "value": value,
                "is_last": [float(end != "goes on") for end in ends],
                "is_terminal": [float(end == "terminal") for end in ends],
            }
        )
    return envs


def columns_of(envs: list[dict[str, list[float]]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kinds = {"reward": torch.float64, "value": torch.float64, "is_last": torch.bool, "is_terminal": torch.bool}
    reward, value, last, terminal = (torch.tensor([e[k] for e in envs], dtype=kind) for k, kind in kinds.items())
    return reward, value, last, terminal


@settings(max_examples=100, deadline=None)
@given(envs=rollouts(), discount=st.floats(0, 1), lambda_=st.floats(0, 1))
def test_returns_equal_a_walk_over_each_episode(
    envs: list[dict[str, list[float]]], discount: float, lambda_: float
) -> None:
    columns = columns_of(envs)
    acted = ~columns[2][:, :-1]
    returns = rc.lambda_return(*columns, discount=discount, lambda_=lambda_)
    walked = torch.tensor([naive_lambda_return(env, discount, lambda_) for env in envs], dtype=torch.float64)
    torch.testing.assert_close(returns[acted], walked[acted])


@pytest.mark.parametrize("length", [2, 3, 33, 129, 1000])
def test_long_rows_in_float32_stay_close_to_float64(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    reward, value = torch.randn(2, 4, length + 1, generator=generator, dtype=torch.float64)
    last = torch.rand(4, length + 1, generator=generator) < 0.05
    terminal = last & (torch.rand(4, length + 1, generator=generator) < 0.5)
    double = rc.lambda_return(reward, value, last, terminal, discount=0.99, lambda_=0.95)
    single = rc.lambda_return(reward.float(), value.float(), last, terminal, discount=0.99, lambda_=0.95)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)
