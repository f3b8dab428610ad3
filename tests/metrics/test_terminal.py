"""What a person sees: a panel, lines or nothing, and never at the run's expense."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl_lab
from rl_lab.metrics.names import meaning_of
from rl_lab.metrics.pace import Pace, Reading
from rl_lab.metrics.panel import render_panel
from rl_lab.metrics.plain import plain_line
from rl_lab.metrics.terminal import LiveDisplay
from rl_lab.metrics.view import RunView
from rl_lab.metrics.writers import Row
from rl_lab.types import ConfigError, Counts
from rl_lab.utils.formatting import arrow_of, format_duration, format_number, proportional_widths, sparkline
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


def live_display(**settings: Any) -> tuple[LiveDisplay, StringIO]:
    stream = TerminalStream()
    display = LiveDisplay(title="ppo [CartPole-v1]", mode="live", stream=stream, **{"total": 1000, **settings})
    return display, stream


@pytest.fixture(autouse=True)
def a_large_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "50")


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


def test_an_arrow_agrees_with_the_end_of_its_sparkline() -> None:
    """The newest value fell a little, but the curve's end, which is what a person sees, rises."""
    curve = sparkline([0, 0, 0, 0, 9, 8], width=3)
    assert curve == "▁▁█" and arrow_of(curve) == "↑"
    assert arrow_of("▁▁▁█▄") == "↓" and arrow_of("▂█▄▄") == "→"


@pytest.mark.parametrize("width", [8, 16, 24, 48])
@pytest.mark.parametrize(("sign", "arrow"), [(1, "↑"), (-1, "↓")])
def test_a_slow_climb_is_no_level(width: int, sign: int, arrow: str) -> None:
    """The last two blocks are as high as each other; the curve that a person sees climbs all the way."""
    curve = sparkline([sign * value for value in range(240)], width=width)
    assert arrow_of(curve) == arrow
    assert arrow_of(curve + curve[-1] * width) == "→"  # it has come to rest
    assert arrow_of(curve[:-1] + " ") == " "  # nothing to say of a newest value that is not a number


def test_precision_is_the_number_of_digits() -> None:
    assert [format_number(1.23456, digits) for digits in (2, 3, 6)] == ["1.2", "1.23", "1.23456"]
    assert [format_number(1234.56, digits) for digits in (2, 6)] == ["1,235", "1,234.560"]
    assert format_number(1.23456e-7, 6) == "1.2346e-07"


def test_arrows_and_widths() -> None:
    histories: list[list[float]] = [[], [1], [1, 2], [2, 1], [1, 1], [math.nan, 1]]
    assert [arrow_of(sparkline(values)) for values in histories] == list("  ↑↓→ ")
    assert proportional_widths([0.5, 0.25, 0.25], 8) == [4, 2, 2]
    assert sum(proportional_widths([1 / 3, 1 / 3, 1 / 3], 10)) == 10
    assert proportional_widths([0.8, 0.8], 10) == [8, 2]


# --- plain lines


def test_plain_lines_are_aligned_and_come_every_two_seconds_and_at_the_end() -> None:
    clock, stream = Clock(), StringIO()
    shown = ("controller/entropy", "controller/approx_kl")
    display = LiveDisplay(title="run", total=1000, mode="plain", stream=stream, clock=clock, highlight=shown)
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
    assert " ".join(first.split()) == "10.0% 100 steps 100/s return 21.500 entropy – KL – len – ETA 0:09"
    assert "return  123.4  eval    500" in second
    assert "return  200.2  eval    500" in last and last.lstrip().startswith("40.0%")
    assert len(second) == len(last) <= 100 and second.index("ETA") == last.index("ETA")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("ppo", "return entropy KL len"),
        ("dqn", "return epsilon value len"),
        ("sac", "return temperature entropy"),
        ("dreamer", "return model KL reconstruction"),
        ("bandit", "return best arm regret"),
    ],
)
def test_a_plain_line_has_the_algorithms_own_metrics_in_100_columns(algorithm: str, expected: str) -> None:
    shipped = yaml.safe_load((Path(rl_lab.__file__).parent / "configs" / "algorithm" / f"{algorithm}.yaml").read_text())
    highlight = shipped["logging"]["highlight"]
    view = RunView(title="run", total=100_000_000, highlight=highlight)
    values = dict.fromkeys(("collect/episode_return_mean", *highlight), -1234.5678)
    view.take({**row(1_234_567, time__eta_s=754.0), **values})
    line = plain_line(view)
    assert len(line) <= 100 and line.isprintable()
    words = " ".join(word for word in line.split("/s")[1].split("ETA")[0].split() if word.isalpha())
    assert words.startswith(expected), words
    assert all(meaning_of(name) is not None for name in highlight)


