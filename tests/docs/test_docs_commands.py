"""Every command on a page is one that the real command line and the real configs understand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_pages import PAGES, ROOT, commands, inline_code, name_of

from rl_lab.cli.main import SUMMARIES, parser_of
from rl_lab.cli.parsing import one_name
from rl_lab.config import compose as composition
from rl_lab.config.explain import explain

COMMANDS = [(page, words) for page in PAGES for words in commands(page)]
EXAMPLES = {
    "actor_critic": "my_algorithm",
    "soft_q": "my_algorithm",
    ":gail": "gail",
    "take_cover_model": "take_cover",
    "take_cover_dreams": "take_cover",
    "take_cover_rounds": "take_cover",
}  # folders of examples/ to type them in
SETTING = re.compile(r"(?!overrides)[a-z_]+(\.\w+)*=\S+")
INVENTED = re.compile(r"my_|key=value|word=value|KEY|NAME|DIR\b|ENV:|RUN(_ID)?/")  # what the reader is to fill in


def example_configs(line: str) -> Path | None:
    return next((ROOT / "examples" / folder / "configs" for word, folder in EXAMPLES.items() if word in line), None)


def identify(command: tuple[Path, list[str]]) -> str:
    return f"{name_of(command[0])}: {' '.join(command[1])}"


@pytest.mark.parametrize("command", COMMANDS, ids=identify)
def test_every_command_on_a_page_parses(command: tuple[Path, list[str]]) -> None:
    name, *words = command[1]
    if name.startswith("-"):
        assert name in ("--help", "--version", "--debug")
        return
    assert name in SUMMARIES
    if words and "--help" not in words:  # a command alone is a mention, not something to type
        parser_of(name).parse(words)


def trainings() -> list[str]:
    found = {" ".join(words) for _, words in COMMANDS if words[0] == "train" and not INVENTED.search(" ".join(words))}
    return sorted(found)


@pytest.mark.parametrize("line", trainings())
def test_every_training_on_a_page_composes(line: str) -> None:
    words = next(words for _, words in COMMANDS if " ".join(words) == line)
    arguments = parser_of("train").parse(words[1:])
    experiment, overrides = one_name(arguments.words, "experiment")
    if arguments.env or arguments.algorithm:
        experiment = f"{arguments.env or 'CartPole-v1'}:{arguments.algorithm or 'ppo'}"
    own = example_configs(line)
    for chosen in composition.split_sweep(overrides):
        assert composition.compose(experiment, chosen, config_dir=own)["training"]["phases"]


def test_every_setting_of_the_configs_page_exists() -> None:
    lines = [code.split() for code in inline_code(ROOT / "docs" / "configs.md") if not INVENTED.search(code)]
    settings = [word for line in lines if all(SETTING.fullmatch(word) for word in line) for word in line]
    assert len(settings) > 20
    groups = {"memory=lstm", "preset=debug"} & set(settings)
    keys = [word for word in settings if word.partition("=")[0] not in ("memory", "preset")]
    for key in keys:  # one by one: two words for one setting are refused
        composition.compose("ppo_cartpole", [*groups, key])


def test_every_explained_key_has_an_explanation() -> None:
    keys = [
        words for _, words in COMMANDS if words[:2] == ["config", "explain"] and not INVENTED.search(" ".join(words))
    ]
    assert keys
    for words in keys:
        own = example_configs(" ".join(words))
        experiment = [word for word in words[3:4] if "=" not in word]
        overrides = [word for word in words[3:] if "=" in word]
        found = explain(words[2], *experiment or [None], overrides, config_dir=own)
        assert found.documentation, " ".join(words)
