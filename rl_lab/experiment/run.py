"""A run on disk as a notebook holds it: what it is, its numbers as columns, its curve and its video."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.experiment.film import record_video
from rl_lab.experiment.load import load_agent, load_config, open_config
from rl_lab.runs.curve import draw_curve, draw_metric
from rl_lab.runs.figures import make_figure
from rl_lab.runs.metrics_file import columns, read_metrics
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, MissingExtraError, RunError, did_you_mean


@dataclass(frozen=True, repr=False)
class Run:
    """A run on disk."""

    directory: RunDirectory

    @property
    def id(self) -> str:
        return self.directory.id

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def status(self) -> dict[str, Any]:
        return self.directory.read_status()

    @property
    def config(self) -> dict[str, Any]:
        return load_config(self.directory)

    def metrics(self) -> dict[str, np.ndarray]:
        """Every row of metrics.jsonl as columns, ready for `pandas.DataFrame(...)`: NaN where a row has no value."""
        return columns(read_metrics(self.directory.metrics_path))

    def plot(self, *names: str, axes: Any = None) -> Any:
        """The learning curve, or the metrics named, over agent steps; returns matplotlib axes (`.figure` is theirs)."""
        rows = read_metrics(self.directory.metrics_path)
        if axes is None:
            axes = make_figure("run.plot()", 960, 540, dpi=120).add_subplot()
        if not names and not draw_curve(axes, rows, title=self.id):
            raise RunError(f"Run {self.id} has no returns to draw yet: no episode has ended.")
        for name in names:
            if not draw_metric(axes, rows, name):
                known = sorted(columns(rows))
                raise ConfigError(
                    f"run.plot: no row of run {self.id} has a number called '{name}'.{did_you_mean(name, known)} "
                    f"run.metrics() has: {', '.join(known) or 'nothing yet'}."
                )
        return axes

    def video(self, *, trust: Sequence[str] = ()) -> Path:
        """The newest video of an evaluation; where there is none, an episode is played and recorded."""
        found = sorted(self.directory.videos_dir.glob("evaluation_*.mp4"))
        if found:
            return found[-1]
        agent, evaluator = load_agent(self.directory, open_config(self.directory, trust), "latest")
        try:
            steps = self.status["counts"].get("agent_steps", 0)
            path = self.directory.output("videos", f"evaluation_{steps:012d}.mp4")
            if record_video(agent.workflow, evaluator, path) is None:
                raise RunError(f"{evaluator.environment.spec.id} cannot render here, so there is no video.")
        finally:
            evaluator.close()
        return path

    def _facts(self) -> list[str]:
        status = self.status
        scores = {"best": status["best_score"], "final": status["final_score"]}
        shown = [f"{name} score {score:,.1f}" for name, score in scores.items() if score is not None]
        return [status["state"], f"{status['counts'].get('agent_steps', 0):,} agent steps", *shown]

    def __repr__(self) -> str:
        return f"<Run {self.id}: {', '.join(self._facts())}; {self.path}>"

    def _repr_html_(self) -> str:
        """A notebook's picture of it: what it is and, where there is one, the learning curve."""
        text = f"<b>{html.escape(self.id)}</b> {html.escape(', '.join(self._facts()))}<br>{html.escape(str(self.path))}"
        picture = io.BytesIO()
        try:
            self.plot().figure.savefig(picture, format="png")
        except (RunError, MissingExtraError):  # nothing to draw yet, or nothing to draw with
            return f"<div>{text}</div>"
        data = base64.b64encode(picture.getvalue()).decode("ascii")
        return f'<div>{text}<br><img alt="learning curve" width="640" src="data:image/png;base64,{data}"></div>'
