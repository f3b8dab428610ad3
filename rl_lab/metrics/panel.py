"""The live panel, the line of a notebook and the closing summary, as text. Pure functions of a RunView."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap

from rl_lab.metrics.pace import Reading
from rl_lab.metrics.view import RunView
from rl_lab.utils.formatting import format_duration, format_number, proportional_widths
from rl_lab.utils.screen import Span, cut, line_of, pad, text_width

SPLIT_COLOURS = {
    "environment": "green",
    "policy": "cyan",
    "device": "bright blue",
    "update": "blue",
    "evaluation": "magenta",
    "checkpoint": "yellow",
    "logging": "grey",
    "overhead": "red",
}
WIDEST, NARROWEST = 120, 24  # columns of the panel
FIXED_LINES = 13  # everything in the panel but the table's rows
LABEL = 9  # columns of "machine" and the space behind it
FULL, EMPTY = "━", "─"
Line = list[Span]


def render_panel(view: RunView, *, columns: int, height: int, colours: bool = True) -> list[str]:
    """The panel's lines, each as wide as the others, with as many metrics as `height` lines leave space for."""
    width = max(NARROWEST, min(WIDEST, columns))
    inner = width - 4
    body: list[Line | None] = [_progress(view, inner), _activity(view, inner), *_counters(view, inner)]
    names = view.table_names(max(0, min(14, height - FIXED_LINES)))
    if names:
        body += [None, *(_metric(view, name, inner) for name in names)]
    if any(name.startswith(("time/", "system/")) for name in view.latest):
        body += [None, *_time_split(view, inner)]
    lines = [_edge("╭", f" {view.title} ", "╮", width, colours)]
    for line in body[: max(1, height - 3)]:
        if line is None:
            lines.append(_edge("├", "", "┤", width, colours))
        else:
            side = line_of([("│", "blue")], 1, colours=colours)
            lines.append(f"{side} {line_of(line, inner, colours=colours)} {side}")
    return [*lines, _edge("╰", "", "╯", width, colours)]


def _edge(left: str, title: str, right: str, width: int, colours: bool) -> str:
    title = cut(title, width - 4)
    rest = "─" * (width - 3 - text_width(title))
    return line_of([(f"{left}─", "blue"), (title, "bold"), (f"{rest}{right}", "blue")], width, colours=colours)


