"""report.md: one page per run that a person reads and that links to everything else."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_lab.runs.curve import write_curve
from rl_lab.runs.files import readable_disk_errors, write_atomic
from rl_lab.runs.lineage import sentences
from rl_lab.runs.manifest import continuations_of
from rl_lab.runs.metrics_file import read_metrics, series
from rl_lab.runs.run_directory import DONE, RunDirectory
from rl_lab.runs.settings import settings_of
from rl_lab.types import MissingExtraError
from rl_lab.utils.formatting import format_duration
from rl_lab.utils.text import printable

BY_A_CALLBACK = "asked for it."  # why a run was stopped; nobody asks for it where it is continued
_DURATIONS = {"duration_steps": "agent_steps", "duration_updates": "updates", "duration_cycles": "cycles"}
_COUNTERS = ("agent_steps", "env_frames", "episodes", "updates", "wall_s")


def write_report(run: RunDirectory, *, state: str | None = None, message: str = "", is_drawn: bool = True) -> Path:
    """Write report.md and the learning curve from what the run left on disk; works at any time, also mid-run.

    `state` is what the run is about to be, and `message` why, where its status does not say so yet. Without the
    picture, which takes half a second, `is_drawn` is False.
    """
    with readable_disk_errors(run.report_path, run_id=run.id):
        write_atomic(run.report_path, printable(_page(run, state, message, is_drawn), keep="\n\t"), run_id=run.id)
    return run.report_path


def _page(run: RunDirectory, state: str | None, message: str, is_drawn: bool) -> str:
    rows, status, manifest = read_metrics(run.metrics_path), run.read_status(), run.read_manifest()
    status = status if state is None else {**status, "state": state, "message": message}
    known = {name: manifest.get(name) for name in ("algorithm", "environment_id", "seed")}
    title = printable("{algorithm} on {environment_id}, seed {seed}".format(**known))
    sections = [
        f"# {title}\n",
        _headline(run, status, rows),
        _curve(run, rows, title) if is_drawn else f"*`rl-lab show {run_word(run)}` draws the learning curve.*\n",
        _alerts(run),
        _table("Last metrics", ("metric", "value"), _last_metrics(rows)),
        _table("Where the time went", ("section", "fraction of wall-clock"), _time_split(rows)),
        _lineage(manifest),
        _commands(run, manifest, status),
        _links(run),
        f"## Config\n\n<details>\n<summary>config.yaml</summary>\n\n```yaml\n{run.read_config_text().rstrip()}\n```\n"
        "\n</details>\n",
    ]
    return "\n".join(section for section in sections if section)


def _headline(run: RunDirectory, status: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    last = rows[-1] if rows else {}
    counts = {name: last.get(name, 0) for name in _COUNTERS} | status["counts"]
    wall_s = status["wall_s"] or counts["wall_s"]
    facts = [
        ("run", f"`{run.id}`"),
        ("state", status["state"] + (f": {status['message']}" if status["message"] else "")),
        ("final evaluation score", _score(status["final_score"])),
        ("best evaluation score", _score(status["best_score"])),
        *((name.replace("_", " "), f"{counts[name]:,}") for name in _COUNTERS if name != "wall_s"),
        ("wall time", format_duration(wall_s)),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {_cell(value)} |\n" for name, value in facts)


def _curve(run: RunDirectory, rows: list[dict[str, Any]], title: str) -> str:
    try:
        is_drawn = write_curve(run.curve_path, rows, title=title)
    except MissingExtraError as error:  # a report without its picture is better than none
        return f"*{error}*\n"
    return f"![learning curve]({run.curve_path.name})\n" if is_drawn else "*No episode has finished yet.*\n"


def _last_metrics(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The last value of each metric; rows need not all carry the same ones."""
    last: dict[str, Any] = {}
    for row in rows:
        last |= row
    hidden = ("time/", "system/")
    names = sorted(name for name in last if "/" in name and not name.startswith(hidden))
    return [(f"`{name}`", _number(last[name])) for name in names]


