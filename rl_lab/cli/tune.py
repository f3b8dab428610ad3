"""Tune an experiment with one command: a Bayesian search over the space shipped for its algorithm
(rl_lab/launch/spaces), with bad trials stopped early. The same command goes on where it was stopped.

examples:
  rl-lab tune ppo_cartpole --trials 30
  rl-lab tune Acrobot-v1:ppo --minutes 60 --jobs 4
  rl-lab tune sac_pendulum training.phases.train.duration_steps=5000 --name tune_short
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl_lab.cli.parsing import UsageError, argument, one_name
from rl_lab.cli.sweep import SEARCH

EVALUATIONS = 10  # during each trial, for the pruner to compare
ARGUMENTS = (
    argument("words", nargs="*", metavar="EXPERIMENT | key=value", help="what to tune, and settings"),
    argument("--space", type=Path, metavar="FILE", help="your own sweep file without `experiment`"),
    argument("--name", metavar="NAME", help="of the sweep (default: tune_EXPERIMENT)"),
    *SEARCH,
)


def run(arguments: argparse.Namespace) -> int:
    experiment, overrides = one_name(arguments.words, "experiment")
    if experiment is None:
        raise UsageError("say what to tune: rl-lab tune EXPERIMENT, such as ppo_cartpole or Acrobot-v1:ppo")

    from rl_lab.cli.sweep_run import start
    from rl_lab.config.compose import compose
    from rl_lab.runs.run_directory import slug

    config = compose(experiment, overrides, config_dir=arguments.config_dir)
    name = f"tune_{slug(experiment)}"
    content = tuned(config, arguments.space) | {"experiment": experiment, "name": name}
    for word in overrides:  # what is given is not searched for
        content["parameters"].pop(word.lstrip("+").partition("=")[0], None)
    place = str(arguments.space or f"the space of {config['algorithm']['_target_']}")
    return start(content, place=place, default_name=name, overrides=overrides, arguments=arguments)


def tuned(config: dict[str, Any], space: Path | None) -> dict[str, Any]:
    """The shipped space of a config's algorithm, without the settings that this config does not have."""
    from rl_lab.config.files import paths_of, read

    content = read(space or _shipped(str(config["algorithm"]["_target_"])))
    known = set(paths_of(config))
    fitting = {key: block for key, block in (content.get("parameters") or {}).items() if key in known or space}
    words = [*content.get("trial_overrides", []), "evaluation.video=false"]
    evaluation, phases = config["evaluation"], config["training"]["phases"]
    durations = [phase.get("duration_steps") for phase in phases]
    if evaluation["every_steps"] in (None, "auto") and evaluation["every_updates"] is None:
        if all(durations):
            words.append(f"evaluation.every_steps={max(1, sum(durations) // EVALUATIONS)}")
        else:
            content["pruner"] = "none"  # nothing to compare before the end
    return content | {"parameters": fitting, "trial_overrides": words}


def _shipped(target: str) -> Path:
    """`rl_lab.workflows.ppo.PPO`: spaces/ppo.yaml."""
    folder = Path(__file__).parents[1] / "launch" / "spaces"
    name = target.split(".")[-2] if "." in target else target
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise UsageError(
            f"no search space is shipped for {target}. There are: {known}. Write a sweep file of your own "
            "(docs/sweeps.md) and give it with --space FILE."
        )
    return folder / f"{name}.yaml"
