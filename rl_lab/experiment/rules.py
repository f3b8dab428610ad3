"""The metric rules of a run: those of rl_lab/metrics/rules.yaml, changed and joined by its `logging.rules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rl_lab.config.construct import call_checked
from rl_lab.config.files import read, value_at
from rl_lab.metrics import monitor
from rl_lab.metrics.monitor import Monitor, Rule
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, EnvSpec, RunError, did_you_mean

SOLVED = "environment.solved_return"  # a bound that the environment knows, not the config


@cache
def shipped_rules() -> dict[str, dict[str, Any]]:
    """The rules of the package by name, as they stand in the file."""
    return read(Path(monitor.__file__).with_name("rules.yaml"))


def make_rules(changes: Mapping[str, Any] | None) -> dict[str, Rule]:
    """The shipped rules with a user's `changes`: settings of a rule, null to remove it, or a rule of its own."""
    blocks = dict(shipped_rules())
    for name, block in (changes or {}).items():
        place = f"logging.rules.{name}"
        if block is None:
            if name not in blocks:
                raise ConfigError(f"{place} is null, but there is no such rule.{did_you_mean(name, blocks)}")
            del blocks[name]
        elif not isinstance(block, Mapping):
            raise ConfigError(f"{place} is {block!r}: write settings of a rule, such as {{above: 0.1}}, or null.")
        elif name not in blocks and "metric" not in block:
            raise ConfigError(
                f"{place} names no metric, and no rule is called '{name}'.{did_you_mean(name, blocks)} A rule of "
                "your own has `metric`, a condition such as `above`, and `tip`."
            )
        else:
            blocks[name] = {**blocks.get(name, {}), **block}
    return {name: call_checked(Rule, block, place=f"logging.rules.{name}") for name, block in blocks.items()}


def build_monitor(
    config: Mapping[str, Any], changes: Mapping[str, Any] | None, run: RunDirectory | None, spec: EnvSpec
) -> Monitor:
    """What watches the rows of this run; its alerts are kept in the run's directory."""

    def keep(alerts: Sequence[Mapping[str, Any]]) -> None:
        if run is not None:
            with suppress(RunError):  # a full disk ends a run where a row or a checkpoint is lost, not an alert
                run.write_alerts(alerts)

    return Monitor(
        make_rules(changes),
        algorithm=str(config["algorithm"]["_target_"]).rsplit(".", 1)[-1],
        actions=spec.action.kind,
        settings=lambda key: spec.solved_return if key == SOLVED else value_at(dict(config), key),
        keep=keep,
    )
