"""Weights & Biases as a sink: rows, pictures, videos and histograms, online or for `wandb sync` to send later."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rl_lab.metrics.media import Distribution, Media, encode, histogram
from rl_lab.metrics.writers import Axis, Row, Writer
from rl_lab.types import MissingExtraError, StateTree

INIT_TIMEOUT_S = 30
PROJECT = "rl-lab"
KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbWriter(Writer):
    """One W&B run per run of ours, under the same id; a resumed one goes on there.

    A row's number is its W&B step. W&B cannot forget rows, so those that a resumed run writes again are not sent
    twice: `wandb/rows_sent` in the run's directory counts what has been sent.
    """

    name = "wandb"

    def __init__(
        self,
        directory: Path,
        run_id: str,
        config: Mapping[str, Any],
        axis: Axis = "agent_steps",
        *,
        project: str = PROJECT,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["auto", "online", "offline"] = "auto",
    ) -> None:
        """mode auto: as WANDB_MODE says, else online where there is an API key and a connection, else offline."""
        if find_spec("wandb") is None:
            raise MissingExtraError(
                "The writer wandb needs the package 'wandb', which is not installed: "
                "run `pip install 'rl-lab[wandb]'`, or leave it out of logging.writers."
            )
        self.directory = Path(directory) / "wandb"
        self.mode = mode
        self._settings = {"project": project, "entity": entity, "group": group, "tags": list(tags) or None}
        self._run_id, self._config = run_id, config
        self._wandb: Any = None
        self._run: Any = None
        self._rows = 0  # of this run so far, sent or not
        self.axis = axis
        self._sent = -1  # of this and earlier processes; -1: not known yet

    def write(self, row: Row) -> None:
        number, self._rows = self._rows, self._rows + 1
        run = self._open()
        if number >= self._sent:
            run.log(dict(row), step=number)
            self._sent = number + 1
            self._sent_path.write_text(f"{self._sent}\n", encoding="utf-8")

    def show(self, name: str, media: Media, agent_steps: int) -> None:
        """Shown with the row that comes next."""
        run = self._open()
        if self._rows >= self._sent:
            run.log({name: self._drawn(name, media), "agent_steps": agent_steps}, step=self._rows, commit=False)

    def set_state(self, state: StateTree) -> None:
        self._rows = state["rows"]

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    @property
    def _sent_path(self) -> Path:
        return self.directory / "rows_sent"

    def _open(self) -> Any:
        if self._run is None:
            import wandb  # here, in the sink's thread: it takes a second

            self._wandb = wandb
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._sent < 0:
                text = self._sent_path.read_text(encoding="utf-8") if self._sent_path.is_file() else "0"
                self._sent = int(text) if text.strip().isdecimal() else 0
            self._run = self._begin(self._chosen_mode())
            self._run.define_metric("*", step_metric=self.axis)
        return self._run

    def _begin(self, mode: str) -> Any:
        try:
            return self._init(mode)
        except self._wandb.errors.Error as error:  # no connection, a key that is refused
            if mode == "offline":
                raise
            reason = str(error).strip().splitlines()[-1]
            logging.getLogger("rl_lab").warning(f"W&B does not take this run ({reason}). {self._offline_note()}")
            self._wandb.teardown()  # or the id counts as taken by the run that did not begin
            return self._init("offline")

    def _init(self, mode: str) -> Any:
        own = {} if os.environ.get("WANDB_SWEEP_ID") else {"id": self._run_id}  # an agent has chosen the id
        return self._wandb.init(
            **{name: value for name, value in self._settings.items() if value is not None},
            **own,
            name=self._run_id,
            dir=str(self.directory.parent),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=dict(self._config),
            settings=self._wandb.Settings(
                console="off", silent=True, init_timeout=INIT_TIMEOUT_S, x_disable_stats=True
            ),
        )

    def _chosen_mode(self) -> str:
        if self.mode != "auto":
            return self.mode
        asked = os.environ.get("WANDB_MODE")
        if asked:
            return asked
        if not has_api_key():  # asked here: wandb itself would ask on the terminal
            logging.getLogger("rl_lab").warning(f"W&B has no API key here. {self._offline_note()}")
            return "offline"
        return "online"

    def _offline_note(self) -> str:
        return f"Rows are kept in {self.directory}; send them with `wandb sync {self.directory}/offline-run-*`."

    def _drawn(self, name: str, media: Media) -> Any:
        if isinstance(media, Distribution):
            found = histogram(media.values)
            edges = [found["min"], *found["bucket_limit"]]
            return self._wandb.Histogram(np_histogram=(found["bucket"], edges))
        if len(media.frames) == 1:
            return self._wandb.Image(media.frames[0])
        encoded, _, _ = encode(media)
        path = self.directory / f"{name.replace('/', '_')}_{self._rows}.gif"
        path.write_bytes(encoded)
        return self._wandb.Video(str(path), format="gif")


def has_api_key() -> bool:
    """In a variable, or in ~/.netrc, where `wandb login` writes it."""
    if any(os.environ.get(name) for name in KEY_VARIABLES):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
