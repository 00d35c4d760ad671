"""`hpcinit why` while a job goes on: what it has come by too early for is looked at again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcinit.observe import overview, restarts, state, status
from hpcinit.observe.state import State
from hpcinit.records import run_folder
from hpcinit.records.error_records import ErrorRecord
from hpcinit.slurm import queue
from hpcinit.slurm.slurm_client import Unreachable
from hpcinit.why import gather_evidence, why_command
from tests.records.test_job_log import KILLED, LOST
from tests.small_disks import fill, small_disk

CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:28071"
PREEMPTED = "slurmstepd-n1: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-21T14:32:27 DUE TO PREEMPTION ***\n"
REQUEUED = PREEMPTED.replace("PREEMPTION", "JOB REQUEUE")
RUNS = State("RUNNING", "5", "local")


def leave(run: Path, rank: int, error: str) -> None:
    """A rank's record, as hpcinit.runtime.program leaves it."""
    (run / run_folder.ERRORS).mkdir(exist_ok=True)
    record = ErrorRecord(time.time(), rank, f"n{rank + 1}", error, "", "training", 7, "5.0.0")
    (run / run_folder.ERRORS / record.name).write_text(record.to_json())


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens after the first, second, ... time that evidence is gathered; the list ends up empty."""
    after: list[Callable[[], None]] = []
    real = gather_evidence.gather

    def gather(path: Path, now: State) -> gather_evidence.Evidence:
        found = real(path, now)
        if after:
            after.pop(0)()
        return found

    monkeypatch.setattr(gather_evidence, "gather", gather)
    return after


def test_a_cause_that_was_written_while_its_echo_was_read(tmp_path: Path, gathered: list) -> None:
    """The echo alone is no answer: a second look finds the cause beside it, without waiting for it."""
    leave(tmp_path, 0, CLOSED)
    os.utime(tmp_path / run_folder.ERRORS / "rank-0.json", (0, 0))  # old: nothing more is waited for
    gathered.append(lambda: leave(tmp_path, 1, "ValueError: bad sample 17"))
    headline = why_command.explain_run(tmp_path, RUNS).headline
    assert headline.startswith("rank 1 on n2 failed first") and headline.endswith("(the job is RUNNING still)")


def test_a_cause_that_comes_a_moment_later(tmp_path: Path, gathered: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the echo is young its cause is waited for, once; srun's word of a rank that was killed is one."""
    leave(tmp_path, 0, CLOSED)
    (tmp_path / run_folder.LOGS).mkdir()
    log = tmp_path / run_folder.JOB_LOG
    monkeypatch.setattr(why_command.time, "sleep", lambda _: log.write_text("srun: error: n2: task 1: Killed\n"))
    assert why_command.explain_run(tmp_path, RUNS).headline.startswith(
        "rank 1 on n2 was ended by a signal (Killed) first"
    )


