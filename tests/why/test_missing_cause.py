"""The verdict on runs in which the rank that failed recorded no error: the other ranks have secondary errors only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcinit.records import hang_report, job_log
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.hang_report import HangReport, Place, Waiting
from hpcinit.why.diagnosis import diagnose
from hpcinit.why.evidence import Evidence, Verdict
from hpcinit.why.hang_verdict import Culprit, HangVerdict
from tests.why.test_diagnosis import CLOSED, T

TIMED_OUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for "
    "recv operation to complete"
)
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line {line}, in step
    {collective}(gradients)
  File "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in {collective}
    work.wait()
"""
HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def error_of(rank: int, error: str = CLOSED, line: int = 9, collective: str = "all_reduce") -> Found:
    traceback = TRACEBACK.format(line=line, collective=collective) + error
    return Found(ErrorRecord(T + rank, rank, HOSTS[rank], error, traceback, "training", 41, "5.0.0"), T)


def verdict(*found: Found, log: str = "", tasks: int = 1, **more: object) -> Verdict:
    known = {"size": 4, "hosts": HOSTS, "every_end_is_logged": tasks == 1, **more}
    return diagnose(Evidence("FAILED", found=found, log=job_log.read(log, tasks), **known))  # type: ignore[arg-type]


OTHERS = (error_of(0), error_of(1), error_of(2))


def test_sigterm_of_one_rank() -> None:
    """srun reports the rank before it ends the others. If Slurm ended the job, that is the cause instead."""
    log = "srun: error: n2: task 3: Terminated\nsrun: launch/slurm: _step_signal: Terminating StepId=5.0\n"
    found = verdict(*OTHERS, log=log + "srun: error: n1: task 0: Terminated\n")
    assert (found.headline, found.rank, found.kind) == (
        "rank 3 on n2 was killed by a signal (Terminated) first",
        3,
        "signal",
    )
    assert found.do.startswith("neither hpcinit nor Slurm sent this SIGTERM")
    cancelled = diagnose(Evidence("CANCELLED", found=OTHERS, log=job_log.read(log), size=4))
    assert cancelled.kind == "cancelled"


WORKER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated."


@pytest.mark.parametrize(
    ("error", "log"),
    [
        (WORKER, ""),
        ("SystemExit: 143", ""),
        (CLOSED, "srun: error: n1: tasks 0-1: Terminated\nsrun: error: n2: tasks 2-3: Terminated\n"),
    ],
)
def test_sigterm_to_all_ranks(error: str, log: str) -> None:
    """A worker, a handler or most ranks ended by SIGTERM: the preemption if Slurm reports one, the time limit and
    scancel from the job's state, else an unknown sender."""
    found = verdict(*OTHERS[:2], error_of(2, error), log=log)
    assert (found.headline, found.kind, found.rank) == (
        "the ranks were terminated by SIGTERM, and its sender is unknown",
        "signal",
        None,
    )
    assert verdict(*OTHERS[:2], error_of(2, error), log=log, preempted=True).kind == "preempted"
    limit = diagnose(Evidence("TIMEOUT", found=(error_of(2, error),), log=job_log.read(log), size=4))
    assert limit.kind == "time-limit"


def test_sigint_of_one_rank_or_of_all() -> None:
    """The first rank with a KeyboardInterrupt; if all have one, the job was interrupted."""
    found = verdict(*OTHERS, error_of(3, "KeyboardInterrupt"))
    assert found.headline.startswith("rank 3 on n2 was interrupted by SIGINT first, ") and found.kind == "signal"
    every = verdict(*(error_of(rank, "KeyboardInterrupt") for rank in range(4)))
    assert (every.headline, every.kind) == ("ranks 0-3 were interrupted (SIGINT)", "cancelled")


@pytest.mark.parametrize(
    ("log", "tasks", "returned"),
    [
        ("srun: error: n1: tasks 0-1: Exited with exit code 1\nsrun: error: n2: task 2: Terminated\n", 1, frozenset()),
        ("hpcinit: n2: rank 3: Exited with exit code 0\nhpcinit: error: n2: rank 2: Exited with exit code 1\n", 2, ()),
        ("srun: error: n1: task 0: Exited with exit code 1\n", 2, {3}),
    ],
)
def test_a_rank_that_ended_with_status_0(log: str, tasks: int, returned: frozenset[int]) -> None:
    """srun prints no line about it; a fork server and an agent print its status; hpcinit.run records its return."""
    found = verdict(*OTHERS, log=log, tasks=tasks, returned=frozenset(returned))
    assert (found.headline, found.rank, found.host) == ("rank 3 on n2 ended first, with exit status 0", 3, "n2")
    assert found.kind == "early-end" and "an early return, sys.exit(0), os._exit(0)" in found.do
    assert found.evidence == ("ranks 0-2 wait in all_reduce, called at train.py:9 in step when it ended",)


