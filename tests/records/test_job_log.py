"""Slurm's messages in a job's log, recorded with Slurm 22.05.8 on the test cluster."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from hpcinit import submit
from hpcinit.records import job_log
from hpcinit.records.job_log import End

KILLED = """srun: error: n1: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=2.0
srun: error: n1: task 0: Terminated
srun: error: n2: tasks 2-3: Terminated
srun: Force Terminated StepId=2.0
"""
LIMIT = """slurmstepd-n1: error: *** JOB 6 ON n1 CANCELLED AT 2026-11-21T13:24:16 DUE TO TIME LIMIT ***
srun: Job step aborted: Waiting up to 5 seconds for job step to finish.
srun: forcing job termination
srun: got SIGCONT
srun: error: n1: tasks 0-1: Terminated
srun: launch/slurm: _step_signal: Terminating StepId=6.0
srun: error: n2: tasks 2-3: Killed
"""
LOST = """srun: error: n1: tasks 0-1: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=9.0
srun: error: Node failure on n2
slurmstepd-n1: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-21T13:36:23 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***
"""
# Not recorded, because no node of the test cluster limits memory: from Slurm's source (slurmstepd, task/cgroup).
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed."


def test_a_killed_rank_before_the_abort() -> None:
    """Only tasks that ended before srun aborted the step count as ended on their own account."""
    assert job_log.read(KILLED).ends == (
        End("n1", (1,), "Killed", False),
        End("n1", (0,), "Terminated", True),
        End("n2", (2, 3), "Terminated", True),
    )


FORKED = """hpcinit: error: n2: rank 5: Killed
hpcinit: rank 4 on n2 ends with it
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=2.0
srun: error: n1: task 0: Terminated
"""


def test_a_task_that_forked_the_ranks_of_its_node() -> None:
    """What the task prints about its ranks counts instead of its end; otherwise its end counts for all its ranks."""
    assert job_log.read(FORKED, 4).ends == (
        End("n2", (5,), "Killed", False),
        End("n1", (0, 1, 2, 3), "Terminated", True),
    )
    # With a cgroup for memory, Slurm reports why the task ended, and the fork server which rank it was.
    killed = job_log.read(f"{OOM}\n{FORKED.replace('task 1: Killed', 'task 1: Out Of Memory')}", 4)
    assert killed.oom == OOM and killed.ends[0] == End("n2", (5,), "Killed", False)
    alone = job_log.read("srun: error: n2: task 1: Killed\n", 4)
    assert alone.ends == (End("n2", (4, 5, 6, 7), "Killed", False),)


def test_the_time_limit() -> None:
    """The log shows why and when the job was ended; all ends of ranks were later."""
    found = job_log.read(LIMIT)
    assert found.cancelled is not None and found.cancelled.why == "TIME LIMIT"
    assert found.cancelled.at == datetime(2026, 11, 21, 13, 24, 16).timestamp()
    assert all(end.after_abort for end in found.ends)


def test_a_lost_node() -> None:
    """A node failure is read with the name of the node."""
    found = job_log.read(LOST)
    assert found.lost == ("n2",) and found.cancelled is not None and found.cancelled.why == "NODE FAILURE"
    assert not found.ends[0].after_abort  # it exited before the abort


def test_an_end_by_a_failed_task_is_no_cancellation() -> None:
    """Slurm 26.05 reports the steps that srun ends after a task failed. The failed task is what happened."""
    found = job_log.read(
        "srun: error: n1: task 1: Exited with exit code 7\nsrun: Terminating StepId=16.0\n"
        "[2026-11-27T04:28:24.677] error: *** STEP 17.0 ON n1 CANCELLED AT 2026-11-27T04:28:24 DUE TO TASK FAILURE ***\n"
        "srun: error: n3: task 0: Terminated\nsrun: Force Terminated StepId=16.0\n"
    )
    assert found.cancelled is None
    first = found.ends[0]
    assert (first.ranks, first.how, first.after_abort) == ((1,), "Exited with exit code 7", False)


EXECVE = "error: execve(): /opt/env/bin/torchrun: No such file or directory"


@pytest.mark.parametrize(
    ("prefix", "ends", "hosts"),
    [
        ("slurmstepd-n2: ", "n1: task 0: Exited with exit code 1\nn2: task 1: Exited with exit code 2", ["n2"]),
        ("slurmstepd: ", "n2: task 1: Exited with exit code 2\nn1: task 0: Exited with exit code 1", ["n2"]),
        ("slurmstepd: ", "n1: task 0: Exited with exit code 2\nn2: task 1: Exited with exit code 2", ["n1", "n2"]),
        ("slurmstepd: ", "n2: task 1: Exited with exit code 1\nJob step aborted\nn1: task 0: Exited with exit code 1", ["n2"]),
        ("other: ", "n2: task 1: Exited with exit code 2", []),
    ],
)  # fmt: skip
def test_tasks_that_slurm_could_not_start(prefix: str, ends: str, hosts: list[str]) -> None:
    """slurmstepd names its node, or else they are those that ended first, and in the same way."""
    lines = "".join(f"srun: error: {line}\n" for line in ends.splitlines())
    found = job_log.read(f"{prefix}{EXECVE}\n{lines}")
    assert [end.host for end in found.not_started] == hosts


def test_the_last_job_of_a_chain_counts() -> None:
    """Earlier jobs of a chain write to the same log."""
    both = f"hpcinit: new attempt: job 1 of a chain starts\n{KILLED}hpcinit: new attempt: job 2 of a chain starts\nbash: modul: not found\n"
    assert job_log.read(both) == job_log.JobLog(output=("bash: modul: not found",))


def test_the_oom_killer() -> None:
    """Both messages of Slurm about the OOM killer are recognized."""
    assert job_log.read(f"{OOM}\n{KILLED}").oom == OOM and job_log.read(KILLED).oom == ""
    assert job_log.read("srun: error: n2: task 3: Out Of Memory\n").oom


def test_the_local_engine_prints_the_same() -> None:
    """The local engine's message about an end is read like srun's."""
    line = "hpcinit: error: 127.0.0.1: task 3: Exited with exit code 7"
    assert job_log.read(line).ends == (End("127.0.0.1", (3,), "Exited with exit code 7", False),)


def test_only_the_last_attempt_of_a_requeued_job_counts() -> None:
    """Messages of earlier attempts are ignored; an attempt that was refused at its start has only that message."""
    before = (
        "srun: error: n2: task 1: Killed\n"
        "slurmstepd-n1: error: *** JOB 29 ON n1 CANCELLED AT 2026-11-21T14:32:27 DUE TO JOB REQUEUE ***\n"
    )
    again = job_log.read(before + "hpcinit: new attempt: restart 1 of job 29 starts on n[1-2]\nhello\n")
    assert (again.ends, again.cancelled, again.output) == ((), None, ("hello",))
    site = job_log.read(
        before + "hpcinit: new attempt: restart 1 of job 18_1 starts on n[1-2]\nhello\n"
    )  # without restart.max_restarts
    assert site == again
    spare = job_log.read(
        before + "hpcinit: new attempt: hang on n2, n3: restarting the ranks in the same job, without n2,n3\nhello\n"
    )
    assert spare == again
    refusal = "hpcinit: no restart 3 (slurm): 2 restarts in a row made no progress beyond step 31"
    refused = job_log.read(f"{before}hpcinit: new attempt: restart 3 of job 29 starts on n[1-2]\n{refusal}\n")
    assert (refused.ends, refused.cancelled, refused.output) == ((), None, (refusal,))
    own = job_log.read(f"{before}hpcinit: no restart 1 (failure): restart.max_restarts is 0; furthest step: 3\n")
    assert own.ends, "its own failure ended it, which is reported"


@pytest.mark.parametrize("block", ["chain", "after"])
def test_the_batch_script_marks_attempts_as_the_reader_expects(block: str) -> None:
    """A new attempt is found by the start of its line, whatever follows."""
    script = (Path(submit.__file__).parent / "lib" / f"{block}.sh").read_text()
    assert f'echo "hpcinit: {job_log.NEW_ATTEMPT}' in script
