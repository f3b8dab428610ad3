"""The live display on a real pseudo-terminal: it moves whatever the run does, costs little, and breaks nothing."""

from __future__ import annotations

import bisect
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_lab.config.compose import compose
from rl_lab.experiment.build import Experiment, build
from rl_lab.metrics.pace import Reading
from rl_lab.metrics.panel import render_panel
from rl_lab.metrics.terminal import LiveDisplay
from rl_lab.metrics.view import RunView
from rl_lab.training.capture import CapturedMethod
from rl_lab.types import Batch, Counts
from rl_lab.utils import ticker as ticker_module
from rl_lab.utils.reports import REPORTS_VARIABLE, read_report
from tests.metrics.terminal_screen import BusyMachine, PtyScreen

SLOW_S = 1.1  # how long each activity of the slow run lasts
FRAMES_PER_SECOND = 2.0
OLDEST_S = 0.8  # of what is shown: a frame's interval, and some; time that other programs took apart


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PtyScreen]:
    """A terminal of 80 columns, or of as many as the test asks for."""
    screen = PtyScreen(getattr(request, "param", 80))
    monkeypatch.setenv("TERM", "xterm")
    yield screen
    screen.close()


@contextmanager
def on(screen: PtyScreen) -> Iterator[None]:
    """stdout and stderr are that terminal. (Not in the fixture: pytest puts streams of its own before each test.)"""
    with redirect_stdout(screen.stream), redirect_stderr(screen.stream):
        yield


def display_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rl-lab display"]


# --- it moves --------------------------------------------------------------------------------------


class SlowToCompile:
    """A stand-in for CUDA graphs whose first calls take long."""

    def warm_up(self, function: Any) -> Any:
        time.sleep(SLOW_S)
        return function()

    def capture(self, function: Any) -> Any: ...
    def replay(self, graph: Any) -> None: ...


def slow_experiment(monkeypatch: pytest.MonkeyPatch, collected: list[tuple[float, int]]) -> Experiment:
    """One cycle of PPO in which collecting, compiling, updating and evaluating each take more than a second."""
    config = compose(
        "rl_lab/Counter-v0:ppo",
        [
            "preset=debug",
            "training.limit_cycles=1",
            "training.phases.train.collect_steps=16",
            "algorithm.epochs=1",
            "evaluation.final_episodes=20",
        ],
    )
    experiment = build(config, run=None)
    collector, runtime, workflow = experiment.targets["collector"], experiment.agent.runtime, experiment.agent.workflow
    step, update, evaluation = collector.environment.step, workflow.update_controller, experiment.evaluator

    def slow_step(action: Any) -> Any:
        collected.append((time.perf_counter(), collector.steps_under_way))
        time.sleep(SLOW_S / 16)
        return step(action)

    def compiling(batch: Batch, numbers: Batch) -> Batch:
        return {}

    captured = CapturedMethod(compiling, place="test", device=torch.device("cpu"), backend=SlowToCompile())
    runtime._captured.append(captured)

    def slow_update(batch: Batch, **keywords: Any) -> Any:
        captured({}, {})
        time.sleep(SLOW_S)
        return update(batch, **keywords)

    advance = evaluation._advance

    def slow_advance(*arguments: Any) -> Any:
        time.sleep(SLOW_S / 80)
        return advance(*arguments)

    monkeypatch.setattr(collector.environment, "step", slow_step)
    monkeypatch.setattr(workflow, "update_controller", slow_update)
    monkeypatch.setattr(evaluation, "_advance", slow_advance)
    return experiment


