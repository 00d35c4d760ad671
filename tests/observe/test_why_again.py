"""`hpcinit why` while a job goes on: what it has come by too early for is looked at again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcinit.facts import runfolder
from hpcinit.facts.error_records import ErrorRecord
from hpcinit.observe import evidence, why
from hpcinit.observe.state import State

CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:28071"
RUNS = State("RUNNING", "5", "local")


def leave(run: Path, rank: int, error: str) -> None:
    """A rank's record, as hpcinit.runtime.program leaves it."""
    (run / runfolder.ERRORS).mkdir(exist_ok=True)
    record = ErrorRecord(time.time(), rank, f"n{rank + 1}", error, "", "training", 7, "5.0.0")
    (run / runfolder.ERRORS / record.name).write_text(record.to_json())


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens after the first, second, ... time that evidence is gathered; the list ends up empty."""
    after: list[Callable[[], None]] = []
    real = evidence.gather

    def gather(path: Path, now: State) -> evidence.Evidence:
        found = real(path, now)
        if after:
            after.pop(0)()
        return found

    monkeypatch.setattr(evidence, "gather", gather)
    return after


def test_a_cause_that_was_written_while_its_echo_was_read(tmp_path: Path, gathered: list) -> None:
    """The echo alone is no answer: a second look finds the cause beside it, without waiting for it."""
    leave(tmp_path, 0, CLOSED)
    os.utime(tmp_path / runfolder.ERRORS / "rank-0.json", (0, 0))  # old: nothing more is waited for
    gathered.append(lambda: leave(tmp_path, 1, "ValueError: bad sample 17"))
    headline = why.of_run(tmp_path, RUNS).headline
    assert headline.startswith("rank 1 on n2 failed first") and headline.endswith("(the job is RUNNING still)")


def test_a_cause_that_comes_a_moment_later(tmp_path: Path, gathered: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the echo is young its cause is waited for, once; srun's word of a rank that was killed is one."""
    leave(tmp_path, 0, CLOSED)
    (tmp_path / runfolder.LOGS).mkdir()
    log = tmp_path / runfolder.JOB_LOG
    monkeypatch.setattr(why.time, "sleep", lambda _: log.write_text("srun: error: n2: task 1: Killed\n"))
    assert why.of_run(tmp_path, RUNS).headline.startswith("rank 1 on n2 was ended by a signal (Killed) first")


def test_an_echo_that_stays_alone(tmp_path: Path, gathered: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at three times while it is young and twice later; then it is told as what it is."""
    slept: list[float] = []
    monkeypatch.setattr(why.time, "sleep", slept.append)
    leave(tmp_path, 0, CLOSED)
    for times, sleeps in ((3, 1), (2, 0)):
        gathered[:] = [lambda: None] * 5
        slept.clear()
        assert why.of_run(tmp_path, RUNS).headline.startswith("a rank or its node went away without a word")
        assert (5 - len(gathered), len(slept)) == (times, sleeps)
        os.utime(tmp_path / runfolder.ERRORS / "rank-0.json", (0, 0))


def test_a_cause_is_told_at_once(tmp_path: Path, gathered: list) -> None:
    """Evidence that names the first failure is gathered once."""
    leave(tmp_path, 1, "ValueError: bad sample 17")
    gathered[:] = [lambda: None] * 5
    assert why.of_run(tmp_path, RUNS).headline.startswith("rank 1 on n2 failed first") and len(gathered) == 4
