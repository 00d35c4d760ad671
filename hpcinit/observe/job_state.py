"""Determines the state of a job from the first source that has it. The order of SOURCES is their precedence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcinit.records import run_folder
from hpcinit.slurm.queue import FINAL, KNOWN, Job

NO_REPLY = "no reply"  # the value of State.source when Slurm did not reply


class State(NamedTuple):  # as queue.Job
    """The state of one job.

    name: Slurm's state (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ...), or UNKNOWN.
    reason: why the job waits or what ended it, from Slurm. exit_status: after the end, if a source has it.
    source: which source reported the state. by_hand: the user started the script of the last attempt manually.
    link: 'job 2 of a chain of 5', or ''. others: other jobs of the chain that are still in the queue.
    restart: number of the last attempt that this job started, from its own record, or None before the first.
    away: whether the controller did not reply.
    start: when it started, or Slurm's estimate, in this machine's time ('2026-11-21T14:02:00'), or ''.
    elapsed_s, left_s: seconds since the start and until the time limit, or None if no source has them.
    folder_deleted: whether the job is in the queue although its run folder does not exist.
    """

    name: str
    job_id: str
    engine: str
    reason: str = ""
    exit_status: int | None = None
    source: str = ""
    by_hand: bool = False
    link: str = ""
    others: tuple[str, ...] = ()
    start: str = ""
    elapsed_s: int | None = None
    left_s: int | None = None
    restart: int | None = None
    away: bool = False
    folder_deleted: bool = False

    @property
    def over(self) -> bool:
        return self.name in FINAL

    @property
    def requeued(self) -> bool:
        """Return whether the job waits for another attempt after one ended. It may not have left its nodes yet."""
        waits = self.name == "PENDING" or (self.name == "COMPLETING" and self.reason == "BeginTime")
        return waits and self.restart is not None

    @property
    def is_unknown_state(self) -> bool:
        """Return whether this version of hpcinit does not know the name of the state."""
        return self.name not in KNOWN

    @property
    def purged(self) -> bool:
        """Return whether Slurm replied but does not know the job, and the job did not record its end."""
        return self.name == "UNKNOWN" and self.source == ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with `state` instead of `name`."""
        fields = self._asdict()
        return {"state": fields.pop("name"), **fields}


def of_slurm(job: Job) -> State:
    """Return the state of a job as Slurm reports it."""
    return State(
        job.state, job.job_id, "slurm", job.reason, job.exit_status, job.source,
        start=job.start, elapsed_s=job.elapsed_s, left_s=job.left_s,
    )  # fmt: skip


@dataclass(frozen=True)
class Known:
    """All information about one Slurm job.

    slurm: from squeue, sacct or scontrol, or None if Slurm does not know the job. record: from exit.json; it is
    complete if the batch script has ended. unreachable: why the controller did not reply, or ''. cancelled: returns
    whether `hpcinit cancel` recorded this job in the run folder.
    """

    slurm: State | None
    record: State
    unreachable: str = ""
    cancelled: Callable[[], bool] = lambda: False

    @property
    def ended_early(self) -> bool:
        """Return whether a signal ended the batch script. Slurm may have requeued the job."""
        return self.record.exit_status == run_folder.ENDED_EARLY

    @property
    def outlived(self) -> bool:
        """Return whether Slurm reports a state unknown to this version, although the job's script has ended."""
        return (
            self.slurm is not None and self.slurm.is_unknown_state and self.slurm.source != "sacct" and self.record.over
        )


def state_of(known: Known) -> State:
    """Return the state from the first source that has one."""
    return next(state for source in SOURCES if (state := source(known)) is not None)


def _ended(known: Known) -> State | None:
    """Return the state if Slurm reports the end. The record has the exit status, which sacct and scontrol may lack.

    Slurm 24.11 reports PREEMPTED forever for a job that was requeued in the grace time of a preemption, however its
    last attempt ends. 22.05 and 26.05 report how the last attempt ended, and so does the record.
    """
    now, record = known.slurm, known.record
    if now is None or not now.over or not record.over:
        return now if now is not None and now.over else None
    again = now.name == "PREEMPTED" and record.restart and not known.ended_early
    return now._replace(name=record.name if again else now.name, exit_status=record.exit_status)


def _in_queue(known: Known) -> State | None:
    """Return the state if the controller reports that the job waits or runs."""
    return known.slurm if known.slurm and known.slurm.source != "sacct" and not known.outlived else None


def _cancelled(known: Known) -> State | None:
    """Return CANCELLED if `hpcinit cancel` left a record and Slurm has none of the job, as without accounting."""
    lost = known.ended_early or not known.record.over
    if (known.unreachable and not known.outlived) or not lost or not known.cancelled():
        return None
    return known.record._replace(name="CANCELLED", reason="", source=run_folder.CANCELLED)


def _recorded(known: Known) -> State | None:
    """Return the end that the batch script recorded.

    If the controller is unreachable, an early end may be a requeue.
    """
    if not known.record.over or (known.unreachable and known.ended_early and not known.outlived):
        return None
    reason = f"Slurm reports {known.slurm.name}" if known.slurm and known.outlived else known.unreachable
    return known.record._replace(reason=reason)


def _accounted(known: Known) -> State | None:
    """Return sacct's state if only sacct knows the job.

    Without the controller it may be some seconds old. If the controller replied, it is wrong, so return UNKNOWN.
    """
    if known.slurm is None:
        return None
    if known.unreachable:
        return known.slurm._replace(reason=f"from sacct; {known.unreachable}")
    reason = f"sacct reports {known.slurm.name}, but the controller does not know the job"
    return State("UNKNOWN", known.record.job_id, "slurm", reason)


def _unreachable(known: Known) -> State | None:
    """Return UNKNOWN if the controller did not reply."""
    if not known.unreachable:
        return None
    return State("UNKNOWN", known.record.job_id, "slurm", known.unreachable, None, NO_REPLY)


def _purged(known: Known) -> State:
    """Return the state in the record: Slurm does not know the job, and no end is recorded."""
    return known.record


SOURCES: tuple[Callable[[Known], State | None], ...] = (
    _ended,
    _in_queue,
    _cancelled,
    _recorded,
    _accounted,
    _unreachable,
    _purged,
)