@pytest.mark.parametrize("terminal", [60, 80, 200], indirect=True)
def test_it_shows_every_activity_twice_a_second_while_no_row_is_written(
    terminal: PtyScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on(terminal), BusyMachine() as machine:
        collected: list[tuple[float, int]] = []
        experiment = slow_experiment(monkeypatch, collected)
        try:
            begin = time.perf_counter()
            experiment.display.start(experiment.probe)
            experiment.orchestrator.run()
            with experiment.housekeeping.stopwatch.section("video"):
                time.sleep(SLOW_S)
            with experiment.housekeeping.stopwatch.section("checkpoint"):
                time.sleep(0.6)
            cost, ticks = experiment.display.cost, experiment.display.frames
            end = time.perf_counter()
        finally:
            experiment.close()
        frames, own_s = terminal.between(begin, end), end - begin - machine.lost_s(begin, end)
        print(f"{len(frames) / (end - begin):.1f} frames/s, {cost:.2%} of the time", file=sys.__stderr__)
        assert ticks >= FRAMES_PER_SECOND * own_s and cost is not None and cost <= 0.01
        for words in ("collecting", "compiling kernels", "updating", "evaluating", "writing the video", "saving"):
            seen = [when for when, shown in frames if re.search(rf"│ {words}\b(?! and)", shown)]
            assert seen, f"'{words}' was never shown"
            gaps = [after - before - machine.lost_s(before, after) for before, after in pairwise(seen)]
            assert all(gap <= OLDEST_S for gap in gaps) and len(seen) >= (1 if words == "saving" else 2), (words, gaps)
        assert any(re.search(r"evaluating [1-9]\d* of 20", shown) for _, shown in frames)
        clocks = [re.search(r"(\d:\d\d)  ", shown) for _, shown in frames]
        assert len({match[1] for match in clocks if match}) >= 5  # the clock ran, though only two rows were written
        _check_age(frames, collected, machine)
        last = frames[-1][1]
        assert " steps/s" in last and not re.search(r"\b0 steps/s", last)


def _check_age(frames: list[tuple[float, str]], collected: list[tuple[float, int]], machine: BusyMachine) -> None:
    """What is shown while rows are collected was true a moment ago, and moves."""
    times, shown_steps = [when for when, _ in collected], []
    for when, shown in frames:
        found = re.search(r"agent steps .*\n│ (\d+) ", shown)
        if found and times[0] < when < times[-1]:
            shown_steps.append(int(found[1]))
            true_since = next(at for at, steps in collected if steps >= int(found[1])) if int(found[1]) else times[0]
            index = bisect.bisect(times, when) - 1
            is_still_true = collected[index][1] == int(found[1])
            age = when - true_since - machine.lost_s(true_since, when)
            assert is_still_true or age <= OLDEST_S, (age, found[1])
    assert len(set(shown_steps)) >= 3 and shown_steps == sorted(shown_steps)


def test_only_time_that_other_programs_took_is_lost() -> None:
    """A process that computes, or sleeps, loses nothing; one that is halted loses how long it was."""
    begin, child = time.perf_counter(), os.fork()
    if child == 0:
        with BusyMachine() as machine:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.05)
            halted = machine.lost_s(begin, time.perf_counter() + 1.0)
        os._exit(0 if halted >= 0.1 else 1)
    os.waitpid(child, os.WUNTRACED)
    time.sleep(0.2)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with BusyMachine() as machine:
        begin, cpu = time.perf_counter(), time.process_time()
        sum(range(10_000_000))  # one call, in which no other thread runs
        used = time.process_time() - cpu
        assert machine.lost_s(begin, time.perf_counter()) <= time.perf_counter() - begin - used + 0.05


# --- what it looks like ----------------------------------------------------------------------------


def shown_run() -> LiveDisplay:
    highlight = ("controller/entropy", "controller/approx_kl")
    display = LiveDisplay(title="ppo_cartpole · CartPole-v1 · seed 0", total=100_000, highlight=highlight)
    for row in range(1, 31):
        metrics = {"collect/episode_return_mean": row**2 / 2, "eval/episode_return_mean": 400.0 - (row - 20) ** 2}
        metrics |= {"collect/episode_length_mean": row**2 / 2, "controller/entropy": 0.69 - row / 100}
        metrics |= {
            "controller/approx_kl": 0.01 + 0.005 * (row % 3),
            "loss/value": 12.5,
            "train/actor_grad_norm": 1 / row,
        }
        clock = {"time/environment_fraction": 0.2, "time/policy_fraction": 0.12, "time/update_fraction": 0.6}
        clock |= {"time/logging_fraction": 0.01, "time/overhead_fraction": 0.07, "system/cpu_percent": 99.0}
        counters = {"env_frames": row * 2000, "agent_steps": row * 2000, "episodes": row * 7, "updates": row}
        display.write({**counters, "wall_s": row / 10, **metrics, **clock, "system/ram_gib": 0.31})
    settings = {"phase_name": "train", "phase_fraction": 0.6, "activity": "evaluating", "activity_s": 4.0}
    settings |= {"done": 37, "total": 100}
    for second in (3.0, 3.5, 4.0):
        counts = Counts(60_000 + int(second * 100), 60_000 + int(second * 100), 215, 31)
        reading = Reading(counts, second, 0.6, **settings)
        with display._lock:
            display.view.look(reading)
    display._probe = lambda: Reading(Counts(60_400, 60_400, 215, 31), 4.5, 0.6, **settings)
    display._frame()
    return display


SCREENS = Path(__file__).parent / "screens"


@pytest.mark.parametrize("terminal", [60, 80, 200], indirect=True)
def test_the_panel_is_the_same_text_at_every_width(terminal: PtyScreen) -> None:
    """`python -m tests.metrics.test_live_display` writes the screens anew; look at them."""
    with on(terminal):
        shown_run()
        wanted = (SCREENS / f"{terminal.screen.columns}.txt").read_text(encoding="utf-8").rstrip("\n")
        terminal.wait_for(lambda text: "╰" in text)
        assert terminal.text.rstrip("\n") == wanted


