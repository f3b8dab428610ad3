"""The dispatcher behind `rl-lab` and `python -m rl_lab`: find the command, run it, turn errors into exit codes.

0 done · 1 failed · 2 a wrong command line or config · 128 + its number after a signal: 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from rl_lab.cli.parsing import Parser, UsageError, nearest
from rl_lab.cli.printing import give_up_if_broken, open_closed_streams, say
from rl_lab.utils.text import printable

# Heading -> command -> one line. A command `x` lives in rl_lab/cli/x.py (names that shadow builtins or other modules
# are spelled out in MODULES), whose docstring is its help, and which has ARGUMENTS, `run(arguments) -> int`
# and, where its words are not read as usual, `read_words`.
COMMANDS = {
    "train and use": {
        "train": "train an agent: an experiment, ENV:ALGORITHM, or the default run",
        "resume": "continue a run exactly where its last checkpoint left it",
        "sweep": "search for good settings: grid, random or Bayesian; resumable",
        "tune": "a Bayesian search over the settings of an experiment's algorithm",
        "evaluate": "score a run's policy over whole episodes",
        "play": "watch a run's policy, in a window or as mp4",
        "dream": "film what a run's world model predicts beside what happens",
        "collect": "write a dataset from a run's policy, or from the random one",
        "export-policy": "write a run's policy as one file that acts without RL Lab",
        "publish": "upload a run's policy with a model card to the Hugging Face Hub",
    },
    "look at runs": {
        "list": "the runs on this machine, newest first",
        "show": "one run: settings, progress, scores, files",
        "plot": "draw the curves of runs, with bands over seeds",
        "compare": "scores with intervals, curves and settings of runs side by side",
        "export": "runs as csv, json, latex, html, markdown or parquet",
        "report": "one run or many as markdown with pictures",
        "tag": "add tags to a run, or remove them",
        "note": "write a line to the notes of a run",
        "verify": "check a run's files, repeat a run, or prove exact resume, and compare",
        "wandb": "set up a W&B workspace for the metrics of the runs",
    },
    "find out what is wrong": {
        "debug": "find the first number that is not finite; execute a crash bundle again",
    },
    "find your way": {
        "experiments": "the named experiments",
        "envs": "environments: search, describe, check your own",
        "config": "explain a key, check experiments, compare two configs",
    },
    "this machine": {
        "doctor": "check the installation and say how to mend it",
        "cleanup": "free disk space: checkpoints of runs that are done go, results stay",
        "rm": "remove whole runs",
        "smoke": "a few cycles of every experiment, and what failed",
        "completion": "print a completion script for bash, zsh or fish",
    },
}
SUMMARIES = {name: summary for group in COMMANDS.values() for name, summary in group.items()}
MODULES = {"list": "list_runs", "export-policy": "export_policy", "wandb": "wandb_setup"}
EXIT_FAILED, EXIT_USAGE = 1, 2
SIGNALLED = 128  # exit codes above it are those of signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or os.environ.get("RL_LAB_DEBUG", "0") not in ("", "0")
    open_closed_streams()
    try:
        exit_code = _dispatch(words)
        sys.stdout.flush()  # what cannot be written must show itself here, not at interpreter exit
        return exit_code
    except (SystemExit, KeyboardInterrupt) as end:  # of argparse's --help, or by a signal
        notes, exit_code = getattr(end, "__notes__", []), getattr(end, "code", 128 + signal.SIGINT)
        is_number = isinstance(exit_code, int)
        if isinstance(end, KeyboardInterrupt) or (notes and is_number and exit_code > SIGNALLED):
            notes = ["\ninterrupted", *notes]
        if notes:
            say(*notes, sep="\n", file=sys.stderr)
        return exit_code if is_number else int(exit_code is not None)
    except OSError as error:  # of stdout alone: that of a worker or a file must be seen
        if not give_up_if_broken(sys.stdout, probe="\n"):
            raise
        if not isinstance(error, BrokenPipeError):  # a reader that leaves, such as `head`, knows that it does
            say(f"error: the output could not be written: {error.strerror}.", file=sys.stderr)
        return EXIT_FAILED
    except _errors("RLLabError") as error:
        if debug:
            raise
        say("error:", printable(str(error), keep="\n\t"), file=sys.stderr)
        return EXIT_USAGE if isinstance(error, _errors("ConfigError")) else EXIT_FAILED


def command_module(name: str) -> ModuleType:
    """The module of one command, imported now."""
    return import_module(f"rl_lab.cli.{MODULES.get(name, name)}")


def parser_of(name: str) -> Parser:
    """What reads the words after `rl-lab NAME`."""
    module = command_module(name)
    return Parser(f"rl-lab {name}", module.__doc__, module.ARGUMENTS)


def _dispatch(words: list[str]) -> int:
    while words and words[0] == "--debug":
        words = words[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        if words[1:] and words[1] in SUMMARIES:  # rl-lab help train
            return _dispatch([words[1], "--help"])
        if words[1:] and words[1] not in ("-h", "--help", "help"):
            return _dispatch(words[1:])
        print(_help())
        return 0
    if words[0] in ("-V", "--version", "version"):
        from rl_lab import __version__

        print(f"rl-lab {__version__}")
        return 0
    name = words[0]
    if name not in SUMMARIES:
        kind = "option" if name.startswith("-") else "command"
        known = " ".join(SUMMARIES)
        raise UsageError(f"unknown {kind} '{name}'.{nearest(name, SUMMARIES)}\n  Commands: {known}")
    module, parser = command_module(name), parser_of(name)
    exit_code: int = module.run(parser.parse(getattr(module, "read_words", _as_they_are)(words[1:], parser)))
    return exit_code


def _as_they_are(words: list[str], parser: Parser) -> list[str]:
    return words


def _help() -> str:
    lines = ["usage: rl-lab COMMAND [options]", ""]
    lines += ["Train reinforcement-learning agents from one YAML, and never lose a run."]
    for heading, group in COMMANDS.items():
        lines += ["", f"{heading}:"] + [f"  {name:<13} {summary}" for name, summary in group.items()]
    lines += [
        "",
        "start here:",
        "  rl-lab train                            PPO on CartPole-v1, with a live display",
        "  rl-lab train Acrobot-v1:ppo seed=3      any Gymnasium environment, any setting",
        "  rl-lab COMMAND --help                   options and examples of one command",
        "",
        "A run is named by its id, a unique prefix, a path, @last, @best or @best:CartPole-v1.",
        "options: -h, --help   -V, --version   --debug (show tracebacks; or RL_LAB_DEBUG=1)",
    ]
    return "\n".join(lines)


def _errors(name: str) -> tuple[type[BaseException], ...]:
    """UsageError and an error of rl_lab.types. That module imports torch: where it is not loaded, nobody raised any."""
    types = sys.modules.get("rl_lab.types")
    return (UsageError, getattr(types, name)) if types else (UsageError,)


if __name__ == "__main__":
    sys.exit(main())
