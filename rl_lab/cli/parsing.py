"""What every command's parser shares: error style, the words `EXPERIMENT key=value ...`, common options."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rl_lab.config.words import ALL_WORDS, BLOCKS, OWN_OPTIONS, WORDS

Argument = Callable[[argparse.ArgumentParser], object]  # adds itself to a parser
DEFAULT_RUNS_DIR = Path("runs")
SETTING_WORDS = frozenset((*ALL_WORDS, *OWN_OPTIONS))  # also as options: --seed 3
EXPERIMENT_KEYS = ("+experiment", "experiment")  # the long spelling of the positional EXPERIMENT


class UsageError(Exception):
    """The command line itself is wrong. Printed as `error: ...`; the exit code is 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing. (rl_lab.types has the same words, but importing it costs torch.)"""
    names = {each.lstrip("-"): each for each in known}  # the dashes of options are alike in all of them
    close = get_close_matches(word.lstrip("-"), list(names), n=1, cutoff=0.6)
    return f" Did you mean '{names[close[0]]}'?" if close else ""


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports mistakes the way the rest of RL Lab does and never guesses abbreviations.

    `text` is a command's docstring: what it does, then its `examples:`, which come last in its help.
    """

    def __init__(
        self, prog: str | None = None, text: str | None = None, arguments: Iterable[Argument] = (), **others: Any
    ) -> None:
        description, _, examples = (text or "").rstrip().partition("\n\nexamples:\n")
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}" if examples else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **others,  # what argparse itself hands to the parsers of actions
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error (or RL_LAB_DEBUG=1)")
        for add in arguments:
            add(self)

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            message += "." + nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        required = re.fullmatch(r"(the following arguments are required: )(.*)", message)
        if required:  # argparse also lists those that may be left out
            optional = {action.metavar for action in self._actions if action.nargs in ("*", "?")}
            message = required[1] + ", ".join(each for each in required[2].split(", ") if each not in optional)
        raise UsageError(f"{message}\n  {' '.join(self.format_usage().split())}\n  More: {self.prog} --help")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all of `words`, options and positionals in any order; a leftover is an error with a suggestion."""
        words = self._with_dashed_values(words)
        if any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            arguments, leftover = self.parse_known_args(words)
        else:
            arguments, leftover = self.parse_known_intermixed_args(words)
        if leftover:
            options = getattr(arguments, "parser", self)._option_string_actions
            kind = "option" if leftover[0].startswith("-") else "argument"
            self.error(f"unknown {kind} '{leftover[0]}'.{nearest(leftover[0].partition('=')[0], options)}")
        return arguments

    def _with_dashed_values(self, words: Sequence[str]) -> list[str]:
        """`--sort -seed` as `--sort=-seed`: a word with one dash that is no option is a value."""
        joined: list[str] = []
        for word in words:
            option = self._option_string_actions.get(joined[-1]) if joined else None
            is_value = re.match("-[^-]", word) and word.partition("=")[0] not in self._option_string_actions
            if is_value and option is not None and option.nargs is None:
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined


def settings_from_options(
    words: Sequence[str], parser: argparse.ArgumentParser, *, is_sweep: bool | None = None
) -> list[str]:
    """`--seed 3` and `--total-timesteps=1e5` as the settings seed=3 and total_timesteps=1e5; options stay options.

    So are dotted keys (`--algorithm.discount 0.98`) and, in a W&B sweep, all words that are no option: `wandb agent`
    writes them as `--key=value`, as `--key value`, or without a value, which stands for true.
    """
    is_sweep = bool(os.environ.get("WANDB_SWEEP_ID")) if is_sweep is None else is_sweep
    result: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        option, equals, value = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        action = parser._option_string_actions.get(option)
        if action and action.nargs != 0 and not equals:
            result += [word, *waiting[:1]]  # the value of an option is nobody's setting
            waiting = waiting[1:]
        elif action or not word.startswith("--") or not key:
            result.append(word)
        elif not (is_sweep or "." in key or key in SETTING_WORDS):
            words_as_options = [f"--{each.replace('_', '-')}" for each in sorted(SETTING_WORDS)]
            known = [*parser._option_string_actions, *words_as_options]
            parser.error(f"unknown option '{option}'.{nearest(option, known)}")
        elif equals:
            result.append(f"{key}={value}")
        elif waiting and not waiting[0].startswith("--") and "=" not in waiting[0]:
            result.append(f"{key}={waiting.pop(0)}")
        elif is_sweep or "." in key or _is_switch(key):
            result.append(f"{key}=true")
        else:
            raise UsageError(f"{option} lacks its value: write {key}=VALUE, or {option} VALUE.")
    return result


def _is_switch(key: str) -> bool:
    """Whether `--key` alone says enough: it switches something on, or only has an answer, which it gets (--render)."""
    word = WORDS.get(key)
    return word is not None and (not word.sets or word.is_switch or "true" in word.values)


def split_words(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """(`names`, `overrides`): `key=value`, `+key=value` and `~key` are overrides, everything else is a name.

    `+experiment=NAME` counts as the name NAME, so that Hydra's own spelling works unchanged.
    """
    names, overrides = [], []
    for word in words:
        key, equals, value = word.partition("=")
        if key in EXPERIMENT_KEYS and equals:
            names.append(value)
        elif equals or word.startswith("~"):
            overrides.append(word)
        else:
            names.append(word)
    return names, overrides


def one_name(words: Iterable[str], what: str) -> tuple[str | None, list[str]]:
    """Like `split_words`, for commands that take at most one name."""
    names, overrides = split_words(words)
    if len(names) > 1:
        word = names[1].replace("-", "_")
        if word in SETTING_WORDS or word.partition(".")[0] in BLOCKS:  # seed 3, seed = 3, algorithm.discount =0.9
            others = [*names[2:], *(each[1:] for each in overrides if each.startswith("="))]
            value = next((each for each in others if each not in ("", "=")), "VALUE")
            raise UsageError(f"'{names[1]}' is a setting: write it without spaces, {word}={value}")
        environment, other = sorted(names[:2], key=lambda name: not re.search(r"-v\d+$", name))
        is_pair = what == "experiment" and re.search(r"-v\d+$", environment) and not re.search(r"-v\d+$", other)
        hint = f" Did you mean {environment}:{other.lower()}?" if is_pair else ""
        raise UsageError(
            f"'{names[1]}' is a second {what} after '{names[0]}'; one is allowed.{hint} "
            "Overrides are written key=value."
        )
    return (names[0] if names else None), overrides


def runs_dir_of(arguments: argparse.Namespace) -> Path:
    """Where the commands that read runs look for them."""
    return arguments.runs_dir or DEFAULT_RUNS_DIR


def chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some of the options, as keywords for the function that does the work."""
    return {name: getattr(arguments, name) for name in names}


