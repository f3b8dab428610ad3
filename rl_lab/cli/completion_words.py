"""What may follow `rl-lab train`: experiments, choices, settings with their values, environments. No torch, no YAML.

It is asked at every new shell, so it reads files as text: the names of config files, the keys and comments in them,
and the ids in Gymnasium's own table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rl_lab.config.words import WORDS
from rl_lab.utils.yaml_comments import comments_of_keys

SHIPPED = Path(__file__).parents[1] / "configs"
OWN = Path("configs")
HIDDEN_GROUPS = ("experiment", "preset_for")
VALUES = r"(?:[\w:.]+, )*[\w:.]+ or [\w:.]+"  # `auto, cpu or cuda` at the start of a comment


def train_words() -> list[str]:
    """Every word, each once, in the order of their kinds."""
    return list(dict.fromkeys([*_experiments(), *_choices(), *_settings(), *_foreign(), *_environments()]))


def _experiments() -> Iterator[str]:
    for folder in (OWN / "experiment", SHIPPED / "experiment"):
        yield from sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))


def _choices() -> Iterator[str]:
    for folder in (OWN, SHIPPED):
        for file in sorted(folder.glob("*/**/*.yaml")):
            group, _, option = file.relative_to(folder).with_suffix("").as_posix().partition("/")
            if group not in HIDDEN_GROUPS:
                yield f"{group}={option}"


def _settings() -> Iterator[str]:
    files = [(SHIPPED / "config.yaml", ""), *((file, "") for file in sorted((SHIPPED / "algorithm").glob("*.yaml")))]
    files += [(file, "environment") for file in sorted((SHIPPED / "environment").glob("*.yaml"))]
    for file, prefix in files:
        for key, comment in comments_of_keys(file.read_text(encoding="utf-8").splitlines(), prefix).items():
            if key.endswith("_target_") or key.startswith(("defaults", "training.phases")):
                continue
            yield f"{key}="
            found = re.match(VALUES, comment or "")
            values = re.split(r", | or ", found[0]) if found else []
            yield from (f"{key}={value}" for value in values)


def _foreign() -> Iterator[str]:
    yield "training.phases.train.duration_steps="
    yield from (f"{name}=" for name, word in WORDS.items() if word.sets)


def _environments() -> Iterator[str]:
    """`CartPole-v1:ppo` and the bare id, for --env; of several versions the last."""
    found = find_spec("gymnasium")  # does not import it
    table = Path(found.origin).parent / "envs" / "__init__.py" if found is not None and found.origin else None
    if table is None or not table.is_file():
        return
    newest: dict[str, str] = {}
    for name in re.findall(r"id=\"([\w/]+-v\d+)\"", table.read_text(encoding="utf-8")):
        newest[name.rpartition("-v")[0]] = name
    for name in newest.values():
        yield from (f"{name}:ppo", name, f"environment.id={name}")
