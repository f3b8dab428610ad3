"""The phase scheduler: what ends a phase, what is owed, and what is refused before the first step."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from rl_lab.config.phases import make_phase
from rl_lab.orchestration.phase_scheduler import PhaseScheduler, total_steps
from rl_lab.types import ConfigError, Counts, Phase


def phase(name: str = "train", **settings: Any) -> Phase:
    return make_phase({"name": name, "collect_steps": 1, **settings}, place="training.phases.0")


def run_cycle(scheduler: PhaseScheduler, *, agent_steps: int = 0) -> int:
    """One cycle in which every pass that is due is done; answers how many were."""
    scheduler.report(Counts(agent_steps=agent_steps))
    passes = scheduler.passes_due()
    for _ in range(passes):
        scheduler.pass_done()
    scheduler.end_cycle()
    return passes


# --- what ends a phase -------------------------------------------------------------------------


def test_a_phase_of_agent_steps_ends_after_the_cycle_that_reaches_them() -> None:
    scheduler = PhaseScheduler([phase(duration_steps=10)])
    scheduler.report(Counts(agent_steps=9))
    assert not scheduler.end_cycle()
    scheduler.report(Counts(agent_steps=9))
    assert scheduler.end_cycle()
    assert scheduler.finished
    assert scheduler.run_counts.agent_steps == 18


def test_a_phase_of_updates_takes_no_pass_more_than_it_needs() -> None:
    scheduler = PhaseScheduler([phase(duration_updates=5, updates_per_step=1.0)])
    assert run_cycle(scheduler, agent_steps=3) == 3
    assert run_cycle(scheduler, agent_steps=3) == 2
    assert scheduler.finished
    assert scheduler.run_counts == Counts(agent_steps=6, updates=5)


def test_a_phase_of_cycles_counts_cycles_whatever_they_did() -> None:
    scheduler = PhaseScheduler([phase(duration_cycles=3, workflow_hooks=[])])
    for _ in range(3):
        assert not scheduler.finished
        assert run_cycle(scheduler, agent_steps=1) == 0
    assert scheduler.finished


def test_phases_run_in_order_and_each_counts_for_itself() -> None:
    scheduler = PhaseScheduler([phase("prefill", duration_steps=4, workflow_hooks=[]), phase(duration_updates=2)])
    run_cycle(scheduler, agent_steps=4)
    assert (scheduler.index, scheduler.current().name) == (1, "train")
    assert scheduler.phase_counts == Counts()
    assert scheduler.cycles == 0
    run_cycle(scheduler, agent_steps=4)
    progress = scheduler.current().progress
    assert progress.phase == Counts(agent_steps=4, updates=1)
    assert progress.run == Counts(agent_steps=8, updates=1)
    assert progress.cycles == 1


# --- how far a phase is ------------------------------------------------------------------------


def test_fraction_is_of_the_phase_and_run_fraction_weighs_phases_alike() -> None:
    scheduler = PhaseScheduler([phase("long", duration_steps=1000), phase("short", duration_cycles=4)])
    scheduler.report(Counts(agent_steps=250))
    assert scheduler.fraction() == 0.25
    assert scheduler.run_fraction() == 0.125
    scheduler.report(Counts(agent_steps=5000))
    assert scheduler.fraction() == 1.0
    scheduler.end_cycle()
    scheduler.end_cycle()
    assert scheduler.fraction() == 0.25
    assert scheduler.run_fraction() == 0.625
    for _ in range(3):
        scheduler.end_cycle()
    assert scheduler.run_fraction() == 1.0


def test_current_carries_the_fraction_that_schedules_read() -> None:
    scheduler = PhaseScheduler([phase(duration_updates=4)])
    scheduler.pass_done()
    assert scheduler.current().progress.fraction == 0.25
    assert scheduler.phases[0].progress.fraction == 0.0


# --- what is owed ------------------------------------------------------------------------------


def test_without_a_ratio_each_cycle_owes_one_pass() -> None:
    scheduler = PhaseScheduler([phase(duration_cycles=2)])
    assert run_cycle(scheduler, agent_steps=64) == 1


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7, 1.1, 2.5, 1 / 64])
def test_a_fractional_ratio_is_exact_after_every_cycle(ratio: float) -> None:
    """Adding 0.3 ten times is not 3 in binary; owed passes must not come a cycle late because of it."""
    scheduler = PhaseScheduler([phase(duration_steps=10**9, updates_per_step=ratio)])
    for agent_steps in range(1, 1001):
        run_cycle(scheduler, agent_steps=1)
        assert scheduler.run_counts.updates == int(Fraction(str(ratio)) * agent_steps)


def test_the_fraction_owed_survives_a_round_trip() -> None:
    straight = PhaseScheduler([phase(duration_steps=10**9, updates_per_step=0.3)])
    interrupted = PhaseScheduler([phase(duration_steps=10**9, updates_per_step=0.3)])
    for _ in range(100):
        run_cycle(straight, agent_steps=7)
        run_cycle(interrupted, agent_steps=7)
        fresh = PhaseScheduler(interrupted.phases)
        fresh.set_state(interrupted.get_state())
        interrupted = fresh
        assert interrupted.get_state() == straight.get_state()
    assert straight.run_counts.updates == 210


def test_the_state_is_plain_data() -> None:
    scheduler = PhaseScheduler([phase(duration_steps=100, updates_per_step=0.3)])
    run_cycle(scheduler, agent_steps=1)
    for leaf in scheduler.get_state().values():
        assert isinstance(leaf, int | float | str | dict)


def test_a_skipped_pass_counts_nothing_and_is_not_owed_later() -> None:
    scheduler = PhaseScheduler([phase(duration_steps=100, updates_per_step=0.5)])
    scheduler.report(Counts(agent_steps=5))
    assert scheduler.passes_due() == 2
    scheduler.pass_skipped()
    assert scheduler.run_counts.updates == 0
    assert scheduler.passes_due() == 0
    scheduler.report(Counts(agent_steps=1))
    assert scheduler.passes_due() == 1  # the half that was owed is kept, the two whole passes are not


def test_what_is_owed_ends_with_its_phase() -> None:
    scheduler = PhaseScheduler(
        [
            phase("first", duration_steps=3, updates_per_step=0.5),
            phase("second", duration_steps=9, updates_per_step=0.5),
        ]
    )
    assert run_cycle(scheduler, agent_steps=3) == 1
    assert run_cycle(scheduler, agent_steps=1) == 0


def test_an_offline_cycle_is_one_pass_and_an_evaluation_none() -> None:
    scheduler = PhaseScheduler(
        [phase("learn", type="offline", duration_updates=1), phase("look", type="eval_only", duration_cycles=1)]
    )
    assert scheduler.passes_due() == 1
    scheduler.pass_done()
    scheduler.end_cycle()
    assert scheduler.passes_due() == 0


# --- what is refused ---------------------------------------------------------------------------


def test_a_curriculum_needs_a_phase() -> None:
    with pytest.raises(ConfigError, match="training.phases is empty: write at least one phase"):
        PhaseScheduler([])


def test_phase_names_must_differ() -> None:
    with pytest.raises(ConfigError, match="two phases called 'train': names must differ"):
        PhaseScheduler([phase(duration_steps=1), phase(duration_steps=1)])


def test_a_run_of_steps_is_measured_in_steps() -> None:
    phases = [Phase("prefill", duration_steps=100, workflow_hooks=()), Phase("train", duration_steps=900)]
    scheduler = PhaseScheduler(phases)
    assert total_steps(phases) == 1000
    assert total_steps([*phases, Phase("last", type="offline", duration_updates=5)]) is None
    scheduler.report(Counts(agent_steps=50))
    assert scheduler.run_fraction() == 0.05
    scheduler.report(Counts(agent_steps=50))
    assert scheduler.end_cycle()
    assert scheduler.run_fraction() == 0.1
