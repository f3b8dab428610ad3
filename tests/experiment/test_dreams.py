"""Dreams of real runs: on demand, on a cadence, and refused where there is no world model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_lab
from rl_lab.api import Run
from rl_lab.cli.main import main
from rl_lab.runs import film as film_module
from rl_lab.runs.film import CURVE_HEIGHT, CURVE_WIDTH, HEADER
from rl_lab.types import ConfigError, RunError
from tests.tiny_dreamer import TINY_DREAMER

SMALL = [
    *TINY_DREAMER,
    "environment.num_envs=2",
    "buffers.replay.batch_size=4",
    "buffers.replay.sequence_length=9",
    "training.phases.prefill.duration_steps=40",
    "training.phases.train.duration_steps=20",
    "evaluation.final_episodes=0",
    "evaluation.num_envs=3",
    "evaluation.video=false",
    "logging.tensorboard=false",
    "logging.every_steps=10",
    "runtime.device=cpu",
]


def train(runs_dir: Path, run_id: str, environment: str, *overrides: str) -> Run:
    return rl_lab.train(
        f"{environment}:dreamer", overrides=[*SMALL, *overrides], run_id=run_id, runs_dir=runs_dir, quiet=True
    )


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`state` and `pixels` have been filmed while they learnt; `ppo` has nothing to dream with."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "state", "rl_lab/PointMass-v0", "evaluation.dream_every_steps=25")
    train(folder, "pixels", "rl_lab/PixelCatch-v0", "evaluation.dream_every_updates=2")
    rl_lab.train("CartPole-v1:ppo", preset="debug", run_id="ppo", runs_dir=folder, quiet=True)
    return folder


def size_of(video: Path) -> tuple[int, int, int]:
    """Frames, width and height."""
    imageio = pytest.importorskip("imageio.v2")
    with imageio.get_reader(video) as reader:
        width, height = reader.get_meta_data()["size"]
        return sum(1 for _ in reader.iter_data()), width, height


def test_films_are_made_while_a_run_learns(runs_dir: Path) -> None:
    videos = runs_dir / "state" / "videos"
    names = [f"dream_{steps:012d}" for steps in (26, 50)]
    assert sorted(path.name for path in videos.iterdir()) == sorted(
        f"{name}.{kind}" for name in names for kind in ("mp4", "png")
    )
    # Three evaluation environments, two elements and reward, continue, value.
    assert size_of(videos / f"{names[0]}.mp4") == (50, 5 * CURVE_WIDTH, HEADER + 3 * CURVE_HEIGHT)


def test_films_can_go_by_updates(runs_dir: Path) -> None:
    found = sorted(path.name for path in (runs_dir / "pixels" / "videos").glob("*.mp4"))
    assert found == ["dream_update_000000000002.mp4", "dream_update_000000000004.mp4"]


def test_a_run_that_is_filmed_learns_as_if_nobody_watched(runs_dir: Path, tmp_path: Path) -> None:
    unseen = train(tmp_path, "state", "rl_lab/PointMass-v0")

    def learnt(run: Path) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        clock = ("wall_s", "time/", "system/")
        return [{name: value for name, value in row.items() if not name.startswith(clock)} for row in rows]

    rows = learnt(unseen.path)
    assert any("loss/dynamics" in row for row in rows)
    assert learnt(runs_dir / "state") == rows


def test_the_command_films_a_run_of_images(runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = tmp_path / "dream.mp4"
    words = ["--horizon", "7", "--context", "3", "--sequences", "2", "--checkpoint", "latest", "--output", str(video)]
    assert main(["dream", "pixels", *words, "--runs-dir", str(runs_dir)]) == 0
    assert capsys.readouterr().out == f"video: {video}\ncurves: {tmp_path / 'dream.png'}\n"
    frames, width, height = size_of(video)
    assert frames == 10 and width > 3 * CURVE_WIDTH + 3 * 128 and height > HEADER + 2 * 128


def test_films_lie_in_the_run_and_are_of_episodes_that_training_never_saw(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    write = film_module.write_film

    def remember(path: Path, views: Any, *, context: int) -> Any:
        seen.append(views["real"]["vector"])
        return write(path, views, context=context)

    monkeypatch.setattr("rl_lab.experiment.film.write_film", remember)
    run = Run(rl_lab.api.RunDirectory.open(runs_dir / "state"))
    settings = {"horizon": 4, "sequences": 2}
    files = rl_lab.dream(run, **settings)
    assert files.video == runs_dir / "state" / "videos" / "dream.mp4" and files.video.exists()
    rl_lab.dream("state", **settings, runs_dir=runs_dir)
    rl_lab.dream("state", **settings, seed=9, runs_dir=runs_dir)
    assert seen[0].shape == (2, 9, 2)
    assert np.array_equal(seen[0], seen[1]), "the same command, the same film"
    assert not np.array_equal(seen[0], seen[2])


def test_a_run_without_a_world_model_cannot_dream(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dream", "ppo", "--runs-dir", str(runs_dir)]) == 2
    assert capsys.readouterr().err == (
        "error: Run ppo cannot dream: PPO has no world model. "
        f"Watch it with `rl-lab play {runs_dir / 'ppo'}`, or train one that can with `rl-lab train dreamer_v3`.\n"
    )


@pytest.mark.parametrize("name", ["horizon", "context", "sequences"])
def test_numbers_below_one_are_refused(runs_dir: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0: write a whole number of at least 1"):
        rl_lab.dream("state", runs_dir=runs_dir, **{name: 0})  # type: ignore[arg-type]


def test_a_film_that_cannot_be_written_is_refused_before_anything_is_played(runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"only mp4 is written; name it 'a\.mp4'"):
        rl_lab.dream("nowhere", runs_dir=runs_dir, output="a.gif")


def test_a_run_that_is_not_there_is_refused(runs_dir: Path) -> None:
    with pytest.raises(RunError):
        rl_lab.dream("nowhere", runs_dir=runs_dir)
