"""The checked blocks of a config -> what the orchestration goes by: when to log, save, evaluate, film and stop."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rl_lab.config.schema import Settings
from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.housekeeping import EvaluationPlan
from rl_lab.orchestration.stopping import StopRules


@dataclass(frozen=True)
class Plans:
    log: Cadence
    checkpoint: Cadence
    evaluation: EvaluationPlan
    film: Cadence
    stop: StopRules


def make_plans(settings: Settings) -> Plans:
    log, save, look = settings.logging, settings.checkpoint, settings.evaluation
    cadence = Cadence(look.every_steps, look.every_updates, place="evaluation")
    return Plans(
        log=Cadence(log.every_steps, log.every_updates, place="logging"),
        checkpoint=Cadence(None, save.every_updates, save.every_minutes, place="training.checkpoint"),
        evaluation=EvaluationPlan(cadence, look.warmup_steps, look.episodes, look.final_episodes),
        film=Cadence(look.dream_every_steps, look.dream_every_updates, place="evaluation.dream"),
        stop=StopRules(**asdict(settings.stop)),
    )
