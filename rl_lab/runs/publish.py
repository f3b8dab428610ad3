"""What of a run goes to the Hugging Face Hub: the policy's weights, how to build it, and a card that people read.

    README.md  config.yaml  environment.json  manifest.json  status.json  metrics.jsonl
    learning_curve.png  replay.mp4  checkpoints/step_…/{components,controllers}.pt

It is a run directory, so that everything that reads runs reads it: no optimizer, replay or log is in it, nor the names
of the machine, its user and folders that manifest.json and status.json hold.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.curve import write_curve
from rl_lab.runs.files import to_json
from rl_lab.runs.metrics_file import read_metrics, series
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.utils.text import printable

POLICY = ("components", "controllers")  # the sections of a checkpoint that act
SCORE = "eval/episode_return_mean"
_OF_MANIFEST = (
    *("config_schema_version", "checkpoint_schema_version", "identity", "name", "algorithm", "environment_id", "seed"),
    *("config_hash", "created", "rl_lab_version", "python", "packages", "git", "continuations"),
)
_OF_STATUS = ("state", "counts", "wall_s", "best_score", "final_score", "time")


def write_bundle(
    run: RunDirectory, folder: Path, *, repo: str, license: str, checkpoint: str, packages: Mapping[str, str]
) -> dict[str, int]:
    """Write everything that would be uploaded into an empty folder: {file: bytes}. `packages` are those that the config
    imports besides ours, {package: place}."""
    found = CheckpointStore(run.checkpoints_dir).load(checkpoint, sections=POLICY)
    manifest, status, rows = run.read_manifest(), run.read_status(), read_metrics(run.metrics_path)
    CheckpointStore(folder / "checkpoints", identity=manifest.get("identity")).save(
        found.state, agent_steps=found.counts.get("agent_steps", 0), counts=found.counts, score=found.manifest["score"]
    )
    (folder / "checkpoints" / "latest").unlink()  # the Hub has no links
    (folder / "config.yaml").write_text(run.read_config_text(), encoding="utf-8")
    (folder / "manifest.json").write_text(to_json(_some(manifest, _OF_MANIFEST)), encoding="utf-8")
    (folder / "status.json").write_text(to_json(_some(status, _OF_STATUS)), encoding="utf-8")
    for path in (run.environment_path, run.metrics_path):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    video = _newest_video(run)
    if video is not None:
        shutil.copyfile(video, folder / "replay.mp4")
    title = printable(f"{manifest.get('algorithm')} on {manifest.get('environment_id')}, seed {manifest.get('seed')}")
    has_curve = write_curve(folder / "learning_curve.png", rows, title=title)
    card = _Card(run, manifest, found, rows, repo=repo, license=license, packages=packages)
    page = card.page(has_curve=has_curve, has_video=video is not None)
    (folder / "README.md").write_text(page, encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _some(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _newest_video(run: RunDirectory) -> Path | None:
    videos = run.videos_dir.glob("evaluation_*.mp4") if run.videos_dir.is_dir() else ()
    return max(videos, key=lambda path: path.stat().st_mtime_ns, default=None)


class _Card:
    """The model card: what the Hub reads in its head, and what a person reads below it."""

    def __init__(
        self,
        run: RunDirectory,
        manifest: Mapping[str, Any],
        checkpoint: Checkpoint,
        rows: list[dict[str, Any]],
        *,
        repo: str,
        license: str,
        packages: Mapping[str, str],
    ) -> None:
        self._run, self._manifest, self._checkpoint, self._rows = run, manifest, checkpoint, rows
        self._repo, self._license, self._packages = repo, license, packages
        self._algorithm, self._environment = str(manifest.get("algorithm")), str(manifest.get("environment_id"))

    def page(self, *, has_curve: bool, has_video: bool) -> str:
        version, seed = self._manifest.get("rl_lab_version"), self._manifest.get("seed")
        config = self._run.read_config_text().rstrip()
        parts = [
            self._head(),
            f"# {self._algorithm} on {self._environment}\n\nTrained with RL Lab {version}, seed {seed}.",
            '<video src="replay.mp4" controls width="480"></video>' if has_video else "",
            "![learning curve](learning_curve.png)" if has_curve else "",
            self._scores(),
            self._use(),
            self._origin(),
            f"## Config\n\n<details>\n<summary>config.yaml</summary>\n\n```yaml\n{config}\n```\n\n</details>",
        ]
        return printable("\n\n".join(part for part in parts if part) + "\n", keep="\n\t")

    def _head(self) -> str:
        """YAML, in which JSON is allowed."""
        facts: dict[str, Any] = {
            "license": self._license,
            "library_name": "rl-lab",
            "pipeline_tag": "reinforcement-learning",
            "tags": [
                "reinforcement-learning",
                "deep-reinforcement-learning",
                "rl-lab",
                self._algorithm,
                self._environment,
            ],
        }
        score = self._checkpoint.manifest["score"]
        if score is not None:
            metric = {"type": "mean_reward", "name": "mean return per episode", "value": round(score, 4)}
            task = {"type": "reinforcement-learning", "name": "reinforcement learning"}
            result = {
                "task": task,
                "dataset": {"name": self._environment, "type": self._environment},
                "metrics": [metric],
            }
            facts["model-index"] = [{"name": self._algorithm, "results": [result]}]
        return "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in facts.items()) + "---"

    def _scores(self) -> str:
        evaluated = [(row["agent_steps"], value) for row, value in series(self._rows, SCORE)]
        best = max(evaluated, key=lambda each: each[1], default=None)
        score, steps = self._checkpoint.manifest["score"], self._checkpoint.counts.get("agent_steps", 0)
        lines = [] if score is None else [f"| this checkpoint, {steps:,} agent steps | {score:,.2f} |"]
        if best is not None:
            lines.append(f"| best evaluation of the run, {best[0]:,} agent steps | {best[1]:,.2f} |")
        table = (
            "\n".join(["| evaluation | mean return per episode |", "|---|---:|", *lines])
            if lines
            else "*Not evaluated.*"
        )
        again = f"```bash\nrl-lab evaluate {self._repo} --episodes 100{self._trust()}\n```"
        return f"## Scores\n\n{table}\n\nActing deterministically. Measure it yourself:\n\n{again}"

    def _trust(self) -> str:
        return "".join(f" --trust {package}" for package in self._packages)

    def _use(self) -> str:
        trust = f", trust={[*self._packages]}" if self._packages else ""
        needs = f"It needs the package {', '.join(self._packages)}, whose code runs when the policy is built.\n\n"
        return (
            "## How to load it\n\n"
            + (needs if self._packages else "")
            + "```bash\npip install 'rl-lab[hub]'\n```\n\n```python\nimport rl_lab\n\n"
            + f'policy = rl_lab.load("{self._repo}"{trust})\naction = policy.act(observation)\n'
            + "env = policy.environment()  # where it was trained\n```\n\n"
            + "The weights are plain tensors: loading them runs no code of this repository."
        )

    def _origin(self) -> str:
        git = self._manifest.get("git") or {}
        commit = f" at commit {git['commit']}" if git.get("commit") else ""
        dirty = " with uncommitted changes" if git.get("dirty") else ""
        versions = ", ".join(f"{name} {version}" for name, version in (self._manifest.get("packages") or {}).items())
        return (
            f"## Where it comes from\n\nRun `{self._run.id}`, begun {self._manifest.get('created')}{commit}{dirty}; "
            f"Python {self._manifest.get('python')}, {versions}. Train it again with this repository's config:\n\n"
            "```bash\nrl-lab train config.yaml\n```"
        )
