"""Decides what happens after the ranks have ended, from facts that facts.py collects. No function has side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcinit.records import run_folder, stop_reasons
from hpcinit.records.job_log import Failure
from hpcinit.records.requeues import Restart

USAGE = 2  # exit status after a wrong request, which a restart cannot fix
REPLACED = (run_folder.NODE_FAIL, run_folder.HANG, run_folder.FAILURE)  # reasons for which a spare node is used


@dataclass(frozen=True)
class Policy:
    """What the config allows after a failure.

    on: the value of restart.on.
    max_restarts: how often the job may be requeued; 0: never.
    without_progress: how many restarts in a row are allowed without progress; None: no limit.
    nodes: how many nodes the ranks need, if the job has spare nodes; otherwise 0.
    """

    on: frozenset[str] = frozenset()
    max_restarts: int = 0
    without_progress: int | None = None
    nodes: int = 0


@dataclass(frozen=True)
class Facts:
    """How the ranks ended.

    status: srun's exit status.
    failures: the failed ranks, in the order of srun's messages.
    stop: the reason in stopped.json, or ''.
    preempted: whether Slurm preempted the job.
    lost: nodes that are down or do not respond.
    unusable: nodes on which the node check failed, or that the fork servers could no longer reach.
    hung: for each hang report, the node at fault, or '' if it is unknown.
    node_failed: whether Slurm printed that a node failed.
    """

    status: int
    failures: Sequence[Failure] = ()
    stop: str = ""
    preempted: bool = False
    lost: Sequence[str] = ()
    unusable: Sequence[str] = ()
    hung: Sequence[str] = ()
    node_failed: bool = False


def own_status(facts: Facts) -> int:
    """Return the exit status of the rank that failed first.

    If Slurm ended the ranks, or if srun reported no failure, return srun's exit status instead.
    """
    first = next(iter(facts.failures), None)
    # In the grace time of a preemption, Slurm sends SIGTERM only to the ranks.
    if not facts.status or first is None or first.terminated or facts.preempted:
        return facts.status
    return first.status


def reason(facts: Facts, status: int) -> str:
    """Return why the ranks ended, as a value of restart.on. Return '' if a restart isn't needed or can't help.

    status: what own_status() returned.
    """
    preempted, limit = stop_reasons.Reason.PREEMPTED.token, stop_reasons.Reason.TIME_LIMIT.token
    if not status and not facts.stop:
        return ""
    if facts.stop == preempted or facts.preempted:
        return run_folder.PREEMPTED
    if facts.stop == limit or (not status and facts.stop == stop_reasons.NOT_RECORDED):
        return run_folder.TIME_LIMIT
    return _of_failure(facts, status) if status else ""


def _of_failure(facts: Facts, status: int) -> str:
    if facts.lost or facts.unusable:
        return run_folder.NODE_FAIL
    # Check the reports, too: srun returns the highest exit status, and a killed rank's is higher than a hung rank's.
    if status == run_folder.HUNG or facts.hung:
        return run_folder.HANG
    return "" if status == USAGE else run_folder.FAILURE


def nodes_at_fault(facts: Facts, why: str) -> list[str]:
    """Return the nodes that the ranks must avoid when they restart in the same job.

    Return [] if the node at fault is unknown.

    why: the result of reason().
    """
    if faulty := [*facts.lost, *facts.unusable] or [*filter(None, facts.hung)][:1]:
        return list(dict.fromkeys(faulty))
    # In a hang, the ranks that wait for others end first, so srun's messages do not name the node at fault.
    named = [one for one in facts.failures if one.host and "[" not in one.host and why != run_folder.HANG]
    # If a signal ended a rank, this rank is the cause. The others fail because this rank has died.
    return [one.host for one in [*(one for one in named if one.by_signal), *named][:1]]


def progress(last: Restart | None, step: int | None) -> tuple[int | None, int]:
    """Return the furthest step so far, and how many restarts in a row have made no progress.

    last: the previous restart, or None.
    step: the last step that the ranks reported, or None.
    """
    furthest, idle = (last.step, last.without_progress) if last else (None, 0)
    if step is None:
        return furthest, idle
    return (step, 0) if furthest is None or step > furthest else (furthest, idle + 1)


def refusal(policy: Policy, number: int, furthest: int | None, idle: int) -> str:
    """Return which limit forbids restart `number`, for a message, or '' if none does.

    furthest, idle: the result of progress().
    """
    if number > policy.max_restarts:
        step = "none" if furthest is None else furthest
        return f"restart.max_restarts is {policy.max_restarts}; furthest step: {step}"
    if policy.without_progress is not None and idle >= policy.without_progress:
        return f"{idle} restarts in a row made no progress beyond step {furthest} (restart.without_progress)"
    return ""


def chain_continues(facts: Facts, status: int) -> bool:
    """Return whether the next job of the chain should run.

    It should run in three cases:

    - Slurm or scancel ended this job: `status` is 143.
    - The program stopped before it was finished: `status` is 0, and stopped.json exists.
    - A node failed, and so did this job.

    status: this job's exit status.
    """
    if status == run_folder.ENDED_EARLY:
        return True
    return facts.node_failed if status else bool(facts.stop)
