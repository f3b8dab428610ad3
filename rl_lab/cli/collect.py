"""Write a dataset from a run's policy, or from the random one. A phase of type offline learns from it.

RUN is an id, a unique prefix, a path, @last, @best or @best:ENVIRONMENT; `random` acts at random in --env, and takes
settings of the environment as key=value.

examples:
  rl-lab collect random --env CartPole-v1 --steps 10000 --output data/cartpole
  rl-lab collect @best --episodes 100 --mode eval --output data/expert
  rl-lab collect @last --steps 50000                              into the run's own folder, episodes/
  rl-lab collect random --env FrozenLake-v1 --steps 5000 --output data/ice +environment.kwargs.is_slippery=false
  rl-lab collect random --env CartPole-v1 --episodes 50 --format minari --output cartpole/random-v0
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rl_lab.cli.parsing import JSON, POLICY, RUNS_DIR, UsageError, argument, chosen, one_name, positive, quiet
from rl_lab.cli.printing import answer, fields, format_value, only_json_on_stdout
from rl_lab.cli.progress import progress_line

ARGUMENTS = (
    argument("words", nargs="+", metavar="RUN | random", help="whose policy acts"),
    argument("--env", metavar="ID", help="with random: a Gymnasium id, also package:Env-v0"),
    argument("--steps", type=positive, metavar="N", help="agent steps to take, in all environments together"),
    argument("--episodes", type=positive, metavar="N", help="whole episodes to play instead"),
    argument("--output", metavar="PATH", help="the dataset's folder; its id with --format minari"),
    argument("--format", choices=["npz", "minari"], default="npz", help="of the files (default: npz)"),
    argument("--mode", choices=["train", "eval"], default="train", help="with or without exploration (default: train)"),
    argument("--num-envs", type=positive, metavar="N", help="played at once (default: the run's; random: 8)"),
    *POLICY,
    argument("--overwrite", action="store_true", help="replace a dataset that is there"),
    RUNS_DIR,
    JSON,
    quiet("print only where the dataset is"),
)


def run(arguments: argparse.Namespace) -> int:
    source, overrides = one_name(arguments.words, "run")
    if source is None:
        raise UsageError("say whose policy acts: rl-lab collect random --env CartPole-v1, or rl-lab collect @last")
    if (arguments.steps is None) == (arguments.episodes is None):
        raise UsageError("say how much to collect: --steps 10000 or --episodes 100, one of the two")
    unit = "agent steps" if arguments.steps else "episodes"
    with only_json_on_stdout(arguments.json), progress_line("collecting", unit, quiet=arguments.quiet) as progress:
        from rl_lab import api

        names = ("output", "steps", "episodes", "format", "mode", "seed", "num_envs", "checkpoint", "overwrite")
        written = api.collect(
            source,
            environment=arguments.env,
            overrides=overrides,
            progress=progress,
            **chosen(arguments, *names, "runs_dir", "trust"),
        )
    facts = asdict(written)
    text = "{}: {}, played by {}\n".format(*map(format_value, (written.path, written.environment, written.source)))
    text += fields((name, facts[name]) for name in facts if name not in ("path", "environment", "source"))
    answer(arguments, facts, text, brief=[written.dataset])
    return 0
