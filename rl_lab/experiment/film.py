"""Videos of a policy, and films of what a world model predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.schema import EvaluationBlock
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.media import Distribution, Frames
from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.housekeeping import FilmPlan
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.runs.film import FPS, FilmFiles, write_film
from rl_lab.runs.plan_film import write_plan_film
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.video import write_video
from rl_lab.types import ConfigError, Counts, EnvironmentFault, Metrics, MissingExtraError
from rl_lab.utils.tree import map_leaves
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.film import can_dream, make_film, while_anybody_plays
from rl_lab.workflows.plan_film import Planning, PlanWatcher, makes_plans


def film_dreams(
    workflow: Workflow, evaluator: Evaluator, path: Path, *, sequences: int = 4, context: int = 5, horizon: int = 45
) -> FilmFiles:
    """Play in the evaluation's environments, which no buffer holds, and film what the model makes of it."""
    if makes_plans(workflow):
        return film_plans(workflow, evaluator, path, sequences=sequences, length=context + horizon)
    rows = evaluator.play_rows(workflow.act, length=context + horizon)
    assert can_dream(workflow)
    some = {key: values[:sequences] for key, values in rows.items()}
    film = make_film(workflow, while_anybody_plays(some, at_least=context + 1), context=context)
    return write_film(path, map_leaves(lambda values: values.cpu().numpy(), film), context=context)


def film_plans(workflow: Planning, evaluator: Evaluator, path: Path, *, sequences: int, length: int) -> FilmFiles:
    """Play in the evaluation's environments and film the plans that are followed."""
    watcher = PlanWatcher(workflow, sequences)
    rows = evaluator.play_rows(watcher, length=length)
    some = while_anybody_plays({key: values[:sequences] for key, values in rows.items()}, at_least=1)
    film = map_leaves(lambda values: values.cpu().numpy(), watcher.film(some))
    executed = {"first_executed": workflow.first_executed, "after_executed": workflow.after_executed}
    return write_plan_film(path, film, **executed)


def can_be_filmed(workflow: Workflow) -> bool:
    """Whether there is something to see beside what `rl-lab play` shows: dreams, or plans."""
    return can_dream(workflow) or makes_plans(workflow)


def film_plan(
    run: RunDirectory | None,
    block: EvaluationBlock,
    cadence: Cadence,
    workflow: Workflow,
    evaluator: Evaluator,
    logger: MetricLogger,
) -> FilmPlan:
    for name in ("dream_every_steps", "dream_every_updates"):
        if (every := getattr(block, name)) is not None and not can_be_filmed(workflow):
            raise ConfigError(
                f"evaluation.{name} is {every}, but {type(workflow).__name__} has no world model to dream with: "
                "write null, or train one, such as `rl-lab train dreamer_v3`."
            )
    if run is None:
        return FilmPlan()
    folder = run.videos_dir

    def film(counts: Counts) -> FilmFiles:
        by_updates = block.dream_every_steps is None
        name = f"dream_update_{counts.updates:012d}" if by_updates else f"dream_{counts.agent_steps:012d}"
        files = film_dreams(workflow, evaluator, folder / f"{name}.mp4")
        logger.show("eval/dream", Frames(files.frames, FPS), counts.agent_steps)
        logger.show("eval/dream_curves", Frames(files.frames[-1:]), counts.agent_steps)  # whole at the end
        return files

    return FilmPlan(cadence, film)


def video_plan(
    run: RunDirectory | None, workflow: Workflow, evaluator: Evaluator, logger: MetricLogger
) -> Callable[[Counts], Path | None]:
    """What records one evaluation episode at these counts; nothing without a run."""

    def record(counts: Counts) -> Path | None:
        if run is None:
            return None
        show = partial(logger.show, "eval/episode", agent_steps=counts.agent_steps)
        with reported_to(evaluator):
            return record_video(workflow, evaluator, evaluation_video(run, counts), show=show)
        return None

    return record


def showing_returns(
    evaluate: Callable[..., Metrics], evaluator: Evaluator, logger: MetricLogger, scheduler: PhaseScheduler
) -> Callable[..., Metrics]:
    """An evaluation whose returns are also shown as a histogram."""

    def evaluate_and_show(*, episodes: int) -> Metrics:
        metrics = evaluate(episodes=episodes)
        if evaluator.last_returns is not None:
            returns = Distribution(evaluator.last_returns)
            logger.show("eval/episode_return", returns, scheduler.run_counts.agent_steps)
        return metrics

    return evaluate_and_show


def evaluation_video(run: RunDirectory, counts: Counts) -> Path:
    """Where the video of an evaluation lies; by updates where no steps were taken."""
    number = f"{counts.agent_steps:012d}" if counts.agent_steps else f"update_{counts.updates:012d}"
    return run.videos_dir / f"evaluation_{number}.mp4"


@contextmanager
def reported_to(evaluator: Evaluator) -> Iterator[None]:
    """An environment that cannot be made or played in order to be filmed ends no training."""
    try:
        yield
    except (ConfigError, EnvironmentFault, MissingExtraError) as error:
        evaluator.report(f"There is no video: {error}")


def record_video(
    workflow: Workflow, evaluator: Evaluator, path: Path, *, show: Callable[[Frames], None] | None = None
) -> Path | None:
    """One deterministic episode as a video; None where the environment cannot render here."""
    recording = evaluator.record(workflow.act)
    if recording is None:
        return None
    if show is not None:
        show(Frames(recording.frames, recording.fps))
    return write_video(path, recording.frames, recording.fps)
