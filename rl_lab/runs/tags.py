"""Tags and notes: what people write on a run. They lie in its tags.json, also while the run is under way."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rl_lab.runs.files import readable_disk_errors
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, did_you_mean


def change_tags(run: RunDirectory, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[str]:
    """Add and remove tags; what the run has afterwards. A tag it has already stays where it is."""
    for word in add:
        if not word.strip() or any(each.isspace() or not each.isprintable() for each in word):
            raise ConfigError(f"The tag '{word}' is empty or holds a blank: write one word, such as paper or good-one.")
    with _changing(run) as content:
        for word in remove:
            if word not in content["tags"]:
                known = ", ".join(content["tags"]) or "none"
                hint = did_you_mean(word, content["tags"])
                raise ConfigError(f"Run '{run.id}' has no tag '{word}'.{hint} It has: {known}.")
        kept = [tag for tag in content["tags"] if tag not in remove]
        content["tags"] = list(dict.fromkeys([*kept, *add]))
        tags: list[str] = content["tags"]
    return tags


def add_note(run: RunDirectory, text: str, *, replace: bool = False) -> str:
    """Write a line below the notes there are, or in their place; all the notes come back."""
    with _changing(run) as content:
        content["notes"] = "\n".join(each for each in ("" if replace else content["notes"], text.strip()) if each)
        notes: str = content["notes"]
    return notes


@contextmanager
def _changing(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """tags.json, read and written again; whoever else changes it at this moment waits."""
    run.output("tags.json")  # refused where links leave the run
    with readable_disk_errors(run.tags_path):
        folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            content = run.read_tags()
            yield content
            run.write_tags(content["tags"], content["notes"])
        finally:
            os.close(folder)
