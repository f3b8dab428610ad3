"""Train an agent. Without arguments: PPO on CartPole-v1, with a live display.

EXPERIMENT is a name from `rl-lab experiments`, or ENV:ALGORITHM for any Gymnasium id. key=value changes any
setting (`rl-lab config explain KEY` says what it does). Ctrl-C saves and stops; `rl-lab resume` goes on.

examples:
  rl-lab train                                        the default run
  rl-lab train ppo_cartpole seed=3                    a named experiment, one setting changed
  rl-lab train ppo_cartpole total_timesteps=1e5       for 100,000 agent steps; lr=, gamma=, n_envs= and their like too
  rl-lab train Acrobot-v1:ppo                         any Gymnasium environment, no YAML
  rl-lab train --env my_package:MyEnv-v0 --algorithm ppo
  rl-lab train ppo_cartpole preset=debug              a few seconds, in one process: does it run at all?
  rl-lab train ppo_cartpole --cfg job                 print the resolved config and stop; --json: as JSON
  rl-lab train ppo_cartpole -m seed=0,1,2 --jobs 3    three seeds, three processes
  rl-lab train ppo_cartpole --run-id a1 --resume      start a1, or continue it if it exists
"""

from __future__ import annotations

import argparse
from itertools import product

from rl_lab.cli.parsing import (
    CONFIG_DIR,
    RUNS_DIR,
    UsageError,
    argument,
    chosen,
    one_name,
    positive,
    quiet,
    settings_from_options,
)
from rl_lab.cli.printing import end_training, print_json

DEFAULT_ENVIRONMENT, DEFAULT_ALGORITHM = "CartPole-v1", "ppo"  # completes --algorithm or --env given alone

ARGUMENTS = (
    argument("words", nargs="*", metavar="EXPERIMENT | key=value", help="what to train, and settings"),
    argument("--env", "--env-id", metavar="ID", help="a Gymnasium id, also package:Env-v0; stands for ID:ALGORITHM"),
    argument("--algorithm", "--algo", metavar="NAME", help=f"with --env (default: {DEFAULT_ALGORITHM})"),
    argument("--run-id", metavar="ID", help="name the run (default: experiment, seed and time)"),
    argument("--resume", action="store_true", help="if the run exists, continue it instead of refusing"),
    argument("--cfg", choices=["job"], help="print the resolved config as YAML and stop"),
    argument("--json", action="store_true", help="with --cfg job: as JSON; of several trainings, a list"),
    argument("-m", "--multirun", action="store_true", help="train every combination of a,b,c values"),
    argument("--jobs", type=positive, metavar="K", help="with -m: processes at a time (default: cores / 2)"),
    RUNS_DIR,
    CONFIG_DIR,
    quiet("print only the run's id, warnings and errors"),
)


read_words = settings_from_options  # --seed 3 is seed=3


def run(arguments: argparse.Namespace) -> int:
    name, overrides = one_name(arguments.words, "experiment")
    experiment = _experiment(name, arguments.env, arguments.algorithm)
    if arguments.jobs and not arguments.multirun:
        raise UsageError("--jobs runs several trainings at a time and needs -m: rl-lab train -m seed=0,1,2 --jobs 2")

    if arguments.json and not arguments.cfg:
        raise UsageError("--json prints the resolved config and needs --cfg job: rl-lab train --cfg job --json")

    from rl_lab.config import compose as composition
    from rl_lab.config.translate import unsaid

    sweep = list(product((experiment or "").split(","), composition.split_sweep(overrides)))
    if not sweep:
        raise UsageError(f"{' '.join(overrides)} names no value at all, so there is nothing to train.")
    if len(sweep) > 1 and not arguments.multirun:
        words = [experiment or "", *overrides]
        listed = next((word for word in words if "," in word), " ".join(overrides))  # range(3) has no comma
        raise UsageError(
            f"'{listed}' asks for {len(sweep)} trainings. Add -m to run them all, or give one value "
            "(a list that is one value is written [a,b])."
        )
    if arguments.cfg:
        configs = [composition.compose(part or None, words, config_dir=arguments.config_dir) for part, words in sweep]
        if arguments.json:
            print_json(configs if len(configs) > 1 else configs[0])
            return 0
        print("---\n".join(composition.to_yaml(config).rstrip() + "\n" for config in configs), end="")
        return 0
    if arguments.multirun:
        from rl_lab.cli.multirun import train_all
        from rl_lab.experiment.sweep_check import check_sweep

        check_sweep(sweep, arguments.config_dir, quiet=arguments.quiet)
        return train_all(sweep, arguments)

    from rl_lab.experiment import session

    with unsaid(arguments.quiet):
        config = composition.compose(experiment, overrides, config_dir=arguments.config_dir)
    options = chosen(arguments, "run_id", "runs_dir", "quiet")
    trained = session.train(config, overrides, **options, resume_existing=arguments.resume)
    return end_training(trained.id, quiet=arguments.quiet)


def _experiment(name: str | None, env: str | None, algorithm: str | None) -> str | None:
    """One experiment name out of the positional word or --env and --algorithm; None is the default run."""
    if env is None and algorithm is None:
        return name
    composed = f"{env or DEFAULT_ENVIRONMENT}:{algorithm or DEFAULT_ALGORITHM}"
    if name is not None:
        raise UsageError(
            f"'{name}' and {'--env' if env else '--algorithm'} both say what to train. Keep one: "
            f"rl-lab train {name}, or rl-lab train {composed}"
        )
    return composed
