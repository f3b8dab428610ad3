"""Words of other libraries -> settings of ours, in the chosen experiment (the table is words.py).

total_timesteps=1e5  ->  training.phases.train.duration_steps=100000, said in one line
gamma=0.98           ->  algorithm.discount=0.98
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from rl_lab.config.files import Config, paths_of, value_at
from rl_lab.config.words import ALGORITHM_WORDS, DURATION, ENVIRONMENT_WORDS, SAME_VALUES, WORDS, Word
from rl_lab.types import ConfigError
from rl_lab.utils.reports import REPORTS_VARIABLE

PHASES = "training.phases"


def name_from_words(experiment: str | None, overrides: Sequence[str], default: str) -> tuple[str | None, list[str]]:
    """`env=CartPole-v1 algo=dqn` as the name CartPole-v1:dqn; beside a named experiment, as the settings they are."""
    given = {word.partition("=")[0]: word.partition("=")[2] for word in overrides if "=" in word}
    environments = [name for name in ENVIRONMENT_WORDS if name in given]
    algorithms = [name for name in ALGORITHM_WORDS if name in given]
    if not environments and not algorithms:
        return experiment, list(overrides)
    for name in (*environments, *algorithms):
        if not given[name].strip("'\""):
            raise ConfigError(f"{name}= names nothing: write {name}=VALUE, such as env=CartPole-v1 or algo=ppo.")
    for names in (environments, algorithms):
        if len(names) > 1:
            raise ConfigError(f"{names[0]}={given[names[0]]} and {names[1]}={given[names[1]]} say the same: keep one.")
    rest = [word for word in overrides if word.partition("=")[0] not in (*environments, *algorithms)]
    algorithm = given[algorithms[0]].lower() if algorithms else None
    environment = given[environments[0]].strip("'\"") if environments else None
    if experiment is None:
        default_environment, _, default_algorithm = default.rpartition(":")
        named = f"{environment or default_environment}:{algorithm or default_algorithm}"
        return named, rest
    if environment is not None and environment != experiment.rpartition(":")[0]:
        rest.insert(0, f"environment.id='{environment}'")
        say(f"{environments[0]}={environment} sets environment.id={environment}; the rest stays as in {experiment}.")
    return experiment, [*rest, *([f"algorithm={algorithm}"] if algorithm is not None else [])]


def is_foreign(key: str) -> bool:
    return key in WORDS


def translate(words: Iterable[str], config: Config) -> list[str]:
    """The overrides with every known word replaced by what it sets here; a sentence where it can set nothing."""
    words = list(words)
    found: dict[int, list[str]] = {}  # by place
    settled: list[str] = []
    sentences: dict[int, str] = {}  # by place, for later: a word that is refused after them makes them void
    said: dict[str, tuple[str, str, str]] = {}  # by setting: the word, its key, its value
    for place in sorted(range(len(words)), key=lambda place: _is_total(words[place])):  # what phases take comes first
        word = words[place]
        key, _, value = word.partition("=")
        bare = key.lstrip("+")
        if bare in SAME_VALUES:
            settings = [f"{bare}={SAME_VALUES[bare].get(value, value)}"]
        elif bare not in WORDS or bare in config:
            settings = [word]
        else:
            known = _with_durations(settled, config) if _is_total(word) else config
            settings, sentences[place] = _settings(bare, value, WORDS[bare], known)
        for setting in settings:
            name, _, number = setting.lstrip("+").partition("=")
            before, by, old = said.setdefault(name, (word, bare, number))
            if by != bare and old != number:
                raise ConfigError(f"{before} and {word} both set {name}: keep one.")
        found[place] = settings
        settled += settings
    for place in sorted(sentences):
        if sentences[place]:
            say(sentences[place])
    return [setting for place in range(len(words)) for setting in found[place]]


def _is_total(word: str) -> bool:
    """Whether it counts the steps of all phases."""
    name = word.partition("=")[0].lstrip("+")
    return name in WORDS and DURATION in WORDS[name].sets


def _with_durations(settings: Sequence[str], config: Config) -> Config:
    """The config with the phases' numbers of steps as these settings have them."""
    phases = value_at(config, PHASES)
    given = {key.lstrip("+"): value.replace("_", "") for key, _, value in (each.partition("=") for each in settings)}
    if not isinstance(phases, list):
        return config

    def own(phase: dict[str, Any]) -> dict[str, Any]:
        steps = given.get(f"{PHASES}.{phase.get('name')}.duration_steps", "")
        is_number = re.fullmatch(r"\d+(\.\d*)?(e\d+)?", steps)  # what is none is refused where all settings are
        return {**phase, "duration_steps": int(float(steps))} if is_number else phase

    training = {**config["training"], "phases": [own(phase) for phase in phases]}
    return {**config, "training": training}


def hint_of_word(name: str, config: Config) -> str:
    """` Here that is 'algorithm.discount'.` for `algorithm.gamma`; empty where the table says nothing."""
    if name not in WORDS:
        return ""
    keys = next((found for pattern in WORDS[name].sets if (found := _keys(pattern, config))), [])
    if keys and keys[0].endswith(f".{name}"):
        return f" Did you mean '{keys[0]}'?"
    if keys:
        return f" Here that is '{keys[0]}'."
    return f" Here: {WORDS[name].answer}." if WORDS[name].answer else ""