def test_a_rank_that_ended_with_status_0_before_a_dump() -> None:
    """The others waited long enough to write dumps, which show the same rank. It is no hang: the rank has ended."""
    culprit = Culprit(
        3, "", "not-called", "0", "default_pg", "all_reduce", 6, (1,), evidence="rank 3 has not called it"
    )
    flight = HangVerdict((culprit,))
    found = verdict(*OTHERS, returned=frozenset({3}), flight=flight)
    assert (found.headline, found.kind) == ("rank 3 on n2 ended first, with exit status 0", "early-end")
    assert "flight recorder: rank 3 has not called it" in found.evidence
    assert verdict(*OTHERS, flight=flight).kind == "hang"


def test_a_rank_without_a_line_while_the_job_runs() -> None:
    """Before Slurm reports the end, srun may also not know yet that a node is lost, so the rank is only named."""
    log = job_log.read("srun: error: n1: tasks 0-1: Exited with exit code 1\n")
    evidence = Evidence("COMPLETING", found=OTHERS, log=log, size=4, hosts=HOSTS, every_end_is_logged=True)
    found = diagnose(evidence)
    assert found.headline.startswith("probably rank 3 on n2 disappeared without an error") and found.kind == "unknown"
    assert diagnose(replace(evidence, size=0)).headline.startswith("a rank or its node disappeared")


def test_a_rank_that_was_killed_before_srun_aborted_the_step() -> None:
    """srun received the end of rank 0 first. If two ranks are missing, Slurm may have killed one of them."""
    log = """srun: error: n1: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=12.0
srun: error: n2: task 3: Killed
srun: error: n1: task 1: Exited with exit code 1
"""
    found = verdict(*OTHERS, log=log)
    assert (found.headline, found.rank) == ("probably rank 3 on n2 was killed by a signal (Killed) first", 3)
    assert found.kind == "signal" and found.evidence[0] == "srun's report: task 3: Killed"
    two = verdict(
        *OTHERS[:2], *OTHERS[:1], log=log.replace("n1: task 1: Exited with exit code 1", "n2: task 2: Killed")
    )
    assert two.kind == "unknown"


def test_a_rank_that_called_something_else() -> None:
    """The tracebacks of timed out collectives show the rank that waits at another line than the majority."""
    three = [error_of(rank, TIMED_OUT) for rank in range(3)]
    found = verdict(*three, error_of(3, TIMED_OUT, 17, "broadcast"))
    assert (found.rank, found.host, found.kind) == (3, "n2", "mismatch")
    assert found.headline == (
        "the ranks called different collectives: rank 3 waits in broadcast, called at train.py:17 in step; "
        "ranks 0-2 wait in all_reduce, called at train.py:9 in step"
    )
    two = [error_of(rank, TIMED_OUT, 17, "broadcast") for rank in (2, 3)]
    assert verdict(*three[:2], *two).kind == "unknown"  # no majority


def test_a_rank_that_did_not_call() -> None:
    """A rank without an error while a collective of all others timed out; the advice is what would have shown more."""
    found = verdict(*(error_of(rank, TIMED_OUT) for rank in range(3)), tails={3: "reading shard 17"}, tasks=2)
    assert found.headline == "probably a collective timed out, and rank 3 on n2 did not call it"
    assert (found.rank, found.kind) == (3, "hang") and "hang.after_s" in found.do
    assert found.evidence[-1] == "the last output of rank 3: reading shard 17"


def test_stacks_of_ranks_in_two_collectives() -> None:
    """In a hang report without a stuck rank, the minority waits in another collective."""
    waiting = (
        Waiting((0, 1, 2), "all_reduce", "train.py:9 in step"),
        Waiting((3,), "broadcast", "train.py:17 in step"),
    )
    found = verdict(hang=HangReport(waiting=waiting))
    assert (found.rank, found.kind) == (3, "mismatch")


def test_the_place_of_an_error() -> None:
    """The collective and the user's line, from Python's traceback."""
    assert hang_report.place_of_error(error_of(0).record.traceback) == Place("all_reduce", "train.py:9 in step")
    assert hang_report.place_of_error("") == Place("", "")