def _progress(view: RunView, width: int) -> Line:
    phase = view.phase_name
    if view.phase_count > 1:
        phase += f" ({view.phase_index + 1}/{view.phase_count}, {view.phase_fraction:.0%})"
    phase = cut(phase, width // 2)
    percent, eta = f" {view.run_fraction:.1%}", f"  ETA {format_duration(view.eta_s)}"
    space = max(0, width - text_width(phase) - len(percent) - len(eta) - 1)
    full = int(view.run_fraction * space)
    bar: Line = [(FULL * full, "green"), (EMPTY * (space - full), "dim")]
    return [(f"{phase} ", "bold"), *bar, (percent, ""), (eta, "cyan")]


def activity_words(view: RunView) -> str:
    """`evaluating 37 of 100`, `compiling kernels 0:12`: what goes on, how far it is, and since when if that is long."""
    return "" if view.reading is None else words_of(view.reading)


def words_of(reading: Reading) -> str:
    words = reading.activity
    if reading.total:
        words += f" {reading.done:,} of {reading.total:,}"
    return f"{words} {format_duration(reading.activity_s)}" if reading.activity_s >= 2.0 else words


def _activity(view: RunView, width: int) -> Line:
    speed = view.agent_steps_per_second
    right = f"{format_number(speed)} steps/s" if speed else ""
    updates = view.pace.updates_per_second
    if updates and (not speed or width >= 70):
        right = f"{updates:,.{0 if updates >= 100 else 1}f} updates/s  {right}".rstrip()
    left = pad(activity_words(view), max(0, width - len(right) - 1))
    return [(left, "cyan"), (f" {right}", "")]


def _counters(view: RunView, width: int) -> list[Line]:
    counts = view.counts
    steps = format_number(counts.agent_steps) + (f" / {view.total:,}" if view.total else "")
    entries = {
        "agent steps": steps,
        "time": format_duration(view.wall_s),
        "updates": format_number(counts.updates),
        "episodes": format_number(counts.episodes),
        "frames": format_number(counts.env_frames) if counts.env_frames != counts.agent_steps else "",
    }
    shown: dict[str, int] = {}  # as many as there is space for
    for label, value in entries.items():
        needed = max(len(label), len(value))
        if value and sum(shown.values()) + 2 * len(shown) + needed <= width:
            shown[label] = needed
    space = (width - sum(shown.values())) // max(1, len(shown))
    return [
        [(pad(label, shown[label] + space), "dim") for label in shown],
        [(pad(entries[label], shown[label] + space), "") for label in shown],
    ]


def _metric(view: RunView, name: str, width: int) -> Line:
    blocks = max(8, min(48, (width - 12) // 3))
    value = 10 if width < 70 else 12
    curve = view.curve(name, blocks)
    space = width - value - blocks - 4
    note = f"  {curve.note}" if curve.note else ""
    if text_width(curve.label) + len(note) > space:
        note = note[1:]  # one space is enough to keep a label whole
    label = cut(curve.label, max(8, space - len(note)))
    return [
        (label, "bold" if curve.is_highlight else ""),
        (pad(note, space - text_width(label)), "green"),
        (f"{pad(curve.value, value, right=True)} ", "bold"),
        (f"{curve.arrow}  ", "dim"),
        (curve.sparkline, "cyan"),
    ]


def _time_split(view: RunView, width: int) -> list[Line]:
    found = {section: view.newest(f"time/{section}_fraction") or 0.0 for section in SPLIT_COLOURS}
    lines: list[Line] = [[("time".ljust(LABEL), "")]]
    for section, blocks in zip(found, proportional_widths(list(found.values()), min(60, width - LABEL)), strict=True):
        lines[0].append(("█" * blocks, SPLIT_COLOURS[section]))
    legend = [(f"{section} {part:.0%}", SPLIT_COLOURS[section]) for section, part in found.items() if part >= 0.005]
    return [*lines, *_wrapped(legend, width), *_machine(view, width)]


def _wrapped(words: list[Span], width: int) -> list[Line]:
    """Words below each other's beginning, as many in a line as fit."""
    lines: list[Line] = []
    used = width
    for text, style in words:
        if used + len(text) + 2 > width:
            lines.append([(" " * LABEL, "")])
            used = LABEL - 2
        lines[-1].append((("  " if used >= LABEL else "") + text, style))
        used += len(text) + 2
    return lines


def _machine(view: RunView, width: int) -> list[Line]:
    units = {"cpu_percent": "CPU {:.0f}%", "ram_gib": "RAM {:.1f} GiB"}
    units |= {"gpu_percent": "GPU {:.0f}%", "gpu_memory_gib": "GPU memory {:.1f} GiB"}
    shown = [form.format(view.latest[f"system/{key}"]) for key, form in units.items() if f"system/{key}" in view.latest]
    if view.display_fraction is not None:
        shown.append(f"display {view.display_fraction:.1%}")
    return [[("machine".ljust(LABEL), ""), ("   ".join(shown), "dim")]] if shown else []


def one_line(view: RunView) -> str:
    """The whole run in one line, for places that have no screen to paint on."""
    full = int(view.run_fraction * 20)
    steps = format_number(view.counts.agent_steps) + (f" / {view.total:,}" if view.total else "")
    parts = [f"{FULL * full}{EMPTY * (20 - full)} {view.run_fraction:.1%}", f"{steps} steps"]
    if view.agent_steps_per_second:
        parts.append(f"{format_number(view.agent_steps_per_second)}/s")
    parts += [f"{view.curve(name, 8).label} {view.curve(name, 8).value}" for name in view.table_names(3)]
    parts += [words for words in (activity_words(view),) if words]
    return " · ".join([*parts, f"{format_duration(view.wall_s)}, ETA {format_duration(view.eta_s)}"])


def render_summary(
    title: str,
    facts: Mapping[str, str],
    paths: Mapping[str, str],
    commands: Mapping[str, str],
    *,
    columns: int,
    colours: bool = True,
) -> list[str]:
    """Facts, where the files lie, what to type next. A path or command that does not fit beside its label has a line of
    its own, which the terminal may break where it likes: what is copied from there is whole."""
    space = max(len(label) for label in [*facts, *paths, *commands]) + 4
    rest = "─" * max(0, columns - text_width(title) - 5)
    lines = [line_of([("─── ", "green"), (title, "bold green"), (f" {rest}", "green")], columns, colours=colours)]
    for style, entries in (("bold", facts), ("cyan", paths), ("green", commands)):
        for label, value in entries.items():
            head = line_of([(f"  {label}", "dim")], space, colours=colours)
            parts = wrap(value, max(20, columns - space)) if entries is facts else [value]
            shown = [line_of([(part, style)], text_width(part), colours=colours) for part in parts]
            if all(space + text_width(part) <= columns for part in parts):
                lines += [
                    before + part for before, part in zip([head, *[" " * space] * len(shown)], shown, strict=False)
                ]
            else:
                lines += [head.rstrip(), *shown]
    return lines