def _time_split(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Fractions of the whole run: each row's `time/<section>_fraction` covers the time since the row before."""
    names = sorted({name for row in rows for name in row if name.startswith("time/") and name.endswith("_fraction")})
    fractions: dict[str, float] = {}
    for name in names:
        previous_wall_s = seconds = weight = 0.0
        for row, fraction in series(rows, name):
            wall_s = row.get("wall_s") or 0.0
            elapsed, previous_wall_s = max(wall_s - previous_wall_s, 0.0), wall_s
            seconds, weight = seconds + fraction * elapsed, weight + elapsed
        fractions[name.removeprefix("time/").removesuffix("_fraction")] = seconds / weight if weight else 0.0
    return [
        (name, f"{100 * fraction:.1f} %") for name, fraction in sorted(fractions.items(), key=lambda item: -item[1])
    ]


def _alerts(run: RunDirectory) -> str:
    lines = [alert_line(alert) for alert in run.read_alerts()]
    return "## Alerts\n\n" + "".join(f"- {_cell(line)}\n" for line in lines) if lines else ""


def alert_line(alert: dict[str, Any]) -> str:
    """`controller/approx_kl 0.31 at 20,480 agent steps (above 0.1): tip`."""
    steps, updates = alert.get("agent_steps"), alert.get("updates")
    where = f" at {steps:,} agent steps" if isinstance(steps, int) else ""
    if steps == 0 and isinstance(updates, int):  # a run that learns from a dataset alone
        where = f" after {updates:,} updates"
    condition = f" ({alert['condition']})" if alert.get("condition") else ""
    return f"{alert.get('metric')} {_number(alert.get('value'))}{where}{condition}: {alert.get('tip')}"


def _lineage(manifest: dict[str, Any]) -> str:
    lines = sentences(manifest)
    return "## Lineage\n\n" + "".join(f"- {_cell(line)}\n" for line in lines) if lines else ""


def _commands(run: RunDirectory, manifest: dict[str, Any], status: dict[str, Any]) -> str:
    """What to type next. Every command holds where it is pasted beside the folder of runs, however the run was made."""
    commit = (manifest.get("git") or {}).get("commit")
    changes = " with uncommitted changes" if (manifest.get("git") or {}).get("dirty") else ""
    origin = f"# at commit {commit}{changes}\n" if commit else ""
    named, folder = run_word(run), shlex.quote(os.path.relpath(run.path))
    began = printable(manifest.get("command_line") or "not known")
    source = _warm_source(run)
    again = f"rl-lab train {folder}/config.yaml" if source is None else f"rl-lab resume {source}"
    again = " ".join(
        [again, *_words({key: value for each in continuations_of(manifest) for key, value in each.items()})]
    )
    blocks = [
        f"It began with:\n\n```text\n{origin}{began}\n```\n",
        f"Reproduce:\n\n```bash\n{again}\n```\n",
    ]
    if status["state"] in DONE:
        blocks.append(
            f"Watch and score:\n\n```bash\nrl-lab play {named}\nrl-lab evaluate {named} --episodes 100\n```\n"
        )
        if words := _more(run, manifest, status):
            blocks.append(f"Go on, its counters going on:\n\n```bash\nrl-lab resume {named} {' '.join(words)}\n```\n")
        blocks.append(f"A new run from its weights:\n\n```bash\nrl-lab resume {named} --mode warm_start\n```\n")
    if status["state"] not in DONE or status["message"].endswith(BY_A_CALLBACK):
        blocks.append(f"Continue:\n\n```bash\nrl-lab resume {named}\n```\n")
    return "## Again\n\n" + "\n".join(blocks)


def _more(run: RunDirectory, manifest: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """What lets a run that is done go on: its last phase twice as long or, where a rule stopped it, without rules."""
    settings = settings_of(run, manifest)
    if status["state"] != "finished":  # by a rule, or from outside: then it continues as it is
        is_by_rule = status["state"] == "stopped" and not status["message"].endswith(BY_A_CALLBACK)
        rules = [key for key, value in settings.items() if key.startswith("training.stop.") and value is not None]
        return _words(dict.fromkeys(rules)) if is_by_rule else []
    if limit := settings.get("training.limit_cycles"):
        return _words({"training.limit_cycles": 2 * limit})
    for key in reversed(settings):
        unit = _DURATIONS.get(key.rpartition(".")[2]) if key.startswith("training.phases.") else None
        if unit is not None and (duration := settings[key]):
            done = status["counts"].get(unit, 0)  # a last cycle may have taken more than was left
            return _words({key: 2 * duration if 2 * duration > done else duration + done})
    return []


def _words(settings: dict[str, Any]) -> list[str]:
    """As they are typed."""
    return [shlex.quote(f"{key}={'null' if value is None else value}") for key, value in settings.items()]


def run_word(run: RunDirectory) -> str:
    """How a user names this run from here: by its id in ./runs, by its path elsewhere."""
    return shlex.quote(run.id if _is_here(run) else str(run.path))


def runs_dir_words(run: RunDirectory) -> str:
    """What lets a command find all runs beside this one: nothing in ./runs."""
    return "" if _is_here(run) else f" --runs-dir {shlex.quote(str(run.path.parent))}"


def _is_here(run: RunDirectory) -> bool:
    return run.path.parent.resolve() == Path("runs").resolve()


def _warm_source(run: RunDirectory) -> str | None:
    """`RUN --mode MODE key=value`: whose weights this run began with, and how; None: with its own."""
    lines = run.overrides_path.read_text(encoding="utf-8").splitlines() if run.overrides_path.exists() else []
    found = next((match for line in lines if (match := re.search(r"# (warm_start\w*) from ([^\s\"]+)", line))), None)
    if found is None:
        return None
    words = [shlex.quote(json.loads(line[2:])) for line in lines if line.startswith('- "') and "# warm" not in line]
    return " ".join([run_word(RunDirectory(run.path.parent / found[2])), f"--mode {found[1]}", *words])


def _links(run: RunDirectory) -> str:
    links = [name for name in ("best", "latest") if (run.checkpoints_dir / name).exists()]
    lines = [f"- {name} checkpoint: [{name}](checkpoints/{name})" for name in links]
    if run.videos_dir.is_dir():
        videos = sorted(run.videos_dir.glob("[!.]*.mp4"), key=lambda path: path.stat().st_mtime_ns)
        lines += [f"- video: [{video.name}]({os.path.relpath(video, run.path)})" for video in videos]
    paths = (("metrics", run.metrics_path), ("log", run.log_path))
    lines += [f"- {name}: [{path.name}]({path.name})" for name, path in paths if path.exists()]
    return "## Files\n\n" + "\n".join(lines) + "\n" if lines else ""


def _table(heading: str, columns: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    head = f"| {' | '.join(columns)} |\n|---|---:|\n"
    return f"## {heading}\n\n{head}" + "".join(f"| {_cell(name)} | {_cell(value)} |\n" for name, value in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _score(score: float | None) -> str:
    return "not evaluated" if score is None else f"**{score:,.2f}**"


def _number(value: Any) -> str:
    if value is None:
        return "not finite"  # JSON has no NaN, so the writer puts null
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
