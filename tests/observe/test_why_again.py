"""`hpcinit why` of a running job: it reads incomplete evidence again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcinit.engine import LOCAL, SLURM
from hpcinit.observe import overview, restarts, run_details, state
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
RUNS = State("RUNNING", "5", LOCAL)


def leave(run: Path, rank: int, error: str) -> None:
    """Write the error record of a rank, as hpcinit.runtime.program does."""
    (run / run_folder.ERRORS).mkdir(exist_ok=True)
    record = ErrorRecord(time.time(), rank, f"n{rank + 1}", error, "", "training", 7, "5.0.0")
    (run / run_folder.ERRORS / record.name).write_text(record.to_json())


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Actions to run after the first, second, ... time that evidence is gathered."""
    after: list[Callable[[], None]] = []
    real = gather_evidence.gather

    def gather(path: Path, now: State) -> gather_evidence.Evidence:
        found = real(path, now)
        if after:
            after.pop(0)()
        return found

    monkeypatch.setattr(gather_evidence, "gather", gather)
    return after


def test_a_cause_that_was_written_while_a_secondary_error_was_read(tmp_path: Path, gathered: list) -> None:
    """With only a secondary error, the evidence is read a second time, which finds the cause."""
    leave(tmp_path, 0, CLOSED)
    os.utime(tmp_path / run_folder.ERRORS / "rank-0.json", (0, 0))  # an old error: no further waiting
    gathered.append(lambda: leave(tmp_path, 1, "ValueError: bad sample 17"))
    headline = why_command.explain_run(tmp_path, RUNS).headline
    assert headline.startswith("rank 1 on n2 failed first") and headline.endswith("(the job is still RUNNING)")


