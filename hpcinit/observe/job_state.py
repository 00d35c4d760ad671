"""The state of a run's job: what Slurm, the local engine or the run folder reports about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcinit.slurm.queue import FINAL, KNOWN, Job

NOBODY = "nobody"  # the source of a state when Slurm did not answer


@dataclass(frozen=True)
class State:
    """name: Slurm's word (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ...), or UNKNOWN.

    reason: why it waits or what ended it, as Slurm says. exit_status: once it has ended and is known.
    source: who told. by_hand: of the run's last attempt, which somebody started with the script, not hpcinit.
    link: 'job 2 of a chain of 5', or ''. others: jobs of the chain that are still in the queue beside this one.
    restart: number of the attempt that this job began last, as it says itself; None before its first.
    away: whether the controller gave no answer when it was asked.
    start: when it began or, as Slurm estimates, will, in this machine's time ('2026-11-21T14:02:00'), or ''.
    elapsed_s, left_s: since it began and until its time limit, in seconds; None where nobody says.
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

    @property
    def over(self) -> bool:
        return self.name in FINAL

    @property
    def again(self) -> bool:
        """Waits for another attempt, after one that has ended; it may not have left its nodes yet."""
        requeued = self.name == "PENDING" or (self.name == "COMPLETING" and self.reason == "BeginTime")
        return requeued and self.restart is not None

    @property
    def strange(self) -> bool:
        """A word that this version does not know."""
        return self.name not in KNOWN

    @property
    def forgotten(self) -> bool:
        """Slurm has answered, and knows nothing of the job, which left no word of its end either."""
        return self.name == "UNKNOWN" and self.source == ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self)}


def of_slurm(job: Job) -> State:
    """Return the state of a job that Slurm knows."""
    return State(
        job.state, job.job_id, "slurm", job.reason, job.exit_status, job.source,
        start=job.start, elapsed_s=job.elapsed_s, left_s=job.left_s,
    )  # fmt: skip
