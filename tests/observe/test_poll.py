"""How often the controller is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.observe import poll
from hpcinit.observe.job_state import State
from hpcinit.slurm import queue
from hpcinit.submit import folder, follow
from tests.slurm_lines import squeue_line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = folder.claim(tmp_path, "x")
    folder.mark_submitted(path, {"job_id": "77", "engine": "slurm"})
    return path


class Clock:
    """A second later at each look."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def asked(monkeypatch: pytest.MonkeyPatch, run: Path, name: str, seconds: int) -> tuple[int, bool]:
    """How often squeue was asked in so many seconds, and whether the run was then over."""
    questions: list[str] = []

    def answer(command: tuple[str, ...], _: object) -> list[str]:
        questions.append(command[0])
        return [squeue_line("77", name)] if name else []

    monkeypatch.setattr(queue, "_lines", answer)
    monkeypatch.setattr(poll, "time", Clock())
    polling = poll.Poll(run)
    over = [polling.ask() for _ in range(seconds)]
    return questions.count("squeue"), over[-1]


def test_slower_while_nothing_happens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten minutes the controller is asked some seventy times, not six hundred."""
    questions, over = asked(monkeypatch, run, "RUNNING", 600)
    assert 55 <= questions <= 90 and not over


def test_the_end_is_not_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the batch script leaves its exit status, the controller is asked at once, however rarely before."""
    questions: list[float] = []
    clock = Clock()
    monkeypatch.setattr(poll, "time", clock)
    monkeypatch.setattr(queue, "_lines", lambda *_: questions.append(clock.now) or [squeue_line("77", "COMPLETING")])
    polling = poll.Poll(run)
    while clock.now < 305 or questions[-1] == clock.now:  # a moment at which no question is due
        polling.ask()
    (run / "exit.json").write_text(json.dumps({"job": "77", "exit_status": 0}))
    polling.ask()
    polling.ask()
    assert clock.now - questions[-1] <= 1


def test_a_job_that_slurm_forgot_is_not_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that Slurm does not know and that left no exit record is given up after a minute."""
    _, over = asked(monkeypatch, run, "", 50)
    assert not over
    _, over = asked(monkeypatch, run, "", 70)
    assert over


def test_a_job_that_ended_well_and_wrote_no_status_is_no_failure(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm says COMPLETED and the batch script's record is not to be seen yet: who waits ends with 0. Of a job that is
    gone without a record nobody knows, which is a failure."""
    (run / "job.sh").touch()
    for name, status in (("COMPLETED", 0), ("FAILED", 1)):
        end = State(name, "77", "slurm")
        monkeypatch.setattr(follow, "_watch", lambda *_, end=end: end)
        assert (end.exit_status, follow.follow(run)) == (None, status)