def test_a_cause_that_appears_later(tmp_path: Path, gathered: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """`why` waits once for the cause of a recent secondary error; here it is srun's message about a killed rank."""
    leave(tmp_path, 0, CLOSED)
    (tmp_path / run_folder.LOGS).mkdir()
    log = tmp_path / run_folder.JOB_LOG
    monkeypatch.setattr(why_command.time, "sleep", lambda _: log.write_text("srun: error: n2: task 1: Killed\n"))
    assert why_command.explain_run(tmp_path, RUNS).headline.startswith(
        "rank 1 on n2 was killed by a signal (Killed) first"
    )


def test_a_secondary_error_without_a_cause(tmp_path: Path, gathered: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evidence of a recent secondary error is read three times, that of an old one twice."""
    slept: list[float] = []
    monkeypatch.setattr(why_command.time, "sleep", slept.append)
    leave(tmp_path, 0, CLOSED)
    for times, sleeps in ((3, 1), (2, 0)):
        gathered[:] = [lambda: None] * 5
        slept.clear()
        assert why_command.explain_run(tmp_path, RUNS).headline.startswith(
            "a rank or its node disappeared without an error"
        )
        assert (5 - len(gathered), len(slept)) == (times, sleeps)
        os.utime(tmp_path / run_folder.ERRORS / "rank-0.json", (0, 0))


def test_a_cause_is_reported_at_once(tmp_path: Path, gathered: list) -> None:
    """Evidence that contains the first failure is read only once."""
    leave(tmp_path, 1, "ValueError: bad sample 17")
    gathered[:] = [lambda: None] * 5
    assert (
        why_command.explain_run(tmp_path, RUNS).headline.startswith("rank 1 on n2 failed first") and len(gathered) == 4
    )


def mark_started(run: Path, job: str = "5", restart: int = 0) -> None:
    """Write the records of a batch script that was killed."""
    (run / run_folder.EXIT).write_text(f'{{"job": "{job}", "pid": 1, "restart": {restart}, "began": 1795267388}}\n')
    (run / run_folder.SUBMISSION).write_text(f'{{"job_id": "{job}", "engine": "slurm"}}\n')


@pytest.mark.parametrize(
    ("log", "reason", "headline"),
    [
        (LOST, None, r"node n2 was lost: Slurm reports a node failure"),
        (PREEMPTED, None, r"preempted: a job of higher priority took the nodes, 14:32:27"),
        (REQUEUED, None, r"the job was requeued, 14:32:27 by its batch script, an administrator, or scontrol requeue"),
        (REQUEUED, "preempted", "preempted"),
        (KILLED, "failure", r"rank 1 on n1 was killed by a signal \(Killed\) first"),
        ("hello\n", None, "Slurm requeued the job; no reason is recorded, but it may have been a preemption, .*"),
    ],
)
def test_a_job_that_waits_for_another_attempt(tmp_path: Path, log: str, reason: str | None, headline: str) -> None:
    """The first line is the end of the previous attempt, from its log and records, without a query of Slurm."""
    mark_started(tmp_path)
    (tmp_path / run_folder.LOGS).mkdir()
    (tmp_path / run_folder.JOB_LOG).write_text(log)
    if reason:
        (tmp_path / run_folder.RESTARTS).write_text(f'{{"job": "5", "restart": 1, "time": 1, "reason": "{reason}"}}\n')
    for name in ("PENDING", "COMPLETING"):
        verdict = why_command.explain_run(tmp_path, State(name, "5", SLURM, "BeginTime", restart=0, away=True))
        assert re.fullmatch(rf"job 5 waits \(BeginTime\) to restart: {headline}", verdict.headline)
        assert verdict.do.startswith("it restarts automatically, from its last checkpoint")
        assert "submit again" not in verdict.do


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (State("PENDING", "5", SLURM, "BeginTime", restart=0), "it restarts automatically"),
        (
            State("COMPLETING", "5", SLURM, restart=0),
            "job 5 is still in the queue (COMPLETING), and Slurm may restart",
        ),
        (State("PREEMPTED", "5", SLURM, restart=0, away=True), "unknown: Slurm does not answer"),
        (State("UNKNOWN", "5", SLURM, restart=0, away=True), "unknown: Slurm does not answer"),
        (State("FAILED", "5", SLURM, others=("6",)), "the chain has ended, so its jobs in the queue (6)"),
        (State("PREEMPTED", "5", SLURM, restart=0), "submit it again"),
    ],
)
@pytest.mark.parametrize("log", [PREEMPTED, LOST])
def test_no_second_job_while_the_first_may_continue(tmp_path: Path, log: str, now: State, says: str) -> None:
    """`why` advises a new job only if Slurm confirms that nothing continues the run."""
    mark_started(tmp_path)
    (tmp_path / run_folder.LOGS).mkdir()
    (tmp_path / run_folder.JOB_LOG).write_text(log)
    advice = why_command.explain_run(tmp_path, now).do
    if says.startswith("submit"):
        assert advice.startswith(("submit it again", "submit again"))
    else:
        assert advice.startswith(says) and "submit" not in advice


def test_no_second_job_while_a_dependent_one_is_not_known_to_be_over(tmp_path: Path) -> None:
    """A run whose script depends on this run's job counts as its continuation, also if Slurm does not answer."""
    first, second = tmp_path / "x-0001", tmp_path / "x-0002"
    for run, job in ((first, "5"), (second, "6")):
        run.mkdir()
        mark_started(run, job)
        (run / run_folder.LOGS).mkdir()
    (first / run_folder.JOB_LOG).write_text(PREEMPTED)
    now = State("PREEMPTED", "5", SLURM, restart=0)
    (second / run_folder.SCRIPT).write_text("#!/bin/bash\n#SBATCH --dependency=afterany:55\n")
    assert why_command.explain_run(first, now).do.startswith("submit it again")
    (second / run_folder.SCRIPT).write_text("#!/bin/bash\n#SBATCH --dependency=afterok:4,afterany:5\n")
    advice = why_command.explain_run(first, now).do
    assert advice.startswith("job 6 (x-0002) was submitted to follow this run, and is UNKNOWN")


def test_a_program_without_progress_calls(tmp_path: Path) -> None:
    """The report of a program without run.progress recommends the call, because a hang looks like a long step, and
    `hpcinit stacks RUN`, which needs no call."""
    assert "seems to hang, hpcinit stacks RUN shows" in why_command.explain_run(tmp_path, RUNS).do
    assert "calls run.progress(step, total)" in why_command.explain_run(tmp_path, RUNS).do
    (tmp_path / run_folder.PROGRESS).write_text('{"step": 1, "total": 2, "values": {}, "time": 1}')
    assert why_command.explain_run(tmp_path, RUNS).do == ""


def test_a_controller_that_is_down_is_queried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the controller is down, it is queried once, and the report uses only the run folder."""
    mark_started(tmp_path)
    queried: list[str] = []
    away = "squeue: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

    def answer(command: tuple[str, ...], *_: object) -> list[str]:
        queried.append(command[0])
        raise Unreachable(away)

    monkeypatch.setattr(queue, "_lines", answer)
    monkeypatch.setattr(gather_evidence, "_shown", lambda what, _: queried.append(what))
    now = state.read(tmp_path)
    assert (now.name, now.away, now.restart) == ("UNKNOWN", True, 0)
    verdict = why_command.explain_run(tmp_path, now)
    assert verdict.headline == (
        f"Slurm's controller does not answer ({away}); no failure is recorded in the run folder"
    )
    leave(tmp_path, 1, "ValueError: bad sample 17")
    failed = why_command.explain_run(tmp_path, now).headline
    assert failed.startswith("rank 1 on n2 failed first") and failed.endswith(
        f"(Slurm's controller does not answer: {away})"
    )
    assert queried == ["squeue", "sacct"], "accounting may reply when the controller does not"


def test_earlier_attempts(tmp_path: Path) -> None:
    """`status` shows the number of restarts, their reasons and the remaining budget, and ignores a torn line."""
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
    mark_started(tmp_path, restart=2)
    now = State("RUNNING", "5", SLURM, restart=2)
    assert run_details.details(tmp_path, now) == "2 restarts, 1 left"
    [shown] = run_details.documents(overview.Run(tmp_path, now))
    assert shown["restarts"] == document
    assert (restarts.restarts_line([]), restarts.summary([])) == ("", "")


@pytest.mark.parametrize("full", [True, False])
def test_a_failure_that_could_not_be_recorded(tmp_path: Path, full: bool) -> None:
    """Without other evidence, the report names the disk of the run folder if it is full."""
    with small_disk(tmp_path / "run") as place:
        (place / run_folder.LOGS).mkdir()
        if full:
            fill(place)
        verdict = why_command.explain_run(place, State("FAILED", "5", LOCAL, exit_status=1))
    if full:
        assert verdict.kind == "disk" and verdict.do.startswith(f"free space for {place}")
        assert "the run folder cannot be written (No space left on device)" in verdict.evidence[0]
    else:
        assert verdict.kind == "script"


def test_the_only_line_of_a_log(tmp_path: Path) -> None:
    """The line with which slurmstepd reports a missing program is quoted, with advice about the compute nodes."""
    (tmp_path / run_folder.LOGS).mkdir()
    line = "slurmstepd: error: execve(): python3.99: No such file or directory"  # recorded with Slurm 22.05
    (tmp_path / run_folder.LOGS / "rank-0.log").write_text(line + "\n")
    (tmp_path / run_folder.JOB_LOG).write_text("srun: error: n1: task 0: Exited with exit code 2\n")
    verdict = why_command.explain_run(tmp_path, State("FAILED", "5", LOCAL, exit_status=2))
    assert verdict.headline.endswith(f": {line}") and verdict.kind == "file", verdict
    assert "exists on the compute nodes" in verdict.do


@pytest.mark.parametrize(("others", "used_up"), [((), True), (("7",), False)])
def test_the_last_job_of_a_chain_was_terminated(tmp_path: Path, others: tuple[str, ...], used_up: bool) -> None:
    """A program that handles the signal and exits with 143 in the last job has no failed rank: the chain is used up."""
    mark_started(tmp_path)
    (tmp_path / run_folder.LOGS).mkdir()
    (tmp_path / run_folder.JOB_LOG).write_text("srun: error: n1: task 0: Exited with exit code 143\n")
    leave(tmp_path, 0, "SystemExit: 143")
    now = State("FAILED", "5", SLURM, exit_status=143, link="job 3 of a chain of 3", others=others)
    verdict = why_command.explain_run(tmp_path, now)
    assert verdict.headline.startswith("the chain is used up: job 3 of a chain of 3") == used_up, verdict
    assert ("chain=N" in verdict.do) == used_up