def test_a_label_stays_whole_beside_the_best_value_at_60_columns() -> None:
    view = RunView(title="run")
    view.take({"agent_steps": 5, "eval/episode_return_mean": 224.5})
    lines = render_panel(view, columns=60, height=40, colours=False)
    assert any("│ evaluation return best 224.5 " in line for line in lines), lines


@pytest.mark.parametrize("terminal", [24, 33, 60, 121], indirect=True)
def test_no_line_is_broken_whatever_the_width(terminal: PtyScreen) -> None:
    with on(terminal):
        shown_run()
        text = terminal.wait_for(lambda text: "╰" in text)
        widths = {len(line) for line in text.splitlines() if line}
        assert widths == {min(terminal.screen.columns, 120)}
        assert all(line[0] + line[-1] in ("╭╮", "││", "├┤", "╰╯") for line in text.splitlines() if line)


def test_paths_stay_whole_and_what_is_printed_stays_above(terminal: PtyScreen) -> None:
    with on(terminal):
        long = Path("/somewhere/" + "/".join(f"folder_{index}" for index in range(12)) + "/report.md")
        display = LiveDisplay(title="run")
        display.start(lambda: Reading(Counts(agent_steps=5), 1.0, 0.5, "train"))
        terminal.wait_for(lambda text: "╰" in text)
        print("printed by the environment, not ended", end="")
        display.message(f"saved to {long}", "warning")
        terminal.wait_for(lambda text: "warning: saved to" in text)
        display.summary(agent_steps=5, seconds=1.0, paths={"report": long}, commands={"watch it": "rl-lab play x"})
        print("after", flush=True)
        text = terminal.wait_for(lambda text: "after" in text)
        unbroken = text.replace("\n", "")
        assert unbroken.count(str(long)) == 2
        assert text.index("warning: saved") < text.index("printed by the environment") < text.index("╭")
        assert text.count("╭") == 1 and text.index("╰") < text.index("Finished") < text.index("rl-lab play x")
        assert sys.stdout is terminal.stream and not display_threads()


def test_a_terminal_made_wider_shows_one_panel(terminal: PtyScreen) -> None:
    with on(terminal):
        display = LiveDisplay(title="run")
        display.start(lambda: Reading(Counts(agent_steps=5), 1.0, 0.5, "train"))
        terminal.wait_for(lambda text: "╰" in text)
        terminal.resize(100)
        terminal.wait_for(lambda text: "╭" in text and len(text.splitlines()[0]) == 100)
        display.close()
        assert terminal.text.count("╭") == 1


# --- it breaks nothing -----------------------------------------------------------------------------


def test_without_a_terminal_a_thread_only_waits_for_a_long_silence(capsys: Any) -> None:
    for mode, threads in {"auto": 1, "plain": 1, "quiet": 0}.items():
        display = LiveDisplay(title="run", mode=mode)
        display.start(lambda: Reading(Counts(), 0.0, 0.0))
        assert len(display_threads()) == threads and display.cost is None
        display.close()
        assert not display_threads()
    assert capsys.readouterr().out == ""


def test_a_terminal_that_vanishes_ends_the_display_alone(terminal: PtyScreen) -> None:
    with on(terminal):
        display = LiveDisplay(title="run")
        said: list[str] = []
        display.on_failure = said.append
        display.start(lambda: Reading(Counts(), 0.0, 0.0))
        terminal.wait_for(lambda text: "╰" in text)
        stream, display._screen._descriptor = display._screen.stream, os.open("/dev/full", os.O_WRONLY)
        deadline = time.perf_counter() + 3.0
        while display.mode == "live" and time.perf_counter() < deadline:
            time.sleep(0.02)
        display.write({"agent_steps": 1, "wall_s": 1.0})
        assert display.mode == "quiet" and len(said) == 1 and "No space left" in said[0]
        os.close(display._screen._descriptor)
        display.close()
        assert sys.stdout is stream


def test_a_halted_terminal_does_not_halt_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S: nobody reads, so that the thread's write never returns."""
    monkeypatch.setattr(ticker_module, "PATIENCE_S", 0.1)
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        display = LiveDisplay(title="run", mode="live", stream=stream)
        monkeypatch.setattr(display._screen, "_write", lambda text: os.write(writer, b"x" * 200_000))
        display.start(lambda: Reading(Counts(), 0.0, 0.0))
        time.sleep(0.1)
        begin = time.perf_counter()
        display.write({"agent_steps": 1, "wall_s": 1.0})
        display.close()
        display.summary(agent_steps=1, seconds=1.0)
        assert time.perf_counter() - begin < 2.0 and display.mode == "quiet"
        os.close(reader)  # lets the thread go


