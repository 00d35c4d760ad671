"""What follows the end of the ranks. The messages of srun and Slurm are those of Slurm 22.05."""

from __future__ import annotations

import pytest

from hpcinit.after import decisions
from hpcinit.after.decisions import Facts, Policy
from hpcinit.records import job_log
from hpcinit.records.requeues import Restart

KILLED = "srun: error: n2: task 3: Killed"
EXITED = "srun: error: n1: task 0: Exited with exit code 7"
BOTH = "srun: error: n[1-2]: tasks 0,2-3: Exited with exit code 1"
TERMINATED = "srun: error: n3: tasks 4-5: Terminated"
STEP = "slurmstepd: error: *** STEP 15.0 ON n1 CANCELLED AT 2026-11-22T10:00:00 ***"
ABORT = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
OTHER = ["attempt 1", "hpcinit: new attempt: job 15 of a chain starts", "slurmstepd: error: x", "a task: Killed"]
LOST = "srun: error: Node failure on n2"
JOB_LOST = "slurmstepd: error: *** JOB 15 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO NODE FAILURE ***"


def facts(status: int, lines: list[str], **more: object) -> Facts:
    failures = tuple(job_log.failures(lines))
    return Facts(status, failures, node_failed=job_log.node_failed(lines), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "failures", "nodes"),
    [
        ([], [], []),
        (OTHER, [], []),
        ([*OTHER, EXITED, KILLED], [("n1", 7), ("n2", 137)], ["n2"]),
        ([TERMINATED, EXITED], [("n3", 143), ("n1", 7)], ["n3"]),
        ([BOTH], [("n[1-2]", 1)], []),
        ([BOTH, EXITED], [("n[1-2]", 1), ("n1", 7)], ["n1"]),
        ([ABORT, STEP, TERMINATED], [("", 143), ("", 143), ("n3", 143)], ["n3"]),
        (["srun: error: n1: task 0: Segmentation fault (core dumped)"], [("n1", 139)], ["n1"]),
        (["srun: error: n1: task 0: Aborted"], [("n1", 134)], ["n1"]),
        (["srun: error: n1: task 0: Out Of Memory"], [("n1", 1)], ["n1"]),
        (["hpcinit: error: n1: rank 3: Killed"], [], []),
    ],
)
def test_failures(lines: list[str], failures: list[tuple[str, int]], nodes: list[str]) -> None:
    """Each message is an exit status, a signal or a termination. The node at fault is the first one with a signal."""
    found = facts(1, lines)
    assert [(one.host, one.status) for one in found.failures] == failures
    assert decisions.nodes_at_fault(found, "failure") == nodes
    assert decisions.nodes_at_fault(found, "hang") == []


@pytest.mark.parametrize(
    ("lines", "preempted", "status"),
    [
        ([EXITED, TERMINATED], False, 7),
        ([KILLED, TERMINATED], False, 137),
        ([STEP, EXITED], False, 143),  # the time limit, and a rank that fails because of it
        ([EXITED, TERMINATED], True, 143),
        ([], False, 143),
    ],
)
def test_the_status_of_the_rank_that_failed_first(lines: list[str], preempted: bool, status: int) -> None:
    """It is the job's, unless Slurm ended the ranks or printed nothing: then srun's own status is."""
    assert decisions.own_status(facts(143, lines, preempted=preempted)) == status
    assert decisions.own_status(facts(0, lines, preempted=preempted)) == 0


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Facts(0), ""),
        (Facts(0, stop="ended"), ""),
        (Facts(0, stop="time_limit"), "time_limit"),
        (Facts(0, stop="not_recorded"), "time_limit"),
        (Facts(1, stop="not_recorded"), "failure"),
        (Facts(0, stop="preempted"), "preempted"),
        (Facts(143, preempted=True), "preempted"),
        (Facts(0, preempted=True), ""),
        (Facts(76, lost=["n2"]), "node_fail"),
        (Facts(2, unusable=["n2"]), "node_fail"),
        (Facts(76), "hang"),
        (Facts(137, hung=[""]), "hang"),
        (Facts(137), "failure"),
        (Facts(2), ""),
    ],
)
def test_why_the_ranks_ended(found: Facts, reason: str) -> None:
    """The record of a stop counts before a lost node, a lost node before a hang, and exit status 2 is no reason."""
    assert decisions.reason(found, found.status) == reason


@pytest.mark.parametrize(
    ("found", "nodes"),
    [
        (Facts(1, lost=["n2", "n3"], unusable=["n3"], hung=["n4"]), ["n2", "n3"]),
        (Facts(76, hung=["", "n4", "n5"]), ["n4"]),
        (Facts(76, tuple(job_log.failures([EXITED]))), []),
    ],
)
def test_the_nodes_at_fault_in_a_hang_or_a_loss(found: Facts, nodes: list[str]) -> None:
    """All lost nodes; else the one that a hang report names. srun's messages do not name the node that hangs."""
    assert decisions.nodes_at_fault(found, "hang") == nodes


@pytest.mark.parametrize(
    ("found", "continues"),
    [
        (Facts(143), True),
        (Facts(0), False),
        (Facts(0, stop="time_limit"), True),
        (Facts(7), False),
        (Facts(7, stop="not_recorded"), False),
        (facts(7, [LOST]), True),
        (facts(7, [JOB_LOST]), True),
        (facts(7, ["a program: node failure"]), False),
    ],
)
def test_whether_the_next_job_of_a_chain_runs(found: Facts, continues: bool) -> None:
    """It runs after SIGTERM, after a recorded stop and after a lost node."""
    assert decisions.chain_continues(found, found.status) is continues


@pytest.mark.parametrize(
    ("last", "step", "expected"),
    [
        (None, None, (None, 0)),
        (None, 10, (10, 0)),
        ((10, 1), 11, (11, 0)),
        ((10, 1), 10, (10, 2)),
        ((10, 1), None, (10, 1)),
        ((None, 0), 0, (0, 0)),
    ],
)
def test_progress_is_a_higher_step(
    last: tuple[int | None, int] | None, step: int | None, expected: tuple[int | None, int]
) -> None:
    """A program that reports no steps is not counted."""
    before = Restart("4", 1, 0.0, "hang", *last) if last else None
    assert decisions.progress(before, step) == expected


def test_one_restart_too_many() -> None:
    """The limit of restarts, and that of restarts without progress, which may be none."""
    policy = Policy(max_restarts=2, without_progress=2)
    assert decisions.refusal(policy, 2, 10, 1) == ""
    assert decisions.refusal(policy, 3, None, 0) == "restart.max_restarts is 2; furthest step: none"
    assert "2 restarts in a row made no progress beyond step 10" in decisions.refusal(policy, 2, 10, 2)
    assert decisions.refusal(Policy(max_restarts=2), 2, 10, 99) == ""
