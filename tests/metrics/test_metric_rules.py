"""Every shipped rule: rows that trigger it, rows that do not, and that what it names exists."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_lab import workflows
from rl_lab.config.compose import compose, to_yaml
from rl_lab.config.explain import documented_keys
from rl_lab.config.files import PACKAGE_CONFIGS
from rl_lab.experiment.rules import SOLVED, build_monitor, make_rules, shipped_rules
from rl_lab.metrics.monitor import Alert, Monitor, Rule
from rl_lab.metrics.names import NAMES, PREFIXES
from rl_lab.metrics.pace import Reading
from rl_lab.metrics.stall import StallWatch
from rl_lab.types import ActionSpec, ConfigError, Counts, EnvSpec

SETTINGS = {
    "algorithm.epochs": 10,
    "algorithm.free_nats": 1.0,
    "optimizers.controller.max_grad_norm": 0.5,
    SOLVED: 475.0,
}
DOCUMENTED = {key for file in PACKAGE_CONFIGS.rglob("*.yaml") for key in documented_keys(file)}
CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
RETURNS = "collect/episode_return_max"

# rule: (values that trigger it, values that do not); a metric beside it where a bound names one.
CASES: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "kl_high": ([0.2] * 5, [0.2, 0.2, 0.2, 0.2, 0.05, 0.2]),
    "kl_zero": ([0.0] * 10, [0.0] * 9 + [0.01]),
    "clip_fraction_high": ([0.6] * 5, [0.3] * 50),
    "epochs_cut": ([2.0] * 20, [5.0] * 50),
    "explained_variance_negative": ([-0.5] * 20, [0.5] * 50),
    "entropy_collapse": ([0.69, *[0.01] * 5], [0.69, *[0.2] * 50]),
    "entropy_level": ([0.69] * 60, [0.69 - 0.005 * row for row in range(100)]),
    "advantage_zero": ([0.0] * 5, [0.1] * 50),
    "q_overestimation": ([500.0] * 5, [150.0] * 50),
    "table_overestimation": ([500.0] * 5, [150.0] * 50),
    "value_explodes": ([1.0] * 5 + [5000.0], [1.0] * 50 + [50.0]),
    "support_clipped": ([0.02], [0.005] * 10),
    "critic_loss_explodes": ([1.0] * 5 + [500.0], [10.0] * 50 + [500.0]),
    "value_loss_explodes": ([1.0] * 5 + [500.0], [10.0] * 50 + [500.0]),
    "temperature_collapse": ([1e-5] * 10, [0.01] * 50),
    "temperature_high": ([20.0] * 10, [1.0] * 50),
    "kl_at_free_nats": ([1.0] * 5, [1.01] * 100),
    "latent_empty": ([0.001] * 5, [0.5] * 50),
    "model_kl_grows": ([1.0] * 10 + [20.0], [1.0] * 100 + [4.0]),
    "reconstruction_explodes": ([1.0] * 10 + [30.0], [30.0] * 100 + [1.0]),
    "dreams_promise_too_much": ([500.0] * 5, [150.0] * 50),
    "gradient_explodes": ([0.1] * 20 + [500.0], [0.1] * 20 + [50.0]),
    "gradient_vanishes": ([0.0] * 20, [1e-3] * 50),
    "gradient_clipped": ([30.0] * 20, [2.0] * 50),
    "return_drops": ([0.0, 100.0, *[20.0] * 3], [0.0, 100.0, 20.0, 90.0, 20.0]),
    "return_level": ([9.0] * 101, [*[9.0] * 100, 12.0]),
    "environment_restarted": ([0.0, 1.0], [0.0] * 10),
    "evaluation_cut": ([2.0], [0.0] * 10),
    "wrong_arm": ([0.1] * 3, [0.8] * 10),
    "not_finite": ([math.nan], [1e30]),
    "memory_full": ([0.97], [0.8] * 10),
    "memory_grows": ([3.0] * 500 + [7.0], [4.0] * 501),
    "disk_full": ([0.5], [20.0] * 10),
    "evaluation_slow": ([0.7] * 20, [0.2] * 50),
    "checkpoint_slow": ([0.4] * 20, [0.01] * 50),
}
WHEN = {"kl_zero": 0.1, "entropy_collapse": 0.1, "wrong_arm": 0.95}  # fraction of the phase; 0.5 elsewhere


def metric_of(rule: Rule) -> str:
    return {"train/*grad_norm": "train/critic_grad_norm", "*/*": "loss/value"}.get(rule.metric, rule.metric)


def rows(name: str, rule: Rule, values: Sequence[float]) -> list[dict[str, float]]:
    beside = {RETURNS: 100.0, "updates": 2000, "train/phase_fraction": WHEN.get(name, 0.5)}
    return [{**beside, "agent_steps": 5000 + place, metric_of(rule): value} for place, value in enumerate(values)]


def alerts(name: str, rule: Rule, values: Sequence[float]) -> list[Alert]:
    facts = {"algorithm": next(iter(rule.algorithms), ""), "actions": rule.actions or ""}
    monitor = Monitor({name: rule}, **facts, settings=SETTINGS.get)
    assert name in monitor.rules
    return [alert for row in rows(name, rule, values) for alert in monitor.check(row)]


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(shipped_rules())


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_once_where_it_should_and_not_elsewhere(name: str) -> None:
    rule, (bad, good) = make_rules(None)[name], CASES[name]
    (alert,) = alerts(name, rule, [*bad, *[bad[-1]] * 3])
    assert alert.metric == metric_of(rule) and alert.tip and alert.sentence.startswith(f"{alert.metric} is ")
    assert alerts(name, rule, bad[:-1]) == []
    assert alerts(name, rule, good) == []


@pytest.mark.parametrize("name", CASES)
def test_a_rule_names_only_what_exists(name: str) -> None:
    """Metrics of names.md, settings of a shipped config, workflows that there are."""
    block = shipped_rules()[name]
    rule = make_rules(None)[name]
    assert rule.metric in NAMES or rule.metric in ("train/*grad_norm", "*/*")
    settings = set()
    for bound in rule.bounds("above") + rule.bounds("below"):
        if isinstance(bound, str) and bound.startswith(PREFIXES):
            assert bound in NAMES
        elif isinstance(bound, str):
            settings.add(bound)
    settings |= set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", block["tip"]))
    assert settings <= DOCUMENTED | {SOLVED}
    classes = {
        name for file in (Path(workflows.__file__).parent).glob("*.py") for name in CLASS.findall(file.read_text())
    }
    assert set(rule.algorithms) <= classes


@pytest.mark.parametrize("file", sorted((PACKAGE_CONFIGS / "algorithm").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_algorithm_that_learns_has_rules_of_its_own(file: Any) -> None:
    """Of its policy, its values or its model: besides those of gradients, returns and the machine."""
    if file.stem == "random":
        return
    config = compose(file.stem)
    spec = EnvSpec("x", {}, ActionSpec("discrete", (2,)), solved_return=475.0)
    monitor = build_monitor(config, None, None, spec)
    own = [
        rule
        for rule in monitor.rules.values()
        if rule.metric.startswith(("controller/", "loss/", "train/", "collect/o"))
    ]
    assert len(own) >= 2 and len(monitor.rules) >= 12


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("return_drops", [500.0, 499.0, 499.0, 499.0]),  # the whole range so far is one point of noise
        ("return_drops", [-150.0, -160.0, -158.0, -159.0]),
        ("entropy_level", [0.0] * 100),  # it has decided
        ("entropy_level", [0.02] * 100),
    ],
)
def test_a_rule_does_not_say_what_is_not_so(name: str, values: list[float]) -> None:
    assert alerts(name, make_rules(None)[name], values) == []


def test_a_fall_of_a_policy_that_began_well_is_said() -> None:
    rule = make_rules(None)["return_drops"]
    (alert,) = alerts("return_drops", rule, [500.0, 20.0, 30.0, 25.0])
    assert "down from 500" in alert.sentence
    (alert,) = alerts("return_drops", rule, [-1500.0, -150.0, -1400.0, -1350.0, -1300.0])
    assert "down from -150" in alert.sentence


# Rows of `rl-lab train dqn_cartpole q_values=expected`, as it is and with algorithm.double=false,
# algorithm.target_rate=1.0 and a learning rate of 0.02: updates, values, best return, loss/value.
# fmt: off
HEALTHY = [
    (535, 8.8, 95, 1.43), (558, 14.0, 95, 2.28), (1532, 23.9, 156, 4.55), (1580, 34.1, 156, 6.4),
    (2532, 42.0, 283, 7.09), (2604, 49.4, 283, 7.1), (3537, 54.3, 500, 7.1), (3625, 58.6, 500, 6.6),
    (4535, 62.6, 500, 6.38), (4655, 67.3, 500, 6.04), (5541, 70.6, 500, 5.62), (5677, 73.7, 500, 5.29),
    (6539, 76.1, 500, 5.07), (6699, 78.7, 500, 4.7), (7537, 80.3, 500, 4.54), (7721, 82.2, 500, 4.31),
    (8543, 83.6, 500, 4.06), (8750, 84.5, 500, 3.93), (9533, 85.8, 500, 3.68),
]
RUNAWAY = [
    (31, 107.0, 40, 41.9), (529, 39.8, 65, 16.9), (1034, 11.5, 80, 2.82), (1529, 11.4, 80, 2.79),
    (2035, 11.7, 63, 2.99), (2532, 14500.0, 133, 5520.0), (3035, 37400.0, 44, 13100.0), (3533, 48500.0, 17, 16500.0),
    (4029, 65600.0, 14, 21100.0), (4531, 77600.0, 22, 22600.0), (5031, 117000.0, 13, 38000.0),
    (5536, 123000.0, 11, 38300.0),
]
# fmt: on


@pytest.mark.parametrize(
    ("run", "said"),
    [(HEALTHY, []), (RUNAWAY, ["value_explodes", "value_loss_explodes", "q_overestimation"])],
    ids=["healthy", "runaway"],
)
def test_a_real_dqn_that_runs_away_is_said_within_its_dozen_rows_and_a_healthy_one_is_not(
    run: list[tuple[float, ...]], said: list[str]
) -> None:
    names = ("updates", "controller/value_mean", RETURNS, "loss/value")
    monitor = Monitor(make_rules(None), algorithm="DQN", actions="discrete", settings=SETTINGS.get)
    found = [
        alert.rule
        for number, values in enumerate(run)
        for alert in monitor.check({"agent_steps": 1000 * number, **dict(zip(names, values, strict=True))})
    ]
    assert sorted(found) == sorted(said)


# --- a user's own ---


def test_rules_are_changed_added_and_removed_by_name() -> None:
    mine = {"metric": "loss/mine", "above": 3, "tip": "Mine."}
    rules = make_rules({"kl_high": {"above": 0.05}, "entropy_collapse": None, "mine": mine})
    assert rules["kl_high"].above == 0.05 and rules["kl_high"].rows == 5
    assert "entropy_collapse" not in rules and rules["mine"].tip == "Mine."
    assert make_rules(None)["kl_high"].above == 0.1


def test_a_command_line_changes_rules_by_name(tmp_path: Path) -> None:
    words = ["logging.rules.kl_high.above=0.05", "logging.rules.kl_high.rows=2", "logging.rules.entropy_collapse=null"]
    config = compose("ppo_cartpole", words)
    assert config["logging"]["rules"] == {"kl_high": {"above": 0.05, "rows": 2}, "entropy_collapse": None}
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(config))
    again = compose(str(saved), ["logging.rules.kl_high.rows=3", "logging.rules.kl_low.rows=4"])["logging"]["rules"]
    assert again == {"kl_high": {"above": 0.05, "rows": 3}, "entropy_collapse": None, "kl_low": {"rows": 4}}
    with pytest.raises(ConfigError, match=r"logging.rules.kl_hihg names no metric.*Did you mean 'kl_high'\?"):
        make_rules(compose("ppo_cartpole", ["logging.rules.kl_hihg.above=1"])["logging"]["rules"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_hihg": None}, r"logging.rules.kl_hihg is null, but there is no such rule. Did you mean 'kl_high'\?"),
        ({"kl_high": 3}, "logging.rules.kl_high is 3: write settings of a rule, such as"),
        ({"kl_hihg": {"above": 1}}, r"logging.rules.kl_hihg names no metric.*Did you mean 'kl_high'\?"),
        ({"kl_high": {"abov": 1}}, r"logging.rules.kl_high.abov is not a setting of Rule. Did you mean 'above'\?"),
        ({"mine": {"metric": "loss/x", "tip": "x"}}, "A rule about loss/x says nothing: give it one of above, below"),
        ({"mine": {"metric": "loss/x", "tip": "x", "above": "much"}}, "has the bound 'much': write a number, a metric"),
        ({"mine": {"metric": "loss/x", "tip": "x", "above": 1, "rows": 0}}, "has over 20, rows 0: write 1 or more"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rules(changes)


def test_a_bound_that_the_config_lacks_or_schedules_silences_its_rule() -> None:
    rule = Rule(metric="loss/value", above="algorithm.limit", tip="x")
    assert not Monitor({"a": rule}).rules and not Monitor({"a": rule}, settings=lambda key: "linear(1, 0)").rules
    assert Monitor({"a": rule}, settings=lambda key: 3).rules["a"].above == [3]
    row = {"loss/value": 5.0, "updates": 1, "agent_steps": 1}
    beside = Monitor({"a": Rule(metric="loss/value", above="loss/policy", tip="x")})
    assert not beside.check(row) and len(beside.check({**row, "loss/policy": 4.0})) == 1


def test_a_resumed_monitor_goes_on_counting_rows() -> None:
    rules = {
        "a": Rule(metric="loss/value", above=1, rows=3, tip="x"),
        "b": Rule(metric="loss/value", grows=2, over=2, tip="y"),
    }
    row = {"loss/value": 5.0, "updates": 1, "agent_steps": 1}
    first, second = Monitor(rules), Monitor(rules)
    assert not first.check(row) and not first.check(row)
    second.set_state(first.get_state())
    assert [alert.rule for alert in second.check({**row, "loss/value": 11.0})] == ["a", "b"]


def test_rows_of_an_offline_phase_say_nothing_about_what_was_collected_before_it() -> None:
    rules = {"level": Rule(metric="collect/episode_return_mean", flat=0.01, over=2, tip="Explore.")}
    row = {"collect/episode_return_mean": 14.0, "updates": 1}
    first, second = Monitor(rules), Monitor(rules)
    assert not any(first.check({**row, "agent_steps": 100}) for _ in range(10))
    second.set_state(first.get_state())  # and not in the first row after a resume
    assert not any(second.check({**row, "agent_steps": steps}) for steps in (100, 200))
    assert [alert.rule for alert in second.check({**row, "agent_steps": 300})] == ["level"]


def test_a_run_without_steps_says_after_how_many_updates() -> None:
    monitor = Monitor({"high": Rule(metric="loss/cloning", above=1, tip="x")})
    (alert,) = monitor.check({"loss/cloning": 2.0, "agent_steps": 0, "updates": 1200})
    assert alert.sentence == "loss/cloning is 2 after 1,200 updates, above 1. x"


# --- a run that stands still ---


def test_a_run_that_counts_nothing_for_minutes_says_so_once_per_stand_still() -> None:
    said: list[str] = []
    now, steps = [0.0], [10]
    watch = StallWatch(
        lambda: Reading(Counts(agent_steps=steps[0]), 0.0, 0.0, activity="collecting"),
        said.append,
        minutes=2.0,
        clock=lambda: now[0],
    )
    for second in (0, 100, 119):
        now[0] = float(second)
        watch.look()
    assert not said
    for second in (121, 300):
        now[0] = float(second)
        watch.look()
    assert len(said) == 1 and said[0].startswith("No progress for 2:01 (collecting).")
    steps[0] = 11
    for second in (301, 422):
        now[0] = float(second)
        watch.look()
    assert len(said) == 2
    with StallWatch(lambda: Reading(Counts(), 0.0, 0.0), said.append, minutes=None):
        pass
    with StallWatch(lambda: Reading(Counts(), 0.0, 0.0), said.append, minutes=1.0):
        pass
