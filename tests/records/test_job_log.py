"""Slurm's own words in a job's log, recorded with Slurm 22.05.8 on the test cluster."""

from __future__ import annotations

from datetime import datetime

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
# Not recorded here, where no node confines memory: as Slurm's source has it (slurmstepd, task/cgroup).
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed."


def test_a_killed_rank_comes_before_those_that_were_told_to_end() -> None:
    """Only what ended before srun ended the step ended by itself."""
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


def test_a_task_that_has_forked_its_nodes_ranks() -> None:
    """What it says of its ranks counts and not its own end; where it says nothing, its end is that of all its ranks."""
    assert job_log.read(FORKED, 4).ends == (
        End("n2", (5,), "Killed", False),
        End("n1", (0, 1, 2, 3), "Terminated", True),
    )
    # With a cgroup for memory Slurm says why, of the task; which rank it was the parent has said.
    killed = job_log.read(f"{OOM}\n{FORKED.replace('task 1: Killed', 'task 1: Out Of Memory')}", 4)
    assert killed.oom == OOM and killed.ends[0] == End("n2", (5,), "Killed", False)
    alone = job_log.read("srun: error: n2: task 1: Killed\n", 4)
    assert alone.ends == (End("n2", (4, 5, 6, 7), "Killed", False),)


def test_the_time_limit() -> None:
    """Who has ended the job, where and when; what the ranks ended of came after it."""
    found = job_log.read(LIMIT)
    assert found.cancelled is not None and found.cancelled.why == "TIME LIMIT"
    assert found.cancelled.at == datetime(2026, 11, 21, 13, 24, 16).timestamp()
    assert all(end.told for end in found.ends)


def test_a_lost_node() -> None:
    found = job_log.read(LOST)
    assert found.lost == ("n2",) and found.cancelled is not None and found.cancelled.why == "NODE FAILURE"
    assert not found.ends[0].told  # an exit status of its own


def test_the_last_job_of_a_chain_counts() -> None:
    """Earlier jobs of a chain write to the same log."""
    both = f"hpcinit: job 1 of a chain begins\n{KILLED}hpcinit: job 2 of a chain begins\nbash: modul: not found\n"
    assert job_log.read(both) == job_log.JobLog(said=("bash: modul: not found",))


def test_the_ooms_killer() -> None:
    assert job_log.read(f"{OOM}\n{KILLED}").oom == OOM and job_log.read(KILLED).oom == ""
    assert job_log.read("srun: error: n2: task 3: Out Of Memory\n").oom


def test_the_local_engine_says_the_same() -> None:
    said = "hpcinit: error: 127.0.0.1: task 3: Exited with exit code 7"
    assert job_log.read(said).ends == (End("127.0.0.1", (3,), "Exited with exit code 7", False),)


def test_only_the_last_attempt_of_a_requeued_job_counts() -> None:
    """What ended the attempts before is over; an attempt that is refused as it begins has nothing but that word."""
    before = (
        "srun: error: n2: task 1: Killed\n"
        "slurmstepd-n1: error: *** JOB 29 ON n1 CANCELLED AT 2026-11-21T14:32:27 DUE TO JOB REQUEUE ***\n"
    )
    again = job_log.read(before + "hpcinit: restart 1 of at most 3 of job 29 begins on n[1-2]\nhello\n")
    assert (again.ends, again.cancelled, again.said) == ((), None, ("hello",))
    site = job_log.read(
        before + "hpcinit: restart 1 of job 18_1 begins on n[1-2]\nhello\n"
    )  # without restart.max_restarts
    assert site == again
    spare = job_log.read(
        before + "hpcinit: hang on n2, n3: the ranks begin again in the same job, without n2,n3\nhello\n"
    )
    assert spare == again
    word = "hpcinit: restart 3 (slurm) is not begun: 2 in a row have come no further than step 31"
    refused = job_log.read(f"{before}hpcinit: restart 2 of at most 3 of job 29 begins on n[1-2]\n{before}{word}\n")
    assert (refused.ends, refused.cancelled, refused.said) == ((), None, (word,))
    own = job_log.read(
        f"{before}hpcinit: restart 1 (failure) is not begun: restart.max_restarts is 0; furthest step: 3\n"
    )
    assert own.ends, "it ended by its own failure, which is what is told"
