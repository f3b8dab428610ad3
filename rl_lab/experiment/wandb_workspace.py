"""A W&B workspace for our metrics: the same panels in every project, made once and found again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from rl_lab.metrics.names import label_of
from rl_lab.metrics.wandb_writer import PROJECT, has_api_key
from rl_lab.types import MissingExtraError, RunError

TITLE = "RL Lab"
VIEW = "rllab"  # W&B's own name for it, the same in every project: a second call finds what the first has made
TIMEOUT_S = 20
FILMS = ("eval/episode", "eval/dream")
# Section -> panels; a panel with several metrics draws them together.
SECTIONS: dict[str, Sequence[str | tuple[str, ...]]] = {
    "returns": (
        *("eval/episode_return_mean", "collect/episode_return_mean"),
        *("eval/episode_length_mean", "collect/episode_length_mean"),
    ),
    "policy": (
        *("controller/entropy", "controller/approx_kl", "controller/clip_fraction", "controller/policy_std"),
        *("controller/temperature", "controller/epsilon"),
    ),
    "values": ("controller/value_mean", "train/explained_variance", "controller/advantage_std"),
    "losses": ("loss/policy", "loss/value", "loss/critic", "loss/entropy", "loss/temperature"),
    "world model": (
        *("train/model_kl", "loss/reconstruction", "loss/dynamics", "loss/reward", "loss/continue"),
        *("controller/imagined_return", "loss/consistency"),
    ),
    "optimizers": ("train/grad_norm", "train/learning_rate"),
    "speed": (
        *("time/agent_steps_per_second", "time/updates_per_second"),
        (
            *("time/environment_fraction", "time/policy_fraction", "time/update_fraction", "time/evaluation_fraction"),
            *("time/checkpoint_fraction", "time/logging_fraction", "time/overhead_fraction"),
        ),
    ),
    "machine": ("system/cpu_percent", "system/ram_gib", "system/gpu_percent", "system/gpu_memory_gib"),
}
OPEN = ("returns", "episodes")  # the others are folded


@dataclass(frozen=True)
class SetUp:
    """A workspace, and what had to be done: it was `made`, was `there` already, or its panels were `replaced`."""

    entity: str
    project: str
    url: str
    done: Literal["made", "there", "replaced"]


def set_up_workspace(project: str = PROJECT, *, entity: str | None = None, replace: bool = False) -> SetUp:
    """Make the workspace of a project, and the project itself, where they are not there yet.

    A workspace whose panels were changed since, by hand or by another version, is left alone unless `replace` is set.
    """
    _check_here()
    import wandb

    with _explained():
        api = wandb.Api(timeout=TIMEOUT_S)
        entity = entity or api.default_entity
        if not entity:
            raise RunError("Your W&B account names no default entity: add --entity NAME.")
        api.create_project(project, entity)  # leaves one that is there as it is
        ours = _workspace(entity, project)
        there = _find(entity, project)
        if there is None:
            ours._internal_name = f"nw-{VIEW}-v"  # as W&B spells it; else save() draws a name at random
            return SetUp(entity, project, _saved(ours), "made")
        if _panels(there) == _panels(ours):
            return SetUp(entity, project, str(there.url), "there")
        if not replace:
            raise RunError(
                f"The workspace '{there.name}' of {entity}/{project} has other panels than this version sets up, and "
                f"was left alone: {there.url}. To put ours there, add --replace; to keep yours, save it in W&B as a "
                "view of your own first."
            )
        there.sections, there.settings = ours.sections, ours.settings
        return SetUp(entity, project, _saved(there), "replaced")


def _workspace(entity: str, project: str) -> Any:
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2

    sections = [
        workspaces.Section(name=name, is_open=name in OPEN, panels=[_line_plot(panel) for panel in panels])
        for name, panels in SECTIONS.items()
    ]
    films: list[Any] = [v2.MediaBrowser(title=label_of(name), media_keys=[name], num_columns=1) for name in FILMS]
    sections.insert(1, workspaces.Section(name="episodes", is_open=True, panels=films))
    settings = workspaces.WorkspaceSettings(x_axis="agent_steps")
    return workspaces.Workspace(entity=entity, project=project, name=TITLE, sections=sections, settings=settings)


def _line_plot(panel: str | tuple[str, ...]) -> Any:
    from wandb_workspaces.reports import v2

    names: list[Any] = [panel] if isinstance(panel, str) else list(panel)
    title = label_of(names[0]) if len(names) == 1 else f"{names[0].partition('/')[0]} split"
    return v2.LinePlot(title=title, x="agent_steps", y=names)


def _find(entity: str, project: str) -> Any:
    """The workspace that an earlier call has made, or None."""
    from wandb_workspaces import workspaces

    address = f"{os.environ.get('WANDB_BASE_URL') or 'https://wandb.ai'}/{entity}/{project}?nw={VIEW}"
    try:
        return workspaces.Workspace.from_url(address)
    except ValueError as error:
        if "not found in project" not in str(error):
            raise
        return None


def _panels(workspace: Any) -> dict[str, list[list[str]]]:
    """What is shown where; colours, sizes and what is folded are everybody's own."""
    return {section.name: [_shown(panel) for panel in section.panels] for section in workspace.sections}


def _shown(panel: Any) -> list[str]:
    names = getattr(panel, "y", None) or getattr(panel, "media_keys", None) or ()
    return [type(panel).__name__, *(str(getattr(name, "name", name)) for name in names)]


def _saved(workspace: Any) -> str:
    workspace.save()
    return str(workspace.url)


def _check_here() -> None:
    missing = [name for name in ("wandb", "wandb_workspaces") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"A W&B workspace needs the package '{missing[0]}', which is not installed: "
            "run `pip install 'rl-lab[wandb]'`."
        )
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        raise RunError(
            f"WANDB_MODE is '{os.environ['WANDB_MODE']}', and a workspace lies on W&B's server: unset it for this "
            "command. Runs that are kept offline find the workspace once `wandb sync` has sent them."
        )
    if not has_api_key():
        raise RunError("W&B has no API key here: run `wandb login`, or set WANDB_API_KEY, and try again.")


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what W&B's library raises into a sentence with its cure."""
    import wandb

    try:
        yield
    except (wandb.errors.Error, ValueError) as error:
        reason = str(error).strip().splitlines()[-1].rstrip(".") if str(error).strip() else type(error).__name__
        raise RunError(
            f"W&B did not set up the workspace: {reason}. Look at the connection and at `wandb login --verify`, and "
            "whether the entity is yours."
        ) from error
