"""One run: what it is, how far it came, its scores and where its files lie.

examples:
  rl-lab show @last
  rl-lab show 20260101-1200 --json
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.cli.parsing import JSON, RUN, runs_dir_of
from rl_lab.cli.printing import answer, fields, format_value
from rl_lab.utils.formatting import sparkline

if TYPE_CHECKING:
    from rl_lab.runs.run_directory import RunDirectory

CURVES = {"training return": "collect/episode_return_mean", "evaluation return": "eval/episode_return_mean"}
CURVE_WIDTH = 48

ARGUMENTS = (
    *RUN,
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.index import resolve_run

    directory = resolve_run(arguments.run, runs_dir_of(arguments))
    facts = gather(directory)
    answer(arguments, facts, "" if arguments.json else describe(facts))
    return 0


def gather(directory: RunDirectory) -> dict[str, Any]:
    """The run as plain data: the answer of --json, and what the page is drawn from."""
    from rl_lab.config.files import from_yaml
    from rl_lab.config.phases import extend
    from rl_lab.runs.lineage import sentences
    from rl_lab.runs.manifest import continuations_of
    from rl_lab.runs.metrics_file import read_metrics, series

    rows = read_metrics(directory.metrics_path)
    curves = {
        name: [value for _, value in series(rows, metric) if math.isfinite(value)] for name, metric in CURVES.items()
    }
    videos = sorted(directory.videos_dir.glob("[!.]*.mp4"), key=lambda path: path.stat().st_mtime_ns)
    paths = {
        "directory": directory.path,
        "config": directory.config_path,
        "report": directory.report_path,
        "curve": directory.curve_path,
        "video": videos[-1] if videos else None,
        "latest checkpoint": directory.checkpoints_dir / "latest",
        "best checkpoint": directory.checkpoints_dir / "best",
        "metrics": directory.metrics_path,
        "log": directory.log_path,
        "uncommitted changes": directory.changes_path,
    }
    manifest = directory.read_manifest()
    config = from_yaml(directory.read_config_text(), place=str(directory.config_path))
    for changes in continuations_of(manifest):
        extend(config, changes)
    return {
        "id": directory.id,
        "manifest": manifest,
        "lineage": sentences(manifest),
        "status": directory.read_status(),
        "tags": directory.read_tags(),
        "alerts": directory.read_alerts(),
        "cleaned": directory.read_cleaned(),
        "config": config,
        "last_metrics": {name: value for row in rows for name, value in row.items()},
        "curves": curves,
        "paths": {name: path for name, path in paths.items() if path is not None and path.exists()},
    }


def describe(facts: dict[str, Any]) -> str:
    from rl_lab.runs.report import alert_line, run_word, runs_dir_words
    from rl_lab.runs.run_directory import RunDirectory
    from rl_lab.utils.formatting import format_duration

    manifest, status = facts["manifest"], facts["status"]
    git = manifest.get("git") or {}
    commit = f"{git['commit'][:12]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None
    if commit and git.get("branch"):
        commit += f" on {git['branch']}"
    versions = {"rl-lab": manifest.get("rl_lab_version"), "python": manifest.get("python")}
    versions |= manifest.get("packages") or {}
    what = [
        ("experiment", manifest.get("name")),
        ("algorithm", manifest.get("algorithm")),
        ("environment", manifest.get("environment_id")),
        ("seed", manifest.get("seed")),
        ("command", manifest.get("command_line")),
        ("commit", commit),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("host", status["host"] or manifest.get("hostname")),
        ("started", manifest.get("created")),
        ("tags", facts["tags"]["tags"]),
        ("notes", facts["tags"]["notes"]),
    ]
    state = status["state"] + (f": {status['message']}" if status["message"] else "")
    cleaned = facts["cleaned"]
    progress = [
        ("state", state),
        ("cleaned", f"{cleaned.get('removed')} removed on {cleaned.get('time')}" if cleaned else None),
        *((name.replace("_", " "), count) for name, count in status["counts"].items()),
        ("time", format_duration(status["wall_s"] or 0.0)),
        ("best score", status["best_score"]),
        ("final score", status["final_score"]),
    ]
    curves = [
        (name, f"{sparkline(line, width=CURVE_WIDTH)}  {line[0]:.4g} -> {line[-1]:.4g}, best {max(line):.4g}")
        for name, line in facts["curves"].items()
        if len(line) > 1
    ]
    here = Path.cwd()
    paths = facts["paths"].items()
    files = [(name, path.relative_to(here) if path.is_relative_to(here) else path) for name, path in paths]
    alerts = [(str(number), alert_line(alert)) for number, alert in enumerate(facts["alerts"], 1)]
    lineage = [(str(number), event) for number, event in enumerate(facts["lineage"], 1)]
    sections = {"": what, "progress": progress, "alerts": alerts, "lineage": lineage, "curves": curves, "files": files}
    blocks = [f"{title}\n{fields(pairs)}".strip("\n") for title, pairs in sections.items() if pairs]
    run_id = format_value(facts["id"])
    next_command = "evaluate" if status["state"] in ("finished", "stopped", "pruned", "running") else "resume"
    directory = RunDirectory(facts["paths"]["directory"])
    next_step = f"{next_command} {format_value(run_word(directory))}"
    has_checkpoint = "latest checkpoint" in facts["paths"]
    if cleaned and not has_checkpoint:
        next_step = f"train {dict(files)['config']}"
    if status["state"] == "running" and not has_checkpoint:
        next_step = f"list --status running{format_value(runs_dir_words(directory))}"
    return "\n\n".join([f"{run_id}\n{blocks[0]}", *blocks[1:], f"next: rl-lab {next_step}"])
