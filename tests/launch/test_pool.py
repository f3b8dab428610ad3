"""Warm workers: one process for many tasks, replaced when it dies, gone when its parent is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_lab.launch.pool import Event, Pool

HERE = Path(__file__).parent


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    workers = Pool("pool_work:work", 1, log_path=tmp_path / "workers.log")
    yield workers
    workers.close()


def next_event(pool: Pool) -> Event:
    while True:
        for event in pool.events(1.0):
            return event


def do(pool: Pool, **task: Any) -> Event:
    pool.submit(task)
    return next_event(pool)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_process_does_one_task_after_another_on_its_own_cores(pool: Pool, tmp_path: Path) -> None:
    first, second = do(pool, kind="facts").value, do(pool, kind="facts").value
    assert first["pid"] == second["pid"] != os.getpid()
    assert first["threads"] == "1" and not first["torch"], "the threads are chosen before torch is imported"
    if hasattr(os, "sched_getaffinity"):
        assert first["cores"] == sorted(os.sched_getaffinity(0))
    pool.close()
    assert (tmp_path / "workers.log").read_text().count("a library prints") == 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
def test_workers_share_the_cores_between_them(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    by_worker = Pool.cores_by_worker(jobs=2)
    assert by_worker == ([cores[0::2], cores[1::2]] if len(cores) > 1 else [cores, cores])
    assert Pool.cores_by_worker(jobs=len(cores) + 1)[-1] == [cores[0]]


def test_a_report_gets_its_answer(pool: Pool) -> None:
    task = {"kind": "ask"}
    pool.submit(task)
    for expected in (1, 2):
        event = next_event(pool)
        assert (event.kind, event.value) == ("report", expected) and pool.idle == 0
        pool.answer(task, 10 * expected)
    assert next_event(pool) == Event("done", task, [10, 20]) and pool.idle == 1


def test_a_worker_that_dies_is_named_and_replaced(pool: Pool) -> None:
    event = do(pool, kind="die")
    assert (event.kind, event.value) == ("died", -9)
    assert do(pool, kind="facts").kind == "done"


def test_an_interrupted_worker_may_save_and_stays(pool: Pool, tmp_path: Path) -> None:
    pool.submit({"kind": "save", "mark": str(tmp_path / "mark")})
    wait_until((tmp_path / "mark").exists)
    pool.interrupt()
    assert next_event(pool).value == "saved"


def test_workers_leave_when_their_parent_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    lines = [
        "from pathlib import Path",
        "from rl_lab.launch.pool import Pool",
        "if __name__ == '__main__':",
        f"    pool = Pool('pool_work:work', 1, log_path=Path({str(tmp_path / 'log')!r}))",
        f"    pool.submit({{'kind': 'sleep', 'mark': {str(mark)!r}}})",
        "    list(pool.events(60.0))",
    ]
    (tmp_path / "parent.py").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env=environment)
    wait_until(lambda: mark.exists() and bool(mark.read_text()))
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(int(mark.read_text())))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
