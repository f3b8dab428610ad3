"""`logging.writers` -> sinks: places for the rows besides metrics.jsonl."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_lab.config.construct import construct
from rl_lab.config.schema import Config, Settings
from rl_lab.metrics.sinks import Sink
from rl_lab.metrics.writers import Writer
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, did_you_mean

SHORT = {
    "csv": "rl_lab.metrics.csv_writer.CsvWriter",
    "tensorboard": "rl_lab.metrics.tensorboard_writer.TensorBoardWriter",
    "wandb": "rl_lab.metrics.wandb_writer.WandbWriter",
}
SWEEP_VARIABLE = "WANDB_SWEEP_ID"  # set by `wandb agent`, which learns of a run's score through W&B alone


def build_sinks(config: Config, settings: Settings, run: RunDirectory | None) -> list[Sink]:
    """Every writer that the config asks for; without a run they are only checked."""
    asked: list[Any] = [*(["tensorboard"] if settings.logging.tensorboard else []), *settings.logging.writers]
    blocks = [_block(each, f"logging.writers.{index}") for index, each in enumerate(asked)]
    if os.environ.get(SWEEP_VARIABLE) and all(block["_target_"] != SHORT["wandb"] for block in blocks):
        blocks.append(_block("wandb", "logging.writers"))
    injected = {
        "directory": Path(os.devnull) if run is None else run.path,
        "run_id": "" if run is None else run.id,
        "config": config,
        "axis": "agent_steps" if any(phase.type == "online" for phase in settings.phases) else "updates",
    }
    writers = [
        construct(block, place=f"logging.writers.{block['_target_']}", injected=injected, plugins=settings.plugins)
        for block in blocks
    ]
    for writer in writers:
        if not isinstance(writer, Writer):
            raise ConfigError(
                f"logging.writers names {type(writer).__name__}, which is no Writer: derive it from "
                "rl_lab.metrics.writers.Writer."
            )
    _refuse_doubles([writer.name for writer in writers])
    return [Sink(writer) for writer in writers]


def _block(asked: Any, place: str) -> Mapping[str, Any]:
    """A writer by its short name, or as a block of settings."""
    if isinstance(asked, Mapping):
        return {**asked, "_target_": SHORT.get(str(asked.get("_target_")), asked.get("_target_", ""))}
    if asked not in SHORT:
        raise ConfigError(
            f"{place} is {asked!r}.{did_you_mean(str(asked), SHORT)} Write {', '.join(SHORT)}, or a block with the "
            "`_target_` of your own class."
        )
    return {"_target_": SHORT[asked]}


def _refuse_doubles(names: Sequence[str]) -> None:
    taken = {"terminal", "jsonl", "text_log"}
    for name in names:
        if name in taken:
            raise ConfigError(
                f"logging.writers has two writers with the name '{name}': leave one out, or give your class another "
                "`name`. (logging.tensorboard brings one already.)"
            )
        taken.add(name)