def test_a_terminal_of_another_alphabet_gets_lines_and_what_was_printed(terminal: PtyScreen) -> None:
    terminal.stream.reconfigure(encoding="ascii")
    with on(terminal):
        display = LiveDisplay(title="run", total=10)
        display.start(lambda: Reading(Counts(agent_steps=5), 1.0, 0.5, "train"))
        deadline = time.perf_counter() + 3.0
        while display.mode == "live" and time.perf_counter() < deadline:
            time.sleep(0.02)
        print("printed by the environment", flush=True)
        display.write({"agent_steps": 5, "wall_s": 1.0})
        text = terminal.wait_for(lambda text: "50.0%" in text and "printed" in text)
        display.close()
        assert display.mode == "plain" and "5 steps" in text


def test_a_forked_process_is_left_alone(terminal: PtyScreen) -> None:
    with on(terminal):
        display = LiveDisplay(title="run")
        display.start(lambda: Reading(Counts(), 0.0, 0.0, "train"))
        terminal.wait_for(lambda text: "╰" in text)
        child = os.fork()
        if child == 0:
            is_left_alone = sys.stdout is terminal.stream and display.mode == "quiet" and display._ticker is None
            display.message("from the child")
            display.close()
            os._exit(0 if is_left_alone else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ticks = display.frames
        deadline = time.perf_counter() + 3.0
        while display.frames == ticks and time.perf_counter() < deadline:
            time.sleep(0.02)
        assert display.frames > ticks and "from the child" not in terminal.text
        display.close()


# --- notebooks and many runs -----------------------------------------------------------------------


def test_a_notebook_gets_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shown: list[tuple[str, dict[str, str]]] = []
    handle = SimpleNamespace(update=lambda content, raw: shown.append(("update", content)))

    def show(content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        shown.append(("display", content))
        return handle

    shell = SimpleNamespace(kernel=object())
    fake = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=show))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    display = LiveDisplay(title="run", total=10)
    assert display.mode == "notebook"
    display.write({"agent_steps": 5, "wall_s": 1.0, "collect/episode_return_mean": 21.5})
    display.start(lambda: Reading(Counts(agent_steps=7), 2.0, 0.7, "a<b", activity="collecting"))
    deadline = time.perf_counter() + 3.0
    while len(shown) < 2 and time.perf_counter() < deadline:
        time.sleep(0.02)
    display.close()
    assert [kind for kind, _ in shown][:2] == ["display", "update"] and not display_threads()
    assert "70.0% · 7 / 10 steps" in shown[1][1]["text/plain"] and "episode return 21.5" in shown[1][1]["text/html"]
    shell.kernel = None
    assert LiveDisplay(title="run").mode == "plain"


def test_a_run_among_many_sends_reports(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv(REPORTS_VARIABLE, "1")
    display = LiveDisplay(title="run", total=10)
    display.start(lambda: Reading(Counts(agent_steps=7), 2.0, 0.7, activity="collecting"))
    display.message("hello")
    display.close()
    display.summary(agent_steps=7, seconds=1.0)
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    reports = [read_report(line) for line in lines]
    assert "hello" in lines and reports.count(None) == 1
    assert reports[-1] is not None and (reports[-1]["agent_steps"], reports[-1]["fraction"]) == (7, 0.7)
    assert read_report('\x1e{"agent_st') == {}


if __name__ == "__main__":
    SCREENS.mkdir(exist_ok=True)
    os.environ["TERM"], real = "xterm", sys.stdout
    for columns in (60, 80, 200):
        sys.stdout = (screen := PtyScreen(columns)).stream
        shown_run()
        (SCREENS / f"{columns}.txt").write_text(screen.wait_for(lambda text: "╰" in text).rstrip("\n") + "\n")
        screen.close()
    sys.stdout = real


def test_the_panel_of_a_run_that_is_over_names_nothing_that_goes_on() -> None:
    terminal = PtyScreen(80)
    try:
        display = LiveDisplay(title="run", mode="live", stream=terminal.stream)
        display.start(lambda: Reading(Counts(agent_steps=5), 1.0, 1.0, "train", activity="finishing"))
        terminal.wait_for(lambda shown: "finishing" in shown)
        display.write({"agent_steps": 5, "loss/value": 1.0})
        display.summary(agent_steps=5, seconds=1.0)
        assert "finishing" not in terminal.wait_for(lambda shown: "Finished" in shown)
    finally:
        terminal.close()