def test_a_plain_line_never_ends_on_no_speed() -> None:
    view = RunView(title="run", total=1000)
    view.take(row(1000, time__agent_steps_per_second=321.0))
    view.take(row(1000, time__agent_steps_per_second=0.0, eval__episode_return_mean=500.0))
    assert "   321/s" in plain_line(view) and "eval    500" in plain_line(view)


def test_a_plain_line_of_a_run_without_steps_counts_updates_and_leaves_the_return_out() -> None:
    view = RunView(title="run", highlight=("loss/noise",))
    view.take({**row(0, time__updates_per_second=12.5, time__eta_s=60.0), "updates": 1200, "loss/noise": 0.25})
    assert " ".join(plain_line(view).split()) == "0.0% 1,200 updates 12.50/s noise loss 0.2500 ETA 1:00"
    view.take({**row(0, time__updates_per_second=0.0), "updates": 1200, "wall_s": 100.0})  # an evaluation's row
    assert "updates      12/s" in plain_line(view)


def test_a_plain_line_shows_what_has_a_value_before_what_a_later_phase_brings() -> None:
    view = RunView(title="run", highlight=("controller/generation", "loss/latent"))
    view.take({**row(100, time__eta_s=60.0), "loss/latent": 1.5})
    line = plain_line(view)
    assert line.index("latent") < line.index("generation")
    view.take({"controller/generation": 3.0})
    line = plain_line(view)
    assert line.index("generation") < line.index("latent")


def test_the_summary_of_a_run_without_steps_counts_updates() -> None:
    stream = StringIO()
    display = LiveDisplay(title="run", mode="plain", stream=stream, clock=Clock())
    display.write({**row(0), "updates": 1200})
    display.summary(agent_steps=0, seconds=1.0)
    assert "updates  1,200" in stream.getvalue() and "agent steps" not in stream.getvalue()


def test_plain_lines_in_a_file_say_after_a_minute_of_silence_what_goes_on() -> None:
    clock, stream = Clock(), StringIO()
    display = LiveDisplay(title="run", mode="plain", stream=stream, clock=clock)
    learning = {"phase_name": "pretrain", "phase_index": 1, "phase_count": 3, "phase_fraction": 0.34}
    display.start(lambda: Reading(Counts(agent_steps=2500, updates=850), 83.0, 0.05, activity="updating", **learning))
    for passed in (59.0, 1.0, 59.0, 1.0):
        clock.now += passed
        display._frame()
    display.write(row(2600))
    clock.now += 59.0
    display._frame()
    display.close()
    first, second, of_row = stream.getvalue().splitlines()
    assert first == second and "2,600 steps" in of_row
    assert first == " 5.0%  pretrain        2,500 steps  850 updates  updating, 34% of the phase  1:23"


def test_plain_lines_on_a_terminal_leave_a_debugger_alone() -> None:
    clock, stream = Clock(), TerminalStream()
    display = LiveDisplay(title="run", mode="plain", stream=stream, clock=clock)
    display.start(lambda: Reading(Counts(), 83.0, 0.05))
    clock.now += 100.0
    display._frame()
    display.close()
    assert stream.getvalue() == ""


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
    assert stream.getvalue().startswith("25.0%  warm up")


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
        "policy std",
        "nan",
        "environment 50%",
        "update 30%",
        "overhead 20%",
        "CPU 87%",
        "RAM 1.2 GiB",
        "environment 3 was restarted",
    ):
        assert text in shown, text
    assert shown.index("episode return") < shown.index("entropy") < shown.index("policy std")


def test_highlights_are_shown_first_and_what_never_changes_last() -> None:
    view = RunView(title="run", highlight=("loss/value", "controller/mine"))
    for step in range(3):
        view.take(row(step, train__epochs_done=4, controller__entropy=step, loss__value=step, controller__mine=step))
    assert view.table_names(9) == ["loss/value", "controller/mine", "controller/entropy", "train/epochs_done"]
    assert view.curve("controller/mine", 8).label == "mine" and view.curve("controller/mine", 8).is_highlight


def test_the_precision_of_the_config_is_used_everywhere() -> None:
    view = RunView(title="run", digits=2)
    view.take(row(1, loss__value=1.23456))
    assert view.curve("loss/value", 8).value == "1.2"


def test_messages_after_the_end_are_still_shown() -> None:
    display, stream = live_display()
    display.write(row(1))
    display.close()
    display.message("resume with: rl-lab resume run_1")
    assert stream.getvalue().endswith("resume with: rl-lab resume run_1\n")


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
    ended = RunView(title="run")
    ended.take(row(100, time__eta_s=1.0))
    assert ended.eta_s == 1.0
    ended.phase_fraction = 1.0
    ended.take(row(200))
    assert ended.eta_s == 0.0, "the last row, which has none of its own"


# --- pace


