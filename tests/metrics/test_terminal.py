"""What a person sees: a panel, lines or nothing, and never at the run's expense."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl_lab.metrics.terminal import LiveDisplay
from rl_lab.metrics.view import RunView
from rl_lab.metrics.writers import Row
from rl_lab.types import ConfigError
from rl_lab.utils.formatting import change_arrow, format_duration, format_number, proportional_widths, sparkline
from rl_lab.utils.tree import equal


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TerminalStream(StringIO):
    def isatty(self) -> bool:
        return True


def row(agent_steps: int, **metrics: float) -> Row:
    counters: Row = {
        "env_frames": agent_steps * 4,
        "agent_steps": agent_steps,
        "episodes": 7,
        "updates": 3,
        "wall_s": agent_steps / 100,
    }
    return {**counters, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def full_row(agent_steps: int) -> Row:
    return row(
        agent_steps,
        collect__episode_return_mean=agent_steps / 10,
        eval__episode_return_mean=-agent_steps / 10,
        controller__entropy=0.69,
        controller__policy_std=0.5,
        loss__value=math.nan,
        time__environment_fraction=0.5,
        time__update_fraction=0.3,
        time__overhead_fraction=0.2,
        time__agent_steps_per_second=1234.4,
        time__eta_s=75.0,
        system__cpu_percent=87.0,
        system__ram_gib=1.25,
    )


def live_display(clock: Clock | None = None, **settings: Any) -> tuple[LiveDisplay, StringIO]:
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=50)
    display = LiveDisplay(
        title="ppo [CartPole-v1]", mode="live", console=console, clock=clock or Clock(), **{"total": 1000, **settings}
    )
    return display, stream


# --- formatting


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([5.0], "▄"),
        ([2.0, 2.0, 2.0], "▄▄▄"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 0], "█▁"),
        ([0.0, math.nan, 1.0], "▁ █"),
        ([math.inf, math.nan], "  "),
        ([-1e308, 1e308], "▁█"),
    ],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def test_a_long_sparkline_averages_equal_stretches() -> None:
    assert sparkline([0, 0, 1, 1, 2, 2, 3, 3], width=4) == sparkline([0, 1, 2, 3])
    assert len(sparkline(list(range(1000)), width=24)) == 24


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0, "0"),
        (12345678, "12,345,678"),
        (12345.6, "12,346"),
        (123.45, "123.5"),
        (-1.2345, "-1.234"),
        (0.01234, "0.0123"),
        (1.23e-5, "1.23e-05"),
        (1.5e12, "1.50e+12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_format_number(value: float | None, expected: str) -> None:
    assert format_number(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "–"),
        (math.inf, "–"),
        (7.4, "0:07"),
        (754, "12:34"),
        (3723, "1:02:03"),
        (183840, "2 d 03:04"),
        (-3, "0:00"),
    ],
)
def test_format_duration(seconds: float | None, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_arrows_and_widths() -> None:
    assert [change_arrow(values) for values in ([], [1], [1, 2], [2, 1], [1, 1], [math.nan, 1])] == list("  ↑↓→ ")
    assert proportional_widths([0.5, 0.25, 0.25], 8) == [4, 2, 2]
    assert sum(proportional_widths([1 / 3, 1 / 3, 1 / 3], 10)) == 10
    assert proportional_widths([0.8, 0.8], 10) == [8, 2]


# --- plain lines


def test_plain_lines_are_aligned_and_come_every_two_seconds_and_at_the_end() -> None:
    clock, stream = Clock(), StringIO()
    display = LiveDisplay(title="run", total=1000, mode="plain", stream=stream, clock=clock)
    display.write(row(100, collect__episode_return_mean=21.5))
    display.update_progress(0.1, "main", 0, 1)
    clock.now += 1.0
    display.write(row(200, collect__episode_return_mean=30.0))
    clock.now += 1.0
    display.write(row(300, collect__episode_return_mean=123.4, eval__episode_return_mean=500.0))
    clock.now += 0.5
    display.write(row(400, collect__episode_return_mean=200.25))
    display.close()
    display.close()
    first, second, last = stream.getvalue().splitlines()
    assert " ".join(first.split()) == "10.0% 100 steps 100/s return 21.500 eval – length – entropy – KL – ETA 0:09"
    assert "return    123.4  eval      500" in second
    assert "return    200.2  eval      500" in last and last.lstrip().startswith("40.0%")
    assert len({len(line) for line in (first, second, last)}) == 1
    assert [line.index("ETA") for line in (first, second)] == [last.index("ETA")] * 2


def test_a_world_models_divergence_stands_where_a_policys_would() -> None:
    stream = StringIO()
    LiveDisplay(title="run", mode="plain", stream=stream, clock=Clock()).write(row(100, train__model_kl=1.25))
    assert "KL 1.250" in " ".join(stream.getvalue().split())


def test_plain_messages_are_printed_at_once() -> None:
    stream = StringIO()
    display = LiveDisplay(title="run", mode="plain", stream=stream, clock=Clock())
    display.message("saved a checkpoint")
    display.message("environment 3 was restarted", "warning")
    display.close()
    assert stream.getvalue() == "saved a checkpoint\nwarning: environment 3 was restarted\n"


def test_a_plain_line_names_the_phase_when_there_are_several() -> None:
    stream = StringIO()
    display = LiveDisplay(title="run", mode="plain", stream=stream, clock=Clock())
    display.update_progress(0.5, "warm up", 0, 2)
    display.write(row(100))
    assert stream.getvalue().startswith(" 25.0%  warm up")


def test_quiet_says_nothing() -> None:
    stream = StringIO()
    display = LiveDisplay(title="run", mode="quiet", stream=stream)
    display.write(full_row(100))
    display.update_progress(0.5, "main", 0, 1)
    display.message("hello", "error")
    display.close()
    display.summary(agent_steps=100, seconds=1.0, score=2.0)
    assert stream.getvalue() == ""


def test_auto_is_live_on_a_terminal_and_plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert LiveDisplay(title="run", stream=TerminalStream()).mode == "live"
    assert LiveDisplay(title="run", stream=StringIO()).mode == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert LiveDisplay(title="run", stream=TerminalStream()).mode == "plain"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'plan' is unknown: write auto, live, plain, quiet\. Did you mean 'plain'\?"
    ):
        LiveDisplay(title="run", mode="plan")


# --- the live panel


def test_the_panel_shows_progress_counters_metrics_time_and_messages() -> None:
    display, stream = live_display()
    display.update_progress(0.5, "main", 1, 3)
    display.message("environment 3 was restarted", "warning")
    for agent_steps in (100, 200, 250):
        display.write(full_row(agent_steps))
    display.close()
    shown = stream.getvalue()
    for text in (
        "ppo [CartPole-v1]",
        "main (2/3, 50%)",
        "25.0%",
        "ETA 1:15",
        "250 / 1,000",
        "1,234",
        "episode return",
        "▁▆█",
        "best -10",
        "entropy",
        "controller/policy_std",
        "nan",
        "environment 50%",
        "update 30%",
        "overhead 20%",
        "CPU 87 %",
        "RAM 1.2 GiB",
        "environment 3 was restarted",
    ):
        assert text in shown, text
    assert shown.index("episode return") < shown.index("entropy") < shown.index("controller/policy_std")


def test_frames_come_at_most_four_times_a_second_and_only_with_news() -> None:
    clock = Clock()
    display, stream = live_display(clock)
    display.write(row(1))
    size = len(stream.getvalue())
    clock.now += 0.1
    display.write(row(2))
    display.update_progress(0.1, "main", 0, 1)
    assert len(stream.getvalue()) == size
    clock.now += 0.2
    display.update_progress(0.2, "main", 0, 1)
    size_after = len(stream.getvalue())
    assert size_after > size
    clock.now += 10.0
    display.flush()
    assert len(stream.getvalue()) == size_after
    display.close()


def test_slow_frames_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    display, _ = live_display(clock)
    frames: list[float] = []

    def slow_draw() -> None:
        frames.append(clock.now)
        clock.now += 0.02

    monkeypatch.setattr(display, "_draw", slow_draw)
    begin = clock.now
    while clock.now < begin + 20.0:
        display.write(row(1))
        clock.now += 0.01
    assert 0.02 * len(frames) <= 0.011 * 20.0


def test_messages_after_the_end_are_still_shown() -> None:
    display, stream = live_display()
    display.write(row(1))
    display.close()
    display.message("resume with: rl-lab resume run_1")
    assert stream.getvalue().endswith("resume with: rl-lab resume run_1\n")


def test_the_display_makes_its_own_console(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = TerminalStream()
    display = LiveDisplay(title="run", mode="live", stream=stream)
    display.write(full_row(100))
    display.close()
    assert "episode return" in stream.getvalue()


def test_curves_go_on_after_a_resume() -> None:
    display, _ = live_display()
    for agent_steps in (100, 200):
        display.write(full_row(agent_steps))
    resumed, _ = live_display()
    resumed.set_state(display.get_state())
    resumed.write(full_row(300))
    assert list(resumed.view.history["collect/episode_return_mean"]) == [10.0, 20.0, 30.0]
    assert resumed.view.best_evaluation == -10.0
    assert not any(name.startswith(("time/", "system/")) for name in resumed.view.history)
    display.write(full_row(300))
    assert equal(display.get_state(), resumed.get_state())
    for each in (display, resumed):
        each.close()


def test_progress_without_a_total_counts_phases_alike() -> None:
    view = RunView(title="run", phase_index=1, phase_count=4, phase_fraction=0.5)
    assert view.run_fraction == 0.375 and view.eta_s == 0.0 and view.agent_steps_per_second is None
    view.take(row(300))
    assert view.eta_s == pytest.approx(5.0) and view.agent_steps_per_second == 100.0
    assert RunView(title="run").eta_s is None


# --- the end


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_the_summary_says_what_happened_and_what_to_type_next(mode: str) -> None:
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None) if mode == "live" else None
    display = LiveDisplay(title="run", mode=mode, stream=stream, console=console)
    display.summary(
        agent_steps=65536,
        seconds=83.25,
        score=500.0,
        paths={"curve": Path("runs/a/curve.png"), "checkpoint": Path("runs/a/checkpoints/latest")},
        commands={"watch it play": "rl-lab play a"},
        title="Solved",
    )
    shown = stream.getvalue()
    for text in ("Solved", "65,536", "1:23 (83.2 s)", "500.00", "runs/a/curve.png", "watch it play", "rl-lab play a"):
        assert text in shown, text


def test_a_summary_without_a_score_or_files_is_short() -> None:
    stream = StringIO()
    LiveDisplay(title="run", mode="plain", stream=stream).summary(agent_steps=5, seconds=1.0, title="Stopped")
    assert stream.getvalue() == "Stopped\n  agent steps  5\n  time         0:01 (1.0 s)\n"


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_texts_from_outside_cannot_steer_the_terminal(mode: str) -> None:
    stream = StringIO()
    evil = "\x1b]0;owned\x07\x9b2J"
    display = LiveDisplay(title=evil, mode=mode, stream=stream)
    display.update_progress(0.5, f"train{evil}", 0, 2)
    display.message(f"first{evil}\nsecond", "warning")
    display.write({"agent_steps": 1, "wall_s": 1.0})
    display.summary(agent_steps=1, seconds=1.0, paths={"report": Path(evil)}, commands={"continue": evil})
    assert "\x1b]0;owned" not in stream.getvalue() and "\x9b" not in stream.getvalue()
    assert "\\u001b]0;owned" in stream.getvalue()


def test_files_below_the_working_directory_are_shown_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stream = StringIO()
    paths = {"report": tmp_path / "runs" / "mine" / "report.md", "other": Path("/elsewhere/x")}
    LiveDisplay(title="t", mode="plain", stream=stream).summary(agent_steps=1, seconds=1.0, paths=paths)
    assert "  runs/mine/report.md\n" in stream.getvalue() and "  /elsewhere/x\n" in stream.getvalue()