def _settings(name: str, value: str, word: Word, config: Config) -> tuple[list[str], str]:
    """What a word sets, and the sentence that says so."""
    given, plain = f"{name}={value}", value.strip("'\"")
    if plain in word.values and word.values[plain] is None:
        return [], f"{given} changes nothing: {word.remark}."
    keys = next((found for pattern in word.sets if (found := _keys(pattern, config))), [])
    is_missing = word.only and all(value_at(config, path) is None for path in word.only.split("|"))
    if not keys or is_missing:
        raise ConfigError(_refusal(given, word, config))
    if word.is_closed and plain not in word.values:
        raise ConfigError(f"{given}: write {keys[0]}=VALUE (`rl-lab config explain {keys[0]}`).")
    _refuse_several_values(given, keys, config)
    plain = word.values.get(plain) or value
    plain = SAME_VALUES.get(keys[0], {}).get(plain, plain)
    settings = [f"{key}={plain}" for key in keys]
    remark = ""
    if DURATION in word.sets:
        settings, remark = _duration(given, keys[0], plain, config)
    return settings, "" if keys[0] == name else f"{given} sets {' and '.join(settings)}{remark}."


def _refusal(given: str, word: Word, config: Config) -> str:
    name = given.partition("=")[0]
    if DURATION in word.sets:
        phases = _named(config, lambda phase: True)
        return (
            f"{given}: none or several of the phases ({', '.join(phases)}) collect and learn, so it is not clear "
            f"whose steps are meant. Write training.phases.{phases[-1]}.duration_steps=VALUE, or duration_updates "
            "where a phase takes no steps."
        )
    if word.answer:
        return f"{name} is not a setting here: {word.answer}."
    algorithm = str(value_at(config, "algorithm._target_")).rpartition(".")[2]
    ours = " or ".join(word.sets).replace("PHASE", f"{PHASES}.NAME")
    return f"{name} would be {ours}, which {algorithm} does not have: leave it out."


def _refuse_several_values(given: str, keys: Sequence[str], config: Config) -> None:
    """One number for parts that the experiment tells apart would be a guess."""
    values = {key: value_at(config, key) for key in keys if not key.startswith(f"{PHASES}.")}
    if len({_start(value) for value in values.values()}) > 1:
        listed = ", ".join(f"{key} ({value})" for key, value in values.items())
        raise ConfigError(f"{given} could mean several settings that differ here: {listed}. Name the one you mean.")


def _start(value: Any) -> object:
    """A number, or the one that a schedule begins with."""
    number = re.search(r"\(\s*([-+.\de]+)", value) if isinstance(value, str) else None
    return float(number[1]) if number else value if isinstance(value, int | float) else repr(value)


def _keys(pattern: str, config: Config) -> list[str]:
    """The settings of this config that a pattern names."""
    if pattern.startswith(("PHASE.", "PREFILL.")):
        part, _, key = pattern.partition(".")
        phases = _learning(config) if part == "PHASE" else _prefills(config)
        return [f"{PHASES}.{name}.{key}" for name in phases] if len(phases) == 1 else []
    if "*" not in pattern:
        return [pattern] if pattern in paths_of(config) else []
    block, _, key = pattern.partition(".*.")
    blocks = value_at(config, block) or {}
    return [f"{block}.{name}.{key}" for name, part in blocks.items() if isinstance(part, dict) and key in part]


def _named(config: Config, fits: Callable[[dict[str, Any]], object]) -> list[str]:
    phases = value_at(config, PHASES)
    return [str(phase.get("name")) for phase in phases if fits(phase)] if isinstance(phases, list) else []


def _learning(config: Config) -> list[str]:
    """Phases that take steps and learn; where none learns, those that take steps."""
    online = _named(config, _takes_steps)
    learning = _named(config, lambda phase: _takes_steps(phase) and _learns(phase))
    return learning or online


def _prefills(config: Config) -> list[str]:
    return _named(config, lambda phase: _takes_steps(phase) and not _learns(phase)) if len(_learning(config)) else []


def _takes_steps(phase: dict[str, Any]) -> bool:
    return phase.get("type", "online") == "online" and phase.get("duration_steps") is not None


def _learns(phase: dict[str, Any]) -> bool:
    return phase.get("workflow_hooks") != []


def _duration(given: str, key: str, text: str, config: Config) -> tuple[list[str], str]:
    """The learning phase takes what the phases before it leave of all steps."""
    name = key.split(".")[2]
    phases = [phase for phase in value_at(config, PHASES) if phase.get("name") != name and _takes_steps(phase)]
    others = sum(int(phase["duration_steps"]) for phase in phases)
    try:
        steps = float(text.replace("_", ""))
    except ValueError:
        raise ConfigError(f"{given}: write a number of agent steps, such as 100000 or 1e5.") from None
    if not steps.is_integer() or steps < 1:
        raise ConfigError(f"{given}: write a whole number of agent steps of at least 1, such as 1e5.")
    if steps <= others:
        taken = ", ".join(f"{PHASES}.{phase['name']}.duration_steps={phase['duration_steps']}" for phase in phases)
        raise ConfigError(f"{given} leaves nothing to learn from after {taken}: give more steps, or shorten that.")
    remark = f" ({others:,} more are those of {', '.join(str(phase['name']) for phase in phases)})" if others else ""
    return [f"{key}={int(steps) - others}"], remark


_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextmanager
def unsaid(quiet: bool) -> Iterator[None]:
    """While `quiet`, nothing is said of what a word sets; what is wrong with it is refused all the same."""
    token = _is_quiet.set(quiet)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def say(sentence: str) -> None:
    """One line for the user, once; among the trainings of a table, which said it already, not at all."""
    if not _is_quiet.get() and not os.environ.get(REPORTS_VARIABLE):
        _say_once(sentence)


@cache
def _say_once(sentence: str) -> None:
    logging.getLogger("rl_lab").warning(sentence)