def reading(wall_s: float, steps: int, **settings: Any) -> Reading:
    return Reading(Counts(agent_steps=steps, updates=steps // 10), wall_s, run_fraction=steps / 1000, **settings)


def test_an_evaluation_does_not_change_the_speed_of_training() -> None:
    pace = Pace()
    for second in range(5):
        pace.take(reading(second, second * 100))
    for second in range(5, 60):
        pace.take(reading(second, 400, is_training=False))
    assert pace.agent_steps_per_second == 100.0 and pace.updates_per_second == 10.0


def test_a_slow_run_has_a_speed_and_a_fast_one_forgets_its_past() -> None:
    slow = Pace()
    for second in range(120):
        slow.take(reading(second, 50 if second >= 100 else 0))
    assert slow.agent_steps_per_second == pytest.approx(50 / 20, rel=0.1)
    pace = Pace()
    for second in range(100):
        pace.take(reading(second, second if second < 50 else 50 + (second - 50) * 10))
    assert pace.agent_steps_per_second == pytest.approx(10.0)


def test_the_time_left_falls_with_the_run_and_then_follows_the_evaluation() -> None:
    pace = Pace()
    for second in range(11):
        pace.take(reading(second, second * 50))
    assert pace.eta_s(reading(10, 500)) == pytest.approx(10.0)
    assert pace.eta_s(reading(20, 1000, done=25, total=100, activity_s=5.0)) == pytest.approx(15.0)
    assert pace.eta_s(reading(20, 500, done=50, total=100, activity_s=5.0, is_ending=True)) == pytest.approx(5.0)
    assert pace.eta_s(reading(20, 1000)) is None


def test_counters_move_between_rows_and_never_back() -> None:
    view = RunView(title="run", total=1000)
    view.take(row(100))
    view.look(reading(2.0, 150))
    assert view.counts.agent_steps == 150 and view.run_fraction == 0.15 and view.wall_s == 2.0
    view.look(reading(2.5, 120))
    assert view.counts.agent_steps == 150


def test_returns_and_the_time_split_are_newer_than_the_newest_row() -> None:
    """A row of Dreamer on a CPU may be minutes old: by then its first row's 68 % for the policy says nothing."""
    view = RunView(title="run", total=1000)
    view.take({**row(100), "collect/episode_return_mean": 18.0, "loss/policy": 2.0, "time/policy_fraction": 1.0})
    view.look(reading(60.0, 150, newest={"collect/episode_return_mean": 25.0, "time/update_fraction": 0.75}))
    assert view.curve("collect/episode_return_mean", 8).value == "25" and view.curve("loss/policy", 8).value == "2"
    shown = "\n".join(render_panel(view, columns=80, height=40, colours=False))
    assert "update 75%" in shown


def test_restarts_of_environments_are_shown_once_there_are_any() -> None:
    view = RunView(title="run", total=1000)
    view.take({**row(100), "collect/environment_restarts": 0})
    assert "collect/environment_restarts" not in view.table_names(14)
    view.take({**row(200), "collect/environment_restarts": 2})
    assert "collect/environment_restarts" in view.table_names(14)


# --- the end


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_the_summary_says_what_happened_and_what_to_type_next(mode: str) -> None:
    stream = StringIO()
    display = LiveDisplay(title="run", mode=mode, stream=stream)
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


def test_the_summary_tells_the_times_of_training_and_of_what_came_after_apart() -> None:
    stream = StringIO()
    display = LiveDisplay(title="run", mode="plain", stream=stream)
    for score in (480.0, 200.0):
        display.write({"agent_steps": 1, "eval/episode_return_mean": score})
    paths = {"video": Path("a.mp4"), "report": Path("report.md")}
    display.summary(agent_steps=5, seconds=1.5, seconds_after=2.5, score=200.0, paths=paths)
    assert "  time              0:02 (1.5 s), then 2.5 s for video and report\n" in stream.getvalue()
    assert "  evaluation score  200.00 (best 480.00)\n" in stream.getvalue()


def test_no_line_of_a_plain_summary_is_wider_than_100_columns_and_no_path_is_broken() -> None:
    stream, path = StringIO(), Path("runs") / ("a b-" * 30) / "c.png"
    split = " · ".join(f"section{number} 12%" for number in range(12))
    display = LiveDisplay(title="run", mode="plain", stream=stream)
    display.summary(agent_steps=5, seconds=1.5, facts={"time split": split}, paths={"curve": path})
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 100 for line in lines if "runs" not in line)
    assert any(line.endswith(str(path)) for line in lines)
    shown = " ".join(line.strip() for line in lines)
    assert f"time split   {split}" in shown


def test_the_summary_of_a_run_without_a_video_speaks_of_none() -> None:
    stream = StringIO()
    display = LiveDisplay(title="run", mode="plain", stream=stream)
    display.summary(agent_steps=5, seconds=1.5, seconds_after=2.5, paths={"report": Path("report.md")})
    assert "  time         0:02 (1.5 s), then 2.5 s for report\n" in stream.getvalue()


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
