"""The live panel and the closing summary as rich renderables. Imported only where something is rendered."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rl_lab.metrics.view import EVALUATION_RETURN, HEADLINES, RunView
from rl_lab.utils.formatting import change_arrow, format_duration, format_number, proportional_widths, sparkline
from rl_lab.utils.text import printable

SPLIT_COLOURS = {
    "environment": "green",
    "policy": "cyan",
    "device": "bright_blue",
    "update": "blue",
    "evaluation": "magenta",
    "checkpoint": "yellow",
    "logging": "bright_black",
    "overhead": "red",
}
LEVEL_STYLES = {"info": "dim", "warning": "yellow", "error": "bold red"}
FIXED_LINES = 12  # everything in the panel but the table's rows
SPLIT_WIDTH = 40


class NonExitingConsole(Console):
    """Leaves a broken pipe to its user, where rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def render_panel(view: RunView, *, height: int) -> Panel:
    """The whole panel, with as many metrics as `height` lines leave space for."""
    limit = max(3, min(14, height - FIXED_LINES - len(view.messages)))
    parts: list[RenderableType] = [_progress(view), _counters(view)]
    if view.history:
        parts += [Rule(style="dim"), _metric_table(view, limit)]
    if any(name.startswith(("time/", "system/")) for name in view.latest):
        parts += [Rule(style="dim"), _time_split(view)]
    parts += [Text(text, style=LEVEL_STYLES[level], overflow="ellipsis", no_wrap=True) for level, text in view.messages]
    return Panel(Group(*parts), title=Text(view.title, style="bold"), border_style="blue", box=box.ROUNDED)


def _progress(view: RunView) -> Table:
    line = Table.grid(expand=True, padding=(0, 1))
    for ratio in (None, 1, None, None):
        line.add_column(ratio=ratio, no_wrap=True)
    phase = view.phase_name
    if view.phase_count > 1:
        phase += f" ({view.phase_index + 1}/{view.phase_count}, {view.phase_fraction:.0%})"
    line.add_row(
        Text(phase, style="bold"),
        ProgressBar(total=1.0, completed=view.run_fraction),
        Text(f"{view.run_fraction:.1%}"),
        Text(f"ETA {format_duration(view.eta_s)}", style="cyan"),
    )
    return line


def _counters(view: RunView) -> Table:
    steps = format_number(view.latest.get("agent_steps"))
    if view.total:
        steps += f" / {view.total:,}"
    entries = {
        "agent steps": steps,
        "frames": format_number(view.latest.get("env_frames")),
        "episodes": format_number(view.latest.get("episodes")),
        "updates": format_number(view.latest.get("updates")),
        "wall time": format_duration(view.latest.get("wall_s")),
        "steps/s": format_number(view.agent_steps_per_second),
    }
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in entries:
        table.add_column(no_wrap=True, justify="center")
    table.add_row(*[Text(label, style="dim") for label in entries])
    table.add_row(*[Text(value) for value in entries.values()])
    return table


def _metric_table(view: RunView, limit: int) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    columns = ({"ratio": 1}, {"justify": "right", "min_width": 10}, {"width": 1}, {"min_width": 24}, {"min_width": 14})
    for column in columns:
        table.add_column(no_wrap=True, **column)
    for name in view.table_names(limit):
        values = list(view.history[name])
        is_best = name == EVALUATION_RETURN and view.best_evaluation is not None
        table.add_row(
            Text(HEADLINES.get(name, name), style="bold" if "return" in HEADLINES.get(name, "") else ""),
            Text(format_number(values[-1]), style="bold"),
            Text(change_arrow(values), style="dim"),
            Text(sparkline(values), style="cyan"),
            Text(f"best {format_number(view.best_evaluation)}" if is_best else "", style="green"),
        )
    return table


def _time_split(view: RunView) -> Table:
    found = {section: view.latest.get(f"time/{section}_fraction", 0.0) for section in SPLIT_COLOURS}
    bar, legend = Text(no_wrap=True), Text()
    for section, width in zip(found, proportional_widths(list(found.values()), SPLIT_WIDTH), strict=True):
        bar.append("█" * width, style=SPLIT_COLOURS[section])
        if found[section] >= 0.005:
            legend.append(f"{section} {found[section]:.0%}  ", style=SPLIT_COLOURS[section])
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("time"), Group(bar, legend))
    table.add_row(Text("machine"), _system(view))
    return table


def _system(view: RunView) -> Text:
    units = {"cpu_percent": "CPU {:.0f} %", "ram_gib": "RAM {:.1f} GiB"}
    units |= {"gpu_percent": "GPU {:.0f} %", "gpu_memory_gib": "GPU memory {:.1f} GiB"}
    shown = [form.format(view.latest[f"system/{key}"]) for key, form in units.items() if f"system/{key}" in view.latest]
    return Text("   ".join(shown), style="dim")


def render_summary(
    title: str, facts: Mapping[str, str], paths: Mapping[str, str], commands: Mapping[str, str]
) -> Panel:
    """Facts, then where the files lie, then what to type next."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for style, entries in (("bold", facts), ("cyan", paths), ("green", commands)):
        for label, value in entries.items():
            table.add_row(label, Text(printable(value), style=style))
    return Panel(table, title=Text(title, style="bold"), border_style="green", box=box.ROUNDED, expand=False)