def test_an_echo_that_stays_alone(tmp_path: Path, gathered: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at three times while it is young and twice later; then it is told as what it is."""
    slept: list[float] = []
    monkeypatch.setattr(why_command.time, "sleep", slept.append)
    leave(tmp_path, 0, CLOSED)
    for times, sleeps in ((3, 1), (2, 0)):
        gathered[:] = [lambda: None] * 5
        slept.clear()
        assert why_command.explain_run(tmp_path, RUNS).headline.startswith(
            "a rank or its node went away without a word"
        )
        assert (5 - len(gathered), len(slept)) == (times, sleeps)
        os.utime(tmp_path / run_folder.ERRORS / "rank-0.json", (0, 0))


def test_a_cause_is_told_at_once(tmp_path: Path, gathered: list) -> None:
    """Evidence that names the first failure is gathered once."""
    leave(tmp_path, 1, "ValueError: bad sample 17")
    gathered[:] = [lambda: None] * 5
    assert (
        why_command.explain_run(tmp_path, RUNS).headline.startswith("rank 1 on n2 failed first") and len(gathered) == 4
    )


def begun(run: Path, job: str = "5", restart: int = 0) -> None:
    """As a batch script leaves it that was killed."""
    (run / run_folder.EXIT).write_text(f'{{"job": "{job}", "pid": 1, "restart": {restart}, "began": 1795267388}}\n')
    (run / run_folder.SUBMISSION).write_text(f'{{"job_id": "{job}", "engine": "slurm"}}\n')


@pytest.mark.parametrize(
    ("log", "reason", "headline"),
    [
        (LOST, None, r"node n2 was lost: Slurm says node failure"),
        (PREEMPTED, None, r"a job of higher priority took the nodes, 14:32:27"),
        (REQUEUED, None, r"the job was requeued, 14:32:27: by its batch script, an administrator, or scontrol requeue"),
        (REQUEUED, "preempted", "preempted"),
        (KILLED, "failure", r"rank 1 on n1 was ended by a signal \(Killed\) first"),
        ("hello\n", None, "Slurm has taken it from its nodes, and nobody says why: preempted, a lost node, or .*"),
    ],
)
def test_a_job_that_waits_for_another_attempt(tmp_path: Path, log: str, reason: str | None, headline: str) -> None:
    """How the attempt before ended comes first, from its log and what its batch script has noted; nobody is asked."""
    begun(tmp_path)
    (tmp_path / run_folder.LOGS).mkdir()
    (tmp_path / run_folder.JOB_LOG).write_text(log)
    if reason:
        (tmp_path / run_folder.RESTARTS).write_text(f'{{"job": "5", "restart": 1, "time": 1, "reason": "{reason}"}}\n')
    for name in ("PENDING", "COMPLETING"):
        verdict = why_command.explain_run(tmp_path, State(name, "5", "slurm", "BeginTime", restart=0, away=True))
        assert re.fullmatch(rf"job 5 waits \(BeginTime\) to begin again: {headline}", verdict.headline)
        assert verdict.do.startswith("it begins again by itself, from its last checkpoint")
        assert "submit again" not in verdict.do


def test_a_program_that_tells_no_step(tmp_path: Path) -> None:
    """A hang of it cannot be told from a long step, and that is said; not where a step is known."""
    assert "calls run.progress(step, total)" in why_command.explain_run(tmp_path, RUNS).do
    (tmp_path / run_folder.PROGRESS).write_text('{"step": 1, "total": 2, "values": {}, "time": 1}')
    assert why_command.explain_run(tmp_path, RUNS).do == ""


def test_a_controller_that_is_away_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question would take as long as the first; the run's own words are told, and that they are all there is."""
    begun(tmp_path)
    asked: list[str] = []
    away = "squeue: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

    def answer(command: tuple[str, ...], _: object) -> list[str]:
        asked.append(command[0])
        raise Unreachable(away)

    monkeypatch.setattr(queue, "_lines", answer)
    monkeypatch.setattr(gather_evidence, "_shown", lambda what, _: asked.append(what))
    now = state.read(tmp_path)
    assert (now.name, now.away, now.restart) == ("UNKNOWN", True, 0)
    verdict = why_command.explain_run(tmp_path, now)
    assert verdict.headline == (
        f"Slurm's controller does not answer ({away}); as far as the run has left word nothing has failed"
    )
    leave(tmp_path, 1, "ValueError: bad sample 17")
    failed = why_command.explain_run(tmp_path, now).headline
    assert failed.startswith("rank 1 on n2 failed first") and failed.endswith(
        f"(Slurm's controller does not answer: {away})"
    )
    assert asked == ["squeue", "sacct"], "accounting may answer where the controller does not"


def test_the_attempts_before(tmp_path: Path) -> None:
    """How many, why each ended, and what is left of the budget of the job that runs; a torn line counts for nothing."""
    lines = [
        '{"job": "5", "restart": 1, "time": 1, "reason": "hang", "step": 10, "without_progress": 0, "max_restarts": 3}',
        '{"job": "5", "restart": 2, "time": 2, "reason": "slurm", "step": null, "without_progress": 1, "max_restarts": 3}',
        '{"job": "5", "rest',
    ]
    (tmp_path / run_folder.RESTARTS).write_text("\n".join(lines))
    assert (
        restarts.restarts_line(restarts.read(tmp_path)) == "2 restarts, 1 left: 1 hung (step 10), 2 requeued by Slurm"
    )
    document = restarts.document(tmp_path)
    assert (document["count"], document["left"]) == (2, 1)
    assert [one["reason"] for one in document["attempts"]] == ["hang", "slurm"]
    begun(tmp_path, restart=2)
    now = State("RUNNING", "5", "slurm", restart=2)
    assert status.details(tmp_path, now) == "2 restarts, 1 left"
    [shown] = status.documents(overview.Run(tmp_path, now))
    assert shown["restarts"] == document
    assert (restarts.restarts_line([]), restarts.words([])) == ("", "")


@pytest.mark.parametrize("full", [True, False])
def test_a_failure_that_could_not_be_recorded(tmp_path: Path, full: bool) -> None:
    """Where nothing else is known, the report names the run folder's disk if that is full, and guesses nothing."""
    with small_disk(tmp_path / "run") as place:
        (place / run_folder.LOGS).mkdir()
        if full:
            fill(place)
        verdict = why_command.explain_run(place, State("FAILED", "5", "local", exit_status=1))
    if full:
        assert verdict.kind == "disk" and verdict.do.startswith(f"make room for {place}")
        assert "the run folder cannot be written (No space left on device)" in verdict.evidence[0]
    else:
        assert verdict.kind == "script"
