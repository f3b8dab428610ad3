"""The Hugging Face Hub: folders go up in one commit and come down as plain files, under the commit's name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from rl_lab.types import ConfigError, MissingExtraError, RunError

NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
FILES = ["config.yaml", "environment.json", "manifest.json", "status.json", "metrics.jsonl", "checkpoints/*"]


def is_hub_name(text: str) -> bool:
    """`user/model` or `user/model@revision`, where nothing here is called so and the folder `user` does not exist."""
    return NAME.fullmatch(text) is not None and not os.path.lexists(text.partition("/")[0])


def upload(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Make the repository if it is not there, and replace what an earlier upload put there; its address."""
    check_repo(repo)
    api = _api()
    with _explained(repo):
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message=message, delete_patterns=["checkpoints/*"]
        )
    return str(made)


def check_repo(repo: str) -> None:
    found = NAME.fullmatch(repo)
    if found is None or found["revision"]:
        raise ConfigError(f"--repo is '{repo}': write USER/MODEL, such as ada/ppo-cartpole.")


def download(name: str) -> Path:
    """The run in a repository, as a folder of the user's cache; without a connection, the one that came down last."""
    found = NAME.fullmatch(name)
    assert found is not None, f"{name} is no name on the Hub"
    repo, revision = found["repo"], found["revision"]
    home, api = cache() / repo.replace("/", "--"), _api()
    try:
        with _explained(repo):
            commit = api.model_info(repo, revision=revision).sha
    except _UnreachableError:
        kept = sorted((path for path in home.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime_ns)
        kept = [path for path in kept if revision is None or path.name.startswith(revision)]
        if not kept:
            raise
        logging.getLogger("rl_lab").warning(f"The Hub cannot be reached: {repo} as it was at {kept[-1].name[:8]}.")
        return kept[-1]
    folder = home / commit
    with _explained(repo):
        api.snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=FILES)
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{repo} is on the Hub, but it is no run of RL Lab: it has no config.yaml.")
    return folder


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_lab" / "hub"


def _api() -> Any:
    if find_spec("huggingface_hub") is None:
        raise MissingExtraError(
            "The Hugging Face Hub needs the package 'huggingface_hub', which is not installed: "
            "run `pip install 'rl-lab[hub]'`."
        )
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="rl-lab")


class _UnreachableError(RunError):
    """There is no connection to the Hub."""


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what the Hub's library raises into a sentence with its cure."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # Of the HTTP library in use, which depends on the Hub's version.
    transport_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else None
        if code in (401, 403):
            cure = (
                "it is private or does not exist, or your token may not write there. `hf auth login`, or set HF_TOKEN"
            )
            raise RunError(f"The Hub refuses {repo}: {cure}.") from error
        if code == 404:
            raise RunError(f"There is no folder '{repo}' here, and no such model (or revision) on the Hub.") from error
        raise RunError(f"The Hub failed at {repo} (HTTP status {code}). Try again later.") from error
    except HFValidationError as error:
        raise ConfigError(f"'{repo}' is no name on the Hub: {error}") from error
    except (transport_error, OSError) as error:  # no route, a refused connection, HF_HUB_OFFLINE
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise _UnreachableError(
            f"The Hub cannot be reached for {repo}: {reason}. Try again with a connection."
        ) from error
