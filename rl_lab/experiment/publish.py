"""A run's policy -> the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from rl_lab.experiment.load import load_config
from rl_lab.experiment.trust import foreign_packages
from rl_lab.runs import hub
from rl_lab.runs.publish import write_bundle
from rl_lab.runs.run_directory import RunDirectory


@dataclass(frozen=True)
class Published:
    """What was uploaded or, in a dry run, would be."""

    files: dict[str, int]  # in the repository: bytes
    card: str  # README.md
    url: str | None  # None: a dry run


def publish_run(
    run: RunDirectory, repo: str, *, private: bool, dry_run: bool, license: str, checkpoint: str
) -> Published:
    hub.check_repo(repo)
    with tempfile.TemporaryDirectory(prefix="rl_lab_publish_") as place:
        folder = Path(place)
        packages = foreign_packages(load_config(run))
        files = write_bundle(run, folder, repo=repo, license=license, checkpoint=checkpoint, packages=packages)
        card = (folder / "README.md").read_text(encoding="utf-8")
        url = None if dry_run else hub.upload(folder, repo, private=private, message=f"Run {run.id}")
    return Published(files, card, url)
