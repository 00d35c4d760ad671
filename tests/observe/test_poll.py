"""How often the controller is queried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.engine import SLURM
from hpcinit.observe import poll
from hpcinit.observe.state import State
from hpcinit.slurm import queue
from hpcinit.submit import folder, follow
from tests.slurm_lines import squeue_line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = folder.claim(tmp_path, "x")
    folder.mark_submitted(path, {"job_id": "77", "engine": "slurm"})
    return path


class Clock:
    """A clock that advances by one second at each call."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def count_queries(monkeypatch: pytest.MonkeyPatch, run: Path, name: str, seconds: int) -> tuple[int, bool]:
    """Return how often squeue was called in `seconds`, and whether the run was over then."""
    queries: list[str] = []

    def answer(command: tuple[str, ...], *_: object) -> list[str]:
        queries.append(command[0])
        return [squeue_line("77", name)] if name else []

    monkeypatch.setattr(queue, "_lines", answer)
    monkeypatch.setattr(poll, "time", Clock())
    polling = poll.Polls([run])
    over = [polling.ask() for _ in range(seconds)]
    return queries.count("squeue"), over[-1]


def test_slower_while_nothing_happens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten minutes the controller is queried about seventy times, not six hundred times."""
    queries, over = count_queries(monkeypatch, run, "RUNNING", 600)
    assert 55 <= queries <= 90 and not over


def test_an_exit_record_causes_a_query_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the batch script records its exit status, the controller is queried at once."""
    queries: list[float] = []
    clock = Clock()
    monkeypatch.setattr(poll, "time", clock)
    monkeypatch.setattr(queue, "_lines", lambda *_: queries.append(clock.now) or [squeue_line("77", "COMPLETING")])
    polling = poll.Polls([run])
    while clock.now < 305 or queries[-1] == clock.now:  # a moment at which no query is due
        polling.ask()
    (run / "exit.json").write_text(json.dumps({"job": "77", "exit_status": 0}))
    polling.ask()
    polling.ask()
    assert clock.now - queries[-1] <= 1


def test_waiting_for_a_purged_job_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute, a job that Slurm does not know and that has no exit record is not waited for."""
    _, over = count_queries(monkeypatch, run, "", 50)
    assert not over
    _, over = count_queries(monkeypatch, run, "", 70)
    assert over


def test_a_completed_job_without_an_exit_record_is_a_success(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Slurm reports COMPLETED before the exit record is visible, the exit status is 0. FAILED gives 1."""
    (run / "job.sh").touch()
    for name, status in (("COMPLETED", 0), ("FAILED", 1)):
        end = State(name, "77", SLURM)
        monkeypatch.setattr(follow, "_watch", lambda *_, end=end: end)
        assert (end.exit_status, follow.follow(run)) == (None, status)
