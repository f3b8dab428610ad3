"""Films: the open loop hears only recorded actions, reconstructions look at every row, nothing is left to chance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_lab.components.world_model.heads import Scalar
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec
from rl_lab.workflows.dreamer import Dreamer
from rl_lab.workflows.film import can_dream, make_film, while_anybody_plays
from tests.tiny_dreamer import TINY_PARTS

VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((16, 16, 3), "uint8")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (3,)), ActionSpec("continuous", (2,))
LENGTH, CONTEXT = 9, 4


def agent_of(experiment: str, observation: dict[str, ArraySpec], action: ActionSpec, *overrides: str) -> Agent:
    config = compose(experiment, [*overrides, "runtime.device=cpu"])
    return build_agent(config, EnvSpec("none", observation, action), runtime=build_runtime(config))


def dreamer(observation: dict[str, ArraySpec], action: ActionSpec) -> Any:
    """A tiny Dreamer whose reward and value heads say something, though nothing has taught them."""
    agent = agent_of("rl_lab/Counter-v0:dreamer", observation, action, *TINY_PARTS)
    for head in (agent.components["reward_head"], agent.controllers["critic"]):
        torch.nn.init.normal_(head.output.weight, generator=torch.Generator().manual_seed(1))
    return agent.workflow


def rows_of(observation: dict[str, ArraySpec], action: ActionSpec) -> Batch:
    """Two episodes of nine rows, of which the second ends with row 5."""
    generator = torch.Generator().manual_seed(7)
    rows: Batch = {
        key: torch.randn(2, LENGTH, *spec.shape, generator=generator)
        if spec.dtype == "float32"
        else torch.randint(0, 256, (2, LENGTH, *spec.shape), generator=generator, dtype=torch.uint8)
        for key, spec in observation.items()
    }
    if action.kind == "continuous":
        rows["action"] = torch.rand(2, LENGTH, *action.shape, generator=generator) * 2.0 - 1.0
    else:
        rows["action"] = torch.randint(0, 3, (2, LENGTH), generator=generator)
    rows["reward"] = torch.randn(2, LENGTH, generator=generator)
    for name in ("is_first", "is_last", "is_terminal"):
        rows[name] = torch.zeros(2, LENGTH, dtype=torch.bool)
    rows["is_first"][:, 0] = rows["is_first"][1, 6] = True
    rows["is_last"][1, 5] = rows["is_terminal"][1, 5] = True
    return rows


def observed(workflow: Dreamer, rows: Batch, sequence: int, until: int) -> Batch:
    """The state after row `until`, one row after the other."""
    state = workflow.dynamics.initial_state(1, torch.device("cpu"))
    action = torch.zeros_like(rows["action"][:1, 0])
    one = {key: values[sequence : sequence + 1] for key, values in rows.items()}
    for row in range(until + 1):
        now = {key: values[:, row] for key, values in one.items()}
        state, _ = workflow.dynamics.observe(workflow.encoder(now), action, state, now["is_first"], deterministic=True)
        action = now["action"]
    return state


@pytest.mark.parametrize(
    ("observation", "action"), [(VECTOR, DISCRETE), (VECTOR, CONTINUOUS), (IMAGE, DISCRETE)], ids=str
)
def test_the_open_loop_is_what_the_model_imagines_with_the_recorded_actions(
    observation: dict[str, ArraySpec], action: ActionSpec
) -> None:
    workflow, rows = dreamer(observation, action), rows_of(observation, action)
    film = make_film(workflow, rows, context=CONTEXT)
    (key,) = observation
    with torch.no_grad():
        for sequence in range(2):
            state = observed(workflow, rows, sequence, CONTEXT - 1)
            for row in range(CONTEXT, LENGTH):
                taken = rows["action"][sequence : sequence + 1, row - 1]
                state = workflow.dynamics.imagine_step(state, taken, None)
                features = workflow.dynamics.features(state)
                expected = workflow.decoder.reconstruct(features)[key][0].float()
                torch.testing.assert_close(
                    film["open_loop"][key][sequence, row].float(),
                    expected,
                    atol=1.001 if key == "image" else 1e-5,
                    rtol=0,
                )
                heads = {"reward": workflow.reward_head, "continue": workflow.continue_head, "value": workflow.critic}
                for name, head in heads.items():
                    number = head(features).mean()[0]
                    torch.testing.assert_close(film["open_loop"][name][sequence, row], number, atol=1e-4, rtol=1e-4)


def test_a_reconstruction_looks_at_every_row_and_begins_anew_with_an_episode() -> None:
    workflow, rows = dreamer(VECTOR, DISCRETE), rows_of(VECTOR, DISCRETE)
    film = make_film(workflow, rows, context=CONTEXT)
    with torch.no_grad():
        for row in (0, 5, 6, 8):
            features = workflow.dynamics.features(observed(workflow, rows, 1, row))
            shown = workflow.decoder.reconstruct(features)["vector"][0]
            torch.testing.assert_close(film["reconstruction"]["vector"][1, row], shown, atol=1e-5, rtol=0)


def test_until_the_context_ends_the_open_loop_is_the_reconstruction() -> None:
    film = make_film(dreamer(VECTOR, DISCRETE), rows_of(VECTOR, DISCRETE), context=CONTEXT)
    seen, dreamt = film["reconstruction"]["vector"], film["open_loop"]["vector"]
    assert torch.equal(seen[:, :CONTEXT], dreamt[:, :CONTEXT])
    assert not torch.equal(seen[:, CONTEXT:], dreamt[:, CONTEXT:])


def test_later_actions_change_the_dream_and_later_observations_do_not() -> None:
    workflow, rows = dreamer(VECTOR, DISCRETE), rows_of(VECTOR, DISCRETE)
    dreamt = make_film(workflow, rows, context=CONTEXT)["open_loop"]["vector"]
    blind = {**rows, "vector": rows["vector"].clone()}
    blind["vector"][:, CONTEXT:] = 99.0
    assert torch.equal(make_film(workflow, blind, context=CONTEXT)["open_loop"]["vector"], dreamt)
    other = {**rows, "action": (rows["action"] + 1) % 3}
    assert not torch.equal(make_film(workflow, other, context=CONTEXT)["open_loop"]["vector"], dreamt)


def test_the_real_view_says_what_came_and_where_the_episode_was_over() -> None:
    rows = rows_of(VECTOR, DISCRETE)
    real = make_film(dreamer(VECTOR, DISCRETE), rows, context=CONTEXT)["real"]
    assert set(real) == {"vector", "reward", "continue", "is_over"}
    assert torch.equal(real["vector"], rows["vector"]) and torch.equal(real["reward"], rows["reward"])
    assert real["continue"].tolist() == [[1.0] * 9, [1.0] * 5 + [0.0] + [1.0] * 3]
    assert real["is_over"].tolist() == [[False] * 9, [False] * 6 + [True] * 3]


def test_a_film_is_the_same_every_time_and_draws_no_random_number() -> None:
    workflow, rows = dreamer(IMAGE, DISCRETE), rows_of(IMAGE, DISCRETE)
    before = torch.get_rng_state()
    first, second = (make_film(workflow, rows, context=CONTEXT) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for view, values in first.items():
        assert all(torch.equal(second[view][key], value) for key, value in values.items())


def test_a_model_without_a_critic_shows_no_value() -> None:
    workflow = dreamer(VECTOR, DISCRETE)
    del workflow.critic
    film = make_film(workflow, rows_of(VECTOR, DISCRETE), context=CONTEXT)
    assert set(film["open_loop"]) == {"vector", "reward", "continue"}


@pytest.mark.parametrize("context", [0, LENGTH])
def test_a_context_that_leaves_nothing_to_dream_is_refused(context: int) -> None:
    with pytest.raises(ConfigError, match=f"context is {context}, but there are 9 rows: write a number from 1 to 8"):
        make_film(dreamer(VECTOR, DISCRETE), rows_of(VECTOR, DISCRETE), context=context)


@pytest.mark.parametrize(
    ("ends", "at_least", "length"),
    [
        ([2, 4], 3, 5),  # until the longer of the two is over
        ([0, 1], 4, 4),  # the context and a row to dream of
        ([3, None], 3, 7),  # one goes on
        ([6, 6], 3, 7),  # over with the last row
    ],
)
def test_a_film_ends_when_everybody_has_played(ends: list[int | None], at_least: int, length: int) -> None:
    is_last = torch.zeros(2, 7, dtype=torch.bool)
    for row, end in enumerate(ends):
        if end is not None:
            is_last[row, end] = True
    rows = {"is_last": is_last, "reward": torch.arange(14.0).view(2, 7)}
    found = while_anybody_plays(rows, at_least=at_least)
    assert torch.equal(found["reward"], rows["reward"][:, :length])


def test_only_workflows_with_a_world_model_can_dream() -> None:
    assert can_dream(dreamer(VECTOR, DISCRETE))
    assert not can_dream(agent_of("CartPole-v1:ppo", VECTOR, DISCRETE).workflow)


# --- a model without a decoder -----------------------------------------------------------------


def test_a_film_of_td_mpc2_tells_rewards_values_and_what_plans_promised() -> None:
    """A latent counts; the reward is the latent, the value ten times it. Discount 0.5, plans of two actions.

    row          0    1    2    3        seen      0  1  2  3      action  1  1  1  1     plan  always (2, 2)
    reward       .    5    6    7        predicted .  0  1  2      open loop from row 0 on: 0 1 2 3
    return     5+3+1.75+30/8  6+3.5+30/4  7+15  30    (bootstrapped with the value 30 of row 3)
    promised   z + 0.5 (z+2), and 0.25 * 10 (z+4) more
    """
    from tests.workflows.test_tdmpc2 import make as make_tdmpc2

    workflow, _ = make_tdmpc2(action=ActionSpec("continuous", (1,)))
    workflow.continue_head, workflow.discount = None, 0.5
    workflow.encoder = lambda observation: observation["vector"][..., :1]  # type: ignore[assignment]
    workflow.dynamics = lambda latent, action: latent + action  # type: ignore[assignment]
    workflow.reward_head = lambda latent, action: Scalar(latent)  # type: ignore[assignment]
    workflow.actor = lambda latent: SimpleNamespace(mode=lambda: latent)  # type: ignore[assignment]
    workflow.critic = lambda latent, action: Scalar(10.0 * latent.expand(2, *latent.shape))  # type: ignore[assignment]
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    rows = {
        "vector": torch.arange(4.0).view(1, 4, 1).expand(1, 4, 3),
        "action": torch.ones(1, 4, 1),
        "plan": torch.full((1, 4, 2, 1), 2.0),
        "reward": torch.tensor([[0.0, 5.0, 6.0, 7.0]]),
        "is_first": nothing,
        "is_last": nothing,
        "is_terminal": nothing,
    }
    assert can_dream(workflow)
    state = torch.get_rng_state()
    film = make_film(workflow, rows, context=1)
    assert torch.equal(state, torch.get_rng_state())
    assert film["real"]["value"][0].tolist() == pytest.approx([13.5, 17.0, 22.0, 30.0])
    assert film["real"]["planned reward"][0].tolist() == [8.0, 9.5, 7.0, 0.0]
    for view in ("reconstruction", "open_loop"):
        assert film[view]["reward"][0].tolist() == [0.0, 0.0, 1.0, 2.0]
        assert film[view]["value"][0].tolist() == [0.0, 10.0, 20.0, 30.0]
    assert film["reconstruction"]["planned reward"][0].tolist() == [1.0, 2.5, 4.0, 5.5]
    assert film["reconstruction"]["planned return"][0].tolist() == [11.0, 15.0, 19.0, 23.0]
