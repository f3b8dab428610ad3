"""Phases from their YAML blocks: what is refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from rl_lab.config.phases import make_phase
from rl_lab.types import ConfigError

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"name": "a", "duration_step": 5},
        "training.phases.0.duration_step is unknown. Did you mean 'duration_steps'? Allowed: name, type",
    ),
    ({"duration_steps": 5}, "training.phases.0 has no name: write `name: train`."),
    (
        {"name": "a", "type": "onlin", "duration_cycles": 1},
        "training.phases.0.type is 'onlin'. Did you mean 'online'? Allowed: online, offline, eval_only.",
    ),
    (
        {"name": "a"},
        "Phase 'a' would never end: set duration_steps, duration_updates or duration_cycles.",
    ),
    (
        {"name": "a", "duration_steps": 5, "duration_cycles": 5},
        "Phase 'a' sets duration_steps and duration_cycles: keep the one that should end it.",
    ),
    ({"name": "a", "duration_steps": 0}, "training.phases.0.duration_steps is 0: write a whole number of at least 1."),
    ({"name": "a", "duration_cycles": 1.5}, "training.phases.0.duration_cycles is 1.5: write a whole number"),
    ({"name": "a", "duration_cycles": True}, "training.phases.0.duration_cycles is True: write a whole number"),
    ({"name": "a", "duration_steps": "many"}, "training.phases.0.duration_steps is 'many': write a whole number"),
    ({"name": "a", "duration_steps": 5}, "training.phases.0.collect_steps is 0: an online phase collects at least 1"),
    (
        {"name": "a", "duration_steps": 5, "collect_steps": "8 rows"},
        "training.phases.0.collect_steps is '8 rows': write a whole number.",
    ),
    (
        {"name": "a", "type": "offline", "duration_steps": 5},
        "Phase 'a' is offline and takes no agent steps, so duration_steps never ends it",
    ),
    (
        {"name": "a", "type": "eval_only", "duration_updates": 5},
        "Phase 'a' only evaluates, so duration_updates never ends it: set duration_cycles.",
    ),
    (
        {"name": "a", "duration_updates": 5, "workflow_hooks": [], "collect_steps": 1},
        "Phase 'a' has no workflow_hooks, so duration_updates never ends it.",
    ),
    (
        {"name": "a", "duration_steps": 5, "collect_steps": 1, "updates_per_step": 0},
        "training.phases.0.updates_per_step is 0: write a number above 0, or null.",
    ),
    (
        {"name": "a", "duration_steps": 5, "collect_steps": 1, "updates_per_step": "half"},
        "training.phases.0.updates_per_step is 'half': write a number above 0, or null.",
    ),
    (
        {"name": "a", "duration_steps": 5, "collect_steps": 1, "workflow_hooks": "update_controller"},
        "training.phases.0.workflow_hooks is 'update_controller': write a list, such as [update_controller].",
    ),
    (
        {"name": "a", "duration_steps": 5, "collect_steps": 1, "freeze": "encoder"},
        "training.phases.0.freeze is 'encoder': write a list, such as [encoder].",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_a_phase_that_cannot_run_is_refused_with_its_cure(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_phase(settings, place="training.phases.0")
    assert message in str(refusal.value)


def test_lists_set_to_null_keep_their_default() -> None:
    settings = {"name": "train", "collect_steps": 1, "duration_steps": 5}
    made = make_phase({**settings, "workflow_hooks": None, "freeze": None, "options": None}, place="phase")
    assert (made.workflow_hooks, made.freeze, made.options) == (("update_controller",), (), {})
