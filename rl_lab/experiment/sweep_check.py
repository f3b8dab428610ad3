"""Every training of a sweep is checked before the first one starts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rl_lab.config.compose import compose, to_yaml
from rl_lab.config.files import Config
from rl_lab.config.schema import read_settings
from rl_lab.config.translate import unsaid
from rl_lab.experiment.build import check
from rl_lab.types import ConfigError, RLLabError

Sweep = Sequence[tuple[str, list[str]]]  # experiment and overrides of each training


def check_sweep(sweep: Sweep, config_dir: Path | None, *, quiet: bool = False) -> None:
    """Refuse a sweep with all that is wrong with its members. A process of its own builds them, so that no GPU memory
    stays with the one that waits for the trainings."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        problems = process.submit(find_problems, sweep, config_dir, quiet=quiet).result()
    if problems:
        raise ConfigError(
            f"{len(problems)} of {len(sweep)} trainings cannot run, so none was started:\n  " + "\n  ".join(problems)
        )


def find_problems(sweep: Sweep, config_dir: Path | None, *, quiet: bool = False) -> list[str]:
    """A line for each member that is refused. Members that differ by their seed alone are built once."""
    problems = []
    built: dict[str, str] = {}  # config without its seed -> what is wrong with it
    for experiment, overrides in sweep:
        try:
            with unsaid(quiet):
                config = compose(experiment or None, overrides, config_dir=config_dir)
            read_settings(config)
            same = to_yaml({**config, "seed": 0})
            if same not in built:
                built[same] = _build(config)
            problem = built[same]
        except RLLabError as error:
            problem = str(error)
        if problem:
            problems.append(f"{' '.join([experiment, *overrides]).strip()}: {problem}")
    return problems


def _build(config: Config) -> str:
    try:
        check(config)
    except RLLabError as error:
        return str(error)
    return ""
