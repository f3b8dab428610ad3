"""World Models keeps what V made of a row's image with the row: once per row, and anew where V is another one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.world_model.conv_vae import ConvVAE
from rl_lab.components.world_model.remembered_latents import RememberedLatents, text_of
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, EnvSpec, Phase, Progress
from rl_lab.utils.tree import equal
from rl_lab.workflows.world_models import WorldModels
from tests.tiny_dreamer import random_rows
from tests.tiny_world_models import TINY_WORLD_MODELS

FORWARD = ConvVAE.forward
IMAGE, ACTION = {"image": ArraySpec((16, 16, 1), "uint8")}, ActionSpec("discrete", (3,))
PHASE = Phase(name="train", type="offline", buffer="replay", progress=Progress())


def make(seed: int = 0) -> WorldModels:
    config = compose("world_models_follow", [*TINY_WORLD_MODELS, f"seed={seed}"])
    torch.manual_seed(seed)
    workflow = build_agent(config, EnvSpec("none", IMAGE, ACTION), runtime=build_runtime(config)).workflow
    assert isinstance(workflow, WorldModels)
    return workflow


def rows_of(workflow: WorldModels) -> Batch:
    """Four sequences of nine rows that V has not looked at."""
    rows = random_rows(IMAGE, ACTION, size=4, length=9)
    blank = workflow.latents.blank(36, torch.device("cpu"))
    return rows | {key: value.unflatten(0, (4, 9)) for key, value in blank.items()}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images V was shown, by the call."""
    counts: list[int] = []
    encode = RememberedLatents.encode

    def counted(self: RememberedLatents, images: Tensor) -> Tensor:
        counts.append(images.shape[:-3].numel())
        return encode(self, images)

    monkeypatch.setattr(RememberedLatents, "encode", counted)
    return counts


def test_an_image_is_encoded_once_and_only_where_the_row_is_not_known(encoded: list[int]) -> None:
    workflow = make()
    rows = rows_of(workflow)
    expected = workflow.vae(rows)
    torch.testing.assert_close(workflow.latents.of_rows(rows), expected)
    again = workflow.latents.of_rows(rows)
    assert encoded == [36] and equal(again, rows["normal"])
    rows["normal_of"][1, 3:5] = 0
    rows["normal"][1, 3:5] = 7.0
    torch.testing.assert_close(workflow.latents.of_rows(rows), expected)
    assert encoded == [36, 2]


def test_the_rows_it_was_given_are_not_written_into() -> None:
    workflow = make()
    rows = rows_of(workflow)
    before = rows["normal"], rows["normal_of"]
    workflow.latents.of_rows(rows)
    assert not before[0].any() and not before[1].any()


def changed_by_hand(workflow: WorldModels, rows: Batch) -> None:
    with torch.no_grad():
        next(iter(workflow.vae.parameters())).mul_(2.0)  # type: ignore[attr-defined]


def learnt(workflow: WorldModels, rows: Batch) -> None:
    workflow.update_vae(rows, phase=PHASE)


def loaded(workflow: WorldModels, rows: Batch) -> None:
    workflow.vae.load_state_dict(make(seed=1).vae.state_dict())  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [changed_by_hand, learnt, loaded])
def test_of_another_v_every_row_is_encoded_anew(change: Any, encoded: list[int]) -> None:
    workflow = make()
    rows = rows_of(workflow)
    workflow.latents.of_rows(rows)
    change(workflow, rows)
    torch.testing.assert_close(workflow.latents.of_rows(rows), workflow.vae(rows))
    assert encoded == [36, 36]


def test_a_recorded_update_that_torch_does_not_count_is_one_too(encoded: list[int]) -> None:
    workflow = make()
    rows = rows_of(workflow)
    workflow.latents.of_rows(rows)
    next(iter(workflow.vae.parameters())).data.mul_(2.0)  # type: ignore[attr-defined]
    workflow.latents.forget()
    workflow.latents.of_rows(rows)
    assert encoded == [36, 36]


def test_the_same_parameters_are_the_same_v_in_another_process() -> None:
    first, second = make(seed=0), make(seed=1)
    assert first.latents.number != second.latents.number
    loaded(first, {})
    assert first.latents.number == second.latents.number > 0


def test_an_edited_formula_is_another_v(monkeypatch: pytest.MonkeyPatch, encoded: list[int]) -> None:
    workflow = make()
    rows = rows_of(workflow)
    workflow.latents.of_rows(rows)
    before = workflow.latents.number
    with monkeypatch.context() as patched:  # in a running program
        patched.setattr(ConvVAE, "forward", lambda self, observation: 2.0 * ConvVAE.plain_forward(self, observation))
        patched.setattr(ConvVAE, "plain_forward", FORWARD, raising=False)
        torch.testing.assert_close(workflow.latents.of_rows(rows), 2.0 * FORWARD(workflow.vae, rows))
    with monkeypatch.context() as patched:  # in its file, between two parts of a run
        patched.setattr(inspect, "getsource", lambda kind: "class ConvVAE: another")
        workflow.latents.forget()
        assert workflow.latents.number != before
    assert encoded == [36, 36]


def test_a_class_without_a_file_is_told_apart_by_its_code() -> None:
    one, other = (type("Typed", (), {"forward": forward}) for forward in (lambda x: x + 1, lambda x: x * 2))
    assert text_of(one) != text_of(other)


def test_rows_without_a_place_for_it_are_encoded_every_time(encoded: list[int]) -> None:
    workflow = make()
    rows = random_rows(IMAGE, ACTION, size=4, length=9)
    for _ in range(2):
        workflow.update_memory(rows, phase=PHASE)
    assert encoded == [36, 36] and "normal" not in rows


def test_m_learns_the_same_whether_latents_are_remembered_or_not() -> None:
    losses = []
    for remembers in (True, False):
        torch.manual_seed(0)
        workflow = make()
        rows = rows_of(workflow) if remembers else random_rows(IMAGE, ACTION, size=4, length=9)
        torch.manual_seed(1)
        losses.append([workflow.update_memory(dict(rows), phase=PHASE) for _ in range(3)])
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other)


def test_a_run_encodes_each_row_of_its_replay_once_and_those_of_its_own_controller_never(encoded: list[int]) -> None:
    words = [*TINY_WORLD_MODELS, "logging.tensorboard=false", "evaluation.final_episodes=0"]
    collect = "buffer: replay, workflow_hooks: [], collect_steps: 16, duration_steps: 64"
    learn = "{name: %s, type: offline, buffer: replay, workflow_hooks: [%s], duration_updates: %d}"
    phases = [
        f"{{name: collect, controller: random, {collect}}}",
        learn % ("vae", "update_vae", 2),
        f"{{name: own, {collect}}}",
        learn % ("memory", "update_memory", 40),
    ]
    experiment = build(
        compose("world_models_follow", [*words, f"training.phases=[{', '.join(phases)}]"]), run=None, quiet=True
    )
    try:
        experiment.orchestrator.run()
    finally:
        experiment.close()
    assert 0 < sum(encoded) <= 80  # rows of the random controller, those where an episode ended, and the pending ones