def conditions(arguments: argparse.Namespace) -> list[str]:
    """What --where and --tag ask for."""
    return [*arguments.where, *(f"tags={word}" for word in arguments.tag)]


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return number


def whole(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")
    return int(text)


# --- arguments that several commands have ---


def argument(*names: str, **settings: Any) -> Argument:
    """What argparse's `add_argument` takes, for a parser that is made later."""
    return lambda parser: parser.add_argument(*names, **settings)


def quiet(help: str = "print only warnings and errors") -> Argument:
    return argument("-q", "--quiet", action="store_true", help=help)


RUNS_DIR = argument("--runs-dir", type=Path, metavar="DIR", help="where runs live (default: ./runs)")
CONFIG_DIR = argument("--config-dir", type=Path, metavar="DIR", help="your own configs (default: ./configs)")
JSON = argument("--json", action="store_true", help="print JSON and nothing else on stdout")
RUN = (argument("run", metavar="RUN", help="id, unique prefix, path, @last, @best or @best:ENVIRONMENT"), RUNS_DIR)
YES = argument("--yes", "-y", action="store_true", help="do not ask")
WHERE_HELP = "FIELD OPERATOR VALUE, such as algorithm=ppo, env~Cart, 'eval/return>200'; can be repeated"
WHERE = (
    argument("--where", action="append", default=[], metavar="CONDITION", help=WHERE_HELP),
    argument("--tag", action="append", default=[], metavar="WORD", help="only runs with this tag; can be repeated"),
)
TRUST_HELP = "a package that the run's config may import; can be repeated (docs/security.md)"
TRUST = argument("--trust", action="append", default=[], metavar="PACKAGE", help=TRUST_HELP)
CHECKPOINT = argument("--checkpoint", default="latest", metavar="best|latest|PATH", help="which (default: latest)")
POLICY = (  # how a run's policy is loaded and where it acts
    CHECKPOINT,
    argument("--seed", type=int, metavar="S", help="of policy and environments (default: the run's)"),
    TRUST,
)
